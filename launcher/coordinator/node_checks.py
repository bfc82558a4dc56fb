"""PURE: checks that involve several nodes of a job: the network between them, and their clocks.

In: answers and clock readings of nodes, the time. Out: requests to nodes, and findings, sent to nodes. A test's
named nodes are for machines.py to exclude. Only jobs with such checks load this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bootseer.health.limits import Limits
from launcher.coordinator.state import JobState
from launcher.rendezvous.messages import CheckReport, ClockReading, PairPort, PairResult

if TYPE_CHECKING:
    from bootseer.health.finding import Finding
    from launcher.coordinator.clock_skew import ClockWatch
    from launcher.coordinator.network_test import JobNetworkTest

MAX_CHECKS_TO_ALL = 64  # findings between nodes that are sent to all nodes; the rest only to the affected node


class NodeChecks:
    """The checks between the nodes of one job."""

    def __init__(self, state: JobState) -> None:
        self._state = state
        self._nodes, self._outbox = state.nodes, state.outbox
        self._limits = Limits()._replace(**dict(state.rules.check_limits))
        self._test: JobNetworkTest | None = None  # while it runs
        self._clocks: ClockWatch | None = None  # from the first message about a clock on

    # ---- the network between nodes ---------------------------------------------------------------------------

    @property
    def is_testing(self) -> bool:
        """Whether a network test runs."""
        return self._test is not None

    def begin_test(self, now_s: float) -> None:
        """Begin a network test between the nodes of the last attempt; `conclude_test` follows."""
        from launcher.coordinator.network_test import JobNetworkTest

        number = 2 * self._state.attempt.number
        self._test = JobNetworkTest(number, self._nodes.placed_hosts(), self._limits, now_s)

    def receive(self, number: int, message: PairPort | PairResult, now_s: float) -> None:
        """Handle an answer of a node."""
        if self._test is not None:
            self._test.receive(number, message, now_s)

    def deadline_s(self) -> float | None:
        """Return when to call `tick`."""
        return None if self._test is None else self._test.deadline_s

    def tick(self, now_s: float) -> None:
        """Handle the end of the time for answers."""
        if self._test is not None:
            self._test.tick(now_s)

    def conclude_test(self) -> dict[int, str] | None:
        """Send the test's requests; if it is over, send its findings.

        Returns: what it has found about single nodes, by node; None if no test is over.
        """
        test = self._test
        if test is None:
            return None
        for request in test.take():
            self._outbox.send(request.node, request.message)
        if not test.is_over:
            return None
        self._test = None
        owners = {id(found): node for node, found in test.named.items()}
        for place, found in enumerate(test.findings):
            self._send(found, owners.get(id(found)), to_all=place < MAX_CHECKS_TO_ALL)
        notes = self._state.records.notes
        if notes is not None:
            notes.checked(found.line() for found in test.findings)
        return {number: f"network: {found.what}" for number, found in test.named.items()}

    def cancel_test(self) -> None:
        """End the test without findings."""
        self._test = None

    # ---- clocks ----------------------------------------------------------------------------------------------

    def compare_clocks(self, number: int, message: ClockReading) -> None:
        """Handle the wall clock time of a node."""
        if self._clocks is None:
            from launcher.coordinator.clock_skew import ClockWatch

            self._clocks = ClockWatch(self._limits)
        if not self._clocks.said(number, message.wall_ns, message.job_ns, message.error_ns):
            return
        skews = self._state.records.skews
        for change in self._clocks.look(self._nodes.placed_hosts()):
            found = change.finding
            if change.is_over:
                skews.pop(found.where, None)
            else:
                skews[found.where] = found.line()
            self._send(found, None, change.is_over)

    def lost(self, number: int, now_s: float) -> None:
        """Handle the loss of a node; `conclude_test` follows."""
        if self._clocks is not None:
            self._clocks.lost(number)
        if self._test is not None:
            self._test.lost(number, now_s)

    def _send(self, found: Finding, own: int | None, is_over: bool = False, *, to_all: bool = True) -> None:
        """Send a finding to all nodes, or only to `own`, the affected one."""
        numbers = self._nodes.by_number.keys()
        for number in numbers if to_all else numbers & {own}:
            self._outbox.send(number, CheckReport(number == own, is_over, *found))
