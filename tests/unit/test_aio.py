"""bootseer.aio: calls in threads, bounded maps, retries, and the way in from plain code."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator

import pytest

from bootseer import aio
from bootseer.errors import NotFound, Unavailable
from bootseer.tuning import DEFAULTS
from tests.support import wait_threads_back, wait_until


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """Every test begins and ends without threads: their numbers are compared."""
    wait_threads_back()
    yield
    wait_threads_back()


class Block:
    """A call that ends when it is let go, and knows whether it has begun and ended."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.has_begun = threading.Event()
        self.has_ended = threading.Event()

    def __call__(self) -> str:
        self.has_begun.set()
        self.go.wait(20.0)
        self.has_ended.set()
        return "done"


async def until(condition) -> None:  # type: ignore[no-untyped-def]
    async with asyncio.timeout(10.0):
        while not condition():
            await asyncio.sleep(0.001)


# ---- run_io


def test_run_io_runs_in_a_thread_and_gives_what_came() -> None:
    async def main() -> None:
        name = await aio.run_io(lambda: threading.current_thread().name)
        assert name.startswith("bootseer-io-")
        assert await aio.run_io(pow, 2, 10) == 1024
        with pytest.raises(ZeroDivisionError):
            await aio.run_io(lambda: 1 // 0)
        with pytest.raises(RuntimeError):
            await aio.run_io(next, iter(()))  # StopIteration cannot leave a coroutine

    asyncio.run(main())


def test_run_io_uses_as_many_threads_as_calls_up_to_its_bound() -> None:
    blocks = [Block() for _ in range(DEFAULTS.storage.io_threads + 8)]

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for block in blocks:
                group.create_task(aio.run_io(block))
            await until(lambda: sum(block.has_begun.is_set() for block in blocks) == DEFAULTS.storage.io_threads)
            assert aio.statistics()["io_threads"] == DEFAULTS.storage.io_threads
            assert aio.statistics()["io_waiting"] == 8
            for block in blocks:
                block.go.set()
        assert aio.statistics()["io_waiting"] == 0
        threads = aio.statistics()["io_threads"]
        for _ in range(50):
            await aio.run_io(time.monotonic)
        assert aio.statistics()["io_threads"] <= threads, "idle threads are used again"

    asyncio.run(main())


@pytest.mark.parametrize("cancels", [1, 3])
def test_a_cancelled_run_io_waits_for_its_call(cancels: int) -> None:
    block = Block()

    async def main() -> None:
        task = asyncio.create_task(aio.run_io(block))
        await until(block.has_begun.is_set)
        for _ in range(cancels):
            task.cancel()
            await asyncio.sleep(0.01)
            assert not task.done()
        block.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert block.has_ended.is_set()

    asyncio.run(main())


def test_a_cancelled_run_io_that_has_not_begun_never_does() -> None:
    blocks = [Block() for _ in range(DEFAULTS.storage.io_threads)]
    ran = []

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for block in blocks:
                group.create_task(aio.run_io(block))
            await until(lambda: all(block.has_begun.is_set() for block in blocks))
            task = asyncio.create_task(aio.run_io(ran.append, 1))
            await until(lambda: aio.statistics()["io_waiting"] == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            for block in blocks:
                block.go.set()
        await aio.run_io(time.monotonic)
        assert ran == []

    asyncio.run(main())


def test_idle_threads_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio, "IDLE_S", 0.02)

    async def main() -> None:
        await asyncio.gather(*[aio.run_io(time.sleep, 0.01) for _ in range(5)])
        aio.close()  # those that were idle before the patch
        await until(lambda: aio.statistics()["io_threads"] == 0)
        assert await aio.run_io(pow, 2, 2) == 4

    asyncio.run(main())


# ---- run_abandonable


def test_run_apart_gives_up_what_makes_no_progress() -> None:
    block = Block()

    async def main() -> None:
        before = aio.statistics()
        started_s = time.monotonic()
        with pytest.raises(TimeoutError):
            await aio.run_abandonable(block, timeout_s=0.05)
        assert 0.04 < time.monotonic() - started_s < 5.0
        after = aio.statistics()
        assert after["abandoned"] == 1
        assert after["abandoned_ever"] == before["abandoned_ever"] + 1
        assert after["apart_threads"] == 0, "it counts no longer"
        assert await aio.run_abandonable(pow, 2, 3, timeout_s=5.0) == 8, "others go on"
        block.go.set()
        await until(lambda: aio.statistics()["abandoned"] == 0)

    asyncio.run(main())


def test_run_apart_waits_as_long_as_there_is_progress() -> None:
    moved = [0.0]

    def work() -> str:
        for _ in range(20):
            time.sleep(0.02)
            moved[0] = time.monotonic()
        return "done"

    async def main() -> None:
        assert await aio.run_abandonable(work, timeout_s=0.2, moved_s=lambda: moved[0]) == "done"

    asyncio.run(main())


def test_a_cancelled_run_apart_is_out_at_once() -> None:
    block = Block()

    async def main() -> None:
        task = asyncio.create_task(aio.run_abandonable(block, timeout_s=20.0))
        await until(block.has_begun.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not block.has_ended.is_set()
        block.go.set()

    asyncio.run(main())


def test_too_many_hanging_calls_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio, "MAX_ABANDONED", 3)
    blocks = [Block() for _ in range(3)]

    async def main() -> None:
        for block in blocks:
            with pytest.raises(TimeoutError):
                await aio.run_abandonable(block, timeout_s=0.01)
        with pytest.raises(Unavailable, match="hang"):
            await aio.run_abandonable(time.monotonic, timeout_s=1.0)
        for block in blocks:
            block.go.set()
        await until(lambda: aio.statistics()["abandoned"] == 0)
        await aio.run_abandonable(time.monotonic, timeout_s=1.0)

    asyncio.run(main())


def test_a_call_given_up_before_it_began_never_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio, "_apart", aio._Threads("test", 1))
    block = Block()
    ran: list[int] = []

    async def main() -> None:
        task = asyncio.create_task(aio.run_abandonable(block, timeout_s=20.0))
        await until(block.has_begun.is_set)
        with pytest.raises(TimeoutError):
            await aio.run_abandonable(ran.append, 1, timeout_s=0.02)
        assert aio.statistics()["abandoned"] == 0, "nothing hangs"
        block.go.set()
        assert await task == "done"
        assert await aio.run_abandonable(pow, 2, 3, timeout_s=5.0) == 8
        assert ran == []

    asyncio.run(main())


