"""PURE: rules over what ranks print that were broken in an attempt, as its agents told them."""

from __future__ import annotations

from typing import NamedTuple

from bootseer.events import Event
from bootseer.formats import one_line
from bootseer.startup.starts import Start

BROKEN = "rule_broken"  # an instant event of the agent with rank 0; its error says which rule, where and why
MOST = 256


class BrokenRule(NamedTuple):
    """A rule that was broken."""

    rule: str
    kind: str  # class of failure, "" for none
    action: str
    rank: int | None
    wall_ns: int
    line: str  # for people


def is_broken_rule(event: Event) -> bool:
    """Whether an event says so."""
    return event.name == BROKEN and event.error is not None


def find_broken_rules(start: Start) -> list[BrokenRule]:
    """In the order in which they were told."""
    found = []
    for event in [event for event in start.instants if is_broken_rule(event)][:MOST]:
        rule, kind, action = (one_line(str(event.attrs.get(key, ""))) for key in ("rule", "class", "action"))
        rank = event.attrs.get("of_rank")
        line = one_line(event.error or "") + (f" ({action})" if action not in ("", "report") else "")
        found.append(BrokenRule(rule, kind, action, rank if isinstance(rank, int) else None, event.wall_ns, line))
    return found
