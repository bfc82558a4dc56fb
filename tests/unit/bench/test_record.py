"""Figures: the median, its bounds, and what the check of a JSON file notices."""

from __future__ import annotations

import json
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.check import check_document
from bench.record import (
    BenchError,
    Figures,
    Target,
    make_document,
    median_bounds,
    without_directories,
    write_document,
)

numbers = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)


def coverage(n: int, cut: int) -> float:
    """Probability that the order statistics `cut` from each end enclose the median."""
    return 1 - 2 * sum(math.comb(n, k) for k in range(cut + 1)) / 2**n


@given(numbers)
def test_bounds_enclose_the_median(samples: list[float]) -> None:
    low, high = median_bounds(samples)
    assert low <= statistics.median(samples) <= high


@pytest.mark.parametrize("n", range(1, 60))
def test_bounds_are_the_narrowest_with_the_confidence(n: int) -> None:
    low, high = median_bounds(list(range(n)))
    cut = int(low)
    assert high == n - 1 - cut
    if n >= 6:
        assert coverage(n, cut) >= 0.95
        assert coverage(n, cut + 1) < 0.95
    else:
        assert cut == 0


def test_ratios_are_formed_within_rounds() -> None:
    figures = Figures()
    made = figures.add_ratio("x.ratio", [10, 100, 30], [1, 50, 10])
    assert made.samples == (10, 2, 3)
    assert made.value == 3


def test_rounds_that_do_not_match_are_an_error() -> None:
    with pytest.raises(ValueError):
        Figures().add_ratio("x.ratio", [1, 2], [1])


def test_no_samples_and_no_numbers_are_errors() -> None:
    with pytest.raises(BenchError):
        Figures().add("x", "s", [])
    with pytest.raises(BenchError):
        Figures().add("x", "s", [1.0, math.nan])


def made_document() -> dict:
    figures = Figures()
    figures.add("x.seconds", "s", [3, 1, 2])
    return json.loads(json.dumps(make_document("x", ["x"], figures)))


def test_document_has_the_agreed_keys() -> None:
    document = made_document()
    assert list(document) == ["bench", "machine", "commit", "argv", "figures"]
    assert document["figures"] == {
        "x.seconds": {"value": 2, "unit": "s", "low": 1, "high": 3, "n": 3, "samples": [3, 1, 2]}
    }


def test_check_accepts_what_was_made(tmp_path) -> None:
    path = tmp_path / "out" / "x.json"
    write_document(str(path), made_document())
    good, bad = check_document(json.loads(path.read_text()), {"x.seconds": Target(at_most=2, samples=3)})
    assert len(good) == 2
    assert bad == []


@pytest.mark.parametrize(
    ("field", "value"),
    [("value", 1.9), ("low", 0), ("high", 4), ("n", 4), ("samples", [3, 1]), ("samples", []), ("unit", None)],
)
def test_check_notices_a_changed_field(field: str, value: object) -> None:
    document = made_document()
    document["figures"]["x.seconds"][field] = value
    _, bad = check_document(document, {})
    assert bad


@pytest.mark.parametrize(
    "target",
    [Target(at_least=2.1), Target(at_most=1.9), Target(at_most=2, samples=4)],
)
def test_check_notices_a_missed_target(target: Target) -> None:
    _, bad = check_document(made_document(), {"x.seconds": target})
    assert bad


def test_check_notices_a_missing_figure_and_extra_keys() -> None:
    _, bad = check_document(made_document(), {"x.ratio": Target(at_least=1)})
    assert bad
    _, bad = check_document({**made_document(), "more": 1}, {})
    assert bad


def test_table_says_whether_targets_are_met() -> None:
    figures = Figures()
    figures.add("a", "s", [1])
    figures.add("b", "s", [5])
    text = figures.table({"a": Target(at_most=2), "b": Target(at_most=2)})
    assert "<= 2 met" in text and "<= 2 NOT MET" in text


@pytest.mark.parametrize(
    ("word", "kept"),
    [
        ("/home/me/out/launch.json", "launch.json"),
        ("--json=/home/me/out/launch.json", "--json=launch.json"),
        ("--folder=/mnt/disk", "--folder=disk"),
        ("/launch.json", "launch.json"),
        ("/mnt/disk/", "disk/"),
        ("/", "/"),
        ("out/launch.json", "out/launch.json"),
        ("--rounds", "--rounds"),
        ("7", "7"),
        ("hdfs://node/dir", "hdfs://node/dir"),
        ("--also=out/a/b.json", "--also=out/a/b.json"),
    ],
)
def test_the_recorded_command_has_no_directory_of_this_machine(word: str, kept: str) -> None:
    assert without_directories(["launch", word]) == ["launch", kept]
    assert make_document("x", ["launch", word], Figures())["argv"] == ["launch", kept]
