"""PURE: the coordinator's notes on each failure until its record is sent: times and decisions.

Nothing is computed during a restart: that follows a moment after all ranks run again, or at the end of the job.
Times are those of the coordinator's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from bootseer.tuning import DEFAULTS
from launcher.rendezvous.messages import Failure, FailureRecordMessage

if TYPE_CHECKING:
    from launcher.base.facts import Hang
    from launcher.monitor.watch import HangFinding
    from launcher.ranks.cause import LostNode

SEND_AFTER_S = 1.0  # ranks that have just started need the CPU
MAX_PAGES = DEFAULTS.launcher.failure_records  # of a job
MAX_REPORTED = 64  # failures of an attempt whose time is kept
MAX_DONE = 64  # lines of a record about steps
MAX_CHECKS = 16  # lines of one failure
MAX_WAITING = 16  # consecutive attempts that end before their ranks run


class _ReportedHang(NamedTuple):
    hang: Hang
    found: HangFinding
    reported_s: float


class _FiredRule(NamedTuple):
    """A log rule that ends the attempt."""

    kind: str
    line: str
    rank: int  # -1: none in particular
    reported_s: float


class _Ended:
    """An attempt that failed, and the events after it."""

    def __init__(
        self,
        number: int,
        attempt: int,
        failures: Sequence[Failure],
        lost: Sequence[LostNode],
        heard: dict[tuple[int, int], float],
        stood: _ReportedHang | None,
        is_stood: bool,
        broken: _FiredRule | None,
        stop_began_s: float,
        now_s: float,
    ) -> None:
        self.number = number  # of its record
        self.attempt, self.failures, self.lost, self.heard = attempt, tuple(failures), tuple(lost), heard
        self.stood, self.is_stood, self.broken = stood, is_stood, broken
        self.stop_began_s, self.stopped_s = stop_began_s, now_s
        self.action, self.rule, self.backoff_s = "", "", 0.0
        self.mismatch = ""  # of collectives
        self.step, self.step_why = "", ""  # of the escalation ladder
        self.done: list[str] = []  # results of the steps
        self.step_stages: dict[str, float] = {}  # their durations
        self.recovered_s = now_s  # the end of the last step
        self.checks: list[str] = []  # findings of checks of several nodes
        self.is_last = False
        self.sent_s: float | None = None  # when the nodes were sent the next attempt
        self.running_s: float | None = None  # when all its ranks had started


class FailureNotes:
    """The notes of one job, from its first failure on."""

    def __init__(self, run_id: str, max_pages: int = MAX_PAGES) -> None:
        self._run_id = run_id
        self._max_pages = max_pages
        self._count = 0
        self._received: dict[tuple[int, int], float] = {}  # rank and pid: when the coordinator got the report
        self._stood: _ReportedHang | None = None  # of the running attempt
        self._broken: _FiredRule | None = None  # the rule that ends it
        self._examined: tuple[float, list[str]] | None = None  # its post-mortem: seconds, results
        self._waiting: list[_Ended] = []
        self.due_s: float | None = None  # when `take` has something

    def heard(self, failure: Failure, now_s: float) -> None:
        """Note that a node has reported the end of a rank."""
        if len(self._received) < MAX_REPORTED:
            self._received.setdefault((failure.rank, failure.pid), now_s)

    def hang_reported(
        self, attempt: int, hang: Hang, found: HangFinding, is_ended: bool, now_s: float
    ) -> FailureRecordMessage | None:
        """Note a reported hang. Return its record, unless it ends the attempt: then the record follows later."""
        stood = _ReportedHang(hang, found, now_s)
        self._stood = None if hang.is_early else stood  # such a hang, like slow steps, ends no attempt
        if is_ended:
            return None
        done = {"action": "reported, with each rank's stacks", "rule": "--on-hang report", "next_attempt": None}
        known = {**_of_hang(stood), **done, "stages": _seen(stood)}
        return self._page(attempt, known, self._next_number())

    def rule_broken(self, kind: str, line: str, rank: int, now_s: float) -> None:
        """Note that a log rule ends the attempt. Args: kind: its class; rank: -1: none in particular."""
        self._broken = _FiredRule(kind, line, rank, now_s)

    def examined(self, took_s: float, lines: Sequence[str]) -> None:
        """Note the finished post-mortem of the attempt that is about to be ended."""
        self._examined = took_s, list(lines)

    def ended(
        self,
        attempt: int,
        failures: Sequence[Failure],
        lost: Sequence[LostNode],
        is_stood: bool,
        lasts: bool,
        stop_began_s: float,
        now_s: float,
    ) -> None:
        """Note that no process of the attempt runs any more.

        Args: is_stood: it was ended because it hung; lasts: a reported hang lasted to the end.
        """
        broken, self._broken = self._broken, None
        is_stood = is_stood and broken is None  # a rule may have that class, too
        stood, self._stood = self._stood if is_stood or lasts else None, None
        heard, self._received = self._received, {}
        number = self._next_number()
        last = _Ended(number, attempt, failures, lost, heard, stood, is_stood, broken, stop_began_s, now_s)
        examined, self._examined = self._examined, None
        if examined is not None:
            last.step_stages["post_mortem_s"], last.done = examined[0], examined[1][:MAX_DONE]
        self._waiting = [*self._waiting[1 - MAX_WAITING :], last]

    def mismatch_found(self, line: str) -> None:
        """Note which rank called another collective than the rest in the last attempt; "" for none."""
        if self._waiting:
            self._waiting[-1].mismatch = line

    def decided(self, action: str, rule: str, backoff_s: float = 0.0) -> None:
        """Note the action after the last end of an attempt, and the rule for it."""
        if self._waiting:
            last = self._waiting[-1]
            last.action, last.rule, last.backoff_s = action, rule, backoff_s

    def step(self, step: str, why: str) -> None:
        """Note the step of the escalation ladder after the last end of an attempt."""
        if self._waiting:
            self._waiting[-1].step, self._waiting[-1].step_why = step, why

    def step_over(self, stage: str, took_s: float, lines: Sequence[str], now_s: float) -> None:
        """Note that a step beside the restart is over. Args: stage: its name in record.STAGES."""
        if self._waiting:
            last = self._waiting[-1]
            last.step_stages[stage] = took_s
            last.done = [*last.done, *lines][:MAX_DONE]
            last.recovered_s = now_s

    def early(self) -> FailureRecordMessage | None:
        """Return the record of the last end of an attempt with the facts so far; a complete one follows."""
        return self._of_attempt(self._waiting[-1]) if self._waiting else None

    def checked(self, lines: Iterable[str]) -> None:
        """Note findings of checks of several nodes about the last end of an attempt."""
        if self._waiting:
            last = self._waiting[-1]
            last.checks = [*last.checks, *lines][:MAX_CHECKS]

    def began(self, now_s: float) -> None:
        """Note that the nodes were sent the next attempt."""
        self._received.clear()
        self._stood = self._broken = self._examined = None
        if self._waiting and self._waiting[-1].sent_s is None:
            self._waiting[-1].sent_s = now_s

    def runs(self, now_s: float) -> None:
        """Note that all its ranks have started."""
        if self._waiting and self._waiting[-1].sent_s is not None and self._waiting[-1].running_s is None:
            self._waiting[-1].running_s = now_s
            self.due_s = now_s + SEND_AFTER_S

    def finished(self, why: str) -> None:
        """Note that no attempt follows, despite earlier decisions, and that no more facts will come."""
        if self._waiting and self._waiting[-1].sent_s is None:
            last = self._waiting[-1]
            last.is_last, last.action, last.rule = True, "no other attempt: the job has ended", why

    def take(self) -> list[FailureRecordMessage]:
        """Return records of attempts whose recovery is over, with the facts so far; each is returned once."""
        self.due_s = None
        last = self._waiting[-1] if self._waiting else None
        is_open = last is not None and last.running_s is None and not last.is_last
        ended = self._waiting[:-1] if is_open else self._waiting
        self._waiting = self._waiting[-1:] if is_open else []
        return [page for each in ended if (page := self._of_attempt(each)) is not None]

    def _of_attempt(self, ended: _Ended) -> FailureRecordMessage | None:
        from launcher.monitor.failure.record import describe_broken_rule, describe_failures
        from launcher.ranks.cause import order_failures

        stages: dict[str, float | None]
        if ended.is_stood and ended.stood is not None:
            found, stages = _of_hang(ended.stood), _seen(ended.stood)
        else:
            ordered = order_failures(ended.failures, ended.lost)
            broken = ended.broken
            found = (
                describe_failures(ordered)
                if broken is None
                else describe_broken_rule(broken.kind, broken.line, broken.rank, broken.reported_s, ordered)
            )
            if "since_s" not in found and ended.lost:
                found["since_s"] = min(node.received_ns for node in ended.lost) / 1e9
            heard_s = ended.heard.get((found.get("rank", -1), found.get("pid", -1)), ended.stop_began_s)
            # The time of printing a line is unknown, only that of the report.
            stages = {"seen_s": None if broken is not None else _after(heard_s, found.get("since_s"))}
            if ended.stood is not None:
                found |= {"standstill": ended.stood.found.line, "stacks": ended.stood.found.text}
        stages |= {
            "ranks_stopped_s": _after(ended.stopped_s, ended.stop_began_s),
            "backoff_s": None if ended.is_last else ended.backoff_s,
            "rendezvous_s": _after(ended.sent_s, max(ended.recovered_s, ended.stopped_s + ended.backoff_s)),
            "spawn_s": _after(ended.running_s, ended.sent_s),
            "first_step_s": None,  # the node that keeps the record adds it
        }
        stages |= ended.step_stages
        if ended.checks:
            found = {**found, "checks": [*found.get("checks", ()), *ended.checks]}
        following = None if ended.is_last else ended.attempt + 1
        if ended.mismatch:
            found["collectives"] = ended.mismatch
        done = {"action": ended.action, "rule": ended.rule, "next_attempt": following, "stages": stages}
        steps = {"step": ended.step, "step_why": ended.step_why, "steps_done": ended.done}
        return self._page(ended.attempt, {**found, **done, **steps}, ended.number)

    def _next_number(self) -> int:
        number, self._count = self._count, self._count + 1
        return number

    def _page(self, attempt: int, found: dict[str, Any], number: int) -> FailureRecordMessage | None:
        from launcher.monitor.failure.record import FORMAT, pack

        if number >= self._max_pages:
            return None
        head = {"format": FORMAT, "run_id": self._run_id, "number": number, "attempt": attempt}
        return FailureRecordMessage(number, pack({**head, **found}))


def _of_hang(stood: _ReportedHang) -> dict[str, Any]:
    from launcher.monitor.failure.record import describe_hang

    own = f"separate report: standstill-{stood.found.number}.txt"
    return {**describe_hang(stood.hang, stood.found.line), "stacks": stood.found.text, "standstill": own}


def _seen(stood: _ReportedHang) -> dict[str, float | None]:
    return {"seen_s": _after(stood.reported_s, stood.hang.since_s)}


def _after(moment_s: float | None, before_s: float | None) -> float | None:
    return None if moment_s is None or before_s is None else max(0.0, moment_s - before_s)
