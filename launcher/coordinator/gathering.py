"""PURE: the wait for nodes, from the start of the job or the end of an attempt until the next attempt starts.

In: the nodes, the time. Out: when to start, the members of the attempt and their Worlds, and why the job ends if
nodes are missing for too long.
"""

from __future__ import annotations

from bootseer.light_typing import TYPE_CHECKING
from launcher.coordinator.attempt import Attempt
from launcher.coordinator.nodes import NodeState
from launcher.coordinator.state import JobState, Phase
from launcher.rendezvous import messages, ranks

if TYPE_CHECKING:
    from launcher.coordinator.environments import JobEnvironments


class Gathering:
    """The gathering of nodes for the attempts of one job."""

    def __init__(self, state: JobState) -> None:
        self._state = state
        self._rules, self._nodes, self._outbox = state.rules, state.nodes, state.outbox
        self.environments: JobEnvironments | None = None  # from the first news about them on
        self._since_s: float | None = None
        self._last_call_at_s: float | None = None
        self._not_before_s = 0.0
        self._regather = False  # the next world starts without a last call
        self._is_waiting_reported = False

    def take_environments(self) -> JobEnvironments:
        """Return the environments of the nodes; begin to track them if this is the first news."""
        if self.environments is None:
            from launcher.coordinator.environments import JobEnvironments

            self.environments = JobEnvironments(self._state)
        return self.environments

    @property
    def is_comparing(self) -> bool:
        """Whether nodes must send their environment."""
        return self.environments is not None and self.environments.is_comparing

    # ---- time ------------------------------------------------------------------------------------------------

    def node_joined(self, now_s: float) -> None:
        """Begin to wait, if this is the first node."""
        if self._since_s is None:
            self._since_s = now_s

    def begin_again(self, now_s: float) -> None:
        """Begin to wait for the nodes of the next attempt."""
        self._regather = True
        if self.environments is not None:
            self.environments.between_attempts(now_s)
        self._since_s = max(now_s, self._not_before_s)  # no node is late while the job itself waits

    def pause(self, delay_s: float, now_s: float) -> None:
        """Start no attempt before this delay is over."""
        self._not_before_s = now_s + delay_s if delay_s else 0.0

    def network_tested(self, now_s: float) -> None:
        """Grant missing nodes the full time again, since the network test is over."""
        if self._since_s is not None:
            self._since_s = max(now_s, self._not_before_s)

    def deadlines_s(self, *, is_testing: bool) -> list[float | None]:
        """Return when to call `tick`. Args: is_testing: a network test runs, so missing nodes have time."""
        by_s = self._by_s(self._since_s) if self._since_s is not None and not is_testing else None
        return [by_s, self._last_call_at_s, self._not_before_s or None]

    def end_pause(self, now_s: float) -> None:
        """Allow the next attempt if the pause before it is over."""
        if now_s >= self._not_before_s:
            self._not_before_s = 0.0

    def find_missing(self, now_s: float, *, is_testing: bool) -> str:
        """Return which nodes or reports are missing if the time for them is over, else ""."""
        since_s = None if is_testing else self._since_s
        if since_s is None or now_s < self._by_s(since_s):
            return ""
        return self._describe_missing(now_s - since_s)

    def _by_s(self, since_s: float) -> float:
        """Return when a gathering ends; with enough nodes, set-up has its own limit on top."""
        is_set_up = self.environments is not None and self.environments.has_setup
        is_set_up = is_set_up and self._nodes.count_reachable() >= self._rules.min_nodes
        return since_s + self._rules.join_s + (self._rules.setup_s if is_set_up else 0.0)

    def _describe_missing(self, waited_s: float) -> str:
        nodes, environments = self._nodes, self.environments
        heard = [node.join.host for number, node in nodes.by_number.items() if number not in nodes.silent]
        here = ", ".join(sorted(heard, key=ranks.natural_key)[:16])
        if len(heard) < self._rules.min_nodes:
            return (
                f"only {len(heard)} of {self._rules.min_nodes} nodes joined within {waited_s:.0f} s "
                f"(join_timeout): {here or 'none'}{self._state.attempt.describe_lost()}"
            )
        unready = () if environments is None else environments.unready
        if unready:
            hosts = sorted(nodes.by_number[number].join.host for number in unready)
            return f"the environment was not remade on {', '.join(hosts[:16])} within {waited_s:.0f} s"
        silent = [node.join.host for node in nodes.by_number.values() if node.digest is None]
        if not silent and environments is not None:
            silent = environments.unreported()
        return f"no report of the Python environment from {', '.join(silent[:16])} within {waited_s:.0f} s"

    def report_missing(self, now_s: float) -> None:
        """Report missing nodes, once before each attempt."""
        missing, since_s = self._rules.min_nodes - self._nodes.count_reachable(), self._since_s
        is_gathering = self._state.phase is Phase.GATHERING
        if not is_gathering or missing <= 0 or since_s is None or self._is_waiting_reported:
            return
        self._is_waiting_reported = True
        left_s = self._by_s(since_s) - now_s
        nodes = "node" if missing == 1 else "nodes"
        self._outbox.log_to_all(f"waiting up to {left_s:.0f} s (join_timeout) for {missing} more {nodes}")

    # ---- the start of an attempt -----------------------------------------------------------------------------

    def may_start(self, now_s: float, *, is_testing: bool) -> bool:
        """Return whether an attempt starts now; if environments differ instead, let the nodes resolve that."""
        rules, nodes = self._rules, self._nodes
        is_first = self._state.attempt.number < 0
        # A running job does not wait for digests of new nodes.
        count = nodes.count_reachable() if is_first else nodes.count_able()
        if count >= rules.max_nodes:
            self._last_call_at_s = None
        if count < rules.min_nodes or self.is_comparing:
            self._last_call_at_s = None
            return False
        if count < rules.max_nodes and not self._regather:
            if self._last_call_at_s is None:
                self._last_call_at_s = now_s + rules.last_call_s
            if now_s < self._last_call_at_s:
                return False
            self._regather, self._last_call_at_s = True, None
        if now_s < self._not_before_s or (nodes.unidentified and is_first):
            return False
        if is_testing or (self.environments is not None and self.environments.unready):
            return False
        # Later, a node that differs is refused at its digest.
        if is_first and not rules.allow_mixed and len(set(nodes.digests().values()) - {""}) > 1:
            self.take_environments().resolve_difference()
            return False
        return True

    def find_candidates(self) -> list[ranks.Candidate]:
        """Return the nodes that can take part in an attempt."""
        return [
            ranks.Candidate(number, node.join, node.place)
            for number, node in self._nodes.by_number.items()
            if node.digest is not None and number not in self._nodes.silent
        ]

    def start(self, candidates: list[ranks.Candidate], now_s: float) -> list[ranks.Candidate]:
        """Begin an attempt; `send_worlds` follows. Returns: its members, in the order of their ranks."""
        state = self._state
        number = state.attempt.number + 1
        members = ranks.choose_places(candidates, self._rules.max_nodes)
        if self._rules.static:
            members.sort(key=lambda member: max(0, member.join.node_rank))
        elif not number and ranks.explicit_ranks_clash({m.node: m.join for m in members}):
            plain = [m._replace(join=m.join._replace(node_rank=-1)) for m in members]
            joins = {m.node: m.join for m in members}
            members = [m._replace(join=joins[m.node]) for m in sorted(plain, key=ranks.order_key)]
        digests = (self._nodes.by_number[member.node].digest for member in members)
        state.attempt = Attempt(number, now_s, len(members), next((digest for digest in digests if digest), ""))
        state.phase = Phase.RUNNING
        self._since_s = self._last_call_at_s = None
        self._regather = self._is_waiting_reported = False
        return members

    def send_worlds(self, members: list[ranks.Candidate]) -> None:
        """Give the members of an attempt their places, and send all nodes their part."""
        nodes, attempt = self._nodes, self._state.attempt
        first = nodes.by_number[members[0].node]
        master = self._rules.master or (first.join.address, first.port)
        for node in nodes.by_number.values():
            node.place = None
        worlds = ranks.make_worlds(members, attempt.number, self._state.restarts.count, master)
        for member, world in zip(members, worlds, strict=True):
            node = nodes.by_number[member.node]
            if member.place is None and attempt.number > 0:
                self._state.changes.of_host(node.join.host)
            node.place = world.group_rank
            nodes.set_state(node, NodeState.RUNNING)
            self._outbox.send(member.node, world)
        for number, node in nodes.by_number.items():
            if node.place is None:
                self._outbox.send(number, messages.Spare(len(members)))
