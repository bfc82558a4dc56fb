"""The host of a job that loads a checkpoint: an attempt waits until its version is known, once for all nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from launcher.job import Job, JobRules
from launcher.loop import Loop
from launcher.rendezvous.host import JobHost
from launcher.rendezvous.messages import (
    Failure,
    Finish,
    FromCoordinator,
    Join,
    Pinned,
    RankFailed,
    Signalled,
    Stop,
    Stopped,
    World,
)

FIRST, SECOND = Pinned("1", "aa"), Pinned("2", "bb")


def join(port: int) -> Join:
    return Join("run", f"host{port}", "h", 1, -1, "default", 1, 2, 2, 3, port, False)


class Bed:
    """Two nodes at one host; `asked` are the callbacks of the versions that it waits for."""

    def __init__(self) -> None:
        self.asked: list[Callable[[Pinned | None, str], object]] = []
        self.host = JobHost(
            Loop(), Job(JobRules("run", 2, 2, max_restarts=3, backoff_s=0)), resolve=self.asked.append
        )
        self.got: list[list[FromCoordinator]] = [[], []]
        self.nodes = [self.host.attach(messages.append) for messages in self.got]
        for number, node in enumerate(self.nodes):
            self.host.receive(node, join(5000 + number))

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


def test_what_comes_meanwhile_waits_and_keeps_its_order() -> None:
    bed = Bed()
    bed.host.receive(bed.nodes[1], Signalled(15))
    assert Stop not in bed.kinds(0)
    bed.asked.pop()(FIRST, "")
    assert bed.kinds(0)[-2:] == [World, Stop]


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
