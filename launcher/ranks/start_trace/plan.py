"""PURE: the files that a start accesses, as entries and lines of a record, and how they are prefetched.

In: pages that a process has accessed, files in the order of their first use, lines of a record. Out: entries,
lines, pieces to read, the number of threads. Separate from observe.py, which records, and prefetch.py,
which reads.

    at DIRECTORY                         the next directory; they are numbered from 0
    d NUMBER                             imports listed it
    n NUMBER NAME                        only its status was read: a source whose bytecode lies elsewhere
    s NUMBER NAME                        Python source or bytecode: read as it is, if it is small
    f NUMBER SIZE MTIME_NS RANGES NAME   read if it is unchanged; RANGES in units of 4 KiB as FIRST+COUNT,...,
                                         or * for all of it
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

UNIT_BYTES = 4096  # of ranges; every page size is a multiple
GAP_UNITS = 16  # closer ranges are merged: the kernel maps that many pages at once around an accessed one
WHOLE_SHARE = 0.9  # of a file: above this, all of it is read
SMALL_BYTES = 1 << 20  # a file without recorded facts is not read if it is larger
PIECE_BYTES = 4 << 20  # of a file, read by one thread at a time
STEP_BYTES = 128 << 10  # the kernel's readahead size on most file systems
MAX_ENTRIES = 60_000
MAX_RANGES = 4_000  # of a file
LARGE_PROBES, MAX_PROBES = 8, 32
_MAX_NUMBER = 1 << 63
_EXTENSION = ".so"
_PACKAGES = ("/site-packages/", "/dist-packages/")

Range = tuple[int, int]  # first unit, count


DIRECTORY, NAME, SMALL, FILE = (
    "d",
    "n",
    "s",
    "f",
)  # no enum: loading enum takes 3 ms of CPU, in a process that lives for ten


class PrefetchEntry(NamedTuple):
    """A directory, a name or a file that a start needed."""

    kind: str  # FOLDER, NAME, SMALL, FILE
    path: str  # absolute
    size: int = 0  # bytes
    mtime_ns: int = 0
    ranges: tuple[Range, ...] = ()  # none: all of it


class CacheProbe(NamedTuple):
    """A place in a file that was recorded."""

    path: str
    offset: int  # bytes
    size: int  # of the file, bytes
    mtime_ns: int


class ReadTask(NamedTuple):
    """A thread's unit of work. `ranges` in bytes: offset, length; none for an entry that is only checked."""

    entry: PrefetchEntry
    ranges: tuple[tuple[int, int], ...]
    is_first: bool = True  # of its entry


# ---- ranges --------------------------------------------------------------------------------------------------


def find_runs(flags: bytes, first: int, scale: int = 1) -> list[Range]:
    """Return the runs of ones.

    Args: flags: a byte for each page, 0 or 1; first: page of the file that the first flag stands for; scale:
        units per page.
    """
    runs: list[Range] = []
    end = 0
    while (start := flags.find(1, end)) >= 0:
        end = flags.find(0, start)
        if end < 0:
            end = len(flags)
        runs.append(((first + start) * scale, (end - start) * scale))
    return runs


def merge(ranges: Iterable[Range], gap: int = GAP_UNITS) -> tuple[Range, ...]:
    """Sort ranges and remove overlaps; merge ranges closer than `gap`."""
    merged: list[Range] = []
    for first, count in sorted(ranges):
        if count <= 0:
            continue
        if merged and first - (merged[-1][0] + merged[-1][1]) <= gap:
            last_first, last_count = merged[-1]
            merged[-1] = (last_first, max(last_count, first + count - last_first))
        else:
            merged.append((first, count))
    return tuple(merged)


