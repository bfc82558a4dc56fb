"""A store that fails as a test plans: errors, delays, hangs, short reads, wrong bytes, changed files.

It wraps any `Store`. A `Fault` matches calls by operation, path, bytes, attempt and number; the first match takes
effect. `calls` lists all calls. A failed or cancelled read leaves garbage after its correct bytes. Two concurrent
reads with overlapping memory fail the test.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import AsyncIterator, Callable, Container, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from enum import Enum
from fnmatch import fnmatchcase
from typing import NamedTuple

from bootseer.errors import BootseerError, SourceChanged, StorageError, Unavailable
from bootseer.storage.protocol import Entry, Features, Stat, Store, StoreWriter

RUBBISH = b"\xa5"


class Kind(Enum):
    """The fault of a call; a read gets `keep_bytes` correct bytes first."""

    ERROR = "error"  # instead of the call
    LOST = "lost"  # the call is done, its answer is an error
    DELAY = "delay"  # it continues after `delay_s`
    STALL = "stall"  # it ends only if it is cancelled
    WRONG = "wrong"  # the byte after the kept ones is wrong, without an error
    CHANGED = "changed"  # a new version: a new etag by stat, SourceChanged for a read that names one, other bytes


class Fault(NamedTuple):
    """One planned fault."""

    kind: Kind
    operation: str = "read_into"  # a method of Store, or "write" (and "close": the end of the block) of its writer
    path: str = "*"  # a shell pattern
    first: int = 0  # matches a read that includes one of these bytes
    last: int | None = None
    calls: Container[int] | None = None  # numbers of the otherwise matching calls, from 0; None: all
    attempts: Container[int] | None = None  # attempts of read_into; None: all
    keep_bytes: int = 0
    delay_s: float = 0.0
    error: Callable[[str], BootseerError] = Unavailable


class Call(NamedTuple):
    """One received call."""

    operation: str
    path: str
    offset: int = 0
    length: int = 0
    attempt: int = 0


class FaultyStore:
    """`inner` with the faults of `plan`, which may be changed at any time.

    A cancelled read continues for `cancel_s`, and writes, as in a thread that cannot be stopped at once.
    """

    def __init__(self, inner: Store, plan: Sequence[Fault] = (), *, cancel_s: float = 0.0) -> None:
        self.inner = inner
        self.cancel_s = cancel_s
        self.url = inner.url
        self.features: Features = inner.features
        self.plan = list(plan)
        self.calls: list[Call] = []
        self.under_way = 0  # current reads
        self.max_under_way = 0
        self._memory: set[tuple[int, int]] = set()  # addresses that reads write to
        self._hits: dict[int, tuple[Fault, int]] = {}  # by identity: the same fault may be planned twice

    def count(self, operation: str, path: str = "*") -> int:
        """Return the number of calls."""
        return sum(call.operation == operation and fnmatchcase(call.path, path) for call in self.calls)

    # ---- the store -----------------------------------------------------------------------------------------

    async def stat(self, path: str) -> Stat:
        fault = await self._begin_fault(Call("stat", path))
        found = await self.inner.stat(path)
        if fault is not None and fault.kind is Kind.CHANGED:
            return Stat(found.size, found.etag + "-changed")
        self._lose(fault, "stat", path)
        return found

    async def read_into(
        self, path: str, offset: int, target: memoryview, *, etag: str = "", attempt: int = 0
    ) -> None:
        call = Call("read_into", path, offset, len(target), attempt)
        memory = _addresses(target)
        assert not any(low < memory[1] and memory[0] < high for low, high in self._memory), (
            "two reads share memory"
        )
        self._memory.add(memory)
        self.under_way += 1
        self.max_under_way = max(self.max_under_way, self.under_way)
        try:
            await self._read_into(call, target, etag)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and self.cancel_s:
                await asyncio.sleep(self.cancel_s)
            kept = error.read_bytes if isinstance(error, StorageError) else 0
            target[kept:] = RUBBISH * (len(target) - kept)
            raise
        finally:
            self.under_way -= 1
            self._memory.discard(memory)

    async def _read_into(self, call: Call, target: memoryview, etag: str) -> None:
        fault = self._find(call)
        kept = 0
        if fault is not None:
            if fault.kind is Kind.CHANGED and etag:
                raise SourceChanged(f"{call.path} is another version (by plan)")
            kept = min(fault.keep_bytes, call.length)
            if kept:
                await self._pass(call, 0, target[:kept], etag)
            try:
                await self._apply(fault, call)
            except StorageError as error:
                error.read_bytes = kept
                raise
        if kept < call.length or not call.length:
            await self._pass(call, kept, target[kept:], etag)
        if fault is not None and fault.kind in (Kind.WRONG, Kind.CHANGED) and kept < call.length:
            target[kept] ^= 0xFF
        self._lose(fault, call.operation, call.path)

    async def _pass(self, call: Call, begin: int, target: memoryview, etag: str) -> None:
        await self.inner.read_into(call.path, call.offset + begin, target, etag=etag, attempt=call.attempt)

    async def list(self, directory: str) -> list[Entry]:
        fault = await self._begin_fault(Call("list", directory))
        found = await self.inner.list(directory)
        self._lose(fault, "list", directory)
        return found

    async def publish(self, path: str, data: bytes, *, if_absent: bool = False) -> Stat:
        fault = await self._begin_fault(Call("publish", path, length=len(data)))
        done = await self.inner.publish(path, data, if_absent=if_absent)
        self._lose(fault, "publish", path)
        return done

    def create(
        self, path: str, *, size: int | None = None, placement: int | None = None
    ) -> AbstractAsyncContextManager[StoreWriter]:
        return self._create(path, size, placement)

    @asynccontextmanager
    async def _create(self, path: str, size: int | None, placement: int | None) -> AsyncIterator[StoreWriter]:
        fault = await self._begin_fault(Call("create", path))
        async with self.inner.create(path, size=size, placement=placement) as writer:
            self._lose(fault, "create", path)
            yield _FaultyWriter(self, path, writer)
            fault = await self._begin_fault(Call("close", path))
        self._lose(fault, "close", path)

    async def concat(self, path: str, parts: Sequence[str]) -> None:
        fault = await self._begin_fault(Call("concat", path))
        await self.inner.concat(path, parts)
        self._lose(fault, "concat", path)

    async def delete(self, path: str) -> None:
        fault = await self._begin_fault(Call("delete", path))
        await self.inner.delete(path)
        self._lose(fault, "delete", path)

    async def aclose(self) -> None:
        await self.inner.aclose()

    def statistics(self) -> dict[str, int]:
        return self.inner.statistics()

    # ---- the plan ------------------------------------------------------------------------------------------

    def _find(self, call: Call) -> Fault | None:
        self.calls.append(call)
        for fault in self.plan:
            if not _fits(fault, call):
                continue
            _, number = self._hits.get(id(fault), (fault, 0))
            self._hits[id(fault)] = (fault, number + 1)
            if fault.calls is None or number in fault.calls:
                return fault
        return None

    async def _begin_fault(self, call: Call) -> Fault | None:
        """Return the fault that matches the call, after its effects before the call."""
        fault = self._find(call)
        if fault is not None:
            await self._apply(fault, call)
        return fault

    async def _apply(self, fault: Fault, call: Call) -> None:
        if fault.kind is Kind.ERROR:
            raise fault.error(f"{call.operation} {call.path} at {call.offset} fails (by plan)")
        if fault.kind is Kind.DELAY:
            await asyncio.sleep(fault.delay_s)
        elif fault.kind is Kind.STALL:
            await asyncio.get_running_loop().create_future()

    def _lose(self, fault: Fault | None, operation: str, path: str) -> None:
        if fault is not None and fault.kind is Kind.LOST:
            raise fault.error(f"the answer to {operation} {path} is lost (by plan)")


class _FaultyWriter:
    def __init__(self, store: FaultyStore, path: str, inner: StoreWriter) -> None:
        self._store, self._path, self._inner = store, path, inner
        self._offset = 0

    async def write(self, data: memoryview | bytes) -> None:
        call = Call("write", self._path, self._offset, len(data))
        self._offset += len(data)
        fault = self._store._find(call)
        if fault is not None:
            kept = min(fault.keep_bytes, len(data))
            if kept:
                await self._inner.write(data[:kept])
            await self._store._apply(fault, call)
            data = data[kept:]
        await self._inner.write(data)
        self._store._lose(fault, "write", self._path)


def _addresses(target: memoryview) -> tuple[int, int]:
    if not target:
        return 0, 0
    begin = ctypes.addressof(ctypes.c_char.from_buffer(target))
    return begin, begin + len(target)


def _fits(fault: Fault, call: Call) -> bool:
    if fault.operation != call.operation or not fnmatchcase(call.path, fault.path):
        return False
    if fault.attempts is not None and call.attempt not in fault.attempts:
        return False
    if call.operation not in ("read_into", "write"):
        return True
    return call.offset + call.length > fault.first and (fault.last is None or call.offset <= fault.last)
