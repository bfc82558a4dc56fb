"""PURE: the work between a failed attempt and the next one: carries out the steps of the escalation ladder.

In: the failure, answers of the nodes, the time. Out: requests to nodes, log lines, excluded nodes, and when the
job may restart. escalation.py selects the step. A step that fails or hangs is logged, and the job continues.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from launcher.coordinator.escalation import EXPENSIVE, Decision, Fault, Ladder, Step, advise_replay
from launcher.coordinator.exclusion import Exclusion, MachineFault
from launcher.coordinator.recovery_steps import PendingAnswers, failed_checks
from launcher.coordinator.restart_policy import StepLimits
from launcher.monitor.failure.notes import FailureNotes
from launcher.rendezvous.messages import FromCoordinator, RecoveryResult, RecoveryStep, StepTaken

STAGES = {Step.CHECKS: "checks_s", Step.ROLLBACK: "rollback_s", Step.REPLAY: "replay_s"}  # in a failure record


class JobActions(NamedTuple):
    hosts: Callable[[], dict[int, str]]  # of all nodes, by node number
    at_work: Callable[[], list[int]]  # nodes of the last attempt, in the order of ranks
    send: Callable[[int, FromCoordinator], object]
    tell_all: Callable[[str], object]
    exclusion: Callable[[], Exclusion | None]  # None: nodes are never excluded
    notes: Callable[[], FailureNotes]


class Recovery:
    """Recovery of one job, over all its attempts."""

    def __init__(self, limits: StepLimits, around: JobActions, calm_s: float) -> None:
        """Args: calm_s: of the escalation ladder."""
        self._limits = limits
        self._around = around
        self._limit_s = {
            Step.CHECKS: limits.checks_s,
            Step.ROLLBACK: limits.rollback_s,
            Step.REPLAY: limits.replay_s,
        }
        self._ladder = Ladder([step for step in EXPENSIVE if self._limit_s[step]], calm_s)
        self._steps: list[Step] = []  # to be taken, in order
        self._asked: PendingAnswers[RecoveryResult] | None = None  # for the first of them
        self._attempt, self._kind = -1, ""  # the failed attempt, and the class of its failure

    def decide(self, attempt: int, fault: Fault, lived_s: float) -> Decision:
        """Return the step that follows a failure, and send it to the node that writes events."""
        decision = self._ladder.after_failure(fault, lived_s)
        if decision.ends:
            self._advise(attempt)
        self._tell(attempt, decision.step.value, fault.kind, decision.why)
        self._around.notes().step(decision.step.value, decision.why)
        return decision

    def _advise(self, attempt: int) -> None:
        """Advise a replay when the job ends and one machine may be the cause."""
        hosts = self._around.hosts()
        advice = advise_replay(self._ladder, list(dict.fromkeys(hosts[each] for each in self._around.at_work())))
        if advice:
            self._around.tell_all(advice)
            self._tell(attempt, "replay-advised", "", advice)

    def left_out(self, attempt: int, fault: MachineFault) -> None:
        """Report that a node is excluded from now on."""
        self._ladder.evicted()
        text = f"{fault.host} is left out of further attempts while others suffice: {fault.what}"
        self._around.tell_all(text)
        self._tell(attempt, "exclude", "", text)

    # ---- steps between attempts ------------------------------------------------------------------------------

    def begin(self, attempt: int, decision: Decision, kind: str, now_s: float) -> None:
        """Begin the actions of a step; the attempt's processes have ended."""
        self._attempt, self._kind = attempt, kind
        self._steps = [decision.step] if decision.step in EXPENSIVE else []
        if self._limits.checks_always and Step.CHECKS not in self._steps:
            self._steps.insert(0, Step.CHECKS)
        self._ask(now_s)

    @property
    def until_s(self) -> float | None:
        """When `go_on` must be called at the latest, with or without answers."""
        return None if self._asked is None else self._asked.until_s

    def answered(self, node: int, answer: RecoveryResult) -> None:
        if self._asked is not None and answer.step == self._steps[0].value:
            self._asked.answered(node, answer)

    def lost(self, node: int) -> None:
        if self._asked is not None:
            self._asked.lost(node)

    def go_on(self, now_s: float) -> bool:
        """Begin the next step when the current one is over. Returns: whether all steps are over."""
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
        self._asked = PendingAnswers({node: hosts[node] for node in nodes}, limit_s, now_s)
        where = f"{len(nodes)} nodes" if len(nodes) > 1 else hosts[nodes[0]]
        self._around.tell_all(f"before the restart: {step.value} on {where}, at most {limit_s:g} s")
        named = tuple(dict.fromkeys(hosts[node] for node in at_work)) if step is Step.REPLAY else ()
        for node in nodes:
            self._around.send(
                node, RecoveryStep(self._attempt, step.value, limit_s, self._kind, number, page, named)
            )

    def _conclude(self, asked: PendingAnswers[RecoveryResult], step: Step, now_s: float) -> None:
        lines = [f"{step.value} on {host}: {answer.text}" for host, answer in asked.answers]
        lines += [f"{step.value} on {host}: no answer in time" for host in asked.silent]
        for line in lines:
            self._around.tell_all(line)
        self._around.notes().step_over(STAGES[step], now_s - asked.began_s, lines, now_s)
        for fault in self._find_unfit(asked, step):
            self.left_out(self._attempt, fault)

    def _find_unfit(self, asked: PendingAnswers[RecoveryResult], step: Step) -> list[MachineFault]:
        """Return nodes that are newly excluded because of the step's findings."""
        exclusion = self._around.exclusion()
        if exclusion is None:
            return []
        if step is Step.CHECKS:
            looked_at = {host for host, answer in asked.answers if answer.is_well} | set(asked.silent)
            return exclusion.after_checks(failed_checks(asked), looked_at)
        suspects = [each for _, answer in asked.answers for each in answer.suspects]
        if len(suspects) == 1 and suspects[0] in self._around.hosts().values():
            fault = MachineFault(suspects[0], "a group replay has found it", is_grave=True)
            return [fault] if exclusion.exclude_tested(fault.host, fault.what) else []
        return []

    def _tell(self, attempt: int, step: str, kind: str, text: str) -> None:
        """Send the step to the node that keeps failure records."""
        for node in self._around.at_work()[:1]:
            self._around.send(node, StepTaken(attempt, step, kind, text))
