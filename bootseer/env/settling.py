"""Has restored files written to disk in the background, and lets markers say so: `-m bootseer.env.settling`.

Nothing is synced while ranks wait. Until it is done a marker counts only until the machine is started anew.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from bootseer.env.markers import open_markers
from bootseer.errors import BootseerError

_SHELL = 'exec </dev/null >/dev/null 2>&1; "$@" &'


def settle_later(targets: Sequence[str], environ: Mapping[str, str]) -> None:
    """By a process of low priority that nobody waits for."""
    command = [sys.executable, "-P", "-m", "bootseer.env.settling", *targets]
    try:
        subprocess.run(
            ["/bin/sh", "-c", _SHELL, "sh", *command],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            env=dict(environ),
            check=False,
        )
    except OSError:
        pass  # then the environment is restored once more after the next boot


def settle(targets: Sequence[str], environ: Mapping[str, str]) -> None:
    """Now. What cannot be synced keeps its marker as it is."""
    libc = ctypes.CDLL(None, use_errno=True)
    for target in targets:
        try:
            markers = open_markers(environ, target)
            marker = markers.read(target)
            if marker is None or marker.is_durable:
                continue
            fd = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                if libc.syncfs(fd) == 0:
                    markers.make_durable(marker)
            finally:
                os.close(fd)
        except (BootseerError, OSError):
            continue


if __name__ == "__main__":
    os.nice(19)
    settle(sys.argv[1:], os.environ)
