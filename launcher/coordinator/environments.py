"""PURE: the Python environments of a job's nodes: set-up before the first attempt, and equality.

In: SetupReports, Environments and lost nodes. Out: messages to nodes, and reasons to end the job. setup_policy.py
decides on set-up; this module applies it to the nodes of the job. Only jobs with set-up, or whose nodes differ,
load it.
"""

from __future__ import annotations

from collections.abc import Iterable

from launcher.coordinator.setup_policy import JobSetup, NodeOrder
from launcher.coordinator.state import JobState
from launcher.rendezvous.messages import Environment, SetupReport, WantEnvironment

# News of set-up that end the job.
ENDS_JOB = {"failed": "set-up failed", "strict": "--strict: an optimization failed", "misplaced": "no such store"}
# Share of join_s in which all nodes must have the cached environment. The rest suffices to run set-up after it.
USE_SHARE = 0.5
MAX_COMPARED = 8  # nodes with different environments


class JobEnvironments:
    def __init__(self, state: JobState) -> None:
        self._rules, self._nodes, self._outbox = state.rules, state.nodes, state.outbox
        self._setup: JobSetup | None = None  # with --setup, from its first message on
        self._comparing: list[int] = []  # nodes that must send their environment

    @property
    def has_setup(self) -> bool:
        """Whether the nodes run set-up, or have run it."""
        return self._setup is not None

    @property
    def is_comparing(self) -> bool:
        """Whether nodes must send their environment."""
        return bool(self._comparing)

    @property
    def unready(self) -> frozenset[int]:
        """The nodes that remake their environment before the next attempt."""
        return frozenset() if self._setup is None else self._setup.mending & self._nodes.by_number.keys()

    def unreported(self) -> list[str]:
        """Return the hosts that have not sent their environment."""
        asked = [self._nodes.by_number.get(number) for number in self._comparing]
        return [node.join.host for node in asked if node is not None and node.environment is None]

    # ---- set-up ----------------------------------------------------------------------------------------------

    def on_setup(self, number: int, news: SetupReport, now_s: float) -> str:
        """Handle news about the environment of a node. Returns: why the job ends, "" if it continues."""
        host = self._nodes.by_number[number].join.host
        if news.what in ENDS_JOB:
            where = f" on {host}" if self._rules.max_nodes > 1 else ""
            return f"{ENDS_JOB[news.what]}{where}: {news.text}"
        if self._setup is None:
            rules = self._rules
            self._setup = JobSetup(rules.min_nodes, rules.setup_wait_s, rules.join_s * USE_SHARE)
        self._send(self._setup.receive(number, host, news, now_s))
        return ""

    def between_attempts(self, now_s: float) -> None:
        """Let nodes with an unreadable environment fetch it again; no rank runs."""
        if self._setup is not None:
            self._send(self._setup.between_attempts(now_s))

    def deadline_s(self) -> float | None:
        """Return when to call `tick`."""
        return None if self._setup is None else self._setup.deadline_s()

    def tick(self, now_s: float) -> None:
        """Handle timeouts of set-up."""
        if self._setup is not None:
            self._send(self._setup.tick(now_s))

    def _send(self, orders: Iterable[NodeOrder]) -> None:
        for order in orders:
            self._outbox.send(order.node, order.order)

    # ---- equality --------------------------------------------------------------------------------------------

    def resolve_difference(self) -> None:
        """Let nodes whose environments differ remake them; if they already have, compare them for an error."""
        if self._setup is not None and self._set_up_again(self._setup):
            return
        from launcher.rendezvous.environment_differences import group_by_digest

        groups = group_by_digest(self._nodes.digests())
        self._comparing = [numbers[0] for _, numbers in groups[:MAX_COMPARED]]
        for number in self._comparing:
            self._outbox.send(number, WantEnvironment())

    def _set_up_again(self, setup: JobSetup) -> bool:
        """Let nodes remake environments that differ, and send their digests again; return whether any does."""
        orders = setup.try_again()
        for order in orders:
            node = self._nodes.by_number.get(order.node)
            if node is not None and node.join.has_identity and node.digest is not None:
                self._nodes.set_digest(node, None)
        self._send(orders)
        return bool(orders)

    def on_environment(self, number: int, message: Environment) -> str:
        """Handle a requested environment. Returns: the differences, once all are there, as they end the job."""
        if number not in self._comparing:
            return ""
        nodes = self._nodes.by_number
        nodes[number].environment = message.distributions
        asked = [nodes[each] for each in self._comparing if each in nodes]
        if not asked or any(each.environment is None for each in asked):
            return ""
        from launcher.rendezvous.environment_differences import difference_table

        table = difference_table([(each.join.host, each.environment) for each in asked if each.environment])
        return (
            "the nodes have different Python environments; install the same everywhere or pass "
            f"--allow-mixed-environments\n{table}"
        )

    def stop_comparing(self, number: int) -> None:
        """Stop the comparison if this node, which is lost, was part of it."""
        if number in self._comparing:
            self._comparing = []

    def lost(self, number: int, now_s: float) -> None:
        """Handle the loss of a node in set-up."""
        if self._setup is not None:
            self._send(self._setup.lost(number, now_s))
