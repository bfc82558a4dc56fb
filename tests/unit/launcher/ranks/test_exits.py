"""Every sign with words as the libraries print them (gloo, store: seen with torch 2.13), and no signs."""

import re
import signal
import time

import pytest

from launcher.ranks.exits import SIGNS, FailureOrigin, classify, describe_status, find_sign, signal_name

from .failing import make_failure

GLOO = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/"
STORE = """  File "/venv/lib/site-packages/torch/distributed/rendezvous.py", line 190, in _create_c10d_store
    return TCPStore(
"""

CONSEQUENCES = [
    (
        "gloo: peer closed",
        GLOO + "pair.cc:553] Connection closed by peer [127.0.0.1]:8929. This is typically caused",
    ),
    ("gloo: peer closed", GLOO + "pair.cc:600] Socket closed [127.0.0.1]:8929"),
    ("gloo: peer lost", GLOO + "pair.cc:537] Read error [127.0.0.1]:53649: Connection reset by peer. This is"),
    ("gloo: peer lost", GLOO + "pair.cc:534] readv [127.0.0.1]:53649: Connection reset by peer"),
    ("gloo: peer lost", GLOO + "pair.cc:460] write: Broken pipe"),
    ("gloo: timeout", GLOO + "unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation to complete"),
    ("gloo: timeout", GLOO + "unbound_buffer.cc:129] Timed out waiting 6000ms for send operation to complete"),
    ("gloo: timeout", GLOO + "pair.cc:1] Application timeout caused pair closure"),
    ("gloo: timeout", GLOO + "pair.cc:1] Connect timeout [127.0.0.1]:8929"),
    (
        "gloo: no connection",
        "RuntimeError: Gloo connectFullMesh failed with [x/gloo/transport/tcp/pair.cc:144] no error",
    ),
    (
        "monitored barrier: peer lost",
        "RuntimeError: Rank 2 successfully reached monitoredBarrier, but received errors while waiting for",
    ),
    ("monitored barrier: timeout", "RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 3000 ms"),
    (
        "monitored barrier: timeout",
        "RuntimeError: [Rank 0]: Ranks 1, 2 timed out in monitoredBarrier after 3000 ms.",
    ),
    (
        "NCCL: remote error",
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:317\nncclRemoteError: A call",
    ),
    (
        "NCCL: remote error",
        "NCCL error in: /x/ProcessGroupNCCL.cpp:3763, remote process exited or there was a network error, NCCL",
    ),
    (
        "NCCL: aborted",
        "DistBackendError: NCCL communicator was aborted on rank 2. Original reason for failure was: x",
    ),
    (
        "NCCL: peer closed",
        "host:1:2 [3] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer h<5>",
    ),
    (
        "NCCL: peer lost",
        "Last error:\nsocketProgressOpt: Call to recv from 172.0.0.1<33759> failed : Connection reset by peer",
    ),
    (
        "NCCL: peer lost",
        "misc/socket.cc:518 NCCL WARN Net : Call to recv from 10.200.84.247<58355> failed : Broken pipe",
    ),
    (
        "NCCL: peer lost",
        "Last error: NET/IB : Got completion from peer 11.214.147.122<39138> with error 12, opcode 0",
    ),
    (
        "NCCL: dump signal from another rank",
        "[PG ID 0 Rank 1] Observed flight recorder dump signal from another rank via TCPStore.",
    ),
    (
        "NCCL: dump signal from another rank",
        "Received a dump signal due to a collective timeout from rank 3 and we will try our best to dump",
    ),
    (
        "NCCL: timeout",
        "[rank0]:[E1218 20:27:21 ProcessGroupNCCL.cpp:629] [Rank 0] Watchdog caught collective operation timeout",
    ),
    ("NCCL: timeout", "[E ProcessGroupNCCL.cpp:455] Some NCCL operations have failed or timed out. Due to the"),
    (
        "store: peer lost",
        "[c10d] recvValue failed on SocketImpl(fd=4, addr=[::ffff:127.0.0.1]:5, remote=[x]:2): Connection",
    ),
    (
        "store: peer closed",
        "DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. Did the remote",
    ),
    ("store: peer lost", "torch.distributed.DistNetworkError: Connection reset by peer"),
    ("store: peer lost", "torch.distributed.DistNetworkError: Broken pipe"),
    ("store: peer lost", STORE + "RuntimeError: Connection reset by peer"),
    (
        "store: no connection",
        "DistNetworkError: The client socket has timed out after 60000ms while trying to connect to",
    ),
    ("store: no connection", "The client socket has failed to connect to any network address of (h, 29500)."),
    (
        "store: timeout",
        "torch.distributed.DistStoreError: wait timeout after 3000ms, keys: /default_pg/0//nothing",
    ),
    ("store: timeout", "torch.distributed.DistStoreError: Socket Timeout"),
    ("store: timeout", "DistStoreError: Timed out after 61 seconds waiting for clients. 1/2 clients joined."),
    ("store: timeout", STORE + "RuntimeError: Socket Timeout"),
]


