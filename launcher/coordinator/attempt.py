"""PURE: one attempt of a job at its coordinator: what its nodes have reported, its failures and their order.

A new object for each attempt, so nothing of an earlier one remains. Between attempts it is the last one.
"""

from __future__ import annotations

from bootseer.light_typing import TYPE_CHECKING, Iterable, NamedTuple
from launcher.rendezvous import messages

if TYPE_CHECKING:
    from launcher.ranks.cause import LostNode, OrderedFailures

MAX_EARLY = 64  # reported ranks
MAX_LOST_REPORTED = 8  # lost nodes of an attempt that are reported to all others


class AttemptEnd(NamedTuple):
    """Why an attempt must end."""

    reason: str
    node: int | None = None  # with the rank that failed first; None: no rank has failed


class NodeLoss(NamedTuple):
    """The loss of a node that took part in an attempt."""

    host: str
    what: str  # the node and why
    heard_s: float
    noticed_s: float


class AttemptFailures:
    """The failed ranks and lost nodes of one attempt."""

    def __init__(self) -> None:
        self.ranks: list[messages.Failure] = []
        self.lost: list[NodeLoss] = []
        self.early: list[int] = []  # ranks that had ended with 0 before the attempt was stopped
        self.traces: list[bytes] = []  # of collectives
        self.mismatch = ""  # ranks with other collectives than the rest
        self._known: set[tuple[int, int]] = set()  # rank and pid
        self._ordered: tuple[tuple[int, int], OrderedFailures, list[messages.Failure]] | None = (
            None  # see `_order_all`
        )

    def add(self, failures: Iterable[messages.Failure]) -> None:
        """Add failed ranks that are not known yet."""
        for failure in failures:
            key = (failure.rank, failure.pid)
            if key not in self._known:
                self._known.add(key)
                self.ranks.append(failure)

    @property
    def has_own(self) -> bool:
        """Whether a rank has failed by itself."""
        return any(not failure.stopped_by_us for failure in self.ranks)

    def conclude(self) -> None:
        """Complete the failures once no rank runs: add the early ranks to failures of ranks that lost a peer."""
        if self.early:
            from launcher.ranks.exits import FailureOrigin, classify

            early = tuple(sorted(self.early)[:MAX_EARLY])
            self.ranks = [
                failure._replace(early=early) if classify(failure) is FailureOrigin.CONSEQUENCE else failure
                for failure in self.ranks
            ]
            self._ordered = None

    def find_mismatch(self) -> None:
        """Set `mismatch` from the traces of collectives."""
        if self.traces:
            from launcher.monitor.watch import find_mismatch

            self.mismatch, self.traces = find_mismatch(self.traces), []

    def order(self) -> OrderedFailures:
        """Return the failures in the order of their causes."""
        return self._order_all()[0]

    def first(self) -> list[messages.Failure]:
        """Return the failures that may have been the first."""
        return self._order_all()[1]

    def _order_all(self) -> tuple[OrderedFailures, list[messages.Failure]]:
        """Return the ordered failures and those that may have been the first; cached until one is added."""
        key = len(self.ranks), len(self.lost)
        if self._ordered is None or self._ordered[0] != key:
            from launcher.ranks.cause import order_failures

            ordered = order_failures(tuple(self.ranks), self.lost_nodes())
            unsure = frozenset(ordered.unsure)
            first = [each for each in ordered.failures if each.rank in unsure] or list(ordered.failures[:1])
            self._ordered = key, ordered, first
        return self._ordered[1:]

    def lost_nodes(self) -> list[LostNode]:
        """Return the lost nodes with the times of their last messages."""
        if not self.lost:
            return []
        from launcher.ranks.cause import LostNode

        return [LostNode(loss.host, int(loss.heard_s * 1e9), int(loss.noticed_s * 1e9)) for loss in self.lost]

    def describe_first(self, world_size: int) -> str:
        """Return the suffix of a log line about the first failure, "" for none."""
        from launcher.ranks.report import describe_first

        ordered = self.order()
        first = describe_first(ordered.failures, ordered.unsure, 0 if self.lost else world_size)
        return ": " + "; ".join(filter(None, [self.mismatch, first])) if first else ""


class Attempt:
    """One attempt; number -1 while the first one is not started."""

    def __init__(self, number: int = -1, now_s: float = 0.0, nodes: int = 0, digest: str = "") -> None:
        """Args: nodes: how many take part; digest: of their environment, "" if it is not compared."""
        self.number = number
        self.running_since_s = now_s
        self.unstarted = nodes  # nodes whose ranks have not started
        self.digest = digest
        self.succeeded: set[int] = set()  # nodes whose ranks have succeeded
        self.failures = AttemptFailures()
        self.gone: list[str] = []  # nodes that were lost while no rank ran on them, and why
        self.reported_losses = 0
        self.end_reason = ""  # why it ends although no rank has failed
        self.end_class = ""  # class of that failure
        self.is_again = False  # it ends because its checkpoint cannot be loaded
        self.port_was_taken = False
        self.steps = -1  # maximum of a rank; -1: unknown
        self.step: int | None = None  # the highest number that a rank has reported
        self.waited_s = 0.0  # before the stop, for failures at the same line
        self.examining_s = 0.0  # how long the post-mortem has taken
        self.stop_began_s = 0.0

    @property
    def lived_s(self) -> float:
        """How long its ranks have run; the time of post-mortem and stopping does not count."""
        return self.stop_began_s - self.examining_s - self.running_since_s

    def node_started(self, now_s: float) -> bool:
        """Note that the ranks of a node have started. Returns: whether those of all nodes have."""
        self.running_since_s = max(self.running_since_s, now_s)
        self.unstarted -= 1
        return not self.unstarted

    def node_stopped(self, message: messages.Stopped) -> None:
        """Note the report of a node that has stopped its ranks."""
        self.port_was_taken |= message.port_was_taken
        self.steps = max(self.steps, message.steps)
        if message.step is not None:
            self.step = message.step if self.step is None else max(self.step, message.step)
        self.failures.add(message.failures)
        if message.traces:
            self.failures.traces.append(message.traces)
        self.failures.early += message.ended

    def describe_lost(self) -> str:
        """Return the suffix of a message about lost nodes, "" for none."""
        lost = [*(loss.what for loss in self.failures.lost[:MAX_LOST_REPORTED]), *self.gone]
        return "; lost: " + "; ".join(lost) if lost else ""

    def describe_end(self) -> str:
        return self.end_reason or "; ".join(filter(None, ["ranks failed", self.failures.mismatch]))


def signal_name(signum: int) -> str:
    """Return SIGTERM for 15; real-time signals have no name."""
    from signal import Signals

    try:
        return Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def describe_failure(failure: messages.Failure) -> str:
    """Return the rank and how it has ended."""
    if failure.status < 0:
        how = f"was ended by {signal_name(-failure.status)}"
    else:
        how = f"exited with status {failure.status}"
    return f"rank {failure.rank} on {failure.node} (pid {failure.pid}) {how}"
