"""Whether the files of one save make a whole checkpoint: each by its format, and all by what they promise.

In: names and sizes, and a way to read ranges of the files. Out: a verdict with the first thing that is wrong. Only
headers, record tables and ends are read (file_formats.py), indexes and metadata (save_rules.py, dcp_promises.py,
ocdbt.py); never the tensors, and of very large saves a sample.
"""

from __future__ import annotations

import asyncio
import posixpath
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from bootseer import aio
from bootseer.checkpoint import dcp_promises, ocdbt
from bootseer.checkpoint.array_formats import zstd_end
from bootseer.checkpoint.file_formats import Facts, is_known, parse
from bootseer.checkpoint.file_parts import Parts, Torn, Unread
from bootseer.checkpoint.pickle_data import Inert
from bootseer.checkpoint.save_rules import Save, broken_promise, has_weights, is_index, join
from bootseer.checkpoint.small_files import CALLS, read_range
from bootseer.errors import NotFound, SourceChanged, Truncated
from bootseer.storage.protocol import Store

HEAD_BYTES = 32 << 10  # of either end of a file, read at first
WHOLE_BYTES = 128 << 10  # a smaller file is read at once
MOST_ROUNDS = 160  # of reads of one file, each after the one before
MOST_READ_BYTES = 512 << 20  # of one file
MOST_LOOKED_INTO = 4096  # files of one save
MOST_METADATA_BYTES = 512 << 20  # of DCP: of larger ones only the end is looked at
MOST_PROBES = 512  # items of DCP files of which both ends are read
MOST_NODES = 4096  # of a database of arrays
DISTCP = ".distcp"
KEPT = ("_model_states.pt", "training_args.bin")  # what is in these pickles says what else there has to be

# Bytes of a file from an offset on; the path is relative to the save.
Read = Callable[[str, int, int], Awaitable[bytes]]
_T = TypeVar("_T")


class Verdict(NamedTuple):
    """What was found. `why` begins with the name of a file, or with a verb whose subject is the save."""

    has_weights: bool
    why: str = ""  # "" where nothing is wrong

    @property
    def is_whole(self) -> bool:
        return self.has_weights and not self.why


async def judge(
    sizes: Mapping[str, int],
    read: Read,
    *,
    name: str = "",
    beside: Collection[str] = (),
    probes: int = MOST_PROBES,
) -> Verdict:
    """One save.

    Args: sizes: of all its files, by path; name: of its folder; beside: names in the folder above; probes: so many
        tensors are looked at, whether anything was written where they should be.
    """
    looked = _Looked(sizes, read, probes)
    try:
        await looked.look()
    except Torn as torn:
        return Verdict(has_weights(Save(name, sizes, {})), str(torn))
    save = Save(name, sizes, looked.facts, beside)
    if not has_weights(save):
        return Verdict(False, "has no weights in a format that is known")
    return Verdict(True, broken_promise(save))


async def judge_file(path: str, size: int, read: Read) -> tuple[Facts | None, str]:
    """One file by itself: what it says, or why it is not whole. No facts: its format is not known."""
    try:
        return await _parse(path, size, read), ""
    except Torn as torn:
        return None, str(torn)


def reader_of(store: Store, folder: str) -> Read:
    """Of a folder in a store."""

    async def read(path: str, offset: int, length: int) -> bytes:
        data = bytearray(length)
        await read_range(store, join(folder, path), offset, memoryview(data))
        return bytes(data)

    return read


async def _parse(path: str, size: int, read: Read, *, is_json: bool = False) -> Facts | None:
    parts = Parts(size)
    name = f"{path}.json" if is_json else path
    has_tail = not path.endswith((".safetensors", ".json"))
    return await _run(parts, path, read, lambda: parse(name, parts), has_tail=has_tail)


