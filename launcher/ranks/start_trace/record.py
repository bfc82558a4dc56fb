"""The record of a start's accesses: kept in the user's cache directory, read at the next start of the job.

One text file for each job (files.py: private, owner and mode checked, bounded in size, number and age). The
script's own stamp is not part of its key: each file is checked on its own, and most belong to libraries.
"""

from __future__ import annotations

import os
from binascii import crc32
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from launcher.ranks.start_trace import files as record_files
from launcher.ranks.start_trace.files import START_SUFFIX, JobKey
from launcher.ranks.start_trace.plan import (
    MAX_PROBES,
    CacheProbe,
    PrefetchEntry,
    format_entries,
    format_probe,
    parse_entries,
    parse_probe,
)

_FIRST_LINE = "bootseer start 1"
_LAST_LINE = "end"  # a file without it is truncated
MAX_BYTES = 8 << 20
_MAX_RECORDS = 64
AGE_S = 30 * 86_400


class StartRecord(NamedTuple):
    """The accesses of an earlier start; `entries` are parsed when they are needed."""

    probes: tuple[CacheProbe, ...]  # places that show whether all files are in memory and unchanged
    lines: Sequence[str]

    def entries(self) -> Iterator[PrefetchEntry]:
        """Yield the entries in the order of first use. Raises: ValueError for an invalid line."""
        return parse_entries(self.lines)


def read_record(directory: str, key: JobKey) -> StartRecord | None:
    """Return the record of this job's start; None if there is none to use."""
    try:
        text = record_files.read(directory, record_files.file_name(key, START_SUFFIX), MAX_BYTES, AGE_S)
        return _parse(text, key)
    except (OSError, ValueError):
        return None


def _parse(text: str, key: JobKey) -> StartRecord | None:
    lines = text.split("\n")
    header = record_files.header(_FIRST_LINE, key)
    at = len(header)
    if lines[:at] != header or lines[-2:] != [_LAST_LINE, ""] or len(lines) < at + 4:
        return None
    check, count = (int(line.partition(" ")[2], 16) for line in lines[at : at + 2])
    body = lines[at + 2 : -2]
    if check != _check(body) or not 0 <= count <= MAX_PROBES:
        return None
    return StartRecord(tuple(map(parse_probe, body[:count])), body[count:])


def write_record(
    directory: str, key: JobKey, entries: Sequence[PrefetchEntry], probes: Sequence[CacheProbe]
) -> str:
    """Write a record, replacing an earlier one; return why that failed, "" if it did not."""
    body = [*map(format_probe, probes), *format_entries(entries)]
    head = [f"check {_check(body):x}", f"probes {len(probes):x}"]
    text = "\n".join([*record_files.header(_FIRST_LINE, key), *head, *body, _LAST_LINE, ""])
    try:
        data = text.encode("utf-8", "surrogateescape")
    except ValueError as error:
        return str(error)
    if len(data) > MAX_BYTES:
        return f"more than {MAX_BYTES} bytes"
    return record_files.write(
        directory, record_files.file_name(key, START_SUFFIX), data, START_SUFFIX, _MAX_RECORDS
    )


def forget_record(directory: str, key: JobKey) -> None:
    """Remove the record, so that the next start makes a new one."""
    with suppress(OSError, ValueError):
        os.unlink(os.path.join(directory, record_files.file_name(key, START_SUFFIX)))


def _check(lines: Sequence[str]) -> int:
    return crc32("\n".join(lines).encode("utf-8", "surrogateescape"))
