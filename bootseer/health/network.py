"""Verdicts on NICs and InfiniBand ports. Pure: facts in, findings out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from bootseer.health.finding import FAIL, OK, UNKNOWN, WARN, Finding, if_above
from bootseer.health.limits import Limits

if TYPE_CHECKING:
    from bootseer.health.network_facts import Link

_LOST = ("carrier_changes", "link_downed")
_DROPPED = "dropped"
_CABLE = "check cable, transceiver and switch port"


def judge_links(
    links: list[Link], rates: Mapping[str, Mapping[str, float]], wanted: Sequence[str], limits: Limits
) -> list[Finding]:
    """Judge all links. Args: rates: per second, by link and counter; wanted: names that have to exist and work."""
    findings = [
        Finding("network", FAIL, "no such NIC", name, way_out="list the NICs with ip link")
        for name in wanted
        if name not in {link.name for link in links}
    ]
    # One port of a pair is often unused: it only warns, unless the user has named it or it has the default route.
    findings += [found for link in links for found in _state(link, link.name in wanted)]
    for link in links:
        findings += _counters(link, rates.get(link.name, {}), limits)
    findings += _slower(links)
    if findings:
        return findings
    if not links:
        return [Finding("network", UNKNOWN, "no NIC found", way_out="mount /sys")]
    return [
        Finding("network", OK, f"links are up and without errors: {', '.join(link.name for link in links)[:200]}")
    ]


def _state(link: Link, is_wanted: bool) -> list[Finding]:
    is_needed = is_wanted or link.has_default_route
    if not link.is_up:
        what, way_out = "it is turned off", f"ip link set {link.name} up"
        return [Finding("network", FAIL, what, link.name, way_out=way_out)] if is_needed else []
    if not link.has_carrier:
        return [
            Finding("network", FAIL if is_needed else WARN, f"no link ({link.state})", link.name, way_out=_CABLE)
        ]
    if link.half_duplex:
        return [Finding("network", WARN, "half duplex", link.name, way_out="turn autonegotiation on at both ends")]
    return []


def _counters(link: Link, rates: Mapping[str, float], limits: Limits) -> list[Finding]:
    findings = []
    for counter, per_s in sorted(rates.items()):
        if counter in _LOST:
            if per_s > 0:
                findings.append(
                    Finding("network", FAIL, f"its link is unstable ({counter})", link.name, way_out=_CABLE)
                )
            continue
        is_drop = _DROPPED in counter or counter == "rx_missed_errors"
        level, limit = if_above(per_s, limits.errors_warn_per_s, limits.errors_fail_per_s)
        if level == OK:
            continue
        way_out = "larger rings (ethtool -G), or flow control of the fabric" if is_drop else _CABLE
        level, limit = (WARN, limits.errors_warn_per_s) if is_drop else (level, limit)
        findings.append(Finding("network", level, counter, link.name, per_s, limit, "1/s", way_out))
    return findings


def _slower(links: list[Link]) -> list[Finding]:
    """Find InfiniBand ports slower than the others of the node: their link training went wrong."""
    ports = [link for link in links if "/" in link.name and link.has_carrier and link.bits_per_s]
    best = max((port.bits_per_s for port in ports), default=0.0)
    return [
        Finding(
            "network",
            WARN,
            "it is slower than another port of this node",
            port.name,
            port.bits_per_s / 1e9,
            best / 1e9,
            "Gbit/s",
            _CABLE,
        )
        for port in ports
        if port.bits_per_s < best
    ]
