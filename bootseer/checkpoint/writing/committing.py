"""The step that makes a version visible, and the removal of old versions and of leftovers of crashed saves.

In: a store, the directory of a checkpoint, files whose stripes are written. Out: a manifest, published last and in
one step. docs/reference/formats.md describes the state after a crash before, in and after that step.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Sequence

from bootseer import __version__, aio
from bootseer.checkpoint.format import manifest as stored
from bootseer.checkpoint.format.manifest import MANIFEST_NAME, POINTER_NAME, Manifest, StripedFile
from bootseer.checkpoint.versions.resolve import (
    ListedVersion,
    Pinned,
    list_names,
    list_versions,
    newest_complete,
    read_small,
    resolve,
)
from bootseer.errors import (
    AlreadyExists,
    BootseerError,
    CheckpointError,
    IntegrityError,
    NotFound,
    StorageError,
    Truncated,
)
from bootseer.storage.paths import join
from bootseer.storage.protocol import Store
from bootseer.storage.small_files import list_if_there
from bootseer.storage.staging import Staged, staged
from bootseer.tuning import current

PUBLISHING = aio.RetryPolicy(tries=4, base_s=0.2, max_s=2.0, budget_s=60.0)  # of a small file
POINTER_TURNS = 8  # retries while other writers commit at the same moment


async def new_version(store: Store, path: str = "") -> str:
    """Return a name that sorts after all existing versions, independent of their writers' clocks."""
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
    """Make a version visible: once its manifest is published, it is the newest one.

    Raises: AlreadyExists if another writer has committed a version of this name; Truncated and NotFound, before it
        is visible, if stripes are missing or have wrong sizes. After an error that is `retryable` it may be
        visible or become so a little later: its files must stay.
    """
    directory = join(path, stored.directory_of(version))
    manifest = Manifest(
        format=stored.FORMAT,
        version=version,
        created_ns=int(version[:20]),
        step=step,
        writer=f"bootseer {__version__}",
        files=sorted(files, key=lambda file: file.path),
    )
    data = stored.encode(manifest)
    await check_stripes(store, directory, files)

    # Stored at the same time, as that may take long; published one after the other.
    small = [(join(directory, MANIFEST_NAME), data), (join(path, POINTER_NAME), _pointer_to(version))]
    async with staged(store, small, folder=directory) as (manifest_file, pointer):
        await _publish_manifest(store, join(directory, MANIFEST_NAME), data, manifest_file)
        try:
            await aio.retry(PUBLISHING, lambda _attempt: _point_to_newest(store, path, version, pointer))
        except StorageError as error:
            raise CheckpointError(
                f"{store.url}/{directory}: is complete, but readers that cannot list directories do not find it: "
                f"cannot write {POINTER_NAME}: {error}"
            ) from error
    return await resolve(store, directory)


async def check_stripes(store: Store, directory: str, files: Sequence[StripedFile]) -> None:
    """Verify that all stripes exist with their sizes: garbage collection may have deleted stalled ones."""
    expected = {
        name: file.layout.stripe_size(number) for file in files for number, name in enumerate(file.stripes)
    }
    if not expected:
        return
    sizes = {entry.name: entry.size for entry in await list_if_there(store, directory)}
    for name, size in expected.items():
        if name not in sizes:
            raise NotFound(f"{store.url}/{directory}/{name}: was deleted before its version was complete")
        if sizes[name] != size:
            raise Truncated(f"{store.url}/{directory}/{name}: has {sizes[name]} bytes; {size} were written")


async def _publish_manifest(store: Store, name: str, data: bytes, file: Staged) -> None:
    """Publish the manifest; accept an equal one if an earlier try succeeded although its answer was lost."""

    async def publish(_attempt: int) -> None:
        try:
            await file.publish(if_absent=True)
        except AlreadyExists:
            if await read_small(store, name, stored.MAX_MANIFEST_BYTES) != data:
                raise

    await aio.retry(PUBLISHING, publish)


async def _point_to_newest(store: Store, path: str, version: str, file: Staged) -> None:
    """Make LATEST, for stores that cannot list, name this version, as `file` does, or a newer one."""
    pointer = join(path, POINTER_NAME)
    for _ in range(POINTER_TURNS):
        try:
            named = (await read_small(store, pointer, 256)).decode("ascii", "replace").strip()
        except (NotFound, IntegrityError):
            named = ""
        if not stored.is_version(named) or named < version:
            await file.publish()
        # Another writer may have published a newer name before this one, after it was read.
        newest = await newest_complete(store, path)
        if newest <= version:
            return
        version, file = newest, Staged(store, pointer, _pointer_to(newest))


def _pointer_to(version: str) -> bytes:
    return version.encode() + b"\n"


async def collect_garbage(store: Store, path: str, *, keep: int, now_s: float | None = None) -> list[str]:
    """Delete all complete versions but the newest `keep`, and unfinished ones that were not written to for a day.

    Returns the deleted versions. A version's manifest goes first: no reader starts on a version being deleted.
    """
    check_keep(keep)
    now_s = time.time() if now_s is None else now_s
    unfinished_s = current().checkpoint.unfinished_s  # after the last write to a version without a manifest
    versions = await list_versions(store, path)
    doomed = [found for found in versions if found.is_complete][:-keep]
    for found in versions:
        if not found.is_complete and now_s - await _touched_s(store, found) > unfinished_s:
            doomed.append(found)
    for found in doomed:
        if found.is_complete:
            await store.delete(join(found.folder, MANIFEST_NAME))
        await store.delete(found.folder)
    return [found.version for found in doomed]


def check_keep(keep: int) -> None:
    """Raise CheckpointError unless at least one version is kept. Savers call it before they write."""
    if keep < 1:
        raise CheckpointError(f"keep {keep}: at least one version must be kept")


async def delete_old(store: Store, path: str, *, keep: int) -> None:
    """Collect garbage after a commit. A failure is only logged: the save is complete, and the next one retries."""
    try:
        await collect_garbage(store, path, keep=keep)
    except BootseerError as error:
        line = f"bootseer: warning: old checkpoint versions not deleted: {error}; the next save retries"
        print(line, file=sys.stderr, flush=True)


async def _touched_s(store: Store, found: ListedVersion) -> float:
    """Return the time of the last write to a version; without any, its writer's clock, which may be wrong."""
    entries = await list_if_there(store, found.folder)
    known_s = [each for each in (found.mtime_s, *(entry.mtime_s for entry in entries)) if each]
    return max(known_s, default=int(found.version[:20]) / 1e9)


async def discard(store: Store, path: str, version: str) -> None:
    """Delete a version that was not committed. Garbage collection deletes what cannot be deleted now."""
    directory = join(path, stored.directory_of(version))
    try:
        try:
            await store.stat(join(directory, MANIFEST_NAME))
        except NotFound:
            await store.delete(directory)
    except StorageError:
        pass
