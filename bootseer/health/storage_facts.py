"""Whether a path can be read and written, and how fast, by small real reads and writes, as facts for storage.py.

Meant for a process that may be left (runner.py): each call may wait for a file server for ever.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import NamedTuple

from bootseer.health.door import Door

PROBE_BYTES = 4 << 20
_PIECE_BYTES = 1 << 20
_MOST_ENTRIES = 64  # of a folder, among which a file to read is looked for


class StorageFacts(NamedTuple):
    """What was done, and how long it took; None for what was not."""

    error: str = ""  # what failed, in words of the system; "" for nothing
    doing: str = ""  # with `error`: what it was
    has_changed: bool = False  # other bytes came back than were written
    write_s: float | None = None  # until they had reached the disk
    read_s: float | None = None
    read_bytes: int = 0


def probe(door: Door, path: str, is_written: bool) -> StorageFacts:
    """Args: is_written: a file is written to it and read back; else a file in it, or it itself, is read."""
    doing = "looking at it"
    try:
        is_folder = stat.S_ISDIR(os.stat(path).st_mode)
        if is_written and is_folder:
            doing = "writing a file of 4 MiB"
            return _write_and_read(door, path)
        doing = "reading"
        name = _some_file(path) if is_folder else path
        if not name:
            return StorageFacts()
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            seconds, data = _read(door, fd)
        finally:
            os.close(fd)
        if is_written and not os.access(path, os.W_OK):
            return StorageFacts("this user may not write it", "writing")
        return StorageFacts(read_s=seconds, read_bytes=len(data))
    except OSError as error:
        return StorageFacts(error.strerror or type(error).__name__, doing)


def _write_and_read(door: Door, folder: str) -> StorageFacts:
    fd = _open_unnamed(folder)
    try:
        piece = os.urandom(_PIECE_BYTES)
        began_s = door.now_s()
        for offset in range(0, PROBE_BYTES, _PIECE_BYTES):
            view = memoryview(piece)
            while view:
                count = os.pwrite(fd, view, offset + _PIECE_BYTES - len(view))
                view = view[count:]
        os.fsync(fd)
        write_s = door.now_s() - began_s
        read_s, data = _read(door, fd)
        return StorageFacts(
            has_changed=data != piece * (PROBE_BYTES // _PIECE_BYTES),
            write_s=write_s,
            read_s=read_s,
            read_bytes=len(data),
        )
    finally:
        os.close(fd)


def _open_unnamed(folder: str) -> int:
    """A file that is gone when it is closed, whatever becomes of this process."""
    try:
        return os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            raise
    path = os.path.join(folder, f".bootseer-check-{os.urandom(8).hex()}")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.unlink(path)
    return fd


def _read(door: Door, fd: int) -> tuple[float, bytes]:
    """Up to 4 MiB from the beginning, not from the page cache where the kernel heeds that."""
    os.posix_fadvise(fd, 0, PROBE_BYTES, os.POSIX_FADV_DONTNEED)
    began_s = door.now_s()
    pieces, size = [], 0
    while size < PROBE_BYTES and (piece := os.pread(fd, min(_PIECE_BYTES, PROBE_BYTES - size), size)):
        pieces.append(piece)
        size += len(piece)
    return door.now_s() - began_s, b"".join(pieces)


def _some_file(folder: str) -> str:
    """A file of a folder, the largest of the first ones; "" for none."""
    best, size = "", 0
    with os.scandir(folder) as entries:
        for _, entry in zip(range(_MOST_ENTRIES), entries, strict=False):
            if entry.is_file() and entry.stat().st_size > size and os.access(entry.path, os.R_OK):
                best, size = entry.path, entry.stat().st_size
    return best
