"""Reads of chunks into memory by several threads, while others allocate that memory's pages ahead of them.

Untouched memory costs more than the reads: a page fault for each page, in the thread that touches it first. Faults
within a read keep the disk idle; if separate threads take them earlier, they overlap with the reads.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from bootseer.checkpoint.io.populate import make_pages
from bootseer.checkpoint.io.source import Request
from bootseer.linux.cgroups import usable_cores

READERS = 4  # with chunks of 4 MiB a disk's queue is full
MAKERS = 2  # at most: more of them would wait for each other in the kernel
MIN_BYTES = 16 << 20  # below it threads cost more than they save
TRY_EVERY = 16  # one piece in so many is of the other kind
HUGE_WORTH = 1.5  # reads into huge pages are faster as well: they may cost this factor more
NEW_SHARE = 0.5  # weight of the latest cost in the average


def read_all(chunks: Sequence[Request], read_one: Callable[[Request], object]) -> None:
    """Call `read_one` for all chunks, in about their order; raise the first error when all threads have ended.

    After an interruption of this thread, too, no thread writes to a target afterwards.
    """
    work = _Work(chunks, read_one)
    is_large = sum(len(chunk.target) for chunk in chunks) >= MIN_BYTES
    makers = min(MAKERS, usable_cores()) if is_large else 0
    readers = min(READERS, len(chunks)) - 1
    started: list[threading.Thread] = []
    try:
        started += _start(work.make, "checkpoint-pages", makers)
        if not started:
            work.makes_no_pages()
        started += _start(work.read, "checkpoint-read", readers)
        work.read()
    finally:
        work.stop()
        for thread in started:
            thread.join()
    if work.failures:
        raise work.failures[0]


class _Work:
    def __init__(self, chunks: Sequence[Request], read_one: Callable[[Request], object]) -> None:
        self._chunks = chunks
        self._read_one = read_one
        self._to_read = deque(range(len(chunks)))
        self._to_make = deque(range(len(chunks)))
        self._made = [threading.Event() for _ in chunks]
        self._choice = PageChoice()
        self.failures: list[BaseException] = []

    def make(self) -> None:
        """Allocate pages, in a thread."""
        try:
            while (number := _next(self._to_make)) is not None:
                target = self._chunks[number].target
                is_huge, began_s = self._choice.take(), time.monotonic()
                if not make_pages(target, is_huge=is_huge):
                    break  # not supported by the kernel: the reads take the faults
                self._choice.took(is_huge, len(target), time.monotonic() - began_s)
                self._made[number].set()
        finally:
            if self._to_make:
                self.makes_no_pages()
            elif number is not None:
                self._made[number].set()

    def read(self) -> None:
        """Read chunks, in a thread."""
        try:
            while not self.failures and (number := _next(self._to_read)) is not None:
                self._made[number].wait()
                if not self.failures:
                    self._read_one(self._chunks[number])
        except BaseException as error:  # raised again by `read_all`, possibly in another thread
            self.failures.append(error)
            self.stop()

    def makes_no_pages(self) -> None:
        self._to_make.clear()
        for made in self._made:
            made.set()

    def stop(self) -> None:
        """Start no further work."""
        self._to_read.clear()
        self.makes_no_pages()


def _start(work: Callable[[], None], name: str, count: int) -> list[threading.Thread]:
    """Start as many threads as the process limit allows: this thread does the rest."""
    threads = []
    try:
        for _ in range(count):
            thread = threading.Thread(target=work, name=name)
            thread.start()
            threads.append(thread)
    except RuntimeError:
        pass
    return threads


def _next(numbers: deque[int]) -> int | None:
    try:
        return numbers.popleft()
    except IndexError:
        return None


class PageChoice:
    """The choice for one load; threads share it and may lose each other's last measurement."""

    def __init__(self) -> None:
        self._costs_s: dict[bool, float] = {}  # per byte, by whether pages are huge
        self._pieces = 0

    def take(self) -> bool:
        """Return whether the next piece uses huge pages."""
        number, self._pieces = self._pieces, self._pieces + 1
        if number < 2:
            return number == 0
        huge, small = self._costs_s.get(True, 0.0), self._costs_s.get(False, 0.0)
        is_huge = not small or huge <= HUGE_WORTH * small
        return is_huge != (number % TRY_EVERY == 0)

    def took(self, is_huge: bool, length: int, took_s: float) -> None:
        """Record how long a piece of `length` bytes took."""
        cost_s = took_s / max(length, 1)
        before_s = self._costs_s.get(is_huge, cost_s)
        self._costs_s[is_huge] = before_s + NEW_SHARE * (cost_s - before_s)
