"""HDFS: hdfs-native for reading, WebHDFS for what that cannot do, and for all of it where it is not installed.

hdfs-native has no deadline, no choice of replica and no cancel. So a read whose DataNode stalls goes on from its
last byte by another way: WebHDFS at another DataNode that holds the block, or a new open; the DataNode to blame is
avoided for a while. Files are written by bootseer.storage.hdfs_writer. URLs: hdfs://, webhdfs://, swebhdfs://.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

from bootseer import aio
from bootseer.errors import (
    AlreadyExists,
    ConfigError,
    NotFound,
    StorageError,
    StorageTimeout,
    Unavailable,
)
from bootseer.storage.counts import Counts
from bootseer.storage.hdfs_arrow import open_arrow
from bootseer.storage.hdfs_arrow import why_not as why_no_arrow
from bootseer.storage.hdfs_conf import HdfsAddress, read_address
from bootseer.storage.hdfs_native import NativeHdfs
from bootseer.storage.hdfs_reading import HdfsReader, etag_of
from bootseer.storage.hdfs_replicas import Replicas
from bootseer.storage.hdfs_uploads import TEMPORARY, FileOptions, Names, Uploads, pause_s
from bootseer.storage.hdfs_writer import PartsWriter, StreamWriter, join_parts, rename_whole
from bootseer.storage.joining import join_by_copy
from bootseer.storage.paths import check_offset, check_path
from bootseer.storage.protocol import Entry, Features, Stat, Store
from bootseer.storage.webhdfs import WebHdfs
from bootseer.storage.webhdfs_client import FileStatus, WebHdfsClient

T = TypeVar("T")

PROBE_S = 3.0  # for finding out whether a web server is where it usually is
OPTIONS = ("web", "user", "conf_folder", "replication", "block_bytes", "part_bytes")


class HdfsStore:
    """Implements `Store`. Made by `open`."""

    def __init__(
        self,
        address: HdfsAddress,
        native: NativeHdfs | None,
        web: WebHdfs | None,
        *,
        timeout_s: float,
        options: FileOptions,
    ) -> None:
        if native is None and web is None:
            raise ConfigError(f"{address.url}: there is neither hdfs-native nor WebHDFS to reach it")
        self.url = address.url
        self.user = address.user
        self.has_permissions = address.has_permissions
        self.features = Features(creates_if_absent=True, concatenates=web is not None, has_replicas=True)
        self._folder = address.folder
        self.native = native
        self._web = web
        self._web_is_guessed = address.is_guessed
        self._timeout_s = timeout_s
        self._options = options
        self._replicas = Replicas()
        self._counts = Counts("reroutes")
        self._pid = os.getpid()
        self._reader = HdfsReader(self, self._replicas, self._counts)
        self._uploads = self._make_uploads()

    @classmethod
    def open(cls, url: str, *, timeout_s: float = 30.0, options: Mapping[str, object] | None = None) -> Store:
        """The folder that a URL names, by hdfs-native if it is installed, else by libhdfs, else by WebHDFS alone.

        Options: `web`: HOST:PORT of the NameNode's web server, "" for none; `conf_folder`: in place of
        HADOOP_CONF_DIR; `user`; `replication`, `block_bytes`: of new files; `part_bytes`: written at once, kept
        in memory by each writer.
        """
        given = dict(options or {})
        if unknown := sorted(set(given) - set(OPTIONS)):
            raise ConfigError(f"HDFS has no option {unknown[0]!r}; it has {', '.join(OPTIONS)}")
        address = read_address(url, given, os.environ)
        web = None
        if address.namenodes:
            client = WebHdfsClient(
                address.namenodes, user=address.user, timeout_s=timeout_s, tls=address.tls, rpc=address.rpc
            )
            web = WebHdfs(client, timeout_s=timeout_s)
        native = None
        if address.native:
            try:
                native = NativeHdfs(
                    address.native, timeout_s=timeout_s, conf_folder=str(given.get("conf_folder", ""))
                )
            except ImportError as error:
                reason = why_no_arrow(os.environ)
                if not reason:
                    return open_arrow(address, timeout_s=timeout_s)
                if web is None or address.is_guessed:
                    raise ConfigError(
                        f"{address.url}: there is no client for HDFS: pip install hdfs-native"
                        f" (else: {reason}; and no WebHDFS is configured)"
                    ) from error
        numbers = {name: _number(given, name) for name in ("replication", "block_bytes", "part_bytes")}
        return cls(address, native, web, timeout_s=timeout_s, options=FileOptions(**numbers))

    # ---- names -------------------------------------------------------------------------------------------------

    async def stat(self, path: str) -> Stat:
        full = self._full(path)
        status = await self.status(full)
        if status.is_folder:
            raise NotFound(f"{self.url}: {path!r} is a folder")
        return Stat(status.size, etag_of(status))

    async def list(self, folder: str) -> list[Entry]:
        full = self._full(folder, is_folder=True)
        try:
            found = await self.retried(lambda: self._names.entries(full))
        except NotFound:
            if folder:
                raise
            return []  # the root is made by the first file
        if any(not status.name for status in found):
            raise NotFound(f"{self.url}: {folder!r} is a file, not a folder")
        return sorted(
            Entry(status.name, 0 if status.is_folder else status.size, status.is_folder, status.mtime_ms / 1000)
            for status in found
            if not status.name.startswith(TEMPORARY)
        )

    async def lineage(self, path: str) -> tuple[dict[str, FileStatus], int]:
        """The root of HDFS and every path from there down to a file; and which of them is this store's root."""
        names = [name for name in self._full(path).split("/") if name]
        fulls = ["/" + "/".join(names[:count]) for count in range(len(names) + 1)]
        found = await aio.map_bounded(self.status, fulls, width=8)
        return dict(zip(fulls, found, strict=True)), len([name for name in self._folder.split("/") if name])

    async def publish(self, path: str, data: bytes, *, if_absent: bool = False) -> Stat:
        full = self._full(path)
        if if_absent:  # saves the writing; the rename decides
            await self._refuse_existing(path, full)
        if not await self._try_native(full, data, overwrite=not if_absent):
            async with self._writer(full, len(data), None) as writer:
                await writer.write(data)
                await writer.commit(full, overwrite=not if_absent)
        return await self.stat(path)

    async def stage(self, path: str, data: bytes, *, folder: str) -> StoredFile | None:
        """By hdfs-native; None without it, or when its DataNodes fail."""
        full = self._full(path)
        writer = await self._write_native(self._full(folder, is_folder=True), data)
        return None if writer is None else StoredFile(writer, full)

    async def _try_native(self, full: str, data: bytes, *, overwrite: bool) -> bool:
        """Publishes by hdfs-native, quicker for little; False when its DataNodes fail and WebHDFS could do it."""
        writer = await self._write_native(full.rpartition("/")[0], data)
        if writer is None:
            return False
        try:
            await writer.commit(full, overwrite=overwrite)
        except BaseException:
            await writer.abandon()
            raise
        return True

    async def _write_native(self, folder: str, data: bytes) -> StreamWriter | None:
        """A file of ours in the folder, stored and without its name; None where WebHDFS has to do it."""
        if self.native is None:
            return None
        web = await self.find_web(folder)
        self._check_process()
        writer = StreamWriter(self._uploads, self.native, folder)
        try:
            try:
                await writer.write(data)
                await writer.seal(tries_again=web is None)
            except Unavailable:
                if web is None:
                    raise
                await writer.abandon()
                self._counts.add("retries")
                return None
        except BaseException:
            await writer.abandon()
            raise
        return writer

    async def concat(self, path: str, parts: Sequence[str]) -> None:
        full = self._full(path)
        sources = [self._full(part) for part in parts]
        if not sources:
            raise StorageError(f"{self.url}: {path!r} cannot be joined from no parts")
        if {source.rpartition("/")[0] for source in sources} != {full.rpartition("/")[0]}:
            raise StorageError(f"{self.url}: HDFS joins only files of one folder to {path!r}")
        if len(set(sources)) < len(sources):
            raise StorageError(f"{self.url}: {path!r} cannot be joined from the same part twice")
        if await self.find_web(full) is None:
            await join_by_copy(self, path, parts)
            return
        await self._refuse_existing(path, full)
        sizes = {source: (await self.status(source)).size for source in sources}
        filled = [source for source in sources if sizes[source]] or sources[:1]  # HDFS joins no empty files
        first = await join_parts(self._uploads, filled, sum(sizes.values()))
        await rename_whole(self._uploads, first, full, overwrite=False)
        for source in sources:
            if source not in filled:
                await self.retried(partial(self._names.delete, source))

    async def delete(self, path: str) -> None:
        full = self._full(path)
        self._reader.forget(full)
        await self.retried(lambda: self._names.delete(full))

    # ---- bytes -------------------------------------------------------------------------------------------------

    async def read_into(
        self, path: str, offset: int, target: memoryview, *, etag: str = "", attempt: int = 0
    ) -> None:
        full = self._full(path)
        check_offset(self.url, path, offset)
        self._check_process()
        await self._reader.read_into(full, offset, target, etag=etag, attempt=attempt)

    @asynccontextmanager
    async def create(
        self, path: str, *, size: int | None = None, placement: int | None = None
    ) -> AsyncIterator[PartsWriter | StreamWriter]:
        full = self._full(path)
        await self._refuse_existing(path, full)
        async with self._writer(full, size, placement) as writer:
            yield writer
            await writer.commit(full, overwrite=False)

    async def aclose(self) -> None:
        """Nothing is kept open but what is in memory; idle threads end by themselves."""
        if self._pid == os.getpid():
            await self._uploads.sweep()
        self._reader = HdfsReader(self, self._replicas, self._counts)

    def statistics(self) -> dict[str, int]:
        """`reroutes`: blocks that came from another DataNode because the first one stalled."""
        counts = self._counts.to_dict()
        counts["written_bytes"] += self._uploads.written_bytes
        counts["retries"] += self._uploads.retries
        counts["requests"] += (self.native.requests if self.native else 0) + (
            self._web.requests if self._web else 0
        )
        return counts

    @asynccontextmanager
    async def _writer(
        self, full: str, size: int | None, placement: int | None
    ) -> AsyncIterator[PartsWriter | StreamWriter]:
        """A writer that leaves nothing behind when the block ends with an error, its own errors included."""
        self._check_process()
        folder = full.rpartition("/")[0]
        web = await self.find_web(full)
        failure: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                writer: PartsWriter | StreamWriter
                if web is not None:
                    writer = PartsWriter(self._uploads, tasks, folder, size=size, placement=placement)
                else:
                    assert self.native is not None
                    writer = StreamWriter(self._uploads, self.native, folder)
                try:
                    yield writer
                except BaseException:
                    await writer.abandon()
                    raise
        except BaseExceptionGroup as failures:
            failure = failures.exceptions[0]
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # it holds this frame

    async def _refuse_existing(self, path: str, full: str) -> None:
        try:
            await self.status(full)
        except NotFound:
            return
        raise AlreadyExists(f"{self.url}: {path!r} exists")

    # ---- inside ------------------------------------------------------------------------------------------------

    @property
    def _names(self) -> Names:
        names = self.native or self._web
        assert names is not None
        return names

    async def find_web(self, full: str = "") -> WebHdfs | None:
        """WebHDFS, if there is one that takes this path; where its address is a guess, one look decides."""
        if "%" in full and self.native is not None:
            return None  # some DataNodes decode names twice
        if self._web is not None and self._web_is_guessed:
            try:
                async with asyncio.timeout(PROBE_S):
                    await self._web.status("/")
            except (StorageError, TimeoutError):
                self._web = None
                self.features = self.features._replace(concatenates=False)
            self._web_is_guessed = False
        return self._web

    async def status(self, full: str) -> FileStatus:
        """Of an absolute path."""
        return await self.retried(lambda: self._names.status(full))

    async def retried(self, call: Callable[[], Awaitable[T]]) -> T:
        """For calls to the NameNode that may be made twice: it may be restarting, or failing over."""
        began_s = time.monotonic()
        tries = 0
        while True:
            try:
                return await call()
            except StorageTimeout:
                raise
            except Unavailable as error:
                tries += 1
                pause = pause_s(tries)
                if time.monotonic() + pause - began_s > self._timeout_s:
                    raise StorageTimeout(f"{error} (for {self._timeout_s:g} s)") from error
                self._counts.add("retries")
                await asyncio.sleep(pause)

    def _make_uploads(self) -> Uploads:
        return Uploads(
            self._names,
            self._web,
            self.native,
            self._replicas,
            self._options,
            timeout_s=self._timeout_s,
            retried=self.retried,
        )

    def _check_process(self) -> None:
        """In the child of a fork what the parent has open is of no use, and its leftovers are its own."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._reader = HdfsReader(self, self._replicas, self._counts)
            self._uploads = self._make_uploads()

    def _full(self, path: str, *, is_folder: bool = False) -> str:
        if ":" in check_path(self.url, path, is_folder=is_folder):
            raise StorageError(f"{self.url}: {path!r} has a colon, which HDFS takes in no name")
        return f"{self._folder}/{path}".rstrip("/") or "/"


class StoredFile:
    """Implements `staging.Stored`: a file of ours that waits for its name."""

    def __init__(self, writer: StreamWriter, full: str) -> None:
        self._writer = writer
        self._full = full

    async def publish(self, *, if_absent: bool = False) -> None:
        try:
            await self._writer.commit(self._full, overwrite=not if_absent)
        except BaseException:
            await self._writer.abandon()
            raise

    async def discard(self) -> None:
        await self._writer.abandon()


def _number(options: Mapping[str, object], name: str) -> int:
    value = options.get(name, 0)
    try:
        number = int(str(value))
    except ValueError:
        number = -1
    if number < 0:
        raise ConfigError(f"the option {name} of HDFS is a number from 0 on, not {value!r}")
    return number
