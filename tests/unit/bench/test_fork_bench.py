"""`bench fork`: which figures it makes of its samples, and what it refuses to take for a forked rank."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import fork, fork_programs
from bench.__main__ import find_targets
from bench.check import check_file
from bench.record import BenchError, Figures, make_document, write_document


def samples_of(case, ranks, name, number):
    values = {
        "restart": ("s", "cpu_s"),
        "first": ("s", "cpu_s"),
        "memory": ("pss_mib", "pss_trained_mib", "cpu_s"),
    }
    factor = {"torchrun": 30.0, "exec": 30.0, "floor": 2.0, "plain": 6.0}.get(name, 3.0)
    return fork.Sample(dict.fromkeys(values[case], factor * (number + 1)), refused=ranks)


def figures_of(names=fork.CASES, private=True):
    taken = {
        (case, ranks, name): [samples_of(case, ranks, name, number) for number in range(fork.MINIMUM_ROUNDS)]
        for (case, ranks), runs in fork.cases(names, fork.SIZES).items()
        for name in runs
    }
    return fork.to_figures(taken, private)


def test_there_is_a_figure_for_each_target():
    figures = dict(figures_of())
    assert set(fork.TARGETS) <= set(figures)
    assert all(figures[name].n >= target.samples for name, target in fork.TARGETS.items())


def test_ratios_have_the_slower_side_above_and_the_floor_below():
    figures = figures_of()
    ratios = {name.removeprefix("fork."): made.value for name, made in figures if made.unit == "ratio"}
    assert ratios == {
        "restart_ratio_2": 10.0,
        "restart_vs_floor_2": 1.5,
        "first_ratio_2": 10.0,
        "first_plain_ratio_2": 5.0,
        "restart_ratio_8": 10.0,
        "restart_vs_floor_8": 1.5,
        "first_ratio_8": 10.0,
        "first_plain_ratio_8": 5.0,
        "pss_ratio_8": 10.0,
        "pss_ratio_8_trained": 10.0,
    }


def test_the_worst_run_and_the_refused_connections_are_of_all_rounds():
    figures = figures_of()
    assert figures["fork.restart_bootrun_2_worst_s"].value == 3.0 * fork.MINIMUM_ROUNDS
    assert figures["fork.restart_bootrun_2_refused"].value == 2 * fork.MINIMUM_ROUNDS


def test_refused_connections_are_not_reported_when_other_programs_make_them_too():
    assert not [name for name, _ in figures_of(private=False) if name.endswith("refused")]


def test_a_case_can_be_left_out():
    assert {name.split("_")[0] for name, _ in figures_of(["restart"])} == {"fork.restart"}


def write_events(directory, how):
    events = directory / "none_abc" / "events"
    events.mkdir(parents=True)
    lines = [{"name": "rank_started", "attrs": {"how": each}} for each in how] + [{"name": "report"}]
    (events / "agent-node.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_ranks_that_were_all_forked_pass(tmp_path):
    write_events(tmp_path, ["fork", "fork"])
    fork.check_forked(str(tmp_path), "", 2)


@pytest.mark.parametrize(
    ("how", "output"),
    [
        (["fork", "exec"], ""),
        (["fork"], ""),
        ([], ""),
        (["fork", "fork"], "bootrun: warning: ranks are exec'd, not forked: a thread\n"),
    ],
)
def test_ranks_that_were_not_all_forked_give_no_figure(tmp_path, how, output):
    write_events(tmp_path, how)
    with pytest.raises(BenchError, match="2 ranks should have been forked"):
        fork.check_forked(str(tmp_path), output, 2)


def test_memory_is_summed_over_descendants():
    program = "import subprocess; subprocess.run(['sleep', '60'])"
    job = subprocess.Popen([sys.executable, "-c", program])
    try:
        while len(found := fork.with_descendants([job.pid])) < 2:
            assert job.poll() is None
        (child,) = found - {job.pid}
        assert fork.children_of(job.pid) == [child]
        while Path(f"/proc/{child}/comm").read_text() != "sleep\n":  # until then it has its parent's memory
            assert job.poll() is None
        assert sum(map(fork.pss_mib, found)) > fork.pss_mib(job.pid) > 0
        assert not fork.find_fork_server(job.pid)
    finally:
        for pid in fork.with_descendants([job.pid]):
            os.kill(pid, 9)
        job.wait()


def test_what_a_rank_did_not_write_is_an_error(tmp_path):
    (tmp_path / "past-0-0").write_text("5 77")
    assert fork.read_moments(str(tmp_path), "past-0", 1) == [(5, 77)]
    with pytest.raises(BenchError, match="past-0: rank 1 wrote nothing"):
        fork.read_moments(str(tmp_path), "past-0", 2)


@pytest.mark.parametrize(
    ("words", "restart_s", "status"),
    [
        (["--programs", "lightning"], 1.0, 0),
        (["--programs", "lightning", "--rounds", "3"], 2.0, 1),
        (["--programs"], 1.0, 1),  # the others are not there
        ([], 1.0, 1),  # the case that has them all
    ],
)
def test_programs_have_targets_of_their_own(
    tmp_path: Path, words: list[str], restart_s: float, status: int
) -> None:
    figures = Figures()
    found = {
        "torchrun": [fork_programs.Times(10.0, 10.0, "")] * fork_programs.MINIMUM_ROUNDS,
        "bootrun": [fork_programs.Times(5.0, restart_s, "fork")] * fork_programs.MINIMUM_ROUNDS,
    }
    fork_programs.add_figures(figures, "lightning", found)
    path = os.fspath(tmp_path / "fork.json")
    write_document(path, make_document("fork", ["fork", *words], figures))
    assert check_file(path, find_targets) == status
