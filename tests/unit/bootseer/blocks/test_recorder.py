"""First touches, in order, once each, until the start is over."""

from __future__ import annotations

import random
import threading

from bootseer.blocks.recorder import Recorder
from bootseer.blocks.trace import Trace, decode, encode, workload_key

TREE = "ab" * 32


class Clock:
    def __init__(self) -> None:
        self.now_s = 5.0

    def __call__(self) -> float:
        return self.now_s


def trace_of(recorder: Recorder) -> Trace:
    trace = recorder.trace(TREE, workload_key("python", "train.py"))
    assert trace is not None
    return trace


def test_first_touches_are_noted_with_their_times() -> None:
    clock = Clock()
    recorder = Recorder(10, now_s=clock)
    recorder.touch(3, 4)
    clock.now_s += 0.25
    recorder.touch(4, 5)
    recorder.touch(9, 12)  # the device ends at 10
    recorder.touch(3, 3)
    trace = trace_of(recorder)
    assert (trace.blocks, trace.first_ms) == ([3, 4, 5, 9], [0, 0, 250, 250])
    assert trace == decode(encode(trace), TREE, 10, "here")
    assert [number for number in range(10) if recorder.seen[number]] == [3, 4, 5, 9]


def test_nothing_is_noted_after_the_end() -> None:
    recorder = Recorder(10)
    recorder.touch(1, 1)
    assert recorder.is_on
    recorder.finish()
    recorder.touch(2, 2)
    assert not recorder.is_on
    assert trace_of(recorder).blocks == [1]


def test_a_program_that_never_starts_is_not_recorded_for_ever() -> None:
    clock = Clock()
    recorder = Recorder(10, cap_s=600.0, now_s=clock)
    recorder.touch(1, 1)
    clock.now_s += 600.1
    recorder.touch(2, 2)
    assert not recorder.is_on
    assert trace_of(recorder).blocks == [1]


def test_a_trace_has_a_largest_size() -> None:
    recorder = Recorder(100, max_blocks=5)
    recorder.touch(0, 3)
    recorder.touch(10, 20)
    assert trace_of(recorder).blocks == [0, 1, 2, 3, 10]
    assert not recorder.is_on


def test_a_recording_has_a_name_of_its_own() -> None:
    recorders = [Recorder(10) for _ in range(50)]
    names = set()
    for recorder in recorders:
        recorder.touch(1, 2)
        (name,) = trace_of(recorder).recordings
        assert [name] == trace_of(recorder).recordings
        names.add(name)
    assert len(names) == len(recorders)


def test_without_touches_there_is_no_trace() -> None:
    assert Recorder(10).trace(TREE) is None
    assert not Recorder(0).is_on


def test_threads_note_each_block_once() -> None:
    recorder = Recorder(2000)

    def work(seed: int) -> None:
        order = list(range(2000))
        random.Random(seed).shuffle(order)
        for number in order:
            recorder.touch(number, number)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(trace_of(recorder).blocks) == list(range(2000))
