"""Writes striped versions of a checkpoint: files to stripes, many at once, and the manifest last (committing.py).

In: inputs (memory, files, streams) and a store. Out: a complete version under a name of its own, or none. No name
is ever written twice: a failed stripe is retried under another one. At any moment of a crash readers see the old
newest version or the new one.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from bootseer import aio
from bootseer.checkpoint.format import manifest as stored
from bootseer.checkpoint.format.layout import Layout
from bootseer.checkpoint.format.manifest import StripedFile
from bootseer.checkpoint.io.inputs import Input, Stream
from bootseer.checkpoint.io.unit_buffers import FairSemaphore, UnitBuffers
from bootseer.checkpoint.versions.attempts import write_retrying
from bootseer.checkpoint.versions.resolve import Pinned
from bootseer.checkpoint.writing.committing import (
    check_keep,
    collect_garbage,
    commit,
    delete_old,
    discard,
    new_version,
)
from bootseer.checkpoint.writing.plain_writer import write_plain
from bootseer.checkpoint.writing.saved_units import SavedUnits
from bootseer.checkpoint.writing.stream_writer import StreamWriter
from bootseer.crc import crc32c
from bootseer.errors import BootseerError, CheckpointError, ConfigError, Truncated
from bootseer.storage.paths import join
from bootseer.storage.protocol import Store
from bootseer.tuning import current

UNIT_BYTES = 16 << 20
STRIPES = 8  # if a store has several servers; otherwise 1
UNSTRIPED_BELOW_BYTES = 64 << 20
STRIPES_AT_ONCE = 16  # of all files

Progress = Callable[[int], None]  # bytes written since the last call


class Geometry(NamedTuple):
    """How files are split."""

    unit_bytes: int = UNIT_BYTES
    stripes: int = 1  # at most; a file has no more stripes than units
    min_bytes: int | None = None  # smaller files have one stripe; None: UNSTRIPED_BELOW_BYTES

    def layout(self, size: int) -> Layout:
        min_bytes = UNSTRIPED_BELOW_BYTES if self.min_bytes is None else self.min_bytes
        stripes = self.stripes if size >= min_bytes else 1
        units = max(1, -(-size // self.unit_bytes))
        return Layout(size, self.unit_bytes, min(stripes, units))


def default_geometry(store: Store, unit_bytes: int | None = None, stripes: int | None = None) -> Geometry:
    """Return 8 stripes if files are on several servers (HDFS), otherwise one: ranges are read in parallel."""
    unit_bytes = unit_bytes or UNIT_BYTES
    if not stored.is_unit(unit_bytes):
        raise ConfigError(f"unit_bytes={unit_bytes}: must be a multiple of 4096, at most 1 GiB")
    min_bytes = None if stripes is None else 0  # a requested number applies to all sizes
    stripes = stripes or (STRIPES if store.features.has_replicas else 1)
    if not 1 <= stripes <= stored.MAX_STRIPES:
        raise ConfigError(f"stripes={stripes}: must be 1 to {stored.MAX_STRIPES}")
    return Geometry(unit_bytes, stripes, min_bytes)


class VersionWriter:
    """One version that is being written. Call `add` for files, also in parallel, then `commit`, or `discard`.

    Several processes may write files of one version: each with a `prefix` of its own; one of them commits.
    `buffer_bytes`: of all units in memory; None: `checkpoint.save_buffer_bytes` of `tuning`.
    """

    def __init__(
        self,
        store: Store,
        path: str,
        version: str,
        *,
        geometry: Geometry | None = None,
        prefix: str = "",
        buffer_bytes: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._store = store
        self._path = path
        self.version = version
        self.folder = join(path, stored.directory_of(version))
        self._geometry = geometry or default_geometry(store)
        self._prefix = prefix
        self._first_placement = zlib.crc32(prefix.encode())
        if buffer_bytes is None:
            buffer_bytes = current().checkpoint.save_buffer_bytes
        self._buffers = UnitBuffers(self._geometry.unit_bytes, buffer_bytes)
        self._places = FairSemaphore(STRIPES_AT_ONCE)
        self._progress = progress or (lambda _: None)
        self._saved = SavedUnits.from_environ(os.environ, version)
        self._paths: set[str] = set()
        self.files: list[StripedFile] = []

    async def add(self, path: str, source: Input | Stream) -> StripedFile:
        """Write one file of the checkpoint; `path` is its name for savers."""
        if not stored.is_file_path(path) or path in self._paths:
            raise CheckpointError(f"{path!r}: not a valid file name in a checkpoint, or it occurs twice")
        number = len(self._paths)
        self._paths.add(path)
        if isinstance(source, Stream):
            file = await self._add_stream(path, number, source)
        else:
            file = await self._add_input(path, number, source)
        self.files.append(file)
        return file

    async def discard(self) -> None:
        """Delete the written files; without a manifest no reader has seen them."""
        await discard(self._store, self._path, self.version)

    async def _add_input(self, path: str, number: int, source: Input) -> StripedFile:
        layout = self._geometry.layout(source.size)
        sums = [0] * layout.units

        async def write(stripe: int) -> str:
            async def attempt(name: str) -> None:
                await self._write_stripe(path, name, number, layout, stripe, source, sums)

            return await write_retrying(self._stripe_name(number, stripe), attempt)

        async with self._places.taken(layout.stripes):
            names = await aio.map_bounded(write, range(layout.stripes), width=STRIPES_AT_ONCE)
        return StripedFile(path=path, size=source.size, unit_bytes=layout.unit_bytes, stripes=names, sums=sums)

    async def _write_stripe(
        self, path: str, name: str, number: int, layout: Layout, stripe: int, source: Input, sums: list[int]
    ) -> None:
        size = layout.stripe_size(stripe)
        placement = self._placement(number, stripe)
        written = 0
        try:
            async with self._store.create(join(self.folder, name), size=size, placement=placement) as writer:
                for unit in range(stripe, layout.units, layout.stripes):
                    length = layout.unit_length(unit)
                    async with self._buffers.lease() as buffer:
                        view = buffer[:length]
                        await source.read_into(unit * layout.unit_bytes, view)
                        sums[unit] = await aio.run_io(crc32c, view)
                        async with self._saved.leaving(path, layout.unit_bytes, unit, view):
                            await writer.write(view)
                    written += length
                    self._progress(length)
            await self._check_size(name, size)
        except BaseException:
            self._progress(-written)
            raise

    async def _add_stream(self, path: str, number: int, source: Stream) -> StripedFile:
        def paths(stripe: int) -> tuple[str, str, int]:
            name = self._stripe_name(number, stripe)
            return name, join(self.folder, name), self._placement(number, stripe)

        unit_bytes, stripes = self._geometry.unit_bytes, self._geometry.stripes
        writer = StreamWriter(
            self._store,
            paths,
            stripes,
            unit_bytes,
            self._buffers,
            self._progress,
            partial(self._saved.leaving, path),
        )
        async with self._places.taken(stripes):
            done = await writer.run(source.chunks)
        for name, size in zip(done.stripes, done.stripe_sizes, strict=True):
            await self._check_size(name, size)
        return StripedFile(path=path, size=done.size, unit_bytes=unit_bytes, stripes=done.stripes, sums=done.sums)

    def _stripe_name(self, number: int, stripe: int) -> str:
        return f"{self._prefix}{number:05d}.s{stripe:03d}"

    def _placement(self, number: int, stripe: int) -> int:
        """Return a placement that puts a file's stripes, and small files, on different servers."""
        return self._first_placement + number + stripe

    async def _check_size(self, name: str, size: int) -> None:
        found = await self._store.stat(join(self.folder, name))
        if found.size != size:
            raise Truncated(f"{self._store.url}/{self.folder}/{name}: has {found.size} bytes; {size} were written")


