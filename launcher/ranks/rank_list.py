"""Lists of ranks in messages. PURE."""

from __future__ import annotations

from collections.abc import Iterable


def format_ranks(ranks: Iterable[int]) -> str:
    """Format as `0, 2-5, 9`, at most one line long."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = [
        str(low) if low == high else f"{low}, {high}" if high == low + 1 else f"{low}-{high}"
        for low, high in spans
    ]
    if len(texts) > 24:
        texts = [*texts[:24], "..."]
    return ", ".join(texts)
