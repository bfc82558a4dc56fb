"""Reads of ranges of HDFS files that switch to another route when a DataNode stalls, dies or sends wrong data.

The first try uses hdfs-native with a file that stays open. From the last byte on, the next try uses WebHDFS at
another DataNode that has the block; then a new open; and so on. The reader avoids a suspect DataNode for a while.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol

from bootseer.errors import (
    BootseerError,
    IntegrityError,
    NotFound,
    SourceChanged,
    StorageError,
    StorageTimeout,
    Truncated,
    Unavailable,
)
from bootseer.storage.engine.counts import StoreCounters
from bootseer.storage.engine.revocable_buffer import RevocableBuffer
from bootseer.storage.hdfs.native import NativeFile, NativeHdfs
from bootseer.storage.hdfs.replicas import Replicas
from bootseer.storage.hdfs.uploads import pause_s
from bootseer.storage.hdfs.webhdfs import WebHdfs
from bootseer.storage.hdfs.webhdfs_client import FileStatus, WebBlock

STALL_S = 1.5  # without a packet; a busy DataNode still sends some all the time
TRIES = 3  # in a row without data, then the caller decides
RESTARTS = 10  # of a read without an etag, when its file is replaced meanwhile
OPEN_FILES = 512  # kept open; each holds its block locations
WIN_S = 5.0  # a read cancelled so soon after another route had delivered the same bytes has lost a race


class Clients(Protocol):
    """The clients of the store for its HDFS."""

    url: str
    native: NativeHdfs | None

    async def find_web(self, full: str = "") -> WebHdfs | None:
        """Return WebHDFS, or None where none takes this path."""

    async def status(self, full: str) -> FileStatus:
        """Return a status by either client; retry while the NameNode is unavailable."""

    async def retried(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Do the same for any idempotent call."""


class _NameNodeTimeoutError(StorageTimeout):
    """The NameNode does not answer, and every route begins there."""


class _UnsureError(Unavailable):
    """The received bytes may be of another version; none of them counts."""


class _OpenFile(NamedTuple):
    native: NativeFile | None
    status: FileStatus


class _LostRace(NamedTuple):
    others: list[str]
    at_s: float


class _Range(NamedTuple):
    full: str
    offset: int
    length: int
    etag: str


def etag_of(status: FileStatus) -> str:
    return f"{status.file_id}-{status.mtime_ms}-{status.size}"


