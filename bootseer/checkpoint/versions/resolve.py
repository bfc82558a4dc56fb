"""Which version of a checkpoint a path means: a file, a directory, a striped version, or the newest complete one.

In: a store and a path in it. Out: `Pinned`: the version's files with all that a reader needs, and a digest by
which all nodes of a job verify that they read the same. An incomplete save is never chosen, even if its name or
its markers suggest it. Callers get the reason for each newer save that was not chosen.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from bootseer import aio
from bootseer.checkpoint.format import manifest as stored
from bootseer.checkpoint.format.manifest import MANIFEST_NAME, POINTER_NAME, Manifest
from bootseer.checkpoint.io.direct import StoredFile
from bootseer.checkpoint.versions.completeness import inspect_save
from bootseer.checkpoint.versions.pinned import PLAIN, STRIPED, NoCompleteCheckpoint, Pinned, VersionFilter
from bootseer.checkpoint.versions.plain import (
    MAX_CANDIDATES,
    as_step,
    find_file_fault,
    pin_file_or_directory,
    resolve_plain,
    take_snapshot,
)
from bootseer.checkpoint.versions.save_rules import join
from bootseer.counted import counted
from bootseer.errors import IntegrityError, NotFound, SourceChanged, StorageError
from bootseer.storage.protocol import Entry, Store
from bootseer.storage.small_files import CONCURRENT_READS, list_if_there, read_range, read_small, url_of

MAX_SHOWN = 8  # names in a message
SNAPSHOTS, BLOBS, REFS = "snapshots", "blobs", "refs"
MAIN = "main"


class ListedVersion(NamedTuple):
    """A version in a directory, for listings and for retention."""

    version: str
    folder: str  # in the store
    is_complete: bool
    mtime_s: float  # of its directory, 0.0 if unknown


async def resolve(
    store: Store,
    path: str = "",
    *,
    is_striped: bool = False,
    without: Collection[str] = (),
    on_damaged: Callable[[IntegrityError], object] | None = None,
    on_passed: Callable[[str], object] | None = None,
) -> Pinned:
    """Return the version that `path` means now: itself, or the newest complete one below it.

    Args:
        is_striped: a plain checkpoint is not requested. It raises NoCompleteCheckpoint then, and its files are not
        inspected:
            the directory may hold any files.
        without: digests of unacceptable versions; an older one is taken.
        on_damaged: called for each damaged manifest; an older version is taken.
        on_passed: called for each save that is newer than the one taken, with one line: why it is not taken.
    Raises: NotFound if nothing exists; NoCompleteCheckpoint if files exist, but no complete checkpoint;
        SourceChanged if it is removed meanwhile; CheckpointError if it is too large for a checkpoint;
        IntegrityError for a file that is requested itself and is incomplete, and for a damaged manifest of the
        newest version, without `on_damaged`.
    """
    passed: list[str] = []

    def note(line: str) -> None:
        passed.append(line)
        if on_passed is not None:
            on_passed(line)

    wanted = VersionFilter(without, is_striped, on_damaged, note)
    own = _own_version(store, path)
    if own:
        return _only(store, path, await _load(store, path, own), wanted)
    entries = await _list(store, path)
    if entries is None:
        return _only(store, path, await _resolve_unlisted(store, path, is_striped), wanted)

    async def striped(directory: str, inner: list[Entry]) -> Pinned | None:
        return await _load_newest(store, directory, _version_names(inner), wanted)

    found = await striped(path, entries)
    snapshot = "" if found is not None else await snapshot_of(store, path, entries)
    if snapshot:
        return _only(store, path, await take_snapshot(store, path, snapshot, wanted), wanted)
    found = found or await resolve_plain(store, path, entries, wanted, striped)
    if found is not None:
        return found
    if not entries:
        raise NotFound(f"{url_of(store, path)}: is empty or does not exist")
    if without and not passed:
        raise NoCompleteCheckpoint(f"{url_of(store, path)}: has no other version than those that cannot be loaded")
    why = "; ".join(passed[:MAX_SHOWN]) or "no version with a manifest, no files of weights"
    raise NoCompleteCheckpoint(
        f"{url_of(store, path)}: has no complete checkpoint: {why}"
        f" ({counted(len(_version_names(entries)), 'unfinished version')}, {counted(len(entries), 'name')}:"
        f" {_some(entries)})"
    )


async def pin(store: Store, path: str, version: str, digest: str) -> Pinned:
    """Return the version that another node has found with `resolve` at the same path.

    Raises: SourceChanged if it is not the same any more.
    """
    if stored.is_version(version):
        directory = path if _own_version(store, path) == version else join(path, stored.directory_of(version))
        found = await _load(store, directory, version)
    elif version:
        if not stored.is_file_path(version):
            raise IntegrityError(f"{url_of(store, path)}: version {version[:80]!r} is not a path below it")
        striped = stored.version_of(posixpath.basename(version))
        if striped:
            found = as_step(await _load(store, join(path, version), striped), posixpath.dirname(version))
        else:
            found = await pin_file_or_directory(store, join(path, version), version)
    else:
        try:
            found = await pin_file_or_directory(store, path, "")
        except NotFound:
            found = await resolve(store, path)
        if found.digest != digest:
            found = await resolve(store, path)  # it may be a part of the directory
    if found.digest != digest:
        raise SourceChanged(
            f"{url_of(store, path)}: is not the version {version or digest[:12]} that the job loads"
        )
    return found


async def list_versions(store: Store, path: str = "") -> list[ListedVersion]:
    """Return all striped versions in a directory, oldest first."""
    entries = [entry for entry in await _list(store, path) or [] if _is_version_directory(entry)]

    async def look(entry: Entry) -> ListedVersion:
        directory = join(path, entry.name)
        is_complete = await _has_manifest(store, directory)
        return ListedVersion(stored.version_of(entry.name), directory, is_complete, entry.mtime_s)

    return await aio.map_bounded(look, sorted(entries), width=CONCURRENT_READS)


async def list_names(store: Store, path: str = "") -> list[str]:
    """Return the names of all striped versions in a directory, complete or not, newest first."""
    return [stored.version_of(name) for name in _version_names(await _list(store, path) or [])]


async def newest_complete(store: Store, path: str = "") -> str:
    """Return the name of the newest complete striped version, "" if there is none."""
    for name in (await list_names(store, path))[:MAX_CANDIDATES]:
        if await _has_manifest(store, join(path, stored.directory_of(name))):
            return name
    return ""


async def read_manifest(store: Store, directory: str) -> tuple[Manifest, str]:
    """Return the manifest in a version's directory, and its digest."""
    path = join(directory, MANIFEST_NAME)
    data = await read_small(store, path, stored.MAX_MANIFEST_BYTES)
    return stored.decode(data, url_of(store, path)), stored.digest(data)


