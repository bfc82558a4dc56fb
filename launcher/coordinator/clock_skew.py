"""PURE: nodes whose wall clock differs from those of the other nodes, at the coordinator.

In: readings of nodes' wall clocks, with the job's clock at that moment and the bound of its error. Out: findings
that are new or over. The median clock is taken as correct. Of two clocks that differ both are named, since either
can be wrong. Clocks are compared once a round, when each node at work has sent a reading: else the work would grow
with the square of the number of nodes.
"""

from __future__ import annotations

from bootseer.health.changes import Change, Changes
from bootseer.health.finding import OK, Finding, if_above
from bootseer.health.limits import Limits

CHECK = "clock-skew"
_WAY_OUT = "set it by chronyd, ntpd or systemd-timesyncd (chronyc tracking, timedatectl)"


class ClockWatch:
    """Clock differences between the nodes of one job."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._offsets_s: dict[
            int, tuple[float, float]
        ] = {}  # by node: wall clock less the job's, bound of the error
        self._awaited: set[int] = set()  # nodes that have not sent a reading in this round
        self._changes = Changes()

    def said(self, node: int, wall_ns: int, job_ns: int, error_ns: int) -> bool:
        """Take a reading; return whether `look` has something to do."""
        self._offsets_s[node] = (wall_ns - job_ns) / 1e9, error_ns / 1e9
        self._awaited.discard(node)
        return not self._awaited

    def lost(self, node: int) -> None:
        self._offsets_s.pop(node, None)
        self._awaited.discard(node)

    def look(self, hosts: dict[int, str]) -> list[Change]:
        """Begin another round; return the changes of the last one.

        Args: hosts: hosts of the nodes at work, by number; all must have sent a reading.
        """
        if len(hosts) < 2:
            self._awaited = set(self._offsets_s)
            return []
        self._awaited = hosts.keys() - self._offsets_s.keys()
        if self._awaited:
            return []
        self._awaited = set(hosts)
        return self._changes.look([CHECK], self._judge(hosts))

    def _judge(self, hosts: dict[int, str]) -> list[Finding]:
        known = {node: self._offsets_s[node] for node in hosts}
        # The median: a clock that differs from it also differs from half of the others.
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
