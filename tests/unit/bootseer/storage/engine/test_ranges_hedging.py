"""Hedged reads, in virtual time: when they are sent, who wins, and that the two never share memory.

FaultyStore sees to the last: it fails where two reads write to the same memory, and losers leave rubbish in it.
"""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.errors import Truncated, Unavailable
from bootseer.storage.engine.ranges import HEDGING_BUFFERS, RangeReader
from tests.testing.faulty_store import Fault, FaultyStore, Kind
from tests.unit.bootseer.storage.engine.test_ranges import (
    PIECE,
    assert_quiet,
    assert_right,
    make_reader,
    make_store,
    request,
)
from tests.unit.bootseer.storage.virtual import elapsed_s, run


async def practised(
    *plan: Fault, cancel_s: float = 0.0, **options: float | bool
) -> tuple[FaultyStore, RangeReader]:
    """A reader that knows how long reads take (about 0.01 s), on a store that has trouble from now on."""
    store = make_store(**options)
    reader = make_reader(store)
    await reader.read([request("b")])
    store.calls.clear()
    store.plan, store.cancel_s = list(plan), cancel_s
    return store, reader


def test_straggler_is_read_another_way() -> None:
    async def main() -> None:
        store, reader = await practised(Fault(Kind.STALL, attempts={0}, first=400, last=499))
        begin_s = elapsed_s()
        requests = [request()]
        await reader.read(requests)
        assert_right(requests)
        assert 0.5 < elapsed_s() - begin_s < 0.8
        assert [call.attempt for call in store.calls if call.offset == 400] == [0, 1]
        counts = reader.statistics()
        assert (counts["hedges"], counts["hedge_wins"], counts["retries"]) == (1, 1, 0)
        assert counts["wasted_bytes"] == PIECE
        await assert_quiet(reader, requests)

    run(main())


def test_first_read_of_all_is_hedged_as_well() -> None:
    async def main() -> None:
        store = make_store(Fault(Kind.STALL, attempts={0}))
        requests = [request(length=PIECE)]
        await make_reader(store).read(requests)
        assert_right(requests)
        assert 3.0 < elapsed_s() < 3.3

    run(main())


def test_hanging_reads_are_not_in_the_way_of_a_hedge() -> None:
    async def main() -> None:
        store = make_store(Fault(Kind.STALL, attempts={0}))
        reader = make_reader(store)
        requests = [request()]
        await reader.read(requests)
        assert_right(requests)
        hedge = next(call for call in store.calls if call.attempt == 1)
        assert hedge.offset == 0
        assert reader.statistics()["hedges"] == 1
        assert elapsed_s() < 70.0, "the others were read again after their first deadline"

    run(main())


def test_slow_store_is_not_given_more_to_do_before_it_is_known() -> None:
    async def main() -> None:
        store = make_store(rate=10.0)  # a read takes 10 s
        requests = [request()]
        await make_reader(store, width=4).read(requests)
        assert_right(requests)
        assert store.max_under_way <= 5, "the width and one hedge"

    run(main())


def test_not_sent_where_there_is_no_other_way() -> None:
    async def main() -> None:
        _, reader = await practised(Fault(Kind.STALL, calls={4}), has_replicas=False)
        await reader.read([request()])
        assert reader.statistics()["hedges"] == 0

    run(main())


def test_slow_first_read_may_win() -> None:
    async def main() -> None:
        slow = Fault(Kind.DELAY, attempts={0}, first=400, last=499, delay_s=1.0, keep_bytes=50)
        stuck = Fault(Kind.STALL, attempts={1}, keep_bytes=20)
        store, reader = await practised(slow, stuck)
        requests = [request()]
        await reader.read(requests)
        assert_right(requests)
        counts = reader.statistics()
        assert (counts["hedges"], counts["hedge_wins"]) == (1, 0)
        assert store.under_way == 0, "the loser was ended"
        await assert_quiet(reader, requests)

    run(main())


def test_loser_that_had_begun_to_write_does_not_write_after_the_winner() -> None:
    async def main() -> None:
        wrong = Fault(Kind.DELAY, attempts={0}, first=400, last=499, delay_s=0.9, keep_bytes=50)
        _, reader = await practised(wrong)
        requests = [request()]
        await reader.read(requests)
        assert_right(requests)
        assert reader.statistics()["hedge_wins"] == 1
        await assert_quiet(reader, requests)

    run(main())


def test_hedge_goes_on_where_a_failed_try_ended() -> None:
    async def main() -> None:
        broken = Fault(Kind.ERROR, attempts={0}, first=400, last=499, keep_bytes=30)
        stuck = Fault(Kind.STALL, attempts={1}, first=400, last=499)
        store, reader = await practised(broken, stuck)
        requests = [request()]
        await reader.read(requests)
        assert_right(requests)
        calls = [(call.offset, call.length, call.attempt) for call in store.calls if 400 <= call.offset < 500]
        assert calls == [(400, 100, 0), (430, 70, 1), (430, 70, 2)]

    run(main())


