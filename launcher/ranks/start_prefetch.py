"""Reads what the last start of a job touched into the page cache, ahead of the ranks, with many requests a time.

A short-lived process of the guard's (guard_helpers.py), begun with bootrun itself. In: the record of a start. Out:
what it did, as figures. Files are found, opened and read as the ranks will, never run: those that are not what was
recorded are left alone. It gives up when memory gets short, after MOST_S, and at SIGTERM. Standard library only,
and of that as little as can be: it races with an interpreter that starts.
"""

from __future__ import annotations

import os
import signal
import stat
import time
from _thread import allocate_lock, start_new_thread
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice

from bootseer.storage.memory_limits import read_memory
from bootseer.storage.page_cache import is_cached
from launcher.ranks.record_files import JobKey
from launcher.ranks.start_plan import (
    FEW_THREADS,
    FILE,
    FOLDER,
    NAME,
    SMALL,
    SMALL_BYTES,
    STEP_BYTES,
    Entry,
    Piece,
    Probe,
    choose_threads,
    source_of,
    split,
    steps,
)
from launcher.ranks.start_record import read_record

MOST_S = 120.0
FREE_SHARE = 2  # what is read takes at most one part in so many of the free memory
LEAST_SHARE = 16  # it stops when less than one part in so many is left of all memory
WARM_S = 0.0001  # a read that takes longer had to wait
ENOUGH_COLD = 2  # probes: a single page may have been given up
MOST_NAMES = 20_000  # of a folder
SAMPLE = 12  # files whose times decide how many threads there are
WAKE_S, MEMORY_S = 0.005, 0.25

_OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # a pipe or terminal would not hold it up


