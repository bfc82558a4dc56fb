"""Hot traces: what others stored is bounded, merging is fair, forgetting is gradual."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.blocks.trace import (
    ANY_WORKLOAD,
    MAX_MS,
    MAX_PAYLOAD_BYTES,
    MAX_RECORDINGS,
    MAX_RUNS,
    MAX_TRACED,
    Trace,
    decode,
    encode,
    merge,
    prune,
    recording_name,
    with_known,
    workload_key,
)
from bootseer.errors import FormatVersion, IntegrityError

TREE = "ab" * 32
COUNT = 50


def make(
    blocks: list[int],
    seen: list[int] | None = None,
    first_ms: list[int] | None = None,
    runs: int = 1,
    recordings: Sequence[str] = (),
) -> Trace:
    return Trace(
        tree=TREE,
        workload=ANY_WORKLOAD,
        runs=runs,
        blocks=blocks,
        seen=[1] * len(blocks) if seen is None else seen,
        first_ms=list(range(len(blocks))) if first_ms is None else first_ms,
        recordings=list(recordings),
    )


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    blocks = draw(st.lists(st.integers(0, COUNT - 1), unique=True, max_size=20))
    runs = draw(st.integers(1, 40))
    return make(
        blocks,
        [draw(st.integers(1, runs)) for _ in blocks],
        [draw(st.integers(0, 10_000)) for _ in blocks],
        runs,
    )


@given(traces())
def test_what_was_stored_comes_back(trace: Trace) -> None:
    assert decode(encode(trace), TREE, COUNT, "here") == trace


def test_the_largest_trace_fits_into_its_envelope() -> None:
    trace = make(
        list(range((1 << 24) - MAX_TRACED, 1 << 24)),
        [MAX_RUNS] * MAX_TRACED,
        [MAX_MS] * MAX_TRACED,
        MAX_RUNS,
        [recording_name(number, number) for number in range(MAX_RECORDINGS)],
    )
    data = encode(trace)
    assert len(data) <= MAX_PAYLOAD_BYTES
    assert len(base64.b64encode(data)) < (16 << 20) - 4096


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "bootseer-trace/2"}, "bootseer-trace/2"),
        ({"tree": "cd" * 32}, "another tree"),
        ({"workload": "../../etc/passwd"}, "workload"),
        ({"workload": "A" * 16}, "workload"),
        ({"runs": 0}, "0 runs"),
        ({"runs": MAX_RUNS + 1}, "runs"),
        ({"blocks": [1, 1, 2]}, "twice"),
        ({"blocks": [1, 2, COUNT]}, "does not have"),
        ({"blocks": [1, 2, -1]}, "does not have"),
        ({"blocks": [1, 2]}, "2 blocks, 3 counts"),
        ({"seen": [1, 1]}, "2 counts"),
        ({"seen": [0, 1, 1]}, "more often"),
        ({"seen": [1, 4, 1]}, "more often"),
        ({"first_ms": [1, -1, 1]}, "time"),
        ({"first_ms": [1, MAX_MS + 1, 1]}, "time"),
        ({"first_ms": [1.5, 1, 1]}, "not an access trace"),
        ({"blocks": [True, 2, 3]}, "not an access trace"),
        ({"blocks": "123"}, "not an access trace"),
        ({"more": 1}, "not an access trace"),
        ({"recordings": ["0" * 16, "0" * 16]}, "2 names .* not in order"),
        ({"recordings": ["1" * 16, "0" * 16]}, "not in order"),
        ({"recordings": [f"{number:016x}" for number in range(MAX_RECORDINGS + 1)]}, "too many"),
        ({"recordings": ["../x"]}, "name of a recording"),
        ({"recordings": [1]}, "not an access trace"),
    ],
)
def test_what_does_not_add_up_is_refused(change: dict[str, Any], said: str) -> None:
    right = msgspec.to_builtins(make([1, 2, 3], [1, 3, 2], [0, 5, 9], 3))
    data = msgspec.json.encode({**right, **change})
    with pytest.raises(IntegrityError, match=said) as caught:
        decode(data, TREE, COUNT, "http://store/traces/x")
    assert str(caught.value).startswith("http://store/traces/x: ")
    assert isinstance(caught.value, FormatVersion) == ("format" in change)


def test_no_bytes_are_too_wild() -> None:
    for data in (b"", b"{}", b"[]", b"\xff", b"[" * 100_000, b"1" * 1000, b'{"format":"bootseer-trace/1"}'):
        with pytest.raises(IntegrityError):
            decode(data, TREE, COUNT, "here")
    with pytest.raises(IntegrityError, match="no trace is larger"):
        decode(bytes(MAX_PAYLOAD_BYTES + 1), TREE, COUNT, "here")


def test_what_no_reader_takes_is_not_written() -> None:
    with pytest.raises(IntegrityError):
        encode(make([1, 1]))


# ---- merging ---------------------------------------------------------------------------------------------------


@given(st.lists(traces(), min_size=1, max_size=5), st.randoms())
def test_order_of_merged_traces_does_not_matter(some: list[Trace], chance: Any) -> None:
    one = merge(some)
    chance.shuffle(some)
    assert merge(some) == one


@given(st.lists(traces(), min_size=1, max_size=5))
def test_counts_add_up_and_order_is_by_time(some: list[Trace]) -> None:
    one = merge(some)
    assert one.runs == sum(trace.runs for trace in some)
    counts: dict[int, int] = {}
    for trace in some:
        for number, seen in zip(trace.blocks, trace.seen, strict=True):
            counts[number] = counts.get(number, 0) + seen
    assert dict(zip(one.blocks, one.seen, strict=True)) == counts
    hot = one.hot()
    assert hot == one.blocks[: len(hot)]
    assert set(hot) == {number for number, seen in counts.items() if 2 * seen >= one.runs}
    for part in (one.first_ms[: len(hot)], one.first_ms[len(hot) :]):
        assert part == sorted(part)
    decode(encode(one), TREE, COUNT, "merged")


@given(traces(), traces(), traces())
def test_merging_bit_by_bit_is_the_same_but_for_rounding(a: Trace, b: Trace, c: Trace) -> None:
    at_once, in_steps = merge([a, b, c]), merge([merge([a, b]), c])
    assert at_once.runs == in_steps.runs
    assert dict(zip(at_once.blocks, at_once.seen, strict=True)) == dict(
        zip(in_steps.blocks, in_steps.seen, strict=True)
    )
    assert set(at_once.hot()) == set(in_steps.hot())
    steps = dict(zip(in_steps.blocks, in_steps.first_ms, strict=True))
    for number, first_ms in zip(at_once.blocks, at_once.first_ms, strict=True):
        assert abs(steps[number] - first_ms) <= 1


def test_a_block_of_half_the_runs_is_hot_and_chance_is_not() -> None:
    some = [make([1, 2, 3], first_ms=[0, 10, 20]), make([1, 3, 4], first_ms=[0, 30, 40])]
    some += [make([1, 3], first_ms=[4, 10])] * 2
    one = merge(some)
    assert one.hot() == [1, 3]
    assert set(one.blocks) == {1, 2, 3, 4}
    assert merge([make([5, 6, 7])]).hot() == [5, 6, 7]


def test_one_node_that_starts_late_moves_nothing_far() -> None:
    early = make([1, 2, 3], first_ms=[0, 100, 200])
    late = make([3, 2, 1], first_ms=[50, 60, 5000])
    assert merge([early, early, early, late]).blocks == [2, 3, 1]


def test_traces_of_other_trees_are_not_merged() -> None:
    other = Trace(tree="cd" * 32, workload=ANY_WORKLOAD, runs=1, blocks=[], seen=[], first_ms=[])
    with pytest.raises(ValueError, match="one tree"):
        merge([make([1]), other])
    with pytest.raises(ValueError, match="one tree"):
        merge([])


@given(st.lists(traces(), min_size=1, max_size=8), st.integers(1, 40))
def test_pruning_keeps_shares(some: list[Trace], kept_runs: int) -> None:
    whole = merge(some)
    pruned = prune(whole, kept_runs=kept_runs)
    assert pruned.runs == (whole.runs if whole.runs < 2 * kept_runs else kept_runs)
    decode(encode(pruned), TREE, COUNT, "pruned")
    shares = {number: seen / whole.runs for number, seen in zip(whole.blocks, whole.seen, strict=True)}
    for number, seen in zip(pruned.blocks, pruned.seen, strict=True):
        assert abs(seen / pruned.runs - shares[number]) <= 0.5 / pruned.runs + 1e-9
    assert pruned.runs < 2 * kept_runs
    for number in set(whole.blocks) - set(pruned.blocks):
        assert shares[number] <= 0.5 / pruned.runs + 1e-9


def test_what_a_program_no_longer_reads_is_forgotten() -> None:
    trace = merge([make([1, 2])] * 30)
    for _ in range(60):
        trace = prune(merge([trace, make([1, 3])]))
    assert trace.hot() == [1, 3]
    for _ in range(300):
        trace = prune(merge([trace, make([1, 3])]))
    assert set(trace.blocks) == {1, 3}


# ---- the same recording by several ways ------------------------------------------------------------------------


@st.composite
def recordings(draw: st.DrawFn) -> list[Trace]:
    """Single starts, each with a name."""
    count = draw(st.integers(1, 8))
    return [
        msgspec.structs.replace(draw(traces()), runs=1, recordings=[recording_name(number // 2, number)])
        for number in range(count)
    ]


def as_one(trace: Trace) -> Trace:
    return msgspec.structs.replace(trace, seen=[1] * len(trace.blocks))


@given(recordings(), st.data())
def test_what_is_merged_again_changes_nothing(some: list[Trace], data: st.DataObject) -> None:
    some = [as_one(trace) for trace in some]
    whole = merge(some)
    assert whole.runs == len(some) == len(whole.recordings)
    assert decode(encode(whole), TREE, COUNT, "here") == whole
    part = merge(data.draw(st.lists(st.sampled_from(some), min_size=1)))
    assert merge(data.draw(st.permutations([whole, part, whole, *some]))) == whole


@given(recordings(), st.data())
def test_parts_that_overlap_count_about_right(some: list[Trace], data: st.DataObject) -> None:
    """This node has recordings that the store has, and others; so has the store."""
    some = [as_one(trace) for trace in some]
    first = data.draw(st.lists(st.sampled_from(some), min_size=1))
    second = data.draw(st.lists(st.sampled_from(some), min_size=1))
    found = merge([merge(first), merge(second)])
    names = {name for trace in (*first, *second) for name in trace.recordings}
    assert set(found.recordings) == names and found.runs == len(names)
    assert found == merge([merge(second), merge(first)])
    decode(encode(found), TREE, COUNT, "here")
    always = set.intersection(*(set(trace.blocks) for trace in (*first, *second)))
    assert always <= set(found.hot()), "what every start needs"


def test_a_recording_that_was_pruned_away_still_counts_once() -> None:
    some = [make([1, 2], recordings=[recording_name(number, 7)]) for number in range(64)]
    whole = prune(merge(some))
    assert (whole.runs, len(whole.recordings)) == (32, 64)
    assert merge([whole, *some[:40]]) == merge([merge(some[:40]), whole]) == whole
    more = merge([whole, make([1, 3], recordings=[recording_name(99, 7)])])
    assert (more.runs, more.seen, more.blocks) == (33, [33, 32, 1], [1, 2, 3])


def test_names_of_long_ago_are_forgotten_first() -> None:
    some = [make([1], recordings=[recording_name(number, 0)]) for number in range(MAX_RECORDINGS + 10)]
    assert merge(some).recordings == [recording_name(number, 0) for number in range(10, MAX_RECORDINGS + 10)]


# ---- keys ------------------------------------------------------------------------------------------------------


def test_workload_is_what_is_started_not_where() -> None:
    key = workload_key("/opt/venv/bin/python", "/jobs/17/train.py")
    assert key == workload_key("python", "train.py") == workload_key("/usr/bin/python/", "train.py")
    assert len({key, workload_key("python", "other.py"), workload_key("pythontrain", ".py"), ANY_WORKLOAD}) == 4
    assert len(key) == 16
    assert workload_key("python", "\udcff.py")  # a name that is no UTF-8


@pytest.mark.parametrize("python", ["python", "python3", "python3.11", "/opt/conda/bin/python3.12"])
def test_an_interpreter_by_any_name_is_the_same_workload(python: str) -> None:
    assert workload_key(python, "train.py") == workload_key("python3", "train.py")
    assert workload_key("pythonic", "train.py") != workload_key("python3", "train.py")
    assert workload_key("accelerate", "python") != workload_key("accelerate", "python3")  # a script's own name


@given(traces(), traces())
def test_a_start_with_read_ahead_votes_for_what_was_hot_only_with_something_new(
    recorded: Trace, known: Trace
) -> None:
    hot, seen = set(known.hot()), set(recorded.blocks)
    found = with_known(recorded, known)
    if seen <= hot:
        assert found is None
        return
    assert found is not None and (found.runs, set(found.seen)) == (1, {1})
    assert set(found.blocks) == hot | seen and found.recordings == recorded.recordings
    times = dict(zip(found.blocks, found.first_ms, strict=True))
    assert [times[number] for number in hot] == [
        dict(zip(known.blocks, known.first_ms, strict=True))[n] for n in hot
    ]
    assert decode(encode(found), TREE, COUNT, "x") == found


def test_read_ahead_of_another_workload_is_no_vote() -> None:
    with pytest.raises(ValueError, match="one workload"):
        with_known(make([1]), msgspec.structs.replace(make([2]), workload="0123456789abcdef"))
