"""Which version of a checkpoint is meant: a file, a folder, a striped version, or the newest complete one.

In: a store and a path in it. Out: `Pinned`: the version's files with all that a reader needs, and a digest by
which every node of a job can be sure to read the same. A save that is not complete is never chosen.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from typing import NamedTuple

import msgspec

from bootseer import aio
from bootseer.checkpoint import manifest as stored
from bootseer.checkpoint.direct import StoredFile, plain_file
from bootseer.checkpoint.manifest import MANIFEST_NAME, POINTER_NAME, Manifest
from bootseer.errors import CheckpointError, IntegrityError, NotFound, SourceChanged, StorageError
from bootseer.storage.protocol import Entry, Store

STRIPED, PLAIN = "striped", "plain"
MOST_PLAIN_FILES = 200_000
MOST_DEPTH = 8  # of folders in a plain checkpoint
MOST_CANDIDATES = 64  # incomplete ones that are looked at before it is given up
MOST_INDEX_BYTES = 64 << 20
CALLS = 32  # at once
WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".distcp", ".npz", ".gguf")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
DCP_METADATA = ".metadata"
# Written last by their savers, with the number or the name of the folder that is complete.
POINTERS = ("latest_checkpointed_iteration.txt", "latest")
_NUMBER = re.compile(r"([0-9]{1,18})(?!.*[0-9])")
_UNFINISHED = re.compile(r"(^|[._-])(tmp|temp|partial|incomplete)([._-]|$)|\.(tmp|part|crswap)$", re.IGNORECASE)


class Pinned(NamedTuple):
    """One complete version. Stripe paths of `files` are relative to the store's root."""

    kind: str  # STRIPED or PLAIN
    folder: str  # in the store: of the version, of the plain checkpoint, or above a single file
    version: str  # of a striped one its version, of a plain one its path below what was asked for ("" for that)
    digest: str  # SHA-256, hex
    files: tuple[StoredFile, ...]
    step: int | None = None

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


async def resolve(store: Store, path: str = "") -> Pinned:
    """The version that `path` means now: itself, or the newest complete one below it.

    Raises: NotFound if nothing is there; CheckpointError if there is something, but no complete checkpoint;
        IntegrityError for a damaged manifest of the newest version: an older one is never taken for it.
    """
    own = stored.version_of(posixpath.basename(path) or posixpath.basename(store.url.rstrip("/")))
    if own:
        return await _load(store, path, own)
    entries = await _list(store, path)
    if entries is None:
        return await _resolve_unlisted(store, path)
    names = {entry.name: entry for entry in entries}
    striped = sorted((name for name in names if stored.version_of(name) and names[name].is_folder), reverse=True)
    for name in striped[:MOST_CANDIDATES]:
        try:
            return await _load(store, _join(path, name), stored.version_of(name))
        except NotFound:
            continue  # being written, or left by a save that did not finish
    if await _is_complete(store, path, names):
        return await _pin_folder(store, path, "")
    for name in (await _step_folders(store, path, names))[:MOST_CANDIDATES]:
        below = await _list(store, _join(path, name)) or []
        if await _is_complete(store, _join(path, name), {entry.name: entry for entry in below}):
            return await _pin_folder(store, _join(path, name), name)
    if not entries:
        raise NotFound(f"{_where(store, path)}: is empty or does not exist")
    raise CheckpointError(
        f"{_where(store, path)}: has no complete checkpoint: no version with a manifest, no weights"
        f" ({len(striped)} unfinished, {len(entries)} names)"
    )


async def pin(store: Store, path: str, version: str, digest: str) -> Pinned:
    """The version that another node has found with `resolve` at the same path.

    Raises: SourceChanged if it is not the same any more.
    """
    if stored.is_version(version):
        own = stored.version_of(posixpath.basename(path) or posixpath.basename(store.url.rstrip("/")))
        folder = path if own == version else _join(path, stored.folder_of(version))
        found = await _load(store, folder, version)
    elif version:
        if not stored.is_file_path(version):
            raise IntegrityError(f"{_where(store, path)}: version {version[:80]!r} is no path below it")
        found = await _pin_folder(store, _join(path, version), version)
    else:
        found = await _pin_path(store, path)
    if found.digest != digest:
        raise SourceChanged(
            f"{_where(store, path)}: is not the version {version or digest[:12]} that the job loads"
        )
    return found


async def list_versions(store: Store, path: str = "") -> list[Found]:
    """All striped versions in a folder, oldest first."""
    entries = [
        entry for entry in await _list(store, path) or [] if entry.is_folder and stored.version_of(entry.name)
    ]

    async def look(entry: Entry) -> Found:
        folder = _join(path, entry.name)
        try:
            await store.stat(_join(folder, MANIFEST_NAME))
            is_complete = True
        except NotFound:
            is_complete = False
        return Found(stored.version_of(entry.name), folder, is_complete, entry.mtime_s)

    return await aio.map_bounded(look, sorted(entries), width=CALLS)


