"""Pages of failures: bounded and readable whatever ranks have said, how sure, and what is kept on a disk."""

from __future__ import annotations

import json
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.base.facts import Hang, HangKind
from launcher.base.loop import Loop
from launcher.monitor.failure.files import FailureFiles
from launcher.monitor.failure.record import (
    FORMAT,
    MAX_PACKED_BYTES,
    NOT_OBSERVED,
    describe_failures,
    describe_hang,
    format_record,
    pack,
    unpack,
)
from launcher.ranks.cause import LostNode, order_failures
from launcher.rendezvous.messages import Failure, FailureRecordMessage
from tests.unit.launcher.jobsim import make_failure

TEXTS = st.text(max_size=200)
FAILURES = st.lists(
    st.builds(
        lambda rank, status, texts, tail, at_ns, by_us, oom: make_failure(
            rank,
            status=status,
            message=texts[0],
            traceback=texts[1],
            node=texts[2],
            stderr_tail=tuple(tail),
            kernel=tuple(tail),
            checks=tuple(tail),
            time_ns=at_ns,
            stopped_by_us=by_us,
            oom=oom,
        ),
        st.integers(0, 40),
        st.integers(-64, 255).filter(bool),
        st.tuples(TEXTS, TEXTS, TEXTS),
        st.lists(TEXTS, max_size=3),
        st.integers(0, 10**12),
        st.booleans(),
        st.sampled_from(("", "yes", "no", "maybe")),
    ),
    max_size=30,
)
LOST = st.lists(st.builds(LostNode, TEXTS, st.integers(0, 10**12), st.integers(0, 10**12)), max_size=2)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=12,
)
NAMES = st.sampled_from(
    ("stages", "others", "ranks", "rank", "stacks", "kernel", "stderr", "since_wall_s", "stopped_ranks", "why")
)


@settings(deadline=None)
@given(FAILURES, LOST)
def test_whatever_ranks_say_the_page_is_bounded_and_printable(
    failures: list[Failure], lost: list[LostNode]
) -> None:
    record = {"format": FORMAT, "number": 0, **describe_failures(order_failures(failures, lost))}
    data = pack(record)
    assert len(data) <= MAX_PACKED_BYTES
    found = unpack(data)
    assert found is not None
    assert (found["class"], found["class_sure"]) == (record["class"], record["class_sure"])
    assert found["culprit_sure"] in ("certain", "likely", "guess")
    text = format_record(found)
    assert all(line.isprintable() or "\t" in line for line in text.splitlines())
    assert text.count(NOT_OBSERVED) >= 7, "no stage was, nor what was done"


@given(st.dictionaries(NAMES, JSON, max_size=6))
def test_text_is_made_of_any_record(record: dict[str, Any]) -> None:
    assert format_record(record).endswith("\n")


@given(st.binary(max_size=200))
def test_what_is_no_page_is_none(data: bytes) -> None:
    assert unpack(data) is None
    assert unpack(zlib.compress(data)) is None


def test_what_checks_had_found_on_the_node_is_on_its_page() -> None:
    found = "fail    space /data: free (0 B, limit 105 MB); delete what is no longer needed"
    record = describe_failures(order_failures([make_failure(3, checks=(found,))], []))
    assert record["checks"] == [found]
    assert f"check      {found}" in format_record(record).splitlines()


def test_long_texts_are_cut_to_what_the_wire_takes() -> None:
    import random

    noise = "".join(chr(random.Random(1).randrange(0x4E00, 0x9FFF)) for _ in range(12_000))
    noise = "".join(random.Random(2).sample(noise * 3, 30_000))
    words = tuple(noise[at : at + 2000] for at in range(0, 30_000, 2000))
    failures = [make_failure(rank, traceback=noise, stderr_tail=words, kernel=words) for rank in range(20)]
    data = pack({"format": FORMAT, **describe_failures(order_failures(failures)), "stacks": noise})
    assert len(data) <= MAX_PACKED_BYTES
    found = unpack(data)
    assert found is not None
    assert found["traceback"].endswith(noise[-1]), "the end tells most"
    assert found["others_left_out"] == 3


KEY_ERROR = 'Traceback (most recent call last):\n  File "/job/t.py", line 4, in <module>\nKeyError: 1\n'
GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1\n"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"traceback": KEY_ERROR}, ("user", "certain", "its messages show it")),
        ({"status": -9, "oom": "yes"}, ("resource", "certain", "the kernel's log shows it")),
        ({"status": -9, "oom": "no"}, ("killed", "certain", "its signal shows it")),
        ({"status": -9, "oom": "maybe"}, ("resource", "likely", "its signal fits")),
        ({"status": -11}, ("user", "likely", "its signal fits")),
        ({"status": 7}, ("user", "guess", "nothing but the exit status")),
        ({"kernel": ("NVRM: Xid (PCI:0000:3b:00): 79",)}, ("accelerator", "certain", "the kernel's log shows it")),
        (
            {"traceback": KEY_ERROR, "kernel": ("NVRM: Xid (PCI:0000:00:06): 43, pid=7",)},
            ("user", "certain", "its messages show it"),
        ),
    ],
)
def test_how_sure_the_class_is(changes: dict[str, object], expected: tuple[str, str, str]) -> None:
    page = describe_failures(order_failures([make_failure(0, **changes)]))
    assert (page["class"], page["class_sure"]) == expected[:2]
    assert page["class_sure_why"].startswith(expected[2])


