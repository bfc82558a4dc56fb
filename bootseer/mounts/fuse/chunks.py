"""Pieces of files in bounded memory: loaded by many threads at once, each once for all its readers.

In: requests, of a reader that waits (`want`) or for later (`want_ahead`). Out: chunks that are whole and right, or
the error of their files. Chunks with waiting readers go first, and evict prefetched ones if necessary.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import threading
import time
from collections import OrderedDict, deque
from typing import NamedTuple

from bootseer.errors import BootseerError, Unavailable
from bootseer.mounts.fuse.protocol import MountedFiles

LOADERS = 48  # threads: as many reads of the files are in flight; 40 x 4 MiB are more than 8 units of 16 MiB
RESERVED = 8  # of these, for chunks with waiting readers
FORGOTTEN_S = 10.0  # unrequested prefetched chunks may be evicted after it
SMALLEST_BUFFER_BYTES = 64 << 10


class Range(NamedTuple):
    """Bytes of a file."""

    files: MountedFiles
    path: str
    offset: int  # bytes
    length: int  # bytes

    @property
    def end(self) -> int:
        return self.offset + self.length


class Chunk:
    """A range of a file, being loaded or loaded. Owned by `Chunks`."""

    def __init__(self, span: Range, lock: threading.Lock, is_kept: bool) -> None:
        self.span = span
        self.is_kept = is_kept  # after its last release
        self.change = threading.Condition(lock)
        self.memory: memoryview | None = None  # its buffer, once there is space
        self.is_ready = False
        self.is_read = False  # to its end
        self.error: BaseException | None = None
        self.readers = 0  # that wait for it or copy from it
        self.uses = 0
        self.used_s = time.monotonic()

    def copy_to(self, address: int, begin: int, end: int) -> None:
        """Copy bytes `begin` to `end` of the file, which lie in it. The caller holds it (`want`)."""
        assert self.memory is not None
        source = ctypes.addressof(ctypes.c_char.from_buffer(self.memory, begin - self.span.offset))
        ctypes.memmove(address, source, end - begin)
        if end == self.span.end:
            self.is_read = True


class Chunks:
    """All chunks of a mount, in at most `room_bytes` (one chunk may be larger, when it is alone)."""

    def __init__(self, room_bytes: int) -> None:
        self.room_bytes = room_bytes
        self.in_flight = self.max_in_flight = 0
        self.held_bytes = self.max_held_bytes = 0  # all buffers, used and free
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._chunks: OrderedDict[tuple[int, str, int, int], Chunk] = OrderedDict()  # the one used last at the end
        self._wanted: deque[Chunk] = deque()
        self._ahead: deque[Chunk] = deque()
        self._free: list[memoryview] = []
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._is_stopped = False

    # ---- for readers -----------------------------------------------------------------------------------------

    def want(self, span: Range, *, is_kept: bool = True) -> Chunk:
        """Return a chunk and load it now if it is absent. The caller calls `wait`, then `release`."""
        with self._lock:
            chunk = self._chunks.get(_key(span))
            if chunk is None:
                chunk = self._chunks[_key(span)] = Chunk(span, self._lock, is_kept)
                self._queue(chunk, self._wanted)
            elif chunk in self._ahead:
                self._ahead.remove(chunk)
                self._queue(chunk, self._wanted)
            chunk.readers += 1
            return chunk

    def has(self, span: Range) -> bool:
        """Return whether a chunk is there or in flight."""
        with self._lock:
            return _key(span) in self._chunks

    def want_ahead(self, span: Range) -> bool:
        """Load a chunk once no reader waits for others; return False when there is no space for it."""
        with self._lock:
            if self._is_stopped:
                return False
            if _key(span) in self._chunks:
                return True
            memory = self._take(span.length, is_ahead=True)
            if memory is None:
                return False
            chunk = self._chunks[_key(span)] = Chunk(span, self._lock, True)
            chunk.memory = memory
            self._queue(chunk, self._ahead)
            return True

    def wait(self, chunk: Chunk) -> None:
        """Wait until it is loaded. Raises: the error of its files; InterruptedError when the mount ends."""
        with self._lock:
            while not chunk.is_ready and chunk.error is None and not self._is_stopped:
                chunk.change.wait()
            if chunk.error is not None:
                raise chunk.error
            if not chunk.is_ready:
                raise InterruptedError(errno.EINTR, "the mount ends")

    def release(self, chunk: Chunk) -> None:
        with self._lock:
            chunk.readers -= 1
            chunk.uses += 1
            chunk.used_s = time.monotonic()
            if chunk.error is not None:
                return  # dropped already
            self._chunks.move_to_end(_key(chunk.span))
            if not chunk.readers:
                if not chunk.is_kept and chunk.is_ready:
                    self._drop(chunk)
                if self._wanted:
                    self._work.notify()  # there may be space

    def forget(self, files: MountedFiles, path: str) -> None:
        """Drop the queued prefetch of a file that is no longer open."""
        with self._lock:
            for chunk in [each for each in self._ahead if each.span.files is files and each.span.path == path]:
                self._ahead.remove(chunk)
                self._drop(chunk)

    def stop(self) -> None:
        """End all waits; loads in progress end when their files allow it."""
        with self._lock:
            self._is_stopped = True
            self._wanted.clear()
            self._ahead.clear()
            self._work.notify_all()
            for chunk in self._chunks.values():
                chunk.change.notify_all()

    # ---- loading ---------------------------------------------------------------------------------------------

    def _queue(self, chunk: Chunk, queue: deque[Chunk]) -> None:
        queue.append(chunk)
        if self._is_stopped:
            return
        if self._idle < len(self._wanted) + len(self._ahead) and len(self._threads) < LOADERS:
            thread = threading.Thread(target=self._load_all, name=f"mount-load-{len(self._threads)}", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                if not self._threads:
                    raise
            else:
                self._threads.append(thread)
        self._work.notify()

    def _load_all(self) -> None:
        while (chunk := self._next()) is not None:
            error: BaseException | None = None
            assert chunk.memory is not None
            files, path, offset, length = chunk.span
            try:
                files.read_into(path, offset, chunk.memory[:length])
            except BaseException as caught:  # raised again in `wait`
                error = caught
            with self._lock:
                self.in_flight -= 1
                if error is None:
                    chunk.is_ready = True
                    chunk.change.notify_all()
                else:
                    self._fail(chunk, error)
            del chunk, error, files

    def _next(self) -> Chunk | None:
        """Return the next chunk to load, with a buffer; None after `stop`."""
        with self._lock:
            while not self._is_stopped:
                chunk = self._pop()
                if chunk is not None:
                    self.in_flight += 1
                    self.max_in_flight = max(self.max_in_flight, self.in_flight)
                    return chunk
                self._idle += 1
                self._work.wait()
                self._idle -= 1
            return None

    def _pop(self) -> Chunk | None:
        while self._wanted:
            chunk = self._wanted[0]
            if chunk.memory is None:
                try:
                    chunk.memory = self._take(chunk.span.length, is_ahead=False)
                except BootseerError as error:
                    self._wanted.popleft()
                    self._fail(chunk, error)
                    continue
            if chunk.memory is None:
                break  # all is in use: wait until a reader releases a chunk or a load ends
            return self._wanted.popleft()
        if self._ahead and self.in_flight < LOADERS - RESERVED:
            return self._ahead.popleft()
        return None

    def _fail(self, chunk: Chunk, error: BaseException) -> None:
        chunk.error = error
        self._drop(chunk)
        chunk.change.notify_all()

    # ---- memory ----------------------------------------------------------------------------------------------

    def _take(self, length: int, *, is_ahead: bool) -> memoryview | None:
        """Return a buffer, maybe that of a chunk which is no longer needed; None when there is no space."""
        size = SMALLEST_BUFFER_BYTES
        while size < length:
            size *= 2
        while True:
            for index, buffer in enumerate(self._free):
                if len(buffer) == size:
                    return self._free.pop(index)
            if self.held_bytes + size <= self.room_bytes or (not is_ahead and not self.held_bytes):
                buffer = _allocate(size)
                self.held_bytes += size
                self.max_held_bytes = max(self.max_held_bytes, self.held_bytes)
                return buffer
            if self._free:
                self.held_bytes -= len(self._free.pop())
                continue
            victim = self._find_victim(is_ahead)
            if victim is None:
                return None
            self._drop(victim)

    def _find_victim(self, is_ahead: bool) -> Chunk | None:
        """Return the chunk needed least: one read to its end; for a waiting reader also the one needed latest."""
        old_s = time.monotonic() - FORGOTTEN_S
        unused = begun = None
        for chunk in self._chunks.values():
            if chunk.readers or not chunk.is_ready:
                continue
            if chunk.is_read or chunk.used_s < old_s:
                return chunk
            if not chunk.uses:
                unused = chunk  # the last one
            elif begun is None:
                begun = chunk  # the first one
        if is_ahead:
            return None
        if self._ahead:
            return self._ahead.pop()
        return unused or begun

    def _drop(self, chunk: Chunk) -> None:
        """Remove a chunk and free its memory; no thread reads or writes it any more."""
        self._chunks.pop(_key(chunk.span), None)
        if chunk.memory is not None:
            self._free.append(chunk.memory)
            chunk.memory = None


def _key(span: Range) -> tuple[int, str, int, int]:
    return id(span.files), span.path, span.offset, span.length


def _allocate(size: int) -> memoryview:
    """Allocate whole pages, huge pages where possible: page faults cost more than copies."""
    try:
        area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise Unavailable(f"no memory to read {size >> 10} KiB") from error
    try:
        area.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # a kernel without them
    return memoryview(area)
