"""Whether a folder that some saver has written is a whole checkpoint, and which of its folders are single saves.

In: listings, and a few bytes of files: what their savers write last (DCP's metadata, an index of shards, the
directory at the end of a zip) or first (the sizes in a safetensors header). Out: True, False, or None where there
are no weights. Formats that cannot tell (old pickles) are taken for whole.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from bootseer import aio
from bootseer.checkpoint.small_files import CALLS, read_small
from bootseer.errors import NotFound, StorageError
from bootseer.storage.protocol import Entry, Store

WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".distcp", ".npz", ".gguf")
ZIPPED = (".pt", ".pth", ".bin", ".ckpt", ".npz")
INDEX = ".index.json"
DCP_METADATA = ".metadata"
# Written last by their savers, with the number or the name of the folder that is complete.
POINTERS = ("latest_checkpointed_iteration.txt", "latest")
MOST_INDEX_BYTES = 64 << 20
MOST_HEADER_BYTES = 100 << 20  # of a safetensors file; its library's limit
MOST_FOLDERS = 256  # of one checkpoint that are looked into
DEPTH = 3
_ZIP_START, _ZIP_END, _ZIP_END_BYTES = b"PK\3\4", b"PK\5\6", 22
_STEP = re.compile(
    r"(?:^|[^a-z])(?:steps?|iters?|iterations?|checkpoints?|ckpts?|epochs?|saves?|updates?|batch|samples|tokens)"
    r"[-_=.]?([0-9]{1,18})(?![0-9])",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"[0-9]{1,18}")
_UNFINISHED = re.compile(r"(^|[._-])(tmp|temp|partial|incomplete)([._-]|$)", re.IGNORECASE)
_UNFINISHED_FILE = re.compile(r"\.(tmp|temp|part|partial|incomplete|crswap)$", re.IGNORECASE)


def step_of(folder: str) -> int | None:
    """The number in the name of a single save's folder: step-10, checkpoint-500, global_step20, iter_0000010."""
    if _NUMBER.fullmatch(folder):
        return int(folder)
    found = _STEP.findall(folder)
    return int(found[-1]) if found else None


def is_unfinished(name: str) -> bool:
    """Whether a file or folder has a name for what is being written."""
    return _UNFINISHED_FILE.search(name) is not None


async def step_folders(store: Store, path: str, entries: Sequence[Entry]) -> list[str]:
    """Folders of single saves, the one to take first at the front.

    That is the one which the saver says is complete; should it be none, its older ones, then what is newer.
    """
    folders = [entry.name for entry in entries if entry.is_folder and not _UNFINISHED.search(entry.name)]
    numbered = sorted(((number, name) for name in folders if (number := step_of(name)) is not None), reverse=True)
    for pointer in POINTERS:
        if not any(entry.name == pointer and not entry.is_folder for entry in entries):
            continue
        try:
            text = (await read_small(store, _join(path, pointer), 4096)).decode("utf-8", "replace").strip()
        except StorageError:
            continue
        last = step_of(text)
        pointed = [text] if text in folders else []
        if text.isdigit():
            pointed += [name for number, name in numbered if number == last and name != text]
        if pointed:
            older = [name for number, name in numbered if last is None or number <= last]
            return list(dict.fromkeys([*pointed, *older, *(name for _, name in numbered)]))
    return [name for _, name in numbered]


async def judge(store: Store, folder: str, entries: Sequence[Entry], depth: int = DEPTH) -> bool | None:
    """A folder with all below it, but for single saves' folders."""
    own = await judge_files(store, folder, entries)
    if own is False:
        return False
    below = await judge_folders(store, folder, entries, depth)
    return own if below is None else below


async def judge_folders(store: Store, folder: str, entries: Sequence[Entry], depth: int = DEPTH) -> bool | None:
    """What is below a folder, each folder for itself: False if one is not whole."""
    inner = [
        entry.name
        for entry in entries
        if entry.is_folder and not entry.name.startswith(".") and step_of(entry.name) is None
    ]
    if not depth or len(inner) > MOST_FOLDERS:
        return None
    verdict: bool | None = None
    for name in inner:
        try:
            found = await store.list(_join(folder, name))
        except NotFound:
            return False  # it is on the move
        each = await judge(store, _join(folder, name), found, depth - 1)
        if each is False:
            return False
        verdict = verdict or each
    return verdict


async def judge_files(store: Store, folder: str, entries: Sequence[Entry]) -> bool | None:
    """The files in a folder, without what is below it."""
    files = {entry.name: entry for entry in entries if not entry.is_folder}
    if DCP_METADATA in files:
        return True  # written last
    indexed: set[str] = set()
    for name in files:
        if name.endswith(INDEX):
            shards = await _read_index(store, _join(folder, name))
            if shards is None or not shards <= set(files):
                return False
            indexed |= shards
    weights = [name for name in files if name.endswith(WEIGHTS) and not is_unfinished(name)]
    if any(name.endswith(".distcp") for name in weights):
        return False  # without its metadata
    if not weights:
        return True if indexed else None

    async def look(name: str) -> bool:
        return await is_whole(store, _join(folder, name), files[name].size)

    unsure = [name for name in weights if name not in indexed]
    return all(await aio.map_bounded(look, unsure, width=CALLS))


async def is_whole(store: Store, path: str, size: int) -> bool:
    """Whether a file of weights has been written to its end, as far as its format lets one see that."""
    try:
        if not size:
            return False
        if path.endswith(".safetensors"):
            return await _is_whole_safetensors(store, path, size)
        if not path.endswith(ZIPPED) or size <= _ZIP_END_BYTES:
            return True
        if await _read(store, path, 0, len(_ZIP_START)) == _ZIP_START:
            return await _read(store, path, size - _ZIP_END_BYTES, len(_ZIP_END)) == _ZIP_END
    except NotFound:
        return False  # it is on the move
    return True


async def _is_whole_safetensors(store: Store, path: str, size: int) -> bool:
    if size < 8:
        return False
    length = int.from_bytes(await _read(store, path, 0, 8), "little")
    if length > MOST_HEADER_BYTES:
        return True  # no safetensors file at all: reading it tells
    if 8 + length > size:
        return False
    try:
        header = msgspec.json.decode(await _read(store, path, 8, length), type=dict[str, _Tensor])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return True
    return 8 + length + max((each.data_offsets[1] for each in header.values()), default=0) <= size


async def _read_index(store: Store, path: str) -> set[str] | None:
    """The shards that it names; None while it is being written."""
    try:
        found = msgspec.json.decode(await read_small(store, path, MOST_INDEX_BYTES), type=_Index)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return set(found.weight_map.values())


async def _read(store: Store, path: str, offset: int, length: int) -> bytes:
    data = bytearray(length)
    await store.read_into(path, offset, memoryview(data))
    return bytes(data)


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Tensor(msgspec.Struct):
    """Of a safetensors header; its `__metadata__` has no offsets."""

    data_offsets: tuple[int, int] = (0, 0)


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name