async def read_manifest(store: Store, folder: str) -> tuple[Manifest, str]:
    """The manifest in a version's folder, and its digest."""
    where = _where(store, _join(folder, MANIFEST_NAME))
    data = await read_small(store, _join(folder, MANIFEST_NAME), stored.MOST_MANIFEST_BYTES)
    return stored.decode(data, where), stored.digest(data)


async def read_small(store: Store, path: str, most_bytes: int) -> bytes:
    """A whole file, once more if it changes meanwhile; IntegrityError if it is larger than it may be."""
    for _ in range(2):
        found = await store.stat(path)
        if found.size > most_bytes:
            raise IntegrityError(f"{_where(store, path)}: {found.size} bytes; at most {most_bytes} make sense")
        data = bytearray(found.size)
        try:
            await store.read_into(path, 0, memoryview(data), etag=found.etag)
        except SourceChanged:
            continue
        return bytes(data)
    raise SourceChanged(f"{_where(store, path)}: changes faster than it can be read")


# ---- striped -------------------------------------------------------------------------------------------------


async def _load(store: Store, folder: str, version: str) -> Pinned:
    found, digest = await read_manifest(store, folder)
    if found.version != version:
        raise IntegrityError(f"{_where(store, folder)}: its manifest is that of version {found.version}")
    files = tuple(
        StoredFile(file.path, file.layout, tuple(_join(folder, name) for name in file.stripes), file.sums)
        for file in found.files
    )
    return Pinned(STRIPED, folder, version, digest, files, found.step)


async def _resolve_unlisted(store: Store, path: str) -> Pinned:
    """What cannot be listed: a file, or a folder with a pointer to its newest version."""
    try:
        pointer = await read_small(store, _join(path, POINTER_NAME), 256)
    except NotFound:
        return await _pin_path(store, path)
    version = pointer.decode("ascii", "replace").strip()
    if not stored.is_version(version):
        raise IntegrityError(f"{_where(store, _join(path, POINTER_NAME))}: names no version: {version[:80]!r}")
    return await _load(store, _join(path, stored.folder_of(version)), version)


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


async def _pin_folder(store: Store, folder: str, version: str) -> Pinned:
    names: list[str] = []
    await _walk(store, folder, "", names, MOST_DEPTH)
    names = [name for name in names if stored.is_file_path(name) and not _UNFINISHED.search(name)]
    if not names:
        raise NotFound(f"{_where(store, folder)}: is empty or does not exist")

    async def look(name: str) -> StoredFile:
        found = await store.stat(_join(folder, name))
        return plain_file(name, found.size, found.etag, _join(folder, name))

    files = await aio.map_bounded(look, sorted(names), width=CALLS)
    number = _NUMBER.search(version)
    return Pinned(PLAIN, folder, version, _digest(files), tuple(files), int(number[1]) if number else None)


async def _walk(store: Store, folder: str, below: str, names: list[str], depth: int) -> None:
    for entry in await store.list(_join(folder, below)):
        name = _join(below, entry.name)
        if entry.is_folder:
            if depth:
                await _walk(store, folder, name, names, depth - 1)
        else:
            names.append(name)
            if len(names) > MOST_PLAIN_FILES:
                raise CheckpointError(f"{_where(store, folder)}: has more than {MOST_PLAIN_FILES} files")


async def _is_complete(store: Store, folder: str, names: dict[str, Entry]) -> bool:
    """Whether a folder is a whole checkpoint, as far as its kind of saver lets one see that."""
    if DCP_METADATA in names:
        return True  # written last
    for index in INDEXES:
        if index in names:
            return await _has_all_shards(store, _join(folder, index), names)
    if any(name.endswith(".distcp") for name in names):
        return False  # without its metadata
    return any(
        not entry.is_folder and name.endswith(WEIGHTS) and not _UNFINISHED.search(name)
        for name, entry in names.items()
    )


async def _has_all_shards(store: Store, index: str, names: dict[str, Entry]) -> bool:
    try:
        found = msgspec.json.decode(await read_small(store, index, MOST_INDEX_BYTES))
        shards = set(found["weight_map"].values())
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError):
        return False  # being written
    return shards <= set(names)


async def _step_folders(store: Store, path: str, names: dict[str, Entry]) -> list[str]:
    """Folders of single saves, the one to take first at the front."""
    folders = [name for name, entry in names.items() if entry.is_folder and not _UNFINISHED.search(name)]
    numbered = [(int(found[1]), name) for name in folders if (found := _NUMBER.search(name))]
    for pointer in POINTERS:
        if pointer not in names:
            continue
        try:
            text = (await read_small(store, _join(path, pointer), 4096)).decode("utf-8", "replace").strip()
        except StorageError:
            continue
        pointed = [name for number, name in numbered if name == text or (text.isdigit() and number == int(text))]
        if pointed:
            return pointed
    return [name for _, name in sorted(numbered, reverse=True)]


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
    lines = (f"{file.path}\0{file.layout.size}\0{file.etag}\n" for file in files)
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogatepass")).hexdigest()


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder and name else folder or name


def _where(store: Store, path: str) -> str:
    return f"{store.url.rstrip('/')}/{path}" if path else store.url


__all__ = ["PLAIN", "STRIPED", "Found", "Pinned", "list_versions", "pin", "read_manifest", "read_small", "resolve"]
