"""The prefetch worker: fetches the hot blocks of a tree into its cache, for its daemon.

`python -P -m bootseer.mounts.tree_daemon.prefetch_worker`, or forked from the daemon before that had its order
(prefetch.py).

A process of its own: each answer of the daemon to the kernel needs the interpreter's lock. Unpacking blocks there
would delay each read of a starting program. The worker also reads the hot files through the mount once that
exists, ahead of the program.

It uses a socket. In: an Order, with a descriptor for the log; then a line when the tree is mounted, and one for
each block that a reader waits for; the worker ends at the end of input. Out: a line of figures (`PrefetchFigures`,
JSON) a few times a second, the last one when all is done.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial

import msgspec

from bootseer import aio
from bootseer.blocks.prefetch import Prefetcher
from bootseer.errors import BootseerError, StorageError
from bootseer.linux.cgroups import Memory, read_memory
from bootseer.linux.processes import set_name
from bootseer.logs import get_logger, send_to
from bootseer.mounts.tree_daemon import metadata as tree_metadata
from bootseer.mounts.tree_daemon.parts import block_statistics, open_cache, open_fetcher, open_stores
from bootseer.mounts.tree_daemon.read_ahead_plan import HotPieces, Piece
from bootseer.mounts.tree_daemon.settings import Settings
from bootseer.tree.index import BLOCK_BYTES, MAX_INDEX_BYTES

_log = get_logger(__name__)

NAME = "tree-bringer"  # in ps and top
REPORT_S = 0.25
LENGTH = struct.Struct("<Q")  # of the order, before it
MAX_ORDER_BYTES = MAX_INDEX_BYTES + (64 << 20)
BATCH_BLOCKS = 8  # read at once; a program's own read queues behind so many
POLL_S = 0.005  # between checks for fetched blocks
GUESS_NICE = 10  # most blocks of a guess are not needed now, and the processors are the starting program's
FREE_SHARE = 2  # hot files take at most one part in so many of the free memory


class PrefetchOrder(msgspec.Struct, kw_only=True):
    """The blocks to fetch. As MessagePack."""

    settings: Settings
    digest: str
    hot: list[int]
    index: bytes | None = None  # the index object, verified; None: it is in the cache
    root: str = ""  # where the tree will be mounted; "": no read-ahead
    is_guess: bool = False  # the order of the hot blocks is unknown


class PrefetchFigures(msgspec.Struct, kw_only=True):
    """Figures so far, as of `Prefetcher` and `BlockFetcher`."""

    prefetch: dict[str, float | str]
    blocks: dict[str, float]
    read_ahead: int = 0  # pieces of files


def encode(order: PrefetchOrder) -> tuple[bytes, bytes]:
    """Return the order as two parts to send: the descriptor goes with the first one."""
    data = msgspec.msgpack.encode(order)
    return LENGTH.pack(len(data)), data


def main(connection: socket.socket) -> int:
    """Run the worker; return the exit status: 1 when it could not begin."""
    gc.disable()  # an index is many objects, none of them garbage
    send_to(_print)
    try:
        order = _receive(connection)
        if order is None:
            return 0  # it is not needed
        if order.is_guess:
            os.nice(GUESS_NICE)
        asyncio.run(_bring(order, connection))
    except BootseerError as error:
        _log.info("%s", error)
        return 1
    return 0


def _receive(connection: socket.socket) -> PrefetchOrder | None:
    begin, fds, _, _ = socket.recv_fds(connection, LENGTH.size, 1)
    if not begin:
        return None
    for log in fds:
        os.dup2(log, 2)
        os.close(log)
    with connection.makefile("rb", buffering=0) as source:  # input after the order is read later
        (length,) = LENGTH.unpack((begin + _read(source, LENGTH.size - len(begin))).ljust(LENGTH.size, b"\0"))
        data = _read(source, min(length, MAX_ORDER_BYTES))
    try:
        return msgspec.msgpack.decode(data, type=PrefetchOrder)
    except msgspec.MsgspecError as error:
        raise StorageError(f"invalid order for the prefetch worker: {error}") from error


def _read(source: socket.SocketIO, length: int) -> bytes:
    found = bytearray()
    while len(found) < length and (data := source.read(length - len(found))):
        found += data
    return bytes(found)


class _Input:
    """Reads the daemon's lines. `is_shown`: the tree is mounted."""

    def __init__(self, connection: socket.socket) -> None:
        self.is_shown = asyncio.Event()
        self.note_demand: Callable[[int], None] = lambda _number: None
        self._connection, self._part = connection, b""

    def read(self) -> None:
        try:
            said = self._connection.recv(1 << 12)
        except ConnectionError:
            said = b""
        if not said:
            os._exit(1)  # the daemon has ended
        *lines, self._part = (self._part + said).split(b"\n")
        for line in lines:
            if line.isdigit():
                self.note_demand(int(line))
            else:
                self.is_shown.set()


