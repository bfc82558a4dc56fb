"""PURE: what agents reported of an attempt: fallbacks, broken rules, findings of checks, values of stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from bootseer.events import Event
from bootseer.formats import one_line
from bootseer.report.intervals import median_low
from bootseer.report.measures import StageMeasures
from bootseer.report.slow_words import join_some, seconds
from bootseer.report.starts import Span, Start

CHECK = "check"  # an instant event of an agent; its error is the finding as a line
BROKEN = "rule_broken"  # an instant event of rank 0's agent; its error names the rule, the place and the reason
HANG = "hang"  # an instant event of rank 0's agent; its error is the line of the hang report
FELL_BACK = "fell_back"  # an instant event of an agent; its error is the reason
MOUNT_FAULT = "mount_fault"  # the same: a mount could not be read
MAX_CHECKS = 256
MAX_RULES = 256
MAX_HANGS = 64
MAX_HANG_CHARACTERS = 2000  # of a line, which names the places of several groups of ranks
MAX_NODES = 50
MAX_FACTS = 200
MAX_WORDS = 8  # different words of one name
_BAD = ("fail", "hung")
_UNITS = {"s": "s", "bytes": "bytes"}

K = TypeVar("K")


class Record(msgspec.Struct):
    """Base of all parts of a report."""


class FallbackRow(Record):
    """One reason for a fallback, with all nodes that reported it."""

    stage: str  # "" for features that belong to no stage
    why: str
    nodes: list[str]
    longest_s: float | None  # longest time of the stage on these nodes; None: not observed
    others_s: float | None  # its median on nodes without a fallback; None: there are none
    line: str


class RuleRow(Record):
    """A log rule that was broken."""

    rule: str
    kind: str  # class of failure, "" for none
    action: str
    rank: int | None
    unix_s: float
    line: str


class HangRow(Record):
    """A hang, or slow steps, that bootrun reported."""

    attempt: int
    report: str  # the file in the run's log directory
    unix_s: float
    after_s: float  # since the first event of the attempt, by the wall clock
    line: str


class CheckRow(Record):
    """A finding, with the figures of its first report."""

    check: str
    level: str
    nodes: list[str]
    line: str


class FactRow(Record):
    """A number that nodes reported."""

    stage: str
    name: str
    unit: str
    nodes: int
    total: float
    median: float
    max: float
    max_node: str


class WayRow(Record):
    """A word that nodes or ranks reported, and how many reported it."""

    stage: str
    name: str  # such as how, hit
    value: str
    count: int


def is_check(event: Event) -> bool:
    """Return whether an event reports a finding."""
    return event.name == CHECK and event.error is not None


def is_broken_rule(event: Event) -> bool:
    return event.name == BROKEN and event.error is not None


def is_hang(event: Event) -> bool:
    return event.name == HANG and event.error is not None


def is_fallback(event: Event) -> bool:
    """Return whether an event reports a fallback, or a fault that will cause one."""
    return event.name in (FELL_BACK, MOUNT_FAULT) and event.error is not None


def find_checks(start: Start) -> list[CheckRow]:
    """Return the findings, failures first; those of level `unknown` are left out."""

    def key_of(event: Event) -> tuple[str, ...]:
        return tuple(one_line(str(event.attrs.get(name, ""))) for name in ("check", "level", "where", "what"))

    events = [event for event in start.instants if is_check(event) and key_of(event)[1] != "unknown"]
    nodes = _nodes_of(events, key_of, MAX_CHECKS)
    lines: dict[tuple[str, ...], str] = {}
    for event in events:
        lines.setdefault(key_of(event), one_line(event.error or ""))
    found = [
        CheckRow(check=key[0], level=key[1], nodes=named, line=f"{lines[key]} ({join_some(named)})")
        for key, named in nodes.items()
    ]
    return sorted(found, key=lambda each: each.level not in _BAD)


def find_broken_rules(start: Start) -> list[RuleRow]:
    """Return the broken rules in the order in which they were reported."""
    found = []
    for event in [event for event in start.instants if is_broken_rule(event)][:MAX_RULES]:
        rule, kind, action = (one_line(str(event.attrs.get(key, ""))) for key in ("rule", "class", "action"))
        rank = event.attrs.get("of_rank")
        line = one_line(event.error or "") + (f" ({action})" if action not in ("", "report") else "")
        rank = rank if isinstance(rank, int) else None
        found.append(
            RuleRow(rule=rule, kind=kind, action=action, rank=rank, unix_s=event.wall_ns / 1e9, line=line)
        )
    return found


def find_hangs(start: Start) -> list[HangRow]:
    """Return the reported hangs in the order in which they were reported."""
    return [
        HangRow(
            attempt=start.attempt,
            report=one_line(str(event.attrs.get("report", ""))),
            unix_s=event.wall_ns / 1e9,
            after_s=max(0.0, (event.wall_ns - start.wall_ns) / 1e9),
            line=one_line(event.error or "", MAX_HANG_CHARACTERS),
        )
        for event in [event for event in start.instants if is_hang(event)][:MAX_HANGS]
    ]


def find_fallbacks(start: Start, measured: Sequence[StageMeasures]) -> list[FallbackRow]:
    """Return the fallbacks, the longest stage first."""
    nodes = _nodes_of(
        filter(is_fallback, start.instants),
        lambda event: (str(event.stage or ""), one_line(event.error or "")),
        MAX_NODES,
    )
    by_stage = {each.stage: each.all for each in measured}
    amiss: dict[str, set[str]] = {}
    for (stage, _), named in nodes.items():
        amiss.setdefault(stage, set()).update(named)
    found = []
    for (stage, why), named in nodes.items():
        measures = by_stage.get(stage, [])
        here = [each.seconds for each in measures if each.node in named]
        others = [each.seconds for each in measures if each.node not in amiss[stage]]
        longest_s, others_s = max(here, default=None), median_low(others) if others else None
        took = "" if longest_s is None else f"; {stage} took {seconds(longest_s)} there"
        if took and others_s is not None:
            took += f", {seconds(others_s)} elsewhere"
        line = f"{stage + ': ' if stage else ''}{why} ({join_some(named)}){took}"
        found.append(
            FallbackRow(stage=stage, why=why, nodes=named, longest_s=longest_s, others_s=others_s, line=line)
        )
    return sorted(found, key=lambda each: (-(each.longest_s or 0.0), each.stage, each.why))


def _nodes_of(events: Iterable[Event], key_of: Callable[[Event], K], most: int) -> dict[K, list[str]]:
    """Return the nodes that reported each of the first `most` keys."""
    nodes: dict[K, list[str]] = {}
    for event in events:
        key = key_of(event)
        if key in nodes or len(nodes) < most:
            named = nodes.setdefault(key, [])
            if event.node not in named:
                named.append(event.node)
    return nodes


def gather(start: Start) -> tuple[list[FactRow], list[WayRow]]:
    """Collect values from the scalars of nodes and the attributes of their spans."""
    numbers: dict[tuple[str, str, str], dict[str, float]] = {}
    words: dict[tuple[str, str], Counter[str]] = {}

    def add(stage: str, name: str, unit: str, node: str, value: float) -> None:
        key = stage, name, unit
        if value - value == 0 and (key in numbers or len(numbers) < MAX_FACTS):
            numbers.setdefault(key, {})[node] = value  # the last one counts: scalars are running totals

    def count(stage: str, name: str, word: str) -> None:
        key = stage, name
        if key in words or len(words) < MAX_FACTS:
            known = words.setdefault(key, Counter())
            known[word if word in known or len(known) < MAX_WORDS else "others"] += 1

    for node in start.nodes:
        for event in node.scalars:
            if isinstance(event.value, int | float) and event.stage is not None:
                add(event.stage, event.name, event.unit or "", node.name, float(event.value))
        for span in (*node.spans, *node.others):
            for name, value in span.attrs.items():
                key = one_line(str(name))
                if isinstance(value, bool):
                    count(span.stage, _label(span, key), "yes" if value else "no")
                elif isinstance(value, int | float):
                    unit = _UNITS.get(key.rpartition("_")[2], "")
                    add(span.stage, _label(span, key), unit, node.name, float(value))
                elif isinstance(value, str) and value and key == "how":
                    count(span.stage, _label(span, key), one_line(value))
    for rank in start.ranks:
        if rank.how:
            count("spawn", "how", one_line(rank.how))
    facts = []
    for (stage, name, unit), by_node in sorted(numbers.items()):
        last = max(by_node, key=lambda each: (by_node[each], each))
        values = list(by_node.values())
        facts.append(
            FactRow(
                stage=stage, name=name, unit=unit, nodes=len(values), total=sum(values), median=median_low(values),
                max=by_node[last], max_node=last,
            )
        )  # fmt: skip
    ways = [
        WayRow(stage=stage, name=name, value=word, count=number)
        for (stage, name), known in words.items()
        for word, number in sorted(known.items(), key=lambda pair: (-pair[1], pair[0]))
    ]
    return facts, sorted(ways, key=lambda way: (way.stage, way.name, -way.count, way.value))


def _label(span: Span, name: str) -> str:
    return name if span.name in (span.stage, "setup") else f"{span.name}_{name}"
