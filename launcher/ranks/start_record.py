"""The record of what a start touches: kept in the user's cache folder, read again at the next start of the job.

One text file for each job (record_files.py: private, owner and mode checked, bounded in size, number and age). The
script's own stamp is no part of its key: files are checked one by one, and most are those of libraries.
"""

from __future__ import annotations

import os
from binascii import crc32
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from launcher.ranks import record_files
from launcher.ranks.record_files import START_SUFFIX, JobKey
from launcher.ranks.start_plan import (
    MOST_PROBES,
    Entry,
    Probe,
    format_entries,
    format_probe,
    parse_entries,
    parse_probe,
)

_FIRST_LINE = "bootseer start 1"
_LAST_LINE = "end"  # without it the file was cut off
MOST_BYTES = 8 << 20
_MOST_RECORDS = 64
AGE_S = 30 * 86_400


class StartRecord(NamedTuple):
    """What an earlier start touched; `entries` are read from it when they are needed."""

    probes: tuple[Probe, ...]  # places that tell whether all is in memory, and as it was
    lines: Sequence[str]

    def entries(self) -> Iterator[Entry]:
        """In the order of first use. Raises: ValueError at a line that is none."""
        return parse_entries(self.lines)


def read_record(directory: str, key: JobKey) -> StartRecord | None:
    """What is kept of this job's start; None for nothing that could be used."""
    try:
        text = record_files.read(directory, record_files.file_name(key, START_SUFFIX), MOST_BYTES, AGE_S)
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
    if check != _check(body) or not 0 <= count <= MOST_PROBES:
        return None
    return StartRecord(tuple(map(parse_probe, body[:count])), body[count:])


def write_record(directory: str, key: JobKey, entries: Sequence[Entry], probes: Sequence[Probe]) -> str:
    """Keeps a record in place of an earlier one; returns why that failed, "" if it did not."""
    body = [*map(format_probe, probes), *format_entries(entries)]
    head = [f"check {_check(body):x}", f"probes {len(probes):x}"]
    text = "\n".join([*record_files.header(_FIRST_LINE, key), *head, *body, _LAST_LINE, ""])
    try:
        data = text.encode("utf-8", "surrogateescape")
    except ValueError as error:
        return str(error)
    if len(data) > MOST_BYTES:
        return f"more than {MOST_BYTES} bytes"
    return record_files.write(
        directory, record_files.file_name(key, START_SUFFIX), data, START_SUFFIX, _MOST_RECORDS
    )


def forget_record(directory: str, key: JobKey) -> None:
    """The next start is recorded from nothing."""
    with suppress(OSError, ValueError):
        os.unlink(os.path.join(directory, record_files.file_name(key, START_SUFFIX)))


def _check(lines: Sequence[str]) -> int:
    return crc32("\n".join(lines).encode("utf-8", "surrogateescape"))
