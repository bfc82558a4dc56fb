"""Where trees are mounted: a directory for each in the user's runtime directory, and the lock of its server.

    RUNTIME/trees/DIGEST/lock      held by the daemon and its reaper, until both have ended
                         control   their socket
                         state     pids, for ending them by force
                         device/   the FUSE mount
                         root/     the tree
                         status/   the FUSE mount of the status folder, if it was requested

RUNTIME is $BOOTSEER_RUNTIME, else /run/bootseer/0 for root, $XDG_RUNTIME_DIR/bootseer or /tmp/bootseer-UID for
others. No other user may read it.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping

from bootseer.errors import ConfigError, StorageError
from bootseer.linux import mount as kernel
from bootseer.linux.locks import is_at, try_flock
from bootseer.storage.os_errors import map_os_errors
from bootseer.trust.owned_files import NotOwnedError, check_owned_directory

VARIABLE = "BOOTSEER_RUNTIME"
TREES, LOGS = "trees", "logs"
STATUS = "status"
MAX_STATE_BYTES = 4096
_DIGEST = re.compile(r"[0-9a-f]{64}")


def locate(environ: Mapping[str, str]) -> str:
    """Return the runtime directory of this user, which may not exist. Raises: ConfigError."""
    named = environ.get(VARIABLE, "")
    if named:
        if not os.path.isabs(named):
            raise ConfigError(f"{VARIABLE}={named}: must be an absolute path")
        return os.path.normpath(named)
    uid = os.geteuid()
    if uid == 0:
        return "/run/bootseer/0"
    above = environ.get("XDG_RUNTIME_DIR", "")
    return os.path.join(above, "bootseer") if os.path.isabs(above) else f"/tmp/bootseer-{uid}"  # noqa: S108


def prepare(directory: str) -> str:
    """Make the runtime directory, and check its owner.

    Raises: ConfigError when other users could read or write it; StorageError when it cannot be made.
    """
    with map_os_errors(directory):
        for path, mode in ((os.path.dirname(directory), 0o755), (directory, 0o700)):
            try:
                os.mkdir(path, mode)
            except FileExistsError:
                pass
    check(directory)
    return directory


def check(directory: str) -> None:
    """Check that a runtime directory is only this user's. Raises: ConfigError; FileNotFoundError."""
    try:
        # The directory itself before its parents, so that the reason is the nearest one.
        found = os.lstat(directory)
        if not stat.S_ISDIR(found.st_mode):
            raise ConfigError(f"{directory}: is not a directory; name another one by {VARIABLE}")
        if found.st_uid != os.geteuid():
            raise NotOwnedError(f"{directory} belongs to user {found.st_uid}, not to {os.geteuid()}")
        check_owned_directory(directory)
    except NotOwnedError as error:
        raise ConfigError(f"{error}; name a directory of your own by {VARIABLE}") from error
    except PermissionError as error:
        raise ConfigError(f"{directory}: is another user's; name a directory of your own by {VARIABLE}") from error
    if found.st_mode & 0o077:
        raise ConfigError(f"{directory}: other users may read it: chmod 700 {directory}")


