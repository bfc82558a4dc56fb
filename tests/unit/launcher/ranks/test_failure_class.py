"""Classes of failures by what the kernel, the rank and its status say; and the line of the user's code."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.coordinator.machines import machine_fault
from launcher.monitor.failure.record import describe_failures, format_record
from launcher.ranks import exits, failure_class
from launcher.ranks.cause import OrderedFailures
from launcher.ranks.failure_class import (
    USER_EXCEPTIONS,
    FailureClass,
    certain_user_error,
    classify_failure,
    error_before_script,
    error_location,
    repeated_errors,
)
from launcher.ranks.report import format_report
from launcher.rendezvous.messages import MountFault
from tests.unit.launcher.jobsim import make_failure

HEAD = "Traceback (most recent call last):\n"
USERS = (
    '  File "/job/train.py", line 41, in <module>\n    main()\n  File "/job/model.py", line 7, in main\n    f()\n'
)
TORCHS = '  File "/venv/lib/python3.11/site-packages/torch/nn/module.py", line 99, in f\n    g()\n'

SAID = [
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "resource", True),
    ("RuntimeError: CUDA error: device-side assert triggered", "user", True),
    ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "accelerator", True),
    ("RuntimeError: CUDA error: an illegal memory access was encountered", "accelerator", False),
    ("RuntimeError: No CUDA GPUs are available", "accelerator", True),
    ("OSError: [Errno 28] No space left on device: '/scratch/x'", "resource", True),
    ("OSError: [Errno 122] Disk quota exceeded", "resource", True),
    ("OSError: [Errno 24] Too many open files", "resource", True),
    ("RuntimeError: can't start new thread", "resource", True),
    ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.", "resource", False),
    ("MemoryError", "resource", True),
    ("OSError: [Errno 116] Stale file handle: '/mnt/data/1'", "platform", True),
    ("OSError: [Errno 5] Input/output error", "platform", True),
    ("org.apache.hadoop.ipc.StandbyException: Operation category READ is not supported", "platform", True),
    ("socket.gaierror: [Errno -3] Temporary failure in name resolution", "network", True),
    ("OSError: [Errno 113] No route to host", "network", True),
    ("FloatingPointError: the loss is gone", "numeric", True),
    ("RuntimeError: Function 'MulBackward0' returned nan values in its 0th output.", "numeric", True),
    ("ValueError: loss is nan", "numeric", True),
    ("KeyError: 'tokens'", "user", True),
    ("RuntimeError: shapes cannot be multiplied", "user", False),
]


@pytest.mark.parametrize(("last", "kind", "is_sure"), SAID)
@pytest.mark.parametrize("by", ["error_file", "stderr"])
def test_what_a_rank_says(last: str, kind: str, is_sure: bool, by: str) -> None:
    trace = HEAD + USERS + TORCHS + last
    failure = make_failure(
        0,
        status=1,
        message=last if by == "error_file" else "",
        traceback=trace if by == "error_file" else "",
        stderr_tail=tuple(trace.splitlines()) if by == "stderr" else (),
    )
    verdict = classify_failure(failure)
    assert (verdict.kind.value, verdict.is_sure) == (kind, is_sure)
    assert verdict.why


@pytest.mark.parametrize(
    ("status", "oom", "kind", "is_sure"),
    [
        (-9, "yes", "resource", True),
        (-9, "maybe", "resource", False),
        (-9, "no", "killed", True),
        (-9, "", "killed", False),
        (-15, "", "killed", True),
        (-11, "", "user", False),
        (-7, "", "platform", False),
        (-6, "", "user", False),
        (-25, "", "resource", True),
        (77, "", "user", False),
    ],
)
def test_how_a_rank_ended(status: int, oom: str, kind: str, is_sure: bool) -> None:
    verdict = classify_failure(make_failure(0, status=status, oom=oom))
    assert (verdict.kind.value, verdict.is_sure) == (kind, is_sure)


def test_the_kernels_word_counts_more_than_the_ranks() -> None:
    said = HEAD + USERS + "KeyError: 'tokens'"
    assert classify_failure(make_failure(0, traceback=said, oom="yes")).kind is FailureClass.RESOURCE
    xid = ("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",)
    assert classify_failure(make_failure(0, traceback=said, kernel=xid)).kind is FailureClass.ACCELERATOR


XID = "NVRM: Xid (PCI:0000:00:06): {}, pid=794, name=python3, channel 0x0000000a"


@pytest.mark.parametrize(
    ("said", "number", "kind", "is_sure"),
    [
        ("torch.AcceleratorError: CUDA error: device-side assert triggered", 43, "user", True),
        ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", 31, "accelerator", False),
        ("KeyError: 1", 45, "user", True),
        ("KeyError: 1", 48, "accelerator", True),
        ("torch.AcceleratorError: CUDA error: device-side assert triggered", 119, "accelerator", True),
    ],
)
def test_what_a_program_does_wrong_on_a_gpu_is_no_fault_of_the_machine(
    said: str, number: int, kind: str, is_sure: bool
) -> None:
    """As seen on an H100: the driver logs an Xid of the program's own errors, too."""
    failure = make_failure(0, traceback=HEAD + USERS + said, kernel=(XID.format(number),))
    verdict = classify_failure(failure)
    assert (verdict.kind.value, verdict.is_sure) == (kind, is_sure)
    assert (machine_fault(failure) is not None) == (kind == "accelerator" and is_sure)


