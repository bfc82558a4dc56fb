"""Memory that is taken back from threads."""

from __future__ import annotations

import asyncio
import threading

import pytest

from bootseer.storage.engine.revocable_buffer import BufferRevokedError, RevocableBuffer, copy_bytes
from tests.support import wait_until


def test_bytes_land_in_order() -> None:
    memory = memoryview(bytearray(b"\xee" * 400_000))
    landing = RevocableBuffer(memory[:300_000])
    landing.land(b"a" * 100_000)
    landing.land(memoryview(b"b" * 50_000))
    landing.land(memoryview(bytearray(b"c" * 100_000)))
    assert landing.have == 250_000

    def read_into(view: memoryview) -> int:
        view[:10] = b"d" * 10
        return 10

    assert landing.receive(read_into, 20) == 10
    assert landing.have == 250_010
    expected = b"a" * 100_000 + b"b" * 50_000 + b"c" * 100_000 + b"d" * 10
    assert memory[:250_010] == expected
    with pytest.raises(ValueError, match="for memory of"):
        landing.land(bytes(50_000))
    assert memory[250_010:] == b"\xee" * 149_990


def test_after_close_nobody_writes() -> None:
    memory = memoryview(bytearray(10))
    landing = RevocableBuffer(memory)
    landing.land(b"abc")
    asyncio.run(landing.close())
    with pytest.raises(BufferRevokedError):
        landing.land(b"def")
    with pytest.raises(BufferRevokedError):
        landing.receive(lambda view: view.__setitem__(0, 1) or 1, 5)  # type: ignore[func-returns-value]
    assert memory == b"abc" + bytes(7)
    assert landing.have == 3


@pytest.mark.parametrize("cancels", [0, 3])
def test_close_waits_for_whoever_writes(cancels: int) -> None:
    landing = RevocableBuffer(memoryview(bytearray(10)))
    go, is_in = threading.Event(), threading.Event()

    def read_into(view: memoryview) -> int:
        is_in.set()
        go.wait(10)
        view[:1] = b"x"
        return 1

    thread = threading.Thread(target=landing.receive, args=(read_into, 5))
    thread.start()

    async def main() -> None:
        await asyncio.to_thread(is_in.wait, 10)
        task = asyncio.create_task(landing.close())
        for _ in range(cancels):
            await asyncio.sleep(0.005)
            task.cancel()
        await asyncio.sleep(0.02)
        assert not task.done()
        go.set()
        if cancels:
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            await task
        assert landing.have == 1

    asyncio.run(main())
    thread.join(10)


def test_progress_is_noted() -> None:
    landing = RevocableBuffer(memoryview(bytearray(10)))
    before = landing.moved()
    wait_until(lambda: landing.land(b"") or landing.moved() > before, 5.0)


@pytest.mark.parametrize("size", [0, 1, 1000, 65_536, 65_537, 1_000_000])
def test_copies(size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    for source in (data[:size], memoryview(data)[:size], memoryview(bytearray(data))[:size]):
        target = memoryview(bytearray(b"\xee" * (size + 2)))
        copy_bytes(target[1 : size + 1], source)
        assert target == b"\xee" + data[:size] + b"\xee"
