"""PURE: what a job does about machines that cause failures: it excludes them, and checks them before a restart.

In: the first failures of an attempt, findings of tests and checks. Out: candidates without excluded nodes, and the
work between two attempts. exclusion.py and recovery.py decide; this module connects them to the nodes of the job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from launcher.coordinator.escalation import Fault
from launcher.coordinator.exclusion import Exclusion, MachineFault
from launcher.coordinator.nodes import NodeState
from launcher.coordinator.recovery import JobActions, Recovery
from launcher.coordinator.state import JobState
from launcher.ranks.failure_class import FailureClass, certain_user_error, classify_failure
from launcher.rendezvous import ranks

if TYPE_CHECKING:
    from launcher.rendezvous.messages import Failure

MAX_JUDGED = 64  # first failures that are examined for causes in a machine or the network
_OF_MACHINES = (FailureClass.ACCELERATOR, FailureClass.PLATFORM, FailureClass.NETWORK)


class JobMachines:
    """The machines of one job: which are excluded, and the recovery steps on them."""

    def __init__(self, state: JobState) -> None:
        self._state = state
        self._rules, self._nodes = state.rules, state.nodes
        limits = self._rules.limits()
        self._exclusion = Exclusion(limits.machine_fault_s)
        self.recovery = Recovery(
            self._rules.steps,
            JobActions(
                hosts=self._nodes.hosts,
                at_work=self._nodes.in_rank_order,
                send=state.outbox.send,
                tell_all=state.outbox.log_to_all,
                exclusion=lambda: self._exclusion if self._can_exclude else None,
                notes=state.records.take_notes,
            ),
            limits.calm_s,
        )

    @property
    def _can_exclude(self) -> bool:
        return self._rules.excludes_nodes and self._rules.max_nodes > 1

    # ---- excluded nodes --------------------------------------------------------------------------------------

    def without_excluded(self, candidates: list[ranks.Candidate]) -> list[ranks.Candidate]:
        """Return the candidates without excluded nodes, if enough others are left."""
        why = self._exclusion.why
        if not why:
            return candidates
        others = [each for each in candidates if each.join.host not in why]
        if len(others) == len(candidates):
            return candidates
        if len(others) >= self._rules.min_nodes and not self._rules.static:
            return others
        named = sorted(set(why) & {each.join.host for each in candidates}, key=ranks.natural_key)
        need = self._state.describe_need()
        self._state.outbox.log_to_all(f"{', '.join(named)} would be excluded ({need}, there is no spare)")
        return candidates

    def count_waiting(self) -> int:
        """Count the excluded nodes among those that run no ranks."""
        why, nodes = self._exclusion.why, self._nodes.by_number.values()
        return sum(node.state is NodeState.WAITING and node.join.host in why for node in nodes)

    def judge(self, now_s: float, of_network: bool | None = None) -> bool:
        """Exclude nodes whose machines have caused the first failures. Returns: whether one was excluded.

        Args: of_network: only by network failures, or only by others; None: by any.
        """
        if not self._can_exclude:
            return False
        hosts = {node.place: node.join.host for node in self._nodes.placed().values()}
        faults = [
            fault._replace(host=hosts.get(failure.group_rank, failure.node))
            for failure in self._state.attempt.failures.first()[:MAX_JUDGED]
            if of_network in (None, _is_of_network(failure)) and (fault := machine_fault(failure))
        ]
        news = self._exclusion.after_failure(faults, now_s)
        for fault in news:
            self.recovery.left_out(self._state.attempt.number, fault)
        return bool(news)

    def exclude_tested(self, named: Mapping[int, str]) -> None:
        """Exclude nodes that a test has found to be faulty. Args: named: what it has found, by node."""
        for number, what in named.items():
            node = self._nodes.by_number.get(number)
            if node is None or not self._rules.excludes_nodes:
                continue
            host = node.join.host
            if self._exclusion.exclude_tested(host, what):
                self.recovery.left_out(self._state.attempt.number, MachineFault(host, what, is_grave=True))

    def is_network_failure(self) -> bool:
        first = self._state.attempt.failures.first()[:MAX_JUDGED]
        return bool(first) and all(_is_of_network(failure) for failure in first)


def machine_fault(failure: Failure) -> MachineFault | None:
    """Return the part of a failure that its machine may cause and would cause again; None for none."""
    verdict = classify_failure(failure)
    if not verdict.is_sure or verdict.kind not in _OF_MACHINES:
        return None
    return MachineFault(failure.node, verdict.why, is_grave=verdict.kind is FailureClass.ACCELERATOR)


def ladder_fault(first: Sequence[Failure]) -> Fault:
    """Return the facts for the escalation ladder about failures that may have been the first of an attempt."""
    if not first:
        return Fault("")
    verdict = classify_failure(first[0])
    is_crash = first[0].status < 0 and verdict.kind is FailureClass.USER and not verdict.is_sure
    is_code = verdict.kind is FailureClass.MOUNT or all(certain_user_error(failure) for failure in first)
    return Fault("crash" if is_crash else verdict.kind.value, is_code=is_code)


def _is_of_network(failure: Failure) -> bool:
    return classify_failure(failure).kind is FailureClass.NETWORK
