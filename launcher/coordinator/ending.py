"""PURE: the end of one attempt: the post-mortem command, if requested, and the stop of its ranks.

In: why it ends, answers of nodes, lost nodes, the time. Out: orders to nodes, and when to stop the ranks. A new
object for each attempt that does not end by success of all ranks.
"""

from __future__ import annotations

from bootseer.counted import counted
from bootseer.light_typing import TYPE_CHECKING
from launcher.coordinator.attempt import AttemptEnd, signal_name
from launcher.coordinator.nodes import NodeState
from launcher.coordinator.state import JobState, Phase
from launcher.rendezvous.messages import Examine, Examined, Note, Refused, Stop

if TYPE_CHECKING:
    from launcher.coordinator.recovery_steps import PendingAnswers

# Time for a node, on top of its ranks' grace, to reap unkillable processes and to answer.
STOP_MARGIN_S = 12.0
HURRY_S = 2.0  # maximum grace after a second signal


class AttemptEnding:
    def __init__(self, state: JobState) -> None:
        self._state = state
        self._rules, self._nodes, self._outbox = state.rules, state.nodes, state.outbox
        self._post_mortem: PendingAnswers[Examined] | None = None  # while it runs
        self._stop_by_s: float | None = None  # while ranks are being stopped
        self.reason = ""  # of the stop after the post-mortem

    def deadline_s(self) -> float | None:
        """Return when the post-mortem is over, or the nodes must have stopped, at the latest."""
        return self._stop_by_s if self._post_mortem is None else self._post_mortem.until_s

    # ---- the post-mortem command -----------------------------------------------------------------------------

    def examine(self, end: AttemptEnd, now_s: float) -> None:
        """Run the post-mortem command on the node of the failed rank; on all nodes if no rank has failed."""
        from launcher.coordinator.recovery_steps import PendingAnswers

        limit_s = self._rules.steps.post_mortem_s
        at_work = {
            number: node
            for number, node in self._nodes.by_number.items()
            if node.state is not NodeState.WAITING and number not in self._nodes.silent
        }
        asked = {number: node.join.host for number, node in at_work.items() if end.node in (None, number)}
        self._state.phase, self.reason = Phase.EXAMINING, end.reason
        self._post_mortem = PendingAnswers(asked, limit_s, now_s)
        for number in at_work:
            self._outbox.send(number, Examine(self._state.attempt.number, limit_s, number in asked))

    def examine_too(self, number: int, now_s: float) -> None:
        """Run the post-mortem command on one more node whose rank has failed, if it runs at all."""
        asked = self._post_mortem
        left_s = 0.0 if asked is None else asked.left_s(now_s)
        if asked is not None and left_s and asked.add(number, self._nodes.by_number[number].join.host):
            self._outbox.send(number, Examine(self._state.attempt.number, left_s, True))

    def answered(self, number: int, message: Examined) -> None:
        """Handle the result of the post-mortem command on a node."""
        if self._post_mortem is not None:
            self._post_mortem.answered(number, message)

    def lost(self, number: int) -> None:
        """Handle the loss of a node."""
        if self._post_mortem is not None:
            self._post_mortem.lost(number)

    def is_examined(self, now_s: float) -> bool:
        """Return whether the post-mortem is over now; if so, record its results."""
        asked = self._post_mortem
        if asked is None or (now_s < asked.until_s and not asked.is_over):
            return False
        lines = [f"{host}: {answer.text}" for host, answer in asked.answers]
        lines += [f"{host}: no result of the post-mortem command in time" for host in asked.silent]
        attempt = self._state.attempt
        attempt.examining_s = now_s - asked.began_s
        self._state.records.take_notes().examined(attempt.examining_s, lines)
        return True

    # ---- the stop --------------------------------------------------------------------------------------------

    def stop(self, reason: str, signum: int, now_s: float) -> None:
        """Order all nodes with ranks to stop them."""
        attempt, grace_s = self._state.attempt, self._rules.grace_s
        self._state.phase = Phase.STOPPING
        self._post_mortem = None
        attempt.stop_began_s = now_s - attempt.waited_s
        self._stop_by_s = now_s + grace_s + STOP_MARGIN_S
        for number, node in self._nodes.by_number.items():
            if node.state is not NodeState.WAITING:
                self._nodes.set_state(node, NodeState.STOPPING)
                self._outbox.send(number, Stop(attempt.number, signum, grace_s, reason))

    def signal_again(self, number: int, signum: int, *, is_second: bool) -> None:
        """Pass on a signal that a node got while ranks are being stopped; a second one shortens their time."""
        grace_s = min(HURRY_S, self._rules.grace_s) if is_second else self._rules.grace_s
        count = self._nodes.counts[NodeState.STOPPING]
        self._outbox.send(number, Note(f"waiting for {counted(count, 'node')} to stop"))
        order = Stop(self._state.attempt.number, signum, grace_s, f"stopped by {signal_name(signum)}")
        for each, node in self._nodes.by_number.items():
            if node.state is NodeState.STOPPING:
                self._outbox.send(each, order)

    def is_late(self, now_s: float) -> bool:
        """Return whether the time for the stop is over."""
        return self._stop_by_s is not None and now_s >= self._stop_by_s

    def refuse_late(self, number: int) -> None:
        """Refuse a node that has not stopped in time; the caller removes it."""
        self._outbox.send(
            number, Refused(1, "this node did not stop its ranks in time; the job continues without it")
        )

    def stopped(self) -> None:
        """Note that all ranks have ended."""
        self._stop_by_s = None
