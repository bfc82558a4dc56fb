"""PURE: what health checks found wrong in an attempt, as its agents told it, each finding once for all nodes."""

from __future__ import annotations

from typing import NamedTuple

from bootseer.events import Event
from bootseer.formats import one_line
from bootseer.startup.slow_words import some
from bootseer.startup.starts import Start

CHECK = "check"  # an instant event of an agent; its error is the finding as a line
MOST = 256
_BAD = ("fail", "hung")


class FoundCheck(NamedTuple):
    """A finding, with figures as they were first."""

    check: str
    level: str
    nodes: tuple[str, ...]
    line: str  # for people


def is_check(event: Event) -> bool:
    """Whether an event says so."""
    return event.name == CHECK and event.error is not None


def find_checks(start: Start) -> list[FoundCheck]:
    """What is bad comes first; what could not be seen is left out."""
    nodes: dict[tuple[str, ...], list[str]] = {}
    lines: dict[tuple[str, ...], str] = {}
    for event in filter(is_check, start.instants):
        key = tuple(one_line(str(event.attrs.get(name, ""))) for name in ("check", "level", "where", "what"))
        if key[1] == "unknown" or (key not in nodes and len(nodes) >= MOST):
            continue
        named = nodes.setdefault(key, [])
        lines.setdefault(key, one_line(event.error or ""))
        if event.node not in named:
            named.append(event.node)
    found = [
        FoundCheck(key[0], key[1], tuple(named), f"{lines[key]} ({some(tuple(named))})")
        for key, named in nodes.items()
    ]
    return sorted(found, key=lambda each: each.level not in _BAD)
