"""Packing of file pieces into blocks and blocks into packs; see "Blocks" in docs/reference/formats.md.

In: pieces in their final order, and where the hot ones end. Out: packs, passed to a sink when full, and an address
for each piece. Threads read, hash and compress. The caller's thread makes all decisions, in the order of the
pieces. So the same pieces give the same bytes with any number of threads. Memory is bounded.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import NamedTuple

from bootseer.linux.cgroups import usable_cores
from bootseer.tree.block_codec import Codec, block_digest, pack_block
from bootseer.tree.index import BLOCK, BLOCK_BYTES, BLOCK_UNITS, HOLE, UNIT_BYTES

PACK_BYTES = 16 << 20  # a pack ends with the block that makes it so long
OPEN_BLOCKS = 4  # for short pieces: more of them fill blocks better but scatter neighbours
TASK_BYTES = 1 << 20  # per task; a task costs as much as hashing 50 KiB
TASK_PIECES = 64
PUTS = 3  # concurrent packs to the sink
MAX_WAITING = 256  # blocks that wait for the compression of an earlier one
ZEROS = bytes(BLOCK_BYTES)

Put = Callable[[str, bytes], object]  # digest in hex, a pack
Read = Callable[[], Sequence[bytes]]


class PackedPieces(NamedTuple):
    """The result for N pieces. Shapes: B blocks, P packs."""

    addresses: array[int]  # N: on the device, in units, or HOLE
    blocks: bytes  # B x index.BLOCK
    packs: list[tuple[bytes, int]]  # P: digest, bytes
    deduplicated_bytes: int  # of pieces that already existed


class _Stored(NamedTuple):
    digest: bytes
    data: bytes


class _Piece(NamedTuple):
    """A thread's result for a piece; None stands for zeros."""

    digest: bytes  # of the raw bytes
    length: int
    data: bytes  # a short one
    block: _Stored | None  # a whole piece that was not known yet


class _OpenBlock:
    """A block that collects short pieces."""

    __slots__ = ("number", "parts", "units")

    def __init__(self, number: int) -> None:
        self.number = number
        self.parts: list[bytes] = []
        self.units = 0


class _WaitingBlock(NamedTuple):
    """A block that waits to be put into a pack."""

    number: int
    raw_bytes: int
    stored: _Stored | Future[_Stored]


