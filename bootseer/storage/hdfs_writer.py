"""Writes one new HDFS file so that it is there whole or not at all, whatever DataNodes die on the way.

Parts go by WebHDFS straight to a chosen DataNode, which gets the first replica of each block, under names that
nobody else uses; each is checked by its size. A part in trouble is given up and written anew under another name
through another DataNode: a given-up upload may still come back later. At the end the parts are joined by concat
and renamed. Without WebHDFS one stream of hdfs-native does what it can: `StreamWriter`.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
import zlib
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol

from bootseer import aio
from bootseer.errors import (
    AlreadyExists,
    BootseerError,
    NotFound,
    StorageError,
    StorageTimeout,
    Truncated,
    Unavailable,
)
from bootseer.storage.hdfs_native import NativeHdfs
from bootseer.storage.hdfs_replicas import MOST_SILENT_S, Replicas
from bootseer.storage.landing import copy_bytes
from bootseer.storage.webhdfs import WebHdfs
from bootseer.storage.webhdfs_client import FileStatus, WebNode

TEMPORARY = ".bootseer-tmp-"  # files in the making; as in local stores
LEAST_PART_BYTES = 16 << 20  # the memory that a writer keeps, so that a part can be sent again
MOST_PART_BYTES = 64 << 20
PARTS = 16  # a file of known size has about so many
STALL_S = 5.0  # without any progress a part is given up
LEAST_PART_S = 10.0  # a part may take so long; longer when they all do
SLOW = 6.0  # times as long as parts of its size took lately: given up
AT_ONCE = 2  # parts of one file: one is sent while the other is being acknowledged
SMALL_BYTES = 1 << 20  # copied at once; more in a thread
LIKELY = 0.1  # share of DataNodes to avoid from which further replicas are left to the NameNode
CONCAT_AT_ONCE = 16  # names in one request's URL
NAMES_S = 5.0  # how long the list of DataNodes is taken as it is


class Names(Protocol):
    """What a writer needs of either client."""

    async def status(self, path: str) -> FileStatus: ...
    async def entries(self, path: str) -> list[FileStatus]: ...
    async def delete(self, path: str) -> None: ...
    async def rename(self, path: str, new: str, *, overwrite: bool) -> None: ...


class FileOptions(NamedTuple):
    """0: what the cluster has for its default."""

    replication: int = 0
    block_bytes: int = 0
    part_bytes: int = 0


class Uploads:
    """What the writers of one store share: the DataNodes, how fast parts go, leftovers."""

    def __init__(
        self,
        names: Names,
        web: WebHdfs | None,
        replicas: Replicas,
        options: FileOptions,
        *,
        timeout_s: float,
        retried: Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]],
    ) -> None:
        self.names = names
        self._web = web
        self.options = options
        self.timeout_s = timeout_s
        self.retried = retried
        self.retries = self.written_bytes = 0
        self.leftovers: list[str] = []  # names of given-up uploads, which may come back
        self._replicas = replicas
        self._nodes: list[WebNode] = []
        self._nodes_s = float("-inf")
        self._s_per_byte = 0.0

    @property
    def web(self) -> WebHdfs:
        assert self._web is not None  # a store without it makes no PartsWriter
        return self._web

    def part_bytes(self, size: int | None) -> int:
        if self.options.part_bytes:
            return self.options.part_bytes
        return min(MOST_PART_BYTES, max(LEAST_PART_BYTES, (size or 0) // PARTS))

    async def upload(self, folder: str, data: memoryview | bytes, placement: int | None) -> str:
        """Stores one part and gives its name. Ends within `timeout_s`, and one more try, of the first trouble."""
        began_s = time.monotonic()
        tries = 0
        while True:
            node = await self._choose(folder, placement, tries)
            name = f"{folder}/{TEMPORARY}{os.urandom(8).hex()}"
            try:
                await self._try_upload(name, data, node, tries)
                self.written_bytes += len(data)
                return name
            except (Unavailable, Truncated) as error:
                await self._blame(name, node)
                await self.discard(name)
                if time.monotonic() - began_s > self.timeout_s:
                    raise StorageTimeout(f"{error} (given up after {tries + 1} tries)") from error
            except BaseException:
                await self.discard(name)
                raise
            tries += 1
            self.retries += 1
            await asyncio.sleep(pause_s(tries))

    async def discard(self, name: str) -> None:
        """Deletes a file of ours; what cannot be deleted now is tried again when the store is closed."""
        self.leftovers.append(name)
        try:
            await self.names.delete(name)
        except StorageError:
            pass  # it stays on the list

    async def sweep(self) -> None:
        """Deletes what given-up uploads may have left after all."""
        names, self.leftovers = self.leftovers, []
        for name in names:
            try:
                await self.names.delete(name)
            except StorageError:
                return  # the NameNode does not answer: names that begin with TEMPORARY are never read anyway

    async def _blame(self, name: str, node: str) -> None:
        """Finds out which DataNode of the pipeline is dead or frozen; if none is, the first one is to blame."""
        nodes = {node} if node else set()
        try:
            for block in await self.web.blocks(name, 0, 1 << 40):
                nodes |= {place.address for place in block.nodes}
            silent = await self.web.find_silent(sorted(nodes))
        except StorageError:
            silent = []
        for address in silent or ([node] if node else []):
            self._replicas.blame([address], time.monotonic())

    def _is_single(self, tries: int) -> bool:
        """Whether a part is to be written with one replica, the others being made by the NameNode afterwards.

        It chooses where further replicas go, and takes a dead DataNode again and again until it knows of it.
        """
        if self.options.replication == 1:
            return False
        now_s = time.monotonic()
        suspects = sum(self._replicas.is_suspect(node.address, now_s) for node in self._nodes)
        return tries >= 2 or suspects > LIKELY * len(self._nodes)

    async def _try_upload(self, name: str, data: memoryview | bytes, node: str, tries: int) -> None:
        is_single = self._is_single(tries)
        usual_s = self._s_per_byte * len(data)
        began_s = time.monotonic()
        await self.web.write(
            name,
            data,
            node=node,
            replication=1 if is_single else self.options.replication,
            block_bytes=self.options.block_bytes,
            stall_s=STALL_S,
            limit_s=max(LEAST_PART_S, SLOW * usual_s) * (1 + tries),
        )
        took_s = time.monotonic() - began_s
        status = await self.retried(lambda: self.names.status(name))
        if status.size != len(data):
            raise Truncated(f"{name} has {status.size} bytes, not the {len(data)} that were sent")
        if is_single:
            await self.retried(lambda: self.web.set_replication(name, self.options.replication or 3))
        if data:
            per_byte = took_s / len(data)
            self._s_per_byte = 0.7 * self._s_per_byte + 0.3 * per_byte if self._s_per_byte else per_byte

    async def _choose(self, folder: str, placement: int | None, tries: int) -> str:
        """A DataNode: by the placement's number, another one at each further try; "" leaves it to the NameNode."""
        if placement is None and not tries and not self._replicas.any_suspect(time.monotonic()):
            return ""
        now_s = time.monotonic()
        if now_s - self._nodes_s > NAMES_S:
            try:
                self._nodes = await self.web.live_nodes()
                self._nodes_s = now_s
            except BootseerError:
                pass  # the list is an extra: the old one, or the NameNode's own choice
        heard = [node.address for node in self._nodes if node.silent_s <= MOST_SILENT_S]
        if not heard:
            return ""
        # Folders start at different nodes, so that the first stripes of all files are not on the same one.
        turn = (placement or 0) + zlib.crc32(folder.encode())
        ordered = sorted(heard)
        wanted = ordered[turn % len(ordered)]
        if not tries and not self._replicas.is_suspect(wanted, now_s):
            return wanted
        return self._replicas.order(heard, turn + tries, now_s)[0]