async def _run(parts: Parts, path: str, read: Read, parser: Callable[[], _T], *, has_tail: bool = False) -> _T:
    """Runs a parser, and reads what it asks for, until it has all. Raises: Torn."""
    total = 0

    async def fetch(ranges: Sequence[tuple[int, int]]) -> None:
        nonlocal total
        total += sum(length for _, length in ranges)
        if total > MOST_READ_BYTES:
            raise Torn("has headers that are too large to be looked at")
        try:
            found = await asyncio.gather(*(read(path, *each) for each in ranges))
        except (NotFound, Truncated, SourceChanged) as error:
            raise Torn("is changed or removed while it is looked at") from error
        for (offset, _), data in zip(ranges, found, strict=True):
            parts.put(offset, data)

    if 0 < parts.size <= WHOLE_BYTES:
        await fetch([(0, parts.size)])
    elif parts.size:
        ends = [(0, HEAD_BYTES)] + ([(parts.size - HEAD_BYTES, HEAD_BYTES)] if has_tail else [])
        await fetch(ends)
    for _ in range(MOST_ROUNDS):
        try:
            return parser()
        except Unread as wanted:
            await fetch(wanted.ranges)
    raise Torn("has headers that are too many to be looked at")


class _Looked:
    """What was seen of the files of one save."""

    def __init__(self, sizes: Mapping[str, int], read: Read, probes: int) -> None:
        self._sizes = sizes
        self._probes = probes
        self._read = read
        self._has_index = any(map(is_index, sizes))
        # An item of Orbax that is JSON lies in a folder of its own.
        tops = [posixpath.dirname(path) for path in sizes if posixpath.basename(path) == "_CHECKPOINT_METADATA"]
        self._json = {
            path for path in sizes for top in tops if path.endswith("/metadata") and _folder_above(path) == top
        }
        self.facts: dict[str, Facts] = {}

    async def look(self) -> None:
        """Raises: Torn, beginning with the file's path."""
        known = [path for path in sorted(self._sizes) if is_known(path) or path in self._json]
        await self._each(self._look_into, _sample(known, MOST_LOOKED_INTO))
        folders: dict[str, list[str]] = {}
        for path in self._sizes:
            folder, name = posixpath.split(path)
            folders.setdefault(folder, []).append(name)
        for folder, names in sorted(folders.items()):
            if any(name.endswith((DISTCP, dcp_promises.NAME)) for name in names):
                await self._look_at_dcp(folder, names)
            if ocdbt.MANIFEST_NAME in names:
                await self._look_at_arrays(folder)
            if ".zarray" in names:
                await self._look_at_chunks(folder, names)

    async def _each(self, func: Callable[[str], Awaitable[None]], paths: Iterable[str]) -> None:
        await aio.map_bounded(func, paths, width=CALLS)

    async def _look_into(self, path: str) -> None:
        try:
            facts = await _parse(path, self._sizes[path], self._read, is_json=path in self._json)
        except Torn as torn:
            raise Torn(f"{path} {torn}") from None
        if facts is not None:
            keeps_value = facts.kind in ("json", "text") or path.endswith(KEPT)
            self.facts[path] = facts._replace(
                tensors=facts.tensors if self._has_index else None, value=facts.value if keeps_value else None
            )

    # ---- torch.distributed.checkpoint ------------------------------------------------------------------------

    async def _look_at_dcp(self, folder: str, names: Sequence[str]) -> None:
        own = f"{folder} " if folder else ""
        try:
            metadata_names = dcp_promises.names_of(names)
        except Torn as torn:
            raise Torn(f"{own}{torn}") from None
        found = []
        for name in metadata_names:
            path = join(folder, name)
            try:
                metadata = await self._read_metadata(path)
            except Torn as torn:
                raise Torn(f"{path} {torn}") from None
            if metadata is not None:
                found.append(metadata)
        items = [each._replace(path=join(folder, each.path)) for one in found for each in dcp_promises.items(one)]
        for item in items:
            size = self._sizes.get(posixpath.normpath(item.path))
            if size is None:
                raise Torn(f"{item.path}, which {metadata_names[0]} names, is not there")
            if item.end > size:
                raise Torn(f"{item.path} ends at {size} bytes, its tensors at {item.end} or later")
        if len(found) == len(metadata_names) and metadata_names != [dcp_promises.NAME]:
            try:
                dcp_promises.check_covered(found)
            except Torn as torn:
                raise Torn(f"{own}{torn}") from None
        await aio.map_bounded(self._probe, _probes(items, self._probes), width=CALLS)

    async def _read_metadata(self, path: str) -> Inert | None:
        size = self._sizes[path]
        if size > MOST_METADATA_BYTES:
            if await self._read(path, size - 1, 1) != b".":
                raise Torn("ends too early")
            return None
        try:
            data = await self._read(path, 0, size) if size else b""
        except (NotFound, Truncated) as error:
            raise Torn("is changed or removed while it is looked at") from error
        return dcp_promises.parse(data)

    async def _probe(self, item: dcp_promises.Item) -> None:
        """Both ends of what should be a zip file: where nothing was written, a file may have zeros."""
        if item.length < 26:
            return
        path = posixpath.normpath(item.path)
        try:
            head, tail = await asyncio.gather(
                self._read(path, item.offset, 4), self._read(path, item.end - 22, 22)
            )
        except (NotFound, Truncated) as error:
            raise Torn(f"{item.path} is changed or removed while it is looked at") from error
        is_zip = head == b"PK\3\4"
        if (is_zip and not tail.startswith(b"PK\5\6")) or (not is_zip and head == bytes(4)):
            raise Torn(f"{item.path} has no tensor at byte {item.offset}, where its metadata says one is")

    # ---- arrays ----------------------------------------------------------------------------------------------

    async def _look_at_arrays(self, folder: str) -> None:
        """All files that the newest version of a database needs are there, and long enough."""
        path = join(folder, ocdbt.MANIFEST_NAME)

        async def whole(place: ocdbt.Place) -> bytes:
            self._check_place(folder, place)
            try:
                return await self._read(join(folder, place.path), place.offset, place.length)
            except (NotFound, Truncated) as error:
                raise Torn("is changed or removed while it is looked at") from error

        at, probes = path, self._probes
        try:
            waiting = ocdbt.read_manifest(await whole(ocdbt.Place(ocdbt.MANIFEST_NAME, 0, self._sizes[path])))
            for _ in range(MOST_NODES):
                if not waiting:
                    return
                place = waiting.pop()
                at = join(folder, place.path)
                node = ocdbt.read_node(await whole(place), place.base)
                for value in node.values:
                    at = join(folder, value.path)
                    self._check_place(folder, value)
                    if node.is_packed and value.length >= 4 and probes:
                        probes -= 1
                        if await whole(value._replace(length=4)) == bytes(4):
                            raise Torn("has zeros where an array should be")
                waiting += node.nodes
        except ocdbt.Opaque:
            return
        except Torn as torn:
            raise Torn(f"{at} {torn}") from None

    def _check_place(self, folder: str, place: ocdbt.Place) -> None:
        size = self._sizes.get(join(folder, place.path))
        if size is None:
            raise Torn(f"is not there, but {join(folder, ocdbt.MANIFEST_NAME)} needs it")
        if place.end > size:
            raise Torn(f"ends at {size} bytes, its arrays at {place.end} or later")

    async def _look_at_chunks(self, folder: str, names: Sequence[str]) -> None:
        """Chunks of an array that are packed end where their frames do."""
        facts = self.facts.get(join(folder, ".zarray"))
        kind = facts.value.get("compressor") if facts is not None and isinstance(facts.value, dict) else None
        if not isinstance(kind, dict) or kind.get("id") != "zstd":
            return

        async def look(path: str) -> None:
            parts = Parts(self._sizes[path])
            try:
                end = await _run(parts, path, self._read, lambda: zstd_end(parts))
                if end != parts.size:
                    raise Torn(f"has {parts.size} bytes, what is packed in it {end}")
            except Torn as torn:
                raise Torn(f"{path} {torn}") from None

        chunks = [join(folder, name) for name in sorted(names) if re.fullmatch(r"\d+(\.\d+)*", name)]
        await self._each(look, _sample(chunks, MOST_LOOKED_INTO))


def _folder_above(path: str) -> str:
    return posixpath.dirname(posixpath.dirname(path))


def _sample(items: Sequence[_T], most: int) -> list[_T]:
    """All, or so many evenly chosen ones with the first and the last."""
    if len(items) <= most:
        return list(items)
    if most < 2:
        return list(items[:most])
    step = (len(items) - 1) / (most - 1)
    return [items[round(index * step)] for index in range(most)]


def _probes(items: Sequence[dcp_promises.Item], most: int) -> list[dcp_promises.Item]:
    """All items of a small save, of a large one the ends of its files."""
    plain = sorted(item for item in items if item.is_plain)
    if len(plain) > most // 4:
        plain = [
            item
            for index, item in enumerate(plain)
            if index in (0, len(plain) - 1) or not plain[index - 1].path == item.path == plain[index + 1].path
        ]
    return _sample(plain, most)