def clip_to_file(ranges: Iterable[Range], size: int) -> tuple[Range, ...] | None:
    """Return the ranges inside a file of this size (bytes), () for all of it; None if there are none."""
    units = -(-size // UNIT_BYTES)
    inside = [(first, min(count, units - first)) for first, count in ranges if 0 <= first < units]
    gap = GAP_UNITS
    merged = merge(inside, gap)
    while len(merged) > MAX_RANGES:
        gap *= 2
        merged = merge(inside, gap)
    if not merged:
        return None
    return () if sum(count for _, count in merged) >= WHOLE_SHARE * units else merged


def written_first(ranges: Sequence[Range], written: Sequence[Range]) -> tuple[Range, ...]:
    """Return the same ranges (`merge`) in the order in which a loader, which relocates first, reads them.

    Args: written: units of a library that its process has copied by writing to them; sorted, no overlaps.
    """
    early: list[Range] = []
    late: list[Range] = []
    for first, count in ranges:
        at, end = first, first + count
        if not at:
            early.append((first, count))  # the headers, and tables of symbols and relocations
            continue
        for other, others in written[max(0, bisect_left(written, (at + 1, 0)) - 1) :]:
            begin, stop = max(at, other), min(end, other + others)
            if other >= end:
                break
            if begin < stop:
                if at < begin:
                    late.append((at, begin - at))
                early.append((begin, stop - begin))
                at = stop
        if at < end:
            late.append((at, end - at))
    return (*early, *late)


def split(entry: PrefetchEntry) -> list[ReadTask]:
    """Split the entry into pieces of about PIECE_BYTES."""
    if entry.kind != FILE:
        return [ReadTask(entry, ())]
    size = entry.size
    spans = [(first * UNIT_BYTES, count * UNIT_BYTES) for first, count in entry.ranges] or [(0, size)]
    pieces: list[ReadTask] = []
    taken: list[tuple[int, int]] = []
    room = PIECE_BYTES
    for offset, length in spans:
        at, end = offset, min(offset + length, size)
        while at < end:
            part = min(end - at, room)
            taken.append((at, part))
            at += part
            room -= part
            if not room:
                pieces.append(ReadTask(entry, tuple(taken), not pieces))
                taken, room = [], PIECE_BYTES
    if taken or not pieces:
        pieces.append(ReadTask(entry, tuple(taken), not pieces))
    return pieces


def steps(offset: int, length: int) -> Iterator[Range]:
    """Yield a range of bytes in steps of the kernel's readahead."""
    end = offset + length
    while offset < end:
        part = min(STEP_BYTES, end - offset)
        yield offset, part
        offset += part


# ---- order ---------------------------------------------------------------------------------------------------


def merge_order(modules: Sequence[str], libraries: Sequence[str]) -> list[str]:
    """Return files in the order of their first use, each once.

    Args: modules: in the order of their imports; libraries: in the order in which they were mapped. Libraries that
        are also modules give the positions of the others: a library comes with the module that needs it.
    """
    places = {path: place for place, path in reversed(list(enumerate(modules)))}
    after: dict[int, list[str]] = {}
    place = -1
    for path in dict.fromkeys(libraries):
        if path in places:
            place = places[path]
        else:
            after.setdefault(place, []).append(path)
    ordered = list(after.get(-1, ()))
    for number, path in enumerate(modules):
        ordered.append(path)
        ordered += after.get(number, ())
    return list(dict.fromkeys(ordered))


def place_libraries(files: Sequence[str], libraries: Iterable[str]) -> list[str]:
    """Return files in the order of their first use, each once.

    A library that is not in `files` comes with the first extension module of its package: that module, or a
    library that it links to, needs it. Others come as in `merge_order`.

    Args: files: in that order; libraries: by their addresses, which are not always in the order of their mapping.
    """
    anchors: dict[str, str] = {}
    for path in files:
        package = _package_of(path)
        if package and path.endswith(_EXTENSION):
            anchors.setdefault(package, path)
    own: dict[str, list[str]] = {}
    others: list[str] = []
    known = set(files)
    for path in libraries:
        anchor = "" if path in known else anchors.get(_package_of(path), "")
        if anchor:
            own.setdefault(anchor, []).append(path)
        else:
            others.append(path)
    ordered: list[str] = []
    for path in merge_order(files, others):
        ordered.append(path)
        ordered += own.get(path, ())
    return list(dict.fromkeys(ordered))


def _package_of(path: str) -> str:
    """Return the directory of the installed package, "" for other paths. PKG.libs belongs to PKG."""
    for directory in _PACKAGES:
        begin, found, rest = path.rpartition(directory)
        if found:
            name, is_below, _ = rest.partition("/")
            return begin + found + name.removesuffix(".libs") if is_below else ""
    return ""


# ---- a record's lines ----------------------------------------------------------------------------------------


def format_entries(entries: Iterable[PrefetchEntry]) -> list[str]:
    """Return the lines; omit entries that no line can hold."""
    lines: list[str] = []
    numbers: dict[str, int] = {}

    def number(directory: str) -> int:
        known = numbers.get(directory)
        if known is None:
            known = numbers[directory] = len(numbers)
            lines.append(f"at {directory}")
        return known

    left = MAX_ENTRIES
    for kind, path, size, mtime_ns, ranges in entries:
        if not is_path(path):
            continue
        left -= 1
        if left < 0:
            break
        if kind == DIRECTORY:
            lines.append(f"d {number(path)}")
            continue
        directory, _, name = path.rpartition("/")
        place = numbers.get(directory)
        if place is None:
            place = number(directory or "/")
        if kind != FILE:
            lines.append(f"{kind} {place} {name}")
        elif ranges:
            text = ",".join([f"{first}+{units}" for first, units in ranges])
            lines.append(f"f {place} {size} {mtime_ns} {text} {name}")
        else:
            lines.append(f"f {place} {size} {mtime_ns} * {name}")
    return lines


def is_path(path: str) -> bool:
    """Return whether a path is absolute and fits in a line."""
    return path[:1] == "/" and "\n" not in path and "\0" not in path and not path.endswith(("/", "/.", "/.."))


def source_of(bytecode: str) -> str:
    """Return the source that Python checks before bytecode that lies beside it; "" for other bytecode."""
    directory, found, name = bytecode.rpartition("/__pycache__/")
    return f"{directory}/{name.partition('.')[0]}.py" if found else ""


def parse_entries(lines: Iterable[str]) -> Iterator[PrefetchEntry]:
    """Yield the entries one by one. Raises: ValueError for an invalid line."""
    directories: list[str] = []
    count = 0
    for line in lines:
        kind, _, rest = line.partition(" ")
        if kind == "at":
            if not rest.startswith("/") or "\0" in rest or len(directories) >= MAX_ENTRIES:
                raise ValueError("not a directory path")
            directories.append(rest)
            continue
        count += 1
        if count > MAX_ENTRIES:
            raise ValueError("too many entries")
        place, _, rest = rest.partition(" ")
        directory = directories[_number(place, len(directories))]
        if kind == "d":
            yield PrefetchEntry(DIRECTORY, directory)
        elif kind in (NAME, SMALL):
            yield PrefetchEntry(kind, _join(directory, rest))
        elif kind == "f":
            words = rest.split(" ", 3)
            if len(words) != 4:
                raise ValueError("an incomplete file entry")
            size, mtime_ns = _number(words[0]), _signed(words[1])
            yield PrefetchEntry(FILE, _join(directory, words[3]), size, mtime_ns, parse_ranges(words[2]))
        else:
            raise ValueError("an unknown kind of line")


def parse_ranges(text: str) -> tuple[Range, ...]:
    """Parse ranges, as in the module's docstring. Raises: ValueError."""
    if text == "*":
        return ()
    words = text.split(",", MAX_RANGES)
    if len(words) > MAX_RANGES:
        raise ValueError("too many ranges")
    ranges = []
    for word in words:
        first, _, count = word.partition("+")
        ranges.append((_number(first), _number(count)))
    return tuple(ranges)


def _number(text: str, end: int = _MAX_NUMBER) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20) or int(text) >= end:
        raise ValueError("not a number, or too large")
    return int(text)


