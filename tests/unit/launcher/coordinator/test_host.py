"""The host of a job that loads a checkpoint: an attempt waits until its version is known, once for all nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from launcher.base.loop import Loop
from launcher.coordinator.host import JobHost
from launcher.coordinator.job import Job, JobRules
from launcher.rendezvous.messages import (
    EventBatch,
    EventsDropped,
    Failure,
    Finish,
    FromCoordinator,
    Join,
    Leave,
    Listens,
    MasterListens,
    Pinned,
    RankFailed,
    Refused,
    Signalled,
    Stopped,
    Succeeded,
    WantEvents,
    Welcome,
    World,
)

FIRST, SECOND = Pinned("1", "aa"), Pinned("2", "bb")


class Bed:
    """Nodes at one host; `asked` are the callbacks of the versions that it waits for."""

    def __init__(self, nodes: int = 2, least: int | None = None) -> None:
        self.asked: list[Callable[[Pinned | None, str], object]] = []
        self.least, self.most = nodes if least is None else least, nodes
        rules = JobRules("run", self.least, self.most, max_restarts=3, backoff_s=0)
        self.host = JobHost(Loop(), Job(rules), resolve=self.asked.append)
        self.got: list[list[FromCoordinator]] = []
        self.nodes: list[int] = []
        for number in range(nodes):
            self.join(number)

    def join(self, number: int) -> None:
        self.got.append([])
        self.nodes.append(self.host.attach(self.got[number].append))
        who = Join(
            "run", f"host{5000 + number}", "h", 1, -1, "default", 1, self.least, self.most, 3, 5000 + number, False
        )
        self.host.receive(self.nodes[number], who)

    def kinds(self, node: int) -> list[type]:
        return [type(message) for message in self.got[node] if type(message).__name__ != "Welcome"]

    def last(self, node: int, kind: type) -> Any:
        return [message for message in self.got[node] if isinstance(message, kind)][-1]


def test_an_attempt_waits_for_its_version() -> None:
    bed = Bed()
    assert len(bed.asked) == 1
    assert World not in bed.kinds(0) + bed.kinds(1)
    bed.asked.pop()(FIRST, "")
    assert [bed.last(node, World).checkpoint for node in (0, 1)] == [FIRST, FIRST]


def test_it_is_asked_for_again_before_each_attempt() -> None:
    bed = Bed()
    bed.asked.pop()(FIRST, "")
    failure = Failure("host5000", 0, 0, 0, 7, 3, 1, 0, 0.0, False, "", "", "", ())
    bed.host.receive(bed.nodes[0], RankFailed(0, failure))
    assert bed.asked == []  # a save may still be under way
    bed.host.receive(bed.nodes[0], Stopped(0, (failure,), 5002, False))
    bed.host.receive(bed.nodes[1], Stopped(0, (), 5003, False))
    bed.asked.pop()(SECOND, "")
    assert [bed.last(node, World) for node in (0, 1)] == [
        bed.last(node, World)._replace(attempt=1, checkpoint=SECOND) for node in (0, 1)
    ]


def test_a_signal_ends_the_job_while_it_is_looked_for() -> None:
    """Nobody has begun: there is nothing to stop, and nothing to wait for."""
    bed = Bed()
    bed.host.receive(bed.nodes[1], Signalled(15))
    for node in (0, 1):
        assert bed.kinds(node) == [Finish]
        assert bed.last(node, Finish).status == 143
    bed.asked.pop()(None, "no answer within 60 s")
    assert bed.kinds(0) == [Finish]
    assert bed.host.job.deadline_s() is None


def test_a_signal_ends_a_job_on_one_node_while_it_is_looked_for() -> None:
    bed = Bed(nodes=1)
    bed.host.receive(bed.nodes[0], Signalled(2))
    assert bed.kinds(0) == [Finish]
    assert bed.last(0, Finish).status == 130


def test_a_node_that_goes_meanwhile_does_not_take_the_others_with_it() -> None:
    """The attempt of those that stay is another one; the version is the one that is being looked for."""
    bed = Bed(least=1)
    bed.host.lost(bed.nodes[0], "gone")
    assert bed.kinds(1) == []
    assert len(bed.asked) == 1  # nobody has trained since it was asked
    bed.asked.pop()(FIRST, "")
    assert bed.kinds(1) == [World]
    world = bed.last(1, World)
    assert (world.attempt, world.group_world_size, world.checkpoint) == (1, 1, FIRST)
    assert bed.kinds(0) == []


def test_a_node_that_leaves_meanwhile_gets_no_world() -> None:
    bed = Bed(least=1)
    bed.host.receive(bed.nodes[0], Leave("stopped by SIGTERM"))
    bed.asked.pop()(FIRST, "")
    assert bed.kinds(0) == []
    assert bed.kinds(1) == [World]


def test_when_all_have_gone_the_answer_is_for_nobody_and_the_next_attempt_asks_again() -> None:
    bed = Bed(nodes=1)
    bed.host.lost(bed.nodes[0], "gone")
    bed.asked.pop()(FIRST, "")
    bed.join(1)
    bed.asked.pop()(SECOND, "")
    assert bed.kinds(0) == []
    assert bed.last(1, World).checkpoint == SECOND


def test_what_is_no_start_does_not_wait() -> None:
    """A node that comes meanwhile is welcomed at once."""
    bed = Bed()
    bed.join(2)
    assert isinstance(bed.got[2][0], Welcome)


def test_a_version_that_cannot_be_found_ends_the_job() -> None:
    bed = Bed()
    bed.asked.pop()(None, "hdfs://nn/ckpt: no answer within 30 s")
    assert World not in bed.kinds(0)
    assert [bed.last(node, Finish)[:2] for node in (0, 1)] == [(1, "hdfs://nn/ckpt: no answer within 30 s")] * 2


def test_the_job_can_end_while_it_is_looked_for() -> None:
    bed = Bed()
    bed.host.lost(bed.nodes[0], "gone")
    bed.host.lost(bed.nodes[1], "gone")
    bed.asked.pop()(None, "too late")
    assert bed.kinds(0) == []


def test_ranks_may_have_to_look_for_themselves() -> None:
    bed = Bed()
    bed.asked.pop()(None, "")
    assert bed.last(0, World).checkpoint is None


class Sink:
    """Takes events, and writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def joined(self, node: int, host: str) -> None:
        self.told.append(("joined", node, host))

    def left(self, node: int) -> None:
        self.told.append(("left", node))

    def receive(self, node: int, batch: EventBatch) -> None:
        self.told.append(("batch", node))


