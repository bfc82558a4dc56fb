"""Writes checkpoints: a striped version whose manifest comes last, or one plain file from parts written at once.

In: inputs (memory, files, streams) and a store. Out: a version that is whole under a name of its own, or none. No
name is ever written twice: a stripe that fails gets another one. At any moment of a crash readers see the old
newest version or the new one (docs/formats.md says which step decides).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

from bootseer import __version__, aio
from bootseer.checkpoint import manifest as stored
from bootseer.checkpoint.inputs import Input, PartInput, Stream
from bootseer.checkpoint.layout import Layout
from bootseer.checkpoint.manifest import MANIFEST_NAME, POINTER_NAME, Manifest, StripedFile
from bootseer.checkpoint.memory import allocate
from bootseer.checkpoint.sums import crc32c
from bootseer.checkpoint.versions import Pinned, list_versions, read_small, resolve
from bootseer.errors import CheckpointError, ConfigError, IntegrityError, NotFound, StorageError, Truncated
from bootseer.storage.protocol import Store

UNIT_BYTES = 16 << 20
STRIPES = 8  # where a store has several servers; else 1
UNSTRIPED_BELOW_BYTES = 64 << 20
BUFFER_BYTES = 512 << 20  # of all units in memory
FILES_AT_ONCE = 4
TRIES = 4  # of one stripe file
ABANDONED_AFTER_S = 86_400.0  # a version without a manifest
PART_BYTES = 64 << 20  # of a plain file, at least

Progress = Callable[[int], None]  # bytes written since the last call


class Geometry(NamedTuple):
    """How files are cut."""

    unit_bytes: int = UNIT_BYTES
    stripes: int = 1  # for files of UNSTRIPED_BELOW_BYTES and more

    def layout(self, size: int) -> Layout:
        stripes = self.stripes if size >= UNSTRIPED_BELOW_BYTES else 1
        units = max(1, -(-size // self.unit_bytes))
        return Layout(size, self.unit_bytes, min(stripes, units))


def default_geometry(store: Store, unit_bytes: int | None = None, stripes: int | None = None) -> Geometry:
    """8 stripes where files lie on different servers (HDFS), one elsewhere: ranges of one object run at once."""
    unit_bytes = unit_bytes or UNIT_BYTES
    if not stored.is_unit(unit_bytes):
        raise ConfigError(f"a unit of {unit_bytes} bytes cannot be: a multiple of 4096, at most 1 GiB")
    return Geometry(unit_bytes, stripes or (STRIPES if store.features.has_replicas else 1))


async def new_version(store: Store, path: str = "") -> str:
    """A name that sorts after all versions there, whatever the clocks of their writers said."""
    newest = 0
    try:
        for found in await list_versions(store, path):
            newest = max(newest, int(found.version[:20]))
    except StorageError as error:
        if error.retryable:
            raise
    created_ns = max(time.time_ns(), newest + 1)
    return f"{created_ns:020d}-{uuid.uuid4().hex[:12]}"


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
        self._buffers = asyncio.Semaphore(max(2, buffer_bytes // self._geometry.unit_bytes))
        self._free: list[memoryview] = []
        self._progress = progress or (lambda _: None)
        self._next_file = 0
        self.files: list[StripedFile] = []

    async def add(self, path: str, source: Input | Stream) -> StripedFile:
        """Writes one file of the checkpoint; `path` as a saver would name it."""
        if not stored.is_file_path(path) or any(file.path == path for file in self.files):
            raise CheckpointError(f"{path!r}: no file of a checkpoint can have this name, or it is there twice")
        number = self._next_file
        self._next_file += 1
        base = f"{self._prefix}{number:05d}"
        if isinstance(source, Stream):
            file = await self._add_stream(path, base, source)
        else:
            file = await self._add_input(path, base, source)
        self.files.append(file)
        return file

    async def discard(self) -> None:
        """Takes away what was written; without a manifest nobody has seen it."""
        await self._store.delete(self.folder)

    # ---- inputs of known size --------------------------------------------------------------------------------

    async def _add_input(self, path: str, base: str, source: Input) -> StripedFile:
        layout = self._geometry.layout(source.size)
        sums = [0] * layout.units

        async def write(stripe: int) -> str:
            return await self._write_stripe(base, layout, stripe, source, sums)

        names = await aio.map_bounded(write, range(layout.stripes), width=layout.stripes)
        return StripedFile(path=path, size=source.size, unit_bytes=layout.unit_bytes, stripes=names, sums=sums)

    async def _write_stripe(self, base: str, layout: Layout, stripe: int, source: Input, sums: list[int]) -> str:
        """One stripe file, under a new name for each try; returns the name that it has in the end."""
        for attempt in range(TRIES):
            name = f"{base}.s{stripe:03d}" + (f".t{attempt}" if attempt else "")
            written = 0
            try:
                size = layout.stripe_size(stripe)
                async with self._store.create(_join(self.folder, name), size=size, placement=stripe) as writer:
                    for unit in range(stripe, layout.units, layout.stripes):
                        length = layout.unit_length(unit)
                        async with _Lease(self) as buffer:
                            view = buffer[:length]
                            await source.read_into(unit * layout.unit_bytes, view)
                            sums[unit] = await aio.run_io(crc32c, view)
                            await writer.write(view)
                        written += length
                        self._progress(length)
                await self._check_size(name, size)
                return name
            except StorageError as error:
                self._progress(-written)
                if not error.retryable or attempt + 1 == TRIES:
                    raise
        raise AssertionError

    async def _check_size(self, name: str, size: int) -> None:
        found = await self._store.stat(_join(self.folder, name))
        if found.size != size:
            raise Truncated(f"{self._store.url}/{self.folder}/{name}: has {found.size} bytes; {size} were written")

    # ---- streams ---------------------------------------------------------------------------------------------

    async def _add_stream(self, path: str, base: str, source: Stream) -> StripedFile:
        """Units are cut as they come; how many stripes there are is known when the first ones are there."""
        unit_bytes = self._geometry.unit_bytes
        units = _units(source.chunks, unit_bytes)
        first: list[bytes] = []
        async for unit in units:
            first.append(unit)
            if len(first) * unit_bytes >= UNSTRIPED_BELOW_BYTES:
                break
        known = sum(map(len, first))
        stripes = self._geometry.layout(known).stripes if known < UNSTRIPED_BELOW_BYTES else self._geometry.stripes
        queues: list[asyncio.Queue[bytes | None]] = [asyncio.Queue(2) for _ in range(stripes)]
        sums: list[int] = []
        sizes = [0] * stripes
        names = [f"{base}.s{stripe:03d}" for stripe in range(stripes)]

        async def feed() -> None:
            async def put(unit: bytes) -> None:
                stripe = len(sums) % stripes
                sums.append(await aio.run_io(crc32c, unit))
                sizes[stripe] += len(unit)
                await queues[stripe].put(unit)

            for unit in first:
                await put(unit)
            first.clear()
            async for unit in units:
                await put(unit)
            for queue in queues:
                await queue.put(None)

        async def drain(stripe: int) -> None:
            full = _join(self.folder, names[stripe])
            async with self._store.create(full, placement=stripe) as writer:
                while (unit := await queues[stripe].get()) is not None:
                    await writer.write(unit)
                    self._progress(len(unit))

        async def run(worker: int) -> None:
            await (feed() if worker < 0 else drain(worker))

        await aio.map_bounded(run, range(-1, stripes), width=stripes + 1)
        for name, size in zip(names, sizes, strict=True):
            await self._check_size(name, size)
        return StripedFile(path=path, size=sum(sizes), unit_bytes=unit_bytes, stripes=names, sums=sums)

    # ---- memory ----------------------------------------------------------------------------------------------

    def take_buffer(self) -> memoryview:
        return self._free.pop() if self._free else allocate(self._geometry.unit_bytes)

    def give_back(self, buffer: memoryview) -> None:
        self._free.append(buffer)

    @property
    def buffers(self) -> asyncio.Semaphore:
        return self._buffers


class _Lease:
    """A buffer of a unit's size, for as long as the block lasts."""

    def __init__(self, writer: VersionWriter) -> None:
        self._writer = writer
        self._buffer: memoryview | None = None

    async def __aenter__(self) -> memoryview:
        await self._writer.buffers.acquire()
        self._buffer = self._writer.take_buffer()
        return self._buffer

    async def __aexit__(self, *_: object) -> None:
        assert self._buffer is not None
        self._writer.give_back(self._buffer)
        self._writer.buffers.release()


