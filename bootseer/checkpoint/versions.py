"""Which version of a checkpoint is meant: a file, a folder, a striped version, or the newest whole one.

In: a store and a path in it. Out: `Pinned`: the version's files with all that a reader needs, and a digest by
which every node of a job can be sure to read the same. A save that is not whole is never chosen, whatever its name
or its markers say; who asks hears of each newer one why it was not.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Collection
from typing import NamedTuple

from bootseer import aio
from bootseer.checkpoint import manifest as stored
from bootseer.checkpoint.completeness import judge
from bootseer.checkpoint.direct import StoredFile
from bootseer.checkpoint.hub_cache import snapshot_of
from bootseer.checkpoint.manifest import MANIFEST_NAME, POINTER_NAME, Manifest
from bootseer.checkpoint.pinned import PLAIN, STRIPED, NoneComplete, Pinned, Wanted
from bootseer.checkpoint.plain_versions import (
    MOST_CANDIDATES,
    as_step,
    pin_file_or_folder,
    resolve_plain,
    take_snapshot,
    why_not_file,
)
from bootseer.checkpoint.save_rules import join
from bootseer.checkpoint.small_files import CALLS, read_range, read_small, where
from bootseer.counted import counted
from bootseer.errors import IntegrityError, NotFound, SourceChanged, StorageError
from bootseer.storage.protocol import Entry, Store

MOST_SHOWN = 8  # names in a message


class Found(NamedTuple):
    """A version in a folder, for listings and for what keeps the newest ones."""

    version: str
    folder: str  # in the store
    is_complete: bool
    mtime_s: float  # of its folder, 0.0 where unknown


async def resolve(
    store: Store,
    path: str = "",
    *,
    is_striped: bool = False,
    without: Collection[str] = (),
    on_damaged: Callable[[IntegrityError], object] | None = None,
    on_passed: Callable[[str], object] | None = None,
) -> Pinned:
    """The version that `path` means now: itself, or the newest whole one below it.

    Args:
        is_striped: a plain checkpoint is not asked for. One is NoneComplete then, and its files are not looked
            at: the folder may be one that holds all sorts of things.
        without: digests of versions that are not wanted; an older one is taken.
        on_damaged: is told of each damaged manifest, and an older version is taken.
        on_passed: is told of each save that is newer than what is taken, and why it is not: one line.
    Raises: NotFound if nothing is there; NoneComplete if there is something, but no whole checkpoint;
        SourceChanged if it is removed meanwhile; CheckpointError if it is too large to be one;
        IntegrityError for a file that is asked for itself and is not whole, and for a damaged manifest of the
        newest version, without `on_damaged`.
    """
    passed: list[str] = []

    def note(line: str) -> None:
        passed.append(line)
        if on_passed is not None:
            on_passed(line)

    wanted = Wanted(without, is_striped, on_damaged, note)
    own = _own_version(store, path)
    if own:
        return _only(store, path, await _load(store, path, own), wanted)
    entries = await _list(store, path)
    if entries is None:
        return _only(store, path, await _resolve_unlisted(store, path, is_striped), wanted)

    async def striped(folder: str, inner: list[Entry]) -> Pinned | None:
        return await _load_newest(store, folder, _version_names(inner), wanted)

    found = await striped(path, entries)
    snapshot = "" if found is not None else await snapshot_of(store, path, entries)
    if snapshot:
        return _only(store, path, await take_snapshot(store, path, snapshot, wanted), wanted)
    found = found or await resolve_plain(store, path, entries, wanted, striped)
    if found is not None:
        return found
    if not entries:
        raise NotFound(f"{where(store, path)}: is empty or does not exist")
    if without and not passed:
        raise NoneComplete(f"{where(store, path)}: has no other version than those that cannot be loaded")
    why = "; ".join(passed[:MOST_SHOWN]) or "no version with a manifest, no files of weights"
    raise NoneComplete(
        f"{where(store, path)}: has no complete checkpoint: {why}"
        f" ({counted(len(_version_names(entries)), 'unfinished version')}, {counted(len(entries), 'name')}:"
        f" {_some(entries)})"
    )


async def pin(store: Store, path: str, version: str, digest: str) -> Pinned:
    """The version that another node has found with `resolve` at the same path.

    Raises: SourceChanged if it is not the same any more.
    """
    if stored.is_version(version):
        folder = path if _own_version(store, path) == version else join(path, stored.folder_of(version))
        found = await _load(store, folder, version)
    elif version:
        if not stored.is_file_path(version):
            raise IntegrityError(f"{where(store, path)}: version {version[:80]!r} is no path below it")
        striped = stored.version_of(posixpath.basename(version))
        if striped:
            found = as_step(await _load(store, join(path, version), striped), posixpath.dirname(version))
        else:
            found = await pin_file_or_folder(store, join(path, version), version)
    else:
        try:
            found = await pin_file_or_folder(store, path, "")
        except NotFound:
            found = await resolve(store, path)
        if found.digest != digest:
            found = await resolve(store, path)  # it may be a part of the folder
    if found.digest != digest:
        raise SourceChanged(
            f"{where(store, path)}: is not the version {version or digest[:12]} that the job loads"
        )
    return found


async def list_versions(store: Store, path: str = "") -> list[Found]:
    """All striped versions in a folder, oldest first."""
    entries = [entry for entry in await _list(store, path) or [] if _is_version_folder(entry)]

    async def look(entry: Entry) -> Found:
        folder = join(path, entry.name)
        is_complete = await _has_manifest(store, folder)
        return Found(stored.version_of(entry.name), folder, is_complete, entry.mtime_s)

    return await aio.map_bounded(look, sorted(entries), width=CALLS)


async def list_names(store: Store, path: str = "") -> list[str]:
    """Names of all striped versions in a folder, complete or not, newest first."""
    return [stored.version_of(name) for name in _version_names(await _list(store, path) or [])]


async def newest_complete(store: Store, path: str = "") -> str:
    """The name of the newest complete striped version, "" if there is none."""
    for name in (await list_names(store, path))[:MOST_CANDIDATES]:
        if await _has_manifest(store, join(path, stored.folder_of(name))):
            return name
    return ""


async def read_manifest(store: Store, folder: str) -> tuple[Manifest, str]:
    """The manifest in a version's folder, and its digest."""
    path = join(folder, MANIFEST_NAME)
    data = await read_small(store, path, stored.MOST_MANIFEST_BYTES)
    return stored.decode(data, where(store, path)), stored.digest(data)


