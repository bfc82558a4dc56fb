"""What bench faults takes for words about a fault, in what launchers print."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.faults_said import Reader, Word, kept_report, ranks_of_report, read_ranks
from launcher.monitor.samples.stacks import name_ranks
from launcher.ranks.rank_list import format_ranks
from launcher.ranks.report import describe_first, format_report
from tests.unit.launcher.jobsim import make_failure

BOX = "Root Cause (first observed failure):"


def read(text: str, launcher: str = "bootrun") -> list[Word]:
    reader = Reader(launcher)
    return [word for line in text.splitlines() for word in reader.read(line, 1.0)]


@pytest.mark.parametrize(
    ("line", "class_", "ranks", "nodes"),
    [
        ("stopping attempt 0: rank 3 on node2 (pid 71) exited with status 1", "", (3,), ()),
        ("stopping attempt 1: lost node node2 (pid 9, node rank 1): silent for 15 s", "node", (), ("node2",)),
        ("error: the job hangs (all-idle): no rank has made a step for 17 s", "hang", (), ()),
        ("error: the coordinator at 10.77.3.1:29511 is gone: it closed", "node", (), ("10.77.3.1",)),
        (
            "error: rule 'loss' (numeric): the job (rank 3 prints it): loss is nan: 'step 512 loss=nan'",
            "numeric",
            (),
            (),
        ),
        ("stopping attempt 0: rule 'late': nothing that fits came within 60 s", "", (), ()),
        ("error: ranks failed after 3 restarts", "", (), ()),
    ],
)
def test_lines(line: str, class_: str, ranks: tuple[int, ...], nodes: tuple[str, ...]) -> None:
    [word] = read(f"bootrun: {line}")
    assert (word.class_, word.ranks, word.nodes) == (class_, ranks, nodes)
    assert read(line) == [], "a rank may print anything"


@pytest.mark.parametrize(
    "line",
    [
        "bootrun: attempt 1 starts: 4 ranks on 2 nodes",
        "bootrun: no secret is set: any host that reaches the endpoint can join this job",
        "bootrun: restart 1 of 3",
        "[rank0]:step 20 loss 0.3",
        "",
    ],
)
def test_what_is_about_no_fault(line: str) -> None:
    assert read(line) == []


def test_a_restart_as_bootrun_says_it() -> None:
    failures = [make_failure(2, status=-9, oom="no"), make_failure(0)]
    [word] = read(f"bootrun: restart 1 of 3: {describe_first(failures)}")
    assert (word.class_, word.ranks) == ("killed", (2,))
    [word] = read(
        f"bootrun: restart 2 of 3 in 4 s (it failed early 3 times in a row): {describe_first(failures, [0, 2])}"
    )
    assert (word.class_, word.ranks) == ("killed", (0, 2))


def test_the_final_report_as_bootrun_prints_it() -> None:
    said = read(format_report("train.py", [make_failure(1, message="MemoryError: no"), make_failure(3)]))
    assert [(word.class_, word.ranks) for word in said] == [("resource", (1,))]
    said = read(format_report("train.py", [make_failure(1), make_failure(3)], unsure=[1, 3]))
    assert [(word.class_, word.ranks) for word in said] == [("user", (1, 3))]


def test_torchrun() -> None:
    text = "E failed (exitcode: 1) local_rank: 1 (pid: 7) of binary: python\n" + "\n".join(
        [BOX, "[0]:", "  time      : 1", "  host      : node2", "  rank      : 3 (local_rank: 1)", "=" * 60]
    )
    assert [(word.class_, word.ranks) for word in read(text, "torchrun")] == [("", ()), ("", (3,))]
    assert read("rank 3 trains on\n", "torchrun") == []


@given(st.sets(st.integers(0, 200), min_size=1, max_size=20))
def test_ranks_are_read_as_they_are_written(ranks: set[int]) -> None:
    assert read_ranks(format_ranks(ranks)) == tuple(sorted(ranks))
    if ", ..." not in name_ranks(ranks):
        assert read_ranks(name_ranks(ranks)) == tuple(sorted(ranks))


def test_the_report_of_a_hang() -> None:
    line = "error: the job hangs (frozen): rank 1 is stopped (/tmp/x/logs/none_a/standstill-0.txt)"
    assert kept_report(line) == "/tmp/x/logs/none_a/standstill-0.json"
    assert kept_report("error: the job hangs (frozen): rank 1 (report not saved in /x: no)") == ""
    assert ranks_of_report('{"ranks": [3, 1]}') == (1, 3)
    assert ranks_of_report('{"ranks": [], "causes": [{"ranks": [2]}, {"ranks": [0]}]}') == (2,)
    assert ranks_of_report('{"ranks": [1], "causes": []}') == (1,)
    for broken in ("{}", "[]", "{", '{"ranks": ["x"]}'):
        with pytest.raises(ValueError):
            ranks_of_report(broken)
