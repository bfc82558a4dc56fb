"""What is not needed any more is removed in the background, by a process of low priority that nobody waits for.

Run by path: `python -I -S trash.py KEEPS_TIME FD NAME...`; stdlib only. Removing a large environment takes a
second or, on a busy disk, minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

_SHELL = 'exec </dev/null >/dev/null 2>&1; "$@" &'


def remove_later(folder_fd: int, names: Sequence[str], *, keeps_time: bool = False) -> None:
    """Removes names of an open folder, with all that is below them. One that cannot be removed stays.

    Args: keeps_time: of the folder.
    """
    if not names:
        return
    # By a shell that ends at once: its child is nobody's here. Not bootseer's own modules: those take longer.
    command = [sys.executable, "-I", "-S", os.path.abspath(__file__), "1" if keeps_time else "0", str(folder_fd)]
    try:
        subprocess.run(
            ["/bin/sh", "-c", _SHELL, "sh", *command, *names],
            pass_fds=[folder_fd],
            start_new_session=True,
            cwd="/",
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except OSError:
        pass  # no process: the next one who is at the target tries


def main(argv: Sequence[str]) -> None:
    import shutil
    import stat

    os.nice(19)
    keeps_time, fd = argv[1] == "1", int(argv[2])
    found = os.fstat(fd)

    def let_in(folder_fd: int, name: str) -> None:
        """Ordinary users: all folders below can be written to."""
        try:
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder_fd)
        except OSError:
            return
        try:
            os.fchmod(below, stat.S_IRWXU)
            for child in os.listdir(below):
                let_in(below, child)
        except OSError:
            pass
        finally:
            os.close(below)

    for name in argv[3:]:
        if "/" in name or name in ("", ".", ".."):
            continue
        if os.geteuid():
            let_in(fd, name)
        shutil.rmtree(name, ignore_errors=True, dir_fd=fd)
    if keeps_time:
        os.utime(fd, ns=(found.st_atime_ns, found.st_mtime_ns))


if __name__ == "__main__":
    main(sys.argv)
