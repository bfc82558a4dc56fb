"""From plain files to a striped version and back, between any two stores.

Bytes go through a few units of memory, many at once each way. What is written is complete, or not there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

from bootseer import aio
from bootseer.checkpoint.direct import StoredFile
from bootseer.checkpoint.inputs import Input
from bootseer.checkpoint.sums import crc32c
from bootseer.checkpoint.versions import Pinned, resolve
from bootseer.checkpoint.writer import Geometry, default_geometry, write_plain, write_version
from bootseer.errors import AlreadyExists, DigestMismatch, NotFound
from bootseer.storage import open_at, open_store
from bootseer.storage.protocol import Store
from bootseer.storage.ranges import RangeReader, RangeRequest

Progress = Callable[[int], None]  # bytes written since the last call


class VersionInput:
    """One file of a pinned version as an input; whole units are checked by their sums."""

    def __init__(self, reader: RangeReader, file: StoredFile) -> None:
        self._reader = reader
        self._file = file
        self.size = file.layout.size

    async def read_into(self, offset: int, target: memoryview) -> None:
        file = self._file
        requests = [
            RangeRequest(
                file.stripes[piece.stripe],
                piece.stripe_offset,
                target[piece.offset - offset : piece.offset - offset + piece.length],
                file.etag,
            )
            for piece in file.layout.pieces(offset, len(target))
        ]
        await self._reader.read(requests)
        unit_bytes = file.layout.unit_bytes
        if not file.sums:
            return
        for unit in range(-(-offset // unit_bytes), (offset + len(target)) // unit_bytes + 1):
            start = unit * unit_bytes - offset
            if unit >= file.layout.units or start + file.layout.unit_length(unit) > len(target):
                break
            found = await aio.run_io(crc32c, target[start : start + file.layout.unit_length(unit)])
            if found != file.sums[unit]:
                stripe = file.stripes[unit % file.layout.stripes]
                raise DigestMismatch(
                    f"{self._reader.store.url}/{stripe}: unit {unit} of {file.path}: CRC32C {found:08x}, not"
                    f" {file.sums[unit]:08x}"
                )


def inputs_of(store: Store, pinned: Pinned) -> list[tuple[str, Input]]:
    """All files of a version as inputs, by path."""
    reader = RangeReader(store)
    return [(file.path, VersionInput(reader, file)) for file in pinned.files]


async def stripe_version(
    source: Store,
    pinned: Pinned,
    target: Store,
    path: str,
    *,
    geometry: Geometry | None = None,
    step: int | None = None,
    keep: int | None = None,
    progress: Progress | None = None,
) -> Pinned:
    """Writes all files of a version as a new striped version of the checkpoint `path`."""
    return await write_version(
        target,
        path,
        list(inputs_of(source, pinned)),
        step=pinned.step if step is None else step,
        geometry=geometry,
        keep=keep,
        progress=progress,
    )


async def unstripe_version(
    source: Store, pinned: Pinned, target: Store, path: str, *, progress: Progress | None = None
) -> list[str]:
    """Writes all files of a version as plain files below `path`; returns their paths.

    Raises: AlreadyExists, before anything is written, if one of them is there.
    """
    sources = inputs_of(source, pinned)
    names = [f"{path}/{name}" if path else name for name, _ in sources]
    for name in names:
        try:
            await target.stat(name)
        except NotFound:
            continue
        raise AlreadyExists(f"{target.url}/{name}: is there already; nothing was written")
    for name, (_, each) in zip(names, sources, strict=True):
        await write_plain(target, name, each, progress=progress)
    return names


# ---- by URL --------------------------------------------------------------------------------------------------


class Copied(NamedTuple):
    """What a copy has written."""

    files: int
    size: int  # bytes
    version: str  # "" for plain files


def stripe(
    source: str,
    target: str,
    *,
    unit_bytes: int | None = None,
    stripes: int | None = None,
    step: int | None = None,
    keep: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Copied:
    """The newest complete version of `source` (or that file or folder) as a new striped version of `target`.

    Args: progress: is told bytes done and bytes in all.
    """

    async def run() -> Copied:
        async with opened(source) as (store, path), opened_folder(target) as goal:
            pinned = await resolve(store, path)
            geometry = default_geometry(goal, unit_bytes, stripes)
            written = await stripe_version(
                store,
                pinned,
                goal,
                "",
                geometry=geometry,
                step=step,
                keep=keep,
                progress=summing(progress, pinned.size),
            )
            return Copied(len(written.files), written.size, written.version)

    return aio.run_sync(run())


def unstripe(source: str, target: str, *, progress: Callable[[int, int], None] | None = None) -> Copied:
    """The newest complete version of `source` as plain files in the folder `target`."""

    async def run() -> Copied:
        async with opened(source) as (store, path), opened_folder(target) as goal:
            pinned = await resolve(store, path)
            names = await unstripe_version(store, pinned, goal, "", progress=summing(progress, pinned.size))
            return Copied(len(names), pinned.size, "")

    return aio.run_sync(run())


def copy_plain(source: str, target: str, *, progress: Callable[[int, int], None] | None = None) -> Copied:
    """One file as one plain file, in parts written at once where the store can join them."""

    async def run() -> Copied:
        async with opened(source) as (store, path), opened(target) as (goal, name):
            [(_, file)] = inputs_of(store, await resolve(store, path))
            await write_plain(goal, name, file, progress=summing(progress, file.size))
            return Copied(1, file.size, "")

    return aio.run_sync(run())


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[tuple[Store, str]]:
    """The store of a URL's folder and the last name in it, for as long as the block lasts."""
    store, name = open_at(url)
    try:
        yield store, name
    finally:
        await store.aclose()


@asynccontextmanager
async def opened_folder(url: str) -> AsyncIterator[Store]:
    """The store whose root a URL is."""
    store = open_store(url)
    try:
        yield store
    finally:
        await store.aclose()


def summing(progress: Callable[[int, int], None] | None, total: int) -> Progress | None:
    done = 0

    def note(more: int) -> None:
        nonlocal done
        done += more
        if progress is not None:
            progress(done, total)

    return note
