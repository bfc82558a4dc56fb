"""Alone at a target: the lock, the folder in which its new files are made, and what a killed run has left there.

    PARENT/.bootseer-env-ID.lock       held while somebody is at it
           .bootseer-env-ID-RANDOM/    tree/     new files, for this user alone until they are moved
                                       gone/     what went
                                       journal   while moves are under way

PARENT is the folder that the target is in, or the target itself where no rename could lead from one to the other
(a mount, a folder that this user may not write to). ID stands for the target. Whoever has the lock tidies up.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from bootseer.blocks import folder as cache_folder
from bootseer.env import apply, apply_journal, renames
from bootseer.env.apply_journal import Journal
from bootseer.env.markers import Marker
from bootseer.env.trash import remove_later
from bootseer.errors import BootseerError, ConfigError, StorageTimeout
from bootseer.storage.os_errors import map_os_errors
from bootseer.tree.safe_folders import FOLDER

PREFIX = ".bootseer-env-"
WAIT_S = 600.0
_POLL_S = 0.02

OnRecovered = Callable[[Journal, bool], object]


class Staging:
    """A folder for new files. Closing it closes descriptors only; `throw_away` removes it."""

    def __init__(self, above: str, above_fd: int, name: str, *, is_inside: bool) -> None:
        self._is_inside = is_inside  # the target
        self.folder = os.path.join(above, name)
        self.tree = os.path.join(self.folder, os.fsdecode(apply.TREE))  # where new files are made
        self._above_fd, self._name = above_fd, name
        os.mkdir(name, 0o700, dir_fd=above_fd)
        self.fd = os.open(name, FOLDER, dir_fd=above_fd)
        try:
            os.mkdir(apply.TREE, 0o700, dir_fd=self.fd)
            self.tree_fd = os.open(apply.TREE, FOLDER, dir_fd=self.fd)
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        os.close(self.tree_fd)
        os.close(self.fd)

    def throw_away(self) -> None:
        """In the background. What cannot be removed is, by the next one who is at the target."""
        remove_later(self._above_fd, [self._name], keeps_time=self._is_inside)


class Claim:
    """This process alone is at a target. Made by `claim`."""

    def __init__(self, target: str, stack: ExitStack, on_recovered: OnRecovered) -> None:
        self.target = target  # without links on the way
        self.id = _id_of(target)
        self.notes: list[str] = []  # lines for people
        self._on_recovered = on_recovered
        self.recovered: Marker | None = None  # of a killed run whose environment is complete now
        self._stack = stack
        self.parent = os.path.dirname(target)
        self.parent_fd = os.open(self.parent, FOLDER)
        stack.callback(os.close, self.parent_fd)
        self.target_fd = -1  # -1: there is none
        self._open_target()

    @property
    def is_fresh(self) -> bool:
        return self.target_fd < 0

    def _open_target(self) -> None:
        try:
            self.target_fd = os.open(self.target, FOLDER)
        except FileNotFoundError:
            return
        self._stack.callback(os.close, self.target_fd)

    def stage(self) -> Staging:
        """A new folder beside the target. Raises: StorageError; ConfigError when there is no place for it."""
        name = f"{PREFIX}{self.id}-{secrets.token_hex(6)}"
        above, above_fd = self.parent, self.parent_fd
        if not self._is_usable_parent():
            if self.is_fresh:
                raise ConfigError(f"{self.target}: cannot be made: this user may not write to {self.parent}")
            above, above_fd = self.target, self.target_fd
        with map_os_errors(above):
            staging = Staging(above, above_fd, name, is_inside=above_fd == self.target_fd)
        self._stack.callback(staging.close)
        return staging

    def show(self, staging: Staging) -> None:
        """A target that did not exist: all of it is there from one moment to the next. Raises: StorageError."""
        with map_os_errors(self.target):
            renames.move(staging.fd, apply.TREE, self.parent_fd, os.fsencode(os.path.basename(self.target)))

    def hide(self, staging: Staging) -> None:
        """Undoes `show`. Raises: StorageError."""
        with map_os_errors(self.target):
            renames.move(self.parent_fd, os.fsencode(os.path.basename(self.target)), staging.fd, apply.TREE)

    def _is_usable_parent(self) -> bool:
        found = os.fstat(self.parent_fd)
        if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
            return self.is_fresh  # others could exchange our folder; but there they could the target, too
        if not os.access(self.parent, os.W_OK | os.X_OK):
            return False
        return self.is_fresh or _mount_of(self.parent_fd) == _mount_of(self.target_fd)

    # ---- what a killed run has left ----------------------------------------------------------------------------

    def tidy(self, boot: str) -> None:
        """Raises: StorageError, ConfigError when a target can be neither completed nor put back."""
        left: dict[int, list[str]] = {}
        for fd in (self.parent_fd, self.target_fd):
            if fd < 0:
                continue
            for name in os.listdir(fd):
                if name.startswith(f"{PREFIX}{self.id}-") and self._tidy(fd, name, boot):
                    left.setdefault(fd, []).append(name)
        for fd, names in left.items():
            remove_later(fd, names, keeps_time=fd == self.target_fd)

    def _tidy(self, above_fd: int, name: str, boot: str) -> bool:
        """Whether nothing in it is needed any more."""
        try:
            fd = os.open(name, FOLDER, dir_fd=above_fd)
        except OSError:
            return False
        try:
            found = os.fstat(fd)
            if found.st_uid != os.geteuid() or found.st_mode & 0o077:
                return False  # not of our making
            journal: Journal | None = apply_journal.read(fd, os.path.join(self.target, name, "journal"))
            if journal is not None and journal.target == self.target:
                is_of_boot = bool(boot) and journal.boot == boot
                if self._recover(journal, fd, is_of_boot):
                    self.recovered = journal.marker
                    self.notes.append(f"{self.target}: what an interrupted start had begun was completed")
                else:
                    self.notes.append(f"{self.target}: what a start before the last boot had begun was undone")
                self._on_recovered(journal, self.recovered is not None)
                apply.finish(fd, self.target)
        except BootseerError as error:
            raise type(error)(f"{self.target}: an interrupted start left it half changed: {error}") from error
        finally:
            os.close(fd)
        return True

    def _recover(self, journal: Journal, fd: int, is_of_boot: bool) -> bool:
        """Whether the target has the environment now; else it is as it was."""
        if not journal.is_fresh:
            if self.is_fresh:
                return False  # somebody took the target away
            return apply.recover(journal, self.target_fd, fd, is_of_boot=is_of_boot)
        is_shown = not renames.exists(fd, apply.TREE)
        name = os.fsencode(os.path.basename(self.target))
        if is_of_boot and not is_shown and self.is_fresh:
            renames.move(fd, apply.TREE, self.parent_fd, name)
        elif not is_of_boot and is_shown and not self.is_fresh:
            renames.move(self.parent_fd, name, fd, apply.TREE)  # its files may be empty
            self.target_fd = -1  # it is closed at the end
            return False
        elif not is_shown:
            return False
        if self.is_fresh:
            self._open_target()
        return is_of_boot and not self.is_fresh


@contextmanager
def claim(
    target: str,
    *,
    environ: Mapping[str, str],
    boot: str,
    wait_s: float = WAIT_S,
    on_recovered: OnRecovered = lambda _journal, _is_complete: None,
) -> Iterator[Claim]:
    """Waits until no other process is at the target, then tidies up.

    Args: on_recovered: called with the journal of a run that was completed (True) or undone, before it is gone.
    Raises: StorageTimeout; ConfigError; StorageError.
    """
    real = os.path.realpath(target)
    if real == "/":
        raise ConfigError(f"{target}: is the root folder, and no target")
    with ExitStack() as stack, map_os_errors(target):
        os.makedirs(os.path.dirname(real), mode=0o755, exist_ok=True)
        stack.enter_context(_lock(real, environ, wait_s))
        claimed = Claim(real, stack, on_recovered)
        claimed.tidy(boot)
        yield claimed


@contextmanager
def _lock(target: str, environ: Mapping[str, str], wait_s: float) -> Iterator[None]:
    """The lock of a target: where all who can change the target see it, else in this user's cache."""
    path = os.path.join(os.path.dirname(target), f"{PREFIX}{_id_of(target)}.lock")
    end_s = time.monotonic() + wait_s
    fd = -1
    while fd < 0:
        opened = _open_lock(path)
        if opened < 0:
            folder = os.path.join(cache_folder.prepare(cache_folder.locate(environ, os.geteuid())), "env", "locks")
            cache_folder.make_private(folder)
            path = os.path.join(folder, f"{_id_of(target)}.lock")
            opened = _open_lock(path)
            if opened < 0:
                raise ConfigError(f"{path}: cannot be made: set {cache_folder.VARIABLE} to a folder of your own")
        try:
            if _try_hold(opened) and _is_at(opened, path):
                fd, opened = opened, -1
        finally:
            if opened >= 0:
                os.close(opened)
        if fd < 0:
            if time.monotonic() > end_s:
                raise StorageTimeout(f"{target}: another process has been at it for {wait_s:g} s (it has {path})")
            time.sleep(_POLL_S)
    try:
        yield
    finally:
        try:
            os.unlink(path)  # whoever waits for it sees that it is another one
        except OSError:
            pass
        os.close(fd)


def _open_lock(path: str) -> int:
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


def _id_of(target: str) -> str:
    return hashlib.sha256(os.fsencode(target)).hexdigest()[:16]


def _mount_of(fd: int) -> str:
    """A number of the mount that an open folder is on: renames lead from none to another, of one disk or not."""
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii", errors="replace") as file:
        return next((line for line in file if line.startswith("mnt_id:")), "")
