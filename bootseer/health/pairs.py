"""Verdict on the network between nodes: schedule of measurements; nodes and links worse than the rest. Pure.

In each round every node has at most one partner (the circle method of round-robin tournaments), so n/2 pairs
measure at a time. Nodes and links are compared only within this job, as the figures of a good network are unknown.
A node is named if it is bad with most of its partners, as they are with few.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median, median_high, median_low
from typing import NamedTuple

from bootseer.counted import counted
from bootseer.health.finding import FAIL, OK, UNKNOWN, WARN, Finding, format_value
from bootseer.health.limits import Limits

CHECK = "pairs"
MAX_LINKS = 16  # the worst ones, reported one by one
MAX_ROUNDS = 15  # in larger jobs each node measures with so many others
_LATE_TIMES = 10.0  # of the latency of others, minimum
_LOST_TIMES = 5.0
_NIC = "check its NIC, cable and switch port (bootseer check --only network there)"
_PATH = "check the cables and switches between them"


class PairMeasurement(NamedTuple):
    """The measurements of a node with a partner; None if impossible."""

    partner: int
    error: str = ""  # why nothing was measured; "" otherwise
    latency_s: float | None = None  # round trip; measured by one of the two
    bytes_per_s: float | None = None  # received from it
    lost_share: float | None = None  # of the segments sent to it, the retransmitted ones


class PairPath(NamedTuple):
    """The path from one node to another."""

    error: str
    latency_s: float | None
    bytes_per_s: float | None
    lost_share: float | None


def count_rounds(nodes: int) -> int:
    """Return the rounds in which each node measures with each other, or with MAX_ROUNDS others."""
    return min(MAX_ROUNDS, nodes - 1 + nodes % 2) if nodes > 1 else 0


def find_partner(nodes: int, number: int, turn: int) -> int | None:
    """Return a node's partner in a round; None for none (with an odd number of nodes one always rests)."""
    last = nodes - 1 + nodes % 2  # of an even number; it is fixed, all others rotate around it
    if number == last:
        partner = turn * ((last + 1) // 2) % last
    else:
        partner = (turn - number) % last
        if partner == number:
            partner = last
    return partner if partner < nodes else None


def join_paths(results: Mapping[int, Iterable[PairMeasurement]]) -> dict[tuple[int, int], PairPath]:
    """Return paths by sender and receiver. Args: results: by node. If one side failed, the pair has failed."""
    ways: dict[tuple[int, int], PairPath] = {}
    for number, measured in results.items():
        for each in measured:
            if each.partner == number:
                continue
            for pair, found in (
                ((each.partner, number), PairPath(each.error, each.latency_s, each.bytes_per_s, None)),
                ((number, each.partner), PairPath(each.error, each.latency_s, None, each.lost_share)),
            ):
                before = ways.get(pair)
                ways[pair] = found if before is None else _merge(before, found)
    return ways


def _merge(one: PairPath, other: PairPath) -> PairPath:
    if one.error or other.error:
        return PairPath(one.error or other.error, None, None, None)
    return PairPath(
        "", *(mine if mine is not None else theirs for mine, theirs in zip(one[1:], other[1:], strict=True))
    )


class _Usual(NamedTuple):
    """The usual values of this job: the median over nodes of the median of each node's paths."""

    latency_s: float | None
    bytes_per_s: float | None
    lost_share: float | None


def find_bad(
    results: Mapping[int, Sequence[PairMeasurement]], names: Sequence[str], limits: Limits
) -> set[frozenset[str]]:
    """Return the end names of all links that are bad in at least one direction."""
    ways = join_paths(results)
    rest = _find_rest(ways)
    return {
        frozenset(names[number] for number in pair) for pair, way in ways.items() if _find_wrong(way, rest, limits)
    }


def judge_pairs(
    results: Mapping[int, Sequence[PairMeasurement]],
    names: Sequence[str],
    limits: Limits,
    suspects: set[frozenset[str]] | None = None,
) -> tuple[list[Finding], list[int]]:
    """Judge a test. Args: results: by node, if known; names: of all requested nodes, distinct;
    suspects: the links that were bad in an earlier test, the only candidates.

    Returns: findings, for links only the worst, and the nodes that are bad with most of their partners.
    """
    ways = join_paths(results)
    if not ways:
        return [Finding(CHECK, UNKNOWN, "no two nodes have measured", way_out="see the errors of each node")], []
    rest = _find_rest(ways)
    bad = {
        pair: said
        for pair, way in ways.items()
        if (said := _find_wrong(way, rest, limits))
        and (suspects is None or frozenset(names[number] for number in pair) in suspects)
    }
    named = _blame(ways, bad)
    pairs, bad_pairs = ({frozenset(pair) for pair in each} for each in (ways, bad))
    if len(pairs) > 1 and (2 * len(named) >= len(names) or bad_pairs == pairs):
        what = f"{len(bad_pairs)} of {len(pairs)} links are bad: no node differs"
        return [Finding(CHECK, FAIL, what, way_out="check what they share: a switch, the fabric, a firewall")], []
    findings = [_describe_node(number, ways, bad, rest, names, limits) for number in named]
    links: dict[frozenset[int], tuple[int, int]] = {}  # the worse direction of each
    for pair in sorted(bad, key=lambda each: _badness(bad[each], ways[each])):
        if not set(pair) & set(named):
            links.setdefault(frozenset(pair), pair)
    for pair in list(links.values())[:MAX_LINKS]:
        where = f"{names[pair[0]]} to {names[pair[1]]}"
        findings.append(_finding(bad[pair], WARN, "", where, ways[pair], rest, limits, _PATH))
    if len(links) > MAX_LINKS:
        more = counted(len(links) - MAX_LINKS, "more link is", "more links are")
        findings.append(Finding(CHECK, WARN, f"{more} bad", way_out=_PATH))
    return findings or [_in_order(ways, rest, len(names))], named


def _find_rest(ways: Mapping[tuple[int, int], PairPath]) -> _Usual:
    """Return the usual values, over nodes and not paths: one bad node of three is an end of two of three links."""
    latency_s: dict[int, list[float]] = {}
    bytes_per_s: dict[int, list[float]] = {}
    lost_share: dict[int, list[float]] = {}
    for pair, way in ways.items():
        for number in () if way.error else pair:
            for known, value in ((latency_s, way[1]), (bytes_per_s, way[2]), (lost_share, way[3])):
                if value is not None:
                    known.setdefault(number, []).append(value)
    # Of three nodes a bad one is an end of half of all paths of the others.
    return _Usual(
        median([median_low(values) for values in latency_s.values()]) if latency_s else None,
        median([median_high(values) for values in bytes_per_s.values()]) if bytes_per_s else None,
        median([median_low(values) for values in lost_share.values()]) if lost_share else None,
    )


def _find_wrong(way: PairPath, rest: _Usual, limits: Limits) -> str:
    """Return the fault of a path: failed, slow, late, lost, or ""."""
    if way.error:
        return "failed"
    if way.bytes_per_s is not None and way.bytes_per_s < _slow_bytes_per_s(rest, limits):
        return "slow"
    if way.latency_s is not None and way.latency_s > _late_s(rest, limits):
        return "late"
    if way.lost_share is not None and way.lost_share > _max_lost(rest, limits):
        return "lost"
    return ""


def _badness(said: str, way: PairPath) -> tuple[int, float]:
    """Return a sort key of bad paths, the worst first."""
    value = {"slow": way.bytes_per_s, "late": -(way.latency_s or 0.0), "lost": -(way.lost_share or 0.0)}.get(said)
    return ("failed", "slow", "late", "lost").index(said), value or 0.0


def _slow_bytes_per_s(rest: _Usual, limits: Limits) -> float:
    return min(limits.pair_enough_bytes_per_s, limits.pair_slow_share * (rest.bytes_per_s or 0.0))


def _late_s(rest: _Usual, limits: Limits) -> float:
    usual_s = rest.latency_s if rest.latency_s is not None else math.inf
    return max(_LATE_TIMES * usual_s, usual_s + limits.pair_late_s)


def _max_lost(rest: _Usual, limits: Limits) -> float:
    return max(limits.pair_lost_share, _LOST_TIMES * (rest.lost_share or 0.0))


def _blame(ways: Iterable[tuple[int, int]], bad: Iterable[tuple[int, int]]) -> list[int]:
    """Return nodes that are bad with most of their partners, at least two; the worst first."""
    partners, worse = _partners(ways), _partners(bad)
    named: list[int] = []
    while True:
        worst = max(worse, key=lambda number: (len(worse[number]), -number), default=None)
        if worst is None or len(worse[worst]) < 2 or 2 * len(worse[worst]) <= len(partners[worst]):
            return sorted(named)
        named.append(worst)
        for other in worse.pop(worst):  # links bad with it are no evidence against their other ends
            worse[other].discard(worst)
        for other in partners.pop(worst):
            partners[other].discard(worst)


def _partners(pairs: Iterable[tuple[int, int]]) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for one, other in pairs:
        found.setdefault(one, set()).add(other)
        found.setdefault(other, set()).add(one)
    return found


def _describe_node(
    number: int,
    ways: Mapping[tuple[int, int], PairPath],
    bad: Mapping[tuple[int, int], str],
    rest: _Usual,
    names: Sequence[str],
    limits: Limits,
) -> Finding:
    own = {pair: said for pair, said in bad.items() if number in pair}
    sends = {pair[1] for pair in own if pair[0] == number}
    receives = {pair[0] for pair in own if pair[1] == number}
    others = {other for pair in ways if number in pair for other in pair} - {number}
    kinds = list(own.values())
    said = max(dict.fromkeys(kinds), key=kinds.count)
    # The most typical path: the median of those with this fault.
    alike = sorted(
        (pair for pair, kind in own.items() if kind == said), key=lambda pair: ways[pair].bytes_per_s or 0.0
    )
    way = "" if sends == receives else " in sending" if len(sends) > len(receives) else " in receiving"
    of_whom = f"{way} with {len(sends | receives)} of {len(others)} nodes"
    return _finding(said, FAIL, of_whom, names[number], ways[alike[len(alike) // 2]], rest, limits, _NIC)


def _finding(
    said: str, level: str, of_whom: str, where: str, way: PairPath, rest: _Usual, limits: Limits, way_out: str
) -> Finding:
    if said == "failed":
        return Finding(CHECK, level, f"nothing goes through{of_whom}: {way.error}", where, way_out=way_out)
    if said == "slow":
        usual, least = rest.bytes_per_s or 0.0, _slow_bytes_per_s(rest, limits)
        what = f"slow{of_whom}, others reach {format_value(usual, 'bytes')}/s; bytes per second"
        return Finding(CHECK, level, what, where, way.bytes_per_s, least, "bytes", way_out)
    if said == "late":
        what = f"answers late{of_whom}, others within {1e3 * (rest.latency_s or 0.0):.2g} ms"
        late_ms = 1e3 * _late_s(rest, limits)
        return Finding(CHECK, level, what, where, 1e3 * (way.latency_s or 0.0), late_ms, "ms", way_out)
    most = 100 * _max_lost(rest, limits)
    return Finding(
        CHECK, level, f"loses segments{of_whom}", where, 100 * (way.lost_share or 0.0), most, "%", way_out
    )


def _in_order(ways: Mapping[tuple[int, int], PairPath], rest: _Usual, nodes: int) -> Finding:
    rate = "" if rest.bytes_per_s is None else f", {format_value(rest.bytes_per_s, 'bytes')}/s"
    latency = "" if rest.latency_s is None else f", {1e3 * rest.latency_s:.2g} ms round trip"
    return Finding(CHECK, OK, f"{counted(nodes, 'node')}, {counted(len(ways) // 2, 'link')}{rate}{latency}")