async def commit(
    store: Store, path: str, version: str, files: Sequence[StripedFile], *, step: int | None = None
) -> Pinned:
    """Makes a version visible: from the moment that its manifest is there it is the newest one.

    Raises: AlreadyExists if somebody else has committed a version of this name.
    """
    folder = _join(path, stored.folder_of(version))
    manifest = Manifest(
        format=stored.FORMAT,
        version=version,
        created_ns=int(version[:20]),
        step=step,
        writer=f"bootseer {__version__}",
        files=sorted(files, key=lambda file: file.path),
    )
    await store.publish(_join(folder, MANIFEST_NAME), stored.encode(manifest), if_absent=True)
    await _point_to(store, path, version)
    return await resolve(store, folder)


async def _point_to(store: Store, path: str, version: str) -> None:
    """LATEST, for stores that cannot list. Two writers may race: it then names one of the two newest versions."""
    pointer = _join(path, POINTER_NAME)
    try:
        named = (await read_small(store, pointer, 256)).decode("ascii", "replace").strip()
    except (NotFound, IntegrityError):
        named = ""
    if not stored.is_version(named) or named < version:
        await store.publish(pointer, version.encode() + b"\n")


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
    """Writes files as one version; on an error, or cancelled, nothing of it stays."""
    writer = VersionWriter(store, path, await new_version(store, path), geometry=geometry, progress=progress)

    async def add(source: tuple[str, Input | Stream]) -> None:
        await writer.add(*source)

    try:
        await aio.map_bounded(add, sources, width=FILES_AT_ONCE)
        pinned = await commit(store, path, writer.version, writer.files, step=step)
    except BaseException:
        await _discard(writer)
        raise
    if keep is not None:
        await collect_garbage(store, path, keep=keep)
    return pinned


