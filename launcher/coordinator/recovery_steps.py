"""PURE: a recovery step between two attempts, or before an attempt's ranks are ended: requests and answers.

In: the nodes that get the request, answers, lost nodes, the time. Out: whether the step is over, and its results.
A node that does not answer in time is not waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

from launcher.rendezvous.messages import RecoveryResult

MARGIN_S = 10.0  # a node that ends its own work in time has answered by then

Answer = TypeVar("Answer")


class PendingAnswers(Generic[Answer]):
    """One request to some nodes."""

    def __init__(self, hosts: Mapping[int, str], limit_s: float, now_s: float) -> None:
        """Args: hosts: hosts that get the request, by node number; limit_s: the time that they have."""
        self._waiting = dict(hosts)
        self._asked = set(hosts)
        self.began_s = now_s
        self.until_s = now_s + limit_s + MARGIN_S
        self.answers: list[tuple[str, Answer]] = []  # with the host

    @property
    def is_over(self) -> bool:
        return not self._waiting

    @property
    def silent(self) -> list[str]:
        """Return the hosts that have not answered yet."""
        return list(self._waiting.values())

    def left_s(self, now_s: float) -> float:
        """Return how much of the hosts' time remains; 0 for none."""
        return max(0.0, self.until_s - MARGIN_S - now_s)

    def add(self, node: int, host: str) -> bool:
        """Add a node to the request. Returns: whether it is new."""
        is_new = node not in self._asked
        if is_new:
            self._asked.add(node)
            self._waiting[node] = host
        return is_new

    def answered(self, node: int, answer: Answer) -> None:
        """Record an answer. Ignore it if the node got no request or has already answered."""
        host = self._waiting.pop(node, None)
        if host is not None:
            self.answers.append((host, answer))

    def lost(self, node: int) -> None:
        """Stop waiting for a lost node."""
        self._waiting.pop(node, None)


def failed_checks(asked: PendingAnswers[RecoveryResult]) -> dict[str, dict[str, str]]:
    """Return the failed checks, by host and by name of the check. A host that has not answered also counts as a
    finding. Checks that could not run count neither for nor against a host."""
    failed: dict[str, dict[str, str]] = {}
    for host, answer in asked.answers:
        for found in answer.found if answer.is_well else ():
            failed.setdefault(host, {}).setdefault(found.check, found.text)
    for host in asked.silent:
        failed.setdefault(host, {})["answer"] = "its checks have not answered in time"
    return failed
