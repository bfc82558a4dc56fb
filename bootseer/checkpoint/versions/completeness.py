"""Whether the files of one save make a complete checkpoint: each by its format, and all by their references.

In: names and sizes, and a function to read ranges of the files. Out: a verdict with the first fault. Only headers,
record tables and ends are read (file_formats.py), indexes and metadata (save_rules.py, promises.py, ocdbt.py);
never the tensors, and of very large saves a sample.
"""

from __future__ import annotations

import asyncio
import posixpath
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from bootseer import aio
from bootseer.checkpoint.format import dcp_promises, ocdbt
from bootseer.checkpoint.format.array_formats import zstd_end
from bootseer.checkpoint.format.file_formats import Facts, is_known, parse
from bootseer.checkpoint.format.file_parts import IncompleteFile, Parts, RangesNeeded
from bootseer.checkpoint.format.pickle_data import Inert
from bootseer.checkpoint.versions.save_rules import Save, broken_promise, has_weights, is_index, join
from bootseer.errors import NotFound, SourceChanged, Truncated
from bootseer.storage.protocol import Store
from bootseer.storage.small_files import CONCURRENT_READS, read_range

HEAD_BYTES = 32 << 10  # of either end of a file, in the first read
WHOLE_BYTES = 128 << 10  # up to this size, a file is read whole
MAX_ROUNDS = 160  # of reads of one file, each after the one before
MAX_READ_BYTES = 512 << 20  # of one file
MAX_INSPECTED = 4096  # files of one save
MAX_METADATA_BYTES = 512 << 20  # of DCP: of larger metadata only the end is inspected
MAX_PROBES = 512  # items of DCP files whose ends are both read
MAX_NODES = 4096  # of a database of arrays
DISTCP = ".distcp"
KEPT = ("_model_states.pt", "training_args.bin")  # the values in these pickles imply further files

# Reads bytes of a file from an offset; the path is relative to the save.
Read = Callable[[str, int, int], Awaitable[bytes]]
_T = TypeVar("_T")


class SaveVerdict(NamedTuple):
    """The result. `why` begins with the name of a file, or with a verb whose subject is the save."""

    has_weights: bool
    why: str = ""  # "" if nothing is wrong

    @property
    def is_whole(self) -> bool:
        return self.has_weights and not self.why


async def inspect_save(
    sizes: Mapping[str, int],
    read: Read,
    *,
    name: str = "",
    beside: Collection[str] = (),
    probes: int = MAX_PROBES,
) -> SaveVerdict:
    """Inspect one save.

    Args: sizes: of all its files, by path; name: of its directory; beside: names in the parent directory; probes:
        maximum number of tensors whose bytes are probed for data.
    """
    looked = _Inspection(sizes, read, probes)
    try:
        await looked.look()
    except IncompleteFile as torn:
        return SaveVerdict(has_weights(Save(name, sizes, {})), str(torn))
    save = Save(name, sizes, looked.facts, beside)
    if not has_weights(save):
        return SaveVerdict(False, "has no weights in a known format")
    return SaveVerdict(True, broken_promise(save))


async def inspect_file(path: str, size: int, read: Read) -> tuple[Facts | None, str]:
    """Inspect one file: return its facts, or the fault. Without facts: its format is unknown."""
    try:
        return await _parse(path, size, read), ""
    except IncompleteFile as torn:
        return None, str(torn)


def reader_of(store: Store, directory: str) -> Read:
    async def read(path: str, offset: int, length: int) -> bytes:
        data = bytearray(length)
        await read_range(store, join(directory, path), offset, memoryview(data))
        return bytes(data)

    return read


async def _parse(path: str, size: int, read: Read, *, is_json: bool = False) -> Facts | None:
    parts = Parts(size)
    name = f"{path}.json" if is_json else path
    has_tail = not path.endswith((".safetensors", ".json"))
    return await _run(parts, path, read, lambda: parse(name, parts), has_tail=has_tail)


