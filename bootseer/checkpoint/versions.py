"""Which version of a checkpoint is meant: a file, a folder, a striped version, or the newest complete one.

In: a store and a path in it. Out: `Pinned`: the version's files with all that a reader needs, and a digest by
which every node of a job can be sure to read the same. A save that is not complete is never chosen.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Collection
from typing import NamedTuple

from bootseer import aio
from bootseer.checkpoint import manifest as stored
from bootseer.checkpoint.completeness import (
    is_unfinished,
    judge,
    judge_files,
    judge_folders,
    step_folders,
    step_of,
)
from bootseer.checkpoint.direct import StoredFile, plain_file
from bootseer.checkpoint.hub_cache import snapshot_of
from bootseer.checkpoint.local_source import digest_of
from bootseer.checkpoint.manifest import MANIFEST_NAME, POINTER_NAME, Manifest
from bootseer.checkpoint.small_files import CALLS, read_small, where
from bootseer.errors import CheckpointError, IntegrityError, NotFound, SourceChanged, StorageError
from bootseer.storage.protocol import Entry, Stat, Store

STRIPED, PLAIN = "striped", "plain"
MOST_PLAIN_FILES = 200_000
MOST_DEPTH = 8  # of folders in a plain checkpoint
MOST_CANDIDATES = 64  # incomplete ones that are looked at before it is given up
MOST_SHOWN = 8  # names in a message


class Pinned(NamedTuple):
    """One complete version. Stripe paths of `files` are relative to the store's root."""

    kind: str  # STRIPED or PLAIN
    folder: str  # in the store: of the version, of the plain checkpoint, or above a single file
    # Of a striped one its version; of what lies in a single save's folder the path below what was asked for
    # ("step-10", "step-10/v-<version>"); "" for a plain one that was asked for itself.
    version: str
    digest: str  # SHA-256, hex
    files: tuple[StoredFile, ...]
    step: int | None = None

    @property
    def striped_version(self) -> str:
        """The version's own name, "" for a plain checkpoint."""
        return posixpath.basename(self.version).removeprefix(stored.FOLDER_PREFIX) if self.kind == STRIPED else ""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.layout.size for file in self.files)


class Found(NamedTuple):
    """A version in a folder, for listings and for what keeps the newest ones."""

    version: str
    folder: str  # in the store
    is_complete: bool
    mtime_s: float  # of its folder, 0.0 where unknown


class NoneComplete(CheckpointError):  # noqa: N818  named as the others of the tree
    """There is something, but no complete checkpoint."""


class Wanted(NamedTuple):
    """Which versions count."""

    without: Collection[str] = ()  # digests of versions that cannot be loaded: older ones are taken
    is_striped: bool = False
    on_damaged: Callable[[IntegrityError], object] | None = None  # told of a damaged manifest that is passed over

    def takes(self, found: Pinned) -> bool:
        return found.digest not in self.without

    def pass_over(self, error: IntegrityError) -> None:
        """Raises the error unless somebody wants to hear of it."""
        if self.on_damaged is None:
            raise error
        self.on_damaged(error)


async def resolve(
    store: Store,
    path: str = "",
    *,
    is_striped: bool = False,
    without: Collection[str] = (),
    on_damaged: Callable[[IntegrityError], object] | None = None,
) -> Pinned:
    """The version that `path` means now: itself, or the newest complete one below it.

    Args:
        is_striped: a plain checkpoint is not asked for. One is NoneComplete then, and its files are not looked
            at: the folder may be one that holds all sorts of things.
        without: digests of versions that are not wanted; an older one is taken.
        on_damaged: is told of each damaged manifest, and an older version is taken.
    Raises: NotFound if nothing is there; NoneComplete if there is something, but no complete checkpoint;
        SourceChanged if it is removed meanwhile; CheckpointError if it is too large to be one;
        IntegrityError for a damaged manifest of the newest version, without `on_damaged`.
    """
    wanted = Wanted(without, is_striped, on_damaged)
    own = _own_version(store, path)
    if own:
        return _only(store, path, await _load(store, path, own), wanted)
    entries = await _list(store, path)
    if entries is None:
        return _only(store, path, await _resolve_unlisted(store, path, is_striped), wanted)
    names = _version_names(entries)
    newest = await _load_newest(store, path, names, wanted)
    if newest is not None:
        return newest
    snapshot = await snapshot_of(store, path, entries)
    if snapshot:
        return _only(store, path, await _pin_snapshot(store, path, snapshot, is_striped), wanted)
    own_plain: Pinned | None = None
    own_files = await judge_files(store, path, entries)
    if own_files and await judge_folders(store, path, entries) is not False:
        own_plain = await _pin_plain(store, path, "", is_striped)
        if wanted.takes(own_plain):
            return own_plain
    for name in (await step_folders(store, path, entries))[:MOST_CANDIDATES]:
        found = await _resolve_step(store, path, name, wanted)
        if found is not None:
            return found
    if own_plain is not None:
        return _only(store, path, own_plain, wanted)
    if own_files is None and await judge_folders(store, path, entries):
        return _only(store, path, await _pin_plain(store, path, "", is_striped), wanted)
    if not entries:
        raise NotFound(f"{where(store, path)}: is empty or does not exist")
    raise NoneComplete(
        f"{where(store, path)}: has no complete checkpoint: no version with a manifest, no whole files of weights"
        f" ({len(names)} unfinished versions, {len(entries)} names: {_some(entries)})"
    )


