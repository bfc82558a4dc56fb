"""Pieces of files in bounded memory: loaded by many threads at once, each once however many readers want it.

In: wishes, of a reader that waits (`want`) or for later (`want_ahead`). Out: chunks that are whole and right, or
the error that their files raised. What readers wait for goes first; it pushes out what was read ahead, if it must.
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
from bootseer.mounts.protocol import MountedFiles

LOADERS = 48  # threads: as many reads of the files are in flight; 40 x 4 MiB are more than 8 units of 16 MiB
RESERVED = 8  # of these, for what readers wait for
FORGOTTEN_S = 10.0  # what was read ahead and not asked for since may go
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
        self.is_kept = is_kept  # after its last reader has gone
        self.change = threading.Condition(lock)
        self.memory: memoryview | None = None  # its buffer, once there was room
        self.is_loading = False
        self.is_ready = False
        self.is_read = False  # to its end
        self.error: BaseException | None = None
        self.readers = 0  # that wait for it or copy from it
        self.uses = 0
        self.used_s = time.monotonic()

    def copy_to(self, address: int, begin: int, end: int) -> None:
        """Copies bytes `begin` to `end` of the file, which lie in it. The caller holds it (`want`)."""
        assert self.memory is not None
        source = ctypes.addressof(ctypes.c_char.from_buffer(self.memory, begin - self.span.offset))
        ctypes.memmove(address, source, end - begin)
        if end == self.span.end:
            self.is_read = True


class Chunks:
    """All chunks of a mount, in at most `room_bytes` (one chunk may be larger, when it is alone)."""

    def __init__(self, room_bytes: int) -> None:
        self.room_bytes = room_bytes
        self.loads = self.loads_ahead = 0
        self.in_flight = self.most_in_flight = 0
        self.held_bytes = self.most_held_bytes = 0  # all buffers, used and free
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
        """A chunk that is loaded now, if it is not there; to be waited for and given back by `release`."""
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
        """Whether a chunk is there or on its way."""
        with self._lock:
            return _key(span) in self._chunks

    def want_ahead(self, span: Range) -> bool:
        """Loads a chunk when nothing else is waited for; False when there is no room for it."""
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
        """Until it is loaded. Raises what its files raised; InterruptedError when all ends."""
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
                    self._work.notify()  # there may be room

    def forget(self, files: MountedFiles, path: str) -> None:
        """Nobody has the file open any more: what is queued to be read ahead is not loaded."""
        with self._lock:
            for chunk in [each for each in self._ahead if each.span.files is files and each.span.path == path]:
                self._ahead.remove(chunk)
                self._drop(chunk)

    def stop(self) -> None:
        """Ends all waiting; what is being loaded ends when its files let it."""
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
            except BaseException as caught:  # raised again where it is waited for
                error = caught
            with self._lock:
                self.in_flight -= 1
                chunk.is_loading = False
                if error is None:
                    chunk.is_ready = True
                    chunk.change.notify_all()
                else:
                    self._fail(chunk, error)
            del chunk, error, files

    def _next(self) -> Chunk | None:
        """The next chunk to load, with a buffer; None when all ends."""
        with self._lock:
            while not self._is_stopped:
                chunk = self._pop()
                if chunk is not None:
                    chunk.is_loading = True
                    self.loads += 1
                    self.in_flight += 1
                    self.most_in_flight = max(self.most_in_flight, self.in_flight)
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
                break  # all is in use: some reader gives a chunk back, or a load ends
            return self._wanted.popleft()
        if self._ahead and self.in_flight < LOADERS - RESERVED:
            self.loads_ahead += 1
            return self._ahead.popleft()
        return None

    def _fail(self, chunk: Chunk, error: BaseException) -> None:
        chunk.error = error
        self._drop(chunk)
        chunk.change.notify_all()

    # ---- memory ----------------------------------------------------------------------------------------------

    def _take(self, length: int, *, is_ahead: bool) -> memoryview | None:
        """A buffer, maybe that of a chunk which is no longer needed; None when there is no room."""
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
                self.most_held_bytes = max(self.most_held_bytes, self.held_bytes)
                return buffer
            if self._free:
                self.held_bytes -= len(self._free.pop())
                continue
            victim = self._find_victim(is_ahead)
            if victim is None:
                return None
            self._drop(victim)

    def _find_victim(self, is_ahead: bool) -> Chunk | None:
        """What is needed least: what was read to its end, then, for a reader that waits, what is needed latest."""
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
        """Its memory is another one's; nobody reads from it or writes to it any more."""
        self._chunks.pop(_key(chunk.span), None)
        if chunk.memory is not None:
            self._free.append(chunk.memory)
            chunk.memory = None


def _key(span: Range) -> tuple[int, str, int, int]:
    return id(span.files), span.path, span.offset, span.length


def _allocate(size: int) -> memoryview:
    """Memory of whole pages, on huge pages where there are some: faults cost more than copies."""
    try:
        area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise Unavailable(f"no memory for {size >> 10} KiB that are to be read") from error
    try:
        area.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # a kernel without them
    return memoryview(area)
