"""Waits are counted as a union: two who wait at once lose the time of one."""

from __future__ import annotations

import asyncio
import time

import pytest

from bootseer.blocks.stall_time import StallTime


def test_waits_at_once_count_once() -> None:
    async def main() -> None:
        waits = StallTime()
        with waits.one(), waits.one():
            await asyncio.sleep(0.05)
        assert waits.count == 2
        assert waits.blocked_s == pytest.approx(0.05, abs=0.04)
        before_s = waits.blocked_s
        await asyncio.sleep(0.02)
        assert waits.blocked_s == before_s
        with waits.one(time.monotonic() - 100.0):  # since before the last one ended: that counted already
            pass
        assert waits.blocked_s < before_s + 0.1
        assert waits.blocked_s >= before_s + 0.02
        assert sum(waits.histogram.counts) == 3
        assert waits.histogram.sum_s > 100.0, "each by itself"

    asyncio.run(main())


def test_a_wait_counts_from_when_the_reader_stood_still() -> None:
    async def main() -> None:
        waits = StallTime()
        with waits.one(time.monotonic() - 5.0):
            assert waits.blocked_s == pytest.approx(5.0, abs=0.5)
        assert waits.blocked_s == pytest.approx(5.0, abs=0.5)

    asyncio.run(main())


def test_quiet_comes_when_nobody_has_waited_for_a_while() -> None:
    async def main() -> None:
        waits = StallTime()
        await waits.quiet(10.0)  # nobody ever waited
        order: list[str] = []

        async def read(after_s: float) -> None:
            await asyncio.sleep(after_s)
            with waits.one():
                await asyncio.sleep(0.03)
            order.append("read")

        async def stream() -> None:
            await asyncio.sleep(0.01)
            await waits.quiet(0.1)
            order.append("quiet")

        await asyncio.gather(read(0.0), read(0.05), read(0.1), stream())
        assert order == ["read", "read", "read", "quiet"]

    asyncio.run(main())
