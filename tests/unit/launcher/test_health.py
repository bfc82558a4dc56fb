"""What bootrun makes of findings: what is told, how often, what makes a node leave, and nonsense."""

from __future__ import annotations

import pytest

from bootseer.health.finding import FAIL, HUNG, OK, UNKNOWN, WARN, Finding
from launcher.health import MOST_LINES, MOST_TOLD, NodeHealth, worst_lines
from launcher.health_watch import MOST_KNOWN, HealthWatch
from launcher.loop import Loop


class Told:
    """A NodeHealth without a process, and what it has done."""

    def __init__(self, may_fail: bool = True) -> None:
        self.lines: list[str] = []
        self.noted: list[Finding] = []
        self.failed: list[str] = []
        self.health = NodeHealth(
            Loop(), [], (), self.lines.append, self.noted.append, self.failed.append if may_fail else None
        )

    def take(self, **fields: object) -> None:
        self.health._take({"check": "disks", "what": "broken", "way_out": "mend it", **fields})


def test_lines_and_events_by_level() -> None:
    told = Told()
    for level in (OK, UNKNOWN, WARN):
        told.take(level=level)
    assert [found.level for found in told.noted] == [UNKNOWN, WARN]
    assert told.lines == ["check: warn    disks: broken; mend it"]
    assert told.failed == []


@pytest.mark.parametrize("level", [FAIL, HUNG])
def test_the_first_failure_counts_once(level: str) -> None:
    told = Told()
    told.take(level=level, where="sda")
    told.take(level=level, where="sdb")
    assert [line.split(":")[0] for line in told.failed] == ["this node is not fit for the job"]
    assert "sda" in told.failed[0] and len(told.lines) == 2


def test_what_is_only_reported_fails_nothing() -> None:
    told = Told(may_fail=False)
    told.take(level=FAIL)
    assert len(told.lines) == 1


def test_figures_that_change_are_told_once() -> None:
    told = Told()
    for measured in range(5):
        told.take(level=WARN, measured=measured)
    assert len(told.lines) == 1 and len(told.noted) == 5


def test_a_flood_is_cut() -> None:
    told = Told()
    for number in range(2 * MOST_TOLD):
        told.take(level=WARN, where=str(number))
    assert len(told.lines) == MOST_TOLD


def test_nonsense_costs_a_line() -> None:
    told = Told()
    told.take(level="great\n")
    told.health._take({})
    assert len(told.lines) == 2 and all("could not be understood" in line for line in told.lines)
    assert told.noted == told.failed == []


class Watched:
    """A HealthWatch without a process, behind a NodeHealth."""

    def __init__(self) -> None:
        self.told = Told()
        self.over: list[Finding] = []
        self.watch = HealthWatch(
            Loop(), [], (), None, self.told.lines.append, self.told.health.tell, self._tell_over
        )

    def _tell_over(self, found: Finding) -> None:
        self.over.append(found)
        self.told.health.tell_over(found)

    def lines(self) -> tuple[str, ...]:
        return worst_lines(self.watch.found.values())

    def take(self, **fields: object) -> None:
        self.watch._take({"check": "space", "what": "free", "way_out": "delete", "where": "/data", **fields})


def test_what_was_wrong_is_not_said_for_ever_when_nobody_looks_any_more() -> None:
    watched = Watched()
    watched.take(level=WARN)
    watched.watch._on_end("it closed its connection")
    assert watched.lines() == ()


def test_what_comes_and_goes_while_ranks_run() -> None:
    watched = Watched()
    watched.take(level=WARN, measured=9)
    watched.take(level=FAIL, measured=1)
    assert watched.lines() == ("fail    space /data: free (1); delete",)
    watched.take(level=FAIL, is_over=True)
    watched.take(level=FAIL, is_over=True)
    assert watched.lines() == () and len(watched.over) == 1
    watched.take(level=FAIL, measured=2)
    assert watched.told.lines == [
        "check: warn    space /data: free (9); delete",
        "check: fail    space /data: free (1); delete",
        "check: over    space /data: free",
        "check: fail    space /data: free (2); delete",
    ]
    assert watched.told.failed == [], "only at a start a node leaves for it"


def test_what_was_told_beside_the_start_is_not_told_again() -> None:
    watched = Watched()
    watched.told.take(level=WARN)
    watched.take(check="disks", what="broken", where="", way_out="mend it", level=WARN)
    assert len(watched.told.lines) == 1
    assert watched.lines() == ("warn    disks: broken; mend it",)


def test_pages_have_the_worst_of_what_is_wrong() -> None:
    watched = Watched()
    for number in range(2 * MOST_KNOWN):
        watched.take(level=WARN, where=str(number))
    watched.take(level=HUNG, where="3")
    lines = watched.lines()
    assert len(lines) == MOST_LINES and lines[0].startswith("hung    space 3")
    watched.take(level="great")
    assert "could not be understood" in watched.told.lines[-1]
