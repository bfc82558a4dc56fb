"""A Job on a virtual clock with simulated nodes: the shell of the state machine's tests."""

from __future__ import annotations

from typing import Any

from launcher.coordinator.job import Job, JobRules, Listen, Order, Send, Silence
from launcher.monitor.failure.record import unpack
from launcher.rendezvous.messages import (
    BACKOFF_STEP,
    DroppedFromJob,
    Examine,
    Examined,
    Failure,
    FailureRecordMessage,
    Finish,
    FromCoordinator,
    FromMember,
    Join,
    RankFailed,
    RecoveryResult,
    RecoveryStep,
    Refused,
    Started,
    StepTaken,
    Stop,
    Stopped,
    Succeeded,
    World,
)


def make_rules(**changes: object) -> JobRules:
    base = JobRules(run_id="job", min_nodes=1, max_nodes=1)
    return base._replace(**changes)  # type: ignore[arg-type]


def make_failure(rank: int, **changes: object) -> Failure:
    base = Failure(
        node=f"node{rank}",
        group_rank=rank,
        rank=rank,
        local_rank=0,
        pid=1000 + rank,
        status=3,
        time_ns=1_000_000_000,
        error_ns=0,
        wall_s=0.0,
        stopped_by_us=False,
        error_file="",
        message="",
        traceback="",
        stderr_tail=(),
    )
    return base._replace(**changes)  # type: ignore[arg-type]


