"""`bootseer image inspect` and `verify`: what a tree is, and whether every byte of it is right."""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from bootseer import aio
from bootseer.errors import BootseerError, IntegrityError, NotFound
from bootseer.image.commands import Progress, Say, opened, tree_url
from bootseer.image.commands_traces import hot_blocks, known_traces, stored_traces
from bootseer.storage import RangeReader, RangeRequest, Store
from bootseer.tree.compression import decompress
from bootseer.tree.index import BLOCK, Block, Config, Index
from bootseer.trust import Trust

WINDOW_BYTES = 8 << 20  # read at once
PACKS_AT_ONCE = 4
MOST_NAMED = 10_000  # faults that are listed; all are counted


# ---- inspect -----------------------------------------------------------------------------------------------


class Inspected(NamedTuple):
    """What a tree is."""

    digest: str
    name: str  # "" when it was asked for by its digest
    kind: str
    because: str  # why it is believed
    tool: str
    source: str
    config: Config
    entries: int
    files: int
    folders: int
    symlinks: int
    others: int  # devices, sockets, pipes
    file_bytes: int
    device_bytes: int  # what is mounted: files without holes and duplicates, in whole blocks
    stored_bytes: int
    ratio: float  # of file bytes to stored bytes
    index_bytes: int
    blocks: int
    packs: int
    traces: int
    hot_blocks: int  # of all traces together
    hot_bytes: int  # stored
    hot_share: float  # of the stored bytes


def inspect(url: str, *, name: str, say: Say) -> Inspected:
    """Raises: as `open_tree`."""
    url, trust = tree_url(url), Trust.load()
    with opened(url, name=name, trust=trust) as tree:
        known = known_traces(tree.store, tree.digest, tree.index.block_count, trust, say)
    index = tree.index
    kinds = [stat.S_IFMT(mode) for mode, link in zip(index.modes, index.links, strict=True) if link == -1]
    files, folders, symlinks = (kinds.count(kind) for kind in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK))
    file_bytes = sum(size for size, link in zip(index.sizes, index.links, strict=True) if link == -1)
    stored_bytes = sum(stored for *_, stored, _ in BLOCK.iter_unpack(index.blocks))
    hot = hot_blocks(known)
    hot_bytes = sum(index.block(number).stored_bytes for number in hot)
    return Inspected(
        digest=tree.digest,
        name=tree.head.name if tree.head is not None else "",
        kind=tree.head.kind if tree.head is not None else "",
        because=tree.because,
        tool=index.tool,
        source=index.source,
        config=index.config,
        entries=len(index),
        files=files,
        folders=folders,
        symlinks=symlinks,
        others=len(kinds) - files - folders - symlinks,
        file_bytes=file_bytes,
        device_bytes=index.device_bytes,
        stored_bytes=index.stored_bytes,
        ratio=round(file_bytes / index.stored_bytes, 3) if index.stored_bytes else 0.0,
        index_bytes=len(tree.index_bytes),
        blocks=index.block_count,
        packs=len(index.packs),
        traces=len(known),
        hot_blocks=len(hot),
        hot_bytes=hot_bytes,
        hot_share=round(hot_bytes / stored_bytes, 4) if stored_bytes else 0.0,
    )


def to_record(found: Inspected) -> dict[str, object]:
    """For JSON."""
    return found._asdict() | {"config": msgspec.to_builtins(found.config)}


# ---- verify ------------------------------------------------------------------------------------------------


class Fault(NamedTuple):
    """Something wrong; `block` -1: the pack itself."""

    block: int
    pack: str  # path in the tree's folder
    offset: int
    what: str


class Verdict(NamedTuple):
    """What came of looking at every block."""

    digest: str
    because: str  # why the tree is believed
    blocks: int
    right_blocks: int
    checked_bytes: int  # as stored
    faults: list[Fault]  # the first MOST_NAMED
    fault_count: int
    traces: int
    trace_faults: list[str]


def verify(url: str, *, name: str, progress: Progress) -> Verdict:
    """Reads every block from the store, past all caches, and compares it with the index.

    Raises: as `open_tree`; StorageError when the store cannot be read at all: that says nothing of the tree.
    """
    url, trust = tree_url(url), Trust.load()
    with opened(url, name=name, trust=trust) as tree:
        checking = _Checking(tree.store, tree.index, progress)
        aio.run_sync(checking.run())
        trace_faults: list[str] = []
        traces = aio.run_sync(
            stored_traces(tree.store, tree.digest, tree.index.block_count, trust, trace_faults.append)
        )
    faults = sorted(checking.faults, key=lambda fault: (fault.pack, fault.offset, fault.block))
    wrong = {fault.block for fault in faults if fault.block >= 0}
    return Verdict(
        tree.digest,
        tree.because,
        tree.index.block_count,
        tree.index.block_count - len(wrong),
        checking.done_bytes,
        faults[:MOST_NAMED],
        len(faults),
        len(traces),
        trace_faults,
    )


