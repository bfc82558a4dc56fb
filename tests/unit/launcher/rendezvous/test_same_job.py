"""Which nodes mean the same job, by what their ranks run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.rendezvous.messages import EntryDigest
from launcher.rendezvous.same_job import describe, describe_difference, is_same, plain_args
from tests.unit.launcher.jobsim import Sim, make_rules


@pytest.mark.parametrize(
    ("words", "host", "plain"),
    [
        ("--lr 1 --out runs/a", "node1", "--lr 1 --out runs/a"),
        ("--out runs/node1/x node1.log", "node1", "--out runs/{host}/x {host}.log"),
        ("--out runs/node10", "node1", "--out runs/node10"),
        ("--at node1.cluster.example:9", "node1.cluster.example", "--at {host}:9"),
        ("--node-rank 1 --machine_rank=2 --lr 1", "n", "--node-rank  --machine_rank --lr 1"),
        ("--hostname a --node_rank --flag", "n", "--hostname  --node_rank --flag"),
        ("--workers 4 --nodes 2 --group a", "n", "--workers 4 --nodes 2 --group a"),
        ("a b", "", "a b"),
    ],
)
def test_what_is_the_nodes_own_does_not_count(words: str, host: str, plain: str) -> None:
    assert " ".join(plain_args(words.split(" "), host)) == plain


def test_a_script_is_the_same_by_path_or_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"a/t.py": "one", "b/t.py": "one", "c/t.py": "two", "a/u.py": "one"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path / "a")
    base = describe("script", "t.py", ["x"], "n")
    assert is_same(base, describe("script", f"{tmp_path}/a/t.py", ["x"], "m"))
    assert is_same(base, describe("script", f"{tmp_path}/b/t.py", ["x"], "m"))
    assert not is_same(base, describe("script", f"{tmp_path}/c/t.py", ["x"], "n"))
    assert not is_same(base, describe("script", "u.py", ["x"], "n")), "another name"
    assert not is_same(base, describe("module", "t.py", ["x"], "n"))
    assert not is_same(base, describe("script", "t.py", ["y"], "n"))
    (tmp_path / "a/t.py").write_text("edited while the job runs")
    assert is_same(base, describe("script", "t.py", ["x"], "n"))


def test_modules_and_programs_are_reported_apart_by_name() -> None:
    assert is_same(describe("module", "pkg.train", [], "a"), describe("module", "pkg.train", [], "b"))
    assert not is_same(describe("module", "pkg.train", [], "a"), describe("module", "pkg.eval", [], "a"))
    assert describe("program", "no-such-program", [], "a").content == ""


def test_both_are_shown_without_their_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    one = describe("module", "train", ["--api-key", "abcdefgh", "--note", "0123456789abcdef", "--x", "a b"], "n")
    assert one.shown == "-m train --api-key (secret) --note (secret) --x 'a b'"
    long = describe("script", "t.py", ["x" * 5000], "n")
    assert len(long.shown) == 400 and long.shown.endswith("...")
    line = describe_difference("run", long._replace(shown="t.py --lr 2"), one)
    assert "another job 'run': it runs `-m train --api-key (secret)" in line and "this node `t.py --lr 2`" in line


def other(**changes: object) -> EntryDigest:
    return EntryDigest("t.py --lr 1", "p", "c", "a")._replace(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("runs", "changes", "is_refused"),
    [
        (other(), {}, False),
        (other(place="q"), {}, False),
        (other(content="d"), {}, False),
        (other(place="q", content="d"), {}, True),
        (other(args="b", shown="t.py --lr 2"), {}, True),
        (other(args="b"), {"role": "reader"}, False),
        (EntryDigest(), {}, False),
    ],
)
@pytest.mark.parametrize("when", ["gathering", "running"])
def test_who_runs_something_else_is_refused_whenever_it_comes(
    runs: EntryDigest, changes: dict[str, object], is_refused: bool, when: str
) -> None:
    sim = Sim(make_rules(min_nodes=1 if when == "running" else 2, max_nodes=1 if when == "running" else 2))
    sim.join(1, runs=other())
    sim.join(2, runs=runs, **changes)
    refusal = sim.refusal(2)
    assert (refusal is not None) is is_refused
    if refusal is not None:
        assert f"`{other().shown}`, this node `{runs.shown}`" in refusal.reason
        assert any("refused node2 (pid 102)" in str(message) for message in sim.inbox[1])


def test_nodes_may_differ_where_that_was_asked_for() -> None:
    sim = Sim(make_rules(min_nodes=2, max_nodes=2, mixed_arguments=True))
    sim.join(1, runs=other())
    sim.join(2, runs=other(args="b"))
    assert sim.ranks() == {1: 0, 2: 1}


def test_a_node_that_was_refused_does_not_say_what_the_job_runs() -> None:
    sim = Sim(make_rules(min_nodes=2, max_nodes=2))
    sim.join(1, runs=other(args="b"), run_id="another")
    sim.join(2, runs=other())
    sim.join(3, runs=other())
    assert sim.ranks() == {2: 0, 3: 1}


def test_the_working_directory_counts_where_the_script_lies_there(tmp_path: Path) -> None:
    assert (
        describe("script", "t.py", [], "n").place
        != describe("script", os.fspath(tmp_path / "t.py"), [], "n").place
    )
