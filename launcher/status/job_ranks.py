"""PURE: the newest facts about all ranks of a job as columns, which stay small for thousands of ranks.

    {"format": 1, "attempt": 0, "nodes": ["node-a", ...], "rank": [0, 1, ...], "node": [0, 0, ...],
     "steps": [...], "since_step_s": [...], "step_takes_s": [...], "cpu_s": [...], "process": ["S", ...],
     "age_s": [...]}

Each column has one value a rank; null: not known. `node` is an index of `nodes`, `age_s` the age of the sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.base.facts import RankFacts

FORMAT = 1
MIN_CORES_S = 0.5  # between two samples of CPU time


def make_columns(attempt: int | None, facts: Sequence[tuple[str, RankFacts]], now_s: float) -> dict[str, Any]:
    """Return the columns. Args: facts: name of the node and newest sample of each rank; now_s: by their clock."""
    numbers: dict[str, int] = {}
    nodes = [numbers.setdefault(node, len(numbers)) for node, _ in facts]
    ranks = [each for _, each in facts]
    return {
        "format": FORMAT,
        "attempt": attempt,
        "nodes": list(numbers),
        "rank": [each.rank for each in ranks],
        "node": nodes,
        "steps": [each.steps if each.steps >= 0 else None for each in ranks],
        "since_step_s": [_since(each.step_at_s, now_s) for each in ranks],
        "step_takes_s": [round(each.step_takes_s, 4) if each.step_takes_s > 0 else None for each in ranks],
        "cpu_s": [round(each.cpu_s, 2) if each.cpu_s >= 0 else None for each in ranks],
        "process": [each.state or None for each in ranks],
        "age_s": [_since(each.at_s, now_s) for each in ranks],
    }


def add_cores(columns: dict[str, Any], before: Mapping[str, Any] | None, after_s: float) -> None:
    """Add the column `cores`, from CPU time between the samples of two answers; of one sample, that of before.

    Args: before: the earlier answer; after_s: that much later was this one.
    """
    if before is None or any(before.get(name) != columns.get(name) for name in ("attempt", "rank")):
        return
    count = len(_column(columns, "rank") or ())
    new, old = _column(columns, "cpu_s", count), _column(before, "cpu_s", count)
    age, old_age = _column(columns, "age_s", count), _column(before, "age_s", count)
    if new is None or old is None or age is None or old_age is None:
        return
    last = _column(before, "cores", count) or [None] * count
    columns["cores"] = [_cores(*each, after_s) for each in zip(new, old, age, old_age, last, strict=True)]


def _column(columns: Mapping[str, Any], name: str, count: int | None = None) -> list[Any] | None:
    value = columns.get(name)
    return value if isinstance(value, list) and count in (None, len(value)) else None


def number(value: object) -> float | int | None:
    """Return a value that is a number, else None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e18
    return value if is_number and isinstance(value, int | float) else None


def _cores(
    new: object, old: object, age: object, old_age: object, last: float | None, after_s: float
) -> float | None:
    new_s, old_s, age_s, old_age_s = number(new), number(old), number(age), number(old_age)
    if new_s is None or old_s is None or age_s is None or old_age_s is None:
        return None
    between_s = after_s - age_s + old_age_s  # of the two samples
    return round(max(0.0, new_s - old_s) / between_s, 3) if between_s >= MIN_CORES_S else last


def _since(moment_s: float, now_s: float) -> float | None:
    return round(max(0.0, now_s - moment_s), 2) if moment_s >= 0 else None
