"""Has restored files written to disk in the background, and lets markers say so: `-m bootseer.env.settling`.

Nothing is synced while ranks wait. Until it is done a marker counts only until the machine is started anew, and
what was there before is kept, so that the next start can put it back.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from bootseer.env import apply_journal, staging
from bootseer.env.markers import open_markers
from bootseer.env.on_disk import sync_file_system
from bootseer.env.scratch import sweep
from bootseer.env.target_lock import id_of
from bootseer.errors import BootseerError
from bootseer.own_module import command_of
from bootseer.tree.safe_folders import FOLDER

_SHELL = 'exec </dev/null >/dev/null 2>&1; "$@" &'


def settle_later(targets: Sequence[str], environ: Mapping[str, str]) -> None:
    """By a process of low priority that nobody waits for."""
    command = command_of("bootseer.env.settling", *targets)
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
    """Now. What cannot be synced keeps its marker, and what it had before, as they are."""
    for target in targets:
        try:
            markers = open_markers(environ, target)
            marker = markers.read(target)
            fd = _open_there(target)
        except (BootseerError, OSError):
            continue
        try:
            moved = _moved(target)  # before it is synced: those that are ended now
            is_new = marker is not None and not marker.is_durable
            if (moved or is_new) and sync_file_system(fd):
                if marker is not None and is_new:
                    markers.make_durable(marker)
                for above, name in moved:
                    _forget(above, name, keeps_time=above == target)
        except (BootseerError, OSError):
            continue
        finally:
            os.close(fd)


def _open_there(target: str) -> int:
    """The target, or where it was: one who has removed it meanwhile does not want what it had before either."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        return os.open(target, flags)
    except FileNotFoundError:
        return os.open(os.path.dirname(target), flags)


def _moved(target: str) -> list[tuple[str, str]]:
    """Where the staging folders are whose moves are all made: folder, name."""
    found = []
    for above in (os.path.dirname(target), target):
        try:
            names = os.listdir(above)
        except FileNotFoundError:
            continue
        for name in names:
            if name.startswith(f"{staging.PREFIX}{id_of(target)}-"):
                folder = os.path.join(above, name)
                is_ours = os.lstat(folder).st_uid == os.geteuid()
                if is_ours and os.path.lexists(os.path.join(folder, os.fsdecode(apply_journal.DONE))):
                    found.append((above, name))
    return found


def _forget(above: str, name: str, *, keeps_time: bool) -> None:
    fd = os.open(above, FOLDER)
    try:
        staging.forget(fd, name, keeps_time=keeps_time)
    finally:
        os.close(fd)


if __name__ == "__main__":
    os.nice(19)
    settle(sys.argv[1:], os.environ)
    sweep(os.environ)
