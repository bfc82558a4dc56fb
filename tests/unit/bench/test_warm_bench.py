"""What `bench warm` makes of what it has looked at."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from bench.record import BenchError
from bench.start_ways import Sample
from bench.warm import Beside, max_within, read_steps, step_times, to_figures


def test_steps_are_reported_apart_by_the_span_they_lie_in() -> None:
    ended_ns = [int(at_s * 1e9) for at_s in (0, 1, 2, 2.5, 4, 6, 7)]
    alone, beside = step_times(ended_ns, int(0.5e9), 2, 5)
    assert alone == pytest.approx([1, 1])  # the first began too early
    assert beside == pytest.approx([0.5, 1.5])  # one that ends after the span is neither
    with pytest.raises(BenchError, match="no steps"):
        step_times(ended_ns, 0, 8, 9)


def test_the_most_that_was_sent_within_a_window() -> None:
    looks = [(0.0, 100), (1.0, 110), (2.0, 150), (3.0, 190), (4.0, 190)]
    assert max_within(looks, 2.0) == 80
    assert max_within(looks, 0.5) == 20  # evenly between two looks
    assert max_within(looks, 10.0) == 90
    assert max_within([(5.0, 7)], 1.0) == 0


def test_a_step_that_was_half_written_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    path.write_bytes(struct.pack("<qq", 3, 5) + b"\x01")
    assert read_steps(str(path)) == [3, 5]


def test_ratios_come_first() -> None:
    start = Sample(4.0, [{}], [[("preload", 1.0, 2.5)]], 5_000_000, [1], 1, 1.0, 0.01, [])
    figures = to_figures([Beside(4.0, 200_000_000, 0.9, 10.0, 11.0)], [start], [start._replace(seconds=8.0)])
    assert figures["warm.step_ratio"].value == pytest.approx(1.1)
    assert figures["warm.daemon_mb"].value == 200
    assert figures["warm.cold_ratio"].value == 2
    assert figures["warm.warmed_preload_s"].value == 1.5