def test_another_ranks_end_is_no_error_of_the_code() -> None:
    said = "RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:8929"
    failure = make_failure(0, status=1, message=said, traceback=HEAD + USERS + said)
    verdict = classify_failure(failure)
    assert (verdict.kind, verdict.is_sure) == (FailureClass.NETWORK, False)
    assert certain_user_error(failure) == ""


def test_what_we_stopped_is_nobodys_fault() -> None:
    failure = make_failure(0, status=-15, stopped_by_us=True)
    assert classify_failure(failure).kind is FailureClass.STOPPED
    assert certain_user_error(failure) == ""


def test_nothing_is_compiled_when_a_failure_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart waits for its class."""
    for module in (exits, failure_class):
        monkeypatch.setattr(module, "_compiled", [])
    failure_class.compile_patterns()

    def compile_pattern(*_: object) -> None:
        raise AssertionError("it is late for that")

    monkeypatch.setattr(re, "compile", compile_pattern)
    lost = make_failure(0, message="client socket has timed out after 60000ms")
    assert failure_class.classify_failure(lost).kind is failure_class.FailureClass.NETWORK
    own = make_failure(0, traceback="Traceback (most recent call last):\nZeroDivisionError: division by zero")
    assert failure_class.classify_failure(own).kind is failure_class.FailureClass.USER


def test_where_is_the_innermost_line_that_is_not_of_a_package() -> None:
    failure = make_failure(0, traceback=HEAD + USERS + TORCHS + "torch.nn.BadError: no")
    assert error_location(failure) == "BadError at /job/model.py:7"
    assert error_location(make_failure(0, stderr_tail=("killed",))) == ""
    only_torch = make_failure(0, traceback=HEAD + TORCHS + "ValueError: no")
    assert error_location(only_torch) == ""


def test_of_chained_exceptions_the_first_counts() -> None:
    chained = (
        HEAD
        + USERS
        + "KeyError: 'a'\n\nDuring handling of the above exception, another exception occurred:\n\n"
        + HEAD
        + '  File "/job/other.py", line 1, in f\n    raise\nOSError: [Errno 28] No space left on device\n'
    )
    failure = make_failure(0, status=1, traceback=chained)
    assert certain_user_error(failure) == "KeyError at /job/model.py:7"


@pytest.mark.parametrize("name", sorted(USER_EXCEPTIONS))
def test_errors_of_the_code_are_certain(name: str) -> None:
    failure = make_failure(0, status=1, traceback=HEAD + USERS + f"{name}: what")
    assert certain_user_error(failure) == f"{name} at /job/model.py:7"


@pytest.mark.parametrize("last", ["RuntimeError: what", "OSError: [Errno 5] Input/output error", "SystemExit: 3"])
def test_errors_that_may_pass_are_not(last: str) -> None:
    assert certain_user_error(make_failure(0, status=1, traceback=HEAD + USERS + last)) == ""


@given(st.text(max_size=400), st.text(max_size=400), st.integers(-64, 255))
def test_anything_gives_a_class(message: str, traceback: str, status: int) -> None:
    failure = make_failure(0, status=status, message=message, traceback=traceback)
    assert classify_failure(failure).kind in FailureClass
    assert len(error_location(failure)) <= 300
    certain_user_error(failure)


DAMAGED = (MountFault("image", "/store/packs/ab: block 7 does not match its digest in the index", True),)
GONE = (MountFault("env", "block 3 did not come within 30 s", False),)


@pytest.mark.parametrize(
    ("last", "status", "kind", "is_sure"),
    [
        ("OSError: [Errno 5] Input/output error", 1, "mount", True),
        ("ImportError: /venv/x.so: cannot read file data: Input/output error", 1, "mount", True),
        ("OSError: [Errno 107] Transport endpoint is not connected: '/x'", 1, "mount", True),
        ("bootseer: cannot start /usr/bin/python3 inside the image: input/output error", 127, "mount", True),
        ("", -7, "mount", True),  # SIGBUS: a mapped file
        ("Fatal Python error: Bus error", 135, "mount", True),
        ("", 127, "mount", False),  # its words went to the console
        ("", -11, "mount", False),
        ("ModuleNotFoundError: No module named 'x'", 1, "mount", False),  # try: import ... except OSError: pass
        ("NameError: name 'x' is not defined", 1, "mount", False),
        ("RuntimeError: Failed to import transformers.models", 1, "mount", False),
        ("KeyError: 'tokens'", 1, "user", False),
        ("OSError: [Errno 28] No space left on device: '/scratch/x'", 1, "resource", True),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", 1, "resource", True),
    ],
)
@pytest.mark.parametrize("mounts", [DAMAGED, GONE])
def test_a_mount_of_ours_that_cannot_be_read(
    last: str, status: int, kind: str, is_sure: bool, mounts: tuple[MountFault, ...]
) -> None:
    trace = HEAD + USERS + TORCHS + last if last.partition(":")[0].endswith("Error") else last
    failure = make_failure(0, status=status, stderr_tail=tuple(trace.splitlines()), mounts=mounts)
    verdict = classify_failure(failure)
    assert (verdict.kind.value, verdict.is_sure) == (kind, is_sure), verdict
    assert machine_fault(failure) is None and certain_user_error(failure) == ""
    assert (repeated_errors(failure) != []) == (kind == "mount" and mounts is DAMAGED)
    if kind == "mount":
        assert verdict.why == ("the image" if mounts is DAMAGED else "the environment") + " could not be read"
    report = format_report("train.py", [failure])
    page = format_record(describe_failures(OrderedFailures((failure,), (), ())))
    for text in (report, page):
        assert mounts[0].why in text
        assert kind != "mount" or ("disk" not in text and "/dev/shm" not in text)


def test_a_victim_of_another_rank_stays_one() -> None:
    """Though its node could not read something, too."""
    said = ("RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:9",)
    assert classify_failure(make_failure(0, stderr_tail=said, mounts=GONE)).kind is FailureClass.NETWORK
    assert classify_failure(make_failure(0, stopped_by_us=True, mounts=GONE)).kind is FailureClass.STOPPED
    assert classify_failure(make_failure(0, status=-9, oom="yes", mounts=GONE)).kind is FailureClass.RESOURCE


EARLY = "Before the script's first statement:\n"
TRACE = "Traceback (most recent call last):\n"
UNREAD = '  File "/job/train.py", line 2\n    def f(:\n          ^\nSyntaxError: invalid syntax\n'
IMPORTS = TRACE + '  File "/job/train.py", line 1, in <module>\n'


@pytest.mark.parametrize(
    ("traceback", "tail", "found"),
    [
        (EARLY + UNREAD, (), "SyntaxError at /job/train.py:2"),
        ("", UNREAD.splitlines(), "SyntaxError at /job/train.py:2"),  # without rank hooks
        (IMPORTS + UNREAD.replace("train", "lib"), (), "SyntaxError at /job/lib.py:2"),
        (EARLY + "ValueError: source code string cannot contain null bytes\n", (), "text of the message"),
        ("a text of the script's own\n", (), ""),
        (IMPORTS + UNREAD.replace("/job/train.py", "<string>"), (), ""),
        (IMPORTS + UNREAD.replace("/job/train.py", "<unknown>"), (), ""),
        (IMPORTS + "KeyError: 1\n", (), ""),
        ("", (), ""),
    ],
)
def test_errors_before_the_script(traceback: str, tail: list[str], found: str) -> None:
    failure = make_failure(1, traceback=traceback, stderr_tail=tuple(tail))
    if found == "text of the message":
        failure = failure._replace(message=found)
    assert error_before_script(failure) == found
    assert error_before_script(failure._replace(stopped_by_us=True)) == ""


@pytest.mark.parametrize(
    ("status", "changes", "sure"),
    [
        (1, {"traceback": "Traceback (most recent call last):\nKeyError: 1\n"}, "certain"),
        (1, {"traceback": "Traceback (most recent call last):\nRuntimeError: x\n"}, "likely"),
        (-11, {}, "likely"),
        (7, {}, "guess"),
    ],
)
def test_report_and_page_are_as_sure_of_a_class(status: int, changes: dict[str, str], sure: str) -> None:
    failure = make_failure(0, status=status, **changes)
    record = describe_failures(OrderedFailures((failure,), (), ()))
    assert record["class_sure"] == sure
    [line] = [each for each in format_report("t.py", [failure]).splitlines() if each.startswith("  class ")]
    assert (f", {sure} (" in line) == (sure != "certain")