async def _run(parts: Parts, path: str, read: Read, parser: Callable[[], _T], *, has_tail: bool = False) -> _T:
    """Run a parser, and read what it requests, until it has all. Raises: Torn."""
    total = 0

    async def fetch(ranges: Sequence[tuple[int, int]]) -> None:
        nonlocal total
        total += sum(length for _, length in ranges)
        if total > MAX_READ_BYTES:
            raise IncompleteFile("has headers that are too large to inspect")
        try:
            found = await asyncio.gather(*(read(path, *each) for each in ranges))
        except (NotFound, Truncated, SourceChanged) as error:
            raise IncompleteFile("was changed or removed while it was inspected") from error
        for (offset, _), data in zip(ranges, found, strict=True):
            parts.put(offset, data)

    if 0 < parts.size <= WHOLE_BYTES:
        await fetch([(0, parts.size)])
    elif parts.size:
        ends = [(0, HEAD_BYTES)] + ([(parts.size - HEAD_BYTES, HEAD_BYTES)] if has_tail else [])
        await fetch(ends)
    for _ in range(MAX_ROUNDS):
        try:
            return parser()
        except RangesNeeded as wanted:
            await fetch(wanted.ranges)
    raise IncompleteFile("has too many headers to inspect")


class _Inspection:
    """The facts found in the files of one save."""

    def __init__(self, sizes: Mapping[str, int], read: Read, probes: int) -> None:
        self._sizes = sizes
        self._probes = probes
        self._read = read
        self._has_index = any(map(is_index, sizes))
        # An item of Orbax that is JSON lies in a directory of its own.
        tops = [posixpath.dirname(path) for path in sizes if posixpath.basename(path) == "_CHECKPOINT_METADATA"]
        self._json = {
            path for path in sizes for top in tops if path.endswith("/metadata") and _directory_above(path) == top
        }
        self.facts: dict[str, Facts] = {}

    async def look(self) -> None:
        """Inspect all files. Raises: Torn, beginning with the file's path."""
        known = [path for path in sorted(self._sizes) if is_known(path) or path in self._json]
        await self._each(self._look_into, _sample(known, MAX_INSPECTED))
        directories: dict[str, list[str]] = {}
        for path in self._sizes:
            directory, name = posixpath.split(path)
            directories.setdefault(directory, []).append(name)
        for directory, names in sorted(directories.items()):
            if any(name.endswith((DISTCP, dcp_promises.NAME)) for name in names):
                await self._inspect_dcp(directory, names)
            if ocdbt.MANIFEST_NAME in names:
                await self._inspect_arrays(directory)
            if ".zarray" in names:
                await self._inspect_chunks(directory, names)

    async def _each(self, func: Callable[[str], Awaitable[None]], paths: Iterable[str]) -> None:
        await aio.map_bounded(func, paths, width=CONCURRENT_READS)

    async def _look_into(self, path: str) -> None:
        try:
            facts = await _parse(path, self._sizes[path], self._read, is_json=path in self._json)
        except IncompleteFile as torn:
            raise IncompleteFile(f"{path} {torn}") from None
        if facts is not None:
            keeps_value = facts.kind in ("json", "text") or path.endswith(KEPT)
            self.facts[path] = facts._replace(
                tensors=facts.tensors if self._has_index else None, value=facts.value if keeps_value else None
            )

    # ---- torch.distributed.checkpoint ------------------------------------------------------------------------

    async def _inspect_dcp(self, directory: str, names: Sequence[str]) -> None:
        own = f"{directory} " if directory else ""
        try:
            metadata_names = dcp_promises.names_of(names)
        except IncompleteFile as torn:
            raise IncompleteFile(f"{own}{torn}") from None
        found = []
        for name in metadata_names:
            path = join(directory, name)
            try:
                metadata = await self._read_metadata(path)
            except IncompleteFile as torn:
                raise IncompleteFile(f"{path} {torn}") from None
            if metadata is not None:
                found.append(metadata)
        items = [
            each._replace(path=join(directory, each.path)) for one in found for each in dcp_promises.items(one)
        ]
        for item in items:
            size = self._sizes.get(posixpath.normpath(item.path))
            if size is None:
                raise IncompleteFile(f"{item.path}, named in {metadata_names[0]}, is missing")
            if item.end > size:
                raise IncompleteFile(f"{item.path} ends at byte {size}, its tensors at {item.end} or later")
        if len(found) == len(metadata_names) and metadata_names != [dcp_promises.NAME]:
            try:
                dcp_promises.check_covered(found)
            except IncompleteFile as torn:
                raise IncompleteFile(f"{own}{torn}") from None
        await aio.map_bounded(self._probe, _probes(items, self._probes), width=CONCURRENT_READS)

    async def _read_metadata(self, path: str) -> Inert | None:
        size = self._sizes[path]
        if size > MAX_METADATA_BYTES:
            if await self._read(path, size - 1, 1) != b".":
                raise IncompleteFile("ends too early")
            return None
        try:
            data = await self._read(path, 0, size) if size else b""
        except (NotFound, Truncated) as error:
            raise IncompleteFile("was changed or removed while it was inspected") from error
        return dcp_promises.parse(data)

    async def _probe(self, item: dcp_promises.StoredExtent) -> None:
        """Check both ends of an item that should be a zip file: unwritten ranges of a file may be zeros."""
        if item.length < 26:
            return
        path = posixpath.normpath(item.path)
        try:
            head, tail = await asyncio.gather(
                self._read(path, item.offset, 4), self._read(path, item.end - 22, 22)
            )
        except (NotFound, Truncated) as error:
            raise IncompleteFile(f"{item.path} was changed or removed while it was inspected") from error
        is_zip = head == b"PK\3\4"
        if (is_zip and not tail.startswith(b"PK\5\6")) or (not is_zip and head == bytes(4)):
            raise IncompleteFile(f"{item.path} has no tensor at byte {item.offset}, where its metadata places one")

    # ---- arrays ----------------------------------------------------------------------------------------------

    async def _inspect_arrays(self, directory: str) -> None:
        """Check that all files that the newest version of a database needs exist and are long enough."""
        path = join(directory, ocdbt.MANIFEST_NAME)

        async def whole(place: ocdbt.FileRange) -> bytes:
            self._check_place(directory, place)
            try:
                return await self._read(join(directory, place.path), place.offset, place.length)
            except (NotFound, Truncated) as error:
                raise IncompleteFile("was changed or removed while it was inspected") from error

        at, probes = path, self._probes
        try:
            waiting = ocdbt.read_manifest(await whole(ocdbt.FileRange(ocdbt.MANIFEST_NAME, 0, self._sizes[path])))
            for _ in range(MAX_NODES):
                if not waiting:
                    return
                place = waiting.pop()
                at = join(directory, place.path)
                node = ocdbt.read_node(await whole(place), place.base)
                for value in node.values:
                    at = join(directory, value.path)
                    self._check_place(directory, value)
                    if node.is_packed and value.length >= 4 and probes:
                        probes -= 1
                        if await whole(value._replace(length=4)) == bytes(4):
                            raise IncompleteFile("has zeros where an array should be")
                waiting += node.nodes
        except ocdbt.CodecMissing:
            return
        except IncompleteFile as torn:
            raise IncompleteFile(f"{at} {torn}") from None

    def _check_place(self, directory: str, place: ocdbt.FileRange) -> None:
        size = self._sizes.get(join(directory, place.path))
        if size is None:
            raise IncompleteFile(f"is missing, but {join(directory, ocdbt.MANIFEST_NAME)} needs it")
        if place.end > size:
            raise IncompleteFile(f"ends at byte {size}, its arrays at {place.end} or later")

    async def _inspect_chunks(self, directory: str, names: Sequence[str]) -> None:
        """Check that compressed chunks of an array end where their frames do."""
        facts = self.facts.get(join(directory, ".zarray"))
        kind = facts.value.get("compressor") if facts is not None and isinstance(facts.value, dict) else None
        if not isinstance(kind, dict) or kind.get("id") != "zstd":
            return

        async def look(path: str) -> None:
            parts = Parts(self._sizes[path])
            try:
                end = await _run(parts, path, self._read, lambda: zstd_end(parts))
                if end != parts.size:
                    raise IncompleteFile(f"has {parts.size} bytes, its compressed frame {end}")
            except IncompleteFile as torn:
                raise IncompleteFile(f"{path} {torn}") from None

        chunks = [join(directory, name) for name in sorted(names) if re.fullmatch(r"\d+(\.\d+)*", name)]
        await self._each(look, _sample(chunks, MAX_INSPECTED))


def _directory_above(path: str) -> str:
    return posixpath.dirname(posixpath.dirname(path))


def _sample(items: Sequence[_T], most: int) -> list[_T]:
    """Return all items, or at most `most` evenly spaced ones with the first and the last."""
    if len(items) <= most:
        return list(items)
    if most < 2:
        return list(items[:most])
    step = (len(items) - 1) / (most - 1)
    return [items[round(index * step)] for index in range(most)]


def _probes(items: Sequence[dcp_promises.StoredExtent], most: int) -> list[dcp_promises.StoredExtent]:
    """Return all items of a small save; of a large one, those at the ends of its files."""
    plain = sorted(item for item in items if item.is_plain)
    if len(plain) > most // 4:
        plain = [
            item
            for index, item in enumerate(plain)
            if index in (0, len(plain) - 1) or not plain[index - 1].path == item.path == plain[index + 1].path
        ]
    return _sample(plain, most)
