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
    """Add the column `cores`, from the CPU time since an earlier answer. Args: after_s: that much later."""
    now, then = columns.get("cpu_s"), (before or {}).get("cpu_s")
    is_same = before is not None and all(before.get(name) == columns.get(name) for name in ("attempt", "rank"))
    if not (is_same and isinstance(now, list) and isinstance(then, list) and len(now) == len(then)):
        return
    if after_s < MIN_CORES_S:
        return
    columns["cores"] = [_cores(new, old, after_s) for new, old in zip(now, then, strict=True)]


def number(value: object) -> float | int | None:
    """Return a value that is a number, else None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e18
    return value if is_number and isinstance(value, int | float) else None


def _cores(new: object, old: object, after_s: float) -> float | None:
    new_s, old_s = number(new), number(old)
    return None if new_s is None or old_s is None else round(max(0.0, new_s - old_s) / after_s, 3)


def _since(moment_s: float, now_s: float) -> float | None:
    return round(max(0.0, now_s - moment_s), 2) if moment_s >= 0 else None
