"""Folders for a while, in the cache of this user, that whoever comes next removes when their owner was killed.

CACHE/env/scratch/NAME.lock    locked as long as its owner lives; made before the folder, and goes after it
CACHE/env/scratch/NAME/
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from bootseer.blocks.locks import try_lock
from bootseer.cache_folder import make_private
from bootseer.errors import BootseerError
from bootseer.mounts import image_shared
from bootseer.storage.os_errors import map_os_errors

OLD_S = 86_400.0  # where there are no locks
_LOCK = ".lock"
_BYTE = 0
_OPEN = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


@contextmanager
def scratch(environ: Mapping[str, str]) -> Iterator[str]:
    """A new folder, absolute, for this user alone; gone with the block. Without a cache it is one of TMPDIR.

    Raises: StorageError when it cannot be made.
    """
    above = _folder(environ)
    if not above:
        with map_os_errors("TMPDIR"):
            temporary = tempfile.TemporaryDirectory(prefix="bootseer-env-")
        with temporary as folder:
            yield folder
        return
    _sweep(above)
    with map_os_errors(above):
        fd, name = _claim(above)
    folder = os.path.join(above, name)
    try:
        with map_os_errors(folder):
            os.mkdir(folder, 0o700)
        yield folder
    finally:
        _remove(above, name)
        os.close(fd)


def sweep(environ: Mapping[str, str]) -> None:
    """Removes what has no living owner; what cannot be removed stays."""
    above = _folder(environ)
    if above:
        _sweep(above)


def _folder(environ: Mapping[str, str]) -> str:
    """Of all of them, made; "" if there is no place for a cache."""
    try:
        folder = image_shared.scratch(environ)
        make_private(folder)
    except (BootseerError, OSError):
        return ""
    return folder


def _claim(above: str) -> tuple[int, str]:
    """The open file of the lock, and the name that is free. Raises: OSError."""
    while True:
        name = secrets.token_hex(8)
        path = os.path.join(above, name + _LOCK)
        fd = os.open(path, _OPEN | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            if try_lock(fd, _BYTE) and os.path.samestat(os.lstat(path), os.fstat(fd)):
                return fd, name
        except FileNotFoundError:
            pass  # it was taken for a dead one before it was locked
        except OSError:
            return fd, name  # no locks here: nobody removes it before OLD_S
        os.close(fd)


def _sweep(above: str) -> None:
    try:
        names = os.listdir(above)
    except OSError:
        return
    for name in names:
        if name.endswith(_LOCK):
            _remove_dead(above, name.removesuffix(_LOCK))
        elif not os.path.lexists(os.path.join(above, name + _LOCK)):
            shutil.rmtree(os.path.join(above, name), ignore_errors=True)


def _remove_dead(above: str, name: str) -> None:
    try:
        fd = os.open(os.path.join(above, name + _LOCK), _OPEN)
    except OSError:
        return  # gone
    try:
        if _is_dead(fd):
            _remove(above, name)
    finally:
        os.close(fd)


def _is_dead(fd: int) -> bool:
    try:
        return try_lock(fd, _BYTE)
    except OSError:
        return time.time() - os.fstat(fd).st_mtime > OLD_S


def _remove(above: str, name: str) -> None:
    """The lock goes last: a folder without one is dead."""
    shutil.rmtree(os.path.join(above, name), ignore_errors=True)
    try:
        os.unlink(os.path.join(above, name + _LOCK))
    except OSError:
        pass
