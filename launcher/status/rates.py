"""PURE: rates of ranks from a few samples: steps per second, and cores in use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from launcher.base.facts import RankFacts

MIN_S = 0.4  # the kernel counts CPU time in ticks of 10 ms


class Rates(NamedTuple):
    """The rates of one rank; None without enough samples."""

    facts: RankFacts  # the newest
    steps_per_s: float | None  # from the times of the first and the last step in the samples
    cores: float | None  # since the newest sample that is not too recent


def find_rates(looks: Sequence[Sequence[RankFacts]], newest: Sequence[RankFacts]) -> dict[int, Rates]:
    """Return the rates by rank. Args: looks: samples, the oldest first, all of one attempt."""
    before: dict[int, list[RankFacts]] = {}
    for look in looks:
        for facts in look:
            before.setdefault(facts.rank, []).append(facts)
    return {
        facts.rank: Rates(
            facts, _steps_per_s(before.get(facts.rank, []), facts), _cores(before.get(facts.rank, []), facts)
        )
        for facts in newest
    }


def _steps_per_s(before: Sequence[RankFacts], newest: RankFacts) -> float | None:
    first = next((each for each in before if each.steps > 0 and each.step_at_s >= 0.0), None)
    if first is None or newest.steps <= first.steps or newest.step_at_s <= first.step_at_s:
        return None
    return (newest.steps - first.steps) / (newest.step_at_s - first.step_at_s)


def _cores(before: Sequence[RankFacts], newest: RankFacts) -> float | None:
    last = next((each for each in reversed(before) if newest.at_s - each.at_s >= MIN_S), None)
    if last is None or last.cpu_s < 0.0 or newest.cpu_s < last.cpu_s:
        return None
    return (newest.cpu_s - last.cpu_s) / (newest.at_s - last.at_s)