async def _bring(order: PrefetchOrder, connection: socket.socket) -> None:
    settings = order.settings
    lines = _Input(connection)
    asyncio.get_running_loop().add_reader(connection, lines.read)
    async with AsyncExitStack() as stack:
        store = (await open_stores(stack, settings)).read
        cache = await aio.run_io(open_cache, settings)
        data = order.index or await aio.run_io(cache.read_index, order.digest)
        if data is None:
            raise StorageError(f"the index of {order.digest} is no longer in the cache")
        index = await aio.run_io(tree_metadata.decode_slim, data, order.digest)
        fetcher = await open_fetcher(stack, settings, store, cache, index, order.digest)
        prefetcher = Prefetcher(fetcher, order.hot, is_guess=order.is_guess)
        lines.note_demand = prefetcher.note_demand
        ahead: ReadAhead | None = None
        if bool(order.root) and await aio.run_io(_has_room, order):
            find = partial(HotPieces, data, order.digest, order.hot)
            ahead = ReadAhead(order.root, find, order.hot, fetcher.cache.missing)

        def tell() -> None:
            files = 0 if ahead is None else ahead.files
            blocks = block_statistics(fetcher, store)
            _send(connection, PrefetchFigures(prefetch=prefetcher.statistics(), blocks=blocks, read_ahead=files))

        async def tell_often() -> None:
            while True:
                tell()
                await asyncio.sleep(REPORT_S)

        async with asyncio.TaskGroup() as group:
            telling = group.create_task(tell_often())
            reading = group.create_task(_read_ahead(ahead, lines.is_shown))
            await prefetcher.run()
            if ahead is not None:
                ahead.note_all()
            await reading
            telling.cancel()
        tell()


def _has_room(order: PrefetchOrder) -> bool:
    return has_room(len(order.hot), read_memory())


async def _read_ahead(ahead: ReadAhead | None, is_shown: asyncio.Event) -> None:
    if ahead is None:
        return
    try:
        await aio.run_io(ahead.prepare)
        await is_shown.wait()
        await aio.run_io(ahead.run)
    except (OSError, BootseerError) as error:
        _log.info("read-ahead of hot files disabled: %s", error)


def _send(connection: socket.socket, fetched: PrefetchFigures) -> None:
    try:
        connection.sendall(msgspec.json.encode(fetched) + b"\n")
    except OSError:
        os._exit(1)  # the daemon has ended


def _print(line: str) -> None:
    print(f"bootseer tree: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    set_name(NAME.encode())
    asked_by = socket.socket(fileno=0)
    status = 1
    try:
        status = main(asked_by)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)  # the daemon sees the end only now


def has_room(blocks: int, memory: Memory) -> bool:
    """Return whether read-ahead fits into free memory. Pure."""
    return blocks * BLOCK_BYTES <= memory.free_bytes // FREE_SHARE


class ReadAhead:
    """One run for one tree. `files`: how many pieces were requested."""

    def __init__(
        self,
        root: str,
        find: Callable[[], HotPieces],
        hot: Sequence[int],
        missing: Callable[[Sequence[int]], Sequence[int]],
    ) -> None:
        """Args: find: returns where the hot blocks lie; missing: returns those that are not in the cache yet."""
        self.files = 0
        self._root, self._find, self._hot, self._missing = root, find, hot, missing
        self._pieces: HotPieces
        self._is_all = threading.Event()

    def note_all(self) -> None:
        """Record that no more blocks will be fetched: missing ones are left to their readers."""
        self._is_all.set()

    def prepare(self) -> None:
        """Prepare for `run`; the tree need not be mounted yet. Raises: as `find`."""
        self._pieces = self._find()

    def run(self) -> None:
        """Read ahead, in a thread. Raises: OSError when the tree is not mounted."""
        root = os.open(self._root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for at in range(0, len(self._hot), BATCH_BLOCKS):
                batch = self._hot[at : at + BATCH_BLOCKS]
                missing = self._missing(batch)
                while missing and not self._is_all.wait(POLL_S):
                    missing = self._missing(batch)
                left_out = set(missing)
                self._read(root, self._pieces.of([number for number in batch if number not in left_out]))
        finally:
            os.close(root)

    def _read(self, root: int, pieces: Sequence[Piece]) -> None:
        """Read pieces, and wait for the last one to limit those in flight."""
        fds: dict[bytes, int] = {}
        try:
            for path, offset, length in pieces:
                fd = fds.get(path)
                if fd is None:
                    fd = fds[path] = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root)
                os.posix_fadvise(fd, offset, length, os.POSIX_FADV_WILLNEED)
            self.files += len(pieces)
            if pieces:
                last = pieces[-1]
                os.pread(fds[last.path], 1, last.offset + last.length - 1)
        finally:
            for fd in fds.values():
                os.close(fd)
