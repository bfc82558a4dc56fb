"""The ranged engine, in virtual time: right bytes or one error, tries, waits, deadlines, places, order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.errors import BootseerError, NotFound, SourceChanged, StorageTimeout, Truncated, Unavailable
from bootseer.storage.engine.concurrency_limit import ConcurrencyLimit
from bootseer.storage.engine.ranges import RangeReader, RangeRequest
from tests.testing.faulty_store import Fault, FaultyStore, Kind
from tests.unit.bootseer.storage.slow_store import SlowStore, content
from tests.unit.bootseer.storage.virtual import elapsed_s, run

SIZE = 1000
PIECE = 100
SIZES = {"a": SIZE, "b": SIZE}


def make_store(*plan: Fault, **options: float | bool) -> FaultyStore:
    return FaultyStore(SlowStore(SIZES, **options), plan)  # type: ignore[arg-type]


def make_reader(store: FaultyStore, width: int = 8, **options: object) -> RangeReader:
    pace = ConcurrencyLimit(start=width, most=width)
    settings_ = {"pace": pace, "piece_bytes": PIECE, "max_gap_bytes": 10, "jitter": lambda: 1.0, **options}
    return RangeReader(store, **settings_)  # type: ignore[arg-type]


def request(path: str = "a", offset: int = 0, length: int = SIZE, etag: str = "") -> RangeRequest:
    return RangeRequest(path, offset, memoryview(bytearray(length)), etag)


def assert_right(requests: Sequence[RangeRequest]) -> None:
    for each in requests:
        assert bytes(each.target) == content(each.path, SIZE)[each.offset : each.offset + len(each.target)]


async def assert_quiet(reader: RangeReader, requests: Sequence[RangeRequest]) -> None:
    """Nobody writes any more, and the reader is as good as new."""
    before = [bytes(each.target) for each in requests]
    for each in requests:
        each.target[:] = bytes(len(each.target))
    await asyncio.sleep(1000.0)
    assert not any(any(each.target) for each in requests), before
    assert reader.statistics()["in_flight"] == 0
    assert len(asyncio.all_tasks()) == 1


# ---- right bytes ---------------------------------------------------------------------------------------------

RANGES = st.lists(
    st.tuples(st.sampled_from(["a", "b"]), st.integers(0, SIZE), st.integers(0, 350)).map(
        lambda each: (each[0], each[1], min(each[2], SIZE - each[1]))
    ),
    min_size=1,
    max_size=12,
)
TRANSIENT = st.lists(
    st.builds(
        Fault,
        kind=st.sampled_from([Kind.ERROR, Kind.DELAY, Kind.STALL, Kind.LOST]),
        path=st.sampled_from(["a", "b", "*"]),
        first=st.integers(0, SIZE),
        last=st.one_of(st.none(), st.integers(0, SIZE)),
        calls=st.frozensets(st.integers(0, 10), max_size=3),
        keep_bytes=st.integers(0, PIECE),
        delay_s=st.floats(0.0, 60.0),
    ),
    max_size=4,
)


@settings(max_examples=150, deadline=None)
@given(ranges=RANGES, plan=TRANSIENT, width=st.integers(1, 8), jitter=st.floats(0.0, 1.0), hedges=st.booleans())
def test_bytes_are_right_or_there_is_an_error(
    ranges: list[tuple[str, int, int]], plan: list[Fault], width: int, jitter: float, hedges: bool
) -> None:
    async def main() -> None:
        store = make_store(*plan)
        reader = make_reader(store, width, jitter=lambda: jitter, hedges=hedges)
        requests = [request(path, offset, length) for path, offset, length in ranges]
        came: list[list[int]] = [[] for _ in ranges]

        def on_piece(index: int, offset: int, length: int) -> None:
            came[index] += range(offset, offset + length)
            begin = requests[index].offset + offset
            data = content(requests[index].path, SIZE)[begin : begin + length]
            assert requests[index].target[offset : offset + length] == data

        try:
            await reader.read(requests, on_piece=on_piece)
        except Unavailable as error:
            assert "given up after" in str(error)
            assert len(plan) > 1, "one fault of three calls is less than the tries"
        else:
            assert_right(requests)
            assert [sorted(each) for each in came] == [list(range(length)) for _, _, length in ranges]
        assert elapsed_s() < 2000.0
        counts = reader.statistics()
        assert counts["requests"] == store.count("read_into")
        assert counts["hedge_wins"] <= counts["hedges"]
        await assert_quiet(reader, requests)

    run(main())


def test_nothing_asked_is_nothing_done() -> None:
    store = make_store()
    run(make_reader(store).read([]))
    run(make_reader(store).read([request(length=0)]))
    assert store.calls == []


def test_small_neighbours_come_by_one_read() -> None:
    store = make_store()
    reader = make_reader(store)
    requests = [request(offset=offset, length=10) for offset in (0, 15, 30, 60)]
    run(reader.read(requests))
    assert_right(requests)
    assert [(call.offset, call.length) for call in store.calls] == [(0, 40), (60, 10)]
    counts = reader.statistics()
    assert (counts["requests"], counts["coalesced"]) == (2, 3)
    assert (counts["read_bytes"], counts["wasted_bytes"]) == (50, 10)


def test_files_take_turns() -> None:
    store = make_store()
    run(make_reader(store, width=2).read([request("a"), request("b")]))
    assert {call.path for call in store.calls[:2]} == {"a", "b"}


def test_width_is_kept() -> None:
    store = make_store()
    run(make_reader(store, width=3).read([request()]))
    assert store.max_under_way == 3


@pytest.mark.parametrize(
    "target", [memoryview(b"abc"), memoryview(bytearray(8)).cast("I"), memoryview(bytearray(8))[::2]]
)
def test_a_target_must_be_plain_writable_bytes(target: memoryview) -> None:
    store = make_store()
    with pytest.raises(ValueError, match="target for 'a'"):
        run(make_reader(store).read([RangeRequest("a", 0, target)]))
    assert store.calls == []


# ---- tries ---------------------------------------------------------------------------------------------------


def test_goes_on_from_the_last_byte_another_way() -> None:
    store = make_store(Fault(Kind.ERROR, calls={0}, keep_bytes=30), Fault(Kind.ERROR, calls={0}, keep_bytes=20))
    reader = make_reader(store)
    requests = [request(length=PIECE)]
    run(reader.read(requests))
    assert_right(requests)
    assert [call[2:] for call in store.calls] == [(0, 100, 0), (30, 70, 1), (50, 50, 2)]
    assert reader.statistics()["retries"] == 2


def test_waits_grow_and_a_try_that_brings_something_starts_again() -> None:
    async def main() -> float:
        fail = Fault(Kind.ERROR, calls=range(3))
        some = Fault(Kind.ERROR, calls={0}, keep_bytes=50)
        store = make_store(fail, some, latency_s=0.0, rate=1e12)
        await make_reader(store).read([request(length=PIECE)])
        return elapsed_s()

    assert run(main()) == pytest.approx(0.1 + 0.2 + 0.4 + 0.1, abs=0.001)


def test_gives_up_after_so_many_tries() -> None:
    async def main() -> None:
        store = make_store(Fault(Kind.ERROR, first=500, last=599))
        requests = [request(), request("b")]
        reader = make_reader(store)
        with pytest.raises(Unavailable, match=r"at 500 fails \(by plan\) \(given up after 4 tries\)") as caught:
            await reader.read(requests)
        assert isinstance(caught.value.__cause__, Unavailable)
        assert sum(call.offset == 500 and call.path == "a" for call in store.calls) == 4
        await assert_quiet(reader, requests)

    run(main())


def test_a_file_that_comes_in_crumbs_is_not_tried_for_ever() -> None:
    store = make_store(Fault(Kind.ERROR, keep_bytes=1))
    with pytest.raises(Unavailable, match="given up after 32 tries"):
        run(make_reader(store).read([request(length=PIECE)]))


def test_waits_as_long_as_the_store_asks() -> None:
    async def main() -> float:
        def busy(message: str) -> Unavailable:
            return Unavailable(message, retry_after_s=7.0)

        store = make_store(Fault(Kind.ERROR, calls={0}, error=busy), latency_s=0.0, rate=1e12)
        await make_reader(store).read([request(length=PIECE)])
        return elapsed_s()

    assert run(main()) == pytest.approx(7.1, abs=0.001)


@pytest.mark.parametrize("kind", [NotFound, Truncated, SourceChanged])
def test_what_another_try_cannot_recover_is_not_tried_again(kind: type[BootseerError]) -> None:
    store = make_store(Fault(Kind.ERROR, first=0, last=99, error=kind))
    with pytest.raises(kind, match="by plan"):
        run(make_reader(store).read([request()]))
    assert sum(call.offset == 0 for call in store.calls) == 1


def test_changed_file_is_an_error() -> None:
    store = make_store(Fault(Kind.CHANGED, calls={3}))
    with pytest.raises(SourceChanged):
        run(make_reader(store).read([request(etag="a")]))


def test_first_error_ends_all_and_nobody_writes_any_more() -> None:
    async def main() -> None:
        store = make_store(Fault(Kind.ERROR, first=300, last=399, error=NotFound), rate=10.0)
        requests = [request(), request("b")]
        reader = make_reader(store)
        with pytest.raises(NotFound):
            await reader.read(requests)
        assert elapsed_s() == 0.0, "the others were not waited for"
        await assert_quiet(reader, requests)

    run(main())


def test_foreign_error_is_passed_on_as_it_is() -> None:
    async def main() -> None:
        store = make_store()
        store.inner.files["a"] = None  # type: ignore[attr-defined]
        with pytest.raises(TypeError):
            await make_reader(store).read([request()])

    run(main())


def test_error_of_the_callback_ends_the_read() -> None:
    async def main() -> None:
        def on_piece(index: int, offset: int, length: int) -> None:
            raise RuntimeError("mine")

        requests = [request()]
        reader = make_reader(make_store())
        with pytest.raises(RuntimeError, match="mine"):
            await reader.read(requests, on_piece=on_piece)
        await assert_quiet(reader, requests)

    run(main())


def test_way_to_the_bytes_can_be_asked_for() -> None:
    store = make_store(Fault(Kind.ERROR, calls={0}))
    run(make_reader(store).read([request(length=PIECE)], attempt=3))
    assert [call.attempt for call in store.calls] == [3, 4]


# ---- time ----------------------------------------------------------------------------------------------------


def test_every_call_has_a_deadline() -> None:
    async def main() -> None:
        store = make_store(Fault(Kind.STALL, first=0, last=99), has_replicas=False)
        reader = make_reader(store)
        requests = [request()]
        with pytest.raises(
            StorageTimeout, match=r"slow://: bytes 0 to 100 of 'a' did not arrive within .* 4 tries"
        ):
            await reader.read(requests)
        assert reader.statistics()["timeouts"] == 4
        assert elapsed_s() < 30.0 + 10.0 + 20.0 + 40.0 + 80.0, "the first one, then doubled from the usual one"
        await assert_quiet(reader, requests)

    run(main())


def test_slow_store_gets_the_time_it_needs() -> None:
    async def main() -> None:
        store = make_store(rate=PIECE / 100.0, has_replicas=False)  # a piece takes 100 s
        requests = [request(length=PIECE)]
        reader = make_reader(store)
        await reader.read(requests)
        assert_right(requests)
        assert reader.statistics()["timeouts"] == 2, "after 30 s and after 60 s, not after 120 s"

    run(main())


def test_deadline_follows_what_reads_take() -> None:
    async def main() -> float:
        store = make_store(has_replicas=False)
        reader = make_reader(store)
        await reader.read([request()])
        store.plan = [Fault(Kind.STALL, calls={0})]
        begin_s = elapsed_s()
        requests = [request("b")]
        await reader.read(requests)
        assert_right(requests)
        return elapsed_s() - begin_s

    assert 5.0 < run(main()) < 5.3


def test_deadline_of_a_read_under_way_follows_as_well() -> None:
    async def main() -> float:
        store = make_store(Fault(Kind.STALL, first=0, last=0, calls={0}), has_replicas=False)
        requests = [request(), request("b")]  # nothing is known yet when the first piece is begun
        await make_reader(store, width=2).read(requests)
        assert_right(requests)
        return elapsed_s()

    assert 5.0 < run(main()) < 5.3


def test_reads_that_hang_lend_their_places() -> None:
    async def main() -> float:
        store = make_store(has_replicas=False)
        reader = make_reader(store, width=2)
        await reader.read([request()])
        store.plan = [Fault(Kind.STALL, calls={0, 1})]
        begin_s = elapsed_s()
        done_s = []
        await reader.read([request("b")], on_piece=lambda *_: done_s.append(elapsed_s() - begin_s))
        assert len([each for each in done_s if each < 2.0]) == 8, "all others came while two hung"
        return elapsed_s() - begin_s

    assert 5.0 < run(main()) < 5.5


def test_demand_goes_before_prefetch() -> None:
    async def main() -> None:
        store = make_store(rate=100.0)  # a piece takes 1 s
        reader = make_reader(store, width=2)
        done_s: dict[str, float] = {}

        async def read(path: str, is_demand: bool) -> None:
            await reader.read([request(path)], is_demand=is_demand)
            done_s[path] = elapsed_s()

        async with asyncio.TaskGroup() as group:
            group.create_task(read("a", False))
            await asyncio.sleep(0.5)
            group.create_task(read("b", True))
        assert done_s["b"] == pytest.approx(6.0, abs=0.2), "the pieces under way, then its own 10 by two"
        assert done_s["a"] == pytest.approx(10.0, abs=0.3)

    run(main())


def test_engine_costs_little() -> None:
    async def main() -> float:
        reader = make_reader(make_store(latency_s=0.0, rate=1e12), width=64)
        target = memoryview(bytearray(SIZE))
        begin_s = time.process_time()
        for _ in range(100):
            await reader.read([RangeRequest("a", 0, target)])
        return (time.process_time() - begin_s) / (100 * SIZE / PIECE)

    assert min(run(main()) for _ in range(3)) < 0.3e-3, "CPU seconds a piece, with those of the test's store"


# ---- cancelling ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coalesced", [False, True])
def test_cancelling_at_any_step_leaves_nothing(coalesced: bool) -> None:
    async def main(steps: int) -> bool:
        store = make_store(
            Fault(Kind.ERROR, calls={0, 4}, keep_bytes=20), Fault(Kind.STALL, calls={3}), latency_s=0.2, rate=500.0
        )
        reader = make_reader(store, width=4)
        step = 20 if coalesced else 200
        requests = [request(path, offset, step - 5) for path in SIZES for offset in range(0, SIZE, step)]
        task = asyncio.get_running_loop().create_task(reader.read(requests))
        for _ in range(steps):
            await asyncio.sleep(0)
            if asyncio.get_running_loop()._ready.__len__() == 0:  # type: ignore[attr-defined]
                await asyncio.sleep(0.05)
        is_done = task.done()
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            pass
        await assert_quiet(reader, requests)
        store.plan = []
        await reader.read(requests, is_demand=False)
        assert_right(requests)
        return is_done

    steps = 0
    while not run(main(steps)):
        steps += 1
    assert steps > 20
