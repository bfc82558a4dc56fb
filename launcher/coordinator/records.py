"""PURE: the failure records of a job: their notes, from the first failure on, and the node that writes them."""

from __future__ import annotations

from bootseer.light_typing import TYPE_CHECKING, Callable

if TYPE_CHECKING:
    from bootseer.tuning import LauncherTuning
    from launcher.coordinator.nodes import JobNodes
    from launcher.coordinator.orders import Outbox
    from launcher.monitor.failure.notes import FailureNotes
    from launcher.rendezvous.messages import FailureRecordMessage


class JobRecords:
    def __init__(self, run_id: str, nodes: JobNodes, outbox: Outbox, limits: Callable[[], LauncherTuning]) -> None:
        self._run_id = run_id
        self._limits = limits
        self._nodes = nodes
        self._outbox = outbox
        self.notes: FailureNotes | None = None  # from the first failure on
        self.skews: dict[str, str] = {}  # lines about clocks that differ now, by node

    def take_notes(self) -> FailureNotes:
        """Return the notes; begin them if this is the first failure."""
        if self.notes is None:
            from launcher.monitor.failure.notes import FailureNotes

            self.notes = FailureNotes(self._run_id, self._limits().failure_records)
        return self.notes

    def decided(self, action: str, rule: str, backoff_s: float = 0.0) -> None:
        """Record the action after the failure of the attempt."""
        if self.notes is not None:
            self.notes.decided(action, rule, backoff_s)

    def finished(self, reason: str) -> None:
        """Record the end of the job, and send the remaining records."""
        if self.notes is not None:
            self.notes.finished(reason)
            self._send(self.notes)

    def deadline_s(self) -> float | None:
        """Return when `tick` has records to send."""
        return None if self.notes is None else self.notes.due_s

    def tick(self, now_s: float) -> None:
        """Send the records that are due."""
        if self.notes is not None and self.notes.due_s is not None and now_s >= self.notes.due_s:
            self._send(self.notes)

    def _send(self, notes: FailureNotes) -> None:
        for page in notes.take():
            self.keep(page)

    def keep(self, page: FailureRecordMessage) -> None:
        """Send a failure record to the node with rank 0, or to the next one that is left."""
        if at_work := self._nodes.in_rank_order():
            self._outbox.send(at_work[0], page)
