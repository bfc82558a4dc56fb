"""Upload of the parts of new HDFS files, one at a time, through working DataNodes, under unique names.

After a failure, a part is written again under another name through another DataNode, as an abandoned upload may
still complete later. The size of each part is checked. With one replica, the writer chooses the DataNode (WebHDFS,
straight to that node). With more, the NameNode chooses and hdfs-native writes.
"""

from __future__ import annotations

import asyncio
import os
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, Protocol

from bootseer.backoff import Backoff
from bootseer.errors import BootseerError, StorageError, StorageTimeout, Truncated, Unavailable
from bootseer.jitter import jitter
from bootseer.storage.hdfs.native import NativeHdfs
from bootseer.storage.hdfs.replicas import MAX_SILENT_S, Replicas
from bootseer.storage.hdfs.webhdfs import WebHdfs
from bootseer.storage.hdfs.webhdfs_client import FileStatus, WebNode

TEMPORARY = ".bootseer-tmp-"  # unfinished files; as in local stores
MIN_PART_BYTES = 16 << 20  # the memory of a writer, so that it can send a part again
MAX_PART_BYTES = 64 << 20
PARTS = 16  # target number of parts for a file of known size
STALL_S = 5.0  # without progress before a part is abandoned
MIN_PART_S = 10.0  # for a part at least; longer if all parts take longer
SLOW = 6.0  # times the recent duration of parts of its size: abandoned
LIKELY = 0.1  # share of suspect DataNodes from which further replicas are left to the NameNode
BACKOFF = Backoff(0.2, 2.0)
NAMES_S = 5.0  # how long the list of DataNodes stays valid
SENDERS = 2  # to one DataNode; its streams delay each other


class Names(Protocol):
    """The calls of a writer to either client."""

    async def status(self, path: str) -> FileStatus: ...
    async def entries(self, path: str) -> list[FileStatus]: ...
    async def delete(self, path: str) -> None: ...
    async def rename(self, path: str, new: str, *, overwrite: bool) -> None: ...


class FileOptions(NamedTuple):
    """Options of new files. 0: the cluster's default."""

    replication: int = 0
    block_bytes: int = 0
    part_bytes: int = 0


class Uploads:
    """State that the writers of one store share: DataNodes, speed of parts, leftovers."""

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
        self.leftovers: list[str] = []  # names of abandoned uploads, which may still complete
        self._replicas = replicas
        self._turns = SendLimit()
        self._nodes: list[WebNode] = []
        self._nodes_s = float("-inf")
        self._s_per_byte = 0.0
        self._replication = options.replication  # 0 until a file has shown the default here

    @property
    def web(self) -> WebHdfs:
        assert self._web is not None  # only a store with it makes a PartsWriter
        return self._web

    def part_bytes(self, size: int | None) -> int:
        if self.options.part_bytes:
            return self.options.part_bytes
        return min(MAX_PART_BYTES, max(MIN_PART_BYTES, (size or 0) // PARTS))

    async def upload(self, directory: str, data: memoryview | bytes, placement: int | None) -> str:
        """Store one part and return its name. Ends within `timeout_s` of the first failure, plus one more try."""
        began_s = time.monotonic()
        tries = 0
        while True:
            node = await self._choose(directory, placement, tries)
            name = f"{directory}/{TEMPORARY}{os.urandom(8).hex()}"
            was_suspect = self._replicas.is_suspect(node, time.monotonic())
            try:
                async with self._turns.take(node) as on_sent:
                    if not was_suspect and self._replicas.is_suspect(node, time.monotonic()):
                        continue  # other uploads have blamed it meanwhile
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
        """Delete a temporary file. On failure, `aclose` of the store tries again."""
        self.leftovers.append(name)
        try:
            await self.names.delete(name)
        except StorageError:
            pass  # it stays on the list

    async def sweep(self) -> None:
        """Delete possible leftovers of abandoned uploads."""
        names, self.leftovers = self.leftovers, []
        for name in names:
            try:
                await self.names.delete(name)
            except StorageError:
                return  # the NameNode does not answer; readers ignore names that begin with TEMPORARY

    async def _blame(self, name: str, node: str) -> None:
        """Find the dead or frozen DataNode of the pipeline and blame it; if there is none, blame the first."""
        nodes = {node} if node else set()
        try:
            for block in await self.web.blocks(name, 0, 1 << 40):
                nodes |= {place.address for place in block.nodes}
            silent = await self.web.find_unresponsive(sorted(nodes))
        except StorageError:
            silent = []
        for address in silent or ([node] if node else []):
            self._replicas.blame([address], time.monotonic())

    def _is_single(self, tries: int) -> bool:
        """Return whether to write a part with one replica and let the NameNode make the others afterwards.

        The NameNode places further replicas, and chooses a dead DataNode again until it knows of the failure.
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
        """Return the time limit of a try: longer if all parts take longer."""
        return max(MIN_PART_S, SLOW * self._s_per_byte * length) * (1 + tries)

    async def _choose(self, directory: str, placement: int | None, tries: int) -> str:
        """Return a DataNode by `placement`, another one at each further try; "" leaves it to the NameNode.

        With several replicas the NameNode chooses: only it places the others, and they matter as much. Then
        hdfs-native writes. It is faster than WebHDFS, whose streams through one DataNode delay each other.
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
                pass  # the list is optional: keep the old one, or let the NameNode choose
        heard = [node.address for node in self._nodes if node.silent_s <= MAX_SILENT_S]
        if not heard:
            return ""
        # Directories start at different nodes, so that the first stripes of all files are not on the same one.
        turn = (placement or 0) + zlib.crc32(directory.encode())
        ordered = sorted(heard)
        wanted = ordered[turn % len(ordered)]
        if not tries and not self._replicas.is_suspect(wanted, now_s):
            return wanted
        return self._replicas.order(heard, turn + tries, now_s)[0]


def pause_s(tries: int) -> float:
    """Return the pause before the next try, after so many failures."""
    return BACKOFF.wait_s(tries, jitter())


class SendLimit:
    """The limit for the writers of one store."""

    def __init__(self, senders: int = SENDERS) -> None:
        self._senders = senders
        self._gates: dict[str, tuple[asyncio.Semaphore, int]] = {}  # by node; how many use it

    @asynccontextmanager
    async def take(self, node: str) -> AsyncIterator[Callable[[], None]]:
        """Wait for a turn. It lasts until the block ends or the yielded function is called, from any thread.

        Without a node (the NameNode chooses) there is no limit.
        """
        if not node:
            yield lambda: None
            return
        gate, users = self._gates.get(node, (asyncio.Semaphore(self._senders), 0))
        self._gates[node] = gate, users + 1
        loop = asyncio.get_running_loop()
        is_held = False

        def end() -> None:
            nonlocal is_held
            if is_held:
                is_held = False
                gate.release()

        def end_soon() -> None:
            try:
                loop.call_soon_threadsafe(end)
            except RuntimeError:
                pass  # the loop is closed: a call that was abandoned long ago

        try:
            await gate.acquire()
            is_held = True
            yield end_soon
        finally:
            end()
            users = self._gates[node][1] - 1
            if users:
                self._gates[node] = gate, users
            else:
                del self._gates[node]
