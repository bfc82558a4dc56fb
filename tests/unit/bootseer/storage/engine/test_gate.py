"""Places: never more than the width, demand first, none lost however waiting ends."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.storage.engine.gate import MAX_LENT, ReadSemaphore
from tests.unit.bootseer.storage.virtual import run


def test_prefetch_waits_while_demand_has_more_to_come() -> None:
    async def main() -> None:
        gate = ReadSemaphore(lambda: 4)
        gate.announce(2, is_demand=True)
        gate.announce(1, is_demand=False)
        await gate.enter(is_demand=True)
        prefetch = asyncio.ensure_future(gate.enter(is_demand=False))
        await asyncio.sleep(1.0)
        assert not prefetch.done(), "there is a place, but demand has not taken all it wants"
        await gate.enter(is_demand=True)
        gate.leave(is_lent=False)
        await prefetch
        assert gate.in_use == 2
        assert not gate.is_wanted

    run(main())


def test_prefetch_goes_on_when_demand_gives_up() -> None:
    async def main() -> None:
        gate = ReadSemaphore(lambda: 4)
        gate.announce(5, is_demand=True)
        gate.announce(1, is_demand=False)
        prefetch = asyncio.ensure_future(gate.enter(is_demand=False))
        await asyncio.sleep(1.0)
        gate.withdraw(5, is_demand=True)
        await prefetch

    run(main())


def test_place_given_to_one_who_is_cancelled_in_that_moment_is_not_lost() -> None:
    async def main() -> None:
        gate = ReadSemaphore(lambda: 1)
        gate.announce(2, is_demand=True)
        await gate.enter(is_demand=True)
        waiter = asyncio.ensure_future(gate.enter(is_demand=True))
        await asyncio.sleep(1.0)
        gate.leave(is_lent=False)
        waiter.cancel()
        await asyncio.wait({waiter})
        assert waiter.cancelled()
        assert gate.in_use == 0
        gate.withdraw(1, is_demand=True)
        assert not gate.is_wanted

    run(main())


def test_lent_places_are_bounded_and_come_back() -> None:
    async def main() -> None:
        gate = ReadSemaphore(lambda: 2)
        gate.announce(100, is_demand=True)
        for _ in range(MAX_LENT):
            await gate.enter(is_demand=True)
            assert gate.try_lend()
        await gate.enter(is_demand=True)
        assert not gate.try_lend()
        for _ in range(MAX_LENT):
            gate.leave(is_lent=True)
        assert (gate.in_use, gate.lent) == (1, 0)

    run(main())


@settings(max_examples=60, deadline=None)
@given(
    jobs=st.lists(
        st.tuples(
            st.booleans(),  # demand
            st.integers(1, 6),  # places
            st.floats(0.0, 3.0),  # start
            st.floats(0.1, 2.0),  # each takes
            st.one_of(st.none(), st.floats(0.0, 5.0)),  # cancelled at
        ),
        max_size=8,
    ),
    width=st.integers(1, 4),
)
def test_all_get_in_and_none_is_lost(jobs: list[tuple[bool, int, float, float, float | None]], width: int) -> None:
    async def main() -> None:
        gate = ReadSemaphore(lambda: width)

        async def hold(seconds: float) -> None:
            try:
                await asyncio.sleep(seconds)
            finally:
                gate.leave(is_lent=False)

        async def work(is_demand: bool, places: int, start_s: float, each_s: float, end_s: float | None) -> None:
            await asyncio.sleep(start_s)
            sandboxes = []
            gate.announce(places, is_demand=is_demand)
            try:
                async with asyncio.timeout(end_s):
                    while places:
                        await gate.enter(is_demand=is_demand)
                        assert gate.in_use <= width
                        places -= 1
                        sandboxes.append(asyncio.ensure_future(hold(each_s)))
                assert end_s is None or not places
            except TimeoutError:
                gate.withdraw(places, is_demand=is_demand)
            for sandbox in sandboxes:
                await sandbox

        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(work(*job))
        assert (gate.in_use, gate.lent, gate.is_wanted) == (0, 0, False)

    run(main())
