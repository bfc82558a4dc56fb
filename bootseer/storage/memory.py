"""Files in the memory of this process, for tests and small data: `memory://NAME` is the same store everywhere.

Publishing, creating and joining are atomic, also between threads. A fork copies the files.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple
from urllib.parse import quote

from bootseer.errors import AlreadyExists, NotFound, SourceChanged, StorageError, Truncated
from bootseer.storage.engine.counts import StoreCounters
from bootseer.storage.engine.revocable_buffer import copy_bytes
from bootseer.storage.paths import check_offset, check_path, join
from bootseer.storage.protocol import Entry, Features, Stat

_PIECE_BYTES = 8 << 20


class _File(NamedTuple):
    data: bytes
    etag: str
    mtime_s: float


class _NamedFiles:
    def __init__(self) -> None:
        self.files: dict[str, _File] = {}
        self.lock = threading.Lock()
        self._versions = 0

    def put(self, path: str, data: bytes, *, is_new: bool) -> _File:
        """Add a file, with the lock held."""
        if is_new and path in self.files:
            raise FileExistsError
        self._versions += 1
        file = self.files[path] = _File(data, str(self._versions), time.time())
        return file


class MemoryStore:
    """A `Store` without real directories: they exist as long as files in them."""

    features = Features(creates_if_absent=True, concatenates=False, has_replicas=False)

    def __init__(self, name: str, folder: str = "") -> None:
        self.url = "memory://" + quote(join(name, folder) if folder else name)
        with _places_lock:
            self._place = _places.setdefault(name, _NamedFiles())
        self._prefix = f"{folder}/" if folder else ""
        self._counts = StoreCounters()

    async def stat(self, path: str) -> Stat:
        file = self._get(path)
        return Stat(len(file.data), file.etag)

    async def read_into(
        self, path: str, offset: int, target: memoryview, *, etag: str = "", attempt: int = 0
    ) -> None:
        del attempt
        file = self._get(path)
        check_offset(self.url, path, offset)
        if etag and file.etag != etag:
            raise SourceChanged(f"{self.url}: {path!r} has changed since the read began")
        if offset + len(target) > len(file.data):
            raise Truncated(
                f"{self.url}: bytes {offset} to {offset + len(target)} of {path!r}, which has {len(file.data)}"
            )
        for start in range(0, len(target), _PIECE_BYTES):
            part = target[start : start + _PIECE_BYTES]
            copy_bytes(part, memoryview(file.data)[offset + start : offset + start + len(part)])
            await asyncio.sleep(0)  # lets other tasks run, and a cancellation take effect
        self._counts.add("read_bytes", len(target))

    async def list(self, directory: str) -> list[Entry]:
        prefix = self._prefix + (check_path(self.url, directory, is_folder=True) + "/" if directory else "")
        self._counts.add("requests")
        found: dict[str, Entry] = {}
        with self._place.lock:
            for path, file in self._place.files.items():
                if path.startswith(prefix):
                    name, slash, _ = path[len(prefix) :].partition("/")
                    if slash:
                        found[name] = Entry(name, 0, True, 0.0)
                    else:
                        found[name] = Entry(name, len(file.data), False, file.mtime_s)
        return sorted(found.values())

    async def publish(self, path: str, data: bytes, *, if_absent: bool = False) -> Stat:
        file = self._put(path, bytes(data), is_new=if_absent)
        return Stat(len(file.data), file.etag)

    @asynccontextmanager
    async def create(
        self, path: str, *, size: int | None = None, placement: int | None = None
    ) -> AsyncIterator[_Writer]:
        del size, placement
        self._check_new(path)
        writer = _Writer()
        yield writer
        self._put(path, bytes(writer.data), is_new=True)

    async def concat(self, path: str, parts: Sequence[str]) -> None:
        if not parts:
            raise StorageError(f"{self.url}: {path!r} cannot be joined from no parts")
        data = b"".join([self._get(part).data for part in parts])
        self._put(path, data, is_new=True)
        for part in parts:
            await self.delete(part)

    async def delete(self, path: str) -> None:
        full = self._prefix + check_path(self.url, path)
        self._counts.add("requests")
        with self._place.lock:
            gone = [name for name in self._place.files if name == full or name.startswith(full + "/")]
            for name in gone:
                del self._place.files[name]

    async def aclose(self) -> None:
        """Keep the files for other stores of that name."""

    def statistics(self) -> dict[str, int]:
        return self._counts.to_dict()

    def _get(self, path: str) -> _File:
        full = self._prefix + check_path(self.url, path)
        self._counts.add("requests")
        file = self._place.files.get(full)
        if file is None:
            raise NotFound(f"{self.url}: there is no file {path!r}")
        return file

    def _put(self, path: str, data: bytes, *, is_new: bool) -> _File:
        full = self._prefix + check_path(self.url, path)
        self._counts.add("requests")
        with self._place.lock:
            try:
                file = self._place.put(full, data, is_new=is_new)
            except FileExistsError as error:
                raise AlreadyExists(f"{self.url}: {path!r} already exists") from error
        self._counts.add("written_bytes", len(data))
        return file

    def _check_new(self, path: str) -> None:
        if self._prefix + check_path(self.url, path) in self._place.files:
            raise AlreadyExists(f"{self.url}: {path!r} already exists")


class _Writer:
    def __init__(self) -> None:
        self.data = bytearray()

    async def write(self, data: memoryview | bytes) -> None:
        self.data += data
        await asyncio.sleep(0)  # a cancellation point, as in any other store


def forget(name: str) -> None:
    """Delete all files of `memory://NAME`."""
    with _places_lock:
        _places.pop(name, None)


def _forget_lock() -> None:
    """Renew the locks in a forked child, where a vanished thread may have held them."""
    global _places_lock
    _places_lock = threading.Lock()
    for place in _places.values():
        place.lock = threading.Lock()


_places: dict[str, _NamedFiles] = {}
_places_lock = threading.Lock()
os.register_at_fork(after_in_child=_forget_lock)
