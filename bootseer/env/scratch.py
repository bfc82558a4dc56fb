"""Temporary directories in this user's cache; the next user of them removes those of killed owners.

CACHE/env/scratch/NAME.lock locked while its owner lives; created before the directory and removed after it
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

from bootseer.cache_folder import make_private_dir
from bootseer.errors import BootseerError
from bootseer.linux.locks import is_at, try_lock
from bootseer.mounts.sandbox import shared as image_shared
from bootseer.storage.os_errors import map_os_errors

OLD_S = 86_400.0  # where locks are not supported
_LOCK = ".lock"
_BYTE = 0
_OPEN = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


@contextmanager
def scratch(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a new private directory (absolute path), removed at the end of the block; without a cache, one of
    TMPDIR.

    Raises: StorageError if it cannot be created.
    """
    above = _directory(environ)
    if not above:
        with map_os_errors("TMPDIR"):
            temporary = tempfile.TemporaryDirectory(prefix="bootseer-env-")
        with temporary as directory:
            yield directory
        return
    _sweep(above)
    with map_os_errors(above):
        fd, name = _claim(above)
    directory = os.path.join(above, name)
    try:
        with map_os_errors(directory):
            os.mkdir(directory, 0o700)
        yield directory
    finally:
        _remove(above, name)
        os.close(fd)


def sweep(environ: Mapping[str, str]) -> None:
    """Remove directories without a living owner; failures are ignored."""
    above = _directory(environ)
    if above:
        _sweep(above)


def _directory(environ: Mapping[str, str]) -> str:
    """Create and return the parent of all scratch directories; "" if there is no cache directory."""
    try:
        directory = image_shared.scratch(environ)
        make_private_dir(directory)
    except (BootseerError, OSError):
        return ""
    return directory


def _claim(above: str) -> tuple[int, str]:
    """Return the open lock file, and the name that it reserves. Raises: OSError."""
    while True:
        name = secrets.token_hex(8)
        path = os.path.join(above, name + _LOCK)
        fd = os.open(path, _OPEN | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            if try_lock(fd, _BYTE) and is_at(fd, path):
                return fd, name
        except OSError:
            return fd, name  # no locks here: it is kept for OLD_S
        os.close(fd)  # another process removed it as dead before it was locked


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
        return  # already removed
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
    """Remove the lock last, as a directory without one is dead."""
    shutil.rmtree(os.path.join(above, name), ignore_errors=True)
    try:
        os.unlink(os.path.join(above, name + _LOCK))
    except OSError:
        pass
