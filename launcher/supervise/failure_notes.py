"""PURE: what a job notes of each failure, at its coordinator, until its page is told: moments and decisions.

Nothing is worked out while a restart is under way: that is done a moment after all ranks run again, or when the
job ends. Times are those of the coordinator's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from launcher.rendezvous.messages import Failure, FailurePage

if TYPE_CHECKING:
    from launcher.ranks.cause import LostNode
    from launcher.supervise.facts import Hang
    from launcher.supervise.watch import Finding

TELL_AFTER_S = 1.0  # ranks that have just started want the CPU
MOST_PAGES = 1000  # of a job
MOST_HEARD = 64  # failures of an attempt, whose moment is kept
MOST_DONE = 64  # lines of a page about steps
MOST_CHECKS = 16  # lines of one failure
MOST_WAITING = 16  # attempts that end one after the other before their ranks run


class _Stood(NamedTuple):
    """A standstill of an attempt."""

    hang: Hang
    found: Finding
    told_s: float


class _Broken(NamedTuple):
    """A rule over what ranks print, for which the attempt is ended."""

    kind: str
    line: str
    rank: int  # -1: none in particular
    told_s: float


class _Ended:
    """An attempt that ended by failure, and what has come after."""

    def __init__(
        self,
        number: int,
        attempt: int,
        failures: Sequence[Failure],
        lost: Sequence[LostNode],
        heard: dict[tuple[int, int], float],
        stood: _Stood | None,
        is_stood: bool,
        broken: _Broken | None,
        stop_began_s: float,
        now_s: float,
    ) -> None:
        self.number = number  # of its page
        self.attempt, self.failures, self.lost, self.heard = attempt, tuple(failures), tuple(lost), heard
        self.stood, self.is_stood, self.broken = stood, is_stood, broken
        self.stop_began_s, self.stopped_s = stop_began_s, now_s
        self.action, self.rule, self.backoff_s = "", "", 0.0
        self.mismatch = ""  # of collectives
        self.step, self.step_why = "", ""  # of the restart ladder
        self.done: list[str] = []  # what came of the steps
        self.step_stages: dict[str, float] = {}  # how long they took
        self.mended_s = now_s  # the last one was over
        self.checks: list[str] = []  # what checks of several nodes have found
        self.is_last = False
        self.sent_s: float | None = None  # the nodes were told of the next attempt
        self.running_s: float | None = None  # all its ranks have started


class FailureNotes:
    """Of one job, from its first failure on."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._count = 0
        self._heard: dict[tuple[int, int], float] = {}  # rank and pid: when the coordinator heard of its end
        self._stood: _Stood | None = None  # of the attempt at work
        self._broken: _Broken | None = None  # that ends it
        self._examined: tuple[float, list[str]] | None = None  # its post-mortem: seconds, what came of it
        self._waiting: list[_Ended] = []
        self.due_s: float | None = None  # when `take` has something

    def heard(self, failure: Failure, now_s: float) -> None:
        """A node has told of a rank's end."""
        if len(self._heard) < MOST_HEARD:
            self._heard.setdefault((failure.rank, failure.pid), now_s)

    def stood_still(
        self, attempt: int, hang: Hang, found: Finding, is_ended: bool, now_s: float
    ) -> FailurePage | None:
        """A standstill was told. Returns: its page, unless the attempt is ended by it: then it comes later."""
        stood = _Stood(hang, found, now_s)
        self._stood = None if hang.is_early else stood  # by which no attempt ends, as of one that is slow
        if is_ended:
            return None
        done = {"action": "told, with what each rank does", "rule": "--on-hang report", "next_attempt": None}
        known = {**_of_standstill(stood), **done, "stages": _seen(stood)}
        return self._page(attempt, known, self._next_number())

    def rule_broken(self, kind: str, line: str, rank: int, now_s: float) -> None:
        """A rule over what ranks print ends the attempt. Args: kind: its class; rank: -1: none in particular."""
        self._broken = _Broken(kind, line, rank, now_s)

    def examined(self, took_s: float, lines: Sequence[str]) -> None:
        """The post-mortem of the attempt that is about to be ended is over."""
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
        """Nothing of the attempt runs any more.

        Args: is_stood: it was ended because it stood still; lasts: a standstill that was told, to the end.
        """
        broken, self._broken = self._broken, None
        is_stood = is_stood and broken is None  # a rule may have that class, too
        stood, self._stood = self._stood if is_stood or lasts else None, None
        heard, self._heard = self._heard, {}
        number = self._next_number()
        last = _Ended(number, attempt, failures, lost, heard, stood, is_stood, broken, stop_began_s, now_s)
        examined, self._examined = self._examined, None
        if examined is not None:
            last.step_stages["post_mortem_s"], last.done = examined[0], examined[1][:MOST_DONE]
        self._waiting = [*self._waiting[1 - MOST_WAITING :], last]

    def called_otherwise(self, line: str) -> None:
        """Who called another collective than the rest, in the attempt that has just ended; "" for nobody."""
        if self._waiting:
            self._waiting[-1].mismatch = line

    def decided(self, action: str, rule: str, backoff_s: float = 0.0) -> None:
        """What is done about the last end of an attempt, and by which rule."""
        if self._waiting:
            last = self._waiting[-1]
            last.action, last.rule, last.backoff_s = action, rule, backoff_s

    def step(self, step: str, why: str) -> None:
        """The step of the restart ladder that is taken after the last end of an attempt."""
        if self._waiting:
            self._waiting[-1].step, self._waiting[-1].step_why = step, why

    def step_over(self, stage: str, took_s: float, lines: Sequence[str], now_s: float) -> None:
        """What was done beside starting again is over. Args: stage: its name among failure_page.STAGES."""
        if self._waiting:
            last = self._waiting[-1]
            last.step_stages[stage] = took_s
            last.done = [*last.done, *lines][:MOST_DONE]
            last.mended_s = now_s

    def early(self) -> FailurePage | None:
        """The page of the last end of an attempt with what is known by now; it comes again when all is."""
        return self._of_attempt(self._waiting[-1]) if self._waiting else None

    def checked(self, lines: Iterable[str]) -> None:
        """What checks of several nodes have found, about the last end of an attempt."""
        if self._waiting:
            last = self._waiting[-1]
            last.checks = [*last.checks, *lines][:MOST_CHECKS]

    def began(self, now_s: float) -> None:
        """The nodes were told of the next attempt."""
        self._heard.clear()
        self._stood = self._broken = self._examined = None
        if self._waiting and self._waiting[-1].sent_s is None:
            self._waiting[-1].sent_s = now_s

    def runs(self, now_s: float) -> None:
        """All ranks of it have started."""
        if self._waiting and self._waiting[-1].sent_s is not None and self._waiting[-1].running_s is None:
            self._waiting[-1].running_s = now_s
            self.due_s = now_s + TELL_AFTER_S

    def finished(self, why: str) -> None:
        """There is no other attempt, whatever was decided before, and nothing more will be known."""
        if self._waiting and self._waiting[-1].sent_s is None:
            last = self._waiting[-1]
            last.is_last, last.action, last.rule = True, "no other attempt: the job has ended", why

    def take(self) -> list[FailurePage]:
        """Pages of attempts whose recovery is over, with what is known by now; each is taken once."""
        self.due_s = None
        last = self._waiting[-1] if self._waiting else None
        is_open = last is not None and last.running_s is None and not last.is_last
        ended = self._waiting[:-1] if is_open else self._waiting
        self._waiting = self._waiting[-1:] if is_open else []
        return [page for each in ended if (page := self._of_attempt(each)) is not None]

    def _of_attempt(self, ended: _Ended) -> FailurePage | None:
        from launcher.ranks.cause import order_failures
        from launcher.supervise.failure_page import describe_broken_rule, describe_failures

        stages: dict[str, float | None]
        if ended.is_stood and ended.stood is not None:
            found, stages = _of_standstill(ended.stood), _seen(ended.stood)
        else:
            ordered = order_failures(ended.failures, ended.lost)
            broken = ended.broken
            found = (
                describe_failures(ordered)
                if broken is None
                else describe_broken_rule(broken.kind, broken.line, broken.rank, broken.told_s, ordered)
            )
            if "since_s" not in found and ended.lost:
                found["since_s"] = min(node.heard_ns for node in ended.lost) / 1e9
            heard_s = ended.heard.get((found.get("rank", -1), found.get("pid", -1)), ended.stop_began_s)
            # When a line was printed is not known, only when it was told.
            stages = {"seen_s": None if broken is not None else _after(heard_s, found.get("since_s"))}
            if ended.stood is not None:
                found |= {"standstill": ended.stood.found.line, "stacks": ended.stood.found.text}
        stages |= {
            "ranks_stopped_s": _after(ended.stopped_s, ended.stop_began_s),
            "backoff_s": None if ended.is_last else ended.backoff_s,
            "rendezvous_s": _after(ended.sent_s, max(ended.mended_s, ended.stopped_s + ended.backoff_s)),
            "spawn_s": _after(ended.running_s, ended.sent_s),
            "first_step_s": None,  # the node that keeps the page adds it
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

    def _page(self, attempt: int, found: dict[str, Any], number: int) -> FailurePage | None:
        from launcher.supervise.failure_page import FORMAT, pack

        if number >= MOST_PAGES:
            return None
        head = {"format": FORMAT, "run_id": self._run_id, "number": number, "attempt": attempt}
        return FailurePage(number, pack({**head, **found}))


def _of_standstill(stood: _Stood) -> dict[str, Any]:
    from launcher.supervise.failure_page import describe_standstill

    own = f"its own report is standstill-{stood.found.number}.txt"
    return {**describe_standstill(stood.hang, stood.found.line), "stacks": stood.found.text, "standstill": own}


def _seen(stood: _Stood) -> dict[str, float | None]:
    return {"seen_s": _after(stood.told_s, stood.hang.since_s)}


def _after(moment_s: float | None, before_s: float | None) -> float | None:
    return None if moment_s is None or before_s is None else max(0.0, moment_s - before_s)
