"""The folder that takes what is written to an image (--image-writable FOLDER): whose it is, and what is in it.

Programs of the image are run from it, so nobody else may have put something there, nor exchange it. In it are
`upper` and `work`, as overlayfs has them. root.py uses it.
"""

from __future__ import annotations

import fcntl
import os
import stat

from bootseer.cache_folder import make_private, trusted_uids
from bootseer.errors import ConfigError
from bootseer.trust.owned_files import NotOwnedError, check_owned_folder

UPPER, WORK = "upper", "work"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def claim(writable: str) -> int:
    """Makes the folder and locks it for this job: a descriptor, which holds the lock as long as it is open.

    To be called before namespaces: in one of users, root is nobody.

    Raises: ConfigError when it, or a folder above it, is another user's, or another job uses it.
    """
    where, path = f"--image-writable {writable}", os.path.abspath(writable)
    fd = -1
    try:
        make_private(path)
        fd = os.open(path, _FOLDER)
        owner = os.fstat(fd).st_uid
        if owner != os.geteuid():
            raise ConfigError(
                f"{where}: belongs to user {owner}, not to {os.geteuid()}, who runs this: name one of your own"
            )
        check_owned_folder(path, uids=trusted_uids())
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException as error:
        if fd >= 0:
            os.close(fd)
        if isinstance(error, NotOwnedError):
            reason = f"others could put programs there: {error}; or name a folder elsewhere"
        elif isinstance(error, BlockingIOError):
            reason = "another job on this node uses it"
        elif isinstance(error, OSError):
            reason = f"cannot be used: {error.strerror}"
        else:
            raise
        raise ConfigError(f"{where}: {reason}") from error
    return fd


def make_layers(folder: str, root: os.stat_result, *, claimed_fd: int, gives_away: bool) -> tuple[str, str]:
    """Paths of `upper` and `work` in a folder, made or of an earlier job.

    Args:
        root: of the image: the merged root folder looks like the upper one.
        claimed_fd: of `claim`; -1 for a folder that this process has just made.
        gives_away: `upper` gets the owner of the image's root.
    Raises: ConfigError; OSError.
    """
    # Opened once more: an overlay takes nothing of the mounts of another namespace.
    fd = os.open(folder, _FOLDER)
    try:
        if claimed_fd >= 0 and not os.path.samestat(os.fstat(fd), os.fstat(claimed_fd)):
            raise ConfigError(f"--image-writable {folder}: another folder is there now")
        for name in (UPPER, WORK):
            try:
                os.mkdir(name, 0o700, dir_fd=fd)
            except FileExistsError:
                pass
            try:
                layer_fd = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=fd)
            except NotADirectoryError as error:
                raise ConfigError(f"--image-writable {folder}: `{name}` in it is no folder: remove it") from error
            try:
                if name == UPPER:
                    os.fchmod(layer_fd, stat.S_IMODE(root.st_mode))
                    if gives_away:
                        os.fchown(layer_fd, root.st_uid, root.st_gid)
            finally:
                os.close(layer_fd)
    finally:
        os.close(fd)
    return os.path.join(folder, UPPER), os.path.join(folder, WORK)
