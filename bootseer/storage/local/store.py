"""A directory of this machine or of a mounted file system. Cold files are read around the page cache.

Reads go straight into the target. A system call cannot be cancelled: on a local disk, a cancelled read waits for
the current piece (8 MiB at most). Network file systems can hang forever. There all calls run in threads that can
be abandoned, and reads use a private buffer.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar
from urllib.parse import quote

from bootseer import aio
from bootseer.errors import StorageError, StorageTimeout
from bootseer.linux.page_cache import is_remote
from bootseer.storage.engine.counts import StoreCounters
from bootseer.storage.engine.revocable_buffer import RevocableBuffer
from bootseer.storage.local.reading import BLOCK_BYTES, read_range, stat_file
from bootseer.storage.local.writing import TEMPORARY, NewFile, concat_files, delete_path, publish_file
from bootseer.storage.os_errors import map_os_errors
from bootseer.storage.paths import check_offset, check_path
from bootseer.storage.protocol import Entry, Features, Stat

PIECE_BYTES = 8 << 20
MAX_BOUNCES = 16  # pieces' worth of memory to keep

T = TypeVar("T")


class LocalStore:
    """A `Store`. `may_hang`: whether calls may never end; by default, whether the file system is remote."""

    features = Features(creates_if_absent=True, concatenates=False, has_replicas=False)

    def __init__(self, root: str, *, timeout_s: float = 30.0, may_hang: bool | None = None) -> None:
        self._root = os.path.abspath(root)
        self.url = "file://" + quote(os.fsencode(self._root))
        self._timeout_s = timeout_s
        self._may_hang = may_hang
        self._refused_direct: set[int] = set()
        # Buffers, kept because filling memory for the first time costs more than a copy.
        self._bounces: deque[memoryview] = deque()
        self._counts = StoreCounters("direct_bytes")

    async def stat(self, path: str) -> Stat:
        full = self._full(path)
        self._counts.add("requests")
        return await self._run(stat_file, full)

    async def read_into(
        self, path: str, offset: int, target: memoryview, *, etag: str = "", attempt: int = 0
    ) -> None:
        del attempt  # there is only one route to a file
        full = self._full(path)
        check_offset(self.url, path, offset)
        hangs = await self._hangs()
        done = 0
        while True:
            part = target[done : done + PIECE_BYTES]
            self._counts.add("requests")
            try:
                if hangs:
                    seen, around = await self._read_apart(full, offset + done, part, etag)
                else:
                    seen, around = await aio.run_io(
                        read_range, full, offset + done, part, etag, self._refused_direct
                    )
            except StorageError as error:
                error.read_bytes += done
                raise
            self._counts.add("read_bytes", len(part))
            self._counts.add("direct_bytes", around)
            done += len(part)
            if done >= len(target):
                return
            etag = seen  # all pieces of one version, even if the caller accepts any

    async def list(self, directory: str) -> list[Entry]:
        full = self._full(directory, is_folder=True)
        self._counts.add("requests")
        return await self._run(_list, full)

    async def publish(self, path: str, data: bytes, *, if_absent: bool = False) -> Stat:
        full = self._full(path)
        self._counts.add("requests")
        found = await self._run(lambda: publish_file(full, data, if_absent=if_absent))
        self._counts.add("written_bytes", len(data))
        return found

    @asynccontextmanager
    async def create(
        self, path: str, *, size: int | None = None, placement: int | None = None
    ) -> AsyncIterator[LocalWriter]:
        del size, placement
        full = self._full(path)
        self._counts.add("requests")
        file = await self._run(NewFile, full)
        try:
            yield LocalWriter(file, self._run, self._counts)
            await self._run(lambda: file.publish(replaces=False))
        finally:
            file.give_up()
            await self._run(file.close)

    async def concat(self, path: str, parts: Sequence[str]) -> None:
        if not parts:
            raise StorageError(f"{self.url}: {path!r} cannot be joined from no parts")
        full, full_parts = self._full(path), [self._full(part) for part in parts]
        self._counts.add("requests")
        await self._run(concat_files, full, full_parts)

    async def delete(self, path: str) -> None:
        full = self._full(path)
        self._counts.add("requests")
        await self._run(delete_path, full)

    async def aclose(self) -> None:
        """Free the buffers; nothing else is kept between calls."""
        self._bounces.clear()

    def statistics(self) -> dict[str, int]:
        """Return counts. `direct_bytes`: read around the page cache."""
        return self._counts.to_dict()

    def _full(self, path: str, *, is_folder: bool = False) -> str:
        return os.path.join(self._root, check_path(self.url, path, is_folder=is_folder)).rstrip("/") or "/"

    async def _hangs(self) -> bool:
        if self._may_hang is None:
            self._may_hang = await self._run_apart(is_remote, self._root)
        return self._may_hang

    async def _run(self, func: Callable[..., T], *args: object) -> T:
        if await self._hangs():
            return await self._run_apart(func, *args)
        return await aio.run_io(func, *args)

    async def _run_apart(self, func: Callable[..., T], *args: object) -> T:
        try:
            return await aio.run_abandonable(func, *args, timeout_s=self._timeout_s)
        except TimeoutError as error:
            raise StorageTimeout(
                f"{self.url}: the file system did not answer within {self._timeout_s:g} s: is its server running?"
            ) from error

    async def _read_apart(self, full: str, offset: int, target: memoryview, etag: str) -> tuple[str, int]:
        landing = RevocableBuffer(target)

        def read() -> tuple[str, int]:
            try:
                own = self._bounces.pop()
            except IndexError:
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
                own = memoryview(mmap.mmap(-1, PIECE_BYTES + BLOCK_BYTES, flags=flags))
            start = offset % BLOCK_BYTES  # same alignment as in the file
            part = own[start : start + len(target)]
            outcome = read_range(full, offset, part, etag, self._refused_direct)
            landing.land(part)
            if len(self._bounces) < MAX_BOUNCES:
                self._bounces.append(own)
            return outcome

        try:
            return await self._run_apart(read)
        finally:
            await landing.close()


class LocalWriter:
    """A `StoreWriter`."""

    def __init__(self, file: NewFile, run: Callable[..., Awaitable[None]], counts: StoreCounters) -> None:
        self._file = file
        self._run = run
        self._counts = counts

    async def write(self, data: memoryview | bytes) -> None:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), PIECE_BYTES):
            part = view[start : start + PIECE_BYTES]
            await self._run(self._file.write, part)
            self._counts.add("written_bytes", len(part))


def _list(full: str) -> list[Entry]:
    entries = []
    with map_os_errors(full), os.scandir(full) as found:
        for entry in found:
            if entry.name.startswith(TEMPORARY):
                continue
            try:
                status = entry.stat()
            except OSError:
                continue  # deleted meanwhile, or a dangling link
            is_folder = entry.is_dir()
            entries.append(Entry(entry.name, 0 if is_folder else status.st_size, is_folder, status.st_mtime))
    return sorted(entries)