# ---- striped -------------------------------------------------------------------------------------------------


def _own_version(store: Store, path: str) -> str:
    """Return the version whose directory `path` is, "" if it is not one."""
    return stored.version_of(posixpath.basename(path) or posixpath.basename(store.url.rstrip("/")))


def _is_version_directory(entry: Entry) -> bool:
    return entry.is_folder and bool(stored.version_of(entry.name))


def _version_names(entries: list[Entry]) -> list[str]:
    """Return the names of version directories, newest first."""
    return sorted((entry.name for entry in entries if _is_version_directory(entry)), reverse=True)


async def _has_manifest(store: Store, directory: str) -> bool:
    try:
        await store.stat(join(directory, MANIFEST_NAME))
    except NotFound:
        return False
    return True


async def _load_newest(store: Store, path: str, names: list[str], wanted: VersionFilter) -> Pinned | None:
    for name in names[:MAX_CANDIDATES]:
        try:
            found = await _load(store, join(path, name), stored.version_of(name))
        except NotFound:
            continue  # being written, or left by an unfinished save
        except IntegrityError as error:
            wanted.pass_over(error)
            continue
        if not wanted.takes(found):
            continue
        why = await find_fault(store, found)
        if not why:
            return found
        wanted.on_passed(f"{name}: {why}")
    return None