@pytest.mark.parametrize(("what", "text"), CONSEQUENCES)
def test_signs_are_found_in_message_traceback_and_stderr(what, text):
    for failure in (
        make_failure(message=text),
        make_failure(message="E: x", traceback=f"Traceback (most recent call last):\n{text}\n"),
        make_failure(stderr_tail=tuple(f"[rank0]: {line}" for line in text.splitlines())),
    ):
        assert classify(failure) is FailureOrigin.CONSEQUENCE
        assert find_sign(failure).what == what


def test_every_sign_has_a_text():
    assert {sign.what for sign in SIGNS} == {what for what, _ in CONSEQUENCES}
    for sign in SIGNS:
        assert any(re.search(sign.pattern, text) and sign.beside in text for _, text in CONSEQUENCES), sign


def test_timeouts_are_weak():
    for sign in SIGNS:
        assert sign.weak == ("timeout" in sign.what or "no connection" in sign.what)


def test_strong_signs_come_before_weak_ones():
    text = (
        GLOO
        + "pair.cc:1] Timed out waiting 5ms for recv operation\n"
        + GLOO
        + "pair.cc:2] Connection closed by peer"
    )
    assert find_sign(make_failure(message=text)).what == "gloo: peer closed"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ValueError: boom",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "ConnectionError: ('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))",
        "botocore.exceptions.EndpointConnectionError: Connection was closed before we received a valid response",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "DistNetworkError: The server socket has failed to listen on any local network address. EADDRINUSE",
        "RuntimeError: NCCL error: unhandled cuda error",
        "TimeoutError: Timed out waiting for the data loader",
        "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.",
    ],
)
def test_other_failures_are_causes(text):
    for failure in (make_failure(message=text), make_failure(stderr_tail=tuple(text.splitlines()))):
        assert classify(failure) is FailureOrigin.CAUSE


def test_stopped_comes_before_all_else():
    assert classify(make_failure(stopped_by_us=True)) is FailureOrigin.STOPPED
    assert classify(make_failure(stopped_by_us=True, message="ncclRemoteError")) is FailureOrigin.STOPPED


LOST = f"Traceback (most recent call last):\n  ...\n{GLOO}pair.cc:553] Connection closed by peer [h]:1\n"
BOOM = "Traceback (most recent call last):\n  ...\nValueError: boom\n"
DURING = "\nDuring handling of the above exception, another exception occurred:\n\n"
DIRECT = "\nThe above exception was the direct cause of the following exception:\n\n"


@pytest.mark.parametrize("link", [DURING, DIRECT])
def test_of_chained_exceptions_the_first_counts(link):
    for first, second, kind in ((LOST, BOOM, FailureOrigin.CONSEQUENCE), (BOOM, LOST, FailureOrigin.CAUSE)):
        chain = first + link + second
        assert classify(make_failure(message="x", traceback=chain)) is kind
        assert classify(make_failure(stderr_tail=tuple(f"[rank3]: {line}" for line in chain.splitlines()))) is kind


def test_earlier_tracebacks_and_warnings_on_stderr_do_not_count():
    earlier = (LOST + "caught it, going on\n" + BOOM).splitlines()
    assert classify(make_failure(stderr_tail=tuple(earlier))) is FailureOrigin.CAUSE
    warning = (
        "[rank1]:[W1121 04:37:40.010 TCPStore.cpp:115] [c10d] recvVector failed on SocketImpl(fd=4): Connection"
    )
    assert classify(make_failure(stderr_tail=(*BOOM.splitlines(), warning))) is FailureOrigin.CAUSE
    assert classify(make_failure(stderr_tail=(warning,))) is FailureOrigin.CAUSE


def test_a_huge_text_is_searched_in_linear_time():
    start_s = time.thread_time()
    classify(make_failure(traceback="torch/distributed/ gloo/ NCCL " * 20_000 + "\n" * 2000))
    classify(make_failure(stderr_tail=("torch/distributed/ gloo/", "x] " * 200_000, _heading(3000))))
    assert time.thread_time() - start_s < 20  # quadratic: hours


def _heading(count):
    return f"Traceback (most recent call last):\nE: x\n{DURING}" * count


def test_signal_names():
    assert [signal_name(status) for status in (0, 1, -9, -11, -64, -63, -35, -200)] == [
        "",
        "",
        "SIGKILL",
        "SIGSEGV",
        "SIGRTMAX",
        "SIGRTMIN+29",
        "SIGRTMIN+1",
        "signal 200",
    ]


def test_statuses_in_words():
    assert describe_status(3) == "exit status 3"
    assert describe_status(137) == "exit status 137 (shells give this for SIGKILL)"
    assert describe_status(128) == "exit status 128"
    assert describe_status(255) == "exit status 255"
    assert describe_status(-9) == "ended by SIGKILL (perhaps out of memory: see the kernel log)"
    assert describe_status(-signal.SIGUSR1) == "ended by SIGUSR1"