def _signed(text: str) -> int:
    return -_number(text[1:]) if text.startswith("-") else _number(text)


def _join(directory: str, name: str) -> str:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError("not a file name")
    return directory + name if directory.endswith("/") else f"{directory}/{name}"


# ---- prefetching ---------------------------------------------------------------------------------------------


def choose_probes(entries: Sequence[PrefetchEntry]) -> list[PrefetchEntry]:
    """Choose some large files and some of all files that a start reads.

    They show for the whole record whether it is in memory already, and whether it is still valid.
    """
    files = [entry for entry in entries if entry.kind == SMALL or (entry.kind == FILE and entry.size)]
    count = min(len(files), MAX_PROBES - LARGE_PROBES)
    spread = [files[(2 * number + 1) * len(files) // (2 * count)] for number in range(count)]
    large = sorted(files, key=lambda entry: -entry.size)[:LARGE_PROBES]
    chosen = dict.fromkeys([*large, *spread])
    return [entry for entry in chosen if is_path(entry.path)]


def make_probe(entry: PrefetchEntry, size: int, mtime_ns: int) -> CacheProbe:
    """Return the probed place in such a file."""
    return CacheProbe(entry.path, entry.ranges[0][0] * UNIT_BYTES if entry.ranges else 0, size, mtime_ns)


def format_probe(probe: CacheProbe) -> str:
    return f"{probe.offset} {probe.size} {probe.mtime_ns} {probe.path}"


def parse_probe(line: str) -> CacheProbe:
    """Parse the line of a probe. Raises: ValueError."""
    words = line.split(" ", 3)
    if len(words) != 4 or not is_path(words[3]):
        raise ValueError("not a probe")
    return CacheProbe(words[3], _number(words[0]), _number(words[1]), _signed(words[2]))


FEW_THREADS, MAX_THREADS = 6, 48


def choose_threads(latencies_s: Sequence[float]) -> int:
    """Choose the number of threads by how long the first files took to be found and opened.

    A few threads keep a disk busy; network storage that answers after milliseconds needs many requests.
    """
    if not latencies_s:
        return FEW_THREADS
    middle_s = sorted(latencies_s)[len(latencies_s) // 2]
    if middle_s < 0.0005:
        return FEW_THREADS
    return MAX_THREADS if middle_s >= 0.002 else MAX_THREADS // 2
