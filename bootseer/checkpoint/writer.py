"""Writes striped versions of a checkpoint: files to stripes, many at once, and the manifest last (committing.py).

In: inputs (memory, files, streams) and a store. Out: a version that is whole under a name of its own, or none. No
name is ever written twice: a stripe that fails gets another one. At any moment of a crash readers see the old
newest version or the new one.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from bootseer import aio
from bootseer.checkpoint import manifest as stored
from bootseer.checkpoint.attempts import write_anew
from bootseer.checkpoint.committing import collect_garbage, commit, discard, new_version
from bootseer.checkpoint.inputs import Input, Stream
from bootseer.checkpoint.layout import Layout
from bootseer.checkpoint.manifest import StripedFile
from bootseer.checkpoint.plain_writer import write_plain
from bootseer.checkpoint.saved_units import SavedUnits
from bootseer.checkpoint.stream_writer import StreamWriter
from bootseer.checkpoint.sums import crc32c
from bootseer.checkpoint.unit_buffers import Places, UnitBuffers
from bootseer.checkpoint.versions import Pinned
from bootseer.errors import BootseerError, CheckpointError, ConfigError, Truncated
from bootseer.storage.protocol import Store

UNIT_BYTES = 16 << 20
STRIPES = 8  # where a store has several servers; else 1
UNSTRIPED_BELOW_BYTES = 64 << 20
BUFFER_BYTES = 512 << 20  # of all units in memory
STRIPES_AT_ONCE = 16  # of all files

Progress = Callable[[int], None]  # bytes written since the last call


class Geometry(NamedTuple):
    """How files are cut."""

    unit_bytes: int = UNIT_BYTES
    stripes: int = 1  # at most; a file has no more of them than units
    least_bytes: int | None = None  # smaller files have one; None: UNSTRIPED_BELOW_BYTES

    def layout(self, size: int) -> Layout:
        least_bytes = UNSTRIPED_BELOW_BYTES if self.least_bytes is None else self.least_bytes
        stripes = self.stripes if size >= least_bytes else 1
        units = max(1, -(-size // self.unit_bytes))
        return Layout(size, self.unit_bytes, min(stripes, units))


def default_geometry(store: Store, unit_bytes: int | None = None, stripes: int | None = None) -> Geometry:
    """8 stripes where files lie on different servers (HDFS), one elsewhere: ranges of one object run at once."""
    unit_bytes = unit_bytes or UNIT_BYTES
    if not stored.is_unit(unit_bytes):
        raise ConfigError(f"a unit of {unit_bytes} bytes cannot be: a multiple of 4096, at most 1 GiB")
    least_bytes = None if stripes is None else 0  # who asks for them gets them
    stripes = stripes or (STRIPES if store.features.has_replicas else 1)
    if not 1 <= stripes <= stored.MOST_STRIPES:
        raise ConfigError(f"{stripes} stripes cannot be: 1 to {stored.MOST_STRIPES}")
    return Geometry(unit_bytes, stripes, least_bytes)


class VersionWriter:
    """One version that is being written. `add` files, at once if you like, then `commit`, or `discard`.

    Several processes may write files of one version: each with a `prefix` of its own; one of them commits.
    """

    def __init__(
        self,
        store: Store,
        path: str,
        version: str,
        *,
        geometry: Geometry | None = None,
        prefix: str = "",
        buffer_bytes: int = BUFFER_BYTES,
        progress: Progress | None = None,
    ) -> None:
        self._store = store
        self._path = path
        self.version = version
        self.folder = _join(path, stored.folder_of(version))
        self._geometry = geometry or default_geometry(store)
        self._prefix = prefix
        self._first_placement = zlib.crc32(prefix.encode())
        self._buffers = UnitBuffers(self._geometry.unit_bytes, buffer_bytes)
        self._places = Places(STRIPES_AT_ONCE)
        self._progress = progress or (lambda _: None)
        self._saved = SavedUnits.from_environ(os.environ, version)
        self._paths: set[str] = set()
        self.files: list[StripedFile] = []

    async def add(self, path: str, source: Input | Stream) -> StripedFile:
        """Writes one file of the checkpoint; `path` as a saver would name it."""
        if not stored.is_file_path(path) or path in self._paths:
            raise CheckpointError(f"{path!r}: no file of a checkpoint can have this name, or it is there twice")
        number = len(self._paths)
        self._paths.add(path)
        if isinstance(source, Stream):
            file = await self._add_stream(path, number, source)
        else:
            file = await self._add_input(path, number, source)
        self.files.append(file)
        return file

    async def discard(self) -> None:
        """Takes away what was written; without a manifest nobody has seen it."""
        await discard(self._store, self._path, self.version)

    async def _add_input(self, path: str, number: int, source: Input) -> StripedFile:
        layout = self._geometry.layout(source.size)
        sums = [0] * layout.units

        async def write(stripe: int) -> str:
            async def attempt(name: str) -> None:
                await self._write_stripe(path, name, number, layout, stripe, source, sums)

            return await write_anew(self._stripe_name(number, stripe), attempt)

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
            async with self._store.create(_join(self.folder, name), size=size, placement=placement) as writer:
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
            return name, _join(self.folder, name), self._placement(number, stripe)

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
        """Stripes of a file on different servers, and so the only stripes of small files."""
        return self._first_placement + number + stripe

    async def _check_size(self, name: str, size: int) -> None:
        found = await self._store.stat(_join(self.folder, name))
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
    """Writes files as one version; on an error, or cancelled, none of it is visible.

    What an error leaves behind is deleted, unless the error is that it is not known whether the commit came
    through: a collection looks at it later.
    """
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
        await collect_garbage(store, path, keep=keep)
    return pinned


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


__all__ = [
    "Geometry", "VersionWriter", "collect_garbage", "commit", "default_geometry", "new_version", "write_plain",
    "write_version",
]  # fmt: skip