BATCH = EventBatch(b"", 0, 0, 0, 0, 0, EventsDropped(0, 0, 0, 0))


def test_events_are_asked_for_before_ranks_and_taken_after_the_end() -> None:
    sink = Sink()
    host = JobHost(Loop(), Job(JobRules("run", 1, 1)), events=sink)
    got: list[FromCoordinator] = []
    node = host.attach(got.append)
    host.receive(node, Join("run", "a", "h", 1, -1, "default", 1, 1, 1, 0, 5000, False))
    assert [type(message) for message in got] == [Welcome, WantEvents, World]
    host.receive(node, BATCH)
    host.receive(node, Succeeded(0))
    host.receive(node, BATCH)
    assert isinstance(got[-1], Finish)
    assert sink.told == [("joined", node, "a"), ("batch", node), ("batch", node)]


def test_who_is_refused_or_lost_sends_no_events() -> None:
    sink = Sink()
    host = JobHost(Loop(), Job(JobRules("run", 2, 2)), events=sink)
    got: list[FromCoordinator] = []
    stranger = host.attach(got.append)
    host.receive(stranger, Join("other", "a", "h", 1, -1, "default", 1, 2, 2, 0, 5000, False))
    assert [type(message) for message in got] == [Refused]
    node = host.attach(lambda _: None)
    host.receive(node, Join("run", "b", "h", 1, -1, "default", 1, 2, 2, 0, 5000, False))
    host.lost(node, "gone")
    assert sink.told == [("joined", stranger, "a"), ("left", stranger), ("joined", node, "b"), ("left", node)]


def test_that_rank_0_listens_is_passed_on_to_the_others() -> None:
    bed = Bed(3)
    bed.asked.pop()(FIRST, "")
    bed.host.receive(bed.nodes[0], Listens(0))
    assert [bed.kinds(node).count(MasterListens) for node in range(3)] == [0, 1, 1]
    assert bed.last(1, MasterListens) == MasterListens(0)
    bed.host.lost(bed.nodes[0], "gone")
    bed.host.receive(bed.nodes[0], Listens(0))
    assert bed.kinds(2).count(MasterListens) == 1


def test_who_has_not_rank_0_of_the_attempt_cannot_say_that_it_listens() -> None:
    """Else a node could make the others give up waiting, now and in attempts to come."""
    bed = Bed(3)
    bed.host.receive(bed.nodes[0], Listens(0))  # no attempt has begun
    bed.asked.pop()(FIRST, "")
    for node, attempt in ((1, 0), (2, 0), (0, 1), (0, 1 << 30), (0, -1)):
        bed.host.receive(bed.nodes[node], Listens(attempt))
    assert [bed.kinds(node).count(MasterListens) for node in range(3)] == [0, 0, 0]
