"""Lines on their way to the coordinator: rates, sizes of batches, and batches that are not what they say."""

from __future__ import annotations

import os
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.events import BEAT_MARK, EventWriter, Stage
from launcher.rendezvous.codec import MAX_EVENT_LINES, MAX_EVENTS_BYTES, MAX_RAW_EVENTS_BYTES
from launcher.rendezvous.event_batch import (
    AIM_BYTES,
    BURST_BYTES,
    HEARTBEATS_BURST_BYTES,
    MAX_LINE_BYTES,
    RATE_BYTES_S,
    DropCounts,
    EventRateLimits,
    TokenBucket,
    pack,
    unpack,
)

START = b'{"v":1,"stage":"spawn","kind":"instant","name":"script"}'
BEAT = b'{"v":1,"stage":null,"kind":"scalar","name":"heartbeat","value":7}'


class TestAllowance:
    @given(st.integers(0, 1000), st.integers(1, 5000), st.lists(st.tuples(st.floats(0, 10), st.integers(0, 5000))))
    def test_no_more_passes_than_the_burst_and_the_rate(
        self, rate: int, burst: int, steps: list[tuple[float, int]]
    ) -> None:
        allowance = TokenBucket(rate, burst, 0.0)
        now_s, passed = 0.0, 0
        for pause_s, size in steps:
            now_s += pause_s
            if allowance.left(now_s) >= size:
                allowance.take(size)
                passed += size
        assert passed <= burst + rate * now_s + 1e-6 * (1 + passed)

    def test_what_is_owed_is_paid_first(self) -> None:
        allowance = TokenBucket(10, 100, 0.0)
        allowance.take(150)
        assert allowance.left(4.0) == -10
        assert allowance.left(6.0) == 10
        assert allowance.left(1000.0) == 100

    def test_a_clock_that_goes_back_gives_nothing(self) -> None:
        allowance = TokenBucket(10, 100, 50.0)
        allowance.take(100)
        assert allowance.left(10.0) == 0
        assert allowance.left(51.0) == 10


class TestSieve:
    def test_heartbeats_beyond_their_rate_are_counted_and_nothing_else_is(self) -> None:
        drops = DropCounts()
        sieve = EventRateLimits(2, drops, 0.0)
        lines = [BEAT] * 10_000
        lines[7_000] = START
        kept = sieve.select_lines(lines, 0.0)
        assert START in kept
        assert sum(len(line) + 1 for line in kept if line == BEAT) <= HEARTBEATS_BURST_BYTES
        assert drops.told() == (10_000 - len(kept), 0, 0, 0)
        assert sieve.has_room(0.0)

    def test_their_rate_is_shared_by_the_nodes(self) -> None:
        def heartbeats_after_a_while(nodes: int) -> int:
            sieve = EventRateLimits(nodes, DropCounts(), 0.0)
            sieve.select_lines([BEAT] * 10_000, 0.0)
            return len(sieve.select_lines([BEAT] * 10_000, 60.0 if nodes > 1000 else 0.1))

        assert heartbeats_after_a_while(2) > heartbeats_after_a_while(10) > 0
        # No node is silenced for good.
        assert 60 * 256 * 0.9 < heartbeats_after_a_while(100_000) * (len(BEAT) + 1) <= 60 * 256 * 1.1

    def test_other_lines_wait_in_their_files_when_there_are_too_many(self) -> None:
        sieve = EventRateLimits(2, DropCounts(), 0.0)
        count = BURST_BYTES // (len(START) + 1) + 2
        assert len(sieve.select_lines([START] * count, 0.0)) == count
        assert not sieve.has_room(0.0)
        assert sieve.has_room(200 / RATE_BYTES_S)

    def test_long_lines_and_pieces_of_lines_are_counted(self) -> None:
        drops = DropCounts()
        lines = [START + b" " * MAX_LINE_BYTES, b"", b'stant"}', START]
        assert EventRateLimits(1, drops, 0.0).select_lines(lines, 0.0) == [START]
        assert drops.told() == (0, 1, 0, 2)

    def test_what_our_writers_write_is_reported_apart(self, tmp_path) -> None:
        path = os.fspath(tmp_path / "events")
        writer = EventWriter(path, 'an "odd" run', "nöde")
        writer.scalar(None, "heartbeat", 3)
        writer.scalar(Stage.IMAGE, "image_requests", 3)
        writer.instant(None, "rank_exited", rank=2)
        writer.close()
        lines = (tmp_path / "events").read_bytes().splitlines()
        assert [BEAT_MARK in line for line in lines] == [True, False, False]
        assert EventRateLimits(1, DropCounts(), 0.0).select_lines(lines, 0.0) == lines


