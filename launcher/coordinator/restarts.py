"""PURE: what follows an attempt that has ended: another one, and after which steps, or the end of the job.

In: the ended attempt, with its failures and lost nodes. Out: a decision, log lines and notes for the failure
record. restart_policy.py has the budget, escalation.py the steps, machines.py the exclusion of nodes.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from bootseer.counted import counted
from bootseer.light_typing import TYPE_CHECKING, NamedTuple
from launcher.coordinator.attempt import signal_name
from launcher.coordinator.restart_policy import NoProgress, SameError
from launcher.coordinator.state import JobState

if TYPE_CHECKING:
    from launcher.coordinator.escalation import Fault
    from launcher.coordinator.machines import JobMachines

MAX_PORT_RETRIES = 10  # attempts after a taken port of rank 0, which do not use up the budget
# A rank that ends by one of these signals does not show whether the job makes progress.
KILLS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class End(NamedTuple):
    """Decision: the job ends."""

    status: int
    reason: str


class Again(NamedTuple):
    """Decision: another attempt follows."""

    delay_s: float | None = None  # the pause before it; None: none is decided
    is_change: bool = False  # because nodes have joined or left
    tests_network: bool = False
    recovers: bool = False  # first, the steps of the escalation ladder


class Restarts:
    """The decisions between the attempts of one job."""

    def __init__(self, state: JobState, take_machines: Callable[[], JobMachines]) -> None:
        """Args: take_machines: returns the job's machines."""
        self._state = state
        self._rules = state.rules
        self._take_machines = take_machines
        self._same_error = SameError()
        limits = state.rules.limits()
        self._no_progress = NoProgress(limits.attempts_without_progress)
        self._max_backoff_s = limits.max_backoff_s
        self._port_retries = 0

    def decide(self, verdict: tuple[int, str] | None, now_s: float, *, hang_lasts: bool) -> End | Again:
        """Decide what follows the current attempt; none of its ranks runs.

        Args: verdict: of a log rule that ends the job: exit status and reason; hang_lasts: a reported hang lasted
        to the end.
        """
        state, attempt = self._state, self._state.attempt
        failures = attempt.failures
        failures.conclude()
        has_failed = bool(attempt.end_reason) or failures.has_own
        if not state.signum and (has_failed or failures.lost):
            self._record_end(now_s, hang_lasts)
        if state.signum:
            return End(128 + state.signum, f"stopped by {signal_name(state.signum)}")
        if verdict is not None:
            return End(*verdict)
        if failures.lost:
            return self._after_loss(now_s)
        if attempt.is_again:
            state.records.decided(
                "another attempt, or the end", "its checkpoint cannot be loaded: no failure of ranks"
            )
            return Again()
        if has_failed:
            return self._after_failure(now_s)
        if attempt.succeeded and attempt.succeeded.issuperset(state.nodes.placed()):
            return End(0, "")  # all had succeeded before they received the stop for new nodes
        return Again(is_change=True)

    def _record_end(self, now_s: float, hang_lasts: bool) -> None:
        """Record the end of the attempt for its failure record."""
        attempt, records = self._state.attempt, self._state.records
        failures, notes = attempt.failures, records.take_notes()
        failures.find_mismatch()
        is_hang, lost = attempt.end_class == "hang", failures.lost_nodes()
        notes.ended(attempt.number, failures.ranks, lost, is_hang, hang_lasts, attempt.stop_began_s, now_s)
        notes.mismatch_found(failures.mismatch)
        notes.checked(records.skews.values())

    # ---- lost nodes ------------------------------------------------------------------------------------------

    def _after_loss(self, now_s: float) -> End | Again:
        """Handle lost nodes: failed ranks count as their victims, unless one certainly failed before."""
        state, attempt, budget = self._state, self._state.attempt, self._state.restarts
        failures = attempt.failures
        if failures.ranks and not failures.order().nodes:
            return self._after_failure(now_s)
        gone = "; ".join(loss.what for loss in failures.lost)
        if state.nodes.count_reachable() >= self._rules.min_nodes:
            state.records.decided(
                "another attempt with the remaining nodes", "the loss of a node is no failure of ranks"
            )
            return Again(is_change=True, tests_network=self._will_test_network(is_network_failure=False))
        # The job cannot continue without them, so their loss uses up a restart, as a failure of their ranks would.
        limit = self._rules.max_restarts
        delay_s = budget.after_failure(attempt.lived_s, self._max_backoff_s)
        if delay_s is None:
            after = f"after {counted(budget.count, 'restart')}" if limit else "and --max-restarts is 0"
            return End(1, f"lost node {gone}; {state.describe_need()} {after}")
        state.outbox.log_to_all(f"restart {budget.used} of {limit}: lost node {gone}")
        state.records.decided(f"restart {budget.used} of {limit}", "--max-restarts", delay_s)
        return Again(delay_s, tests_network=self._will_test_network(is_network_failure=False))

    # ---- the network test ------------------------------------------------------------------------------------

    def _will_test_network(self, *, is_network_failure: bool) -> bool:
        """Return whether the nodes measure the network between them before the next attempt."""
        when = self._rules.check_pairs
        is_asked = when == "always" or (when == "network" and is_network_failure)
        return is_asked and len(self._state.nodes.placed()) > 1

    def tests_after_failure(self) -> bool:
        """Return whether the nodes measure the network between them before the attempt after a failure."""
        return self._will_test_network(is_network_failure=self._take_machines().is_network_failure())

    # ---- failed ranks ----------------------------------------------------------------------------------------

    def _after_failure(self, now_s: float) -> End | Again:
        state, attempt, budget = self._state, self._state.attempt, self._state.restarts
        lived_s = attempt.lived_s
        if attempt.port_was_taken and self._port_retries < MAX_PORT_RETRIES:
            self._port_retries += 1
            state.outbox.log_to_all(
                f"rank 0 found its port taken by another process; trying another ({self._port_retries})"
            )
            state.records.decided("another attempt, on another port", "a taken port is no failure of ranks")
            return Again()
        if not self._rules.max_restarts:
            return End(1, attempt.describe_end())
        hopeless, is_last = self._find_hopeless(), not budget.has_left(lived_s)
        machines = self._take_machines()
        of_network = False if self.tests_after_failure() else None
        is_evicted = not (hopeless or is_last) and machines.judge(now_s, of_network)
        fault = self._find_fault()._replace(is_evicted=is_evicted, hopeless=hopeless, is_last=is_last)
        decision = machines.recovery.decide(attempt.number, fault, lived_s)
        if decision.ends:
            if hopeless:
                return End(self._rules.give_up_status, hopeless)
            return End(1, f"{attempt.describe_end()} after {counted(budget.count, 'restart')}")
        delay_s = budget.after_failure(lived_s, self._max_backoff_s) or 0.0
        early = budget.early_in_a_row
        wait = f" in {delay_s:g} s (it failed early {early} times in a row)" if delay_s else ""
        restart = f"restart {budget.used} of {self._rules.max_restarts}{wait}"
        ended_for = (
            f": bootrun has ended attempt {attempt.number}, class {attempt.end_class}"
            if attempt.end_reason
            else ""
        )
        first = attempt.failures.describe_first(state.nodes.count_ranks())
        state.outbox.log_to_all(f"{restart}{first or ended_for}")
        state.records.decided(restart, "--max-restarts", delay_s)
        machines.recovery.begin(attempt.number, decision, fault.kind, now_s)
        return Again(delay_s, recovers=True)

    def _find_fault(self) -> Fault:
        """Return the facts about the failure for the escalation ladder."""
        from launcher.coordinator.escalation import Fault
        from launcher.coordinator.machines import ladder_fault

        attempt = self._state.attempt
        return Fault(attempt.end_class) if attempt.end_reason else ladder_fault(attempt.failures.first())

    def _find_hopeless(self) -> str:
        """Return why another attempt would fail too, from the first failures; "" if it may succeed."""
        attempt = self._state.attempt
        first = attempt.failures.first()
        if self._rules.stops_on_same_error:
            from launcher.ranks.failure_class import error_before_script, repeated_errors

            unread = [error_before_script(failure) for failure in first]
            if unread and all(unread):
                return (
                    f"{unread[0]}: before the script's first statement, or in a file that cannot be compiled, so "
                    "another attempt would fail there too (--same-error restart retries anyway)"
                )
            errors = (error for failure in first for error in repeated_errors(failure))
            if again := self._same_error.after_failure(errors):
                return (
                    f"{again}: the same as in the last attempt, so another would fail there too "
                    "(--same-error restart retries anyway)"
                )
        is_killed = bool(first) and all(-each.status in KILLS and each.oom != "yes" for each in first)
        if not self._rules.stops_without_progress or (is_killed and not attempt.end_reason):
            return ""
        stuck = self._no_progress.after_failure(attempt.steps, attempt.step)
        more = "another would get no further (--no-progress restart retries anyway)"
        return f"{stuck}, so {more}" if stuck else ""
