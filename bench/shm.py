"""Files in /dev/shm that no living process uses: what benches and tests count as left behind.

A file is known by its inode. glibc's sem_open makes a semaphore under another name and maps that one: its maker's
/proc/PID/maps never shows the name that it has.
"""

from __future__ import annotations

import glob
import os
from contextlib import suppress

DIRECTORY = "/dev/shm"


def files() -> dict[str, int]:
    """Names of this user's files, with their inodes."""
    found = {}
    with suppress(OSError), os.scandir(DIRECTORY) as entries:
        for entry in entries:
            with suppress(OSError):  # taken away meanwhile
                status = entry.stat(follow_symlinks=False)
                if status.st_uid == os.getuid():
                    found[entry.name] = status.st_ino
    return found


def left(before: dict[str, int]) -> list[str]:
    """Names of files that have come since `before` and that no process has open or mapped."""
    new = {name: inode for name, inode in files().items() if before.get(name) != inode}
    if not new:
        return []
    used = _in_use()
    return sorted(name for name, inode in new.items() if inode not in used)


def _in_use() -> set[int]:
    """Inodes in /dev/shm that processes have open or mapped, as far as this user may look."""
    used = set()
    for path in glob.glob("/proc/[0-9]*/fd/*"):
        with suppress(OSError):  # it has ended, or closed it
            if os.readlink(path).startswith(f"{DIRECTORY}/"):
                used.add(os.stat(path).st_ino)
    for path in glob.glob("/proc/[0-9]*/maps"):
        with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
            used |= {int(line.split(maxsplit=5)[4]) for line in file if f" {DIRECTORY}/" in line}
    return used
