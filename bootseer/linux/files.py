"""Small files, read and written as a whole: readers see the old or the new content."""

from __future__ import annotations

import os
import stat
from _thread import get_ident


def replace_file(path: str, data: bytes, mode: int = 0o600) -> None:
    """Write a file atomically, without a sync: it may be lost in a power cut. Raises: OSError."""
    temporary = f"{path}.{os.getpid()}.{get_ident():x}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(temporary, flags, mode), "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        try:
            os.unlink(temporary)
        except OSError:
            pass  # it was not made
        raise


def read_regular(path: str, max_bytes: int, *, is_own: bool = False) -> bytes | None:
    """Return the content of a regular file; None if it is larger, or cannot be read.

    `is_own`: also None if another user can have written it.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if is_own else 0))
        try:
            found = os.fstat(fd)
            is_foreign = found.st_uid != os.geteuid() or found.st_mode & 0o022
            if not stat.S_ISREG(found.st_mode) or (is_own and is_foreign):
                return None
            with open(fd, "rb", closefd=False) as file:
                data = file.read(max_bytes + 1)
        finally:
            os.close(fd)
    except (OSError, ValueError):
        return None
    return data if len(data) <= max_bytes else None
