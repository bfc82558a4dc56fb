"""Many spans of a source, read one after another through little memory: the next arrive while one is used.

In: spans in the order in which to read them. Out: each with its bytes, as they arrive. The memory consists of a
few slots that are reused, because the first touch of new memory costs more than a copy out of a slot.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from bootseer.checkpoint.io.memory import allocate, check_free, place
from bootseer.checkpoint.io.source import Request, Source

SLOT_BYTES = 64 << 20
SLOTS = 3  # two being filled, one being used


class Span(NamedTuple):
    """Bytes of one file."""

    path: str
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


class Fetched(NamedTuple):
    """A span that has arrived. `view` is valid until the next one is requested."""

    number: int  # of the span
    view: memoryview


@contextmanager
def fetch(source: Source, spans: Sequence[Span], *, try_map: bool = True) -> Iterator[Iterator[Fetched]]:
    """Yield all spans, in about their order. The iteration raises the first error of the source.

    `try_map`: use views of the source's memory where it has them.
    """
    fetcher = _Fetcher(source, spans, try_map)
    try:
        yield fetcher.run()
    finally:
        fetcher.stop()


class _Batch(NamedTuple):
    indexes: list[int]
    places: list[int]  # bytes, in the slot
    size: int


class _Fetcher:
    def __init__(self, source: Source, spans: Sequence[Span], try_map: bool) -> None:
        self._source = source
        self._try_map = try_map
        self._spans = spans
        self._batches = iter(list(_batches(spans)))
        self._lock = threading.Lock()
        self._is_stopped = threading.Event()
        self._slots: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[_Filled | BaseException | None] = queue.SimpleQueue()
        size = min(SLOT_BYTES, max((batch.size for batch in _batches(spans)), default=0))
        check_free(SLOTS * size, source.url)
        for _ in range(SLOTS):
            self._slots.put(allocate(size))
        self._threads = [threading.Thread(target=self._fill, name="checkpoint-fetch") for _ in range(SLOTS - 1)]

    def run(self) -> Iterator[Fetched]:
        for thread in self._threads:
            thread.start()
        working = len(self._threads)
        while working:
            filled = self._ready.get()
            if filled is None:
                working -= 1
                continue
            if isinstance(filled, BaseException):
                raise filled
            for index, at in zip(filled.batch.indexes, filled.batch.places, strict=True):
                yield Fetched(index, filled.memory[at : at + self._spans[index].size])
            if filled.slot is not None:
                self._slots.put(filled.slot)

    def stop(self) -> None:
        self._is_stopped.set()
        for _ in self._threads:
            self._slots.put(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _fill(self) -> None:
        try:
            while not self._is_stopped.is_set():
                with self._lock:
                    batch = next(self._batches, None)
                if batch is None:
                    break
                filled = self._fill_one(batch)
                if filled is None:
                    break
                self._ready.put(filled)
        except BaseException as error:  # raised again by `run`
            self._ready.put(error)
        self._ready.put(None)

    def _fill_one(self, batch: _Batch) -> _Filled | None:
        spans = [self._spans[index] for index in batch.indexes]
        if self._try_map and len(spans) == 1:
            mapped = self._source.map(*spans[0][:2], spans[0].size)
            if mapped is not None:
                return _Filled(_Batch(batch.indexes, [0], batch.size), mapped, None)
        slot: memoryview | None = None
        if batch.size > SLOT_BYTES:
            check_free(batch.size, f"{spans[0].path} of {self._source.url}")
            memory = allocate(batch.size)
        else:
            memory = slot = self._slots.get()  # type: ignore[assignment]
            if slot is None:
                return None
        self._source.read(
            [
                Request(span.path, span.start, memory[at : at + span.size])
                for span, at in zip(spans, batch.places, strict=True)
            ]
        )
        return _Filled(batch, memory, slot)


class _Filled(NamedTuple):
    batch: _Batch
    memory: memoryview
    slot: memoryview | None  # to return after use


def _batches(spans: Sequence[Span]) -> Iterator[_Batch]:
    """Group spans that fit into a slot together; a longer one is alone."""
    indexes: list[int] = []
    places: list[int] = []
    end = 0
    for index, span in enumerate(spans):
        at = place(end, span.start)
        if indexes and at + span.size > SLOT_BYTES:
            yield _Batch(indexes, places, end)
            indexes, places, at = [], [], place(0, span.start)
        indexes.append(index)
        places.append(at)
        end = at + span.size
    if indexes:
        yield _Batch(indexes, places, end)