# ---- map_bounded and retry


def test_map_bounded_keeps_order_and_width() -> None:
    now, most = 0, 0

    async def one(item: int) -> int:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.001 * (item % 3))
        now -= 1
        return item * item

    assert asyncio.run(aio.map_bounded(one, range(30), width=4)) == [item * item for item in range(30)]
    assert most == 4
    assert asyncio.run(aio.map_bounded(one, [], width=4)) == []


def test_map_bounded_raises_the_first_error_and_ends_the_others() -> None:
    ended: list[int] = []

    async def one(item: int) -> None:
        try:
            if item == 2:
                raise NotFound("two")
            await asyncio.sleep(30)
        finally:
            ended.append(item)

    with pytest.raises(NotFound, match="two"):
        asyncio.run(aio.map_bounded(one, range(30), width=4))
    assert sorted(ended) == [0, 1, 2, 3]


def test_a_timeout_outside_of_map_bounded_survives_its_failure() -> None:
    async def fail(_: int) -> None:
        await asyncio.sleep(0)
        raise NotFound("gone")

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                with pytest.raises(NotFound):
                    await aio.map_bounded(fail, [1, 2], width=2)
                await asyncio.sleep(30)
        task = asyncio.current_task()
        assert task is not None and not task.cancelling()

    asyncio.run(main())


def test_retry_until_it_works() -> None:
    attempts: list[int] = []
    retries: list[int] = []

    async def call(attempt: int) -> str:
        attempts.append(attempt)
        if attempt < 2:
            raise Unavailable("not yet")
        return "done"

    policy = aio.RetryPolicy(tries=4, base_s=0.001)
    assert asyncio.run(aio.retry(policy, call, on_retry=lambda: retries.append(1))) == "done"
    assert attempts == [0, 1, 2]
    assert len(retries) == 2


def test_retry_gives_up() -> None:
    attempts: list[int] = []

    async def call(attempt: int) -> None:
        attempts.append(attempt)
        raise Unavailable(f"attempt {attempt}")

    with pytest.raises(Unavailable, match="attempt 2"):
        asyncio.run(aio.retry(aio.RetryPolicy(tries=3, base_s=0.001), call))
    assert attempts == [0, 1, 2]

    async def missing(attempt: int) -> None:
        attempts.append(attempt)
        raise NotFound("no")

    attempts.clear()
    with pytest.raises(NotFound):
        asyncio.run(aio.retry(aio.RetryPolicy(), missing))
    assert attempts == [0]


