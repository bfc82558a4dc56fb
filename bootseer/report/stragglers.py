"""PURE: stragglers: nodes and ranks that took much longer for a stage than the others, or none.

A straggler takes 1.5 times the median, differs by more than the others vary, and matters for the start. If all are
equally slow, none is named. Rendezvous and waiting are how the others spend that time, so they are never slow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from bootseer.report.intervals import median_low
from bootseer.report.measures import Measure, StageMeasures
from bootseer.report.pieces import PEERS, WAITING
from bootseer.report.starts import BACKOFF, RENDEZVOUS

TIMES = 1.5  # of the median
MIN_S = 0.1
MIN_SHARE = 0.03  # of the whole start
SPREADS = 6.0  # median deviations from the median
MAX_SHARE = 0.5  # of all places: more are not outliers
MAX_FINDINGS = 100
_NEVER = (BACKOFF, RENDEZVOUS, WAITING, PEERS)


class Straggler(NamedTuple):
    """One stage that was slow in some places."""

    stage: str
    seconds: float  # the longest time
    median_s: float
    places: tuple[tuple[str, tuple[int, ...]], ...]  # node, its slow ranks (none: the node itself); slowest first
    is_whole: bool  # all ranks of these nodes

    @property
    def ratio(self) -> float | None:
        """Return the ratio to the median; None if that is about zero."""
        return self.seconds / self.median_s if self.median_s > 0.001 else None


def find_stragglers(stages: Iterable[StageMeasures], start_s: float) -> list[Straggler]:
    """Return the stragglers, the most costly first. Args: start_s: duration of the whole start."""
    found = [each for stage in stages if stage.stage not in _NEVER for each in _of_stage(stage, start_s)]
    found.sort(key=lambda each: (each.median_s - each.seconds, each.stage, each.places))
    return found[:MAX_FINDINGS]


def _of_stage(stage: StageMeasures, start_s: float) -> list[Straggler]:
    count = len(stage.all)
    if count < 2:
        return []
    spread_s = median_low(abs(each.seconds - stage.median_s) for each in stage.all)
    limit_s = max(
        TIMES * stage.median_s,
        stage.median_s + max(MIN_S, MIN_SHARE * start_s, SPREADS * spread_s),
    )
    slow = [each for each in stage.all if each.seconds >= limit_s]
    if not slow or len(slow) > MAX_SHARE * count:
        return []
    if not stage.is_of_ranks:
        return [_straggler(stage, slow, {each.node: () for each in slow}, True)]
    sizes: dict[str, int] = defaultdict(int)
    for each in stage.all:
        sizes[each.node] += 1
    by_node: dict[str, list[Measure]] = defaultdict(list)
    for each in slow:
        by_node[each.node].append(each)
    found = []
    for is_whole in (True, False):
        # The only rank of a node is named as a rank.
        own = {
            node: ranks
            for node, ranks in by_node.items()
            if (len(ranks) == sizes[node] and len(ranks) > 1) == is_whole
        }
        if own:
            places = {node: tuple(sorted(each.rank or 0 for each in ranks)) for node, ranks in own.items()}
            found.append(_straggler(stage, [each for ranks in own.values() for each in ranks], places, is_whole))
    return found


def _straggler(
    stage: StageMeasures, slow: list[Measure], places: Mapping[str, tuple[int, ...]], is_whole: bool
) -> Straggler:
    longest = max(each.seconds for each in slow)
    return Straggler(stage.stage, longest, stage.median_s, tuple(places.items()), is_whole)
