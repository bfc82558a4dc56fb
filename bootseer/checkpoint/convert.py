"""From plain files to a striped version and back, between any two stores.

Bytes go through a few units of memory, many at once each way, and are checked on the way. What is written is
complete, or not there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple

from bootseer import aio
from bootseer.checkpoint.inputs import Input
from bootseer.checkpoint.opening import store_at
from bootseer.checkpoint.plain_writer import refuse_existing, write_plain
from bootseer.checkpoint.version_input import inputs_of
from bootseer.checkpoint.versions import Pinned, resolve
from bootseer.checkpoint.writer import Geometry, default_geometry, write_version
from bootseer.counted import counted
from bootseer.errors import CheckpointError, StorageError
from bootseer.storage import open_store
from bootseer.storage.paths import redact
from bootseer.storage.protocol import Store

LOOKS_AT_ONCE = 32
FILES_AT_ONCE = 4  # plain ones; each has parts of its own
_NONE: Mapping[str, object] = {}
Progress = Callable[[int], None]  # bytes written since the last call


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

    Raises: AlreadyExists, before anything is written, if one of them is there. After an error none of them is.
    """
    sources = [(f"{path}/{name}" if path else name, each) for name, each in inputs_of(source, pinned)]

    async def look(file: tuple[str, Input]) -> None:
        await refuse_existing(target, file[0])

    await aio.map_bounded(look, sources, width=LOOKS_AT_ONCE)
    done: list[str] = []

    async def write(file: tuple[str, Input]) -> None:
        await write_plain(target, *file, progress=progress)
        done.append(file[0])

    try:
        await aio.map_bounded(write, sources, width=FILES_AT_ONCE)
    except BaseException:
        for name in done:
            try:
                await target.delete(name)
            except StorageError:
                continue
        raise
    return [name for name, _ in sources]


# ---- by URL --------------------------------------------------------------------------------------------------


class Copied(NamedTuple):
    """What a copy has written."""

    files: int
    size: int  # bytes
    version: str  # "" for plain files
    fewer: int = 0  # files that have fewer stripes than were asked for: they have no more units


def stripe(
    source: str,
    target: str,
    *,
    unit_bytes: int | None = None,
    stripes: int | None = None,
    step: int | None = None,
    keep: int | None = None,
    options: Mapping[str, object] = _NONE,
    progress: Callable[[int, int], None] | None = None,
    on_passed: Callable[[str], object] | None = None,
) -> Copied:
    """The newest whole version of `source` (or that file or folder) as a new striped version of `target`.

    Args: options: of the target's store; progress: is told bytes done and bytes in all; on_passed: of each newer
        save why it is not taken.
    Raises: IntegrityError or NoneComplete, before anything is written, for what is not whole.
    """

    async def run() -> Copied:
        async with opened(source) as (store, path), opened_folder(target, options) as goal:
            pinned = await resolve(store, path, on_passed=on_passed)
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
            fewer = sum(len(file.stripes) < (stripes or 1) for file in written.files)
            return Copied(len(written.files), written.size, written.version, fewer)

    return aio.run_sync(run())


def unstripe(
    source: str,
    target: str,
    *,
    options: Mapping[str, object] = _NONE,
    progress: Callable[[int, int], None] | None = None,
    on_passed: Callable[[str], object] | None = None,
) -> Copied:
    """The newest whole version of `source` as plain files in the folder `target`.

    Args: as `stripe`.
    """

    async def run() -> Copied:
        async with opened(source) as (store, path), opened_folder(target, options) as goal:
            pinned = await resolve(store, path, on_passed=on_passed)
            names = await unstripe_version(store, pinned, goal, "", progress=summing(progress, pinned.size))
            return Copied(len(names), pinned.size, "")

    return aio.run_sync(run())


def copy_plain(source: str, target: str, *, progress: Callable[[int, int], None] | None = None) -> Copied:
    """One file as one plain file, in parts written at once where the store can join them."""

    async def run() -> Copied:
        async with opened(source) as (store, path), opened(target) as (goal, name):
            files = inputs_of(store, await resolve(store, path))
            if len(files) != 1:
                raise CheckpointError(
                    f"{redact(source)}: has {counted(len(files), 'file')}: name one, or take `unstripe`"
                )
            [(_, file)] = files
            await write_plain(goal, name, file, progress=summing(progress, file.size))
            return Copied(1, file.size, "")

    return aio.run_sync(run())


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[tuple[Store, str]]:
    """The store of a URL's folder and the last name in it (a store's root and ""), while the block lasts."""
    store, name = store_at(url)
    try:
        yield store, name
    finally:
        await store.aclose()


@asynccontextmanager
async def opened_folder(url: str, options: Mapping[str, object] = _NONE) -> AsyncIterator[Store]:
    """The store whose root a URL is."""
    store = open_store(url, options=options)
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
