"""What the keeper has from the system: a folder of its own, its streams, and children that end with it."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
import tempfile

from bootseer.checkpoint.lines import LineSocket
from bootseer.checkpoint.rank_mount import clean

FOLDER = "bootseer-arena-"
LOCK_NAME = "lock"
MOUNT_NAME = "mount"
MOST_PARENT_BYTES = 70  # addresses of sockets have at most 107 bytes


def make_folder() -> tuple[str, int]:
    """A folder of our own, with a path that a socket in it can have, locked for as long as we live.

    What killed keepers left goes.
    """
    parent = tempfile.gettempdir()
    base = parent if len(os.fsencode(parent)) <= MOST_PARENT_BYTES else "/tmp"  # noqa: S108
    with os.scandir(base) as entries:
        old = [entry.path for entry in entries if entry.name.startswith(FOLDER) and _is_ours(entry)]
    for folder in old:
        try:
            lock = os.open(os.path.join(folder, LOCK_NAME), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # it has just been made
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            clean(os.path.join(folder, MOUNT_NAME))
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass  # its keeper lives
        finally:
            os.close(lock)
    folder = tempfile.mkdtemp(prefix=FOLDER, dir=base)
    path = os.path.join(folder, LOCK_NAME)
    lock = os.open(path + ".new", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(path + ".new", path)  # nobody finds it before it is locked
    return folder, lock


def _is_ours(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
    except OSError:
        return False


def take_streams() -> LineSocket:
    """Orders and answers; what a library prints goes to stderr, and nobody reads orders but us."""
    orders, answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    return LineSocket.of_streams(orders, answers)


def die_with_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
