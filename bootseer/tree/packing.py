"""Pieces of files to blocks, blocks to packs: "Blocks" in docs/formats.md.

In: pieces, in the order in which they are to lie together, and where what is hot ends. Out: packs, given to a sink
as they fill up, and an address for each piece. Reading, hashing and compressing run in threads, all decisions in
the caller's in the order of the pieces: the same pieces give the same bytes, however many threads there are. What
is in memory is bounded.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import NamedTuple

from bootseer.storage.cpu_limits import usable_cores
from bootseer.tree.block_codec import Codec, block_digest, pack_block
from bootseer.tree.index import BLOCK, BLOCK_BYTES, BLOCK_UNITS, HOLE, UNIT_BYTES

PACK_BYTES = 16 << 20  # a pack ends with the block that makes it so long
OPEN_BLOCKS = 4  # that short pieces are put into: more fill blocks better and scatter neighbours
TASK_BYTES = 1 << 20  # what a thread gets at once; a task costs as much as hashing 50 KiB
TASK_PIECES = 64
PUTS = 3  # packs at once on their way to the sink
MOST_WAITING = 256  # blocks that wait for an earlier one to be compressed
ZEROS = bytes(BLOCK_BYTES)

Put = Callable[[str, bytes], object]  # digest in hex, a pack
Read = Callable[[], Sequence[bytes]]


class Packed(NamedTuple):
    """What became of N pieces. Shapes: B blocks, P packs."""

    addresses: array[int]  # N: on the device, in units, or HOLE
    blocks: bytes  # B x index.BLOCK
    packs: list[tuple[bytes, int]]  # P: digest, bytes
    deduplicated_bytes: int  # of pieces that were there already


class _Stored(NamedTuple):
    """A block as it is stored."""

    digest: bytes
    data: bytes


class _Piece(NamedTuple):
    """What a thread found out about a piece; zeros are None instead."""

    digest: bytes  # of the raw bytes
    length: int
    data: bytes  # a short one
    block: _Stored | None  # a whole one that was not known to be there


class _Shared:
    """A block that short pieces are put into."""

    __slots__ = ("number", "parts", "units")

    def __init__(self, number: int) -> None:
        self.number = number
        self.parts: list[bytes] = []
        self.units = 0


class _Leaving(NamedTuple):
    """A block on its way into a pack."""

    number: int
    raw_bytes: int
    stored: _Stored | Future[_Stored]


class Packer:
    """Takes pieces, gives packs to `put`, which is called from threads, up to PUTS at once.

    A context manager: its threads end with the block, and after an error nothing more is put. Errors of `put` and
    of what reads pieces come out of `add`, `add_later` and `finish`.
    """

    def __init__(self, put: Put, *, threads: int | None = None, codec: Codec = "zstd") -> None:
        threads = threads or usable_cores()
        self._put, self._codec = put, codec
        self._workers = ThreadPoolExecutor(threads, "tree-pack")
        self._putters = ThreadPoolExecutor(PUTS, "tree-put")
        self._most_tasks = 2 * threads + 2
        self._batch: list[bytes] = []
        self._batch_bytes = 0
        self._tasks: deque[Future[list[_Piece | None]] | None] = deque()  # None: what follows lies apart
        # Blocks are numbered when they are begun, and lie in the order in which they are full.
        self._begun = 0
        self._order: list[int] = []
        self._known: dict[bytes, int] = {}  # digest of a piece -> its address by begun blocks
        self._addresses = array("q")
        self._open: list[_Shared] = []  # the oldest first
        self._leaving: deque[_Leaving] = deque()
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
        """Takes a piece of 1 to BLOCK_BYTES; gives its number."""
        self._batch.append(piece)
        self._batch_bytes += len(piece)
        self.count += 1
        if self._batch_bytes >= TASK_BYTES or len(self._batch) >= TASK_PIECES:
            self._end_batch()
        return self.count - 1

    def add_later(self, count: int, read: Read) -> int:
        """Takes `count` pieces, about TASK_BYTES, that `read` gives in a thread; gives the number of the first."""
        self._end_batch()
        self.count += count
        self._begin(count, read)
        return self.count - count

    def divide(self) -> None:
        """What was added so far shares no block with what comes, but for equal pieces, which are stored once."""
        self._end_batch()
        self._tasks.append(None)

    def finish(self) -> Packed:
        """When all pieces have been added: the rest is packed and put."""
        self._end_batch()
        while self._tasks:
            self._settle()
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
        return Packed(addresses, bytes(self._blocks), packs, self._deduplicated_bytes)

    # ---- in threads ----------------------------------------------------------------------------------------

    def _prepare(self, count: int, read: Read) -> list[_Piece | None]:
        pieces = read()
        if len(pieces) != count:
            raise ValueError(f"{len(pieces)} pieces were read instead of {count}")
        return [self._look_at(piece) for piece in pieces]

    def _look_at(self, piece: bytes) -> _Piece | None:
        if not 0 < len(piece) <= BLOCK_BYTES:
            raise ValueError(f"a piece of {len(piece)} bytes")
        if ZEROS.startswith(piece):
            return None
        digest = hashlib.sha256(piece).digest()
        if len(piece) < BLOCK_BYTES:
            return _Piece(digest, len(piece), piece, None)
        # What is known never changes. Whoever does not see it yet compresses for nothing, and that is all.
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
        while self._tasks and (len(self._tasks) >= self._most_tasks or _is_done(self._tasks[0])):
            self._settle()
        self._tasks.append(self._workers.submit(self._prepare, count, read))

    def _settle(self) -> None:
        """Decides about the pieces of the oldest task."""
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
                self._leaving.append(_Leaving(self._begun, BLOCK_BYTES, piece.block))
                self._begun += 1
            else:
                address = self._share(piece.data)
            self._known[piece.digest] = address
            self._addresses.append(address)
        self._drain(MOST_WAITING)

    def _share(self, data: bytes) -> int:
        """Puts a short piece into the first open block with room for it."""
        units = -(-len(data) // UNIT_BYTES)
        for shared in self._open:
            if shared.units + units <= BLOCK_UNITS:
                break
        else:
            if len(self._open) == OPEN_BLOCKS:
                self._close(max(self._open, key=lambda each: each.units))
            shared = _Shared(self._begun)
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

    def _close(self, shared: _Shared) -> None:
        self._open.remove(shared)
        stored = self._workers.submit(self._store, b"".join(shared.parts))
        self._leaving.append(_Leaving(shared.number, shared.units * UNIT_BYTES, stored))

    def _drain(self, most: int) -> None:
        """Moves blocks into packs until at most so many wait."""
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
