"""PURE: two reports -> the change of each stage's time."""

from __future__ import annotations

from bootseer.counted import counted
from bootseer.report.agent_reports import Record
from bootseer.report.pieces import LABELS
from bootseer.report.report import Report, StageRow
from bootseer.report.slow_words import seconds

FORMAT = "bootseer-comparison/1"


class StageChange(Record):
    """One stage in both runs; None where it was not observed."""

    stage: str
    before_median_s: float | None
    after_median_s: float | None
    before_max_s: float | None
    after_max_s: float | None
    median_change_s: float | None
    median_ratio: float | None  # after over before
    max_change_s: float | None
    max_ratio: float | None


class Comparison(Record):
    """The comparison of two runs."""

    format: str
    first_step_change_s: float | None
    first_step_ratio: float | None
    lost_change_s: float | None
    line: str
    stages: list[StageChange]
    before: Report
    after: Report


def compare(before: Report, after: Report) -> Comparison:
    """Compare `after` with `before`."""
    own = {row.stage: row for row in before.stages}
    new = {row.stage: row for row in after.stages}
    change_s = _difference(before.first_step_s, after.first_step_s)
    has_lost = before.lost.ranks > 0 and after.lost.ranks > 0
    return Comparison(
        format=FORMAT,
        first_step_change_s=change_s,
        first_step_ratio=_ratio(before.first_step_s, after.first_step_s),
        lost_change_s=after.lost.total_s - before.lost.total_s if has_lost else None,
        line=_line(before, after),
        stages=[
            _change(stage, own.get(stage), new.get(stage)) for stage in LABELS if stage in own or stage in new
        ],
        before=before,
        after=after,
    )


def _change(stage: str, before: StageRow | None, after: StageRow | None) -> StageChange:
    medians = (None if before is None else before.median_s, None if after is None else after.median_s)
    maxima = (None if before is None else before.max_s, None if after is None else after.max_s)
    return StageChange(
        stage=stage,
        before_median_s=medians[0],
        after_median_s=medians[1],
        before_max_s=maxima[0],
        after_max_s=maxima[1],
        median_change_s=_difference(*medians),
        median_ratio=_ratio(*medians),
        max_change_s=_difference(*maxima),
        max_ratio=_ratio(*maxima),
    )


def _difference(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def _ratio(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None or before <= 0 else after / before


def _line(before: Report, after: Report) -> str:
    if before.first_step_s is None or after.first_step_s is None:
        return "to the first step: not comparable: it was not observed in both"
    own, new = before.first_step_s, after.first_step_s
    if min(own, new) <= 0 or max(own, new) / min(own, new) < 1.05:
        what = "about as long"
    elif new < own:
        what = f"{own / new:.2f} times faster"
    else:
        what = f"{new / own:.2f} times slower"
    size = "" if before.ranks == after.ranks else f"; {counted(before.ranks, 'rank')} then, {after.ranks:,} now"
    return f"to the first step: {seconds(own)}, then {seconds(new)}: {what}{size}"