def test_hedge_saves_a_read_that_fails_meanwhile() -> None:
    async def main() -> None:
        late = Fault(Kind.DELAY, attempts={0}, first=400, last=499, delay_s=0.7)
        slow = Fault(Kind.DELAY, attempts={1}, delay_s=0.3)
        store, reader = await practised(late, slow)
        inner = store.inner
        real = inner.read_into

        async def read_into(
            path: str, offset: int, target: memoryview, *, etag: str = "", attempt: int = 0
        ) -> None:
            if offset == 400 and attempt == 0:
                raise Unavailable("broke late")
            await real(path, offset, target, etag=etag, attempt=attempt)

        inner.read_into = read_into  # type: ignore[method-assign]
        requests = [request()]
        await reader.read(requests)
        assert_right(requests)
        counts = reader.statistics()
        assert (counts["hedge_wins"], counts["retries"]) == (1, 0), "its bytes were waited for"

    run(main())


def test_hedge_that_fails_changes_nothing() -> None:
    async def main() -> None:
        slow = Fault(Kind.DELAY, attempts={0}, first=400, last=499, delay_s=2.0)
        broken = Fault(Kind.ERROR, attempts={1}, error=Truncated)
        store, reader = await practised(slow, broken)
        requests = [request()]
        await reader.read(requests)
        assert_right(requests)
        counts = reader.statistics()
        assert (counts["hedges"], counts["hedge_wins"], counts["retries"]) == (1, 0, 0)
        assert store.count("read_into") == 11

    run(main())


def test_both_stall_then_the_next_try_takes_a_third_way() -> None:
    async def main() -> None:
        store, reader = await practised(Fault(Kind.STALL, attempts={0, 1}, first=400, last=499))
        begin_s = elapsed_s()
        requests = [request()]
        await reader.read(requests)
        assert_right(requests)
        assert 5.0 < elapsed_s() - begin_s < 6.0
        assert [call.attempt for call in store.calls if call.offset == 400] == [0, 1, 2]

    run(main())


def test_hedges_are_few_when_many_hang() -> None:
    async def main() -> None:
        _store, reader = await practised(Fault(Kind.STALL, attempts={0}))
        requests = [request(offset=offset, length=1) for offset in range(0, 1000, 20)]  # 50 reads
        await reader.read(requests)
        assert_right(requests)
        assert reader.statistics()["hedges"] == 2
        assert reader.statistics()["timeouts"] >= 48
        await assert_quiet(reader, requests)

    run(main())


def test_hedge_of_small_neighbours_has_memory_of_its_own() -> None:
    async def main() -> None:
        _, reader = await practised(Fault(Kind.STALL, attempts={0}, keep_bytes=7))
        requests = [request(offset=offset, length=10) for offset in (0, 15, 30)]
        await reader.read(requests)
        assert_right(requests)
        assert reader.statistics()["hedge_wins"] == 1
        await assert_quiet(reader, requests)

    run(main())


def test_hedge_that_comes_while_the_first_read_is_being_ended_wins() -> None:
    async def main() -> None:
        stuck = Fault(Kind.STALL, attempts={0}, first=400, last=499)
        _, reader = await practised(stuck, Fault(Kind.DELAY, attempts={1}, delay_s=4.6), cancel_s=1.0)
        begin_s = elapsed_s()
        requests = [request()]
        await reader.read(requests)
        assert_right(requests)
        assert elapsed_s() - begin_s == pytest.approx(6.0, abs=0.1), "it came after the deadline of 5 s"
        assert reader.statistics()["hedge_wins"] == 1

    run(main())


@settings(max_examples=100, deadline=None)
@given(
    first_s=st.floats(0.0, 2.0),
    second_s=st.floats(0.0, 2.0),
    kept=st.integers(0, 100),
    also=st.integers(0, 100),
    cancel_s=st.sampled_from([0.0, 0.05, 1.0]),
)
def test_whoever_wins_the_bytes_are_right(
    first_s: float, second_s: float, kept: int, also: int, cancel_s: float
) -> None:
    async def main() -> None:
        _, reader = await practised(
            Fault(Kind.DELAY, attempts={0}, first=400, last=499, delay_s=first_s, keep_bytes=kept),
            Fault(Kind.DELAY, attempts={1}, delay_s=second_s, keep_bytes=also),
            cancel_s=cancel_s,
        )
        requests = [request()]
        begin_s = elapsed_s()
        await reader.read(requests)
        assert_right(requests)
        assert elapsed_s() - begin_s <= min(first_s, 0.7 + second_s) + cancel_s + 0.2
        await assert_quiet(reader, requests)

    run(main())


@pytest.mark.parametrize("hundredths", range(40, 90))
def test_cancelling_around_a_hedge_leaves_nothing(hundredths: int) -> None:
    async def main() -> None:
        store, reader = await practised(
            Fault(Kind.DELAY, attempts={0}, first=400, last=499, delay_s=0.7, keep_bytes=50),
            Fault(Kind.DELAY, attempts={1}, delay_s=0.1, keep_bytes=50),
            cancel_s=0.01,
        )
        requests = [request()]
        try:
            async with asyncio.timeout(hundredths / 100):
                await reader.read(requests)
            assert_right(requests)
        except TimeoutError:
            pass
        await assert_quiet(reader, requests)
        store.plan = [Fault(Kind.STALL, attempts={0}, first=400, last=499)]
        hedges = reader.statistics()["hedges"]
        for _ in range(HEDGING_BUFFERS + 1):
            await reader.read(requests)
            assert_right(requests)
        assert reader.statistics()["hedges"] == hedges + HEDGING_BUFFERS + 1, "their buffers came back"

    run(main())
