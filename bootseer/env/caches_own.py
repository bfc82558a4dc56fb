"""The folders that a user names by --cache-dir: whether they are this user's alone, and how files come into them.

Other caches lie in a folder that Bootseer has made for this user. These may be anywhere, also where others write:
what is filled by a start must not be led elsewhere by a link, and what is kept must not be a stranger's code.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat

from bootseer.env.caches_folders import STAGING, Place
from bootseer.trust.owned_files import NotOwnedError, check_owned_folder, own_uids, trusted_uids

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_COPY_BYTES = 1 << 20


def why_not(place: Place) -> str:
    """Why a folder cannot be used, a line for people; "" if it can, or is not there and can be made."""
    try:
        _check(place.path)
    except FileNotFoundError:
        return ""
    except NotOwnedError as error:
        return f"--cache-dir {place.kind.name}={place.path}: is neither filled nor kept, as {error}"
    return ""


def make(folder: str) -> None:
    """Makes it for this user alone, with those above it that are missing. Raises: NotOwnedError."""
    try:
        _check(folder)
    except FileNotFoundError:
        _make(folder)  # all that is there on the way was looked at: nobody can put a link into it


def _make(folder: str) -> None:
    missing, above = [], folder
    while not os.path.lexists(above):
        missing.append(above)
        above = os.path.dirname(above)
    try:
        for each in reversed(missing):
            os.mkdir(each, 0o700)
    except FileExistsError:
        pass  # somebody was faster: it is looked at whose it is
    except OSError as error:
        raise NotOwnedError(f"{folder} cannot be made: {error.strerror}") from error
    try:
        _check(folder)
    except FileNotFoundError as error:
        raise NotOwnedError(f"{folder} is a link to nothing") from error


def _check(folder: str) -> None:
    check_owned_folder(folder, uids=trusted_uids())
    user = os.stat(folder).st_uid
    if user not in own_uids():
        raise NotOwnedError(f"{folder} belongs to user {user}, not to {os.geteuid()}")


def open_below(top: str, path: str) -> int:
    """A descriptor of the folder that the file `path` of the cache `top` is in; what is missing is made.

    Raises: NotOwnedError for a link or a file on the way, or a folder of somebody else; OSError.
    """
    fd = os.open(top, _FOLDER & ~os.O_NOFOLLOW)  # nobody else can have made it a link
    try:
        for name in path.split("/")[:-1]:
            try:
                os.mkdir(name, 0o700, dir_fd=fd)
            except FileExistsError:
                pass
            try:
                below = os.open(name, _FOLDER, dir_fd=fd)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOTDIR):
                    raise NotOwnedError(f"{top}: the folder {name} of {path} is a link or a file") from error
                raise
            os.close(fd)
            fd = below
            user = os.fstat(fd).st_uid
            if user not in own_uids():
                raise NotOwnedError(f"{top}: the folder {name} of {path} belongs to user {user}")
        return fd
    except BaseException:
        os.close(fd)
        raise


def put(source: str, fd: int, name: str) -> bool:
    """Gives a finished file its name in an open folder, in one step; whether it was not taken. Raises: OSError."""
    try:
        os.link(source, name, dst_dir_fd=fd, follow_symlinks=False)
        return True
    except FileExistsError:
        return False
    except OSError:
        pass  # a file system without hard links, or another one
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
    """To a name beside, which is never kept, and from there."""
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
