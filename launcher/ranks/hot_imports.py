"""Keeps what a job imported up to its first step, for the next start of the same job.

One small text file for each job below the user's cache folder. It names modules that a later start imports, so it
is believed only if nobody but the user could have written it, and checked name by name. Nothing here fails a job:
what cannot be read is no record, what cannot be written is said in words.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from bootseer.light_typing import NamedTuple
from launcher.ranks import record_files
from launcher.ranks.fork_policy import MOST_MODULES, is_module_name
from launcher.ranks.record_files import JobKey, make_key

__all__ = [
    "JobKey",
    "Record",
    "cache_dir",
    "make_key",
    "read_listing",
    "read_record",
    "write_record",
]

_FIRST_LINE = "bootseer imports 2"
_LAST_LINE = "end"  # without it the file was cut off
_SUFFIX = ".imports"
_MOST_BYTES = 1 << 20
_MOST_WHY_CHARS = 300
_MOST_DROPPED = 500
_MOST_CHANGES = 500
_MOST_PATH_CHARS = 4096
_MOST_RECORDS = 256  # scripts in folders of their own for each run would fill the cache
_DAY_S = 86_400
_RECORD_AGE_S = 30 * _DAY_S
_DROPPED_AGE_S = 7 * _DAY_S  # then it is tried again: the library may have been mended


class Record(NamedTuple):
    """What an earlier start of the job told."""

    modules: tuple[str, ...]
    dropped: dict[str, str]  # modules that failed while preloading: name -> why
    caches_folder: str = ""  # of its first-step caches
    left_out: Mapping[str, str] = {}  # modules that each rank imports itself: name -> why, "" for importing such
    changes: tuple[str, ...] = ()  # what the script changes; nothing that is preloaded minds
    is_whole: bool = False  # all that the last start has imported is in one of these
    proven: tuple[str, ...] = ()  # what was preloaded last, all of it
    failures: int = 0  # of preloading, one after the other, since then
    last_failure: str = ""


def cache_dir(environ: Mapping[str, str]) -> str:
    """The folder of the records, which need not exist; "" if none can be told."""
    return record_files.records_dir(environ, "imports")


# ---- reading -------------------------------------------------------------------------------------------------


def read_record(directory: str, key: JobKey) -> Record | None:
    """What is kept of this job; None for nothing that could be used."""
    found = _read(directory, key)
    if found is None:
        return None
    return found.record


class _Found(NamedTuple):
    """What a file says."""

    record: Record
    dropped_s: dict[str, int]  # when modules have failed


def _read(directory: str, key: JobKey) -> _Found | None:
    if not directory:
        return None
    try:
        text = record_files.read(directory, _file_name(key), _MOST_BYTES, _RECORD_AGE_S)
    except (OSError, ValueError):
        return None
    return _parse(text, key)


def _parse(text: str, key: JobKey) -> _Found | None:
    lines = text.split("\n")
    header = _header(key)
    if lines[: len(header)] != header or lines[-2:] != [_LAST_LINE, ""]:
        return None
    now = int(time.time())
    modules: dict[str, None] = {}
    proven: dict[str, None] = {}
    left_out: dict[str, str] = {}
    dropped: dict[str, str] = {}
    dropped_s: dict[str, int] = {}
    changes: list[str] = []
    caches_folder, is_whole, failures, last_failure = "", False, 0, ""
    for line in lines[len(header) : -2]:
        kind, _, rest = line.partition(" ")
        name, _, more = rest.partition(" ")
        when, _, why = more.partition(" ")
        is_time = when.isascii() and when.isdigit() and len(when) < 16
        if kind == "caches" and rest.startswith("/"):
            caches_folder = rest
        elif kind == "change":
            changes.append(rest)
        elif kind == "whole" and not rest:
            is_whole = True
        elif kind == "failed" and name.isascii() and name.isdigit() and len(name) < 4 and is_time:
            if -_DAY_S < now - int(when) < _DROPPED_AGE_S:
                failures, last_failure = int(name), _plain(why)
        elif kind == "proven" and rest == "*":
            proven.update(modules)
        elif not is_module_name(name):
            return None
        elif kind == "module" and not more:
            modules[name] = None
        elif kind == "proven" and not more:
            proven[name] = None
        elif kind == "left":
            left_out[name] = _plain(more)
        elif kind == "dropped" and is_time:
            if -_DAY_S < now - int(when) < _DROPPED_AGE_S:
                dropped[name], dropped_s[name] = _plain(why), int(when)
        else:
            return None
    return _Found(
        Record(
            tuple(modules)[:MOST_MODULES],
            dropped,
            caches_folder,
            left_out,
            tuple(changes),
            is_whole,
            tuple(proven)[:MOST_MODULES],
            failures,
            last_failure,
        ),
        dropped_s,
    )


def read_listing(path: str) -> list[tuple[str, str]]:
    """The modules that a rank had at its first step: name and file; empty for no such list."""
    try:
        lines = record_files.read_listing(path, record_files.MOST_LISTING_BYTES)
    except (OSError, ValueError):
        return []
    # Lines of another shape are of other files that it needed (start_observe.py).
    return [(words[0], words[1]) for line in lines if len(words := line.split("\t")) == 2]


def read_line(path: str) -> str:
    """A line that a process of the job has written; "" for none."""
    try:
        lines = record_files.read_listing(path, _MOST_PATH_CHARS)
    except (OSError, ValueError):
        return ""
    return _plain(lines[0]) if lines else ""


# ---- writing -------------------------------------------------------------------------------------------------


def write_record(directory: str, key: JobKey, record: Record) -> str:
    """Keeps a record in place of an earlier one; returns why that failed, "" if it did not."""
    try:
        data = _format(directory, key, record)
    except ValueError as error:  # a name that is no text
        return str(error)
    return record_files.write(directory, _file_name(key), data, _SUFFIX, _MOST_RECORDS)


def _format(directory: str, key: JobKey, record: Record) -> bytes:
    now = int(time.time())
    earlier = _read(directory, key)
    known = {} if earlier is None else earlier.dropped_s
    lines = _header(key)
    folder = record.caches_folder
    if folder.startswith("/") and "\n" not in folder and len(folder) < _MOST_PATH_CHARS:
        lines.append(f"caches {folder}")
    for name, why in list(record.dropped.items())[:_MOST_DROPPED]:
        if is_module_name(name):  # the time of its first failure is kept, or it would never be tried again
            lines.append(f"dropped {name} {known.get(name, now)} {_plain(why)}")
    if record.failures:
        lines.append(f"failed {min(record.failures, 999)} {now} {_plain(record.last_failure)}")
    lines += [f"change {what}" for what in record.changes[:_MOST_CHANGES] if _plain(what) == what]
    if record.is_whole:
        lines.append("whole")
    size = sum(len(line) for line in lines) * 4
    named = [("module", name, "") for name in record.modules[:MOST_MODULES]]
    if record.proven != record.modules:
        named += [("proven", name, "") for name in record.proven[:MOST_MODULES]]
    named += [("left", name, f" {_plain(why)}") for name, why in list(record.left_out.items())[:MOST_MODULES]]
    for kind, name, more in named:
        line = f"{kind} {name}{more}".rstrip()
        size += len(line.encode("utf-8", "replace")) + 1
        if is_module_name(name) and size < _MOST_BYTES:
            lines.append(line)
    if record.proven and record.proven == record.modules:
        lines.append("proven *")
    return "\n".join([*lines, _LAST_LINE, ""]).encode("utf-8", "surrogateescape")


def _header(key: JobKey) -> list[str]:
    return record_files.header(_FIRST_LINE, key)


def _plain(text: str) -> str:
    """Text that may be printed, as one line."""
    return "".join(char if char.isprintable() else " " for char in text[:_MOST_WHY_CHARS]).strip()


def _file_name(key: JobKey) -> str:
    return record_files.file_name(key, _SUFFIX)
