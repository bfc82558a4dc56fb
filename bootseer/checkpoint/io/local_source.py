"""Plain local files as a Source: no event loop, no store, the shortest path from the disk to memory.

A file is mapped, privately and without a copy, after several threads have filled the page cache with it. So the
ranks of a node share its pages. A process that is alone reads a cold file around the page cache instead, into its
own memory, which is faster; so does any process if mapping is unsuitable, into the caller's memory. This is
separate from DirectSource so that a fresh process needs no event loop before its first byte.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from bootseer.checkpoint.io.parallel_read import read_all
from bootseer.checkpoint.io.populate import populate
from bootseer.checkpoint.io.source import Request, SourceFile
from bootseer.errors import NotFound, SourceChanged, StorageError, Truncated
from bootseer.linux.cgroups import read_memory
from bootseer.linux.page_cache import cached_share, is_remote
from bootseer.storage.engine.revocable_buffer import address_of
from bootseer.storage.local.reading import read_range, stat_file, stat_of
from bootseer.storage.os_errors import map_os_errors
from bootseer.storage.protocol import Stat

CHUNK_BYTES = 4 << 20  # one request; requests below 1 MiB do not reach a disk's speed
WARM_SHARE = 0.95  # of a range in the page cache: from here on it is not filled
LOOK_BYTES = 1 << 20  # sampled in a long range: the kernel needs 10 ms to count the pages of a GB
LOOKS = 32  # maximum number of samples
ALONE_BYTES = 32 << 20  # of a cold range: from here on private memory is faster


class LocalFile(NamedTuple):
    """One file and the pinned version of it."""

    full: str
    stat: Stat


class LocalSource:
    """Files as they are, each pinned to the version that it had when it was opened."""

    version = ""

    def __init__(
        self, url: str, found: Mapping[str, LocalFile], digest: str, *, is_alone: bool | None = None
    ) -> None:
        """`is_alone`: no other process of this node reads the same; None: see the launcher's variables."""
        self.url = url
        self._is_alone = _is_alone(os.environ) if is_alone is None else is_alone
        self._own_bytes = 0  # that callers had to read into their own memory
        self.files: Mapping[str, SourceFile] = {
            name: SourceFile(name, file.stat.size) for name, file in found.items()
        }
        self.digest = digest
        self._found = found
        self._refused: set[int] = set()  # devices without O_DIRECT
        self._lock = threading.Lock()
        self._maps: dict[str, mmap.mmap] = {}
        self._counts = dict.fromkeys(("requests", "read_bytes", "direct_bytes", "mapped_bytes"), 0)

    def read(self, requests: Sequence[Request]) -> None:
        chunks: list[Request] = []
        for request in requests:
            self._check(request.path, request.offset, len(request.target))
            chunks.extend(_cut(request))
        read_all(chunks, self._read_one)

    def map(self, path: str, offset: int, length: int) -> memoryview | None:
        """Map the file itself privately, once its bytes are in memory.

        None on network file systems, and where reading is faster (see the module's docstring). Unwritten pages
        stay the file's: a write to the file in place changes them here as well.
        """
        file = self._check(path, offset, length)
        if length == 0:
            return memoryview(bytearray())
        with map_os_errors(file.full), open(file.full, "rb", buffering=0) as opened, self._lock:
            fd = opened.fileno()
            self._check_version(file, fd)
            area = self._maps.get(path)
            if area is None:
                if is_remote(file.full):
                    return None
                try:
                    area = mmap.mmap(fd, file.stat.size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
                except OSError:
                    return None  # a file system without mmap
                self._maps[path] = area
            view = memoryview(area)[offset : offset + length]
            if not _is_warm(fd, offset, length):
                if self._reads_own(length):
                    return None
                # More than fits would evict what has just been read; the rest is read at its first use.
                count = min(length, read_memory().free_bytes // 4 * 3)
                try:
                    if not populate(fd, address_of(view) - offset, offset, count):
                        return None
                except StorageError as error:
                    raise StorageError(f"{file.full}: {error}") from error
                self._check_version(file, fd)
                self._counts["requests"] += -(-count // CHUNK_BYTES)
                self._counts["read_bytes"] += count
            self._counts["mapped_bytes"] += length
        return view

    def _reads_own(self, length: int) -> bool:
        """Return whether to read a cold range into the caller's memory, which must have room for it."""
        if not self._is_alone or length < ALONE_BYTES:
            return False
        if self._own_bytes + length > read_memory().free_bytes // 4 * 3:
            return False
        self._own_bytes += length
        return True

    def close(self) -> None:
        with self._lock:
            self._maps.clear()  # an area is unmapped when its last view goes

    def statistics(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def _check(self, path: str, offset: int, length: int) -> LocalFile:
        file = self._found.get(path)
        if file is None:
            raise NotFound(f"{self.url}: has no file {path}")
        if offset < 0 or offset + length > file.stat.size:
            raise Truncated(f"{file.full}: bytes {offset} to {offset + length} of a file of {file.stat.size}")
        return file

    def _check_version(self, file: LocalFile, fd: int) -> None:
        if stat_of(os.fstat(fd)) != file.stat:
            raise SourceChanged(f"{file.full}: was replaced or written to while it was read; load it again")

    def _read_one(self, chunk: Request) -> None:
        path, offset, target = chunk
        file = self._found[path]
        _, direct = read_range(file.full, offset, target, file.stat.etag, self._refused)
        with self._lock:
            self._counts["requests"] += 1
            self._counts["read_bytes"] += len(target)
            self._counts["direct_bytes"] += direct


def open_local(path: str) -> LocalSource:
    """Open a single file. Raises: NotFound, PermissionDenied."""
    path = os.path.abspath(path)
    name, found = os.path.basename(path), stat_file(path)
    return LocalSource(path, {name: LocalFile(path, found)}, digest_of([(name, found)]))


def digest_of(files: Iterable[tuple[str, Stat]]) -> str:
    """Return the digest that identifies a version of unstriped files, as bootseer.checkpoint.versions.resolve
    does.
    """
    lines = (f"{name}\0{stat.size}\0{stat.etag}\n" for name, stat in sorted(files))
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogatepass")).hexdigest()


def _is_alone(environ: Mapping[str, str]) -> bool:
    """Return whether no other rank of the same job runs on this node."""
    return environ.get("LOCAL_WORLD_SIZE", "1") in ("", "1")


def _is_warm(fd: int, offset: int, length: int) -> bool:
    if length <= LOOKS * LOOK_BYTES:
        return cached_share(fd, offset, length) >= WARM_SHARE
    places = (offset + index * (length - LOOK_BYTES) // (LOOKS - 1) for index in range(LOOKS))
    return all(cached_share(fd, place, LOOK_BYTES) >= WARM_SHARE for place in places)


def _cut(request: Request) -> Iterator[Request]:
    """Split a request into chunks at multiples of their size in the file, which keeps them aligned."""
    path, offset, target = request
    done = 0
    while done < len(target):
        count = min(CHUNK_BYTES - (offset + done) % CHUNK_BYTES, len(target) - done)
        yield Request(path, offset + done, target[done : done + count])
        done += count
