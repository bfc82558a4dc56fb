"""PURE: nodes that join a job, that are refused, that join late, and that are lost.

In: Joins and losses. Out: Welcomes and refusals, and when the job restarts with late nodes. job.py decides what
follows for the phase of the job.
"""

from __future__ import annotations

from bootseer.light_typing import TYPE_CHECKING
from launcher.coordinator.attempt import MAX_LOST_REPORTED, NodeLoss
from launcher.coordinator.nodes import Node, NodeState
from launcher.coordinator.state import JobState, Phase
from launcher.rendezvous import messages

if TYPE_CHECKING:
    from launcher.rendezvous.messages import EntryDigest

# Several nodes that join a running job within this time cost it one restart, not one each.
JOIN_SETTLE_S = 1.0


class Membership:
    """Admits nodes to one job, and records their loss."""

    def __init__(self, state: JobState) -> None:
        self._state = state
        self._runs: dict[str, EntryDigest] = {}  # the program of the ranks of a role, from the first node
        self._others_reported: set[str] = set()  # reported hosts of other jobs

    def refuses(self, number: int, join: messages.Join) -> bool:
        """Refuse a node that cannot join. Returns: whether it was refused."""
        outbox = self._state.outbox
        refusal = self._find_refusal(join)
        if refusal is not None:
            outbox.send(number, messages.Refused(1, refusal))
            if join.host not in self._others_reported and len(self._others_reported) < MAX_LOST_REPORTED:
                self._others_reported.add(join.host)
                outbox.log_to_all(f"refused {join.host} (pid {join.pid}): {refusal}")
            return True
        if self._state.phase is Phase.FINISHED:
            outbox.send(number, messages.Refused(1, f"job {join.run_id!r} has ended already"))
            return True
        return False

    def _find_refusal(self, join: messages.Join) -> str | None:
        rules, nodes = self._state.rules, self._state.nodes
        if join.run_id != rules.run_id:
            return (
                f"this endpoint serves job {rules.run_id!r}, not {join.run_id!r}: "
                "use another --rdzv-endpoint or --rdzv-id"
            )
        runs = self._runs.get(join.role, join.runs)
        if runs != join.runs and not rules.mixed_arguments:
            from launcher.rendezvous.same_job import describe_difference, is_same

            if not is_same(join.runs, runs):
                return describe_difference(rules.run_id, join.runs, runs)
        if (join.min_nodes, join.max_nodes) != (rules.min_nodes, rules.max_nodes):
            ours, theirs = (f"{low}:{high}" for low, high in (rules[1:3], (join.min_nodes, join.max_nodes)))
            return f"--nnodes differs: {theirs} here, {ours} at the coordinator; give all nodes the same"
        if rules.static:
            if max(0, join.node_rank) >= rules.max_nodes:
                return f"--node-rank {join.node_rank} does not fit --nnodes {rules.max_nodes}: ranks go from 0"
            claimant = nodes.find_claimant(join)
            other = nodes.by_number.get(claimant)
            if other is not None and claimant not in nodes.silent:
                return (
                    f"--node-rank {max(0, join.node_rank)} is already taken by {other.join.host} "
                    f"(pid {other.join.pid}): give each node its own"
                )
        return None

    def admit(self, number: int, join: messages.Join) -> Node:
        """Add a node to the job."""
        rules, nodes, outbox = self._state.rules, self._state.nodes, self._state.outbox
        node = nodes.add(number, join)
        self._runs.setdefault(join.role, join.runs)
        outbox.send(number, messages.Welcome(number, rules.open_membership))
        if not rules.static and join.node_rank >= 0 and nodes.find_claimant(join) != number:
            outbox.send(
                number,
                messages.Note(f"--node-rank {join.node_rank} was given to several nodes; their order is by name"),
            )
        if join.max_restarts != rules.max_restarts:
            outbox.send(
                number,
                messages.Note(
                    f"--max-restarts {join.max_restarts} here, {rules.max_restarts} at the coordinator: "
                    "using the coordinator's"
                ),
            )
        return node

    def refuse_differing(self, number: int) -> None:
        """Refuse a new node of a running job, as its environment differs; the caller removes it."""
        self._state.outbox.send(
            number,
            messages.Refused(
                1,
                "the Python environment of this node differs from that of the running job; install the same "
                "everywhere or start the job with --allow-mixed-environments",
            ),
        )

    def record_loss(self, node: Node, reason: str, now_s: float, heard_s: float) -> str:
        """Record the loss of a node that was removed. Returns: the node and why, if it took part; else ""."""
        attempt = self._state.attempt
        took_part, what = node.state is not NodeState.WAITING, f"{node.name}: {reason}"
        if took_part:
            attempt.failures.lost.append(NodeLoss(node.join.host, what, heard_s, now_s))
            self._state.changes.of_host(node.join.host)
        elif node.place is not None or attempt.number < 0:
            attempt.gone = [*attempt.gone, what][-MAX_LOST_REPORTED:]
        is_news = took_part or what in attempt.gone
        is_quiet = self._state.phase is Phase.RUNNING or attempt.reported_losses >= MAX_LOST_REPORTED
        if is_news and not is_quiet:
            attempt.reported_losses += 1
            self._state.outbox.log_to_all(f"lost node {what}")
        return what if took_part else ""


class LateNodes:
    """Nodes that can take part while others run ranks: they wait as spares, or the job restarts with them."""

    def __init__(self, state: JobState) -> None:
        self._rules, self._nodes, self._outbox = state.rules, state.nodes, state.outbox
        self.due_s: float | None = None  # when the job restarts with them

    def consider(self, number: int, now_s: float) -> None:
        """Handle one such node."""
        at_work = self._nodes.count_at_work()
        if at_work >= self._rules.max_nodes or self._nodes.counts[NodeState.SUCCEEDED]:
            self._outbox.send(number, messages.Spare(at_work))
        elif self.due_s is None:
            self.due_s = now_s + JOIN_SETTLE_S

    def is_due(self, now_s: float) -> bool:
        """Return whether the job restarts with them now."""
        return self.due_s is not None and now_s >= self.due_s

    def settle(self, excluded: int, now_s: float) -> str:
        """Return why the job restarts now; "" if they wait on, or all have left.

        Args: excluded: how many of the waiting nodes are excluded.
        """
        nodes = self._nodes
        self.due_s = None
        if nodes.silent:
            self.due_s = now_s + JOIN_SETTLE_S  # new nodes wait with the others
            return ""
        waiting = nodes.counts[NodeState.WAITING] - nodes.unidentified - excluded
        if nodes.counts[NodeState.SUCCEEDED]:
            for number, node in nodes.by_number.items():
                if node.state is NodeState.WAITING:
                    self._outbox.send(number, messages.Spare(nodes.count_at_work()))
        elif waiting > 0:
            from bootseer.counted import counted

            return f"{counted(waiting, 'more node joins', 'more nodes join')}"
        return ""

    def forget(self) -> None:
        """Plan no restart: the attempt ends anyway, or the next one begins."""
        self.due_s = None
