"""Few send to one DataNode at a time."""

from __future__ import annotations

import asyncio
import threading

import pytest

from bootseer.storage.hdfs.uploads import SendLimit


def test_so_many_at_once_and_the_next_when_one_has_sent() -> None:
    async def main() -> None:
        turns = SendLimit(2)
        sending: set[int] = set()
        goes_on = asyncio.Event()
        sent = {number: asyncio.Event() for number in range(4)}

        async def upload(number: int) -> None:
            async with turns.take("node") as on_sent:
                sending.add(number)
                await sent[number].wait()
                thread = threading.Thread(target=on_sent)
                thread.start()
                await asyncio.to_thread(thread.join)
                on_sent()  # more than once makes no further room
                await goes_on.wait()  # the answer

        async with asyncio.TaskGroup() as group:
            for number in range(4):
                group.create_task(upload(number))
            for number in range(4):
                while number not in sending:
                    await asyncio.sleep(0)
                assert sending <= set(range(number + 2))
                sent[number].set()
            goes_on.set()
        assert not turns._gates

    asyncio.run(main())


def test_other_nodes_and_none_do_not_wait() -> None:
    async def main() -> None:
        turns = SendLimit(1)
        async with turns.take("a"), turns.take("b"), turns.take(""), turns.take(""):
            pass
        assert not turns._gates

    asyncio.run(main())


def test_an_error_ends_the_turn() -> None:
    async def main() -> None:
        turns = SendLimit(1)
        for _ in range(3):
            with pytest.raises(OSError, match="gone"):
                async with turns.take("a"):
                    raise OSError("gone")
        waiting = asyncio.Event()

        async def wait() -> None:
            waiting.set()
            async with turns.take("a"):
                pass

        async with turns.take("a"):
            task = asyncio.create_task(wait())
            await waiting.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        async with turns.take("a"):
            pass
        assert not turns._gates

    asyncio.run(main())


def test_a_call_that_was_given_up_may_end_its_turn_late() -> None:
    async def main() -> object:
        async with SendLimit(1).take("a") as on_sent:
            return on_sent

    on_sent = asyncio.run(main())
    assert callable(on_sent)
    on_sent()  # the loop is closed
