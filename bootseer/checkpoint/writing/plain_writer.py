"""Writes one ordinary file that every tool can read: in parallel parts, which a store that can do so joins.

In: an input and a store. Out: the complete file under its name, or nothing. If a store cannot join files without
copying them, the file is written as one stream.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from functools import partial

from bootseer import aio
from bootseer.checkpoint.io.inputs import Input, PartInput
from bootseer.checkpoint.io.memory import allocate
from bootseer.checkpoint.versions.attempts import write_retrying
from bootseer.errors import AlreadyExists, NotFound, StorageError, Truncated
from bootseer.storage.protocol import Store, StoreWriter

STEP_BYTES = 16 << 20  # read and written at a time
PART_BYTES = 64 << 20  # at least
PARTS = 8


async def write_plain(
    store: Store,
    path: str,
    source: Input,
    *,
    parts: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write a file. Args: parts: maximum number at once; progress: called with bytes written since the last call.

    Raises: AlreadyExists, before anything is written, if the name is taken.
    """
    await refuse_existing(store, path)
    note = progress or (lambda _: None)
    count = min(parts or PARTS, max(1, source.size // PART_BYTES)) if store.features.concatenates else 1
    if count == 1:
        await _write(store, path, source, None, note)
        return
    length = -(-source.size // count)
    length += -length % STEP_BYTES  # so that no unit of a striped source is in two parts
    directory, _, name = path.rpartition("/")
    mark = uuid.uuid4().hex
    numbers = range(-(-source.size // length))
    written: list[str] = []

    async def write(number: int) -> str:
        part = PartInput(source, number * length, min(length, source.size - number * length))

        async def attempt(name: str) -> None:
            await _write(store, name, part, number, note)
            written.append(name)

        first = f".{name}.{mark}.{number:03d}"
        return await write_retrying(f"{directory}/{first}" if directory else first, attempt)

    try:
        await store.concat(path, await aio.map_bounded(write, numbers, width=len(numbers)))
    except BaseException:
        for each in written:
            try:
                await store.delete(each)
            except StorageError:
                continue
        raise


async def refuse_existing(store: Store, path: str) -> None:
    """Raises: AlreadyExists if the file exists."""
    try:
        await store.stat(path)
    except NotFound:
        return
    raise AlreadyExists(f"{store.url}/{path}: already exists; nothing was written")


async def _write(
    store: Store, path: str, source: Input, placement: int | None, note: Callable[[int], None]
) -> None:
    noted = 0

    def count(more: int) -> None:
        nonlocal noted
        noted += more
        note(more)

    try:
        async with store.create(path, size=source.size, placement=placement) as writer:
            await _copy(source, writer, count)
        await _check_size(store, path, source.size)
    except BaseException:
        note(-noted)
        raise


async def _check_size(store: Store, path: str, size: int) -> None:
    """Delete the file just written if its size is wrong."""
    found = await store.stat(path)
    if found.size != size:
        await store.delete(path)
        raise Truncated(f"{store.url}/{path}: has {found.size} bytes; {size} were written")


async def _copy(source: Input, writer: StoreWriter, note: Callable[[int], None]) -> None:
    """Copy a file; read the next bytes while some are written."""
    size = min(STEP_BYTES, source.size)
    offsets = range(0, source.size, size or 1)
    views = [allocate(size, "a file to write") for _ in offsets[:2]]

    def view_of(index: int) -> memoryview:
        return views[index % 2][: min(size, source.size - offsets[index])]

    async def read(index: int) -> None:
        await source.read_into(offsets[index], view_of(index))

    async def write(index: int) -> None:
        await writer.write(view_of(index))
        note(len(view_of(index)))

    if source.size:
        await read(0)
    for index in range(len(offsets)):
        steps = [partial(write, index)]
        if index + 1 < len(offsets):
            steps.append(partial(read, index + 1))
        await aio.map_bounded(lambda step: step(), steps, width=2)
