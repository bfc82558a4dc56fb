"""PURE: which nodes are left out of further attempts, because failures there are their machines' matter.

In: what first failed in each attempt, with the host. Out: hosts that are newly left out. A certain fault of an
accelerator counts at once; of the network and of file systems the second on the same host within half an hour, as
one may pass (ByteRobust tolerates a network alert and evicts on the second within 5 minutes; ours is longer, since
only failures of whole attempts are seen). What other hosts had too is no machine's fault: then nobody is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

AGAIN_S = 1800.0


class MachineFault(NamedTuple):
    """A failure that may be its machine's matter."""

    host: str
    what: str  # the fault in a few words: the same words on two hosts are the same fault
    is_grave: bool  # enough alone


class Exclusion:
    """Hosts that are left out, and why."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, MachineFault]] = []
        self.why: dict[str, str] = {}  # by host

    def after_failure(self, faults: Iterable[MachineFault], now_s: float) -> list[MachineFault]:
        """Args: faults: what first failed in this attempt; several hosts: which was first is not known.

        Returns: those whose hosts are left out from now on. Who was left out for what another host has now, too,
        is not any more.
        """
        found = list(faults)
        self._seen = [(at_s, fault) for at_s, fault in self._seen if now_s - at_s <= AGAIN_S]
        news: list[MachineFault] = []
        if len({fault.host for fault in found}) == 1:
            for fault in found:
                known = [other for _, other in self._seen if other.what == fault.what]
                elsewhere = any(other.host != fault.host for other in known)
                again = any(other.host == fault.host for other in known)
                if fault.host not in self.why and not elsewhere and (fault.is_grave or again):
                    self.why[fault.host] = fault.what
                    news.append(fault)
        self._seen += [(now_s, fault) for fault in found]
        for host, what in list(self.why.items()):
            if any(fault.what == what and fault.host != host for fault in found):
                del self.why[host]
        return news

    def after_test(self, host: str, what: str) -> bool:
        """A test of the machines has named this one. Returns: whether that is news."""
        is_news = host not in self.why
        self.why.setdefault(host, what)
        return is_news
