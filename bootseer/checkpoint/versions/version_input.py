"""Files of a pinned version as inputs of a writer: every unit is verified before a byte of it is copied.

A writer reads in steps of its own. A unit that it reads in several steps is fetched once and kept for a while.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from bootseer.checkpoint.format.layout import Layout
from bootseer.checkpoint.io.direct import FULL, DirectSource
from bootseer.checkpoint.io.inputs import Input
from bootseer.checkpoint.io.memory import allocate
from bootseer.checkpoint.io.source import Request
from bootseer.checkpoint.versions.resolve import Pinned
from bootseer.errors import Truncated
from bootseer.storage.engine.revocable_buffer import copy_bytes
from bootseer.storage.protocol import Store

KEPT_UNITS = 4  # of each file


class VersionInput:
    def __init__(self, source: DirectSource, path: str, layout: Layout, has_sums: bool) -> None:
        self._source = source
        self._path = path
        self._layout = layout
        self._has_sums = has_sums
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self.size = layout.size

    async def read_into(self, offset: int, target: memoryview) -> None:
        """Read a range; whole units go straight into `target`."""
        end = offset + len(target)
        if end > self.size:
            raise Truncated(f"bytes {offset} to {end} of {self._path}, which has {self.size}")
        unit_bytes = self._layout.unit_bytes
        first = offset // unit_bytes if self._has_sums else 0
        start, stop = offset, end  # of the range that is read in place
        if self._has_sums and offset % unit_bytes:
            start = min(end, (first + 1) * unit_bytes)
            await self._copy(first, offset, target[: start - offset])
        if self._has_sums and end % unit_bytes and end != self.size and end > start:
            stop = end // unit_bytes * unit_bytes
            await self._copy(end // unit_bytes, stop, target[stop - offset :])
        if stop > start:
            await self._source.read_async([Request(self._path, start, target[start - offset : stop - offset])])

    async def _copy(self, unit: int, offset: int, target: memoryview) -> None:
        within = offset - unit * self._layout.unit_bytes
        copy_bytes(target, (await self._unit(unit))[within : within + len(target)])

    async def _unit(self, unit: int) -> memoryview:
        kept = self._kept.setdefault(unit, _Kept())
        self._kept.move_to_end(unit)
        while len(self._kept) > KEPT_UNITS:
            self._kept.popitem(last=False)
        async with kept.lock:
            if kept.memory is None:
                memory = allocate(self._layout.unit_length(unit), "a unit to copy from")
                await self._source.read_async([Request(self._path, unit * self._layout.unit_bytes, memory)])
                kept.memory = memory
            return kept.memory


class _Kept:
    """A unit that is read in parts; the first reader fetches it."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.memory: memoryview | None = None


def inputs_of(store: Store, pinned: Pinned) -> list[tuple[str, Input]]:
    """Return all files of a version as inputs, by path. The caller closes `store`."""
    files = {file.path: file for file in pinned.files}
    source = DirectSource(
        store.url,
        files,
        lambda: store,
        store=store,
        version=pinned.striped_version,
        digest=pinned.digest,
        verify=FULL,
    )
    return [(file.path, VersionInput(source, file.path, file.layout, bool(file.sums))) for file in pinned.files]