class Sim:
    """Nodes that answer Stop at once unless they are in `silent`."""

    def __init__(self, rules: JobRules) -> None:
        self.rules = rules
        self.job = Job(rules)
        self.now_s = 0.0
        self.inbox: dict[int, list[FromCoordinator]] = {}
        self.listening: list[bool] = []
        self.silent: set[int] = set()
        self.alive: set[int] = set()
        self.unanswered: dict[int, list[FromCoordinator]] = {}  # of nodes that are not heard of
        self.traces: dict[int, bytes] = {}  # of collectives, of each node
        self.ended: dict[int, tuple[int, ...]] = {}  # ranks of each node that had ended with 0 before
        self.reached: tuple[int, int | None] = (-1, None)  # what nodes say of their steps when they stop
        self.mended: dict[
            tuple[int, str], RecoveryResult | None
        ] = {}  # by node and step: other answers than "well"
        self._next_port = 20000

    def join(self, node: int, host: str | None = None, **changes: object) -> None:
        join = Join(
            run_id=self.rules.run_id,
            host=host or f"node{node}",
            address=f"10.0.0.{node}",
            pid=100 + node,
            node_rank=-1,
            role="default",
            local_world_size=1,
            min_nodes=self.rules.min_nodes,
            max_nodes=self.rules.max_nodes,
            max_restarts=self.rules.max_restarts,
            master_port=self.new_port(),
            has_identity=False,
        )
        self.alive.add(node)
        self.say(node, join._replace(**changes))  # type: ignore[arg-type]

    def new_port(self) -> int:
        self._next_port += 1
        return self._next_port

    def say(self, node: int, message: FromMember) -> None:
        self._deliver(self.job.receive(node, message, self.now_s))

    def lose(self, node: int, reason: str = "connection reset") -> None:
        self.alive.discard(node)
        self.unanswered.pop(node, None)
        self._deliver(self.job.lost(node, reason, self.now_s))

    def unheard(self, node: int, how: Silence, heard_s: float | None = None) -> None:
        """Nothing is heard of a node, with a limit of 15 s; what it is told waits until it is heard of again."""
        self.unanswered.setdefault(node, [])
        since_s = self.now_s - 15.0 if heard_s is None else heard_s
        why = "closed the connection" if how is Silence.CUT else "was silent for 15 s"
        self._deliver(self.job.unheard(node, how, why, self.now_s, since_s, 15.0))

    def hear(self, node: int) -> None:
        self._deliver(self.job.heard(node, self.now_s))
        for message in self.unanswered.pop(node, []):
            self._answer(node, message)

    def fail(self, node: int, **changes: object) -> None:
        world = self.world(node)
        failure = make_failure(world.group_rank, time_ns=int(self.now_s * 1e9), **changes)
        self.say(node, RankFailed(world.attempt, failure))

    def succeed(self, *nodes: int) -> None:
        for node in nodes:
            self.say(node, Succeeded(self.world(node).attempt))

    def run_until_idle(self, max_s: float = 3600.0) -> None:
        """Lets the time pass until no tick is planned any more."""
        end_s = self.now_s + max_s
        while (moment_s := self.job.deadline_s()) is not None and moment_s <= end_s:
            self.now_s = max(self.now_s, moment_s)
            self._deliver(self.job.tick(self.now_s))

    def advance(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while (moment_s := self.job.deadline_s()) is not None and moment_s <= end_s:
            self.now_s = max(self.now_s, moment_s)
            self._deliver(self.job.tick(self.now_s))
        self.now_s = end_s

    def _deliver(self, orders: list[Order]) -> None:
        for order in orders:
            if isinstance(order, Listen):
                self.listening.append(order.on)
                continue
            self.inbox.setdefault(order.node, []).append(order.message)
        for order in orders:
            if not isinstance(order, Send):
                continue
            if isinstance(order.message, DroppedFromJob):
                self.alive.discard(order.node)
                self.unanswered.pop(order.node, None)
            if order.node in self.unanswered:
                self.unanswered[order.node].append(order.message)
            elif order.node in self.alive and order.node not in self.silent:
                self._answer(order.node, order.message)

    def _answer(self, node: int, message: FromCoordinator) -> None:
        if isinstance(message, World):
            self.say(node, Started(message.attempt, 0.01))
        elif isinstance(message, Stop):
            self.say(
                node,
                Stopped(
                    message.attempt,
                    (),
                    self.new_port(),
                    False,
                    *self.reached,
                    self.traces.get(node, b""),
                    self.ended.get(node, ()),
                ),
            )
        elif isinstance(message, Examine) and message.runs:
            self.say(node, Examined(message.attempt, 1.0, "post-mortem: well"))
        elif isinstance(message, RecoveryStep):
            well = RecoveryResult(message.attempt, message.step, True, 1.0, "well")
            answer = self.mended.get((node, message.step), well)
            if answer is not None:
                self.say(node, answer._replace(attempt=message.attempt))

    # ---- what was sent ---------------------------------------------------------------------------------------

    def worlds(self, node: int) -> list[World]:
        return [message for message in self.inbox.get(node, []) if isinstance(message, World)]

    def world(self, node: int) -> World:
        return self.worlds(node)[-1]

    def ranks(self) -> dict[int, int]:
        """Group rank by node of the newest attempt."""
        newest = max((world.attempt for node in self.inbox for world in self.worlds(node)), default=-1)
        return {
            node: world.group_rank
            for node in sorted(self.inbox)
            for world in self.worlds(node)
            if world.attempt == newest
        }

    def steps(self) -> list[tuple[int, str]]:
        """Of the restart ladder: the attempt that had failed, and the step, as they came to node rank 0."""
        told = [m for node in self.inbox for m in self.inbox[node] if isinstance(m, StepTaken)]
        told = [message for message in told if message.step != BACKOFF_STEP]
        return [(message.attempt, message.step) for message in sorted(told, key=lambda each: each.attempt)]

    def finish(self, node: int = 1) -> Finish | None:
        return next((m for m in self.inbox.get(node, []) if isinstance(m, Finish)), None)

    def pages(self, node: int = 1) -> list[dict[str, Any]]:
        """Of failures, as they came to a node."""
        found = [
            unpack(message.data)
            for message in self.inbox.get(node, [])
            if isinstance(message, FailureRecordMessage)
        ]
        return [page for page in found if page is not None]

    def refusal(self, node: int) -> Refused | None:
        return next((m for m in self.inbox.get(node, []) if isinstance(m, Refused)), None)
