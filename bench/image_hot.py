"""`bench image --hot`: what starts of one program touch, and whether the next touches the same in that order."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from bench.record import BenchError, Figures
from bootseer.blocks.trace import Trace


class Agreement(NamedTuple):
    """Of two recordings."""

    jaccard: float  # blocks of both, of those of either
    spearman: float  # of the orders in which the blocks of both were touched; 1: the same
    missed_share: float  # of the second's blocks that the first has not


def compare(first: Trace, second: Trace) -> Agreement:
    """How alike two recordings are. Raises: BenchError when they have nothing in common."""
    mine, theirs = set(first.blocks), set(second.blocks)
    both = sorted(mine & theirs)
    if len(both) < 2:
        raise BenchError("two recordings of one program have no blocks in common")
    return Agreement(
        len(both) / len(mine | theirs),
        spearman(first.blocks, second.blocks),
        len(theirs - mine) / len(theirs),
    )


def spearman(first: Sequence[int], second: Sequence[int]) -> float:
    """The rank correlation of two orders, over what both have."""
    both = set(first) & set(second)
    ranks = {number: rank for rank, number in enumerate(each for each in second if each in both)}
    mine = range(len(both))
    return statistics.correlation(mine, [ranks[each] for each in first if each in both])


def to_figures(name: str, traces: Sequence[Trace], block_count: int, sizes: Sequence[int]) -> Figures:
    """Of one program. `sizes`: stored bytes of all blocks. Every pair of recordings is a sample."""
    figures = Figures()
    pairs = [compare(first, second) for first, second in itertools.combinations(traces, 2)]
    hot = [len(trace.blocks) for trace in traces]
    total = sum(sizes)
    figures.add(f"image.{name}_hot_blocks", "blocks", hot)
    figures.add(f"image.{name}_hot_share", "of all blocks", [count / block_count for count in hot])
    figures.add(f"image.{name}_hot_mb", "MB stored", [sum(sizes[each] for each in t.blocks) / 1e6 for t in traces])
    figures.add(
        f"image.{name}_hot_byte_share",
        "of the stored bytes",
        [sum(sizes[each] for each in trace.blocks) / total for trace in traces],
    )
    figures.add(f"image.{name}_hot_jaccard", "common/either", [pair.jaccard for pair in pairs])
    figures.add(f"image.{name}_hot_missed", "of the other's blocks", [pair.missed_share for pair in pairs])
    figures.add(f"image.{name}_hot_order", "Spearman", [pair.spearman for pair in pairs])
    return figures
