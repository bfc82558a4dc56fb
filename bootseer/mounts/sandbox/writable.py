"""The directory for writes to an image (--image-writable DIR): its owner, and its contents.

Programs of the image run from it, so no other user may write to it or replace it. It has `upper` and `work`, for
overlayfs. root.py uses it.
"""

from __future__ import annotations

import fcntl
import os
import stat

from bootseer.cache_folder import make_private_dir, trusted_uids
from bootseer.errors import ConfigError
from bootseer.trust.owned_files import NotOwnedError, check_owned_directory

UPPER, WORK = "upper", "work"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def lock_directory(writable: str) -> int:
    """Make the directory and lock it for this job; return a descriptor, which holds the lock while it is open.

    Call it before making namespaces: in a user namespace, root has no rights.

    Raises: ConfigError when it, or a directory above it, is another user's, or another job uses it.
    """
    where, path = f"--image-writable {writable}", os.path.abspath(writable)
    fd = -1
    try:
        make_private_dir(path)
        fd = os.open(path, _DIRECTORY)
        owner = os.fstat(fd).st_uid
        if owner != os.geteuid():
            raise ConfigError(f"{where}: belongs to user {owner}, not to {os.geteuid()}: name one of your own")
        check_owned_directory(path, uids=trusted_uids())
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException as error:
        if fd >= 0:
            os.close(fd)
        if isinstance(error, NotOwnedError):
            reason = f"other users could put programs there: {error}; or name a directory elsewhere"
        elif isinstance(error, BlockingIOError):
            reason = "another job on this node uses it"
        elif isinstance(error, OSError):
            reason = f"cannot be used: {error.strerror}"
        else:
            raise
        raise ConfigError(f"{where}: {reason}") from error
    return fd


def make_layers(directory: str, root: os.stat_result, *, claimed_fd: int, gives_away: bool) -> tuple[str, str]:
    """Return the paths of `upper` and `work` in a directory, new or of an earlier job.

    Args:
        root: of the image's root directory: `upper` gets its mode.
        claimed_fd: of `lock_directory`; -1 for a directory that this process has just made.
        gives_away: `upper` gets the owner of the image's root.
    Raises: ConfigError; OSError.
    """
    # Opened once more: an overlay cannot use mounts of another namespace.
    fd = os.open(directory, _DIRECTORY)
    try:
        if claimed_fd >= 0 and not os.path.samestat(os.fstat(fd), os.fstat(claimed_fd)):
            raise ConfigError(f"--image-writable {directory}: another directory is there now")
        for name in (UPPER, WORK):
            try:
                os.mkdir(name, 0o700, dir_fd=fd)
            except FileExistsError:
                pass
            try:
                layer_fd = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
            except NotADirectoryError as error:
                raise ConfigError(
                    f"--image-writable {directory}: `{name}` in it is not a directory: remove it"
                ) from error
            try:
                if name == UPPER:
                    os.fchmod(layer_fd, stat.S_IMODE(root.st_mode))
                    if gives_away:
                        os.fchown(layer_fd, root.st_uid, root.st_gid)
            finally:
                os.close(layer_fd)
    finally:
        os.close(fd)
    return os.path.join(directory, UPPER), os.path.join(directory, WORK)