def run(directory: str, *key: str) -> dict[str, object]:
    """What the guard's helper does. Args: directory: of the records; key: a JobKey's fields."""
    began_s = time.monotonic()
    record = read_record(directory, JobKey(*key))
    if record is None:
        return {"why": "there is no record that can be used"}
    if is_warm(record.probes):
        return {"why": "all is in memory", "took_s": time.monotonic() - began_s}
    memory = read_memory()
    prefetch = Prefetch(record.entries(), memory.free_bytes // FREE_SHARE)
    signal.signal(signal.SIGTERM, lambda *_: prefetch.stop("the ranks have all they need"))
    prefetch.run(began_s + MOST_S)
    return {**prefetch.figures(), "took_s": time.monotonic() - began_s}


def is_warm(probes: Iterable[Probe]) -> bool:
    """Whether single pages of what was recorded are in memory; False when there is nothing to be looked at."""
    cold = seen = 0
    for probe in probes:
        try:
            fd = os.open(probe.path, _OPEN)
        except (OSError, ValueError):
            continue
        try:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                seen += 1
                cold += not _is_there(fd, probe.offset)
        except (OSError, OverflowError):
            cold += 1
        finally:
            os.close(fd)
        if cold == ENOUGH_COLD:
            return False
    return seen > ENOUGH_COLD


def _is_there(fd: int, offset: int) -> bool:
    is_there = is_cached(fd, offset)
    if is_there is None:  # by how long it takes
        began_s = time.perf_counter()
        os.preadv(fd, [bytearray(1)], offset)
        is_there = time.perf_counter() - began_s < WARM_S
    return is_there


class _Counts:
    """Of one thread."""

    def __init__(self) -> None:
        self.files = self.folders = self.names = self.changed = self.missing = self.bytes = 0


class Prefetch:
    """One run over the entries of a record."""

    def __init__(self, entries: Iterator[Entry], most_bytes: int) -> None:
        self.why = ""  # it has ended before its end
        self.threads = 0
        self._pieces = _all_pieces(entries)
        self._most_bytes = most_bytes
        self._lock = allocate_lock()  # of the pieces, and of `_running`
        self._counts: list[_Counts] = []
        self._latencies_s: list[float] = []
        self._running = 0
        self._damage = ""

    def stop(self, why: str) -> None:
        """Threads end with what they are at."""
        self.why = self.why or why

    def run(self, until_s: float) -> None:
        """Returns at the end, or when it was stopped: threads that hang are left to the end of the process."""
        self._start(FEW_THREADS)
        memory_s = time.monotonic() + MEMORY_S
        while self._running and not self.why:
            time.sleep(WAKE_S)
            now_s = time.monotonic()
            if len(self._latencies_s) >= SAMPLE:  # files may lie in several places
                self._start(choose_threads(self._latencies_s[-SAMPLE:]) - self.threads)
            if now_s >= until_s:
                self.stop(f"it took longer than {MOST_S:g} s")
            if now_s >= memory_s:
                memory_s = now_s + MEMORY_S
                memory = read_memory()
                if memory.free_bytes < memory.total_bytes // LEAST_SHARE:
                    self.stop("memory is short")

    def figures(self) -> dict[str, object]:
        """What it has done."""
        names = ("files", "folders", "names", "bytes", "changed", "missing")
        found: dict[str, object] = {name: sum(getattr(each, name) for each in self._counts) for name in names}
        return {**found, "threads": self.threads, "why": self.why or self._damage}

    def _start(self, count: int) -> None:
        for _ in range(count):
            counts = _Counts()
            with self._lock:
                self._running += 1
            try:
                start_new_thread(self._work, (counts,))
            except RuntimeError:  # a limit of processes
                with self._lock:
                    self._running -= 1
                return
            self._counts.append(counts)
            self.threads += 1

    def _work(self, counts: _Counts) -> None:
        buffer = memoryview(bytearray(STEP_BYTES))
        try:
            while not self.why:
                with self._lock:
                    piece = next(self._pieces, None)
                if piece is None:
                    return
                try:
                    self._take(piece, counts, buffer)
                except (OSError, ValueError, OverflowError):
                    counts.missing += piece.entry.kind in (SMALL, FILE)
        except ValueError:  # of the record: what came before was right, and is read to its end
            self._damage = "a line of the record is none"
        finally:
            with self._lock:
                self._running -= 1

    def _take(self, piece: Piece, counts: _Counts, buffer: memoryview) -> None:
        entry = piece.entry
        began_s = time.perf_counter()
        if entry.kind == FOLDER:
            with os.scandir(entry.path) as names:
                for _ in islice(names, MOST_NAMES):
                    pass
            counts.folders += 1
        elif entry.kind == NAME:
            os.stat(entry.path)
            counts.names += 1
        else:
            self._read(piece, counts, buffer, began_s)
            return
        self._latencies_s.append(time.perf_counter() - began_s)

    def _read(self, piece: Piece, counts: _Counts, buffer: memoryview, began_s: float) -> None:
        entry = piece.entry
        source = source_of(entry.path)
        if source:
            with suppress(OSError):
                os.stat(source)
        status = os.stat(entry.path)
        if not _is_right(status, entry):
            counts.changed += 1
            return
        fd = os.open(entry.path, _OPEN)
        try:
            self._latencies_s.append(time.perf_counter() - began_s)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return  # it was exchanged meanwhile
            for offset, length in piece.ranges if entry.kind == FILE else ((0, status.st_size),):
                if self.why or not self._take_room(length):
                    return
                counts.bytes += length
                if length <= STEP_BYTES:
                    os.preadv(fd, [buffer[:length]], offset)
                    continue
                for at, part in steps(offset, length):  # on its way, without being copied
                    os.posix_fadvise(fd, at, part, os.POSIX_FADV_WILLNEED)
                os.preadv(fd, [buffer[:1]], offset + length - 1)  # so that not more is on its way
            counts.files += piece.is_first
        finally:
            os.close(fd)

    def _take_room(self, length: int) -> bool:
        with self._lock:
            self._most_bytes -= length
            is_room = self._most_bytes >= 0
        if not is_room:
            self.stop("half of the free memory is taken")
        return is_room


def _is_right(status: os.stat_result, entry: Entry) -> bool:
    """Whether it is the file that was recorded, or a small one that stands for itself."""
    if not stat.S_ISREG(status.st_mode):
        return False
    if entry.kind == SMALL:
        return status.st_size <= SMALL_BYTES
    return status.st_size == entry.size and status.st_mtime_ns == entry.mtime_ns


def _all_pieces(entries: Iterator[Entry]) -> Iterator[Piece]:
    for entry in entries:
        yield from split(entry)
