"""PURE: one test of the network between the nodes of a job, at its coordinator, before they restart.

    request all to listen --all addresses, or timeout--> request to measure --all results, or timeout--> over

In: answers of nodes, lost nodes, the time. Out: messages for nodes; at the end findings, and the nodes at fault,
by two tests. A node that does not answer delays the test only until the timeout. Larger jobs measure in groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from ipaddress import ip_address
from typing import TYPE_CHECKING, NamedTuple

from bootseer.health.pairs import PairMeasurement, count_rounds, find_bad, judge_pairs
from launcher.rendezvous.messages import PairNode, PairOrder, PairPort, PairResult, WantPairs

if TYPE_CHECKING:
    from bootseer.health.finding import Finding
    from bootseer.health.limits import Limits

READY_S = 5.0  # for a process to start and listen
ROUND_S = 1.0  # as in bootseer/health/pair_node.py
MARGIN_S = 2.0
GROUP_NODES = 64


class NodeRequest(NamedTuple):
    node: int
    message: WantPairs | PairOrder


class JobNetworkTest:
    """One test of the network between nodes; `take` returns its messages."""

    def __init__(self, number: int, hosts: Mapping[int, str], limits: Limits, now_s: float) -> None:
        """Args: number: no other test of this job has this number or the next one; hosts: of the nodes that take
        part, by their number at the coordinator."""
        self._hosts = dict(hosts)
        self._names = _unique_names(hosts)
        self._limits = limits
        self._asks: list[NodeRequest] = []
        self._suspects: set[frozenset[str]] | None = None  # ends of links that were bad in the first test
        self.findings: list[Finding] = []  # when it is over
        self.named: dict[int, Finding] = {}  # findings that name a node
        self.is_over = len(self._hosts) < 2
        if not self.is_over:
            self._ask(number, now_s)

    @property
    def deadline_s(self) -> float | None:
        return None if self.is_over else self._by_s

    def take(self) -> list[NodeRequest]:
        """Return the messages to send now."""
        asks, self._asks = self._asks, []
        return asks

    def receive(self, node: int, message: PairPort | PairResult, now_s: float) -> None:
        """Record an answer; ignore answers to other tests and of other nodes."""
        if self.is_over or message.number != self._number or node not in self._hosts:
            return
        if isinstance(message, PairResult):
            if node in self._places:
                self._results.setdefault(node, message)
        elif not self._groups:
            self._ports.setdefault(node, message)
        self._advance(now_s, is_late=False)

    def lost(self, node: int, now_s: float) -> None:
        """Stop waiting for a lost node."""
        self._hosts.pop(node, None)
        self._advance(now_s, is_late=False)

    def tick(self, now_s: float) -> None:
        if not self.is_over and now_s >= self._by_s:
            self._advance(now_s, is_late=True)

    def _ask(self, number: int, now_s: float) -> None:
        self._number = number
        self._by_s = now_s + READY_S
        self._ports: dict[int, PairPort] = {}
        self._groups: list[list[int]] = []
        self._places: dict[int, tuple[int, int]] = {}  # of nodes that measure: group, and index in it
        self._results: dict[int, PairResult] = {}
        self._asks += [NodeRequest(node, WantPairs(number)) for node in self._hosts]

    def _advance(self, now_s: float, is_late: bool) -> None:
        if self.is_over:
            return
        if not self._groups:
            if is_late or self._ports.keys() >= self._hosts.keys():
                self._begin(now_s)
        elif is_late or all(node in self._results for node in self._places if node in self._hosts):
            self._end(now_s)

    def _begin(self, now_s: float) -> None:
        able = self._able()
        self._groups = [able[place : place + GROUP_NODES] for place in range(0, len(able), GROUP_NODES)]
        rounds = max((count_rounds(len(group)) for group in self._groups), default=0)
        if not rounds:
            self._end(now_s)
            return
        self._by_s = now_s + rounds * ROUND_S + MARGIN_S
        for number, group in enumerate(self._groups):
            nodes = tuple(PairNode(self._ports[node].address, self._ports[node].port) for node in group)
            for place, node in enumerate(group):
                self._places[node] = number, place
                self._asks.append(NodeRequest(node, PairOrder(self._number, place, nodes)))

    def _able(self) -> list[int]:
        """Return the nodes that can take part. Only a node with a loopback address can reach another such node."""
        known = [(node, self._ports[node]) for node in self._hosts if node in self._ports]
        near = {
            node: found for node, port in known if port.port and (found := _is_loopback(port.address)) is not None
        }
        return [node for node in near if not near[node] or all(near.values())]

    def _end(self, now_s: float) -> None:
        order = [node for group in self._groups for node in group]
        names, results = [self._names[node] for node in order], self._joined()
        if self._suspects is None and (bad := find_bad(results, names, self._limits)):
            # A node may have been busy with processes that were ending: report only links that are bad twice.
            self._suspects = bad
            self._ask(self._number + 1, now_s)
            return
        self.is_over = True
        self.findings, named = judge_pairs(results, names, self._limits, self._suspects)
        by_name = {found.where: found for found in self.findings}
        self.named = {order[place]: by_name[names[place]] for place in named}

    def _joined(self) -> dict[int, list[PairMeasurement]]:
        """Return the results of all groups, numbered as one group."""
        results = {}
        for node, result in self._results.items():
            group, place = self._places[node]
            first = group * GROUP_NODES
            results[first + place] = [
                PairMeasurement(*each)._replace(partner=first + each.partner)
                for each in result.measured
                if 0 <= each.partner < len(self._groups[group])
            ]
        return results


def _is_loopback(address: str) -> bool | None:
    """Return whether it is a loopback address; None if it is no IP address."""
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return None


def _unique_names(hosts: Mapping[int, str]) -> dict[int, str]:
    """Return unique names: several nodes of a job can be on one host."""
    counts = Counter(hosts.values())
    return {node: host if counts[host] == 1 else f"{host} (node {node})" for node, host in hosts.items()}
