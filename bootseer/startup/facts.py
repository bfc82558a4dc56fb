"""PURE: what stages said of themselves: bytes, waits, how a thing was done; over all nodes."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from bootseer.formats import one_line
from bootseer.startup.intervals import median_low
from bootseer.startup.starts import Span, Start

MOST_FACTS = 200
MOST_WORDS = 8  # different answers of one kind
_UNITS = {"s": "s", "bytes": "bytes"}


class Fact(NamedTuple):
    """A number that nodes reported."""

    stage: str
    name: str
    unit: str
    nodes: int
    total: float
    median: float
    largest: float
    node: str  # of the largest


class Way(NamedTuple):
    """A word that nodes or ranks reported, and how many did."""

    stage: str
    name: str  # as how, hit
    word: str
    times: int


def gather(start: Start) -> tuple[list[Fact], list[Way]]:
    """From scalars of nodes and the attributes of their spans."""
    numbers: dict[tuple[str, str, str], dict[str, float]] = {}
    words: dict[tuple[str, str], Counter[str]] = {}

    def add(stage: str, name: str, unit: str, node: str, value: float) -> None:
        key = stage, name, unit
        if value - value == 0 and (key in numbers or len(numbers) < MOST_FACTS):
            numbers.setdefault(key, {})[node] = value  # the last one counts: scalars are sums so far

    def count(stage: str, name: str, word: str) -> None:
        key = stage, name
        if key in words or len(words) < MOST_FACTS:
            known = words.setdefault(key, Counter())
            known[word if word in known or len(known) < MOST_WORDS else "others"] += 1

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
    for (stage, name, unit), by_node in numbers.items():
        node_name = max(by_node, key=lambda each: (by_node[each], each))
        values = list(by_node.values())
        facts.append(
            Fact(stage, name, unit, len(values), sum(values), median_low(values), by_node[node_name], node_name)
        )
    ways = [
        Way(stage, name, word, number)
        for (stage, name), known in words.items()
        for word, number in sorted(known.items(), key=lambda pair: (-pair[1], pair[0]))
    ]
    return sorted(facts), sorted(ways, key=lambda way: (way.stage, way.name, -way.times, way.word))


def _label(span: Span, name: str) -> str:
    return name if span.name in (span.stage, "setup") else f"{span.name}_{name}"
