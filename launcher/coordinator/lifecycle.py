"""PURE: the phases of a job at its coordinator: when each one ends, and what follows.

In: the time, lost nodes, reasons to end an attempt. Out: orders to nodes. Each phase has a module with its state
and rules: gathering.py, running.py, ending.py, restarts.py. This one makes the transitions that job.py describes.
"""

from __future__ import annotations

from bootseer.light_stdlib import signal
from bootseer.light_typing import TYPE_CHECKING, Iterable
from launcher.coordinator.attempt import AttemptEnd
from launcher.coordinator.gathering import Gathering
from launcher.coordinator.membership import LateNodes, Membership
from launcher.coordinator.nodes import NodeState
from launcher.coordinator.running import RunningRanks
from launcher.coordinator.state import JobState, Phase
from launcher.rendezvous import messages

if TYPE_CHECKING:
    from launcher.coordinator.ending import AttemptEnding
    from launcher.coordinator.machines import JobMachines
    from launcher.coordinator.node_checks import NodeChecks
    from launcher.coordinator.restarts import Restarts
    from launcher.rendezvous.messages import ClockReading, Examined, PairPort, PairResult, RecoveryResult

MAX_FAILURES_REPORTED = 64


class JobLifecycle:
    def __init__(
        self,
        state: JobState,
        membership: Membership,
        late: LateNodes,
        gathering: Gathering,
        running: RunningRanks,
    ) -> None:
        self._state = state
        self._rules, self._nodes, self._outbox = state.rules, state.nodes, state.outbox
        self._membership, self._late, self._gathering, self._running = membership, late, gathering, running
        # Most jobs do not need these parts, so their modules are imported with the first use.
        self._ending: AttemptEnding | None = None  # of this attempt, from its first failure or its stop on
        self._restarts: Restarts | None = None  # from the first end of an attempt on
        self._machines: JobMachines | None = None  # from the first failure on that may lead to a restart
        self._checks: NodeChecks | None = None  # from the first test or clock reading on

    @property
    def _is_finished(self) -> bool:
        return self._state.phase is Phase.FINISHED

    # ---- time ------------------------------------------------------------------------------------------------

    def deadline_s(self) -> float | None:
        """Return the next time at which `tick` may have something to do; None for none."""
        state, environments = self._state, self._gathering.environments
        moments: list[float | None] = []
        match state.phase:
            case Phase.FINISHED:
                return None
            case Phase.GATHERING:
                moments += self._gathering.deadlines_s(is_testing=self.is_testing)
            case Phase.RUNNING:
                moments += self._running.deadlines_s()
                if not self._running.is_waiting:
                    moments.append(self._late.due_s)
            case Phase.EXAMINING | Phase.STOPPING if self._ending is not None:
                moments.append(self._ending.deadline_s())
            case Phase.RECOVERING if self._machines is not None:
                moments.append(self._machines.recovery.until_s)
        moments += [environments.deadline_s() if environments else None, state.records.deadline_s()]
        moments.append(self._checks.deadline_s() if self._checks else None)
        moments += [silent.until_s for silent in self._nodes.silent.values()]
        return min((moment for moment in moments if moment is not None), default=None)

    def tick(self, now_s: float) -> None:
        """Act on the time."""
        for number in [number for number, each in self._nodes.silent.items() if now_s >= each.until_s]:
            self.give_up_silent(number, now_s)
        self._state.records.tick(now_s)
        if self._gathering.environments is not None and not self._is_finished:
            self._gathering.environments.tick(now_s)
        if self._checks is not None:
            self._checks.tick(now_s)
            self._conclude_test(now_s)
        match self._state.phase:
            case Phase.GATHERING:
                self._tick_gathering(now_s)
            case Phase.RUNNING:
                self._tick_running(now_s)
            case Phase.EXAMINING:
                self._try_stop(now_s)
            case Phase.RECOVERING:
                self._try_recover(now_s)
            case Phase.STOPPING if self._ending is not None and self._ending.is_late(now_s):
                self._drop_late(self._ending, now_s)

    def _tick_gathering(self, now_s: float) -> None:
        self._gathering.end_pause(now_s)
        self.try_start(now_s)
        if self._state.phase is Phase.GATHERING:
            missing = self._gathering.find_missing(now_s, is_testing=self.is_testing)
            if missing:
                self.finish(1, missing)

    def _tick_running(self, now_s: float) -> None:
        if self._late.is_due(now_s) and not self._running.is_waiting:
            self._regroup(now_s)
        else:
            self.end_attempt(self._running.tick(now_s), now_s)
        if self._state.phase is Phase.RUNNING:
            self.end_attempt(self._running.tick_output(now_s), now_s)

    def _drop_late(self, ending: AttemptEnding, now_s: float) -> None:
        """Drop the nodes that have not stopped in time."""
        for number, node in list(self._nodes.by_number.items()):
            if number in self._nodes.silent:
                self.give_up_silent(number, now_s)
            elif node.state is NodeState.STOPPING:
                ending.refuse_late(number)
                self.drop(number, "did not stop its ranks in time", now_s, now_s)

    # ---- lost nodes ------------------------------------------------------------------------------------------

    def _regroup(self, now_s: float) -> None:
        """Restart with late joiners, if they are still members and the job is not about to end."""
        excluded = 0 if self._machines is None else self._machines.count_waiting()
        reason = self._late.settle(excluded, now_s)
        if reason:
            self.stop(reason, signal.SIGTERM, now_s)

    def give_up(self, number: int, reason: str, now_s: float, heard_s: float) -> None:
        """Drop a silent node; if it returns, it is a new node."""
        self._outbox.send(number, messages.DroppedFromJob(f"it {reason}"))
        self.drop(number, reason, now_s, heard_s)

    def give_up_silent(self, number: int, now_s: float) -> None:
        """Drop a silent node for which the job has waited."""
        silent = self._nodes.silent.get(number)
        if silent is not None and not self._is_finished:
            self.give_up(number, silent.describe(now_s), now_s, silent.heard_s)

    def drop(self, number: int, reason: str, now_s: float, heard_s: float) -> None:
        """Handle the loss or the leave of a node. Args: heard_s: the time of its last message."""
        node = self._nodes.remove(number)
        if node is None or self._is_finished:
            return
        environments = self._gathering.environments
        if environments is not None:
            environments.stop_comparing(number)
        if self._checks is not None:
            self._checks.lost(number, now_s)
            self._conclude_test(now_s)
        if environments is not None:
            environments.lost(number, now_s)
        loss = self._membership.record_loss(node, reason, now_s, heard_s)
        if self._ending is not None:
            self._ending.lost(number)
        if self._machines is not None:
            self._machines.recovery.lost(number)
        match self._state.phase:
            case Phase.GATHERING:
                self.try_start(now_s)
                self._gathering.report_missing(now_s)
            case Phase.EXAMINING:
                self._try_stop(now_s)
            case Phase.RECOVERING:
                self._try_recover(now_s)
            case Phase.RUNNING if loss:
                self.stop(f"lost node {loss}", signal.SIGTERM, now_s)
            case Phase.STOPPING:
                self.after_attempt(now_s)

    # ---- transitions -----------------------------------------------------------------------------------------

    def try_start(self, now_s: float) -> None:
        """Start an attempt if all that it needs is there."""
        if not self._gathering.may_start(now_s, is_testing=self.is_testing):
            return
        candidates = self._gathering.find_candidates()
        if self._machines is not None:
            candidates = self._machines.without_excluded(candidates)
        members = self._gathering.start(candidates, now_s)
        self._late.forget()
        self._ending = None
        if self._state.records.notes is not None:
            self._state.records.notes.began(now_s)
        if self._rules.frees_endpoint:
            self._outbox.listen(False)
        self._gathering.send_worlds(members)
        self._running.attempt_began(len(members), now_s)  # counts the ranks by their new places

    def _take_ending(self) -> AttemptEnding:
        if self._ending is None:
            from launcher.coordinator.ending import AttemptEnding

            self._ending = AttemptEnding(self._state)
        return self._ending

    def end_attempt(self, ends: Iterable[AttemptEnd], now_s: float) -> None:
        """End the attempt for each reason; first run the post-mortem command, if there is one."""
        for end in ends:
            self._running.attempt_ends()
            if self._rules.steps.post_mortem_s:
                self._late.forget()
                self._take_ending().examine(end, now_s)
                self._try_stop(now_s)
            else:
                self.stop(end.reason, signal.SIGTERM, now_s)

    def _try_stop(self, now_s: float) -> None:
        """End the ranks once all post-mortem commands have ended."""
        if self._ending is not None and self._ending.is_examined(now_s):
            self.stop(self._ending.reason, signal.SIGTERM, now_s)

    def stop(self, reason: str, signum: int, now_s: float) -> None:
        """Stop all ranks. Args: signum: the signal that they get first."""
        state, nodes = self._state, self._nodes
        self._running.attempt_ends()
        self._late.forget()
        self._take_ending().stop(reason, signum, now_s)
        for number in list(nodes.silent):
            if not state.may_go_on or nodes.count_able() >= self._rules.min_nodes:
                self.give_up_silent(number, now_s)
        if state.phase is Phase.STOPPING:  # no dropped node was the last one that had not stopped
            self.after_attempt(now_s)

    def _take_machines(self) -> JobMachines:
        if self._machines is None:
            from launcher.coordinator.machines import JobMachines

            self._machines = JobMachines(self._state)
        return self._machines

    def after_attempt(self, now_s: float) -> None:
        """Decide what follows an attempt, once none of its ranks runs."""
        if self._nodes.counts[NodeState.STOPPING]:
            return
        from launcher.coordinator.restarts import End, Restarts

        if self._ending is not None:
            self._ending.stopped()
        if self._rules.frees_endpoint:
            self._outbox.listen(True)
        if self._restarts is None:
            self._restarts = Restarts(self._state, self._take_machines)
        running = self._running
        decision = self._restarts.decide(running.verdict, now_s, hang_lasts=running.hang_lasts)
        if isinstance(decision, End):
            self.finish(decision.status, decision.reason)
            return
        if decision.delay_s is not None:
            self._gathering.pause(decision.delay_s, now_s)
        if decision.delay_s:
            pause = messages.StepTaken(
                self._state.attempt.number, messages.BACKOFF_STEP, "", f"{decision.delay_s:g}"
            )
            self._outbox.send_to_all(pause)
        if decision.recovers:
            self._try_recover(now_s)
            return
        if decision.tests_network:
            self._begin_test(now_s)
        self._gather_again(now_s, changed=decision.is_change)

    def _try_recover(self, now_s: float) -> None:
        """Start the next attempt once all recovery steps are over."""
        if self._restarts is None or not self._take_machines().recovery.go_on(now_s):
            self._state.phase = Phase.RECOVERING
            return
        if self._restarts.tests_after_failure():
            self._begin_test(now_s)
        self._gather_again(now_s)

    def _gather_again(self, now_s: float, *, changed: bool = False) -> None:
        """Gather nodes for the next attempt; `changed`: because nodes have joined or left."""
        refusal = self._state.changes.after_attempt() if changed else ""
        if refusal:
            self.finish(1, refusal)
            return
        self._state.phase = Phase.GATHERING
        self._gathering.begin_again(now_s)
        self.try_start(now_s)
        self._gathering.report_missing(now_s)

    def finish(self, status: int, reason: str) -> None:
        """End the job; all its ranks have ended, or none has started."""
        state = self._state
        state.phase = Phase.FINISHED
        if self._checks is not None:
            self._checks.cancel_test()
        finish = messages.Finish(status, reason, (), (), ())
        if state.attempt.failures.ranks and status:
            ordered = state.attempt.failures.order()
            failures, lost = ordered.failures[:MAX_FAILURES_REPORTED], ordered.nodes[:MAX_FAILURES_REPORTED]
            finish = messages.Finish(status, reason, failures, ordered.unsure, lost)
        state.records.finished(reason)
        self._outbox.send_to_all(finish)

    # ---- answers of nodes ------------------------------------------------------------------------------------

    def examine_too(self, number: int, now_s: float) -> None:
        """Handle a rank that has failed after the first one, on this node."""
        if self._ending is not None:
            self._ending.examine_too(number, now_s)

    def on_examined(self, number: int, message: Examined, now_s: float) -> None:
        """Handle the result of the post-mortem command on a node."""
        if self._ending is not None:
            self._ending.answered(number, message)
            self._try_stop(now_s)

    def on_signal_again(self, number: int, signum: int, *, is_second: bool) -> None:
        """Handle a signal while ranks are being stopped. Args: is_second: the first one has stopped them."""
        if self._ending is not None:
            self._ending.signal_again(number, signum, is_second=is_second)

    def on_recovered(self, number: int, message: RecoveryResult, now_s: float) -> None:
        """Handle the result of a recovery step on a node."""
        if self._state.phase is Phase.RECOVERING and self._machines is not None:
            self._machines.recovery.answered(number, message)
            self._try_recover(now_s)

    # ---- checks between nodes --------------------------------------------------------------------------------

    @property
    def is_testing(self) -> bool:
        """Whether the nodes measure the network between them."""
        return self._checks is not None and self._checks.is_testing

    def compare_clocks(self, number: int, message: ClockReading) -> None:
        """Handle the wall clock time of a node."""
        self._take_checks().compare_clocks(number, message)

    def on_test_answer(self, number: int, message: PairPort | PairResult, now_s: float) -> None:
        """Handle an answer of a node in a network test."""
        if self._checks is not None and self._checks.is_testing:
            self._checks.receive(number, message, now_s)
            self._conclude_test(now_s)
            if self._state.phase is Phase.GATHERING:
                self.try_start(now_s)

    def _take_checks(self) -> NodeChecks:
        if self._checks is None:
            from launcher.coordinator.node_checks import NodeChecks

            self._checks = NodeChecks(self._state)
        return self._checks

    def _begin_test(self, now_s: float) -> None:
        """Let the nodes measure the network between them; the next attempt waits for it."""
        self._take_checks().begin_test(now_s)
        self._conclude_test(now_s)

    def _conclude_test(self, now_s: float) -> None:
        named = None if self._checks is None else self._checks.conclude_test()
        if named is None:
            return
        if self._state.phase is Phase.GATHERING:
            self._gathering.network_tested(now_s)
        self._take_machines().exclude_tested(named)
        if not named and not self._state.attempt.failures.lost:
            self._take_machines().judge(now_s, of_network=True)
