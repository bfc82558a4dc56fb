"""Which node, or which link between two, is worse than the rest: who measures with whom, and the verdict. Pure.

In each round every node has at most one partner (the circle method of round-robin tournaments), so that n/2 pairs
measure at a time. Nodes and links are compared with those of this job alone: what a good network would give,
nobody knows beforehand. A node is named when it is bad with most of its partners, as they are with few.
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
MOST_LINKS = 16  # that are told one by one, the worst
MOST_ROUNDS = 15  # of larger jobs each node measures with so many others
_LATE_TIMES = 10.0  # as late as others, at least
_LOST_TIMES = 5.0
_NIC = "look at its NIC, cable and switch port (bootseer check --only network there)"
_PATH = "look at the cables and switches between them"


class Measured(NamedTuple):
    """What a node has measured with a partner; None for what it could not."""

    partner: int
    error: str = ""  # why nothing was measured; "" if something was
    latency_s: float | None = None  # there and back; measured by one of the two
    bytes_per_s: float | None = None  # received from it
    lost_share: float | None = None  # of the segments sent to it, those that were sent again


class Way(NamedTuple):
    """From one node to another."""

    error: str
    latency_s: float | None
    bytes_per_s: float | None
    lost_share: float | None


def count_rounds(nodes: int) -> int:
    """So that each has measured with each, or with MOST_ROUNDS others."""
    return min(MOST_ROUNDS, nodes - 1 + nodes % 2) if nodes > 1 else 0


def find_partner(nodes: int, number: int, turn: int) -> int | None:
    """With whom a node measures in a round; None for nobody (of an odd number of nodes one always rests)."""
    last = nodes - 1 + nodes % 2  # of an even number; stands still, all others move around it
    if number == last:
        partner = turn * ((last + 1) // 2) % last
    else:
        partner = (turn - number) % last
        if partner == number:
            partner = last
    return partner if partner < nodes else None


def join_ways(results: Mapping[int, Iterable[Measured]]) -> dict[tuple[int, int], Way]:
    """By sender and receiver. Args: results: by node. A pair of which one could not has measured nothing."""
    ways: dict[tuple[int, int], Way] = {}
    for number, measured in results.items():
        for each in measured:
            if each.partner == number:
                continue
            for pair, found in (
                ((each.partner, number), Way(each.error, each.latency_s, each.bytes_per_s, None)),
                ((number, each.partner), Way(each.error, each.latency_s, None, each.lost_share)),
            ):
                before = ways.get(pair)
                ways[pair] = found if before is None else _merge(before, found)
    return ways


def _merge(one: Way, other: Way) -> Way:
    if one.error or other.error:
        return Way(one.error or other.error, None, None, None)
    return Way(
        "", *(mine if mine is not None else theirs for mine, theirs in zip(one[1:], other[1:], strict=True))
    )


class _Rest(NamedTuple):
    """What is usual in this job: of each node the middle of its ways, of these the middle."""

    latency_s: float | None
    bytes_per_s: float | None
    lost_share: float | None


def find_bad(
    results: Mapping[int, Sequence[Measured]], names: Sequence[str], limits: Limits
) -> set[frozenset[str]]:
    """Names of the ends of all links that are bad in one direction at least."""
    ways = join_ways(results)
    rest = _find_rest(ways)
    return {
        frozenset(names[number] for number in pair) for pair, way in ways.items() if _find_wrong(way, rest, limits)
    }


def judge_pairs(
    results: Mapping[int, Sequence[Measured]],
    names: Sequence[str],
    limits: Limits,
    suspects: set[frozenset[str]] | None = None,
) -> tuple[list[Finding], list[int]]:
    """Args: results: by node, as far as they are known; names: of all nodes that were asked, each another;
    suspects: the links that may be bad, as another test had it.

    Returns: findings, of links the worst alone, and the nodes that are bad with most of their partners.
    """
    ways = join_ways(results)
    if not ways:
        return [Finding(CHECK, UNKNOWN, "no two nodes have measured", way_out="see why, at each node")], []
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
        return [
            Finding(CHECK, FAIL, what, way_out="look at what they share: a switch, the fabric, a firewall")
        ], []
    findings = [_describe_node(number, ways, bad, rest, names, limits) for number in named]
    links: dict[frozenset[int], tuple[int, int]] = {}  # the worse way of each
    for pair in sorted(bad, key=lambda each: _badness(bad[each], ways[each])):
        if not set(pair) & set(named):
            links.setdefault(frozenset(pair), pair)
    for pair in list(links.values())[:MOST_LINKS]:
        where = f"{names[pair[0]]} to {names[pair[1]]}"
        findings.append(_finding(bad[pair], WARN, "", where, ways[pair], rest, limits, _PATH))
    if len(links) > MOST_LINKS:
        more = counted(len(links) - MOST_LINKS, "more link is", "more links are")
        findings.append(Finding(CHECK, WARN, f"{more} bad", way_out=_PATH))
    return findings or [_in_order(ways, rest, len(names))], named


def _find_rest(ways: Mapping[tuple[int, int], Way]) -> _Rest:
    """Of nodes, not of ways: one bad node of three is an end of two of three links."""
    latency_s: dict[int, list[float]] = {}
    bytes_per_s: dict[int, list[float]] = {}
    lost_share: dict[int, list[float]] = {}
    for pair, way in ways.items():
        for number in () if way.error else pair:
            for known, value in ((latency_s, way[1]), (bytes_per_s, way[2]), (lost_share, way[3])):
                if value is not None:
                    known.setdefault(number, []).append(value)
    # Of three nodes a bad one is an end of half of all ways of the others.
    return _Rest(
        median([median_low(values) for values in latency_s.values()]) if latency_s else None,
        median([median_high(values) for values in bytes_per_s.values()]) if bytes_per_s else None,
        median([median_low(values) for values in lost_share.values()]) if lost_share else None,
    )


def _find_wrong(way: Way, rest: _Rest, limits: Limits) -> str:
    """What is bad of a way: failed, slow, late, lost, or nothing."""
    if way.error:
        return "failed"
    if way.bytes_per_s is not None and way.bytes_per_s < _slow_bytes_per_s(rest, limits):
        return "slow"
    if way.latency_s is not None and way.latency_s > _late_s(rest, limits):
        return "late"
    if way.lost_share is not None and way.lost_share > _most_lost(rest, limits):
        return "lost"
    return ""


def _badness(said: str, way: Way) -> tuple[int, float]:
    """Sorts ways that are bad: the worst first."""
    value = {"slow": way.bytes_per_s, "late": -(way.latency_s or 0.0), "lost": -(way.lost_share or 0.0)}.get(said)
    return ("failed", "slow", "late", "lost").index(said), value or 0.0


def _slow_bytes_per_s(rest: _Rest, limits: Limits) -> float:
    return min(limits.pair_enough_bytes_per_s, limits.pair_slow_share * (rest.bytes_per_s or 0.0))


def _late_s(rest: _Rest, limits: Limits) -> float:
    usual_s = rest.latency_s if rest.latency_s is not None else math.inf
    return max(_LATE_TIMES * usual_s, usual_s + limits.pair_late_s)


def _most_lost(rest: _Rest, limits: Limits) -> float:
    return max(limits.pair_lost_share, _LOST_TIMES * (rest.lost_share or 0.0))


def _blame(ways: Iterable[tuple[int, int]], bad: Iterable[tuple[int, int]]) -> list[int]:
    """Nodes that are bad with most of those they have measured with, at least two; the worst first."""
    partners, worse = _partners(ways), _partners(bad)
    named: list[int] = []
    while True:
        worst = max(worse, key=lambda number: (len(worse[number]), -number), default=None)
        if worst is None or len(worse[worst]) < 2 or 2 * len(worse[worst]) <= len(partners[worst]):
            return sorted(named)
        named.append(worst)
        for other in worse.pop(worst):  # what was bad with it tells nothing of the others
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
    ways: Mapping[tuple[int, int], Way],
    bad: Mapping[tuple[int, int], str],
    rest: _Rest,
    names: Sequence[str],
    limits: Limits,
) -> Finding:
    own = {pair: said for pair, said in bad.items() if number in pair}
    sends = {pair[1] for pair in own if pair[0] == number}
    receives = {pair[0] for pair in own if pair[1] == number}
    others = {other for pair in ways if number in pair for other in pair} - {number}
    kinds = list(own.values())
    said = max(dict.fromkeys(kinds), key=kinds.count)
    # The way that tells most of it: in the middle of those that are bad in this way.
    alike = sorted(
        (pair for pair, kind in own.items() if kind == said), key=lambda pair: ways[pair].bytes_per_s or 0.0
    )
    way = "" if sends == receives else " in sending" if len(sends) > len(receives) else " in receiving"
    of_whom = f"{way} with {len(sends | receives)} of {len(others)} nodes"
    return _finding(said, FAIL, of_whom, names[number], ways[alike[len(alike) // 2]], rest, limits, _NIC)


def _finding(
    said: str, level: str, of_whom: str, where: str, way: Way, rest: _Rest, limits: Limits, way_out: str
) -> Finding:
    if said == "failed":
        return Finding(CHECK, level, f"nothing goes through{of_whom}: {way.error}", where, way_out=way_out)
    if said == "slow":
        usual, least = rest.bytes_per_s or 0.0, _slow_bytes_per_s(rest, limits)
        what = f"slow{of_whom}, others have {format_value(usual, 'bytes')}/s; bytes in a second"
        return Finding(CHECK, level, what, where, way.bytes_per_s, least, "bytes", way_out)
    if said == "late":
        what = f"answers late{of_whom}, others within {1e3 * (rest.latency_s or 0.0):.2g} ms"
        late_ms = 1e3 * _late_s(rest, limits)
        return Finding(CHECK, level, what, where, 1e3 * (way.latency_s or 0.0), late_ms, "ms", way_out)
    most = 100 * _most_lost(rest, limits)
    return Finding(
        CHECK, level, f"loses segments{of_whom}", where, 100 * (way.lost_share or 0.0), most, "%", way_out
    )


def _in_order(ways: Mapping[tuple[int, int], Way], rest: _Rest, nodes: int) -> Finding:
    rate = "" if rest.bytes_per_s is None else f", {format_value(rest.bytes_per_s, 'bytes')}/s"
    latency = "" if rest.latency_s is None else f", {1e3 * rest.latency_s:.2g} ms there and back"
    return Finding(CHECK, OK, f"{counted(nodes, 'node')}, {counted(len(ways) // 2, 'link')}{rate}{latency}")
