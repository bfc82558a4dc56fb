"""Where trees are mounted: a folder for each in the user's runtime folder, and the lock of whoever serves it.

    RUNTIME/trees/DIGEST/lock      held by the daemon and its minder, until nothing of them is left
                         control   their socket
                         state     pids, for who has to end them by force
                         device/   the FUSE mount
                         root/     the tree

RUNTIME is $BOOTSEER_RUNTIME, else /run/bootseer/0 for root, $XDG_RUNTIME_DIR/bootseer or /tmp/bootseer-UID for
others. Nobody else may look into it.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
from collections.abc import Mapping

from bootseer.errors import ConfigError, StorageError
from bootseer.mounts import kernel
from bootseer.storage.os_errors import map_os_errors
from bootseer.trust.owned_files import NotOwnedError, check_owned_folder

VARIABLE = "BOOTSEER_RUNTIME"
TREES, LOGS = "trees", "logs"
MOST_STATE_BYTES = 4096
_DIGEST = re.compile(r"[0-9a-f]{64}")


def locate(environ: Mapping[str, str]) -> str:
    """The runtime folder of this user, made or not. Raises: ConfigError."""
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


def prepare(folder: str) -> str:
    """Makes the runtime folder, and looks whose it is.

    Raises: ConfigError when others could look into it or put something there; StorageError when it cannot be made.
    """
    with map_os_errors(folder):
        for path, mode in ((os.path.dirname(folder), 0o755), (folder, 0o700)):
            try:
                os.mkdir(path, mode)
            except FileExistsError:
                pass
    check(folder)
    return folder


def check(folder: str) -> None:
    """That a runtime folder is this user's alone. Raises: ConfigError; FileNotFoundError."""
    try:
        # The folder itself before what is above it, so that the reason is the nearest one.
        found = os.lstat(folder)
        if not stat.S_ISDIR(found.st_mode):
            raise ConfigError(f"{folder}: is no folder; name another one by {VARIABLE}")
        if found.st_uid != os.geteuid():
            raise NotOwnedError(f"{folder} belongs to user {found.st_uid}, not to {os.geteuid()}, who runs this")
        check_owned_folder(folder)
    except NotOwnedError as error:
        raise ConfigError(f"{error}; name a folder of your own by {VARIABLE}") from error
    except PermissionError as error:
        raise ConfigError(f"{folder}: is another user's; name a folder of your own by {VARIABLE}") from error
    if found.st_mode & 0o077:
        raise ConfigError(f"{folder}: others may look into it: chmod 700 {folder}")


class Place:
    """The folder of one tree."""

    def __init__(self, runtime: str, digest: str) -> None:
        if not _DIGEST.fullmatch(digest):
            raise ValueError(f"{digest[:80]!r} is no digest")
        self.runtime, self.digest = runtime, digest
        self.folder = os.path.join(runtime, TREES, digest)
        self.control_path, self.root, self.device, self._lock_path, self._state_path = (
            os.path.join(self.folder, name) for name in ("control", "root", "device", "lock", "state")
        )

    @classmethod
    def of_folder(cls, folder: str) -> Place:
        """The place that has this folder."""
        trees, digest = os.path.split(folder)
        return cls(os.path.dirname(trees), digest)

    @property
    def log_path(self) -> str:
        """What its daemon says; outlives it."""
        return os.path.join(self.runtime, LOGS, f"{self.digest[:16]}.log")

    @property
    def faults_path(self) -> str:
        """What of it could not be read (faults.py); outlives its daemon."""
        return os.path.join(self.runtime, LOGS, f"{self.digest[:16]}.faults")

    # ---- whose it is -----------------------------------------------------------------------------------------

    def try_claim(self) -> int:
        """The lock, open and held; -1 while somebody else has it. Makes the folder. Raises: StorageError."""
        with map_os_errors(self.folder):
            while True:
                os.makedirs(self.folder, mode=0o700, exist_ok=True)
                try:
                    fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                except FileNotFoundError:
                    continue  # its last user took the folder away between the two
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    os.close(fd)
                    return -1
                except BaseException:
                    os.close(fd)
                    raise
                if self.is_lock(fd):
                    return fd
                os.close(fd)

    def is_lock(self, fd: int) -> bool:
        """Whether an open file is the lock that is here now."""
        try:
            return os.path.samestat(os.fstat(fd), os.lstat(self._lock_path))
        except FileNotFoundError:
            return False

    def has_lock_open(self, pid: int) -> bool:
        """Whether a process of this user has the lock open: then it is a daemon or a minder of this tree."""
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

    # ---- what is in it; for whoever has the lock ---------------------------------------------------------------

    def write_state(self, pids: Mapping[str, int]) -> None:
        """Raises: OSError."""
        temporary = f"{self._state_path}.new"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with open(fd, "w", encoding="ascii") as file:
            json.dump(pids, file)
        os.replace(temporary, self._state_path)

    def read_pids(self) -> list[int]:
        """Of the daemon and its minder, as they said; for anybody."""
        try:
            with open(self._state_path, encoding="ascii") as file:
                found = json.loads(file.read(MOST_STATE_BYTES))
        except (OSError, ValueError):
            return []
        pids = found.values() if isinstance(found, dict) else ()
        return [pid for pid in pids if isinstance(pid, int) and pid > 1]

    def clear(self) -> int:
        """Ends what is mounted here, whatever state its server is in; how many mounts there were.

        Raises: ConfigError, StorageError.
        """
        count = 0
        while found := kernel.clear(self.folder):
            count += found
            if count > 1000:
                raise StorageError(f"{self.folder}: something mounts there again and again")
        return count

    def remove(self) -> None:
        """Takes the folder away, and with it the lock's name. Nothing may be mounted there any more."""
        for path, unlink in (
            (self.control_path, os.unlink),
            (self.root, os.rmdir),
            (self.device, os.rmdir),
            (f"{self._state_path}.new", os.unlink),
            (self._state_path, os.unlink),
            (self._lock_path, os.unlink),
            (self.folder, os.rmdir),
        ):
            try:
                unlink(path)
            except OSError:
                pass  # it was not made, or a new user is there already


def is_shown(place: Place) -> bool:
    """Whether the tree can be seen at its place from this process's mount namespace."""
    return any(each.target == place.root and each.fstype == "erofs" for each in kernel.mounts())


def places(runtime: str) -> list[Place]:
    """Of all trees that are mounted, or were."""
    try:
        names = os.listdir(os.path.join(runtime, TREES))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"{runtime}: cannot be looked at: {error.strerror}") from error
    return [Place(runtime, name) for name in sorted(names) if _DIGEST.fullmatch(name)]