some_lines = st.lists(st.binary(max_size=300).map(lambda data: data.replace(b"\n", b"x")), max_size=80)


class TestBatches:
    @given(some_lines)
    def test_what_is_packed_is_unpacked(self, lines: list[bytes]) -> None:
        found: list[bytes] = []
        rest = list(lines)
        while rest:
            packed = pack(rest)
            assert packed.lines > 0 and len(packed.data) <= MAX_EVENTS_BYTES
            assert packed.raw_bytes <= MAX_RAW_EVENTS_BYTES
            part = unpack(*packed)
            assert part is not None and len(part) == packed.lines
            found += part
            del rest[: packed.lines]
        assert found == lines
        assert pack([]) == (b"", 0, 0)
        assert unpack(b"", 0, 0) == []

    def test_lines_that_do_not_get_smaller_go_in_several_batches(self) -> None:
        lines = [os.urandom(4000).replace(b"\n", b"x") for _ in range(100)]
        packed = pack(lines)
        assert 0 < packed.lines < 40 and len(packed.data) <= MAX_EVENTS_BYTES

    def test_a_batch_is_of_moderate_size(self) -> None:
        packed = pack([START] * 100_000)
        assert packed.raw_bytes <= AIM_BYTES and packed.lines <= MAX_EVENT_LINES
        assert pack([b"x"] * 100_000).lines == MAX_EVENT_LINES
        assert pack([b"y" * (2 * AIM_BYTES)]).lines == 1

    @pytest.mark.parametrize(
        ("data", "raw_bytes", "lines"),
        [
            (b"junk", 100, 1),
            (b"", 0, 1),
            (b"", 1, 0),
            (zlib.compress(b"a\nb\n"), 4, 1),
            (zlib.compress(b"a\nb\n"), 4, 3),
            (zlib.compress(b"a\nb\n"), 5, 2),
            (zlib.compress(b"a\nb\n"), 3, 2),
            (zlib.compress(b"a\nb\n"), 0, 0),
            (zlib.compress(b"a\nb"), 3, 1),
            (zlib.compress(b"a\nb\n")[:-1], 4, 2),
            (zlib.compress(b"a\nb\n") + b"more", 4, 2),
            (zlib.compress(b"\n" * (MAX_EVENT_LINES + 1)), MAX_EVENT_LINES + 1, MAX_EVENT_LINES + 1),
        ],
    )
    def test_batches_that_are_not_what_they_say(self, data: bytes, raw_bytes: int, lines: int) -> None:
        assert unpack(data, raw_bytes, lines) is None

    def test_a_bomb_takes_no_memory(self) -> None:
        compressor = zlib.compressobj(9)
        bomb = b"".join(compressor.compress(bytes(1 << 20)) for _ in range(60)) + compressor.flush()
        assert len(bomb) <= MAX_EVENTS_BYTES
        tracemalloc.start()
        try:
            for said in (5, MAX_RAW_EVENTS_BYTES, 60 << 20):
                assert unpack(bomb, said, 1) is None
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert most < 8 * MAX_RAW_EVENTS_BYTES

    @given(st.binary(max_size=200), st.integers(-1, 5000), st.integers(-1, 100))
    def test_any_bytes_are_lines_or_nothing(self, data: bytes, raw_bytes: int, lines: int) -> None:
        found = unpack(data, raw_bytes, lines)
        assert found is None or len(found) == lines