async def write_version(
    store: Store,
    path: str,
    sources: Sequence[tuple[str, Input | Stream]],
    *,
    step: int | None = None,
    geometry: Geometry | None = None,
    keep: int | None = None,
    progress: Progress | None = None,
) -> Pinned:
    """Write files as one version; after an error or a cancellation none of it is visible.

    Files of a failed write are deleted, unless the outcome of the commit is unknown: garbage collection deletes
    them later. A failure to delete old versions is only logged.
    """
    if keep is not None:
        check_keep(keep)
    writer = VersionWriter(store, path, await new_version(store, path), geometry=geometry, progress=progress)

    async def add(source: tuple[str, Input | Stream]) -> None:
        await writer.add(*source)

    try:
        await aio.map_bounded(add, sources, width=STRIPES_AT_ONCE)
    except BaseException:
        await writer.discard()
        raise
    try:
        pinned = await commit(store, path, writer.version, writer.files, step=step)
    except BootseerError as error:
        if not error.retryable:
            await writer.discard()
        raise
    if keep is not None:
        await delete_old(store, path, keep=keep)
    return pinned


__all__ = [
    "Geometry", "VersionWriter", "collect_garbage", "commit", "default_geometry", "new_version", "write_plain",
    "write_version",
]  # fmt: skip
