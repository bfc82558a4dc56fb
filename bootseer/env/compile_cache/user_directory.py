"""The directories that a user names by --cache-dir: the check that they are private, and safe writes into them.

Other caches lie in a directory that Bootseer has made for this user. These may be anywhere, also where other users
write. A link must not redirect the files that a start unpacks, and no other user's code must be published.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat

from bootseer.env.compile_cache.directories import STAGING, CachePlace
from bootseer.trust.owned_files import NotOwnedError, check_owned_directory, own_uids, trusted_uids

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_COPY_BYTES = 1 << 20


def why_unusable(place: CachePlace) -> str:
    """Return why a directory cannot be used, one line; "" if it can be used or created."""
    try:
        _check(place.path)
    except FileNotFoundError:
        return ""
    except NotOwnedError as error:
        return f"--cache-dir {place.kind.name}={place.path}: neither filled nor published: {error}"
    return ""


def make(directory: str) -> None:
    """Create a directory for this user alone, with missing parents. Raises: NotOwnedError."""
    try:
        _check(directory)
    except FileNotFoundError:
        _make(directory)  # the check covers all existing parents: no other user can put a link there


def _make(directory: str) -> None:
    missing, above = [], directory
    while not os.path.lexists(above):
        missing.append(above)
        above = os.path.dirname(above)
    try:
        for each in reversed(missing):
            os.mkdir(each, 0o700)
    except FileExistsError:
        pass  # another process was faster: its owner is checked below
    except OSError as error:
        raise NotOwnedError(f"{directory} cannot be created: {error.strerror}") from error
    try:
        _check(directory)
    except FileNotFoundError as error:
        raise NotOwnedError(f"{directory} is a dangling link") from error


def _check(directory: str) -> None:
    check_owned_directory(directory, uids=trusted_uids())
    user = os.stat(directory).st_uid
    if user not in own_uids():
        raise NotOwnedError(f"{directory} belongs to user {user}, not to {os.geteuid()}")


def open_below(top: str, path: str) -> int:
    """Open the parent directory of the file `path` of the cache `top`; create missing ones. Return a descriptor.

    Raises: NotOwnedError if a parent is a link, a file, or a directory of another user; OSError.
    """
    fd = os.open(top, _DIRECTORY & ~os.O_NOFOLLOW)  # no other user can have made it a link
    try:
        for name in path.split("/")[:-1]:
            try:
                os.mkdir(name, 0o700, dir_fd=fd)
            except FileExistsError:
                pass
            try:
                below = os.open(name, _DIRECTORY, dir_fd=fd)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOTDIR):
                    raise NotOwnedError(f"{top}: the directory {name} of {path} is a link or a file") from error
                raise
            os.close(fd)
            fd = below
            user = os.fstat(fd).st_uid
            if user not in own_uids():
                raise NotOwnedError(f"{top}: the directory {name} of {path} belongs to user {user}")
        return fd
    except BaseException:
        os.close(fd)
        raise


def put(source: str, fd: int, name: str) -> bool:
    """Move a finished file to a name in an open directory, atomically; False if it is taken. Raises: OSError."""
    try:
        os.link(source, name, dst_dir_fd=fd, follow_symlinks=False)
        return True
    except FileExistsError:
        return False
    except OSError:
        pass  # a file system without hard links, or a different one
    if _is_there(fd, name):
        return False
    try:
        os.rename(source, name, dst_dir_fd=fd)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        _copy(source, fd, name)
    return True


def _copy(source: str, fd: int, name: str) -> None:
    """Copy to a temporary name beside it, which is never published, and rename."""
    found = os.lstat(source)
    beside = f"{STAGING}{secrets.token_hex(8)}"
    try:
        with open(source, "rb") as reading, open(os.open(beside, _NEW, 0o600, dir_fd=fd), "wb") as writing:
            shutil.copyfileobj(reading, writing, _COPY_BYTES)
            writing.flush()
            os.fchmod(writing.fileno(), stat.S_IMODE(found.st_mode))
            os.utime(writing.fileno(), ns=(found.st_atime_ns, found.st_mtime_ns))
        os.rename(beside, name, src_dir_fd=fd, dst_dir_fd=fd)
    except BaseException:
        try:
            os.unlink(beside, dir_fd=fd)
        except OSError:
            pass
        raise


def _is_there(fd: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