def test_how_sure_the_culprit_is() -> None:
    first = make_failure(1, time_ns=10**9, traceback=KEY_ERROR)
    victim = make_failure(0, time_ns=2 * 10**9, message=GLOO)
    page = describe_failures(order_failures([victim, first]))
    assert (page["rank"], page["culprit_sure"]) == (1, "certain")
    assert page["others"][0]["consequence_of"]
    near = [make_failure(rank, time_ns=10**9 + rank, error_ns=10**9) for rank in range(2)]
    page = describe_failures(order_failures(near))
    assert page["culprit_sure"] == "guess"
    assert "ranks 0, 1" in page["culprit_sure_why"]
    page = describe_failures(order_failures([victim]))
    assert (page["culprit_sure"], page["rank"]) == ("guess", 0)


def test_a_hang_is_certain_where_the_process_shows_it() -> None:
    frozen = describe_hang(Hang(HangKind.FROZEN, 5.0, (1,), 0.0, 1.0, "rank 1 was stopped"), "stands still")
    assert (frozen["class_sure"], frozen["culprit_sure"], frozen["rank"]) == ("certain", "certain", 1)
    idle = describe_hang(Hang(HangKind.ALL_IDLE, 5.0, (), 15.0, 1.0, "nobody works"), "stands still")
    assert (idle["class_sure"], idle["culprit_sure"], idle["rank"]) == ("likely", "guess", None)
    text = format_record({**idle, "stacks": "stacks of 2 ranks\n  wait (a.py:1)"})
    assert "no rank differs" in text
    assert "  stacks of 2 ranks\n    wait (a.py:1)" in text


# ---- on a disk -----------------------------------------------------------------------------------------------


def page_of(number: int = 0, following: int | None = 1) -> FailureRecordMessage:
    found = describe_failures(order_failures([make_failure(0)]))
    more = {"number": number, "next_attempt": following, "stages": {"seen_s": 0.5}, "action": "restart"}
    return FailureRecordMessage(number, pack({"format": FORMAT, "run_id": "r", "attempt": 0, **found, **more}))


def test_a_page_is_kept_and_gets_its_first_step_later(tmp_path: Path, loop: Loop) -> None:
    said: list[str] = []
    files = FailureFiles(loop, str(tmp_path), lambda: 0.0, said.append, time.time())
    files.keep(page_of(), 1, None)
    assert json.loads((tmp_path / "failure-0.json").read_text())["stages"] == {"seen_s": 0.5}
    assert files.last_path == str(tmp_path / "failure-0.txt")
    files.first_step(2.5)
    assert json.loads((tmp_path / "failure-0.json").read_text())["stages"]["first_step_s"] == 2.5
    assert "first step       2.500 s" in (tmp_path / "failure-0.txt").read_text()
    files.first_step(9.0)
    files.keep(page_of(1), 1, 1.5)
    assert json.loads((tmp_path / "failure-1.json").read_text())["stages"]["first_step_s"] == 1.5
    files.keep(page_of(2), 1, None)
    files.attempt_over()
    files.first_step(9.0)
    assert "first_step_s" not in json.loads((tmp_path / "failure-2.json").read_text())["stages"]
    for number, following in ((3, None), (4, 2)):
        files.keep(page_of(number, following), 3, 9.0)
        files.first_step(9.0)
        stages = json.loads((tmp_path / f"failure-{number}.json").read_text())["stages"]
        assert "first_step_s" not in stages, "it is of another attempt"
    files.close()
    assert said == []
    assert files.page_of(0) == str(tmp_path / "failure-4.txt")
    assert files.page_of(1) == "", "of which no page was kept"
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(
        f"failure-{number}.{end}" for number in range(5) for end in ("json", "txt")
    )


def test_what_cannot_be_kept_costs_one_line(tmp_path: Path, loop: Loop) -> None:
    said: list[str] = []
    files = FailureFiles(loop, str(tmp_path / "gone"), lambda: 0.0, said.append, time.time())
    files.keep(page_of(), 1, None)
    files.keep(page_of(1), 1, 2.0)
    files.keep(FailureRecordMessage(2, b"no page"), 1, None)
    files.close()
    assert said == [f"warning: the failure record cannot be written to {tmp_path}/gone: No such file or directory"]
    assert files.last_path == ""


def test_since_when_is_known_of_what_has_no_wall_clock(tmp_path: Path, loop: Loop) -> None:
    import time

    files = FailureFiles(loop, str(tmp_path), lambda: 100.0, print, time.time())
    files.keep(FailureRecordMessage(0, pack({"format": FORMAT, "since_s": 40.0, "class": "hang"})), 0, None)
    files.close()
    since_s = json.loads((tmp_path / "failure-0.json").read_text())["since_wall_s"]
    assert abs(time.time() - 60.0 - since_s) < 30.0


def test_what_torch_advises_after_an_error_of_a_gpu_is_not_what_was_wrong() -> None:
    said = (
        'Traceback (most recent call last):\n  File "/job/t.py", line 4, in <module>\n'
        "torch.AcceleratorError: CUDA error: device-side assert triggered\n"
        "Search for `cudaErrorAssert' in https://docs.nvidia.com/cuda/cuda-runtime-api for more information.\n"
        "CUDA kernel errors might be asynchronously reported at some other API call, so it might be incorrect.\n"
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n\n"
    )
    page = describe_failures(order_failures([make_failure(0, traceback=said)]))
    assert page["message"] == "torch.AcceleratorError: CUDA error: device-side assert triggered"
