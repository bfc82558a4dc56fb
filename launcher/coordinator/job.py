"""PURE: the state machine of a job, at its coordinator: facts from the nodes in, orders to the nodes out.

It decides which nodes take part, their ranks, when an attempt ends and what follows. The job has one restart
budget and one attempt counter (torchrun has both per agent). The host (host.py) passes messages, lost nodes and
the time to it; a job on one node uses the same state machine.

    GATHERING --enough nodes--> RUNNING --first failure, node lost or joining, signal--> STOPPING
        ^                          |all nodes succeeded                                    |all nodes stopped
        +------- restart ----------|-------------------------------------------------------+
                                   +-----------------> FINISHED <---- budget spent, signal -+
If requested, EXAMINING (post-mortem command) precedes STOPPING, and RECOVERING (recovery, escalation.py) follows
it. lifecycle.py makes these transitions; this module passes the facts to it and to the other parts.
"""

from __future__ import annotations

from bootseer.light_stdlib import signal
from bootseer.light_typing import TYPE_CHECKING
from launcher.coordinator.attempt import signal_name
from launcher.coordinator.gathering import Gathering
from launcher.coordinator.lifecycle import JobLifecycle
from launcher.coordinator.membership import LateNodes, Membership
from launcher.coordinator.nodes import Node, NodeState, Silence
from launcher.coordinator.orders import Listen, Order, Send
from launcher.coordinator.running import RunningRanks
from launcher.coordinator.state import OF_ATTEMPT, JobRules, JobState, Phase
from launcher.rendezvous import messages

if TYPE_CHECKING:
    from launcher.base.facts import RankFacts

# With what the arguments and results of a Job are made of.
__all__ = ["Job", "JobRules", "Listen", "Order", "Send", "Silence", "signal_name"]

# How long before its connection broke a node may have failed, if the host does not know the time; and before its
# Leave message.
SILENT_BEFORE_BREAK_S, LEFT_S = 5.0, 1.0


