"""A Source over a store: striped versions, and plain files as they are, read in many ranges at once.

In: the stored files of each file (`StoredFile`), and a function that opens the store. Units of striped files with
known checksums are verified as they arrive, before any of their bytes is handed out. A plain file is pinned to the
version that it had when it was opened.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from bootseer import aio
from bootseer.checkpoint.format.layout import Layout
from bootseer.checkpoint.format.part_sums import PartSums
from bootseer.checkpoint.io.memory import allocate
from bootseer.checkpoint.io.source import Request, Source, SourceFile
from bootseer.crc import crc32c
from bootseer.errors import ConfigError, DigestMismatch, NotFound, Truncated
from bootseer.jitter import randrange
from bootseer.storage.engine.ranges import RangeReader, RangeRequest
from bootseer.storage.protocol import Store

UNITS = "units"  # every unit that is read whole, also in several reads
SAMPLED = "sampled"  # one in SAMPLE_EVERY of these: for stores with checksums of their own
FULL = "full"  # every byte: a unit that is requested in part is read whole
NONE = "none"
POLICIES = (UNITS, SAMPLED, FULL, NONE)
SAMPLE_EVERY = 16
CHECKERS = 2  # checksums run at memory speed: more threads only slow down the reads


class StoredFile(NamedTuple):
    """One file of a checkpoint and where its bytes are."""

    path: str  # in the checkpoint
    layout: Layout
    stripes: tuple[str, ...]  # paths in the store
    sums: Sequence[int] = ()  # CRC32C of each unit; empty if unknown
    etag: str = ""  # of the only stripe of a plain file


class _Unit(NamedTuple):
    """A unit that is being read, or a part of it."""

    file: StoredFile
    number: int
    memory: memoryview
    offset: int = 0  # bytes, within the unit

    @property
    def is_whole(self) -> bool:
        return len(self.memory) == self.file.layout.unit_length(self.number)


class _Copy(NamedTuple):
    """Bytes of a unit that was read only because a part of it was requested."""

    unit: int  # index in the list of units
    offset: int  # bytes, within the unit
    target: memoryview


class _Plan(NamedTuple):
    """The reads of one call: ranges, the unit that each belongs to (or None), and final copies."""

    ranges: list[RangeRequest]
    unit_of: list[int | None]
    units: list[_Unit]
    copies: list[_Copy]


def describe_damage(url: str, file: StoredFile, unit: int, found: int) -> str:
    """PURE: describe a unit whose bytes have the checksum `found`. `url`: of the checkpoint or its store."""
    length = file.layout.unit_length(unit)
    piece = next(file.layout.pieces(unit * file.layout.unit_bytes, length))
    return (
        f"{url}: {file.path}: unit {unit} is damaged: bytes {piece.stripe_offset} to"
        f" {piece.stripe_offset + length} of {file.stripes[piece.stripe]} have the checksum (CRC32C) {found:08x},"
        f" not {file.sums[unit]:08x}"
    )


class DirectSource:
    """Reads for this process alone. Threads and forked children may share it.

    `verify`: one of POLICIES. `open_store` is called at a process's first read, unless `store` is given.
    `local`: the same files for mapping, those that are on this machine and in one piece.
    """

    def __init__(
        self,
        url: str,
        files: Mapping[str, StoredFile],
        open_store: Callable[[], Store],
        *,
        store: Store | None = None,
        local: Source | None = None,
        version: str = "",
        digest: str = "",
        verify: str = UNITS,
    ) -> None:
        if verify not in POLICIES:
            raise ConfigError(f"verify={verify!r}: must be one of {', '.join(POLICIES)}")
        self.url = url
        self.version = version
        self.digest = digest
        has_checks = verify in (UNITS, FULL)
        self.files: Mapping[str, SourceFile] = {
            name: SourceFile(name, file.layout.size, file.layout.unit_bytes if has_checks and file.sums else 0)
            for name, file in files.items()
        }
        self._stored = files
        self._open_store = open_store
        self._local = local
        self._verify = verify
        self._salt = randrange(SAMPLE_EVERY)  # other units on every node
        self._lock = threading.Lock()
        self._reader = None if store is None else RangeReader(store)
        self._pid = os.getpid()
        self._past: dict[str, int] = {}  # counters of closed readers
        self._checked = 0
        self._part_sums = PartSums()

    def read(self, requests: Sequence[Request]) -> None:
        plan = self._plan(requests)
        if plan.ranges:
            aio.run_sync(self._read(plan))

    async def read_async(self, requests: Sequence[Request]) -> None:
        """Read like `read`, for code that runs on the process's background loop."""
        plan = self._plan(requests)
        if plan.ranges:
            await self._read(plan)

    def map(self, path: str, offset: int, length: int) -> memoryview | None:
        """Map a range of a local file in one piece, with its units verified."""
        file = self._check(path, offset, length)
        local = None if self._local is None else self._local.files.get(path)
        if local is None or local.size != file.layout.size:
            return None  # `read` reports the mismatch
        assert self._local is not None
        unit_bytes = file.layout.unit_bytes
        first, end = offset // unit_bytes, -(-(offset + length) // unit_bytes)
        if self._verify != FULL:  # not those that are requested in part
            first = -(-offset // unit_bytes)
            end = max(first, end if offset + length == local.size else (offset + length) // unit_bytes)
        start = min(offset, first * unit_bytes)
        view = self._local.map(path, start, max(offset + length, min(end * unit_bytes, local.size)) - start)
        if view is None:
            return None
        units = [
            _Unit(file, number, view[number * unit_bytes - start :][: file.layout.unit_length(number)])
            for number in range(first, end)
            if self._is_checked(file, number)
        ]
        aio.run_sync(self._check_sums(units))
        return view[offset - start : offset - start + length]

    def close(self) -> None:
        if self._local is not None:
            self._local.close()
        if self._pid != os.getpid():
            return  # never used by this process; what its parent opened is the parent's
        with self._lock:
            reader, self._reader = self._reader, None
            if reader is not None:
                self._past = self._counts(reader)
        if reader is not None:
            aio.run_sync(reader.store.aclose())

    def statistics(self) -> dict[str, int]:
        with self._lock:
            counts = self._past if self._reader is None else self._counts(self._reader)
            return {"requests": 0, "read_bytes": 0, **counts, "checked_units": self._checked}

    # ---- what to read -----------------------------------------------------------------------------------------

    def _plan(self, requests: Sequence[Request]) -> _Plan:
        plan = _Plan([], [], [], [])
        borrowed: dict[tuple[str, int], int] = {}  # units that are read because a part is requested
        for request in requests:
            file = self._check(request.path, request.offset, len(request.target))
            for number, offset, target in _cut(file.layout, request):
                unit = _Unit(file, number, target, offset)
                if not self._is_checked(file, number):
                    self._add_ranges(plan, unit, None)
                elif self._verify == FULL and not unit.is_whole:
                    key = (file.path, number)
                    if key not in borrowed:
                        memory = allocate(file.layout.unit_length(number), "a unit to check")
                        borrowed[key] = self._add_unit(plan, _Unit(file, number, memory))
                    plan.copies.append(_Copy(borrowed[key], offset, target))
                else:
                    self._add_unit(plan, unit)
        return plan

    def _add_unit(self, plan: _Plan, unit: _Unit) -> int:
        plan.units.append(unit)
        self._add_ranges(plan, unit, len(plan.units) - 1)
        return len(plan.units) - 1

    def _add_ranges(self, plan: _Plan, unit: _Unit, place: int | None) -> None:
        file = unit.file
        start = unit.number * file.layout.unit_bytes + unit.offset
        for piece in file.layout.pieces(start, len(unit.memory)):
            part = unit.memory[piece.offset - start : piece.offset - start + piece.length]
            plan.ranges.append(RangeRequest(file.stripes[piece.stripe], piece.stripe_offset, part, file.etag))
            plan.unit_of.append(place)

    def _is_checked(self, file: StoredFile, number: int) -> bool:
        if not file.sums or self._verify == NONE:
            return False
        return self._verify != SAMPLED or (number + self._salt) % SAMPLE_EVERY == 0

    def _check(self, path: str, offset: int, length: int) -> StoredFile:
        file = self._stored.get(path)
        if file is None:
            raise NotFound(f"{self.url}: has no file {path}")
        if offset < 0 or offset + length > file.layout.size:
            raise Truncated(
                f"{self.url}: bytes {offset} to {offset + length} of {path}, which has {file.layout.size}"
            )
        return file

    # ---- on the background loop -------------------------------------------------------------------------------

    async def _read(self, plan: _Plan) -> None:
        reader = self._get_reader()
        if not plan.units:
            await reader.read(plan.ranges)
            return
        left = [len(unit.memory) for unit in plan.units]
        arrived: asyncio.Queue[int | None] = asyncio.Queue()

        def on_piece(index: int, offset: int, length: int) -> None:
            del offset
            unit = plan.unit_of[index]
            if unit is not None:
                left[unit] -= length
                if not left[unit]:
                    arrived.put_nowait(unit)

        async def check() -> None:
            while (unit := await arrived.get()) is not None:
                await self._check_sum(reader, plan.units[unit])

        async with aio.TaskGroup() as group:
            for _ in range(CHECKERS):
                group.create_task(check())
            await reader.read(plan.ranges, on_piece=on_piece)
            for _ in range(CHECKERS):
                arrived.put_nowait(None)
        for copy in plan.copies:
            copy.target[:] = plan.units[copy.unit].memory[copy.offset : copy.offset + len(copy.target)]

    async def _check_sums(self, units: Sequence[_Unit]) -> None:
        async def check(unit: _Unit) -> None:
            self._compare(unit, await aio.run_io(crc32c, unit.memory))

        await aio.map_bounded(check, units, width=CHECKERS)

    async def _check_sum(self, reader: RangeReader, unit: _Unit) -> None:
        """Verify a unit; after a mismatch, read it once more from another replica."""
        file, number = unit.file, unit.number
        found = await aio.run_io(crc32c, unit.memory)
        if not unit.is_whole:
            length = file.layout.unit_length(number)
            whole = self._part_sums.add(file.path, number, unit.offset, len(unit.memory), found, length)
            if whole is not None:
                self._compare(unit, whole)
            return
        if found != file.sums[number]:
            again = _Plan([], [], [], [])
            self._add_ranges(again, unit, None)
            await reader.read(again.ranges, attempt=1)
            found = await aio.run_io(crc32c, unit.memory)
        self._part_sums.forget(file.path, number)
        self._compare(unit, found)

    def _compare(self, unit: _Unit, found: int) -> None:
        file, number = unit.file, unit.number
        if found == file.sums[number]:
            self._checked += 1
            return
        raise DigestMismatch(
            f"{describe_damage(self.url, file, number, found)}; load another version, or inspect the damage:"
            " bootseer ckpt verify"
        )

    def _get_reader(self) -> RangeReader:
        if self._pid != os.getpid():  # a forked child: connections and locks are the parent's
            self._lock = threading.Lock()
            self._reader = None
            self._pid = os.getpid()
        with self._lock:
            if self._reader is None:
                self._reader = RangeReader(self._open_store())
            return self._reader

    def _counts(self, reader: RangeReader) -> dict[str, int]:
        counts = dict(self._past)
        for name, value in reader.statistics().items():
            counts[name] = counts.get(name, 0) + value
        return counts


def plain_file(path: str, size: int, etag: str, stored: str) -> StoredFile:
    return StoredFile(path, Layout(size, max(1, size), 1), (stored,), (), etag)


def _cut(layout: Layout, request: Request) -> Iterator[tuple[int, int, memoryview]]:
    """Split a request by units: yield the unit, the offset in it, and the memory for that part."""
    offset, done = request.offset, 0
    while done < len(request.target):
        number, within = divmod(offset + done, layout.unit_bytes)
        count = min(layout.unit_length(number) - within, len(request.target) - done)
        yield number, within, request.target[done : done + count]
        done += count
