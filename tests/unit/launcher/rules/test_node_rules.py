"""The rules of a node as they run: what is read at a look, when the next one comes; nothing harms the job."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.ranks.output.logs import RankLogs
from launcher.rendezvous.messages import RuleFired, RuleObservation
from launcher.rules import node_rules
from launcher.rules.engine import MetricValue
from launcher.rules.known import BUILTIN_RULES
from launcher.rules.node_rules import MAX_LOOK_BYTES, NodeRules, Reported, describe_unseen
from launcher.rules.rule import Rule
from tests.unit.launcher.fake_loop import FakeLoop


class Node:
    """Two ranks that write to files, and what is told of them."""

    def __init__(self, folder: Path, ranks: int = 2) -> None:
        self.folder, self.loop = folder, FakeLoop()
        self.found: list[RuleFired | RuleObservation] = []
        self.said: list[str] = []
        self.measured: list[MetricValue] = []
        self.ranks = [
            SimpleNamespace(
                rank=rank,
                logs=RankLogs(f"{folder}/{rank}.out", f"{folder}/{rank}.err", False, False, ""),
                events_file=f"{folder}/{rank}.jsonl",
            )
            for rank in range(ranks)
        ]
        world = SimpleNamespace(attempt=0, world_size=ranks, group_world_size=1)
        self.group: Any = SimpleNamespace(ranks=self.ranks, world=world, is_stopping=False)
        self.rules: NodeRules | None = None

    def begin(self, *rules: Rule) -> NodeRules:
        loop: Any = self.loop
        told = Reported(self.found.append, self.said.append, self.measured.append)
        self.rules = NodeRules(loop, self.group, rules, told)
        return self.rules

    def write(self, rank: int, text: str) -> None:
        with (self.folder / f"{rank}.out").open("a") as file:
            file.write(text)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    if made.rules is not None:
        made.rules.stop()


FATAL = Rule("fatal", "FATAL", "restart")
STEPS = Rule("steps", "step", must_recur_within_s=5.0)
LOSS = Rule("loss", r"loss=(?P<loss>\S+)", metric="loss", must_be_finite=True)


def test_what_is_written_is_reported(node: Node) -> None:
    node.write(1, "FATAL: before the first look\n")
    node.begin(FATAL, *BUILTIN_RULES)
    assert node.found == [RuleFired(0, "fatal", "", "restart", 1, "'FATAL: before the first look'")]
    node.write(0, "step 1\nOSError: [Errno 28] No space left on device\n")
    node.loop.advance(1.5)
    assert node.found[1:] == [
        RuleFired(0, "disk-full", "resource", "report", 0, "'OSError: [Errno 28] No space left on device'")
    ]


def test_what_comes_no_more(node: Node) -> None:
    node.write(0, "step 1\n")
    node.write(1, "step 1\n")
    rules = node.begin(STEPS)
    node.loop.advance(3.0)
    node.write(0, "step 2\n")
    rules.rank_ended(node.ranks[1])  # type: ignore[arg-type]
    node.loop.advance(4.0)
    assert node.found == []
    node.loop.advance(3.0)
    (late,) = node.found
    assert isinstance(late, RuleFired) and late.rank == 0


def test_nothing_is_late_while_ranks_are_ended(node: Node) -> None:
    node.write(0, "step 1\n")
    rules = node.begin(STEPS, FATAL, FATAL._replace(name="last", action="give-up"))
    node.group.is_stopping = True
    node.loop.advance(20.0)
    node.write(0, "FATAL\n")
    rules.rank_ended(node.ranks[0])  # type: ignore[arg-type]
    (last,) = node.found
    assert isinstance(last, RuleFired) and last.rule == "last", "only what forbids to start again"


def test_a_flood_is_skipped_with_one_line(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    monkeypatch.setattr(
        node_rules.RuleEngine, "read", lambda _self, _rank, lines, *_: read.append(sum(map(len, lines))) or []
    )
    node.begin(FATAL)
    for _ in range(3):
        node.write(0, "x" * 99 + "\n" + ("y" * 99 + "\n") * 20_000)
        node.loop.advance(15.0)
    assert len(read) == 3 and all(0 < each <= MAX_LOOK_BYTES for each in read)
    assert len(node.said) == 1
    assert "log rules skip part of the ranks' output" in node.said[0]


def test_after_a_dear_look_the_next_one_comes_later(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s = iter([0.0, 0.04, 1.0, 1.0, 2.0, 3.0])
    monkeypatch.setattr(node_rules.time, "process_time", lambda: next(clock_s))
    node.begin(FATAL)
    assert node.loop.planned[0][0] == pytest.approx(4.0), "a hundredth of a core"
    node.loop.advance(4.0)
    assert node.loop.planned[0][0] == pytest.approx(5.0)
    node.loop.advance(1.0)
    assert node.loop.planned[0][0] == pytest.approx(15.0), "but no longer than this"


def test_numbers_are_kept_now_and_then(node: Node) -> None:
    node.begin(LOSS)
    for step in range(25):
        node.write(0, f"loss={step}\n")
        node.loop.advance(1.0)
    assert [each.value for each in node.measured] == [0.0, 10.0, 20.0]


def test_lines_for_rules_about_any_rank_are_reported_now_and_then(node: Node) -> None:
    node.begin(STEPS._replace(ranks="any", must_recur_within_s=100.0))
    for step in range(25):
        node.write(step % 2, f"step {step}\n")
        node.loop.advance(1.0)
    assert node.found == [RuleObservation(0, "steps", "watch")] + [RuleObservation(0, "steps", "match")] * 3


def test_the_coordinator_is_reported_when_a_node_sees_nothing_for_a_rule(node: Node) -> None:
    rules: Any = node.begin(STEPS._replace(ranks="any"))
    rules._limit.run = lambda _work: None
    node.write(0, "step 1\n")
    node.loop.advance(2.0)
    assert node.found == [RuleObservation(0, "steps", "watch"), RuleObservation(0, "steps", "blind")]


def test_a_node_that_does_not_see_all_its_ranks_does_not_watch(node: Node) -> None:
    node.ranks[1].logs = RankLogs(None, None, False, False, "")
    node.write(0, "step 1\n")
    node.begin(STEPS._replace(ranks="any"))
    assert node.found == [RuleObservation(0, "steps", "match")]


def test_what_fails_here_ends_the_rules_alone(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("what")

    monkeypatch.setattr(node_rules.RuleEngine, "read", fail)
    rules = node.begin(FATAL)
    node.write(0, "step\n")
    node.loop.advance(30.0)
    assert node.said == ["warning: log rules disabled for this attempt: ZeroDivisionError: what"]
    rules.rank_ended(node.ranks[0])  # type: ignore[arg-type]


def test_a_log_that_cannot_be_read_is_reported_of(tmp_path: Path) -> None:
    node = Node(tmp_path / "none", 1)
    rules = node.begin(FATAL)
    assert node.said == [
        "warning: log rules disabled for rank 0: its log cannot be read: No such file or directory"
    ]
    assert node.loop.planned == []
    rules.stop()


def test_output_that_no_rule_can_see() -> None:
    def line(*logs: RankLogs) -> str:
        return describe_unseen([SimpleNamespace(logs=each) for each in logs])  # type: ignore[misc]

    files = RankLogs("o", "e", False, False, "")
    assert line(files, files) == ""
    assert "on stdout and stderr that" in line(RankLogs(None, None, False, False, ""))
    assert "on stderr that" in line(files, files._replace(stderr_path="/dev/null"))


def beat(node: Node, rank: int, step: int, loss: float) -> None:
    text = "".join(
        [
            (
                '{"v":1,"stage":null,"kind":"scalar","name":"heartbeat",'
                f'"value":{step},"attrs":{{"loss":{json.dumps(str(loss) if loss != loss else loss)},"lr":0.1}}}}\n'
            ),
            '{"v":1,"stage":"import","kind":"begin","name":"torch"}\n{"torn\n',
        ]
    )
    with (node.folder / f"{rank}.jsonl").open("a") as file:
        file.write(text)


def test_a_loss_that_is_reported_by_heartbeat_and_jumps(node: Node) -> None:
    node.begin(*BUILTIN_RULES)
    assert not (node.folder / "0.jsonl").exists(), "the rank makes it"
    for step in range(12):
        beat(node, 0, step, 2.0 - step / 100)
        node.loop.advance(1.0)
    beat(node, 0, 12, 40.0)  # once
    for step in range(13, 20):
        beat(node, 0, step, 1.9)
    node.loop.advance(1.0)
    assert node.found == []
    for step in range(20, 40):
        beat(node, 0, step, 20.0)
        node.loop.advance(1.0)
    (found,) = node.found
    assert isinstance(found, RuleFired) and (found.rule, found.kind, found.rank) == (
        "heartbeat-loss-jumps",
        "numeric",
        0,
    )
    assert "loss is 20: more than 5 times its usual 1.9" in found.text and "5 times in a row" in found.text
    assert node.measured == [], "the event is there already"


def test_a_loss_of_a_heartbeat_that_is_no_number(node: Node) -> None:
    node.begin(*BUILTIN_RULES)
    beat(node, 1, 7, float("nan"))
    node.loop.advance(1.5)
    (found,) = node.found
    assert isinstance(found, RuleFired) and (found.rule, found.rank) == ("heartbeat-not-a-number", 1)


def test_without_log_files_heartbeats_are_still_read(node: Node) -> None:
    for rank in node.ranks:
        rank.logs = RankLogs(None, None, False, False, "")
    node.begin(STEPS._replace(ranks="any"), *BUILTIN_RULES)
    assert node.found == [], "nobody says that it watches what it cannot see"
    for step in range(30):
        beat(node, 0, step, 1.0 if step < 20 else 9.0)
    node.loop.advance(1.5)
    assert [each.rule for each in node.found] == ["heartbeat-loss-jumps"]
