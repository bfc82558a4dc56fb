"""What `bench start` makes of what nodes say they did."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bench.record import BenchError, Figures
from bench.start import add_limits, check_same, limits_of
from bench.start_limits import Limits, Span, Wait, chain_s, longest_wait
from bench.start_ways import ALONE, Sample, newest_moments, read_stages

SPANS: list[Span] = [
    ("rendezvous", 0.0, 0.4),
    ("image", 0.01, 1.0),
    ("image_resolved", 0.01, 0.11),
    ("setup", 0.12, 1.5),
    ("checkpoint", 0.41, 2.5),
    ("preload", 1.51, 3.0),
    ("caches", 1.51, 2.0),
    ("spawn", 3.02, 3.1),
]


def test_a_start_that_never_waits() -> None:
    assert longest_wait(SPANS) == Wait(pytest.approx(0.02), "spawn")


@pytest.mark.parametrize(
    ("stage", "span", "wait_s"),
    [
        ("image", (0.3, 1.0), 0.3),  # it needs nothing
        ("setup", (0.41, 1.5), 0.3),  # it was known what the image is
        ("checkpoint", (0.7, 2.5), 0.3),  # and which version the job loads
        ("preload", (1.8, 3.0), 0.3),  # what it is imported from was there
        ("spawn", (3.5, 3.6), 0.5),  # and all that ranks need
    ],
)
def test_a_stage_that_waits_is_found(stage: str, span: tuple[float, float], wait_s: float) -> None:
    found = longest_wait([(stage, *span) if each[0] == stage else each for each in SPANS])
    assert (found.stage, found.seconds) == (stage, pytest.approx(wait_s))


def test_only_the_first_attempt_counts_and_what_came_later_was_not_needed() -> None:
    later: list[Span] = [("spawn", 9.0, 9.1), ("preload", 5.0, 7.0)]
    assert longest_wait([*SPANS, *later]) == longest_wait(SPANS)
    without = [span for span in SPANS if span[0] != "preload"]
    # A preload that began after the ranks is for the next attempt; these waited although the checkpoint was there.
    assert longest_wait([*without, ("preload", 5.0, 7.0)]) == Wait(pytest.approx(0.52), "spawn")
    assert longest_wait([]) == Wait(0.0, "")


def test_the_longest_chain() -> None:
    assert chain_s(image_s=1, env_s=2, checkpoint_s=2.5, preload_s=3, rest_s=0.5) == 5.5
    assert chain_s(image_s=4, env_s=2, checkpoint_s=2.5, preload_s=3, rest_s=0.5) == 7.5
    assert chain_s(image_s=1, env_s=2, checkpoint_s=9, preload_s=3, rest_s=0.5) == 9.5


def test_the_largest_limit_binds() -> None:
    assert Limits(1.0, 2.0, 0.5, 0.1).binding() == ("cpu", 2.0)
    assert Limits(1.0, 0.2, 0.5, 1.1).binding() == ("store", 1.1)


def sample(seconds: float, spans: list[Span], *, sent_bytes: int = 0, received: int = 0) -> Sample:
    return Sample(seconds, [{"first_step": seconds}], [spans], sent_bytes, [received], 1, 2.0, 0.01, [1.0])


def test_limits_come_from_the_techniques_alone() -> None:
    alone = [
        [sample(9.0, [("image", 0.0, 1.0)])],
        [sample(9.0, [("setup", 0.0, 1.5)]), sample(9.0, [("setup", 0.0, 2.5)])],  # their median
        [sample(9.0, [("checkpoint", 0.0, 3.0)])],
        [sample(9.0, [("preload", 4.0, 7.0), ("spawn", 7.0, 8.5)])],
    ]
    cold = sample(6.0, SPANS, sent_bytes=800_000_000, received=200_000_000)
    found = limits_of(cold, *alone)
    assert (found.chain, found.link, found.store) == (5.5, 1.0, 2.0)
    assert found.cpu == pytest.approx(2.0 / (os.cpu_count() or 1))
    figures = Figures()
    add_limits(figures, "start.", 1, {"cold": [cold], **dict(zip(ALONE, alone, strict=True))})
    assert figures["start.vs_limit"].value == pytest.approx(6.0 / 5.5)
    assert figures["start.wait_ms"].value == pytest.approx(20)
    without = Figures()
    add_limits(without, "start.", 1, {"cold": [cold]})
    assert [name for name, _ in without] == ["start.wait_ms"]


def test_the_newest_attempt_counts(tmp_path: Path) -> None:
    for number, name in enumerate(("moments-1-0.json", "moments-0-0.json", "moments-1-1.json")):
        (tmp_path / name).write_text("{}")
        os.utime(tmp_path / name, (number, number))
    assert newest_moments(str(tmp_path)).endswith("moments-1-1.json")
    with pytest.raises(BenchError, match="its rank has written nothing"):
        newest_moments(str(tmp_path / "none"))


RESOLVED_S = {"resolved_s": 0.5, "how": "mounted"}


def test_stages_of_events_and_of_a_node_that_does_without(tmp_path: Path) -> None:
    out, events = tmp_path / "out", tmp_path / "logs" / "run" / "events"
    out.mkdir()
    events.mkdir(parents=True)
    (out / "stages.json").write_text(json.dumps([["image_pulled", 1, 5]]))
    lines = [
        {"stage": "env", "kind": "begin", "name": "setup", "span": "a", "mono_ns": 6},
        {"stage": None, "kind": "begin", "name": "prefetch", "span": "b", "mono_ns": 7},
        {"stage": "env", "kind": "end", "name": "setup", "span": "a", "mono_ns": 9},
        {"stage": "image", "kind": "begin", "name": "image", "span": "d", "mono_ns": 10},
        {
            "stage": "image",
            "kind": "end",
            "name": "image",
            "span": "d",
            "mono_ns": 2_000_000_010,
            "attrs": RESOLVED_S,
        },
        {"stage": "spawn", "kind": "begin", "name": "spawn", "span": "c", "mono_ns": 10},
    ]
    (events / "agent-n.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_stages(str(out)) == [
        *(("image_pulled", 1, 5), ("setup", 6, 9)),
        *(("image", 10, 2_000_000_010), ("image_resolved", 10, 500_000_010)),
    ]


def test_ways_that_train_otherwise_are_no_comparison() -> None:
    one = sample(1.0, [])
    check_same({"plain": one, "cold": one._replace(seconds=2.0)})
    with pytest.raises(BenchError, match="cold and plain have not trained the same"):
        check_same({"plain": one, "cold": one._replace(losses=[2.0])})
