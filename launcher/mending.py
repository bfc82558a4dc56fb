"""PURE: a step between two attempts, or before an attempt's ranks are ended: who is asked, who has answered.

In: the nodes that are asked, answers, lost nodes, the time. Out: whether it is over, and what came of it. Whoever
says nothing in time is not waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

from launcher.rendezvous.messages import Mended

MARGIN_S = 10.0  # a node that ends its own work in time has answered by then

Answer = TypeVar("Answer")


class Asked(Generic[Answer]):
    """One question to some nodes."""

    def __init__(self, hosts: Mapping[int, str], limit_s: float, now_s: float) -> None:
        """Args: hosts: those who are asked, by number of the node; limit_s: that they were given."""
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
        """Hosts that have not answered yet."""
        return list(self._waiting.values())

    def left_s(self, now_s: float) -> float:
        """Of the time that they were given; 0 for none."""
        return max(0.0, self.until_s - MARGIN_S - now_s)

    def ask_also(self, node: int, host: str) -> bool:
        """One more is asked. Returns: whether it was not yet."""
        is_new = node not in self._asked
        if is_new:
            self._asked.add(node)
            self._waiting[node] = host
        return is_new

    def answered(self, node: int, answer: Answer) -> None:
        """Of a node that was not asked, or has answered, nothing is taken."""
        host = self._waiting.pop(node, None)
        if host is not None:
            self.answers.append((host, answer))

    def lost(self, node: int) -> None:
        """It will not answer."""
        self._waiting.pop(node, None)


def failed_checks(asked: Asked[Mended]) -> dict[str, dict[str, str]]:
    """By host that was looked at, by name of the check: what makes it unfit. That a node says nothing is a
    finding, too; checks that could not be made say nothing of it, good or bad."""
    failed: dict[str, dict[str, str]] = {}
    for host, answer in asked.answers:
        for found in answer.found if answer.is_well else ():
            failed.setdefault(host, {}).setdefault(found.check, found.text)
    for host in asked.silent:
        failed.setdefault(host, {})["answer"] = "nothing was heard of its checks in time"
    return failed
