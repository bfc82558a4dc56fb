"""PURE: what a start touches, as entries and lines of a record, and how it is read ahead.

In: pages that a process has touched, files in the order of their first use, lines of a record. Out: entries,
lines, pieces to read, how many at once. Apart from who looks (start_observe.py) and who reads (start_prefetch.py).

    at FOLDER                            the next folder; they are numbered from 0
    d NUMBER                             imports looked into it
    n NUMBER NAME                        only asked for: a source whose bytecode lies elsewhere
    s NUMBER NAME                        Python source or bytecode: read as it is, if it is small
    f NUMBER SIZE MTIME_NS RANGES NAME   read if it is as it was; RANGES in units of 4 KiB as FIRST+COUNT,...,
                                         or * for all of it
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

UNIT_BYTES = 4096  # of ranges; every page size is a multiple
GAP_UNITS = 16  # ranges nearer than this are one: the kernel maps so many pages at once around a touched one
WHOLE_SHARE = 0.9  # of a file: then all of it is read
SMALL_BYTES = 1 << 20  # a file of which nothing is known is not read if it is larger
PIECE_BYTES = 4 << 20  # what one thread reads of a file at a time
STEP_BYTES = 128 << 10  # what the kernel reads ahead in one go on most file systems
MOST_ENTRIES = 60_000
MOST_RANGES = 4_000  # of a file
LARGE_PROBES, MOST_PROBES = 8, 32
_MOST_NUMBER = 1 << 63
_EXTENSION = ".so"
_PACKAGES = ("/site-packages/", "/dist-packages/")

Range = tuple[int, int]  # first unit, count


FOLDER, NAME, SMALL, FILE = (
    "d",
    "n",
    "s",
    "f",
)  # no enum: loading that takes 3 ms of CPU, in a process that lives for ten


class Entry(NamedTuple):
    """A folder, a name or a file that a start needed."""

    kind: str  # FOLDER, NAME, SMALL, FILE
    path: str  # absolute
    size: int = 0  # bytes
    mtime_ns: int = 0
    ranges: tuple[Range, ...] = ()  # none: all of it


class Probe(NamedTuple):
    """A place in a file that was recorded."""

    path: str
    offset: int  # bytes
    size: int  # of the file, bytes
    mtime_ns: int


class Piece(NamedTuple):
    """What a thread does at a time. `ranges` in bytes: offset, length; none for what is only looked up."""

    entry: Entry
    ranges: tuple[tuple[int, int], ...]
    is_first: bool = True  # of its entry


# ---- ranges --------------------------------------------------------------------------------------------------


def find_runs(flags: bytes, first: int, scale: int = 1) -> list[Range]:
    """The runs of ones.

    Args: flags: a byte for each page, 0 or 1; first: page of the file that the first one stands for; scale: units
        of a page.
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
    """Sorted and without overlaps; what is nearer than `gap` becomes one."""
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


