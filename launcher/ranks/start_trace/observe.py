"""Recording of the files and parts of libraries that a start has accessed, after its first step.

A short-lived process of the supervisor (supervisor/helpers.py), at low priority. Ranks only list their modules for
it (bootstrap.py), which they do anyway. In: such lists, and /proc/PID of one rank: the files it has mapped, and
the pages of these that it has accessed (pagemap: the present bit needs no privileges). Out: the record, figures.
Each listed path is checked, and omitted if it is no regular file.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

from launcher.ranks.start_trace import files as record_files
from launcher.ranks.start_trace import plan as start_plan
from launcher.ranks.start_trace.files import JobKey
from launcher.ranks.start_trace.plan import (
    DIRECTORY,
    FILE,
    NAME,
    SMALL,
    UNIT_BYTES,
    CacheProbe,
    PrefetchEntry,
    Range,
)
from launcher.ranks.start_trace.record import StartRecord, forget_record, read_record, write_record

PAGEMAP_ENTRY_BYTES = 8
MAX_PAGEMAP_BYTES = 64 << 20  # of all mappings together: 32 GiB of files
READ_BYTES = 64 << 10  # small enough that its buffers are reused
# Accessed part of a file that is no library: data sets and checkpoints have their own prefetch.
MAX_DATA_BYTES = 16 << 20
_ELSEWHERE = ("/dev/", "/proc/", "/sys/")
# The highest byte of a page's entry: bit 63 is "present", bit 62 "swapped".
_TOUCHED = bytes(1 if byte >= 0x40 else 0 for byte in range(256))
_WRITTEN = bytes(1 if byte >= 0x40 and not byte & 0x20 else 0 for byte in range(256))  # bit 61: of the file itself
_SOURCE, _EXAMPLE = ".py", "/a/x"
_LIBRARY = ".so"  # in the name of a library
_SMALL = (".py", ".pyc")  # thousands: to inspect each would take most of the time


class AccessListing(NamedTuple):
    """The lists that processes of a start have written."""

    modules: tuple[str, ...]  # their files, in the order of the imports
    opened: tuple[str, ...]  # files, in the order of their first use; bytecode of modules is among them
    folders: tuple[str, ...]  # that the script or its imports have listed
    bytecode: str  # the path of the bytecode of /a/x.py
    touched: Mapping[str, tuple[Range, ...]]  # accessed units of libraries, by path


class Mapped(NamedTuple):
    """A file that a process has mapped."""

    path: str
    is_library: bool
    ranges: tuple[Range, ...]  # units that it has accessed
    written: tuple[Range, ...] = ()  # those units of which it has a copy


def run(
    directory: str, pid: str, rank_listing: str, preload_listing: str, is_whole: str, is_stale: str, *key: str
) -> dict[str, object]:
    """Run the supervisor's helper.

    Args: directory: of the records; pid: of the rank; preload_listing: of the process that it was forked from, ""
        if it was not; is_whole: "1" if processes listed all files, as there was no record when they began, else a
        forked rank lists only what it imports itself; is_stale: "1" if recorded files have changed; key: a JobKey.
    """
    os.nice(19)
    job = JobKey(*key)
    lines = _read_lines(rank_listing)
    if not lines:
        return {"why": "the rank has listed nothing"}
    if is_whole:
        preload_lines = _read_lines(preload_listing) if preload_listing else []
        if preload_listing and not preload_lines:
            return {"why": "the fork server has listed nothing"}
        listing = parse_listing([*preload_lines, *lines])
        entries = collect(listing, read_mapped(f"/proc/{int(pid)}"))
        probes = [
            start_plan.make_probe(entry, status.st_size, status.st_mtime_ns)
            for entry in start_plan.choose_probes(entries)
            if (status := _stat(entry.path)) is not None
        ]
    else:
        earlier = read_record(directory, job)
        known = [] if earlier is None or is_stale or any(map(_has_changed, earlier.probes)) else _entries(earlier)
        if earlier is None or not known:
            forget_record(directory, job)
            return {"why": "files have changed: the next start makes a new record"}
        more = find_more(parse_listing(lines), known)
        if not more:
            return {"why": "nothing new"}
        entries, probes = [*known, *more], list(earlier.probes)
    why = write_record(directory, job, entries, probes)
    return {"why": why, "files": sum(entry.kind in (SMALL, FILE) for entry in entries)}


def _entries(record: StartRecord) -> list[PrefetchEntry]:
    try:
        return list(record.entries())
    except ValueError:
        return []


def _has_changed(probe: CacheProbe) -> bool:
    status = _stat(probe.path)
    return status is None or (status.st_size, status.st_mtime_ns) != (probe.size, probe.mtime_ns)


def find_more(listing: AccessListing, known: Iterable[PrefetchEntry]) -> list[PrefetchEntry]:
    """Return entries of modules that are not known yet."""
    paths = {entry.path for entry in known}
    paths |= {start_plan.source_of(path) for path in paths}
    new = [path for path in listing.modules if path not in paths and os.path.realpath(path) not in paths]
    found = collect(listing._replace(modules=tuple(new)), ()) if new else []
    return [entry for entry in found if entry.path not in paths]


# ---- lists of processes --------------------------------------------------------------------------------------


def _read_lines(path: str) -> list[str]:
    try:
        return record_files.read_listing(path, record_files.MAX_LISTING_BYTES)
    except (OSError, ValueError):
        return []


def parse_listing(lines: Iterable[str]) -> AccessListing:
    """Parse the lists of one or more processes; ignore lines of another form.

    NAME FILE of a module; "" "file" FILE of one that must not be imported early; "" "open" FILE;
    "" "folder" PATH; "" "bytecode" PATH of /a/x.py; "" "touched" FILE RANGES; all separated by tabs.
    """
    modules: dict[str, None] = {}
    opened: dict[str, None] = {}
    directories: dict[str, None] = {}
    touched: dict[str, tuple[Range, ...]] = {}
    bytecode = ""
    for line in lines:
        first, _, rest = line.partition("\t")
        if first:
            if rest and "\t" not in rest:
                modules[rest] = None
            continue
        what, _, path = rest.partition("\t")
        if what == "touched":
            path, _, text = path.partition("\t")
            with suppress(ValueError):
                touched[path] = touched.get(path, ()) + start_plan.parse_ranges(text)
        elif "\t" in path:
            continue
        elif what == "open":
            opened[path] = None
        elif what == "folder":
            directories[path] = None
        elif what == "file":
            modules[path] = None
        elif what == "bytecode":
            bytecode = path
    return AccessListing(tuple(modules), tuple(opened), tuple(directories), bytecode, touched)


def bytecode_path(source: str, example: str) -> str:
    """Return the path of a source's bytecode, derived from that of /a/x.py; "" if it is unknown."""
    directory, _, name = source.rpartition("/")
    stem = name[: -len(_SOURCE)]
    beside = "/a/__pycache__/x"
    if example.startswith(beside):
        return f"{directory}/__pycache__/{stem}{example[len(beside) :]}"
    prefix, found, suffix = example.rpartition(_EXAMPLE)
    return f"{prefix}{directory}/{stem}{suffix}" if found else ""


