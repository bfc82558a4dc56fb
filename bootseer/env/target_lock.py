"""Who may change a target: locks that all see who can change it, also from another container or node.

Two are held: a file beside the target, PARENT/.bootseer-env-ID.lock, which also counts while there is no target;
and the target's folder itself, as two containers may have one volume there and each its own PARENT. Network file
systems lock no folders: there a file in the target is held. The kernel frees what a killed process had.

Source: flock(2), "NFS details".
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from bootseer import cache_folder
from bootseer.blocks.locks import NO_LOCK_ERRNOS
from bootseer.env.walk import OURS
from bootseer.errors import ConfigError, StorageTimeout
from bootseer.tree.safe_folders import FOLDER

PREFIX = os.fsdecode(OURS)
_INSIDE = f"{PREFIX}inside.lock"
_POLL_S = 0.02
_CANNOT = NO_LOCK_ERRNOS | {errno.EBADF, errno.EISDIR}  # folders on NFS: they would have to be open for writing


class Held(NamedTuple):
    """Whether all who can change a place see the lock. Else what lies there may be somebody's who lives."""

    is_beside: bool
    is_on_target: bool


def id_of(target: str) -> str:
    """In the names of all that belongs to a target."""
    return hashlib.sha256(os.fsencode(target)).hexdigest()[:16]


@contextmanager
def locked(target: str, environ: Mapping[str, str], wait_s: float) -> Iterator[Held]:
    """Alone at a target, which is without links on the way.

    Raises: StorageTimeout; ConfigError; OSError.
    """
    end_s = time.monotonic() + wait_s

    def wait(path: str) -> None:
        if time.monotonic() > end_s:
            raise StorageTimeout(f"{target}: another process has been at it for {wait_s:g} s (it has {path})")
        time.sleep(_POLL_S)

    with ExitStack() as stack:
        is_beside = _lock_beside(stack, target, environ, wait)
        yield Held(is_beside, _lock_target(stack, target, wait))


def _lock_beside(stack: ExitStack, target: str, environ: Mapping[str, str], wait: Callable[[str], None]) -> bool:
    """Where all who can change the target see it, else in this user's cache."""
    if _lock_file(stack, os.path.join(os.path.dirname(target), f"{PREFIX}{id_of(target)}.lock"), wait):
        return True
    folder = os.path.join(cache_folder.prepare(cache_folder.locate(environ, os.geteuid())), "env", "locks")
    cache_folder.make_private(folder)
    path = os.path.join(folder, f"{id_of(target)}.lock")
    opened = _open_file(path)
    if opened < 0:
        raise ConfigError(f"{path}: cannot be made: set {cache_folder.VARIABLE} to a folder of your own")
    os.close(opened)
    _lock_file(stack, path, wait)  # without locks there either: each works in folders of its own
    return False


def _lock_target(stack: ExitStack, target: str, wait: Callable[[str], None]) -> bool:
    while True:
        try:
            fd = os.open(target, FOLDER)
        except FileNotFoundError:
            return True
        try:
            if _try_hold(fd) and _is_at(fd, target):
                stack.callback(_free, fd)
                fd = -1
                return True
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
            return _lock_inside(stack, fd, target, wait)
        finally:
            if fd >= 0:
                os.close(fd)
        wait(target)


def _lock_inside(stack: ExitStack, fd: int, target: str, wait: Callable[[str], None]) -> bool:
    """By a file; the target's time stays what it was."""
    found = os.fstat(fd)
    is_held = _lock_file(stack, os.path.join(target, _INSIDE), wait, stays=True)
    try:
        os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))
    except OSError:
        pass  # another user's
    return is_held


def _lock_file(stack: ExitStack, path: str, wait: Callable[[str], None], *, stays: bool = False) -> bool:
    """False where this user can have no such file, somebody else's is there, or nothing can be locked."""
    while True:
        fd = _open_file(path)
        if fd < 0:
            return False
        try:
            if _try_hold(fd) and _is_at(fd, path):
                stack.callback(_free, fd, "" if stays else path)
                fd = -1
                return True
        except OSError as error:
            if error.errno not in NO_LOCK_ERRNOS:
                raise
            os.unlink(path)  # nobody can hold it
            return False
        finally:
            if fd >= 0:
                os.close(fd)
        wait(path)


def _free(fd: int, path: str = "") -> None:
    if path:
        try:
            os.unlink(path)  # whoever waits for it sees that it is another one
        except OSError:
            pass
    try:
        fcntl.flock(fd, fcntl.LOCK_UN)  # a child of ours may still have it open
    except OSError:
        pass
    os.close(fd)


def _open_file(path: str) -> int:
    """-1 where this user can have none, or somebody else's is there."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, 0o600)
    except OSError:
        return -1
    found = os.fstat(fd)
    if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode):
        os.close(fd)
        return -1
    return fd


def _try_hold(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False