# ---- striped -------------------------------------------------------------------------------------------------


def _own_version(store: Store, path: str) -> str:
    """The version whose folder `path` is, "" if it is none."""
    return stored.version_of(posixpath.basename(path) or posixpath.basename(store.url.rstrip("/")))


def _is_version_folder(entry: Entry) -> bool:
    return entry.is_folder and bool(stored.version_of(entry.name))


def _version_names(entries: list[Entry]) -> list[str]:
    """Of folders, newest first."""
    return sorted((entry.name for entry in entries if _is_version_folder(entry)), reverse=True)


async def _has_manifest(store: Store, folder: str) -> bool:
    try:
        await store.stat(join(folder, MANIFEST_NAME))
    except NotFound:
        return False
    return True


async def _load_newest(store: Store, path: str, names: list[str], wanted: Wanted) -> Pinned | None:
    for name in names[:MOST_CANDIDATES]:
        try:
            found = await _load(store, join(path, name), stored.version_of(name))
        except NotFound:
            continue  # being written, or left by a save that did not finish
        except IntegrityError as error:
            wanted.pass_over(error)
            continue
        if not wanted.takes(found):
            continue
        why = await why_not_whole(store, found)
        if not why:
            return found
        wanted.on_passed(f"{name}: {why}")
    return None


async def why_not_whole(store: Store, pinned: Pinned) -> str:
    """Why the files of a version make no whole checkpoint, "" if they do, or are none of a known format.

    What was striped may have been half done before, which the sums of its units cannot know.
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
        verdict = await judge({name: file.layout.size for name, file in files.items()}, read, probes=0)
    except _DamagedError:
        return ""  # whoever loads it says which unit is wrong
    return verdict.why if verdict.has_weights else ""  # of other files nothing is known


class _DamagedError(Exception):
    """A stripe is not what the manifest says."""


def _only(store: Store, path: str, found: Pinned, wanted: Wanted) -> Pinned:
    """What is meant itself: nothing can take its place. Raises: NoneComplete."""
    if not wanted.takes(found):
        raise NoneComplete(f"{where(store, path)}: has no other version than {found.version or 'itself'}")
    return found


async def _load(store: Store, folder: str, version: str) -> Pinned:
    found, digest = await read_manifest(store, folder)
    if found.version != version:
        raise IntegrityError(f"{where(store, folder)}: its manifest is that of version {found.version}")
    files = tuple(
        StoredFile(file.path, file.layout, tuple(join(folder, name) for name in file.stripes), file.sums)
        for file in found.files
    )
    return Pinned(STRIPED, folder, version, digest, files, found.step)


async def _resolve_unlisted(store: Store, path: str, is_striped: bool) -> Pinned:
    """What cannot be listed: a file, or a folder with a pointer to its newest version."""
    try:
        pointer = await read_small(store, join(path, POINTER_NAME), 256)
    except NotFound:
        if is_striped:
            raise
        found = await pin_file_or_folder(store, path, "")
        why = await why_not_file(store, found)
        if why:
            raise IntegrityError(f"{where(store, path)}: is not whole: it {why}") from None
        return found
    version = pointer.decode("ascii", "replace").strip()
    if not stored.is_version(version):
        raise IntegrityError(f"{where(store, join(path, POINTER_NAME))}: names no version: {version[:80]!r}")
    return await _load(store, join(path, stored.folder_of(version)), version)


async def _list(store: Store, path: str) -> list[Entry] | None:
    """None where the store cannot list, or `path` is a file."""
    try:
        entries = await store.list(path)
    except NotFound:
        entries = []
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
    """A few names, for people."""
    names = sorted(entry.name for entry in entries)
    return ", ".join(names[:MOST_SHOWN]) + (", ..." if len(names) > MOST_SHOWN else "")


__all__ = [
    "PLAIN", "STRIPED", "Found", "NoneComplete", "Pinned", "list_names", "list_versions", "newest_complete", "pin",
    "read_manifest", "read_small", "resolve",
]  # fmt: skip