class Packer:
    """Takes pieces and passes packs to `put`, called from up to PUTS threads at once.

    A context manager: its threads end with the block, and after an error nothing more is put. `add`, `add_later`
    and `finish` raise errors of `put` and of the readers of pieces.
    """

    def __init__(self, put: Put, *, threads: int | None = None, codec: Codec = "zstd") -> None:
        threads = threads or usable_cores()
        self._put, self._codec = put, codec
        self._workers = ThreadPoolExecutor(threads, "tree-pack")
        self._putters = ThreadPoolExecutor(PUTS, "tree-put")
        self._max_tasks = 2 * threads + 2
        self._batch: list[bytes] = []
        self._batch_bytes = 0
        self._tasks: deque[Future[list[_Piece | None]] | None] = deque()  # None: divides blocks
        # Blocks are numbered when begun, and stored in the order in which they fill up.
        self._begun = 0
        self._order: list[int] = []
        self._known: dict[bytes, int] = {}  # digest of a piece -> its address by begun blocks
        self._addresses = array("q")
        self._open: list[_OpenBlock] = []  # oldest first
        self._leaving: deque[_WaitingBlock] = deque()
        self._blocks = bytearray()
        self._pack: list[bytes] = []
        self._pack_bytes = 0
        self._packs: list[Future[tuple[bytes, int]]] = []
        self._deduplicated_bytes = 0
        self.count = 0  # pieces so far: the number of the next one

    def __enter__(self) -> Packer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._workers.shutdown(cancel_futures=True)
        self._putters.shutdown(cancel_futures=True)

    def add(self, piece: bytes) -> int:
        """Add a piece of 1 to BLOCK_BYTES; return its number."""
        self._batch.append(piece)
        self._batch_bytes += len(piece)
        self.count += 1
        if self._batch_bytes >= TASK_BYTES or len(self._batch) >= TASK_PIECES:
            self._end_batch()
        return self.count - 1

    def add_later(self, count: int, read: Read) -> int:
        """Add `count` pieces, about TASK_BYTES, that `read` returns in a thread; return the first one's number."""
        self._end_batch()
        self.count += count
        self._begin(count, read)
        return self.count - count

    def end_blocks(self) -> None:
        """Divide blocks: later pieces share none with earlier ones. Equal pieces are still stored once."""
        self._end_batch()
        self._tasks.append(None)

    def finish(self) -> PackedPieces:
        """Pack and put the rest, when all pieces have been added."""
        self._end_batch()
        while self._tasks:
            self._assign_oldest_task()
        self._close_all()
        self._drain(0)
        if self._pack:
            self._end_pack()
        packs = [pack.result() for pack in self._packs]
        places = array("q", bytes(8 * self._begun))
        for place, number in enumerate(self._order):
            places[number] = place
        addresses = array("q", self._addresses)
        for piece, address in enumerate(addresses):
            if address != HOLE:
                number, inside = divmod(address, BLOCK_UNITS)
                addresses[piece] = places[number] * BLOCK_UNITS + inside
        return PackedPieces(addresses, bytes(self._blocks), packs, self._deduplicated_bytes)

    # ---- in threads ----------------------------------------------------------------------------------------

    def _prepare(self, count: int, read: Read) -> list[_Piece | None]:
        pieces = read()
        if len(pieces) != count:
            raise ValueError(f"{len(pieces)} pieces were read instead of {count}")
        return [self._inspect(piece) for piece in pieces]

    def _inspect(self, piece: bytes) -> _Piece | None:
        if not 0 < len(piece) <= BLOCK_BYTES:
            raise ValueError(f"a piece of {len(piece)} bytes")
        if ZEROS.startswith(piece):
            return None
        digest = hashlib.sha256(piece).digest()
        if len(piece) < BLOCK_BYTES:
            return _Piece(digest, len(piece), piece, None)
        # Known digests never change. A thread that does not see a new one only compresses in vain.
        return _Piece(digest, BLOCK_BYTES, b"", None if digest in self._known else self._store(piece))

    def _store(self, data: bytes) -> _Stored:
        stored = pack_block(data, self._codec)
        return _Stored(block_digest(stored), stored)

    def _put_pack(self, parts: list[bytes]) -> tuple[bytes, int]:
        data = b"".join(parts)
        parts.clear()
        digest = hashlib.sha256(data)
        self._put(digest.hexdigest(), data)
        return digest.digest(), len(data)

    # ---- in order ------------------------------------------------------------------------------------------

    def _end_batch(self) -> None:
        if self._batch:
            pieces, self._batch, self._batch_bytes = self._batch, [], 0
            self._begin(len(pieces), lambda: pieces)

    def _begin(self, count: int, read: Read) -> None:
        while self._tasks and (len(self._tasks) >= self._max_tasks or _is_done(self._tasks[0])):
            self._assign_oldest_task()
        self._tasks.append(self._workers.submit(self._prepare, count, read))

    def _assign_oldest_task(self) -> None:
        task = self._tasks.popleft()
        if task is None:
            self._close_all()
            return
        for piece in task.result():
            if piece is None:
                self._addresses.append(HOLE)
                continue
            address = self._known.get(piece.digest)
            if address is not None:
                self._deduplicated_bytes += piece.length
            elif piece.length == BLOCK_BYTES:
                assert piece.block is not None, "nothing is forgotten"
                address = self._begun * BLOCK_UNITS
                self._leaving.append(_WaitingBlock(self._begun, BLOCK_BYTES, piece.block))
                self._begun += 1
            else:
                address = self._share(piece.data)
            self._known[piece.digest] = address
            self._addresses.append(address)
        self._drain(MAX_WAITING)

    def _share(self, data: bytes) -> int:
        """Put a short piece into the first open block with room for it."""
        units = -(-len(data) // UNIT_BYTES)
        for shared in self._open:
            if shared.units + units <= BLOCK_UNITS:
                break
        else:
            if len(self._open) == OPEN_BLOCKS:
                self._close(max(self._open, key=lambda each: each.units))
            shared = _OpenBlock(self._begun)
            self._begun += 1
            self._open.append(shared)
        address = shared.number * BLOCK_UNITS + shared.units
        shared.parts += (data, ZEROS[: units * UNIT_BYTES - len(data)])
        shared.units += units
        if shared.units == BLOCK_UNITS:
            self._close(shared)
        return address

    def _close_all(self) -> None:
        while self._open:
            self._close(self._open[0])

    def _close(self, shared: _OpenBlock) -> None:
        self._open.remove(shared)
        stored = self._workers.submit(self._store, b"".join(shared.parts))
        self._leaving.append(_WaitingBlock(shared.number, shared.units * UNIT_BYTES, stored))

    def _drain(self, most: int) -> None:
        """Move blocks into packs until at most `most` wait."""
        while self._leaving:
            number, raw_bytes, stored = self._leaving[0]
            if isinstance(stored, Future):
                if len(self._leaving) <= most and not stored.done():
                    return
                stored = stored.result()
            self._leaving.popleft()
            digest, data = stored
            self._order.append(number)
            self._blocks += BLOCK.pack(digest, len(self._packs), self._pack_bytes, len(data), raw_bytes)
            self._pack.append(data)
            self._pack_bytes += len(data)
            if self._pack_bytes >= PACK_BYTES:
                self._end_pack()

    def _end_pack(self) -> None:
        if len(self._packs) >= PUTS:
            self._packs[-PUTS].result()
        self._packs.append(self._putters.submit(self._put_pack, self._pack))
        self._pack, self._pack_bytes = [], 0


def _is_done(task: Future[list[_Piece | None]] | None) -> bool:
    return task is None or task.done()