class TreeDirectory:
    def __init__(self, runtime: str, digest: str) -> None:
        if not _DIGEST.fullmatch(digest):
            raise ValueError(f"{digest[:80]!r} is no digest")
        # As the kernel lists mounts: there may be a link above, such as /var/run.
        self.runtime, self.digest = os.path.realpath(runtime), digest
        self.folder = os.path.join(self.runtime, TREES, digest)
        self.control_path, self.root, self.device, self.status, self._lock_path, self._state_path = (
            os.path.join(self.folder, name) for name in ("control", "root", "device", STATUS, "lock", "state")
        )

    @classmethod
    def of_directory(cls, directory: str) -> TreeDirectory:
        trees, digest = os.path.split(directory)
        return cls(os.path.dirname(trees), digest)

    @property
    def log_path(self) -> str:
        """Return the log of its daemon; it outlives the daemon."""
        return os.path.join(self.runtime, LOGS, f"{self.digest[:16]}.log")

    @property
    def faults_path(self) -> str:
        """Return its journal of failed reads (faults.py); it outlives the daemon."""
        return os.path.join(self.runtime, LOGS, f"{self.digest[:16]}.faults")

    # ---- ownership -------------------------------------------------------------------------------------------

    def try_claim(self) -> int:
        """Make the directory; open and hold its lock; return -1 while others hold it. Raises: StorageError."""
        with map_os_errors(self.folder):
            while True:
                os.makedirs(self.folder, mode=0o700, exist_ok=True)
                try:
                    fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                except FileNotFoundError:
                    continue  # its last user removed the directory between the two calls
                is_claimed = False
                try:
                    if not try_flock(fd):
                        return -1
                    is_claimed = self.is_lock(fd)
                finally:
                    if not is_claimed:
                        os.close(fd)
                if is_claimed:
                    return fd

    def is_lock(self, fd: int) -> bool:
        """Return whether an open file is the current lock."""
        return is_at(fd, self._lock_path)

    def has_lock_open(self, pid: int) -> bool:
        """Return whether a process of this user has the lock open: only the tree's daemon and reaper have."""
        try:
            ours = os.lstat(self._lock_path)
            fds = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            return False
        for fd in fds:
            try:
                if os.path.samestat(os.stat(f"/proc/{pid}/fd/{fd}"), ours):
                    return True
            except OSError:
                pass  # closed meanwhile
        return False

    # ---- contents; only for the holder of the lock -------------------------------------------------------------

    def write_state(self, pids: Mapping[str, int]) -> None:
        """Write the pids of daemon and reaper. Raises: OSError."""
        temporary = f"{self._state_path}.new"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with open(fd, "w", encoding="ascii") as file:
            json.dump(pids, file)
        os.replace(temporary, self._state_path)

    def read_pids(self) -> list[int]:
        """Return the recorded pids of the daemon and its reaper; also without the lock."""
        try:
            with open(self._state_path, encoding="ascii") as file:
                found = json.loads(file.read(MAX_STATE_BYTES))
        except (OSError, ValueError):
            return []
        pids = found.values() if isinstance(found, dict) else ()
        return [pid for pid in pids if isinstance(pid, int) and 1 < pid < 1 << 31]

    def clear(self) -> int:
        """End the mounts here, in any state of their server; return their number.

        Raises: ConfigError, StorageError.
        """
        count = self._clear_status()
        while found := kernel.clear(self.folder):
            count += found
            if count > 1000:
                raise StorageError(f"{self.folder}: another process keeps mounting there")
        return count

    def _clear_status(self) -> int:
        """End the status folder, and its copies in the directories that show the tree in this namespace."""
        try:
            if STATUS not in os.listdir(self.folder):  # not accessed itself: its server may be stopped
                return 0
        except OSError:
            return 0
        mounted = kernel.mounts()
        own = self.status
        top = {each.target: each for each in mounted}
        status = top.get(own)
        if status is None or not kernel.is_fuse(status):
            return 0
        kernel.abort(status.minor)
        device = status.major, status.minor
        copies = [each for each in top.values() if (each.major, each.minor) == device and each.target != own]
        for each in copies:
            kernel.unmount_lazily(each.target, kernel.FORCE)
        return len(copies)

    def remove(self) -> None:
        """Remove the directory, and with it the lock's name. Nothing may be mounted there any more."""
        for path, unlink in (
            (self.control_path, os.unlink),
            (self.root, os.rmdir),
            (self.device, os.rmdir),
            (self.status, os.rmdir),
            (f"{self._state_path}.new", os.unlink),
            (self._state_path, os.unlink),
            (self._lock_path, os.unlink),
            (self.folder, os.rmdir),
        ):
            try:
                unlink(path)
            except OSError:
                pass  # it was not made, or a new user is there already


def is_shown(place: TreeDirectory) -> bool:
    """Return whether the tree is mounted at its place in this process's mount namespace."""
    return any(each.target == place.root and each.fstype == "erofs" for each in kernel.mounts())


def places(runtime: str) -> list[TreeDirectory]:
    """Return the places of all trees that are or were mounted."""
    try:
        names = os.listdir(os.path.join(runtime, TREES))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"{runtime}: cannot be read: {error.strerror}") from error
    return [TreeDirectory(runtime, name) for name in sorted(names) if _DIGEST.fullmatch(name)]
