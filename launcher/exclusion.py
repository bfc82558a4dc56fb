"""PURE: which nodes are left out of further attempts, because failures there are their machines' matter.

In: what first failed in each attempt, with the host. Out: hosts that are newly left out. A certain fault of an
accelerator counts at once; of the network and of file systems the second on the same host within half an hour, as
one may pass (ByteRobust tolerates a network alert and evicts on the second within 5 minutes; ours is longer, since
only failures of whole attempts are seen). What other hosts had too is no machine's fault: then nobody is left out.
What health checks or a replay have found counts at once, and checks that pass later take theirs back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
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
        self._unfit: set[str] = set()  # hosts that are left out for what a check has found

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
                self._unfit.discard(host)
        return news

    def after_checks(self, failed: Mapping[str, Mapping[str, str]], looked_at: Set[str]) -> list[MachineFault]:
        """Args: failed: by host, by name of the check, what it has found; looked_at: hosts that were checked.

        Returns: those that are left out from now on. A check that fails on every one of several hosts says nothing
        of a machine. Who was left out for a check is not any more when all of it is in order.
        """
        common: set[str] = set()
        if len(looked_at) > 1:
            common = set.intersection(*(set(failed.get(host, ())) for host in looked_at))
        news = []
        for host in sorted(looked_at):
            own = [what for check, what in sorted(failed.get(host, {}).items()) if check not in common]
            if not own and host in self._unfit:
                self._unfit.discard(host)
                del self.why[host]
            elif own and host not in self.why:
                self._unfit.add(host)
                self.why[host] = own[0]
                news.append(MachineFault(host, own[0], is_grave=True))
        return news

    def after_test(self, host: str, what: str) -> bool:
        """A test of the machines has named this one. Returns: whether that is news."""
        is_news = host not in self.why
        self.why.setdefault(host, what)
        self._unfit.discard(host)  # checks that pass do not take it back
        return is_news