async def pin(store: Store, path: str, version: str, digest: str) -> Pinned:
    """The version that another node has found with `resolve` at the same path.

    Raises: SourceChanged if it is not the same any more.
    """
    if stored.is_version(version):
        folder = path if _own_version(store, path) == version else _join(path, stored.folder_of(version))
        found = await _load(store, folder, version)
    elif version:
        if not stored.is_file_path(version):
            raise IntegrityError(f"{where(store, path)}: version {version[:80]!r} is no path below it")
        striped = stored.version_of(posixpath.basename(version))
        if striped:
            found = _as_step(await _load(store, _join(path, version), striped), posixpath.dirname(version))
        else:
            found = await _pin_folder(store, _join(path, version), version)
    else:
        found = await _pin_path(store, path)
    if found.digest != digest:
        raise SourceChanged(
            f"{where(store, path)}: is not the version {version or digest[:12]} that the job loads"
        )
    return found


async def list_versions(store: Store, path: str = "") -> list[Found]:
    """All striped versions in a folder, oldest first."""
    entries = [entry for entry in await _list(store, path) or [] if _is_version_folder(entry)]

    async def look(entry: Entry) -> Found:
        folder = _join(path, entry.name)
        is_complete = await _has_manifest(store, folder)
        return Found(stored.version_of(entry.name), folder, is_complete, entry.mtime_s)

    return await aio.map_bounded(look, sorted(entries), width=CALLS)


async def list_names(store: Store, path: str = "") -> list[str]:
    """Names of all striped versions in a folder, complete or not, newest first."""
    return [stored.version_of(name) for name in _version_names(await _list(store, path) or [])]


async def newest_complete(store: Store, path: str = "") -> str:
    """The name of the newest complete striped version, "" if there is none."""
    for name in (await list_names(store, path))[:MOST_CANDIDATES]:
        if await _has_manifest(store, _join(path, stored.folder_of(name))):
            return name
    return ""


async def read_manifest(store: Store, folder: str) -> tuple[Manifest, str]:
    """The manifest in a version's folder, and its digest."""
    path = _join(folder, MANIFEST_NAME)
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
        await store.stat(_join(folder, MANIFEST_NAME))
    except NotFound:
        return False
    return True


async def _load_newest(store: Store, path: str, names: list[str], wanted: Wanted) -> Pinned | None:
    for name in names[:MOST_CANDIDATES]:
        try:
            found = await _load(store, _join(path, name), stored.version_of(name))
        except NotFound:
            continue  # being written, or left by a save that did not finish
        except IntegrityError as error:
            wanted.pass_over(error)
            continue
        if wanted.takes(found):
            return found
    return None


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
        StoredFile(file.path, file.layout, tuple(_join(folder, name) for name in file.stripes), file.sums)
        for file in found.files
    )
    return Pinned(STRIPED, folder, version, digest, files, found.step)


async def _resolve_unlisted(store: Store, path: str, is_striped: bool) -> Pinned:
    """What cannot be listed: a file, or a folder with a pointer to its newest version."""
    try:
        pointer = await read_small(store, _join(path, POINTER_NAME), 256)
    except NotFound:
        if is_striped:
            raise
        return await _pin_path(store, path)
    version = pointer.decode("ascii", "replace").strip()
    if not stored.is_version(version):
        raise IntegrityError(f"{where(store, _join(path, POINTER_NAME))}: names no version: {version[:80]!r}")
    return await _load(store, _join(path, stored.folder_of(version)), version)


