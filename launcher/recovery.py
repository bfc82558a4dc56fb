"""PURE: what is done between the end of a failed attempt and the next one: steps of the restart ladder, taken.

In: what has failed, answers of the nodes, the time. Out: questions to nodes, lines for people, nodes that are left
out, and when the job may start again. Which step it is says ladder.py. A step that fails or hangs is told, and the
job goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from launcher.exclusion import Exclusion, MachineFault
from launcher.ladder import DEAR, Decision, Fault, Ladder, Step, advise_replay
from launcher.mending import Asked, failed_checks
from launcher.policy import StepLimits
from launcher.rendezvous.messages import FromCoordinator, Mend, Mended, StepTaken
from launcher.supervise.failure_notes import FailureNotes

STAGES = {Step.CHECKS: "checks_s", Step.ROLLBACK: "rollback_s", Step.REPLAY: "replay_s"}  # of a failure's page


class Surroundings(NamedTuple):
    """What the job gives to it."""

    hosts: Callable[[], dict[int, str]]  # of all nodes, by number
    at_work: Callable[[], list[int]]  # nodes of the last attempt, in the order of ranks
    send: Callable[[int, FromCoordinator], object]
    tell_all: Callable[[str], object]
    exclusion: Callable[[], Exclusion | None]  # None: no node is left out
    notes: Callable[[], FailureNotes]


class Recovery:
    """Of one job, over all its attempts."""

    def __init__(self, limits: StepLimits, around: Surroundings) -> None:
        self._limits = limits
        self._around = around
        self._limit_s = {
            Step.CHECKS: limits.checks_s,
            Step.ROLLBACK: limits.rollback_s,
            Step.REPLAY: limits.replay_s,
        }
        self._ladder = Ladder([step for step in DEAR if self._limit_s[step]])
        self._steps: list[Step] = []  # to be taken, in order
        self._asked: Asked[Mended] | None = None  # for the first of them
        self._attempt, self._kind = -1, ""  # that has failed; class of that

    def decide(self, attempt: int, fault: Fault, lived_s: float) -> Decision:
        """The step that follows a failure; told to the node that keeps events."""
        decision = self._ladder.after_failure(fault, lived_s)
        if decision.ends:
            self._advise(attempt)
        self._tell(attempt, decision.step.value, fault.kind, decision.why)
        self._around.notes().step(decision.step.value, decision.why)
        return decision

    def _advise(self, attempt: int) -> None:
        """The job is given up: tells what would find the machine, where it may be one."""
        hosts = self._around.hosts()
        advice = advise_replay(self._ladder, list(dict.fromkeys(hosts[each] for each in self._around.at_work())))
        if advice:
            self._around.tell_all(advice)
            self._tell(attempt, "replay-advised", "", advice)

    def left_out(self, attempt: int, fault: MachineFault) -> None:
        """A node is left out from now on."""
        self._ladder.evicted()
        text = f"{fault.host} is left out of further attempts while others suffice: {fault.what}"
        self._around.tell_all(text)
        self._tell(attempt, "exclude", "", text)

    # ---- steps between attempts ------------------------------------------------------------------------------

    def begin(self, attempt: int, decision: Decision, kind: str, now_s: float) -> None:
        """Nothing of the attempt runs any more: takes what belongs to the step."""
        self._attempt, self._kind = attempt, kind
        self._steps = [decision.step] if decision.step in DEAR else []
        if self._limits.checks_always and Step.CHECKS not in self._steps:
            self._steps.insert(0, Step.CHECKS)
        self._ask(now_s)

    @property
    def until_s(self) -> float | None:
        """When `go_on` is to be called although nobody has answered."""
        return None if self._asked is None else self._asked.until_s

    def answered(self, node: int, answer: Mended) -> None:
        if self._asked is not None and answer.step == self._steps[0].value:
            self._asked.answered(node, answer)

    def lost(self, node: int) -> None:
        if self._asked is not None:
            self._asked.lost(node)

    def go_on(self, now_s: float) -> bool:
        """Whether all steps are over; begins the next one where there is one."""
        while self._asked is not None and (self._asked.is_over or now_s >= self._asked.until_s):
            self._conclude(self._asked, self._steps.pop(0), now_s)
            self._ask(now_s)
        return self._asked is None

    def _ask(self, now_s: float) -> None:
        self._asked = None
        hosts, at_work = self._around.hosts(), self._around.at_work()
        if not self._steps or not hosts:
            return
        step, number, page = self._steps[0], 0, b""
        nodes = list(hosts)
        if step is not Step.CHECKS:
            nodes = at_work[:1] or nodes[:1]
            if (found := self._around.notes().early()) is not None:
                number, page = found.number, found.data
        limit_s = self._limit_s[step]
        self._asked = Asked({node: hosts[node] for node in nodes}, limit_s, now_s)
        where = f"{len(nodes)} nodes" if len(nodes) > 1 else hosts[nodes[0]]
        self._around.tell_all(f"before the restart: {step.value} on {where}, at most {limit_s:g} s")
        named = tuple(dict.fromkeys(hosts[node] for node in at_work)) if step is Step.REPLAY else ()
        for node in nodes:
            self._around.send(node, Mend(self._attempt, step.value, limit_s, self._kind, number, page, named))

    def _conclude(self, asked: Asked[Mended], step: Step, now_s: float) -> None:
        lines = [f"{step.value} on {host}: {answer.text}" for host, answer in asked.answers]
        lines += [f"{step.value} on {host}: nothing was heard of it in time" for host in asked.silent]
        for line in lines:
            self._around.tell_all(line)
        self._around.notes().step_over(STAGES[step], now_s - asked.began_s, lines, now_s)
        for fault in self._find_unfit(asked, step):
            self.left_out(self._attempt, fault)

    def _find_unfit(self, asked: Asked[Mended], step: Step) -> list[MachineFault]:
        """Nodes that are newly left out for what the step has found."""
        exclusion = self._around.exclusion()
        if exclusion is None:
            return []
        if step is Step.CHECKS:
            looked_at = {host for host, answer in asked.answers if answer.is_well} | set(asked.silent)
            return exclusion.after_checks(failed_checks(asked), looked_at)
        suspects = [each for _, answer in asked.answers for each in answer.suspects]
        if len(suspects) == 1 and suspects[0] in self._around.hosts().values():
            fault = MachineFault(suspects[0], "a group replay has found it", is_grave=True)
            return [fault] if exclusion.after_test(fault.host, fault.what) else []
        return []

    def _tell(self, attempt: int, step: str, kind: str, text: str) -> None:
        """To the node that keeps pages, which keeps this, too."""
        for node in self._around.at_work()[:1]:
            self._around.send(node, StepTaken(attempt, step, kind, text))