class HdfsRangeReader:
    """Reads of one store, in one process and event loop."""

    def __init__(self, clients: Clients, replicas: Replicas, counts: StoreCounters) -> None:
        self._clients = clients
        self._replicas = replicas
        self._counts = counts
        self._files: dict[tuple[str, str], _OpenFile] = {}
        self._opening: dict[tuple[str, str], asyncio.Lock] = {}
        self._blocks: dict[tuple[str, str], list[WebBlock]] = {}
        self._wins: dict[tuple[str, int], _LostRace] = {}

    async def read_into(self, full: str, offset: int, target: memoryview, *, etag: str, attempt: int) -> None:
        """Implement `Store.read_into`."""
        for _ in range(RESTARTS):
            # Without an etag, all bytes are of the current version.
            file = await self._open(full, etag)
            wanted = _Range(full, offset, len(target), etag_of(file.status))
            self._check(wanted, file.status)
            try:
                await self._read_on(wanted, target, attempt)
                return
            except SourceChanged:
                if etag:
                    raise
        raise Unavailable(f"{self._clients.url}: {full!r} is replaced again and again")

    async def _read_on(self, wanted: _Range, target: memoryview, attempt: int) -> None:
        """Read one version, by one route after another."""
        done = tries = 0
        stalled = False  # the native client stalled for an unknown reason
        while done < len(target):
            rest = wanted._replace(offset=wanted.offset + done, length=wanted.length - done)
            way = attempt + tries
            landing = RevocableBuffer(target[done:])
            web: WebHdfs | None = None
            try:
                web = await self._choose_web(rest, way)
                if web is None:
                    await self._read_native(rest, landing, is_new=way > 0)
                else:
                    await self._read_web(web, rest, landing, way, stalled=stalled)
                self._counts.add("read_bytes", rest.length)
                return
            except asyncio.CancelledError:
                if web is None:
                    self._blame_loser(rest)
                raise
            except StorageError as error:
                await landing.close()
                if not isinstance(error, _UnsureError):
                    done += landing.have
                    self._counts.add("read_bytes", landing.have)
                    tries = 0 if landing.have else tries
                tries += 1
                if not error.retryable or isinstance(error, _NameNodeTimeoutError) or tries >= TRIES:
                    error.read_bytes = done
                    raise
                if web is None and isinstance(error, StorageTimeout):
                    stalled = not await self._find_silent(rest._replace(offset=wanted.offset + done, length=1))
                self._counts.add("retries")
            finally:
                await landing.close()
            await asyncio.sleep(pause_s(tries) if tries > 1 else 0)

    def forget(self, full: str) -> None:
        """Forget a changed file, or the files in a changed directory."""
        for key in [key for key in self._files if key[0] == full or key[0].startswith(full + "/")]:
            self._drop(key)

    # ---- routes ------------------------------------------------------------------------------------------------

    async def _choose_web(self, rest: _Range, way: int) -> WebHdfs | None:
        """Return WebHDFS for each second try, and for the first one where a DataNode is to be avoided."""
        web = await self._clients.find_web(rest.full)
        if web is None or self._clients.native is None or way % 2 == 1:
            return web
        if way > 0 or not self._replicas.any_suspect(time.monotonic()):
            return None
        file = await self._open(rest.full, rest.etag)
        for block in await self._find_blocks(web, rest, file.status):
            now_s = time.monotonic()
            if any(self._replicas.is_suspect(node.address, now_s) for node in block.nodes):
                return web
        return None

    async def _find_silent(self, rest: _Range) -> bool:
        """Blame the DataNodes of a block that do not answer, if any: most likely the read waited for them."""
        web = await self._clients.find_web(rest.full)
        file = self._files.get((rest.full, rest.etag))
        if web is None or file is None:
            return False
        try:
            nodes = {
                node.address for block in await self._find_blocks(web, rest, file.status) for node in block.nodes
            }
            silent = await web.find_unresponsive(sorted(nodes))
        except StorageError:
            return False
        for address in silent:
            self._replicas.blame([address], time.monotonic())
        self._counts.add("reroutes", len(silent[:1]))
        return bool(silent)

    async def _read_native(self, rest: _Range, landing: RevocableBuffer, *, is_new: bool) -> None:
        file = await self._open(rest.full, rest.etag, is_new=is_new)
        assert self._clients.native is not None and file.native is not None
        self._counts.add("requests")
        await self._clients.native.read(file.native, rest.full, rest.offset, rest.length, landing, stall_s=STALL_S)

    async def _read_web(
        self, web: WebHdfs, rest: _Range, landing: RevocableBuffer, way: int, *, stalled: bool
    ) -> None:
        """Read block by block, each from a DataNode that has it."""
        file = await self._open(rest.full, rest.etag)
        failure: BootseerError | None = None
        try:
            for block in await self._find_blocks(web, rest, file.status):
                await self._read_block(web, rest, landing, block, way, stalled=stalled)
            if landing.have < rest.length:
                failure = Unavailable(f"{self._clients.url}: the NameNode does not know all of {rest.full!r}")
        except (StorageError, IntegrityError) as error:
            failure = error
        if landing.have or isinstance(failure, Truncated):
            # A DataNode opens the file by name: the bytes are right only if it is still the same file.
            try:
                status = await self._clients.status(rest.full)
            except Unavailable as error:
                raise _UnsureError(str(error)) from error
            if etag_of(status) != rest.etag:
                self.forget(rest.full)
                raise SourceChanged(f"{self._clients.url}: {rest.full!r} was replaced while it was read")
        if failure is not None:
            raise failure

    async def _read_block(
        self, web: WebHdfs, rest: _Range, landing: RevocableBuffer, block: WebBlock, way: int, *, stalled: bool
    ) -> None:
        addresses = [node.address for node in block.nodes]
        end = min(rest.offset + rest.length, block.offset + block.length)
        failure = Unavailable(f"{self._clients.url}: no DataNode has byte {block.offset} of {rest.full!r}")
        # Neighbours begin at different replicas, so that one slow replica does not delay all of them.
        turn = way // 2 + block.offset // max(1, block.length)
        for address in self._replicas.order(addresses, turn, time.monotonic()):
            start = rest.offset + landing.have
            self._counts.add("requests")
            try:
                await web.read(rest.full, start, landing, end - start, node=address, stall_s=STALL_S)
            except Unavailable as error:
                failure = error
                self._replicas.blame([address], time.monotonic())
                continue
            others = [other for other in addresses if other != address]
            now_s = time.monotonic()
            self._replicas.clear_blame(address)
            if stalled and others:
                self._replicas.blame(others, now_s)
            while len(self._wins) >= OPEN_FILES:
                del self._wins[next(iter(self._wins))]
            self._wins[rest.full, block.offset] = _LostRace(others, now_s)
            return
        raise failure

    def _blame_loser(self, rest: _Range) -> None:
        """Blame the DataNode of a cancelled native read, if another route has just delivered the same bytes."""
        now_s = time.monotonic()
        for (full, offset), win in self._wins.items():
            is_inside = full == rest.full and rest.offset <= offset < rest.offset + max(1, rest.length)
            if is_inside and now_s - win.at_s < WIN_S and win.others:
                self._replicas.blame(win.others, now_s)
                return

    # ---- open files ------------------------------------------------------------------------------------------

    async def _open(self, full: str, etag: str, *, is_new: bool = False) -> _OpenFile:
        """Open the current file, or the version of `etag`, and keep it open for the next read."""
        key = (full, etag)
        async with self._opening.setdefault(key, asyncio.Lock()):
            found = self._files.get(key) if etag and not is_new else None
            if found is None:
                self._files.pop(key, None)
                try:
                    found = await self._open_again(full)
                except StorageTimeout as error:
                    raise _NameNodeTimeoutError(str(error)) from error
                if found.status.is_folder:
                    raise NotFound(f"{self._clients.url}: {full!r} is a directory")
                if etag and etag_of(found.status) != etag:
                    raise SourceChanged(f"{self._clients.url}: {full!r} was replaced since then")
                while len(self._files) >= OPEN_FILES:
                    self._drop(next(iter(self._files)))
                self._files[full, etag_of(found.status)] = found
        if not etag:
            self._opening.pop(key, None)
        return found

    async def _open_again(self, full: str) -> _OpenFile:
        native = self._clients.native
        if native is None:
            return _OpenFile(None, await self._clients.status(full))
        file: NativeFile = await self._clients.retried(lambda: native.open(full))
        return _OpenFile(file, file.status)

    async def _find_blocks(self, web: WebHdfs, rest: _Range, status: FileStatus) -> list[WebBlock]:
        key = (rest.full, etag_of(status))
        if key not in self._blocks:
            while len(self._blocks) >= OPEN_FILES:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[key] = await self._clients.retried(lambda: web.blocks(rest.full, 0, max(1, status.size)))
        end = rest.offset + rest.length
        return [
            block
            for block in self._blocks[key]
            if block.offset < end and block.offset + block.length > rest.offset
        ]

    def _drop(self, key: tuple[str, str]) -> None:
        self._files.pop(key, None)
        self._blocks.pop(key, None)
        lock = self._opening.get(key)
        if lock is not None and not lock.locked():
            del self._opening[key]

    def _check(self, rest: _Range, status: FileStatus) -> None:
        if rest.offset + rest.length > status.size:
            end = rest.offset + rest.length
            raise Truncated(f"{self._clients.url}: {rest.full!r} has {status.size} bytes, fewer than {end}")
