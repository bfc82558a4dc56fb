"""Verification of every stored byte of a tree: all blocks are read without caches and compared with the index."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from bootseer import aio
from bootseer.errors import BootseerError, IntegrityError, NotFound
from bootseer.storage import RangeReader, RangeRequest, Store
from bootseer.tree.block_codec import block_digest, unpack_block
from bootseer.tree.index import BLOCK, Block, Index

WINDOW_BYTES = 8 << 20  # read at once
PACKS_AT_ONCE = 4

Progress = Callable[[int, int], object]  # bytes done, and in all


class TreeFault(NamedTuple):
    """A fault; `block` -1: in the pack itself."""

    block: int
    pack: str  # path in the tree's directory
    offset: int
    what: str


class VerificationResult(NamedTuple):
    """The result of checking every block."""

    blocks: int
    right_blocks: int
    checked_bytes: int  # as stored
    faults: list[TreeFault]  # by pack, offset and block


async def verify_blocks(store: Store, index: Index, progress: Progress) -> VerificationResult:
    """Read every block of the tree whose directory is the root of `store`.

    Raises: StorageError when the store is unreadable, which does not concern the tree.
    """
    checking = _Checking(store, index, progress)
    await checking.run()
    faults = sorted(checking.faults, key=lambda fault: (fault.pack, fault.offset, fault.block))
    wrong = {fault.block for fault in faults if fault.block >= 0}
    return VerificationResult(index.block_count, index.block_count - len(wrong), checking.done_bytes, faults)


class _Checking:
    def __init__(self, store: Store, index: Index, progress: Progress) -> None:
        self._store, self._index, self._progress = store, index, progress
        self._reader = RangeReader(store)
        self._blocks: list[list[int]] = [[] for _ in index.packs]
        for number in range(index.block_count):
            self._blocks[index.block(number).pack].append(number)
        self.total_bytes = sum(stored for *_, stored, _ in BLOCK.iter_unpack(index.blocks))
        self.done_bytes = 0
        self.faults: list[TreeFault] = []

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
        place: int | None = 0  # the end of the gapless blocks hashed so far; None after a gap
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
        """Return the stored bytes of the valid blocks."""
        right: dict[int, memoryview] = {}
        left = []
        for number in window:
            block = self._index.block(number)
            if block.offset + block.stored_bytes > there:
                self._note(number, path, block.offset, f"lies past the end of its pack, which has {there} bytes")
            else:
                left.append(number)
        why: dict[int, str] = {}
        for attempt in (0, 1):  # the second one by another route: a replica, a new connection
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
        return {number: block_fault(self._index.block(number), data[number]) for number in numbers}

    def _windows(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """Yield groups of neighbours of at most WINDOW_BYTES."""
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
        self.faults.append(TreeFault(number, path, offset, what))


def block_fault(block: Block, stored: memoryview) -> str:
    """PURE: return the fault of the stored bytes of a block; "" if there is none."""
    if block_digest(stored) != block.digest:
        return "is damaged: its digest is not the one in the index"
    try:
        unpack_block(stored, block.raw_bytes, "it")
    except BootseerError as error:
        return f"cannot be decompressed: {error}"
    return ""