async def _resolve_step(store: Store, path: str, name: str, wanted: Wanted) -> Pinned | None:
    """The checkpoint in a single save's folder, striped or plain; None if there is no complete one."""
    folder = _join(path, name)
    entries = await _list(store, folder) or []
    striped = await _load_newest(store, folder, _version_names(entries), wanted)
    if striped is not None:
        return _as_step(striped, name)
    try:
        if await judge(store, folder, entries):
            plain = await _pin_plain(store, folder, name, wanted.is_striped)
            return plain if wanted.takes(plain) else None
    except (NotFound, SourceChanged):
        pass  # somebody removes old ones
    return None


def _as_step(found: Pinned, name: str) -> Pinned:
    """A striped version as that of the single save's folder in which it lies."""
    step = step_of(posixpath.basename(name)) if found.step is None else found.step
    return found._replace(version=_join(name, stored.folder_of(found.version)), step=step)


# ---- plain ---------------------------------------------------------------------------------------------------


async def _pin_path(store: Store, path: str) -> Pinned:
    """A file, or a folder as it is."""
    if path:
        try:
            found = await store.stat(path)
        except NotFound:
            return await _pin_folder(store, path, "")
        name = posixpath.basename(path)
        file = plain_file(name, found.size, found.etag, path)
        return Pinned(PLAIN, posixpath.dirname(path), "", _digest([file]), (file,))
    return await _pin_folder(store, path, "")


async def _pin_plain(store: Store, folder: str, version: str, is_striped: bool) -> Pinned:
    """Raises: NoneComplete where only a striped version was asked for."""
    if is_striped:
        raise NoneComplete(f"{where(store, folder)}: is a plain checkpoint, not a striped one")
    return await _pin_folder(store, folder, version)


async def _pin_snapshot(store: Store, path: str, snapshot: str, is_striped: bool) -> Pinned:
    """Of a model of the hub. Raises: NoneComplete while it is downloaded."""
    folder = _join(path, snapshot)
    if not await judge(store, folder, await store.list(folder)):
        raise NoneComplete(f"{where(store, folder)}: is no complete model: has all of it been downloaded?")
    return await _pin_plain(store, folder, snapshot, is_striped)


async def _pin_folder(store: Store, folder: str, version: str) -> Pinned:
    names: list[str] = []
    await _walk(store, folder, "", names, MOST_DEPTH)
    names = [name for name in names if stored.is_file_path(name) and not is_unfinished(name)]
    if not names:
        raise NotFound(f"{where(store, folder)}: is empty or does not exist")

    async def look(name: str) -> StoredFile:
        try:
            found = await store.stat(_join(folder, name))
        except NotFound as error:
            raise SourceChanged(f"{where(store, folder)}: {name} was removed while it was looked at") from error
        return plain_file(name, found.size, found.etag, _join(folder, name))

    files = await aio.map_bounded(look, sorted(names), width=CALLS)
    return Pinned(PLAIN, folder, version, _digest(files), tuple(files), step_of(version))


async def _walk(store: Store, folder: str, below: str, names: list[str], depth: int) -> None:
    for entry in await store.list(_join(folder, below)):
        name = _join(below, entry.name)
        if entry.is_folder:
            is_apart = step_of(entry.name) is not None or _is_version_folder(entry)
            if depth and (below or not is_apart):  # those are checkpoints of their own
                await _walk(store, folder, name, names, depth - 1)
        else:
            names.append(name)
            if len(names) > MOST_PLAIN_FILES:
                raise CheckpointError(f"{where(store, folder)}: has more than {MOST_PLAIN_FILES} files")


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


def _digest(files: list[StoredFile]) -> str:
    return digest_of((file.path, Stat(file.layout.size, file.etag)) for file in files)


def _some(entries: list[Entry]) -> str:
    """A few names, for people."""
    names = sorted(entry.name for entry in entries)
    return ", ".join(names[:MOST_SHOWN]) + (", ..." if len(names) > MOST_SHOWN else "")


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder and name else folder or name


__all__ = [
    "PLAIN", "STRIPED", "Found", "NoneComplete", "Pinned", "list_names", "list_versions", "newest_complete", "pin",
    "read_manifest", "read_small", "resolve",
]  # fmt: skip