class _Checking:
    """One run."""

    def __init__(self, store: Store, index: Index, progress: Progress) -> None:
        self._store, self._index, self._progress = store, index, progress
        self._reader = RangeReader(store)
        self._blocks: list[list[int]] = [[] for _ in index.packs]
        for number in range(index.block_count):
            self._blocks[index.block(number).pack].append(number)
        self.total_bytes = sum(stored for *_, stored, _ in BLOCK.iter_unpack(index.blocks))
        self.done_bytes = 0
        self.faults: list[Fault] = []

    async def run(self) -> None:
        await aio.map_bounded(self._check_pack, range(len(self._index.packs)), width=PACKS_AT_ONCE)

    async def _check_pack(self, pack: int) -> None:
        path, size = self._index.pack_path(pack), self._index.packs[pack][1]
        numbers = sorted(self._blocks[pack], key=lambda number: self._index.block(number).offset)
        try:
            there = (await self._store.stat(path)).size
        except NotFound:
            self._note(-1, path, 0, "is missing")
            for number in numbers:
                self._note(number, path, self._index.block(number).offset, "its pack is missing")
            return
        if there != size:
            self._note(-1, path, 0, f"has {there} bytes instead of {size}")
        whole = hashlib.sha256()
        place: int | None = 0  # up to where blocks without gaps were hashed; None when they have some
        for window in self._windows(numbers):
            found = await self._check_window(path, window, there)
            for number in window:
                block, data = self._index.block(number), found.get(number)
                if place is not None and data is not None and place == block.offset:
                    await aio.run_io(whole.update, data)
                    place += block.stored_bytes
                else:
                    place = None
                self.done_bytes += block.stored_bytes
            self._progress(self.done_bytes, self.total_bytes)
        if place == size == there and whole.digest() != self._index.packs[pack][0]:
            self._note(-1, path, 0, "is not the pack of its name, though its blocks are right")

    async def _check_window(self, path: str, window: Sequence[int], there: int) -> dict[int, memoryview]:
        """The stored bytes of the blocks that are right."""
        right: dict[int, memoryview] = {}
        left = []
        for number in window:
            block = self._index.block(number)
            if block.offset + block.stored_bytes > there:
                self._note(number, path, block.offset, f"lies past the end of its pack, which has {there} bytes")
            else:
                left.append(number)
        why: dict[int, str] = {}
        for attempt in (0, 1):  # the second one by another way: a replica, a new connection
            if not left:
                break
            try:
                data = await self._read(path, left, attempt)
            except IntegrityError as error:
                why = dict.fromkeys(left, str(error))
                continue
            found = await aio.run_io(self._judge, left, data)
            right.update({number: data[number] for number in left if not found[number]})
            why = {number: text for number, text in found.items() if text}
            left = list(why)
        for number in left:
            self._note(number, path, self._index.block(number).offset, why[number])
        return right

    async def _read(self, path: str, numbers: Sequence[int], attempt: int) -> dict[int, memoryview]:
        blocks = {number: self._index.block(number) for number in numbers}
        begin = min(block.offset for block in blocks.values())
        end = max(block.offset + block.stored_bytes for block in blocks.values())
        memory = memoryview(bytearray(end - begin))
        await self._reader.read([RangeRequest(path, begin, memory)], attempt=attempt)
        return {
            number: memory[block.offset - begin : block.offset - begin + block.stored_bytes]
            for number, block in blocks.items()
        }

    def _judge(self, numbers: Sequence[int], data: dict[int, memoryview]) -> dict[int, str]:
        return {number: why_wrong(self._index.block(number), data[number]) for number in numbers}

    def _windows(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """Neighbours, WINDOW_BYTES at most together."""
        window: list[int] = []
        begin = 0
        for number in numbers:
            block = self._index.block(number)
            if window and block.offset + block.stored_bytes - begin > WINDOW_BYTES:
                yield window
                window = []
            if not window:
                begin = block.offset
            window.append(number)
        if window:
            yield window

    def _note(self, number: int, path: str, offset: int, what: str) -> None:
        self.faults.append(Fault(number, path, offset, what))


def why_wrong(block: Block, stored: memoryview) -> str:
    """PURE: what is wrong with the stored bytes of a block; "" when nothing is."""
    if hashlib.sha256(stored).digest() != block.digest:
        return "is damaged: its SHA-256 is not the one in the index"
    if not block.is_compressed:
        return ""
    try:
        raw = decompress(stored, block.raw_bytes, "it")
    except BootseerError as error:
        return f"cannot be decompressed: {error}"
    return "" if len(raw) == block.raw_bytes else f"holds {len(raw)} bytes instead of {block.raw_bytes}"