async def _discard(writer: VersionWriter) -> None:
    try:
        found = await list_versions(writer._store, writer._path)
        if not any(each.version == writer.version and each.is_complete for each in found):
            await writer.discard()
    except StorageError:
        pass  # the next collection finds it


async def collect_garbage(store: Store, path: str, *, keep: int, now_s: float | None = None) -> list[str]:
    """Takes away all complete versions but the newest `keep`, and unfinished ones older than a day; returns them.

    A version's manifest goes first: no reader starts on one that is being taken away.
    """
    if keep < 1:
        raise CheckpointError(f"keep {keep}: at least one version has to stay")
    now_s = time.time() if now_s is None else now_s
    versions = await list_versions(store, path)
    complete = [found for found in versions if found.is_complete]
    doomed = complete[:-keep]
    for found in versions:
        began_s = max(found.mtime_s, int(found.version[:20]) / 1e9)
        if not found.is_complete and now_s - began_s > ABANDONED_AFTER_S:
            doomed.append(found)
    for found in doomed:
        if found.is_complete:
            await store.delete(_join(found.folder, MANIFEST_NAME))
        await store.delete(found.folder)
    return [found.version for found in doomed]


async def write_plain(
    store: Store, path: str, source: Input, *, parts: int | None = None, progress: Progress | None = None
) -> None:
    """One ordinary file that every tool reads, from parts written at once where the store joins files."""
    note = progress or (lambda _: None)
    count = min(parts or STRIPES, max(1, source.size // PART_BYTES)) if store.features.concatenates else 1
    if count == 1:
        async with store.create(path, size=source.size) as writer:
            await _copy(source, writer.write, note)
        return
    length = -(-source.size // count)
    length += -length % 4096
    mark = uuid.uuid4().hex
    folder, _, name = path.rpartition("/")
    names = [_join(folder, f".{name}.{mark}.{number:03d}") for number in range(-(-source.size // length))]

    async def write(number: int) -> None:
        part = PartInput(source, number * length, min(length, source.size - number * length))
        async with store.create(names[number], size=part.size, placement=number) as writer:
            await _copy(part, writer.write, note)
        found = await store.stat(names[number])
        if found.size != part.size:
            raise Truncated(f"{store.url}/{names[number]}: has {found.size} bytes; {part.size} were written")

    try:
        await aio.map_bounded(write, range(len(names)), width=len(names))
        await store.concat(path, names)
    except BaseException:
        for each in names:
            try:
                await store.delete(each)
            except StorageError:
                continue
        raise


async def _copy(source: Input, write: Callable[[memoryview], object], note: Progress) -> None:
    buffer = allocate(min(UNIT_BYTES, max(1, source.size)))
    for offset in range(0, source.size, UNIT_BYTES):
        view = buffer[: min(UNIT_BYTES, source.size - offset)]
        await source.read_into(offset, view)
        await write(view)  # type: ignore[misc]
        note(len(view))


async def _units(chunks: AsyncIterator[bytes | memoryview], unit_bytes: int) -> AsyncIterator[bytes]:
    waiting = bytearray()
    async for chunk in chunks:
        waiting += chunk
        while len(waiting) >= unit_bytes:
            yield bytes(waiting[:unit_bytes])
            del waiting[:unit_bytes]
    if waiting:
        yield bytes(waiting)


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


__all__ = [
    "Geometry", "VersionWriter", "collect_garbage", "commit", "default_geometry", "new_version", "write_plain",
    "write_version",
]  # fmt: skip
