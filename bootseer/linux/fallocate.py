"""Reservation and release of disk space of an open file. Source: fallocate(2)."""

from __future__ import annotations

from bootseer.linux.syscalls import libc

_KEEP_SIZE, _PUNCH_HOLE = 1, 2


def reserve(fd: int, length: int) -> bool:
    """Reserve `length` bytes from the start; this sets the size. False if unsupported: glibc would write zeros."""
    return bool(libc().fallocate(fd, 0, 0, length) == 0)


def punch_hole(fd: int, offset: int, length: int) -> bool:
    """Free the whole pages of a range, which read as zeros afterwards. False if unsupported.

    A reader that already holds these pages, for example a socket, keeps their old contents.
    """
    return bool(libc().fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, length) == 0)