def of_file(ranges: Iterable[Range], size: int) -> tuple[Range, ...] | None:
    """Ranges of a file of this size (bytes), () for all of it; None if there are none in it."""
    units = -(-size // UNIT_BYTES)
    inside = [(first, min(count, units - first)) for first, count in ranges if 0 <= first < units]
    gap = GAP_UNITS
    merged = merge(inside, gap)
    while len(merged) > MOST_RANGES:
        gap *= 2
        merged = merge(inside, gap)
    if not merged:
        return None
    return () if sum(count for _, count in merged) >= WHOLE_SHARE * units else merged


def written_first(ranges: Sequence[Range], written: Sequence[Range]) -> tuple[Range, ...]:
    """The same ranges (`merge`) in the order in which a loader comes to them, which relocates before all else.

    Args: written: units of a library that its process has copied, as it wrote to them; sorted, without overlaps.
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


def touched_bytes(entry: Entry) -> int:
    """What is read of it."""
    size = entry.size
    if not entry.ranges:
        return size
    return sum(max(0, min(count * UNIT_BYTES, size - first * UNIT_BYTES)) for first, count in entry.ranges)


def split(entry: Entry) -> list[Piece]:
    """The entry as pieces of about PIECE_BYTES."""
    if entry.kind != FILE:
        return [Piece(entry, ())]
    size = entry.size
    spans = [(first * UNIT_BYTES, count * UNIT_BYTES) for first, count in entry.ranges] or [(0, size)]
    pieces: list[Piece] = []
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
                pieces.append(Piece(entry, tuple(taken), not pieces))
                taken, room = [], PIECE_BYTES
    if taken or not pieces:
        pieces.append(Piece(entry, tuple(taken), not pieces))
    return pieces


def steps(offset: int, length: int) -> Iterator[Range]:
    """A range of bytes as the kernel reads it ahead."""
    end = offset + length
    while offset < end:
        part = min(STEP_BYTES, end - offset)
        yield offset, part
        offset += part


# ---- order ---------------------------------------------------------------------------------------------------


def merge_order(modules: Sequence[str], libraries: Sequence[str]) -> list[str]:
    """Files in the order of their first use, each once.

    Args: modules: in the order of their imports; libraries: in the order in which they were mapped. Those that are
        modules as well say where the others belong: a library comes with the module that needs it.
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
    """Files in the order of their first use, each once.

    A library that is none of `files` comes with the first extension module of its package: that, or what it was
    linked with, needs it. Others come as in `merge_order`.

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
    """The folder that a package was installed to; "" for what is no part of one. PKG.libs belongs to PKG."""
    for folder in _PACKAGES:
        begin, found, rest = path.rpartition(folder)
        if found:
            name, is_below, _ = rest.partition("/")
            return begin + found + name.removesuffix(".libs") if is_below else ""
    return ""


# ---- a record's lines ----------------------------------------------------------------------------------------


def format_entries(entries: Iterable[Entry]) -> list[str]:
    """The lines; what no line can hold is left out."""
    lines: list[str] = []
    numbers: dict[str, int] = {}

    def number(folder: str) -> int:
        known = numbers.get(folder)
        if known is None:
            known = numbers[folder] = len(numbers)
            lines.append(f"at {folder}")
        return known

    left = MOST_ENTRIES
    for kind, path, size, mtime_ns, ranges in entries:
        if not is_path(path):
            continue
        left -= 1
        if left < 0:
            break
        if kind == FOLDER:
            lines.append(f"d {number(path)}")
            continue
        folder, _, name = path.rpartition("/")
        place = numbers.get(folder)
        if place is None:
            place = number(folder or "/")
        if kind != FILE:
            lines.append(f"{kind} {place} {name}")
        elif ranges:
            text = ",".join([f"{first}+{units}" for first, units in ranges])
            lines.append(f"f {place} {size} {mtime_ns} {text} {name}")
        else:
            lines.append(f"f {place} {size} {mtime_ns} * {name}")
    return lines


def is_path(path: str) -> bool:
    """Whether it is absolute and fits in a line."""
    return path[:1] == "/" and "\n" not in path and "\0" not in path and not path.endswith(("/", "/.", "/.."))


def source_of(bytecode: str) -> str:
    """The source that is asked for before its bytecode, where that lies beside it; "" if it does not."""
    folder, found, name = bytecode.rpartition("/__pycache__/")
    return f"{folder}/{name.partition('.')[0]}.py" if found else ""


def parse_entries(lines: Iterable[str]) -> Iterator[Entry]:
    """The entries, one after the other. Raises: ValueError at a line that is none."""
    folders: list[str] = []
    count = 0
    for line in lines:
        kind, _, rest = line.partition(" ")
        if kind == "at":
            if not rest.startswith("/") or "\0" in rest or len(folders) >= MOST_ENTRIES:
                raise ValueError("a folder that is none")
            folders.append(rest)
            continue
        count += 1
        if count > MOST_ENTRIES:
            raise ValueError("too many entries")
        place, _, rest = rest.partition(" ")
        folder = folders[_number(place, len(folders))]
        if kind == "d":
            yield Entry(FOLDER, folder)
        elif kind in (NAME, SMALL):
            yield Entry(kind, _join(folder, rest))
        elif kind == "f":
            words = rest.split(" ", 3)
            if len(words) != 4:
                raise ValueError("a file without all that belongs to it")
            size, mtime_ns = _number(words[0]), _signed(words[1])
            yield Entry(FILE, _join(folder, words[3]), size, mtime_ns, parse_ranges(words[2]))
        else:
            raise ValueError("an unknown kind of line")


def parse_ranges(text: str) -> tuple[Range, ...]:
    """Raises: ValueError."""
    if text == "*":
        return ()
    words = text.split(",", MOST_RANGES)
    if len(words) > MOST_RANGES:
        raise ValueError("too many ranges")
    ranges = []
    for word in words:
        first, _, count = word.partition("+")
        ranges.append((_number(first), _number(count)))
    return tuple(ranges)


def _number(text: str, end: int = _MOST_NUMBER) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20) or int(text) >= end:
        raise ValueError("no number, or one that is too large")
    return int(text)


def _signed(text: str) -> int:
    return -_number(text[1:]) if text.startswith("-") else _number(text)


def _join(folder: str, name: str) -> str:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError("a name that is none")
    return folder + name if folder.endswith("/") else f"{folder}/{name}"


# ---- reading ahead -------------------------------------------------------------------------------------------


def choose_probes(entries: Sequence[Entry]) -> list[Entry]:
    """A few files that a start reads, of the large ones and of all: they tell for the whole record whether it is
    in memory already, and whether it is still right."""
    files = [entry for entry in entries if entry.kind == SMALL or (entry.kind == FILE and entry.size)]
    count = min(len(files), MOST_PROBES - LARGE_PROBES)
    spread = [files[(2 * number + 1) * len(files) // (2 * count)] for number in range(count)]
    large = sorted(files, key=lambda entry: -entry.size)[:LARGE_PROBES]
    chosen = dict.fromkeys([*large, *spread])
    return [entry for entry in chosen if is_path(entry.path)]


def make_probe(entry: Entry, size: int, mtime_ns: int) -> Probe:
    """The place in such a file that is looked at."""
    return Probe(entry.path, entry.ranges[0][0] * UNIT_BYTES if entry.ranges else 0, size, mtime_ns)


def format_probe(probe: Probe) -> str:
    """A line."""
    return f"{probe.offset} {probe.size} {probe.mtime_ns} {probe.path}"


def parse_probe(line: str) -> Probe:
    """Raises: ValueError."""
    words = line.split(" ", 3)
    if len(words) != 4 or not is_path(words[3]):
        raise ValueError("a probe that is none")
    return Probe(words[3], _number(words[0]), _number(words[1]), _signed(words[2]))


FEW_THREADS, MOST_THREADS = 6, 48


def choose_threads(latencies_s: Sequence[float]) -> int:
    """How many read at once, by how long the first files took to be found and opened.

    A disk is kept busy by a few; what answers over a network after milliseconds needs many on their way.
    """
    if not latencies_s:
        return FEW_THREADS
    middle_s = sorted(latencies_s)[len(latencies_s) // 2]
    if middle_s < 0.0005:
        return FEW_THREADS
    return MOST_THREADS if middle_s >= 0.002 else MOST_THREADS // 2
