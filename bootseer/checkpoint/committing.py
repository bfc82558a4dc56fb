"""The step that makes a version visible, and what goes away afterwards: old versions, leftovers of crashed saves.

In: a store, the folder of a checkpoint, files whose stripes are written. Out: a manifest, published last and in
one step. docs/formats.md says what a crash before, in and after it leaves.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence

from bootseer import __version__
from bootseer.checkpoint import manifest as stored
from bootseer.checkpoint.manifest import MANIFEST_NAME, POINTER_NAME, Manifest, StripedFile
from bootseer.checkpoint.versions import (
    Found,
    Pinned,
    list_names,
    list_versions,
    newest_complete,
    read_small,
    resolve,
)
from bootseer.errors import AlreadyExists, CheckpointError, IntegrityError, NotFound, StorageError, Truncated
from bootseer.storage.protocol import Store
from bootseer.storage.staging import Staged, staged

TRIES = 4  # of publishing a small file
ABANDONED_AFTER_S = 86_400.0  # nothing was written to a version without a manifest for so long
POINTER_TURNS = 8  # writers that commit at the same moment and overtake each other


async def new_version(store: Store, path: str = "") -> str:
    """A name that sorts after all versions there, whatever the clocks of their writers said."""
    newest = 0
    try:
        for name in await list_names(store, path):
            newest = max(newest, int(name[:20]))
    except StorageError as error:
        if error.retryable:
            raise
    created_ns = max(time.time_ns(), newest + 1)
    return f"{created_ns:020d}-{uuid.uuid4().hex[:12]}"


async def commit(
    store: Store, path: str, version: str, files: Sequence[StripedFile], *, step: int | None = None
) -> Pinned:
    """Makes a version visible: from the moment that its manifest is there it is the newest one.

    Raises: AlreadyExists if somebody else has committed a version of this name; Truncated and NotFound, before it
        is visible, if stripes are not what they should be. After an error that is `retryable` it may be visible or
        become so a little later: its files must stay.
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
    data = stored.encode(manifest)
    await check_stripes(store, folder, files)

    # Stored at the same time, as that may take long; published one after the other.
    small = [(_join(folder, MANIFEST_NAME), data), (_join(path, POINTER_NAME), _pointer_to(version))]
    async with staged(store, small, folder=folder) as (manifest_file, pointer):
        await _publish_manifest(store, _join(folder, MANIFEST_NAME), data, manifest_file)
        try:
            await _again(lambda: _point_to_newest(store, path, version, pointer))
        except StorageError as error:
            raise CheckpointError(
                f"{store.url}/{folder}: is written and complete, but {POINTER_NAME}, by which readers that cannot "
                f"list find it, is not: {error}"
            ) from error
    return await resolve(store, folder)


async def check_stripes(store: Store, folder: str, files: Sequence[StripedFile]) -> None:
    """Whether all stripes are there with their sizes: a collection may have taken those of a stalled save."""
    expected = {
        name: file.layout.stripe_size(number) for file in files for number, name in enumerate(file.stripes)
    }
    if not expected:
        return
    try:
        sizes = {entry.name: entry.size for entry in await store.list(folder)}
    except NotFound:
        sizes = {}
    for name, size in expected.items():
        if name not in sizes:
            raise NotFound(f"{store.url}/{folder}/{name}: is gone before its version was complete")
        if sizes[name] != size:
            raise Truncated(f"{store.url}/{folder}/{name}: has {sizes[name]} bytes; {size} were written")


async def _publish_manifest(store: Store, name: str, data: bytes, file: Staged) -> None:
    """Knows its own manifest when an earlier try got through although its answer did not."""

    async def publish() -> None:
        try:
            await file.publish(if_absent=True)
        except AlreadyExists:
            if await read_small(store, name, stored.MOST_MANIFEST_BYTES) != data:
                raise

    await _again(publish)


async def _point_to_newest(store: Store, path: str, version: str, file: Staged) -> None:
    """LATEST, for stores that cannot list: names this version, as `file` does, or a newer one when it returns."""
    pointer = _join(path, POINTER_NAME)
    for _ in range(POINTER_TURNS):
        try:
            named = (await read_small(store, pointer, 256)).decode("ascii", "replace").strip()
        except (NotFound, IntegrityError):
            named = ""
        if not stored.is_version(named) or named < version:
            await file.publish()
        # Another writer may have published a newer name before ours, after we looked.
        newest = await newest_complete(store, path)
        if newest <= version:
            return
        version, file = newest, Staged(store, pointer, _pointer_to(newest))


def _pointer_to(version: str) -> bytes:
    return version.encode() + b"\n"


async def _again(call: Callable[[], Awaitable[None]]) -> None:
    for attempt in range(TRIES):
        try:
            await call()
            return
        except StorageError as error:
            if not error.retryable or attempt + 1 == TRIES:
                raise
        await asyncio.sleep(random.random() * 0.2 * 2**attempt)  # noqa: S311  no secret


async def collect_garbage(store: Store, path: str, *, keep: int, now_s: float | None = None) -> list[str]:
    """Takes away all complete versions but the newest `keep`, and unfinished ones that nobody has written to for a
    day; returns them.

    A version's manifest goes first: no reader starts on one that is being taken away.
    """
    if keep < 1:
        raise CheckpointError(f"keep {keep}: at least one version has to stay")
    now_s = time.time() if now_s is None else now_s
    versions = await list_versions(store, path)
    doomed = [found for found in versions if found.is_complete][:-keep]
    for found in versions:
        if not found.is_complete and now_s - await _touched_s(store, found) > ABANDONED_AFTER_S:
            doomed.append(found)
    for found in doomed:
        if found.is_complete:
            await store.delete(_join(found.folder, MANIFEST_NAME))
        await store.delete(found.folder)
    return [found.version for found in doomed]


async def _touched_s(store: Store, found: Found) -> float:
    """When something was written to a version last; its writer's clock, which may be wrong, counts if need be."""
    try:
        entries = await store.list(found.folder)
    except NotFound:
        entries = []
    known_s = [each for each in (found.mtime_s, *(entry.mtime_s for entry in entries)) if each]
    return max(known_s, default=int(found.version[:20]) / 1e9)


async def discard(store: Store, path: str, version: str) -> None:
    """Takes away a version that was not committed; nobody has seen it. What cannot go now, a collection finds."""
    folder = _join(path, stored.folder_of(version))
    try:
        try:
            await store.stat(_join(folder, MANIFEST_NAME))
        except NotFound:
            await store.delete(folder)
    except StorageError:
        pass


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name
