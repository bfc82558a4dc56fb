"""Conversion of plain files to a striped version and back, between any two stores.

Bytes go through a few units of memory, with many reads and writes at once, and are verified in transit. The
output is complete or absent.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple

from bootseer import aio
from bootseer.checkpoint.io.inputs import Input
from bootseer.checkpoint.opening import store_at
from bootseer.checkpoint.versions.resolve import Pinned, resolve
from bootseer.checkpoint.versions.version_input import inputs_of
from bootseer.checkpoint.writing.plain_writer import refuse_existing, write_plain
from bootseer.checkpoint.writing.writer import Geometry, default_geometry, write_version
from bootseer.errors import StorageError
from bootseer.storage import open_store
from bootseer.storage.protocol import Store

STATS_AT_ONCE = 32
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
    """Write all files of a version as a new striped version of the checkpoint `path`."""
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
    """Write all files of a version as plain files below `path`; return their paths.

    Raises: AlreadyExists, before anything is written, if one of them exists. After an error none of them exists.
    """
    sources = [(f"{path}/{name}" if path else name, each) for name, each in inputs_of(source, pinned)]

    async def look(file: tuple[str, Input]) -> None:
        await refuse_existing(target, file[0])

    await aio.map_bounded(look, sources, width=STATS_AT_ONCE)
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


class ConvertResult(NamedTuple):
    files: int
    size: int  # bytes
    version: str  # "" for plain files
    fewer: int = 0  # files with fewer stripes than requested: they have no more units


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
) -> ConvertResult:
    """Write the newest complete version of `source` (or that file) as a new striped version of `target`.

    Args: options: of the target's store; progress: called with bytes done and bytes in total; on_passed: called
    for
        each newer save with the reason why it is not taken.
    Raises: IntegrityError or NoCompleteCheckpoint, before anything is written, if the source is incomplete.
    """

    async def run() -> ConvertResult:
        async with opened(source) as (store, path), opened_directory(target, options) as goal:
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
            return ConvertResult(len(written.files), written.size, written.version, fewer)

    return aio.run_sync(run())


def unstripe(
    source: str,
    target: str,
    *,
    options: Mapping[str, object] = _NONE,
    progress: Callable[[int, int], None] | None = None,
    on_passed: Callable[[str], object] | None = None,
) -> ConvertResult:
    """Write the newest complete version of `source` as plain files in the directory `target`.

    Args: as `stripe`.
    """

    async def run() -> ConvertResult:
        async with opened(source) as (store, path), opened_directory(target, options) as goal:
            pinned = await resolve(store, path, on_passed=on_passed)
            names = await unstripe_version(store, pinned, goal, "", progress=summing(progress, pinned.size))
            return ConvertResult(len(names), pinned.size, "")

    return aio.run_sync(run())


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[tuple[Store, str]]:
    """Yield the store of a URL's directory and the last name in it (for a store's root: "")."""
    store, name = store_at(url)
    try:
        yield store, name
    finally:
        await store.aclose()


@asynccontextmanager
async def opened_directory(url: str, options: Mapping[str, object] = _NONE) -> AsyncIterator[Store]:
    """Yield the store whose root a URL is."""
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
