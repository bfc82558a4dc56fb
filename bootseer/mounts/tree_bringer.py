"""Brings the hot blocks of a tree into its cache, for its daemon.

`python -P -m bootseer.mounts.tree_bringer`, or forked from the daemon before that had its order (bringing.py).

A process of its own: the daemon answers the kernel, each answer needs the interpreter's lock, and whoever unpacks
blocks beside it makes each read of a starting program late. It also reads the hot files through the mount as soon
as that is shown, ahead of the program (read_ahead.py).

It talks by a socket. In: an Order, with a descriptor for what is logged; then a line when the tree is shown; the
end of what comes in is this one's. Out: a line of figures (`Brought`, JSON) a few times a second, the last one
when all is done.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import struct
import sys
from contextlib import AsyncExitStack
from functools import partial

import msgspec

from bootseer import aio
from bootseer.blocks import Prefetcher
from bootseer.errors import BootseerError, StorageError
from bootseer.mounts import tree_metadata
from bootseer.mounts.namespaces import set_name
from bootseer.mounts.read_ahead import ReadAhead, has_room
from bootseer.mounts.read_ahead_plan import HotPieces
from bootseer.mounts.tree_parts import block_statistics, open_cache, open_fetcher, open_stores
from bootseer.mounts.tree_settings import Settings
from bootseer.storage.memory_limits import read_memory
from bootseer.tree.index import MOST_INDEX_BYTES

NAME = "tree-bringer"  # in ps and top
TELL_S = 0.25
LENGTH = struct.Struct("<Q")  # of the order, before it
MOST_ORDER_BYTES = MOST_INDEX_BYTES + (64 << 20)


class Order(msgspec.Struct, kw_only=True):
    """What is to be brought. As MessagePack."""

    settings: Settings
    digest: str
    hot: list[int]
    index: bytes | None = None  # the index object, which was checked; None: it is in the cache
    root: str = ""  # where the tree will be shown; "": nothing is read ahead


class Brought(msgspec.Struct, kw_only=True):
    """Figures so far, as `Prefetcher` and `BlockFetcher` have them."""

    prefetch: dict[str, float | str]
    blocks: dict[str, float]
    read_ahead: int = 0  # pieces of files


def encode(order: Order) -> tuple[bytes, bytes]:
    """As it is sent: with the first part comes the descriptor."""
    data = msgspec.msgpack.encode(order)
    return LENGTH.pack(len(data)), data


def main(connection: socket.socket) -> int:
    """The exit status: 1 when it could not begin."""
    gc.disable()  # an index is many objects, none of them garbage
    try:
        order = _receive(connection)
        if order is None:
            return 0  # it is not needed
        asyncio.run(_bring(order, connection))
    except BootseerError as error:
        _log(str(error))
        return 1
    return 0


def _receive(connection: socket.socket) -> Order | None:
    begin, fds, _, _ = socket.recv_fds(connection, LENGTH.size, 1)
    if not begin:
        return None
    for log in fds:
        os.dup2(log, 2)
        os.close(log)
    with connection.makefile("rb", buffering=0) as source:  # what comes after the order is read later
        (length,) = LENGTH.unpack((begin + _read(source, LENGTH.size - len(begin))).ljust(LENGTH.size, b"\0"))
        data = _read(source, min(length, MOST_ORDER_BYTES))
    try:
        return msgspec.msgpack.decode(data, type=Order)
    except msgspec.MsgspecError as error:
        raise StorageError(f"what is to be brought cannot be understood: {error}") from error


def _read(source: socket.SocketIO, length: int) -> bytes:
    found = bytearray()
    while len(found) < length and (data := source.read(length - len(found))):
        found += data
    return bytes(found)


def _hear(connection: socket.socket, is_shown: asyncio.Event) -> None:
    try:
        said = connection.recv(64)
    except ConnectionError:
        said = b""
    if not said:
        os._exit(1)  # whoever asked has gone
    is_shown.set()


async def _bring(order: Order, connection: socket.socket) -> None:
    settings = order.settings
    is_shown = asyncio.Event()
    asyncio.get_running_loop().add_reader(connection, _hear, connection, is_shown)
    async with AsyncExitStack() as stack:
        store = (await open_stores(stack, settings, _log)).read
        cache = await aio.run_io(open_cache, settings, _log)
        data = order.index or await aio.run_io(cache.read_index, order.digest)
        if data is None:
            raise StorageError(f"the index of {order.digest} is no longer in the cache")
        index = await aio.run_io(tree_metadata.decode_slim, data, order.digest)
        fetcher = await open_fetcher(stack, settings, store, cache, index, order.digest, _log)
        prefetcher = Prefetcher(fetcher, order.hot, log=_log)
        ahead: ReadAhead | None = None
        if bool(order.root) and await aio.run_io(_has_room, order):
            find = partial(HotPieces, data, order.digest, order.hot)
            ahead = ReadAhead(order.root, find, order.hot, fetcher.cache.missing)

        def tell() -> None:
            files = 0 if ahead is None else ahead.files
            blocks = block_statistics(fetcher, store)
            _tell(connection, Brought(prefetch=prefetcher.statistics(), blocks=blocks, read_ahead=files))

        async def tell_often() -> None:
            while True:
                tell()
                await asyncio.sleep(TELL_S)

        async with asyncio.TaskGroup() as group:
            telling = group.create_task(tell_often())
            reading = group.create_task(_read_ahead(ahead, is_shown))
            await prefetcher.run()
            if ahead is not None:
                ahead.note_all()
            await reading
            telling.cancel()
        tell()


def _has_room(order: Order) -> bool:
    return has_room(len(order.hot), read_memory())


async def _read_ahead(ahead: ReadAhead | None, is_shown: asyncio.Event) -> None:
    if ahead is None:
        return
    try:
        await aio.run_io(ahead.prepare)
        await is_shown.wait()
        await aio.run_io(ahead.run)
    except (OSError, BootseerError) as error:
        _log(f"hot files are not read ahead any more: {error}")


def _tell(connection: socket.socket, brought: Brought) -> None:
    try:
        connection.sendall(msgspec.json.encode(brought) + b"\n")
    except OSError:
        os._exit(1)  # nobody reads it


def _log(line: str) -> None:
    print(f"bootseer tree: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    set_name(NAME)
    asked_by = socket.socket(fileno=0)
    status = 1
    try:
        status = main(asked_by)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)  # whoever asked hears of the end only now
