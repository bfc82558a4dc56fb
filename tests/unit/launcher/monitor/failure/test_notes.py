"""What is noted of a failure until its page is told: which standstill a page speaks of."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.base.facts import Hang, HangKind
from launcher.monitor.failure.notes import FailureNotes
from launcher.monitor.failure.record import unpack
from launcher.monitor.watch import HangFinding
from tests.unit.launcher.jobsim import make_failure

FOUND = HangFinding(3, "the job hangs", "the stacks of all ranks", b"")


def hang(kind: HangKind = HangKind.ALL_IDLE, is_early: bool = False) -> Hang:
    return Hang(kind, 10.0, (1,), 15.0, 1.0, "all wait idle", is_early)


def page_after(notes: FailureNotes, is_stood: bool, lasts: bool) -> dict[str, Any]:
    notes.ended(0, [make_failure(0, time_ns=50 * 10**9)], [], is_stood, lasts, 60.0, 61.0)
    notes.finished("the end")
    (page,) = notes.take()
    found = unpack(page.data)
    assert found is not None
    return found


@pytest.mark.parametrize(("lasts", "shown"), [(True, FOUND.text), (False, None)])
def test_only_a_hang_that_lasts_is_on_the_page_of_another_failure(lasts: bool, shown: str | None) -> None:
    notes = FailureNotes("job")
    assert notes.hang_reported(0, hang(), FOUND, is_ended=False, now_s=30.0) is not None
    page = page_after(notes, is_stood=False, lasts=lasts)
    assert (page["rank"], page.get("stacks")) == (0, shown)


@pytest.mark.parametrize("told", [hang(HangKind.SLOW, is_early=True), hang(HangKind.NOT_STARTED, is_early=True)])
def test_what_ends_no_attempt_is_on_no_other_page(told: Hang) -> None:
    notes = FailureNotes("job")
    assert notes.hang_reported(0, told, FOUND, is_ended=False, now_s=30.0) is not None
    assert "stacks" not in page_after(notes, is_stood=False, lasts=True)


@pytest.mark.parametrize("kind", ["numeric", "hang"])
def test_a_rule_that_ends_the_attempt_has_the_page_and_not_an_older_hang(kind: str) -> None:
    notes = FailureNotes("job")
    notes.hang_reported(0, hang(), FOUND, is_ended=False, now_s=30.0)
    notes.rule_broken(kind, "loss is nan", 1, 40.0)
    page = page_after(notes, is_stood=kind == "hang", lasts=False)
    assert (page["class"], page["message"], page["rank"]) == (kind, "loss is nan", 1)
    assert (page["since_s"], page["stages"]["seen_s"]) == (40.0, None)
    assert [each["rank"] for each in page["others"]] == [0]
    assert "stacks" not in page


def test_a_hang_that_ends_the_attempt_has_the_page() -> None:
    notes = FailureNotes("job")
    assert notes.hang_reported(0, hang(), FOUND, is_ended=True, now_s=30.0) is None
    page = page_after(notes, is_stood=True, lasts=True)
    assert (page["class"], page["stacks"]) == ("hang", FOUND.text)
