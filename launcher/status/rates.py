"""PURE: how fast ranks are, from some looks at them: steps a second, and cores in use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from launcher.supervise.facts import RankFacts

LEAST_S = 0.4  # the kernel counts CPU time in ticks of 10 ms


class Rates(NamedTuple):
    """One rank. None where there is too little to tell."""

    facts: RankFacts  # the newest
    steps_per_s: float | None  # by the times of the first and the last step in the looks
    cores: float | None  # since the newest look that is not too near


def find_rates(looks: Sequence[Sequence[RankFacts]], newest: Sequence[RankFacts]) -> dict[int, Rates]:
    """By rank. Args: looks: the oldest first, all of one attempt."""
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
    last = next((each for each in reversed(before) if newest.at_s - each.at_s >= LEAST_S), None)
    if last is None or last.cpu_s < 0.0 or newest.cpu_s < last.cpu_s:
        return None
    return (newest.cpu_s - last.cpu_s) / (newest.at_s - last.at_s)
