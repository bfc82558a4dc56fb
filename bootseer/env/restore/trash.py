"""Removal of files in the background, by a detached process of low priority.

Run by path: `python -I -S trash.py KEEPS_TIME FD NAME...`; stdlib only. Removing a large environment takes a
second, or minutes on a busy disk.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

_SHELL = 'exec </dev/null >/dev/null 2>&1; "$@" &'


def remove_in_background(directory_fd: int, names: Sequence[str], *, keeps_time: bool = False) -> None:
    """Remove names of an open directory, with all below them. Failures are ignored.

    Args: keeps_time: preserve the time of the directory.
    """
    if not names:
        return
    # A shell that ends at once detaches the child. Bootseer's own modules would take longer to import.
    command = [
        sys.executable,
        "-I",
        "-S",
        os.path.abspath(__file__),
        "1" if keeps_time else "0",
        str(directory_fd),
    ]
    try:
        subprocess.run(
            ["/bin/sh", "-c", _SHELL, "sh", *command, *names],
            pass_fds=[directory_fd],
            start_new_session=True,
            cwd="/",
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except OSError:
        pass  # no process: the next one at the target retries


def main(argv: Sequence[str]) -> None:
    import shutil
    import stat

    os.nice(19)
    keeps_time, fd = argv[1] == "1", int(argv[2])
    found = os.fstat(fd)

    def make_writable(directory_fd: int, name: str) -> None:
        """Make all directories below writable, for ordinary users."""
        try:
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory_fd)
        except OSError:
            return
        try:
            os.fchmod(below, stat.S_IRWXU)
            for child in os.listdir(below):
                make_writable(below, child)
        except OSError:
            pass
        finally:
            os.close(below)

    for name in argv[3:]:
        if "/" in name or name in ("", ".", ".."):
            continue
        if os.geteuid():
            make_writable(fd, name)
        shutil.rmtree(name, ignore_errors=True, dir_fd=fd)
    if keeps_time:
        os.utime(fd, ns=(found.st_atime_ns, found.st_mtime_ns))


if __name__ == "__main__":
    main(sys.argv)
