"""PURE: which nodes are excluded from further attempts, as their machines cause failures.

In: the first failures of each attempt, with the host. Out: newly excluded hosts. A certain accelerator fault
counts at once. A network or file system fault counts the second time on the same host within half an hour, as one
may pass. (ByteRobust evicts on the second network alert within 5 minutes. Bootseer's time is longer, since it only
sees failures of whole attempts.) A fault that other hosts have too excludes no node. A finding of a health check
or a replay counts at once; a passed check revokes the exclusion by an earlier check.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple

from bootseer.tuning import DEFAULTS

AGAIN_S = DEFAULTS.launcher.machine_fault_s


class MachineFault(NamedTuple):
    """A failure that its machine may have caused."""

    host: str
    what: str  # the fault in a few words: equal words on two hosts mean the same fault
    is_grave: bool  # sufficient alone


class Exclusion:
    """The excluded hosts, and why."""

    def __init__(self, again_s: float = AGAIN_S) -> None:
        self._again_s = again_s
        self._seen: list[tuple[float, MachineFault]] = []
        self.why: dict[str, str] = {}  # by host
        self._unfit: set[str] = set()  # hosts that a check has excluded

    def after_failure(self, faults: Iterable[MachineFault], now_s: float) -> list[MachineFault]:
        """Record the first faults of an attempt; on several hosts, the first of them is unknown.

        Include hosts again whose fault another host has now too. Returns: faults whose hosts are excluded from now
        on.
        """
        found = list(faults)
        self._seen = [(at_s, fault) for at_s, fault in self._seen if now_s - at_s <= self._again_s]
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
        """Record the results of health checks. A check that fails on all of several hosts excludes none of them.

        Include a host again that a check has excluded and that passes all checks now.
        Args: failed: by host, by name of the check, its finding; looked_at: hosts that were checked.
        Returns: faults of the hosts that are excluded from now on.
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

    def exclude_tested(self, host: str, what: str) -> bool:
        """Exclude a host that a test has found to be faulty. Returns: whether it is newly excluded."""
        is_news = host not in self.why
        self.why.setdefault(host, what)
        self._unfit.discard(host)  # passed checks do not revoke it
        return is_news
