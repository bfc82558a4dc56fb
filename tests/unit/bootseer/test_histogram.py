"""Durations in a few numbers."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from bootseer.histogram import BOUNDS_S, TimeHistogram


@given(st.lists(st.floats(0, 1e6), max_size=50))
def test_each_duration_is_counted_once_at_its_bound(times: list[float]) -> None:
    histogram = TimeHistogram()
    for took_s in times:
        histogram.add(took_s)
    below = 0.0
    for bound_s, count in zip(BOUNDS_S, histogram.counts, strict=False):
        below += count
        assert below == sum(took_s <= bound_s for took_s in times)
    assert sum(histogram.counts) == len(times)
    assert json.loads(json.dumps(histogram.record()))["counts"] == histogram.counts


def test_several_at_once() -> None:
    histogram = TimeHistogram((1.0,))
    histogram.add(0.5, 4)
    histogram.add(2.0)
    assert (histogram.counts, histogram.sum_s) == ([4, 1], 4.0)
