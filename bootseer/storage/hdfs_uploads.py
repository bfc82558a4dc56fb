"""Stores one part of a new HDFS file at a time, through whichever DataNodes work; names that nobody else uses.

A part in trouble is given up and written anew under another name through another DataNode, as a given-up upload
may still come back later. Each part is checked by its size. With one replica a DataNode is chosen for it (WebHDFS,
straight to that node); with more the NameNode chooses, and hdfs-native writes.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
import zlib
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol

from bootseer.errors import BootseerError, StorageError, StorageTimeout, Truncated, Unavailable
from bootseer.storage.hdfs_native import NativeHdfs
from bootseer.storage.hdfs_replicas import MOST_SILENT_S, Replicas
from bootseer.storage.hdfs_turns import Turns
from bootseer.storage.webhdfs import WebHdfs
from bootseer.storage.webhdfs_client import FileStatus, WebNode

TEMPORARY = ".bootseer-tmp-"  # files in the making; as in local stores
LEAST_PART_BYTES = 16 << 20  # the memory that a writer keeps, so that a part can be sent again
MOST_PART_BYTES = 64 << 20
PARTS = 16  # a file of known size has about so many
STALL_S = 5.0  # without any progress a part is given up
LEAST_PART_S = 10.0  # a part may take so long; longer when they all do
SLOW = 6.0  # times as long as parts of its size took lately: given up
LIKELY = 0.1  # share of DataNodes to avoid from which further replicas are left to the NameNode
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
        native: NativeHdfs | None,
        replicas: Replicas,
        options: FileOptions,
        *,
        timeout_s: float,
        retried: Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]],
    ) -> None:
        self.names = names
        self._web = web
        self._native = native
        self.options = options
        self.timeout_s = timeout_s
        self.retried = retried
        self.retries = self.written_bytes = 0
        self.leftovers: list[str] = []  # names of given-up uploads, which may come back
        self._replicas = replicas
        self._turns = Turns()
        self._nodes: list[WebNode] = []
        self._nodes_s = float("-inf")
        self._s_per_byte = 0.0
        self._replication = options.replication  # 0 until a file has shown what is usual here

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
            was_suspect = self._replicas.is_suspect(node, time.monotonic())
            try:
                async with self._turns.take(node) as on_sent:
                    if not was_suspect and self._replicas.is_suspect(node, time.monotonic()):
                        continue  # others found out meanwhile
                    await self._try_upload(name, data, node, tries, on_sent)
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

    async def _try_upload(
        self, name: str, data: memoryview | bytes, node: str, tries: int, on_sent: Callable[[], None]
    ) -> None:
        is_single = self._is_single(tries)
        began_s = time.monotonic()
        if node or self._native is None or is_single:
            await self.web.write(
                name,
                data,
                node=node,
                replication=1 if is_single else self.options.replication,
                block_bytes=self.options.block_bytes,
                stall_s=STALL_S,
                limit_s=self._limit_s(len(data), tries),
                on_sent=on_sent,
            )
        else:
            await self._write_native(self._native, name, data, self._limit_s(len(data), tries))
        took_s = time.monotonic() - began_s
        status = await self.retried(lambda: self.names.status(name))
        if status.size != len(data):
            raise Truncated(f"{name} has {status.size} bytes, not the {len(data)} that were sent")
        if is_single:
            await self.retried(lambda: self.web.set_replication(name, self._replication or 3))
        else:
            self._replication = status.replication
        if data:
            per_byte = took_s / len(data)
            self._s_per_byte = 0.7 * self._s_per_byte + 0.3 * per_byte if self._s_per_byte else per_byte

    async def _write_native(self, native: NativeHdfs, name: str, data: memoryview | bytes, limit_s: float) -> None:
        options = self.options
        try:
            async with asyncio.timeout(limit_s):
                writer = await native.create(
                    name, replication=options.replication, block_bytes=options.block_bytes
                )
                await native.write(writer, name, data, STALL_S)
                await native.close(writer, name, 2 * STALL_S)
        except TimeoutError as error:
            raise StorageTimeout(f"{name}: not done within {limit_s:g} s") from error

    def _limit_s(self, length: int, tries: int) -> float:
        """How long a try may take: longer when they all do."""
        return max(LEAST_PART_S, SLOW * self._s_per_byte * length) * (1 + tries)

    async def _choose(self, folder: str, placement: int | None, tries: int) -> str:
        """A DataNode: by the placement's number, another one at each further try; "" leaves it to the NameNode.

        With several replicas it is left to it: it alone says where the others go, and they decide as much. Then
        hdfs-native writes, quicker than WebHDFS, whose streams through one DataNode hold each other up.
        """
        has_choice = placement is not None and (self._replication in (0, 1) or self._native is None)
        if not has_choice and not tries and not self._replicas.any_suspect(time.monotonic()):
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


def pause_s(tries: int) -> float:
    """Before the next try, after so many in vain."""
    return random.random() * min(2.0, 0.1 * 2.0**tries)  # noqa: S311  no secret
