"""HDFS: hdfs-native for reading; WebHDFS for missing features, and for everything where hdfs-native is missing.

hdfs-native has no deadline, no choice of replica and no cancel. A read whose DataNode stalls therefore continues
from its last byte by another route: WebHDFS at another DataNode with the block, or a new open. The store avoids
the slow DataNode for a while. bootseer.storage.hdfs.writer writes files. URLs: hdfs://, webhdfs://, swebhdfs://.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
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
from bootseer.storage.engine.counts import StoreCounters
from bootseer.storage.hdfs.arrow import open_arrow
from bootseer.storage.hdfs.arrow import why_not as why_no_arrow
from bootseer.storage.hdfs.conf import HdfsAddress, read_address
from bootseer.storage.hdfs.native import NativeHdfs
from bootseer.storage.hdfs.reading import HdfsRangeReader, etag_of
from bootseer.storage.hdfs.replicas import Replicas
from bootseer.storage.hdfs.uploads import TEMPORARY, FileOptions, Names, Uploads, pause_s
from bootseer.storage.hdfs.webhdfs import WebHdfs
from bootseer.storage.hdfs.webhdfs_client import FileStatus, WebHdfsClient
from bootseer.storage.hdfs.writer import PartsWriter, StreamWriter, join_parts, rename_whole
from bootseer.storage.joining import concat_by_copy
from bootseer.storage.paths import check_offset, check_path
from bootseer.storage.protocol import Entry, Features, Stat, Store
from bootseer.tuning import current

T = TypeVar("T")

PROBE_S = 3.0  # to check for a web server at its default port
OPTIONS = ("web", "user", "conf_folder", "replication", "block_bytes", "part_bytes")


class HdfsStore:
    """A `Store`. `open` makes it."""

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
            raise ConfigError(f"{address.url}: neither hdfs-native nor WebHDFS is available")
        self.url = address.url
        self.user = address.user
        self.has_permissions = address.has_permissions
        self.features = Features(creates_if_absent=True, concatenates=web is not None, has_replicas=True)
        self._directory = address.folder
        self.native = native
        self._web = web
        self._web_is_guessed = address.is_guessed
        self._timeout_s = timeout_s
        self._options = options
        self._replicas = Replicas(current().storage.hdfs_avoid_s)
        self._counts = StoreCounters("reroutes")
        self._pid = os.getpid()
        self._reader = HdfsRangeReader(self, self._replicas, self._counts)
        self._uploads = self._make_uploads()

    @classmethod
    def open(cls, url: str, *, timeout_s: float = 30.0, options: Mapping[str, object] | None = None) -> Store:
        """Open the directory of a URL: by hdfs-native if installed, else by libhdfs, else by WebHDFS alone.

        Options: `web`: HOST:PORT of the NameNode's web server, "" for none; `conf_folder`: replaces
        HADOOP_CONF_DIR; `user`; `replication`, `block_bytes`: of new files; `part_bytes`: written at once, in
        memory of each writer.
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
                        f"{address.url}: no HDFS client is available: pip install hdfs-native"
                        f" (else: {reason}; and no WebHDFS is configured)"
                    ) from error
        numbers = {name: _number(given, name) for name in ("replication", "block_bytes", "part_bytes")}
        return cls(address, native, web, timeout_s=timeout_s, options=FileOptions(**numbers))

    # ---- names -------------------------------------------------------------------------------------------------

    async def stat(self, path: str) -> Stat:
        full = self._full(path)
        status = await self.status(full)
        if status.is_folder:
            raise NotFound(f"{self.url}: {path!r} is a directory")
        return Stat(status.size, etag_of(status))

    async def list(self, directory: str) -> list[Entry]:
        full = self._full(directory, is_folder=True)
        try:
            found = await self.retried(lambda: self._names.entries(full))
        except NotFound:
            if directory:
                raise
            return []  # the first file makes the root
        if any(not status.name for status in found):
            raise NotFound(f"{self.url}: {directory!r} is a file, not a directory")
        return sorted(
            Entry(status.name, 0 if status.is_folder else status.size, status.is_folder, status.mtime_ms / 1000)
            for status in found
            if not status.name.startswith(TEMPORARY)
        )

    async def lineage(self, path: str) -> tuple[dict[str, FileStatus], int]:
        """Return the statuses of all paths from HDFS's root down to a file, and the index of this store's root."""
        names = [name for name in self._full(path).split("/") if name]
        fulls = ["/" + "/".join(names[:count]) for count in range(len(names) + 1)]
        found = await aio.map_bounded(self.status, fulls, width=8)
        return dict(zip(fulls, found, strict=True)), len([name for name in self._directory.split("/") if name])

    async def publish(self, path: str, data: bytes, *, if_absent: bool = False) -> Stat:
        full = self._full(path)
        if if_absent:  # avoids the write; the rename decides
            await self._refuse_existing(path, full)
        if not await self._try_native(full, data, overwrite=not if_absent):
            async with self._writer(full, len(data), None) as writer:
                await writer.write(data)
                await writer.commit(full, overwrite=not if_absent)
        return await self.stat(path)

    async def stage(self, path: str, data: bytes, *, folder: str) -> StoredFile | None:
        """Stage a file by hdfs-native; None without it, or if its DataNodes fail."""
        full = self._full(path)
        writer = await self._write_native(self._full(folder, is_folder=True), data)
        return None if writer is None else StoredFile(writer, full)

    async def _try_native(self, full: str, data: bytes, *, overwrite: bool) -> bool:
        """Publish by hdfs-native, faster for small files; False if its DataNodes fail and WebHDFS can do it."""
        writer = await self._write_native(full.rpartition("/")[0], data)
        if writer is None:
            return False
        try:
            await writer.commit(full, overwrite=overwrite)
        except BaseException:
            await writer.abandon()
            raise
        return True

    async def _write_native(self, directory: str, data: bytes) -> StreamWriter | None:
        """Store a temporary file in the directory; None where WebHDFS has to do it."""
        if self.native is None:
            return None
        web = await self.find_web(directory)
        self._check_process()
        writer = StreamWriter(self._uploads, self.native, directory)
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
            raise StorageError(f"{self.url}: HDFS joins only files of one directory to {path!r}")
        if len(set(sources)) < len(sources):
            raise StorageError(f"{self.url}: {path!r} cannot be joined from the same part twice")
        if await self.find_web(full) is None:
            await concat_by_copy(self, path, parts)
            return
        await self._refuse_existing(path, full)
        sizes = {source: (await self.status(source)).size for source in sources}
        filled = [source for source in sources if sizes[source]] or sources[:1]  # HDFS joins no empty files
        first = await join_parts(self._uploads, filled, sum(sizes.values()))
        await rename_whole(self._uploads, first, full, overwrite=False)
        for source in sources:
            if source not in filled:
                with suppress(StorageError):  # the file is complete
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
        """Delete leftovers, and close kept connections; idle threads end by themselves."""
        if self._pid == os.getpid():
            await self._uploads.sweep()
        if self._web is not None:
            self._web.close()
        self._reader = HdfsRangeReader(self, self._replicas, self._counts)

    def statistics(self) -> dict[str, int]:
        """Return counts. `reroutes`: blocks that another DataNode sent because the first one stalled."""
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
        """Make a writer that leaves nothing behind if the block, or the writer, fails."""
        self._check_process()
        directory = full.rpartition("/")[0]
        web = await self.find_web(full)
        async with aio.TaskGroup() as tasks:
            writer: PartsWriter | StreamWriter
            if web is not None:
                writer = PartsWriter(self._uploads, tasks, directory, size=size, placement=placement)
            else:
                assert self.native is not None
                writer = StreamWriter(self._uploads, self.native, directory)
            try:
                yield writer
            except BaseException:
                await writer.abandon()
                raise

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
        """Return WebHDFS, if there is one that takes this path; one request decides if its address is a guess."""
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
        """Return the status of an absolute path."""
        return await self.retried(lambda: self._names.status(full))

    async def retried(self, call: Callable[[], Awaitable[T]]) -> T:
        """Retry an idempotent call to the NameNode, which may be restarting or failing over."""
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
        """In the child of a fork, drop the parent's open files and leftovers."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._reader = HdfsRangeReader(self, self._replicas, self._counts)
            self._uploads = self._make_uploads()

    def _full(self, path: str, *, is_folder: bool = False) -> str:
        if ":" in check_path(self.url, path, is_folder=is_folder):
            raise StorageError(f"{self.url}: {path!r} has a colon, which HDFS does not allow in names")
        return f"{self._directory}/{path}".rstrip("/") or "/"


class StoredFile:
    """A temporary file that waits for its name. Implements `staging.Stored`."""

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
        raise ConfigError(f"HDFS option {name}: must be a number from 0 on, not {value!r}")
    return number