async def find_fault(store: Store, pinned: Pinned) -> str:
    """Return why a version's files are incomplete, "" if they are complete or have no known format.

    Files may have been incomplete before they were striped, which the checksums of units cannot show.
    """
    files = {file.path: file for file in pinned.files}

    async def read(path: str, offset: int, length: int) -> bytes:
        data, done, file = memoryview(bytearray(length)), 0, files[path]
        for piece in file.layout.pieces(offset, length):
            target = data[done : done + piece.length]
            try:
                await read_range(store, file.stripes[piece.stripe], piece.stripe_offset, target)
            except (NotFound, IntegrityError) as error:
                raise _DamagedError from error
            done += piece.length
        return bytes(data)

    try:
        verdict = await inspect_save({name: file.layout.size for name, file in files.items()}, read, probes=0)
    except _DamagedError:
        return ""  # the load reports the damaged unit
    return verdict.why if verdict.has_weights else ""  # other files are not verified


class _DamagedError(Exception):
    """A stripe does not match the manifest."""


def _only(store: Store, path: str, found: Pinned, wanted: VersionFilter) -> Pinned:
    """Return the requested version itself, without alternatives. Raises: NoCompleteCheckpoint."""
    if not wanted.takes(found):
        raise NoCompleteCheckpoint(f"{url_of(store, path)}: has no other version than {found.version or 'itself'}")
    return found


async def _load(store: Store, directory: str, version: str) -> Pinned:
    found, digest = await read_manifest(store, directory)
    if found.version != version:
        raise IntegrityError(f"{url_of(store, directory)}: its manifest is that of version {found.version}")
    files = tuple(
        StoredFile(file.path, file.layout, tuple(join(directory, name) for name in file.stripes), file.sums)
        for file in found.files
    )
    return Pinned(STRIPED, directory, version, digest, files, found.step)


async def _resolve_unlisted(store: Store, path: str, is_striped: bool) -> Pinned:
    """Resolve a path that cannot be listed: a file, or a directory with a pointer to its newest version."""
    try:
        pointer = await read_small(store, join(path, POINTER_NAME), 256)
    except NotFound:
        if is_striped:
            raise
        found = await pin_file_or_directory(store, path, "")
        why = await find_file_fault(store, found)
        if why:
            raise IntegrityError(f"{url_of(store, path)}: is incomplete: it {why}") from None
        return found
    version = pointer.decode("ascii", "replace").strip()
    if not stored.is_version(version):
        raise IntegrityError(f"{url_of(store, join(path, POINTER_NAME))}: names no version: {version[:80]!r}")
    return await _load(store, join(path, stored.directory_of(version)), version)


async def _list(store: Store, path: str) -> list[Entry] | None:
    """Return the entries; None if the store cannot list, or `path` is a file."""
    try:
        entries = await list_if_there(store, path)
    except StorageError as error:
        if error.retryable:
            raise
        return None
    if entries or not path:
        return entries
    try:
        await store.stat(path)
    except NotFound:
        return []
    return None


def _some(entries: list[Entry]) -> str:
    """Return a few names, for messages."""
    names = sorted(entry.name for entry in entries)
    return ", ".join(names[:MAX_SHOWN]) + (", ..." if len(names) > MAX_SHOWN else "")


__all__ = [
    "PLAIN", "STRIPED", "ListedVersion", "NoCompleteCheckpoint", "Pinned", "list_names", "list_versions",
    "newest_complete", "pin",
    "read_manifest", "read_small", "resolve",
]  # fmt: skip


async def snapshot_of(store: Store, path: str, entries: Sequence[Entry]) -> str:
    """Return the snapshot of `main`, otherwise the newest one, relative to `path`; "" if it is no such cache."""
    if not {SNAPSHOTS, BLOBS} <= {entry.name for entry in entries if entry.is_folder}:
        return ""
    try:
        found = await store.list(join(path, SNAPSHOTS))
    except StorageError:
        return ""
    directories = sorted((entry.mtime_s, entry.name) for entry in found if entry.is_folder)
    try:
        revision = (await read_small(store, join(path, f"{REFS}/{MAIN}"), 256)).decode("ascii", "replace").strip()
    except StorageError:
        revision = ""
    names = [name for _, name in directories]
    if not names:
        return ""
    return f"{SNAPSHOTS}/{revision if revision in names else names[-1]}"
