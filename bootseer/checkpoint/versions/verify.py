"""Verification of every byte of a version.

In: a store and a pinned version. Out: counts of verified bytes and every fault, named by file, unit and stripe.
Units are read in order, many at once, through little memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from bootseer import aio
from bootseer.checkpoint.io.direct import StoredFile
from bootseer.checkpoint.io.memory import allocate
from bootseer.checkpoint.versions.resolve import Pinned, find_fault
from bootseer.crc import crc32c
from bootseer.errors import BootseerError
from bootseer.storage.engine.ranges import RangeReader, RangeRequest
from bootseer.storage.protocol import Store

UNITS_AT_ONCE = 16
BUFFER_BYTES = 512 << 20  # of all of them; one unit at least
LOOKS_AT_ONCE = 32
MAX_FAULTS = 1000  # that are listed; all are counted


class Fault(NamedTuple):
    path: str  # of the file in the checkpoint
    stripe: str  # path in the store
    unit: int  # -1: the whole stripe file
    what: str


class VerifyResult(NamedTuple):
    files: int
    checked_bytes: int  # with matching checksums
    unsummed_bytes: int  # of plain files, which have no checksums: only their sizes were verified
    faults: tuple[Fault, ...]  # at most MAX_FAULTS
    fault_count: int


async def verify(store: Store, pinned: Pinned, progress: Callable[[int], None] | None = None) -> VerifyResult:
    """Read all striped files and verify checksums and sizes; of plain files sizes and etags. Inspect all formats.

    Args: progress: called with bytes done since the last call.
    """
    note = progress or (lambda _: None)
    reader = RangeReader(store)
    checker = _Checker(store, reader, note)
    stripes = [(file, number) for file in pinned.files for number in range(len(file.stripes))]
    await aio.map_bounded(checker.check_size, stripes, width=LOOKS_AT_ONCE)
    work: list[tuple[StoredFile, int]] = []
    largest = 1
    for file in pinned.files:
        if file.sums:
            largest = max(largest, min(file.layout.unit_bytes, file.layout.size))
            work += [(file, unit) for unit in range(file.layout.units)]
        else:
            checker.unsummed_bytes += file.layout.size
            note(file.layout.size)
    width = max(1, min(UNITS_AT_ONCE, BUFFER_BYTES // largest))
    await aio.map_bounded(checker.check_unit, work, width=width)
    why = "" if checker.fault_count else await find_fault(store, pinned)
    if why:
        checker.add(Fault("", pinned.folder, -1, f"is incomplete: {why}"))
    return VerifyResult(
        len(pinned.files),
        checker.checked_bytes,
        checker.unsummed_bytes,
        tuple(sorted(checker.faults)),
        checker.fault_count,
    )


class _Checker:
    def __init__(self, store: Store, reader: RangeReader, note: Callable[[int], None]) -> None:
        self._store = store
        self._reader = reader
        self._note = note
        self._free: list[memoryview] = []
        self._broken: set[str] = set()  # stripes whose units are not read
        self.checked_bytes = self.unsummed_bytes = self.fault_count = 0
        self.faults: list[Fault] = []

    async def check_size(self, work: tuple[StoredFile, int]) -> None:
        file, number = work
        stripe, expected = file.stripes[number], file.layout.stripe_size(number)
        try:
            found = await self._store.stat(stripe)
        except BootseerError as error:
            self._broken.add(stripe)
            self.add(Fault(file.path, stripe, -1, str(error)))
            return
        if found.size != expected:
            self.add(Fault(file.path, stripe, -1, f"has {found.size} bytes, not {expected}"))
        elif file.etag and found.etag != file.etag:
            self.add(Fault(file.path, stripe, -1, "has changed since it was inspected"))

    async def check_unit(self, work: tuple[StoredFile, int]) -> None:
        file, unit = work
        length = file.layout.unit_length(unit)
        [piece] = file.layout.pieces(unit * file.layout.unit_bytes, length)
        stripe = file.stripes[piece.stripe]
        if stripe not in self._broken:
            buffer = self._take(min(file.layout.unit_bytes, file.layout.size))
            view = buffer[:length]
            try:
                await self._reader.read([RangeRequest(stripe, piece.stripe_offset, view)])
                found = await aio.run_io(crc32c, view)
                if found == file.sums[unit]:
                    self.checked_bytes += length
                else:
                    what = f"CRC32C {found:08x}, not {file.sums[unit]:08x}"
                    self.add(Fault(file.path, stripe, unit, what))
            except BootseerError as error:
                self.add(Fault(file.path, stripe, unit, str(error)))
            finally:
                self._free.append(buffer)
        self._note(length)

    def _take(self, size: int) -> memoryview:
        while self._free:
            buffer = self._free.pop()
            if len(buffer) >= size:
                return buffer
        return allocate(size)

    def add(self, fault: Fault) -> None:
        self.fault_count += 1
        if len(self.faults) < MAX_FAULTS:
            self.faults.append(fault)
