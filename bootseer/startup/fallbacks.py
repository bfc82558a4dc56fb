"""PURE: what a start did in the ordinary way because a faster one failed, and how long the stage took there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bootseer.events import Event
from bootseer.formats import one_line
from bootseer.startup.intervals import median_low
from bootseer.startup.measures import StageMeasures
from bootseer.startup.slow_words import seconds, some
from bootseer.startup.starts import Start

FELL_BACK = "fell_back"  # an instant event of an agent; its error says why
MOUNT_FAULT = "mount_fault"  # the same: what is mounted could not be read
MOST = 50


class Fallback(NamedTuple):
    """One reason, wherever it was given."""

    stage: str  # "" for help that is of no stage
    why: str
    nodes: tuple[str, ...]
    longest_s: float | None  # that the stage took on one of them; None: not observed
    others_s: float | None  # its median on nodes where nothing was amiss; None: there are none


def is_fallback(event: Event) -> bool:
    """Whether an event says that the ordinary way was taken, or will have to be."""
    return event.name in (FELL_BACK, MOUNT_FAULT) and event.error is not None


def find_fallbacks(start: Start, measured: Sequence[StageMeasures]) -> list[Fallback]:
    """The dearest first."""
    nodes: dict[tuple[str, str], list[str]] = {}
    for event in filter(is_fallback, start.instants):
        key = str(event.stage or ""), one_line(event.error or "")
        if key in nodes or len(nodes) < MOST:
            named = nodes.setdefault(key, [])
            if event.node not in named:
                named.append(event.node)
    by_stage = {each.stage: each.all for each in measured}
    amiss: dict[str, set[str]] = {}
    for (stage, _), named in nodes.items():
        amiss.setdefault(stage, set()).update(named)
    found = []
    for (stage, why), named in nodes.items():
        took = by_stage.get(stage, [])
        here = [each.seconds for each in took if each.node in named]
        others = [each.seconds for each in took if each.node not in amiss[stage]]
        found.append(
            Fallback(
                stage,
                why,
                tuple(named),
                max(here, default=None),
                median_low(others) if others else None,
            )
        )
    return sorted(found, key=lambda each: (-(each.longest_s or 0.0), each.stage, each.why))


def fallback_line(found: Fallback) -> str:
    """For people."""
    took = ""
    if found.longest_s is not None:
        took = f"; {found.stage} took {seconds(found.longest_s)} there"
        if found.others_s is not None:
            took += f", {seconds(found.others_s)} elsewhere"
    return f"{found.stage + ': ' if found.stage else ''}{found.why} ({some(found.nodes)}){took}"
