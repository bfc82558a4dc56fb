"""Locks of a target, visible to all processes that can change it, also in other containers and on other nodes.

Two locks are held. One is a file beside the target, PARENT/.bootseer-env-ID.lock, which works before the target
exists. The other is the target's directory, as two containers may share it with separate PARENTs. Network file
systems do not lock directories: there a file in the target is locked. The kernel releases locks of killed
processes.

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
from bootseer.env.capture.walk import OURS
from bootseer.errors import ConfigError, StorageTimeout
from bootseer.linux.locks import NO_LOCK_ERRNOS, is_at, try_flock
from bootseer.tree.unpack.safe_directories import DIRECTORY

PREFIX = os.fsdecode(OURS)
_INSIDE = f"{PREFIX}inside.lock"
_POLL_S = 0.02
_CANNOT = NO_LOCK_ERRNOS | {errno.EBADF, errno.EISDIR}  # directories on NFS: flock needs them open for writing


class LockVisibility(NamedTuple):
    """Whether all processes that can change a place see the locks; else a living process may own its files."""

    is_beside: bool
    is_on_target: bool


def id_of(target: str) -> str:
    """Return the id used in the names of all that belongs to a target."""
    return hashlib.sha256(os.fsencode(target)).hexdigest()[:16]


@contextmanager
def locked(target: str, environ: Mapping[str, str], wait_s: float) -> Iterator[LockVisibility]:
    """Hold exclusive access to a resolved target.

    Raises: StorageTimeout; ConfigError; OSError.
    """
    end_s = time.monotonic() + wait_s

    def wait(path: str) -> None:
        if time.monotonic() > end_s:
            raise StorageTimeout(f"{target}: another process has locked it for {wait_s:g} s (lock: {path})")
        time.sleep(_POLL_S)

    with ExitStack() as stack:
        is_beside = _lock_beside(stack, target, environ, wait)
        yield LockVisibility(is_beside, _lock_target(stack, target, wait))


def _lock_beside(stack: ExitStack, target: str, environ: Mapping[str, str], wait: Callable[[str], None]) -> bool:
    """Lock a file beside the target, visible to all that can change it, else in this user's cache."""
    if _lock_file(stack, os.path.join(os.path.dirname(target), f"{PREFIX}{id_of(target)}.lock"), wait):
        return True
    directory = os.path.join(cache_folder.prepare(cache_folder.locate(environ, os.geteuid())), "env", "locks")
    cache_folder.make_private_dir(directory)
    path = os.path.join(directory, f"{id_of(target)}.lock")
    opened = _open_file(path)
    if opened < 0:
        raise ConfigError(f"{path}: cannot be created; set {cache_folder.VARIABLE} to a directory of your own")
    os.close(opened)
    _lock_file(stack, path, wait)  # without locks there, too, each process uses its own directories
    return False


def _lock_target(stack: ExitStack, target: str, wait: Callable[[str], None]) -> bool:
    while True:
        try:
            fd = os.open(target, DIRECTORY)
        except FileNotFoundError:
            return True
        try:
            if try_flock(fd) and is_at(fd, target):
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
    """Lock a file in the target, and preserve the target's time."""
    found = os.fstat(fd)
    is_held = _lock_file(stack, os.path.join(target, _INSIDE), wait, stays=True)
    try:
        os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))
    except OSError:
        pass  # owned by another user
    return is_held


def _lock_file(stack: ExitStack, path: str, wait: Callable[[str], None], *, stays: bool = False) -> bool:
    """Lock a file; return False if this user cannot create it, another user owns it, or locks do not work."""
    while True:
        fd = _open_file(path)
        if fd < 0:
            return False
        try:
            if try_flock(fd) and is_at(fd, path):
                stack.callback(_free, fd, "" if stays else path)
                fd = -1
                return True
        except OSError as error:
            if error.errno not in NO_LOCK_ERRNOS:
                raise
            os.unlink(path)  # no process can hold it
            return False
        finally:
            if fd >= 0:
                os.close(fd)
        wait(path)


def _free(fd: int, path: str = "") -> None:
    if path:
        try:
            os.unlink(path)  # a waiting process detects that the file was replaced
        except OSError:
            pass
    try:
        fcntl.flock(fd, fcntl.LOCK_UN)  # a child process may still have it open
    except OSError:
        pass
    os.close(fd)


def _open_file(path: str) -> int:
    """Open a lock file; return -1 if this user cannot create it, or another user owns it."""
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
