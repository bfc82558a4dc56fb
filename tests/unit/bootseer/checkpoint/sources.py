"""Checkpoints in memory and on disk for the tests of what reads them."""

from __future__ import annotations

import random
from collections.abc import Mapping

from bootseer import aio
from bootseer.checkpoint.io.inputs import MemoryInput
from bootseer.checkpoint.versions.resolve import Pinned
from bootseer.checkpoint.writing.writer import Geometry, write_version
from bootseer.storage import open_store

UNIT_BYTES = 4096


def put(url: str, files: Mapping[str, bytes]) -> None:
    """Plain files."""

    async def write() -> None:
        store = open_store(url)
        for path, data in files.items():
            await store.publish(path, data)
        await store.aclose()

    aio.run_sync(write())


def stripe(url: str, files: Mapping[str, bytes], stripes: int = 3, unit_bytes: int = UNIT_BYTES) -> Pinned:
    """A striped version, also of files that are small."""

    async def write() -> Pinned:
        store = open_store(url)
        sources = [(path, MemoryInput([data])) for path, data in files.items()]
        pinned = await write_version(store, "", sources, geometry=SmallGeometry(unit_bytes, stripes))
        await store.aclose()
        return pinned

    return aio.run_sync(write())


class SmallGeometry(Geometry):
    """Stripes files of any size."""

    def layout(self, size: int):  # type: ignore[no-untyped-def]
        from bootseer.checkpoint.format.layout import Layout

        units = max(1, -(-size // self.unit_bytes))
        return Layout(size, self.unit_bytes, min(self.stripes, units))


def flip(url: str, path: str, at: int) -> None:
    """One bit of a stored file, whose size and name stay."""

    async def write() -> None:
        store = open_store(url)
        size = (await store.stat(path)).size
        data = bytearray(size)
        await store.read_into(path, 0, memoryview(data))
        data[at] ^= 1 << (at % 8)
        await store.publish(path, bytes(data))
        await store.aclose()

    aio.run_sync(write())


def noise(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)
