"""Background fsync of restored files, after which markers record them as durable: `-m bootseer.env.restore.sync`.

Nothing is synced while ranks wait. Until the sync is done, a marker is valid only until the next reboot. The
earlier content is kept until then, so that the next start can restore it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from bootseer.env.restore import apply_journal, staging
from bootseer.env.restore.markers import open_markers
from bootseer.env.restore.on_disk import sync_file_system
from bootseer.env.restore.target_lock import id_of
from bootseer.env.scratch import sweep
from bootseer.errors import BootseerError
from bootseer.own_module import command_of
from bootseer.tree.unpack.safe_directories import DIRECTORY

_SHELL = 'exec </dev/null >/dev/null 2>&1; "$@" &'


def sync_later(targets: Sequence[str], environ: Mapping[str, str]) -> None:
    """Start `sync_targets` in a background process of low priority."""
    command = command_of("bootseer.env.restore.sync", *targets)
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
        pass  # the next start after a reboot restores the environment again


def sync_targets(targets: Sequence[str], environ: Mapping[str, str]) -> None:
    """Sync the targets now. If a sync fails, the marker and the earlier content stay."""
    for target in targets:
        try:
            markers = open_markers(environ, target)
            marker = markers.read(target)
            fd = _open_there(target)
        except (BootseerError, OSError):
            continue
        try:
            moved = _moved(target)  # before the sync: only those that have ended by now
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
    """Open the target; if it was removed, its parent, as its earlier content is not needed either."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        return os.open(target, flags)
    except FileNotFoundError:
        return os.open(os.path.dirname(target), flags)


def _moved(target: str) -> list[tuple[str, str]]:
    """Return (directory, name) of the staging directories whose moves are complete."""
    found = []
    for above in (os.path.dirname(target), target):
        try:
            names = os.listdir(above)
        except FileNotFoundError:
            continue
        for name in names:
            if name.startswith(f"{staging.PREFIX}{id_of(target)}-"):
                directory = os.path.join(above, name)
                is_ours = os.lstat(directory).st_uid == os.geteuid()
                if is_ours and os.path.lexists(os.path.join(directory, os.fsdecode(apply_journal.DONE))):
                    found.append((above, name))
    return found


def _forget(above: str, name: str, *, keeps_time: bool) -> None:
    fd = os.open(above, DIRECTORY)
    try:
        staging.forget(fd, name, keeps_time=keeps_time)
    finally:
        os.close(fd)


if __name__ == "__main__":
    os.nice(19)
    sync_targets(sys.argv[1:], os.environ)
    sweep(os.environ)
