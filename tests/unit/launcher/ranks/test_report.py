"""The final report: torchrun's box and fields, ours besides, and everything bounded."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.ranks import report
from launcher.ranks.rank_list import format_ranks
from launcher.ranks.report import describe_first, format_report

from .failing import make_failure

CLOSED = "RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:8929"
TRACE = 'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\n    f()\nValueError: boom\n'


def test_one_failure():
    failure = make_failure(3, traceback=TRACE, message="ValueError: boom", error_file="/logs/3/error.json")
    text = format_report("train.py", [failure])
    lines = text.splitlines()
    assert lines[0] == "=" * len(lines[0])
    assert lines[1] == "train.py FAILED"
    assert lines[3:5] == ["Failures:", "  <NO_OTHER_FAILURES>"]
    assert lines[6:8] == ["Root Cause (first observed failure):", "[0]:"]
    assert re.fullmatch(r"  time      : \d{4}-\d\d-\d\d_\d\d:\d\d:\d\d\.250", lines[8])
    assert lines[9:] == [
        "  host      : host0",
        "  rank      : 3 (local_rank: 3)",
        "  exitcode  : 1 (pid: 1003) ",
        "  error_file: /logs/3/error.json",
        "  attempt   : 0 (node 0)",
        "  class     : user (ValueError at a.py:3)",
        "  traceback : Traceback (most recent call last):",
        '    File "a.py", line 3, in <module>',
        "      f()",
        "  ValueError: boom",
        lines[0],
    ]


def test_the_failures_page_is_named_in_the_box():
    text = format_report("train.py", [make_failure(1), make_failure(2)], page="/logs/\x1b[2Jfailure-0.txt")
    (line,) = [line for line in text.splitlines() if line.startswith("  record")]
    assert line == r"  record    : /logs/\x1b[2Jfailure-0.txt"
    assert text.index("Root Cause") < text.index(line) < text.rindex("  traceback : ")
    assert "page  " not in format_report("train.py", [make_failure(1)])


@pytest.mark.parametrize("status", [1, -9, -11, -15])
@pytest.mark.parametrize("with_file", [True, False])
def test_every_line_of_torchruns_report_is_there(tmp_path, status, with_file):
    errors = pytest.importorskip("torch.distributed.elastic.multiprocessing.errors")
    path = tmp_path / "error.json"
    if with_file:
        extra = {"py_callstack": TRACE, "timestamp": "1700000000"}
        path.write_text(json.dumps({"message": {"message": "ValueError: boom", "extraInfo": extra}}))
    theirs = {rank: errors.ProcessFailure(rank, 1000 + rank, status, str(path)) for rank in (0, 1)}
    for failure in theirs.values():
        failure.timestamp = 1_700_000_000
    theirs[1].timestamp += 1
    said = {"message": "ValueError: boom", "traceback": TRACE, "error_file": str(path)} if with_file else {}
    import socket

    ours = [
        make_failure(rank, node=socket.getfqdn(), status=status, wall_s=1_700_000_000 + rank, **said)
        for rank in (0, 1)
    ]
    text = format_report("train.py", ours)
    left = text.splitlines()
    for line in filter(str.strip, errors.ChildFailedError("train.py", theirs).format_msg().splitlines()):
        while left and not left[0].startswith(line):
            del left[0]
        assert left, f"{line!r} is not in\n{text}"
        del left[0]


def test_signals_are_named_with_care():
    text = format_report("t", [make_failure(status=-9)])
    assert "  exitcode  : -9 (pid: 1000)  (SIGKILL)\n" in text
    assert "Signal 9 (SIGKILL) received by PID 1000; perhaps out of memory" in text


def test_stderr_is_shown_when_there_is_no_traceback():
    text = format_report("t", [make_failure(stderr_tail=("one", "Segmentation fault"))])
    assert "  traceback : <N/A>\n  stderr    : (its last lines)\n  one\n  Segmentation fault\n" in text
    text = format_report("t", [make_failure(stderr_tail=("one",), traceback=TRACE)])
    assert "stderr" not in text


def test_consequences_are_marked_and_stopped_ranks_are_one_line():
    failures = [make_failure(2), make_failure(0, message=CLOSED)]
    failures += [make_failure(rank, stopped_by_us=True, status=-15) for rank in (1, 3, 4, 5)]
    text = format_report("t", failures, attempt=4)
    assert "  kind      : consequence of another rank's end (gloo: peer closed)\n" in text
    assert "  stopped by bootrun after that: ranks 1, 3-5\n" in text
    assert text.count("exitcode") == 2
    assert "  attempt   : 4 (node 0)\n" in text


def test_doubts_are_said():
    text = format_report(
        "t", [make_failure(7, error_ns=4_000_000), make_failure(3)], (3, 7), lost_nodes=("host9",)
    )
    assert "  cannot determine which of ranks 3, 7 was first\n" in text
    assert "  lost node that may have failed first: host9\n" in text
    assert "(its order among nodes is known to 4 ms)" in text


def test_a_rank_that_may_have_failed_after_a_node_was_lost() -> None:
    text = format_report("t", [make_failure(7)], (7,), lost_nodes=("host9",))
    assert "  cannot determine whether rank 7 was first\n  lost node that may have failed first: host9\n" in text


def test_only_stopped_ranks():
    text = format_report("t", [make_failure(1, stopped_by_us=True)])
    assert "Root Cause (first observed failure):\n  <NONE: bootrun stopped all ranks>\n" in text
    assert "stopped by bootrun after that: rank 1\n" in text


def test_all_is_bounded():
    long = make_failure(0, traceback="\n".join("x" * 10_000 for _ in range(5_000)))
    others = [make_failure(rank, stderr_tail=("y" * 5000,) * 200) for rank in range(1, 4000)]
    text = format_report("s" * 300, [long, *others])
    assert len(text) < 500_000
    assert max(map(len, text.splitlines())) < 500
    assert "lines left out ..." in text
    assert "  and 3983 more: ranks 17-3999\n" in text
    assert len(text.splitlines()[0]) == 60


def test_control_characters_do_not_reach_the_terminal():
    text = format_report("t", [make_failure(traceback="a\x1b[2Jb\x07\ttab\rnext é")])
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "a\\x1b[2Jb\\x07\ttab\n  next é" in text


@given(st.sets(st.integers(0, 60)))
def test_rank_lists_say_every_rank_once(ranks):
    text = format_ranks(ranks)
    if "..." in text:
        return
    read = []
    for part in text.split(", ") if text else []:
        low, _, high = part.partition("-")
        read += range(int(low), int(high or low) + 1)
    assert read == sorted(ranks)


def test_bad_times_do_no_harm():
    assert "<N/A>" in report.format_report("t", [make_failure(wall_s=float("nan"))])
    assert "<N/A>" in report.format_report("t", [make_failure(wall_s=1e300)])


def test_the_first_failure_in_a_line():
    first = make_failure(3, node="node-b", traceback=TRACE, message="ValueError: boom")
    other = make_failure(0, node="node-a", message=CLOSED)
    line = "rank 3 on node-b failed first (exit status 1); class user (ValueError at a.py:3)"
    assert describe_first([first, other]) == line
    killed = describe_first([make_failure(1, node="node-a", status=-9, oom="no")])
    assert killed.startswith("rank 1 on node-a failed first (SIGKILL); class killed (SIGKILL, and not")
    assert describe_first([first, other], [0, 3]).startswith("ranks 0, 3 failed first, in an unknown order")
    assert describe_first([make_failure(3, stopped_by_us=True)]) == ""
    assert describe_first([]) == ""
    assert "\x1b" not in describe_first([make_failure(3, node="\x1b[31m", status=1)])


def test_all_ranks_that_fail_alike_are_named_together():
    """A missing module, a typing error: whoever came to it first is no culprit."""
    alike = [make_failure(rank, traceback=TRACE, message="ValueError: boom") for rank in range(4)]
    assert describe_first(alike, world_size=4).startswith(
        "ranks 0-3 failed alike, all ranks of the job; class user (ValueError at a.py:3)"
    )
    whole = format_report("t", alike, unsure=(0, 1), world_size=4)
    assert "  ranks 0-3 failed alike: all ranks of the job\n" in whole
    for other in (
        make_failure(3, traceback=TRACE.replace("line 3", "line 4"), message="ValueError: boom"),
        make_failure(3, stopped_by_us=True, traceback=TRACE, message="ValueError: boom"),
        make_failure(3, message=CLOSED),
    ):
        assert describe_first([*alike[:3], other], world_size=4).startswith("rank 0 on host0 failed first")
    for some, world_size in ((alike[:1], 1), (alike, 8), (alike, 0)):
        assert describe_first(some, world_size=world_size).startswith("rank 0"), "not all there are"
    lost = format_report("t", alike, unsure=(0, 1), lost_nodes=("b",), world_size=4)
    assert "cannot determine which of ranks 0, 1 was first" in lost