class PartsWriter:
    """Cuts what it gets into parts and uploads two at a time; `tasks` is where that happens."""

    def __init__(
        self, uploads: Uploads, tasks: asyncio.TaskGroup, folder: str, *, size: int | None, placement: int | None
    ) -> None:
        self._uploads = uploads
        self._tasks = tasks
        self._folder = folder
        self._placement = placement
        self._part_bytes = uploads.part_bytes(size)
        self._places = asyncio.Semaphore(AT_ONCE)
        self._spare: list[bytearray] = []
        self._buffer: bytearray | None = None
        self._filled = 0  # bytes of the buffer
        self._running: set[asyncio.Task[None]] = set()
        self._parts: list[str] = []
        self._size = 0

    async def write(self, data: memoryview | bytes) -> None:
        view = memoryview(data)
        if view.nbytes == 0:
            return
        view = view.cast("B")
        while len(view):
            if self._buffer is None:
                await self._places.acquire()
                self._buffer = self._spare.pop() if self._spare else bytearray(self._part_bytes)
                self._filled = 0
            count = min(len(view), self._part_bytes - self._filled)
            target = memoryview(self._buffer)[self._filled : self._filled + count]
            if count > SMALL_BYTES:
                await aio.run_io(copy_bytes, target, view[:count])
            else:
                target[:] = view[:count]
            self._filled += count
            view = view[count:]
            if self._filled == self._part_bytes:
                self._upload_buffer()

    async def commit(self, path: str, *, overwrite: bool) -> None:
        """Gives the file its name."""
        await self._seal()
        await rename_whole(self._uploads, self._parts[0], path, overwrite=overwrite)
        self._parts = []

    async def abandon(self) -> None:
        """Deletes what was written."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        parts, self._parts = self._parts, []
        for name in filter(None, parts):
            await self._uploads.discard(name)

    async def _seal(self) -> None:
        """All of it is stored, under one name of ours."""
        if self._buffer is not None:
            self._upload_buffer()
        for _ in range(AT_ONCE):
            await self._places.acquire()
        if not self._parts:
            self._parts = [await self._uploads.upload(self._folder, b"", self._placement)]
        self._parts = [await join_parts(self._uploads, self._parts, self._size)]

    def _upload_buffer(self) -> None:
        assert self._buffer is not None
        self._parts.append("")
        self._size += self._filled
        part = self._upload(len(self._parts) - 1, self._buffer, self._filled)
        self._buffer = None
        task = self._tasks.create_task(part)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _upload(self, number: int, buffer: bytearray, length: int) -> None:
        data = memoryview(buffer)[:length]
        self._parts[number] = await self._uploads.upload(self._folder, data, self._placement)
        self._spare.append(buffer)
        self._places.release()


class StreamWriter:
    """One file through hdfs-native, for clusters without WebHDFS; small ones are written again after trouble."""

    def __init__(self, uploads: Uploads, native: NativeHdfs, folder: str) -> None:
        self._uploads = uploads
        self._native = native
        self._folder = folder
        self._kept = bytearray()  # all that was written, while it is little
        self._name = ""
        self._writer: Any = None
        self._size = 0
        self._is_sealed = False

    async def write(self, data: memoryview | bytes) -> None:
        if not len(data):
            return
        view = memoryview(data).cast("B")
        if self._size + len(view) <= self._uploads.part_bytes(None):
            self._kept += view
            self._size += len(view)
            return
        await self._begin()
        if self._kept:
            await self._native.write(self._writer, self._name, self._kept, STALL_S)
            self._kept = bytearray()
        await self._native.write(self._writer, self._name, view, STALL_S)
        self._size += len(view)

    async def commit(self, path: str, *, overwrite: bool) -> None:
        """Gives the file its name."""
        await self.seal()
        await rename_whole(self._uploads, self._name, path, overwrite=overwrite)
        self._name = ""

    async def seal(self, *, tries_again: bool = True) -> None:
        """All of it is stored, under a name of ours. What was kept is written again after trouble."""
        if not self._is_sealed:
            if self._writer is None:
                await self._write_kept(tries_again)
            else:
                await self._end()
            self._uploads.written_bytes += self._size
            self._is_sealed = True

    async def abandon(self) -> None:
        """Deletes what was written."""
        if self._name:
            await self._uploads.discard(self._name)
            self._name, self._writer = "", None

    async def _begin(self) -> None:
        if self._writer is None:
            self._name = f"{self._folder}/{TEMPORARY}{os.urandom(8).hex()}"
            options = self._uploads.options
            self._writer = await self._native.create(
                self._name, replication=options.replication, block_bytes=options.block_bytes
            )

    async def _end(self) -> None:
        # Closing waits for the acknowledgements of a whole queue of packets.
        await self._native.close(self._writer, self._name, 2 * STALL_S)
        status = await self._uploads.retried(lambda: self._uploads.names.status(self._name))
        if status.size != self._size:
            raise Truncated(f"{self._name} has {status.size} bytes, not the {self._size} that were sent")

    async def _write_kept(self, tries_again: bool) -> None:
        began_s = time.monotonic()
        tries = 0
        while True:
            try:
                await self._begin()
                if self._kept:
                    await self._native.write(self._writer, self._name, self._kept, STALL_S)
                await self._end()
                return
            except (Unavailable, Truncated):
                await self.abandon()
                if not tries_again or time.monotonic() - began_s > self._uploads.timeout_s:
                    raise
                self._uploads.retries += 1
                tries += 1
                await asyncio.sleep(pause_s(tries))


def pause_s(tries: int) -> float:
    """Before the next try, after so many in vain."""
    return random.random() * min(2.0, 0.1 * 2.0**tries)  # noqa: S311  no secret


async def join_parts(uploads: Uploads, parts: list[str], size: int) -> str:
    """Joins the parts to the first one; its name and size are right when this returns."""
    first, rest = parts[0], parts[1:]
    for start in range(0, len(rest), CONCAT_AT_ONCE):
        await _concat(uploads, first, rest[start : start + CONCAT_AT_ONCE])
    if rest:
        status = await uploads.retried(lambda: uploads.names.status(first))
        if status.size != size:
            raise Truncated(f"{first} has {status.size} bytes after it was joined from parts of {size}")
    return first


async def _concat(uploads: Uploads, first: str, sources: list[str]) -> None:
    began_s = time.monotonic()
    tries = 0
    while True:
        try:
            await uploads.web.concat(first, sources)
            return
        except NotFound:
            # All or none are moved: if the last one is gone, an earlier try got through without its answer.
            if tries and not await _is_there(uploads, sources[-1]):
                return
            raise
        except Unavailable:
            if time.monotonic() - began_s > uploads.timeout_s:
                raise
            tries += 1
            uploads.retries += 1
            await asyncio.sleep(pause_s(tries))


async def rename_whole(uploads: Uploads, name: str, path: str, *, overwrite: bool) -> None:
    """Renames a file of ours; knows it when an earlier try got through although its answer did not."""
    began_s = time.monotonic()
    tries = 0
    while True:
        try:
            await uploads.names.rename(name, path, overwrite=overwrite)
            return
        except (NotFound, AlreadyExists):
            # Nobody else knows the name: if it is gone, it was us who renamed it.
            if tries and not await _is_there(uploads, name):
                return
            raise
        except Unavailable:
            if time.monotonic() - began_s > uploads.timeout_s:
                raise
            tries += 1
            uploads.retries += 1
            await asyncio.sleep(pause_s(tries))


async def _is_there(uploads: Uploads, path: str) -> bool:
    try:
        await uploads.retried(lambda: uploads.names.status(path))
    except NotFound:
        return False
    return True
