"""Error files (error.json): the record of a rank's exception, and the launcher's own for its parent process.

In: a path. Out: an ErrorRecord; both shapes that torch knows are read. A rank may have been killed while it wrote,
or may have written anything, so reading is bounded and never waits. A broken file gives its usable parts and a
note instead of an error. Also reads the end of a rank's stderr log.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Any, NamedTuple

MAX_BYTES = 1 << 20
MAX_MESSAGE_CHARACTERS = 8 << 10
MAX_TRACEBACK_CHARACTERS = 64 << 10
_MAX_LINE_CHARACTERS = 2000


class ErrorRecord(NamedTuple):
    """The content of an error file."""

    message: str  # "ValueError: text", or the note if the file holds nothing usable
    traceback: str
    timestamp_s: float | None  # wall clock of the rank
    note: str  # the fault of the file, "" for none
    data: dict[str, Any] | None  # the file as it was, None if it cannot be used


class _UnusableError(Exception):
    """The file holds no error record; the text gives the reason."""


def read_error_file(path: str) -> ErrorRecord | None:
    """Read a rank's error file; None if there is none."""
    if not path:
        return None
    try:
        data, size = _read_regular(path)
    except FileNotFoundError:
        return None
    except (OSError, _UnusableError) as error:
        return _note(f"the error file cannot be read: {_reason(error)}")
    try:
        return _interpret(_parse(data, size))
    except _UnusableError as error:
        return _salvage(data.decode(errors="replace"), str(error))


def write_own_error_file(
    path: str, record: ErrorRecord | None, status: int, fallback: str = "", wall_s: float = 0.0
) -> str:
    """Write the first failure to the launcher's own error file `path`, as torchrun does.

    A rank's usable file is copied with its exit status inserted. Otherwise `fallback` is the message; if that is
    empty, nothing is written. Returns what failed, "" if nothing did.
    """
    import json

    data = record.data if record is not None else None
    if data is not None:
        message = data.get("message")
        if isinstance(message, dict):
            data = {**data, "message": {**message, "errorCode": status}}
    elif fallback:
        trace = record.traceback if record is not None else ""
        extra = {"py_callstack": trace or fallback, "timestamp": str(int(wall_s))}
        data = {"message": {"message": fallback, "extraInfo": extra, "errorCode": status}}
    else:
        return ""
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(path, flags, 0o644)
        with os.fdopen(fd, "w") as file:
            json.dump(data, file)
    except (OSError, ValueError) as error:
        return f"cannot write the error file {path}: {_reason(error)}"
    return ""


def read_tail(path: str, lines: int, max_bytes: int) -> tuple[str, ...]:
    """Return the last lines of a log file, () if it cannot be read; truncate long lines."""
    try:
        data, size = _read_regular(path, max_bytes, from_end=True)
    except (OSError, _UnusableError):
        return ()
    found = data.decode(errors="replace").splitlines()
    if size > len(data) and len(found) > 1:
        del found[0]  # most likely the rest of a line
    return tuple(line[:_MAX_LINE_CHARACTERS].rstrip() for line in found[-lines:])


# ---- parts ---------------------------------------------------------------------------------------------------


def _read_regular(path: str, max_bytes: int = MAX_BYTES, from_end: bool = False) -> tuple[bytes, int]:
    """Return part of a regular file and the size of the whole; reading other files could block."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise _UnusableError("it is not a regular file")
        start = max(0, status.st_size - max_bytes) if from_end else 0
        parts = []
        while max_bytes > 0 and (part := os.pread(fd, min(max_bytes, 1 << 18), start)):
            parts.append(part)
            start += len(part)
            max_bytes -= len(part)
        return b"".join(parts), status.st_size
    finally:
        os.close(fd)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENXIO:
        return "it is a pipe without a reader"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _parse(data: bytes, size: int) -> dict[str, Any]:
    import json

    if not data:
        raise _UnusableError("the error file is empty")
    if size > MAX_BYTES:
        raise _UnusableError(f"the error file has {size} bytes, of which only the first {MAX_BYTES} were read")
    try:
        value = json.loads(data.decode(errors="replace"))
    except (ValueError, RecursionError):
        raise _UnusableError("the error file is not valid JSON; its rank may have ended while it wrote") from None
    if not isinstance(value, dict) or not isinstance(value.get("message"), (dict, str)):
        raise _UnusableError("the error file holds no error message")
    return value


def _interpret(data: dict[str, Any]) -> ErrorRecord:
    message = data["message"]
    if isinstance(message, str):
        return _record(message, "", data.get("timestamp"), "", data)
    extra = message.get("extraInfo")
    if not isinstance(extra, dict):
        extra = {}
    text, trace = message.get("message"), extra.get("py_callstack")
    return _record(_as_text(text), _as_text(trace), extra.get("timestamp"), "", data)


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else repr(value)


def _record(message: str, trace: str, timestamp: object, note: str, data: dict[str, Any] | None) -> ErrorRecord:
    return ErrorRecord(
        _shorten(message, MAX_MESSAGE_CHARACTERS),
        _shorten(trace, MAX_TRACEBACK_CHARACTERS),
        _as_seconds(timestamp),
        note,
        data,
    )


def _note(note: str) -> ErrorRecord:
    return ErrorRecord(f"({note})", "", None, note, None)


def _as_seconds(value: object) -> float | None:
    if not isinstance(value, (str, int, float)):
        return None
    try:
        seconds = float(value)
    except (ValueError, OverflowError):
        return None
    return seconds if 0 <= seconds < 1e11 else None


def _shorten(text: str, most: int) -> str:
    """Cut out the middle: the ends of a traceback show where it began and how it ended."""
    text = text.encode(errors="replace").decode()  # a lone surrogate could not be sent or shown
    if len(text) <= most:
        return text
    head = most // 4
    return f"{text[:head]}\n... {len(text) - most} characters left out ...\n{text[len(text) - most + head :]}"


def _salvage(text: str, note: str) -> ErrorRecord:
    """Extract the strings from a file that is not complete."""
    trace = _find_string(text, "py_callstack")
    message = _find_string(text, "message")
    if not message and not trace:
        return _note(note)
    return _record(message or f"({note})", trace, None, note, None)


def _find_string(text: str, key: str) -> str:
    """Return the value of the first `"key": "..."`, also if its end is missing."""
    import json
    import re

    match = re.search(rf'"{key}"\s*:\s*"((?:[^"\\]|\\.)*)', text, re.DOTALL)
    if match is None:
        return ""
    raw = match[1]
    for cut in range(7):  # the end may have come within an escape such as \u00e9
        try:
            return str(json.loads(f'"{raw[: len(raw) - cut]}"', strict=False))
        except ValueError:
            continue
    return ""