def test_retry_waits_at_random_but_not_past_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(aio.asyncio, "sleep", sleep)

    async def call(attempt: int) -> None:
        raise Unavailable("busy", retry_after_s=7.0 if attempt == 3 else 0.0)

    policy = aio.RetryPolicy(tries=6, base_s=1.0, max_s=3.0, budget_s=100.0)
    with pytest.raises(Unavailable):
        asyncio.run(aio.retry(policy, call, jitter=lambda: 0.5))
    assert waits == [0.5, 1.0, 1.5, 7.0, 1.5]
    waits.clear()
    with pytest.raises(Unavailable):
        asyncio.run(aio.retry(policy._replace(budget_s=5.0), call, jitter=lambda: 0.5))
    assert waits == [0.5, 1.0, 1.5], "seven seconds would be over it"


# ---- run_sync


async def double(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


def test_run_sync_from_any_thread() -> None:
    assert aio.run_sync(double(4)) == 8
    found: list[int] = []
    threads = [threading.Thread(target=lambda n=n: found.append(aio.run_sync(double(n)))) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [2 * n for n in range(20)]
    assert sum(thread.name == "bootseer-loop" for thread in threading.enumerate()) == 1


def test_run_sync_raises_what_the_coroutine_raised() -> None:
    async def fail() -> None:
        raise NotFound("gone")

    with pytest.raises(NotFound, match="gone"):
        aio.run_sync(fail())


def test_run_sync_from_inside_another_loop() -> None:
    async def main() -> int:
        return aio.run_sync(double(3))

    assert asyncio.run(main()) == 6


def test_run_sync_on_its_own_loop_is_an_error() -> None:
    async def main() -> None:
        aio.run_sync(double(3))

    with pytest.raises(RuntimeError, match="await"):
        aio.run_sync(main())


def test_an_interrupt_cancels_the_coroutine() -> None:
    seen: list[str] = []

    async def main() -> None:
        # As the kernel does with ^C.
        main_thread = threading.main_thread().ident
        asyncio.get_running_loop().call_later(0.01, signal.pthread_kill, main_thread, signal.SIGINT)
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)  # whatever has to be put in order
            seen.append("in order")
            raise

    with pytest.raises(KeyboardInterrupt):
        aio.run_sync(main())
    assert seen == ["in order"]
    assert aio.run_sync(double(1)) == 2


def test_close_ends_what_runs_and_the_next_call_begins_again() -> None:
    is_running = threading.Event()
    found: list[BaseException] = []

    async def hang() -> None:
        is_running.set()
        await asyncio.sleep(30)

    def run() -> None:
        try:
            aio.run_sync(hang())
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert is_running.wait(10)
    aio.close()
    thread.join(10)
    assert "closed" in str(found[0])
    assert not [thread for thread in threading.enumerate() if thread.name == "bootseer-loop"]
    assert aio.run_sync(double(2)) == 4


def test_memory_given_to_a_failed_coroutine_is_let_go() -> None:
    memory = bytearray(1000)

    async def fail(view: memoryview) -> None:
        await aio.run_io(_fail, view)

    with pytest.raises(NotFound):
        aio.run_sync(fail(memoryview(memory)))
    wait_until(lambda: _can_clear(memory), 5.0)


def _fail(view: memoryview) -> None:
    raise NotFound("no")


def _can_clear(memory: bytearray) -> bool:
    try:
        memory.clear()
    except BufferError:
        return False
    return True


def test_after_a_fork_both_sides_go_on() -> None:
    script = """
        import asyncio, os, sys, threading, time, warnings
        warnings.simplefilter("ignore")
        from bootseer import aio

        async def work():
            return await aio.run_io(pow, 2, 5) + await aio.run_abandonable(pow, 2, 4, timeout_s=5.0)

        assert aio.run_sync(work()) == 48
        hold = threading.Event()
        async def hang():
            await aio.run_abandonable(hold.wait, 30, timeout_s=30.0)
        background = threading.Thread(target=lambda: aio.run_sync(hang()), daemon=True)
        background.start()
        pid = os.fork()
        if pid == 0:
            assert aio.statistics()["apart_threads"] == 0
            for _ in range(3):
                assert aio.run_sync(work()) == 48
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        for _ in range(100):
            assert aio.run_sync(work()) == 48
        hold.set()
        background.join(10)
        print("both")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "both\n", "")


def test_a_hanging_call_does_not_keep_the_process_from_ending() -> None:
    script = """
        import asyncio, threading
        from bootseer import aio
        async def main():
            try:
                await aio.run_abandonable(threading.Event().wait, timeout_s=0.05)
            except TimeoutError:
                print("given up")
        aio.run_sync(main())
    """
    started_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "given up\n", "")
    assert time.monotonic() - started_s < 10
