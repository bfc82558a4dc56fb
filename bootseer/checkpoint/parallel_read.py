"""Reads chunks into memory by several threads, while others make that memory's pages ahead of them.

Memory that was never touched costs more than the reading: a page fault for each page, in whichever thread comes
first. Faults within a read keep the disk waiting; made ahead by threads of their own, they overlap with it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from bootseer.checkpoint.page_choice import PageChoice
from bootseer.checkpoint.populate import make_pages
from bootseer.checkpoint.source import Request
from bootseer.storage.cpu_limits import usable_cores

READERS = 4  # with chunks of 4 MiB a disk's queue is full
MAKERS = 2  # at most; more wait for each other in the kernel
LEAST_BYTES = 16 << 20  # below it threads cost more than they save


def read_all(chunks: Sequence[Request], read_one: Callable[[Request], object]) -> None:
    """Calls `read_one` for all chunks, in about their order; raises the first error when all threads have ended.

    Also when this thread is interrupted nobody writes to a target afterwards.
    """
    work = _Work(chunks, read_one)
    is_large = sum(len(chunk.target) for chunk in chunks) >= LEAST_BYTES
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
        """In a thread."""
        try:
            while (number := _next(self._to_make)) is not None:
                target = self._chunks[number].target
                is_huge, began_s = self._choice.take(), time.monotonic()
                if not make_pages(target, is_huge=is_huge):
                    break  # a kernel that does not do it: the reads themselves do
                self._choice.took(is_huge, len(target), time.monotonic() - began_s)
                self._made[number].set()
        finally:
            if self._to_make:
                self.makes_no_pages()
            elif number is not None:
                self._made[number].set()

    def read(self) -> None:
        """In a thread."""
        try:
            while not self.failures and (number := _next(self._to_read)) is not None:
                self._made[number].wait()
                if not self.failures:
                    self._read_one(self._chunks[number])
        except BaseException as error:  # raised again by `read_all`, whose thread may be another one
            self.failures.append(error)
            self.stop()

    def makes_no_pages(self) -> None:
        self._to_make.clear()
        for made in self._made:
            made.set()

    def stop(self) -> None:
        """Nothing more is begun."""
        self._to_read.clear()
        self.makes_no_pages()


def _start(work: Callable[[], None], name: str, count: int) -> list[threading.Thread]:
    """As many as the limit of processes allows: this thread does what is left."""
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
