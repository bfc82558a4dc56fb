"""Reads of open files: chunks that several threads load at once, ahead of sequential readers.

A run of sequential reads gets a window of chunks ahead, which keeps many servers busy for one reader. Random reads
load only what they request, unless only larger pieces can be verified.
"""

from __future__ import annotations

import threading
import time
from collections import Counter

from bootseer.mounts.fuse.chunks import Chunks, Range
from bootseer.mounts.fuse.protocol import MountedFiles
from bootseer.mounts.fuse.streams import SequentialRuns

CHUNK_BYTES = 4 << 20  # read-ahead where any range can be verified
ACTIVE_S = 1.0  # a run counts for so long after its last read
AHEAD_SHARE = 0.75  # of the memory; the rest is for current reads


class OpenFile:
    """One open file of a mount; made by `Reader.open`."""

    def __init__(self, files: MountedFiles, path: str) -> None:
        found = files.files[path]
        self.files, self.path = files, path
        self.size = found.size
        self.checked_bytes = found.checked_bytes
        self.chunk_bytes = found.checked_bytes or CHUNK_BYTES
        self.runs = SequentialRuns()
        self.asked: dict[int, int] = {}  # run -> begin of the next chunk to read ahead
        self.lock = threading.Lock()


class Reader:
    """Serves all reads of a mount."""

    def __init__(self, window_bytes: int) -> None:
        self.chunks = Chunks(window_bytes)
        self._open: Counter[tuple[int, str]] = Counter()
        self._active: dict[tuple[int, int], float] = {}  # (open file, run) -> time of its last read
        self._lock = threading.Lock()

    def open(self, files: MountedFiles, path: str) -> OpenFile:
        with self._lock:
            self._open[id(files), path] += 1
        return OpenFile(files, path)

    def read(self, file: OpenFile, offset: int, length: int, address: int) -> int:
        """Copy the existing part of a range to `address`; return its length. Raises BootseerError."""
        end = min(offset + length, file.size)
        if offset >= end:
            return 0
        with file.lock:
            ahead = file.runs.note(offset, end - offset)
            is_reader = ahead.window_bytes > 0
        at = offset
        while at < end:
            span, is_kept = self._piece(file, at, end, is_reader)
            chunk = self.chunks.want(span, is_kept=is_kept)
            try:
                if at == offset and is_reader:
                    self._read_ahead(file, ahead.run, ahead.position, ahead.window_bytes)
                self.chunks.wait(chunk)
                stop = min(end, span.end)
                chunk.copy_to(address + at - offset, at, stop)
            finally:
                self.chunks.release(chunk)
            at = stop
        return end - offset

    def close(self, file: OpenFile) -> None:
        """Close a file; cancel its read-ahead unless others have it open."""
        name = (id(file.files), file.path)
        with self._lock:
            for key in [key for key in self._active if key[0] == id(file)]:
                del self._active[key]
            self._open[name] -= 1
            is_last = not self._open[name]
            if is_last:
                del self._open[name]
        if is_last:
            self.chunks.forget(file.files, file.path)

    def stop(self) -> None:
        self.chunks.stop()

    def _piece(self, file: OpenFile, at: int, end: int, is_reader: bool) -> tuple[Range, bool]:
        """Return the range to load for the bytes from `at` on, and whether it is kept for others."""
        begin = at - at % file.chunk_bytes
        whole = Range(file.files, file.path, begin, min(file.chunk_bytes, file.size - begin))
        if file.checked_bytes or is_reader or whole.length <= end - at or self.chunks.has(whole):
            return whole, True
        return Range(file.files, file.path, at, min(end, whole.end) - at), False

    def _read_ahead(self, file: OpenFile, run: int, position: int, window_bytes: int) -> None:
        now_s = time.monotonic()
        with self._lock:
            self._active[id(file), run] = now_s
            for key in [key for key, used_s in self._active.items() if used_s < now_s - ACTIVE_S]:
                del self._active[key]
            share = int(self.chunks.room_bytes * AHEAD_SHARE) // len(self._active)
        stop = min(file.size, position + max(file.chunk_bytes, min(window_bytes, share)))
        with file.lock:
            at = max(file.asked.get(run, 0), position - position % file.chunk_bytes)
            while at < stop:
                span = Range(file.files, file.path, at, min(file.chunk_bytes, file.size - at))
                if not self.chunks.want_ahead(span):
                    break
                at = span.end
            file.asked[run] = at
            while len(file.asked) > 64:
                del file.asked[next(iter(file.asked))]
