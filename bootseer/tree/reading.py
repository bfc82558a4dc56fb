"""Blocks of a tree from a store: read by range, verified, decompressed.

Synchronous, for any number of threads.
The block cache of a node has the same interface; this is for users that need each block once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from bootseer import aio
from bootseer.errors import DigestMismatch, IntegrityError
from bootseer.storage import RangeReader, RangeRequest, SecondHand, Store
from bootseer.tree.block_codec import block_digest, unpack_block
from bootseer.tree.index import Block, Index

WINDOW_BLOCKS = 64  # that are read together: 8 MiB at most


class BlockSource(Protocol):
    """A provider of the blocks of a tree."""

    def read_blocks(self, numbers: Sequence[int], /) -> Iterator[tuple[int, bytes | memoryview]]:
        """Yield (number, raw bytes) of each block, verified. The bytes stay valid while they are referenced.

        Called from several threads at once. Raises: StorageError, IntegrityError.
        """


class StoreBlocks:
    """A `BlockSource` over a store whose root is the tree's directory. Uses aio's background loop only."""

    def __init__(self, store: Store, index: Index) -> None:
        self._store = store
        self._index = index
        self._reader = RangeReader(store)

    def read_blocks(self, numbers: Sequence[int], /) -> Iterator[tuple[int, bytes]]:
        """Read in the order of `numbers`. Damaged blocks are read once more, by another route.

        Raises: DigestMismatch, Truncated or IntegrityError, which name block, pack and store; StorageError.
        """
        for begin in range(0, len(numbers), WINDOW_BLOCKS):
            window = {number: self._index.block(number) for number in numbers[begin : begin + WINDOW_BLOCKS]}
            stored: dict[int, memoryview] = {}
            missing = window
            for attempt in (0, 1):
                try:
                    stored.update(self._read(missing, attempt))
                except IntegrityError:  # a pack is too short there
                    if attempt:
                        raise
                missing = {
                    number: block
                    for number, block in missing.items()
                    if number not in stored or block_digest(stored[number]) != block.digest
                }
                if not missing:
                    break
                self._report_wrong({number: block for number, block in missing.items() if number in stored})
            for number, block in missing.items():
                raise DigestMismatch(
                    f"{self._where(number, block)} is damaged: its digest is not the one in the index"
                )
            for number in numbers[begin : begin + WINDOW_BLOCKS]:
                yield number, self._unpack(number, window[number], stored[number])

    def _read(self, blocks: dict[int, Block], attempt: int) -> dict[int, memoryview]:
        memory = memoryview(bytearray(sum(block.stored_bytes for block in blocks.values())))
        targets, requests = {}, []
        begin = 0
        for number, block in blocks.items():
            targets[number] = target = memory[begin : begin + block.stored_bytes]
            requests.append(RangeRequest(self._index.pack_path(block.pack), block.offset, target))
            begin += block.stored_bytes
        aio.run_sync(self._reader.read(requests, attempt=attempt))
        return targets

    def _report_wrong(self, blocks: dict[int, Block]) -> None:
        if isinstance(self._store, SecondHand):
            for block in blocks.values():
                self._store.distrust(self._index.pack_path(block.pack), block.offset, block.stored_bytes)

    def _unpack(self, number: int, block: Block, stored: memoryview) -> bytes:
        # `stored` is a reused buffer.
        return bytes(unpack_block(stored, block.raw_bytes, self._where(number, block)))

    def _where(self, number: int, block: Block) -> str:
        return f"{self._store.url}: block {number} at byte {block.offset} of {self._index.pack_path(block.pack)}"
