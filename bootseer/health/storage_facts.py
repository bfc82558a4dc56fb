"""Facts for storage.py: whether a path can be read and written, and how fast, by small real reads and writes.

Meant for a process that may be abandoned (runner.py): each call may wait for a file server for ever.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import NamedTuple

from bootseer.health.host_interface import HostInterface

PROBE_BYTES = 4 << 20
_PIECE_BYTES = 1 << 20
_MAX_ENTRIES = 64  # of a directory, searched for a file to read


class StorageFacts(NamedTuple):
    """The durations of reads and writes; None if not done."""

    error: str = ""  # the system's error text; "" for none
    doing: str = ""  # with `error`: the failed step
    has_changed: bool = False  # other bytes were read than were written
    write_s: float | None = None  # until they had reached the disk
    read_s: float | None = None
    read_bytes: int = 0


def probe(system: HostInterface, path: str, is_written: bool) -> StorageFacts:
    """Probe a path. Args: is_written: write a file there and read it back; else read a file in it, or itself."""
    doing = "inspecting it"
    try:
        is_folder = stat.S_ISDIR(os.stat(path).st_mode)
        if is_written and is_folder:
            doing = "writing a file of 4 MiB"
            return _write_and_read(system, path)
        doing = "reading"
        name = _some_file(path) if is_folder else path
        if not name:
            return StorageFacts()
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            seconds, data = _read(system, fd)
        finally:
            os.close(fd)
        if is_written and not os.access(path, os.W_OK):
            return StorageFacts("not writable by this user", "writing")
        return StorageFacts(read_s=seconds, read_bytes=len(data))
    except OSError as error:
        return StorageFacts(error.strerror or type(error).__name__, doing)


def _write_and_read(system: HostInterface, directory: str) -> StorageFacts:
    fd = _open_unnamed(directory)
    try:
        piece = os.urandom(_PIECE_BYTES)
        began_s = system.now_s()
        for offset in range(0, PROBE_BYTES, _PIECE_BYTES):
            view = memoryview(piece)
            while view:
                count = os.pwrite(fd, view, offset + _PIECE_BYTES - len(view))
                view = view[count:]
        os.fsync(fd)
        write_s = system.now_s() - began_s
        read_s, data = _read(system, fd)
        return StorageFacts(
            has_changed=data != piece * (PROBE_BYTES // _PIECE_BYTES),
            write_s=write_s,
            read_s=read_s,
            read_bytes=len(data),
        )
    finally:
        os.close(fd)


def _open_unnamed(directory: str) -> int:
    """Open a file that disappears when it is closed, even if this process is killed."""
    try:
        return os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            raise
    path = os.path.join(directory, f".bootseer-check-{os.urandom(8).hex()}")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.unlink(path)
    return fd


def _read(system: HostInterface, fd: int) -> tuple[float, bytes]:
    """Read up to 4 MiB from the beginning, bypassing the page cache if the kernel supports it."""
    os.posix_fadvise(fd, 0, PROBE_BYTES, os.POSIX_FADV_DONTNEED)
    began_s = system.now_s()
    pieces, size = [], 0
    while size < PROBE_BYTES and (piece := os.pread(fd, min(_PIECE_BYTES, PROBE_BYTES - size), size)):
        pieces.append(piece)
        size += len(piece)
    return system.now_s() - began_s, b"".join(pieces)


def _some_file(directory: str) -> str:
    """Return a file of a directory, the largest of the first ones; "" for none."""
    best, size = "", 0
    with os.scandir(directory) as entries:
        for _, entry in zip(range(_MAX_ENTRIES), entries, strict=False):
            if entry.is_file() and entry.stat().st_size > size and os.access(entry.path, os.R_OK):
                best, size = entry.path, entry.stat().st_size
    return best