# ---- /proc ---------------------------------------------------------------------------------------------------


def read_mapped(process: str) -> list[Mapped]:
    """Return the files that a process has mapped, in the order of the mapping; none if it has ended.

    Args: process: its directory in /proc.
    """
    try:
        with open(f"{process}/maps", "rb", buffering=0) as file:
            lines = file.read().splitlines()
        pagemap = os.open(f"{process}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return []
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    left = MAX_PAGEMAP_BYTES
    places: dict[str, int] = {}  # the kernel assigns addresses from the top down
    libraries: set[str] = set()
    ranges: dict[str, list[Range]] = {}
    written: dict[str, list[Range]] = {}
    try:
        for line in lines:
            words = line.split(None, 5)
            path = os.fsdecode(words[5]) if len(words) == 6 and words[4] != b"0" else ""
            if not path.startswith("/") or path.startswith(_ELSEWHERE) or path.endswith(" (deleted)"):
                continue
            low, high = (int(word, 16) for word in words[0].split(b"-"))
            places[path] = max(low, places.get(path, 0))
            if b"x" in words[1]:
                libraries.add(path)
            size = (high - low) // page_bytes * PAGEMAP_ENTRY_BYTES
            left -= size
            found, own = ranges.setdefault(path, []), written.setdefault(path, [])
            if left >= 0:
                flags = _read_flags(pagemap, low // page_bytes * PAGEMAP_ENTRY_BYTES, size)
                first = int(words[2], 16) // page_bytes
                scale = page_bytes // UNIT_BYTES
                found += start_plan.find_runs(flags.translate(_TOUCHED), first, scale)
                own += start_plan.find_runs(flags.translate(_WRITTEN), first, scale)
    finally:
        os.close(pagemap)
    ordered = sorted(places, key=lambda path: -places[path])
    merge = start_plan.merge
    return [Mapped(path, path in libraries, merge(ranges[path]), merge(written[path])) for path in ordered]


def _read_flags(pagemap: int, offset: int, size: int) -> bytes:
    """Read the highest byte of each page's entry."""
    parts = []
    try:
        while size > 0 and (data := os.pread(pagemap, min(size, READ_BYTES), offset)):
            parts.append(data[PAGEMAP_ENTRY_BYTES - 1 :: PAGEMAP_ENTRY_BYTES])
            offset += len(data)
            size -= len(data)
    except OSError:
        return b""
    return b"".join(parts)


# ---- entries -------------------------------------------------------------------------------------------------


def collect(listing: AccessListing, mapped: Iterable[Mapped]) -> list[PrefetchEntry]:
    """Return the entries of the record, in the order of first use.

    Files are opened in that order. Modules are listed when complete, a package after all its imports.
    """
    by_path = {each.path: each for each in mapped}
    sources: dict[str, str] = {}  # by the bytecode that was read instead, if it lies elsewhere
    modules: list[str] = []
    opened_files = set(listing.opened)
    for path in filter(start_plan.is_path, listing.modules):
        bytecode = bytecode_path(path, listing.bytecode) if path.endswith(_SOURCE) else ""
        if bytecode and (bytecode in opened_files or _stat(bytecode) is not None):
            if start_plan.source_of(bytecode) != path:
                sources[bytecode] = path
            modules.append(bytecode)
        else:
            modules.append(_resolve(path, by_path))
    opened = [
        _resolve(path, by_path) if _LIBRARY in path else path
        for path in listing.opened
        if not path.startswith(_ELSEWHERE) and start_plan.is_path(path)
    ]
    libraries = [*by_path, *(path for path in listing.touched if path not in by_path)]
    directories = (
        path for path in listing.folders if start_plan.is_path(path) and not path.startswith(_ELSEWHERE)
    )
    waiting = dict.fromkeys(directories)
    entries: list[PrefetchEntry] = []
    for path in start_plan.place_libraries(start_plan.merge_order(opened, modules), libraries):
        directory = path.rpartition("/")[0].removesuffix("/__pycache__")
        if directory in waiting:
            del waiting[directory]
            entries.append(PrefetchEntry(DIRECTORY, directory))
        if path in sources:
            entries.append(PrefetchEntry(NAME, sources[path]))
        if path in by_path or path in listing.touched:
            entries += _library(path, by_path.get(path), listing.touched.get(path, ()))
        else:
            entries += _whole(path)
    return [*(PrefetchEntry(DIRECTORY, directory) for directory in waiting), *entries]


def _resolve(path: str, mapped: Mapping[str, Mapped]) -> str:
    """Return the path under which a library is mapped: the kernel shows it without links."""
    if path in mapped or path.endswith(_SOURCE):
        return path
    found = os.path.realpath(path)
    return found if found in mapped else path


def _library(path: str, mapped: Mapped | None, touched: tuple[Range, ...]) -> list[PrefetchEntry]:
    status = _stat(path)
    if status is None:
        return []
    own = () if mapped is None else mapped.ranges
    is_data = mapped is not None and not mapped.is_library
    if is_data and sum(count for _, count in own) * UNIT_BYTES > MAX_DATA_BYTES:
        return []
    found = start_plan.clip_to_file([*touched, *own], status.st_size)
    if found is None:
        return []
    if mapped is not None:
        found = start_plan.written_first(found, mapped.written)
    return [PrefetchEntry(FILE, path, status.st_size, status.st_mtime_ns, found)]


def _whole(path: str) -> list[PrefetchEntry]:
    if path.endswith(_SMALL):
        return [PrefetchEntry(SMALL, path)]
    status = _stat(path)
    if status is None or status.st_size > MAX_DATA_BYTES:
        return []  # the size of the part that was read is unknown
    return [PrefetchEntry(FILE, path, status.st_size, status.st_mtime_ns)]


def _stat(path: str) -> os.stat_result | None:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status if stat.S_ISREG(status.st_mode) else None
