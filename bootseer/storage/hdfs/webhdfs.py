"""WebHDFS for asyncio: each call runs in a thread, and its connection is cut when the caller stops waiting.

Second to hdfs-native for reading, first for writing: it reaches a chosen DataNode, joins files without copying,
and each of its calls ends. `bootseer.storage.hdfs.store` makes a store of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from bootseer import aio
from bootseer.errors import StorageTimeout
from bootseer.storage.engine.cancelling import CancelHandle
from bootseer.storage.engine.revocable_buffer import RevocableBuffer
from bootseer.storage.hdfs.webhdfs_client import (
    CONNECT_S,
    FileStatus,
    WebBlock,
    WebHdfsClient,
    WebNode,
)

T = TypeVar("T")

CALL_THREADS = 4  # of calls to the NameNode: a kept connection each
ANSWER_S = 0.7  # a live DataNode answers sooner, unless it is very busy; then others are better anyway


class WebHdfs:
    """One HDFS over HTTP. `timeout_s`: the longest time for a call to one NameNode; the next one has as much."""

    def __init__(self, client: WebHdfsClient, *, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._pool = aio.AbandonablePool("namenode", CALL_THREADS)

    @property
    def requests(self) -> int:
        return self._client.requests

    def close(self) -> None:
        """Close the kept connections and end idle threads; later calls still work."""
        self._client.close()
        self._pool.end_idle()

    async def status(self, path: str) -> FileStatus:
        return await self._ask(path, partial(self._client.status, path))

    async def entries(self, path: str) -> list[FileStatus]:
        """List a directory; a file is listed as itself, without a name."""
        return await self._ask(path, partial(self._client.entries, path))

    async def delete(self, path: str) -> None:
        """Delete a path with its contents; a missing path is no error."""
        await self._ask(path, partial(self._client.delete, path))

    async def rename(self, path: str, new: str, *, overwrite: bool) -> None:
        await self._ask(path, lambda wire: self._client.rename(path, new, overwrite=overwrite, wire=wire))

    async def set_replication(self, path: str, replication: int) -> None:
        await self._ask(path, partial(self._client.set_replication, path, replication))

    async def concat(self, path: str, sources: Sequence[str]) -> None:
        """Append the sources to `path`, and remove them."""
        await self._ask(path, partial(self._client.concat, path, sources))

    async def blocks(self, path: str, offset: int, length: int) -> list[WebBlock]:
        return await self._ask(path, partial(self._client.blocks, path, offset, length))

    async def live_nodes(self) -> list[WebNode]:
        return await self._ask("/", self._client.live_nodes)

    async def find_unresponsive(self, nodes: Sequence[str]) -> list[str]:
        """Return those of the DataNodes (host:port) that are dead or frozen."""

        async def answers(node: str) -> bool:
            try:
                limit_s = ANSWER_S + CONNECT_S  # address resolution has no deadline of its own
                return await aio.run_abandonable(self._client.answers, node, ANSWER_S, timeout_s=limit_s)
            except TimeoutError:
                return False

        answered = await aio.map_bounded(answers, nodes, width=len(nodes))
        return [node for node, has_answered in zip(nodes, answered, strict=True) if not has_answered]

    async def read(
        self, path: str, offset: int, landing: RevocableBuffer, length: int, *, node: str, stall_s: float
    ) -> None:
        """Land a range from one DataNode, "" for the NameNode's choice."""
        breaker = CancelHandle()

        def read() -> None:
            self._client.read(path, offset, length, landing, breaker, node=node, stall_s=stall_s)

        # The socket's deadline comes first; this one is for steps without one, such as name resolution.
        await self._run(path, read, breaker, limit_s=stall_s + CONNECT_S, moved_s=landing.moved)

    async def write(
        self,
        path: str,
        data: memoryview | bytes,
        *,
        node: str,
        replication: int,
        block_bytes: int,
        stall_s: float,
        limit_s: float,
        on_sent: Callable[[], None] = lambda: None,
    ) -> None:
        """Write a new file through one DataNode. After an error its name must not be used again.

        `on_sent` is called, in another thread, when only the answer is missing.
        """
        breaker = CancelHandle()

        def write() -> None:
            self._client.write(
                path, data, breaker, node=node, replication=replication, block_bytes=block_bytes, stall_s=stall_s,
                on_sent=on_sent,
            )  # fmt: skip

        await self._run(path, write, breaker, limit_s=limit_s)

    async def _ask(self, path: str, func: Callable[[CancelHandle], T]) -> T:
        wire = CancelHandle()
        try:
            limit_s = self._timeout_s * self._client.namenode_count
            return await aio.run_abandonable(func, wire, timeout_s=limit_s, pool=self._pool)
        except TimeoutError as error:
            raise StorageTimeout(f"webhdfs {path}: no answer within {limit_s:g} s") from error
        finally:
            wire.cut()

    async def _run(
        self,
        path: str,
        func: Callable[[], None],
        breaker: CancelHandle,
        *,
        limit_s: float,
        moved_s: Callable[[], float] | None = None,
    ) -> None:
        try:
            await aio.run_abandonable(func, timeout_s=limit_s, moved_s=moved_s)
        except TimeoutError as error:
            raise StorageTimeout(f"webhdfs {path}: not done within {limit_s:g} s") from error
        finally:
            breaker.cut()
