"""PURE: whose wall clock differs from those of the other nodes, at the coordinator.

In: readings of nodes' wall clocks, with the job's clock at that moment and the bound of its error. Out: findings
that have come or gone. The middle clock is taken for right; of two that differ both are named, as nobody knows
which is.
"""

from __future__ import annotations

from bootseer.health.changes import Change, Changes
from bootseer.health.finding import OK, Finding, if_above
from bootseer.health.limits import Limits

CHECK = "clock-skew"
_WAY_OUT = "set it by chronyd, ntpd or systemd-timesyncd (chronyc tracking, timedatectl)"


class ClockWatch:
    """Of one job."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._offsets_s: dict[
            int, tuple[float, float]
        ] = {}  # by node: wall clock less the job's, bound of the error
        self._changes = Changes()

    def said(self, node: int, wall_ns: int, job_ns: int, error_ns: int) -> None:
        self._offsets_s[node] = (wall_ns - job_ns) / 1e9, error_ns / 1e9

    def lost(self, node: int) -> None:
        self._offsets_s.pop(node, None)

    def look(self, hosts: dict[int, str]) -> list[Change]:
        """What is new. Args: hosts: of the nodes at work, by number; all have to have said what they have."""
        if len(hosts) < 2 or not self._offsets_s.keys() >= hosts.keys():
            return []
        return self._changes.look([CHECK], self._judge(hosts))

    def _judge(self, hosts: dict[int, str]) -> list[Finding]:
        known = {node: self._offsets_s[node] for node in hosts}
        # A clock of the job: whoever differs from it differs from half of all others, too.
        middle_s, middle_error_s = sorted(known.values())[(len(known) - 1) // 2]
        findings = []
        for node, (offset_s, error_s) in known.items():
            skew_s = abs(offset_s - middle_s)
            certain_s = skew_s - error_s - middle_error_s
            level, limit_s = if_above(certain_s, self._limits.skew_warn_s, self._limits.skew_fail_s)
            if level == OK:
                continue
            where, what = hosts[node], "its clock differs from the others' by"
            if len(known) == 2:
                where, what = " and ".join(sorted(hosts.values())), "their clocks differ by"
            findings.append(Finding(CHECK, level, what, where, round(skew_s, 3), limit_s, "s", _WAY_OUT))
        return findings