class Job:
    """See the module's docstring; every public method returns the orders that follow from its fact."""

    def __init__(self, rules: JobRules) -> None:
        self._rules = rules
        self._state = state = JobState(rules)
        self._nodes, self._outbox = state.nodes, state.outbox
        self._membership = Membership(state)
        self._late = LateNodes(state)
        self._gathering = Gathering(state)
        self._running = RunningRanks(state)
        self._lifecycle = JobLifecycle(state, self._membership, self._late, self._gathering, self._running)

    # ---- queries of the host ---------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        return self._state.phase is Phase.FINISHED

    def statistics(self) -> dict[str, int | str]:
        """Return counters for the status command and the tests."""
        state = self._state
        return {
            "phase": state.phase.value,
            "nodes": len(self._nodes.by_number),
            "attempt": state.attempt.number,
            "restart_count": state.restarts.count,
            "restarts_used": state.restarts.used,
            "membership_changes": state.changes.count,
        }

    def newest_facts(self) -> list[tuple[str, RankFacts]]:
        """Return the newest facts of each running rank, with the name of its node, by rank."""
        return self._running.newest_facts() if self._state.phase in OF_ATTEMPT else []

    def deadline_s(self) -> float | None:
        """Return the next time at which `tick` may have something to do."""
        return self._lifecycle.deadline_s()

    # ---- facts -----------------------------------------------------------------------------------------------

    def receive(self, node: int, message: messages.FromMember, now_s: float) -> list[Order]:
        """Handle a message of a node; the first one is its Join."""
        if isinstance(message, messages.Join):
            self._on_join(node, message, now_s)
        elif node in self._nodes.by_number:
            self._on_message(self._nodes.by_number[node], node, message, now_s)
        return self._outbox.take()

    def reached(self, node: int, address: str) -> None:
        """Set the address at which other nodes reach a node, in place of its Join's, from the next attempt on."""
        known = self._nodes.by_number.get(node)
        if known is not None:
            known.join = known.join._replace(address=address)

    def on_not_started(self, node: int, attempt: int, now_s: float) -> list[Order]:
        """Handle a node that has not received its World of this attempt: it has nothing to stop."""
        known = self._nodes.by_number.get(node)
        is_current = attempt == self._state.attempt.number
        if known is not None and is_current and known.state is NodeState.STOPPING:
            self._nodes.set_state(known, NodeState.WAITING)
            self._lifecycle.after_attempt(now_s)
        return self._outbox.take()

    def lost(self, node: int, reason: str, now_s: float, heard_s: float | None = None) -> list[Order]:
        """Handle a lost node: its connection broke or it was silent too long; last message at `heard_s`."""
        self._lifecycle.drop(node, reason, now_s, now_s - SILENT_BEFORE_BREAK_S if heard_s is None else heard_s)
        return self._outbox.take()

    def unheard(
        self, node: int, how: Silence, reason: str, now_s: float, heard_s: float, limit_s: float
    ) -> list[Order]:
        """Handle a silent node, which may not have ended: wait for it, or drop it.

        The host repeats this call while the node is silent. If the others can continue without it, drop it and its
        progress. Wait if only its bootrun hangs, as its ranks continue.

        Args: limit_s: the silence that heartbeats allow.
        """
        if node in self._nodes.by_number and not self.finished:
            from launcher.coordinator.silence import try_to_wait

            may_gather = not self._lifecycle.is_testing and not self._gathering.is_comparing
            silence = (how, reason, now_s, heard_s, limit_s)
            if not try_to_wait(self._state, node, *silence, may_gather=may_gather):
                self._lifecycle.give_up(node, reason, now_s, heard_s)
        return self._outbox.take()

    def heard(self, node: int, now_s: float) -> list[Order]:
        """Handle a silent node that sends messages again."""
        silent = self._nodes.silent.pop(node, None)
        if silent is not None and not self.finished:
            known = self._nodes.by_number[node]
            self._outbox.log_to_all(f"{known.name} is reachable again, after {now_s - silent.heard_s:.1f} s")
            is_running = self._state.phase is Phase.RUNNING
            if self._state.phase is Phase.GATHERING:
                self._lifecycle.try_start(now_s)
            elif is_running and known.state is NodeState.WAITING and known.digest is not None:
                self._late.consider(node, now_s)
        return self._outbox.take()

    def tick(self, now_s: float) -> list[Order]:
        """Handle the time that `deadline_s` returned, or any other."""
        self._lifecycle.tick(now_s)
        return self._outbox.take()

    def start_again(self, attempt: int, reason: str, now_s: float) -> list[Order]:
        """Handle a checkpoint that cannot be loaded: end the attempt for another one, or for the host's reason.

        This uses up no restart, as no rank has failed.
        """
        state = self._state
        if attempt == state.attempt.number and state.phase in OF_ATTEMPT:
            state.attempt.is_again = True
            if state.phase is not Phase.STOPPING:
                self._lifecycle.stop(reason, signal.SIGTERM, now_s)
        return self._outbox.take()

    def fail(self, reason: str) -> list[Order]:
        """End the job, as it cannot continue."""
        if not self.finished:
            self._lifecycle.finish(1, reason)
        return self._outbox.take()

    # ---- messages --------------------------------------------------------------------------------------------

    def _on_join(self, number: int, join: messages.Join, now_s: float) -> None:
        if self._membership.refuses(number, join):
            return
        claimant = self._nodes.find_claimant(join)
        if claimant in self._nodes.silent:
            self._lifecycle.give_up_silent(claimant, now_s)  # this is the same node, or its replacement
        node = self._membership.admit(number, join)
        if self._state.phase is Phase.GATHERING:
            self._gathering.node_joined(now_s)
            self._lifecycle.try_start(now_s)
        elif node.digest is not None:
            self._consider_newcomer(number, now_s)

    def _on_message(self, node: Node, number: int, message: messages.FromMember, now_s: float) -> None:
        match message:
            case (
                messages.Started()
                | messages.RankFailed()
                | messages.Succeeded()
                | messages.Stopped()
                | messages.RankSamples()
                | messages.RuleFired()
                | messages.RuleObservation()
                | messages.Examined()
                | messages.RecoveryResult()
            ):
                if message.attempt == self._state.attempt.number:
                    self._on_attempt(node, number, message, now_s)
            case messages.Identity():
                self._on_identity(node, number, message, now_s)
            case messages.Environment():
                self._on_environment(number, message)
            case messages.SetupReport():
                self._on_setup(number, message, now_s)
            case messages.PairPort() | messages.PairResult():
                self._lifecycle.on_test_answer(number, message, now_s)
            case messages.ClockReading():
                self._lifecycle.compare_clocks(number, message)
            case messages.NodeStacks():
                if self._state.phase is Phase.RUNNING:
                    self._lifecycle.end_attempt(self._running.node_answered(number, message, now_s), now_s)
            case messages.Signalled(signum):
                self._on_signal(number, signum, now_s)
            case messages.Leave(reason):
                # Its ranks have ended before this message.
                self._lifecycle.drop(number, reason, now_s, now_s - LEFT_S)

    def _on_attempt(self, node: Node, number: int, message: messages.AttemptMessage, now_s: float) -> None:
        """Handle a message about the current attempt."""
        state, attempt = self._state, self._state.attempt
        is_running = state.phase is Phase.RUNNING
        match message:
            case messages.Started():
                if attempt.node_started(now_s) and state.records.notes is not None:
                    state.records.notes.runs(now_s)
            case messages.RankFailed(_, failure):
                if state.phase in OF_ATTEMPT:
                    self._on_failed(number, failure, now_s)
            case messages.Succeeded():
                self._on_succeeded(node, number)
            case messages.Stopped():
                if node.state is NodeState.STOPPING:
                    self._nodes.set_state(node, NodeState.WAITING)
                    node.port = message.master_port
                    attempt.node_stopped(message)
                    self._lifecycle.after_attempt(now_s)
            case messages.RankSamples(_, facts):
                if is_running and self._rules.on_hang != "off":
                    self._lifecycle.end_attempt(self._running.node_sampled(number, facts, now_s), now_s)
            case messages.RuleFired():
                if state.phase in OF_ATTEMPT:
                    self._lifecycle.end_attempt(self._running.rule_fired(message, now_s), now_s)
            case messages.RuleObservation():
                self._running.rule_observed(message, now_s)
            case messages.Examined():
                self._lifecycle.on_examined(number, message, now_s)
            case messages.RecoveryResult():
                self._lifecycle.on_recovered(number, message, now_s)

    def _on_identity(self, node: Node, number: int, message: messages.Identity, now_s: float) -> None:
        attempt = self._state.attempt
        self._nodes.set_digest(node, message.digest)
        differs = bool(message.digest and attempt.digest and message.digest != attempt.digest)
        if attempt.number >= 0 and differs and not self._rules.allow_mixed:
            self._membership.refuse_differing(number)
            self._lifecycle.drop(number, "it has another Python environment", now_s, now_s)
            return
        if node.state is NodeState.WAITING:
            self._consider_newcomer(number, now_s)
        if message.why:
            self._outbox.send(
                number, messages.Note(f"the environment of this node was not compared: {message.why}")
            )
        if self._state.phase is Phase.GATHERING:
            self._lifecycle.try_start(now_s)

    def _on_environment(self, number: int, message: messages.Environment) -> None:
        environments = self._gathering.environments
        if environments is not None and self._state.phase is Phase.GATHERING:
            difference = environments.on_environment(number, message)
            if difference:
                self._lifecycle.finish(1, difference)

    def _on_setup(self, number: int, news: messages.SetupReport, now_s: float) -> None:
        if self.finished:
            return
        reason = self._gathering.take_environments().on_setup(number, news, now_s)
        if reason:
            self._lifecycle.finish(1, reason)
        elif news.what == "ready" and self._state.phase is Phase.GATHERING:
            self._lifecycle.try_start(now_s)

    def _on_failed(self, number: int, failure: messages.Failure, now_s: float) -> None:
        state = self._state
        state.attempt.failures.add([failure])
        state.records.take_notes().heard(failure, now_s)
        if state.phase is Phase.RUNNING:
            self._lifecycle.end_attempt(self._running.rank_failed(number, failure, now_s), now_s)
        else:
            self._lifecycle.examine_too(number, now_s)

    def _on_succeeded(self, node: Node, number: int) -> None:
        if node.place is not None:
            self._state.attempt.succeeded.add(number)
            self._running.node_succeeded(number)
        if node.state is NodeState.RUNNING:
            self._nodes.set_state(node, NodeState.SUCCEEDED)
            if self._state.phase is Phase.RUNNING and not self._nodes.counts[NodeState.RUNNING]:
                self._lifecycle.finish(0, "")

    def _on_signal(self, number: int, signum: int, now_s: float) -> None:
        state, stopped = self._state, f"stopped by {signal_name(signum)}"
        if state.attempt.number >= 0 and self._nodes.by_number[number].place is None:
            # No rank of the job was on this node, so the job continues.
            self._outbox.send(
                number, messages.Refused(128 + signum, f"{stopped}; the job continues without this node")
            )
            self._lifecycle.drop(number, stopped, now_s, now_s)
            return
        is_second, state.signum = state.signum != 0, state.signum or signum
        if state.phase in (Phase.GATHERING, Phase.RECOVERING):
            self._lifecycle.finish(128 + signum, stopped)
        elif state.phase in (Phase.RUNNING, Phase.EXAMINING):
            self._lifecycle.stop(stopped, signum, now_s)
        elif state.phase is Phase.STOPPING:
            self._lifecycle.on_signal_again(number, signum, is_second=is_second)

    def _consider_newcomer(self, number: int, now_s: float) -> None:
        """Handle a new node that can take part."""
        nodes = self._nodes
        if nodes.silent and nodes.count_able(number) < self._rules.min_nodes <= nodes.count_able():
            # It replaces a silent node.
            silent = [each for each in nodes.silent if nodes.by_number[each].state is not NodeState.WAITING]
            for other in silent:
                self._lifecycle.give_up_silent(other, now_s)
        if self._state.phase is Phase.RUNNING:
            self._late.consider(number, now_s)
