"""Prefetch of the files that the last start of a job accessed into the page cache, with many requests at a time.

A short-lived process of the supervisor (supervisor/helpers.py), started together with bootrun. In: the record of a
start. Out: figures about its work. It finds, opens and reads files as the ranks will, and never runs them. Files
that differ from the record are left alone. It ends when memory gets short, after MAX_S, and at SIGTERM. It imports
only a few modules of the standard library, as it competes with an interpreter that starts.
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

from bootseer.linux.cgroups import read_memory
from bootseer.linux.page_cache import is_cached
from launcher.ranks.start_trace.files import JobKey
from launcher.ranks.start_trace.plan import (
    DIRECTORY,
    FEW_THREADS,
    FILE,
    NAME,
    SMALL,
    SMALL_BYTES,
    STEP_BYTES,
    CacheProbe,
    PrefetchEntry,
    ReadTask,
    choose_threads,
    source_of,
    split,
    steps,
)
from launcher.ranks.start_trace.record import read_record

MAX_S = 120.0
FREE_SHARE = 2  # prefetched data takes at most 1/FREE_SHARE of the free memory
MIN_SHARE = 16  # it stops when less than 1/MIN_SHARE of all memory is free
WARM_S = 0.0001  # a read that takes longer had to wait
MAX_COLD_PROBES = 2  # probes: the kernel may have evicted a single page
MAX_NAMES = 20_000  # of a directory
SAMPLE = 12  # files whose times decide the number of threads
WAKE_S, MEMORY_S = 0.005, 0.25

_OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # a pipe or terminal does not block it


def run(directory: str, *key: str) -> dict[str, object]:
    """Run the supervisor's helper. Args: directory: of the records; key: a JobKey's fields."""
    began_s = time.monotonic()
    record = read_record(directory, JobKey(*key))
    if record is None:
        return {"why": "there is no usable record"}
    if is_warm(record.probes):
        return {"why": "all files are in memory", "took_s": time.monotonic() - began_s}
    memory = read_memory()
    prefetch = Prefetch(record.entries(), memory.free_bytes // FREE_SHARE)
    signal.signal(signal.SIGTERM, lambda *_: prefetch.stop("the ranks have all files"))
    prefetch.run(began_s + MAX_S)
    return {**prefetch.figures(), "took_s": time.monotonic() - began_s}


def is_warm(probes: Iterable[CacheProbe]) -> bool:
    """Return whether sampled pages of the recorded files are in memory; False without probes."""
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
        if cold == MAX_COLD_PROBES:
            return False
    return seen > MAX_COLD_PROBES


def _is_there(fd: int, offset: int) -> bool:
    is_there = is_cached(fd, offset)
    if is_there is None:  # judged by the time of the read
        began_s = time.perf_counter()
        os.preadv(fd, [bytearray(1)], offset)
        is_there = time.perf_counter() - began_s < WARM_S
    return is_there


class _Counts:
    """Counters of one thread."""

    def __init__(self) -> None:
        self.files = self.folders = self.names = self.changed = self.missing = self.bytes = 0


class Prefetch:
    """One run over the entries of a record."""

    def __init__(self, entries: Iterator[PrefetchEntry], max_bytes: int) -> None:
        self.why = ""  # the reason why it stopped early
        self.threads = 0
        self._pieces = _all_pieces(entries)
        self._max_bytes = max_bytes
        self._lock = allocate_lock()  # of the pieces, and of `_running`
        self._counts: list[_Counts] = []
        self._latencies_s: list[float] = []
        self._running = 0
        self._damage = ""

    def stop(self, why: str) -> None:
        """Stop: each thread ends after its current piece."""
        self.why = self.why or why

    def run(self, until_s: float) -> None:
        """Run to the end, or until stopped; threads that hang are left to the end of the process."""
        self._start(FEW_THREADS)
        memory_s = time.monotonic() + MEMORY_S
        while self._running and not self.why:
            time.sleep(WAKE_S)
            now_s = time.monotonic()
            if len(self._latencies_s) >= SAMPLE:  # files may lie in several places
                self._start(choose_threads(self._latencies_s[-SAMPLE:]) - self.threads)
            if now_s >= until_s:
                self.stop(f"the time limit was reached: {MAX_S:g} s")
            if now_s >= memory_s:
                memory_s = now_s + MEMORY_S
                memory = read_memory()
                if memory.free_bytes < memory.total_bytes // MIN_SHARE:
                    self.stop("memory is short")

    def figures(self) -> dict[str, object]:
        """Return figures about the work done."""
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
            except RuntimeError:  # the limit of processes
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
        except ValueError:  # from the record: earlier entries were valid, and are read to the end
            self._damage = "a line of the record is invalid"
        finally:
            with self._lock:
                self._running -= 1

    def _take(self, piece: ReadTask, counts: _Counts, buffer: memoryview) -> None:
        entry = piece.entry
        began_s = time.perf_counter()
        if entry.kind == DIRECTORY:
            with os.scandir(entry.path) as names:
                for _ in islice(names, MAX_NAMES):
                    pass
            counts.folders += 1
        elif entry.kind == NAME:
            os.stat(entry.path)
            counts.names += 1
        else:
            self._read(piece, counts, buffer, began_s)
            return
        self._latencies_s.append(time.perf_counter() - began_s)

    def _read(self, piece: ReadTask, counts: _Counts, buffer: memoryview, began_s: float) -> None:
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
                return  # it was replaced meanwhile
            for offset, length in piece.ranges if entry.kind == FILE else ((0, status.st_size),):
                if self.why or not self._take_room(length):
                    return
                counts.bytes += length
                if length <= STEP_BYTES:
                    os.preadv(fd, [buffer[:length]], offset)
                    continue
                for at, part in steps(offset, length):  # starts the reads without copying
                    os.posix_fadvise(fd, at, part, os.POSIX_FADV_WILLNEED)
                os.preadv(fd, [buffer[:1]], offset + length - 1)  # limits the reads in flight
            counts.files += piece.is_first
        finally:
            os.close(fd)

    def _take_room(self, length: int) -> bool:
        with self._lock:
            self._max_bytes -= length
            is_room = self._max_bytes >= 0
        if not is_room:
            self.stop("half of the free memory is used")
        return is_room


def _is_right(status: os.stat_result, entry: PrefetchEntry) -> bool:
    """Return whether it is the recorded file, or a small one, which is read in any case."""
    if not stat.S_ISREG(status.st_mode):
        return False
    if entry.kind == SMALL:
        return status.st_size <= SMALL_BYTES
    return status.st_size == entry.size and status.st_mtime_ns == entry.mtime_ns


def _all_pieces(entries: Iterator[PrefetchEntry]) -> Iterator[ReadTask]:
    for entry in entries:
        yield from split(entry)
