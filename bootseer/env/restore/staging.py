"""Exclusive access to a target: the directory for its new files, and recovery of what a killed run has left there.

    PARENT/.bootseer-env-ID.lock       held while a process works on it (target_lock.py)
           .bootseer-env-ID-RANDOM/    tree/     new files, private to this user until they are moved
                                       gone/     replaced files
                                       journal   during moves; `done` until all is on disk
           .bootseer-env-kept-.../     files that could be neither moved nor restored: for the user

PARENT is the directory that contains the target. It is the target itself if a rename between both is not possible
(a mount, a directory that this user may not write to). ID identifies the target. The next process with the lock
cleans up, and leftovers never fail its job.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from bootseer.env.capture.walk import walk
from bootseer.env.restore import apply, apply_journal, renames
from bootseer.env.restore.apply_journal import Journal
from bootseer.env.restore.on_disk import identity, sync_file_system, sync_names
from bootseer.env.restore.target_lock import PREFIX as PREFIX
from bootseer.env.restore.target_lock import LockVisibility, id_of, locked
from bootseer.env.restore.trash import remove_in_background
from bootseer.errors import BootseerError, ConfigError
from bootseer.storage.os_errors import map_os_errors
from bootseer.tree.unpack.safe_directories import DIRECTORY

WAIT_S = 600.0
_KEPT = f"{PREFIX}kept-"
_OLD_S = 86_400.0  # used where locks do not show which process lives

OnRecovered = Callable[[Journal, bool], object]


class Staging:
    """A directory for new files. Closing it closes descriptors only; `throw_away` removes it."""

    def __init__(self, above: str, above_fd: int, name: str, *, is_inside: bool) -> None:
        self._is_inside = is_inside  # inside the target
        self.folder = os.path.join(above, name)
        self.tree = os.path.join(self.folder, os.fsdecode(apply.TREE))  # for the new files
        self._above_fd, self._name = above_fd, name
        found = os.fstat(above_fd)
        os.mkdir(name, 0o700, dir_fd=above_fd)
        if is_inside and os.geteuid() in (0, found.st_uid):
            os.utime(above_fd, ns=(found.st_atime_ns, found.st_mtime_ns))
        self.fd = os.open(name, DIRECTORY, dir_fd=above_fd)
        try:
            sync_names(above_fd)  # before the journal exists
            os.mkdir(apply.TREE, 0o700, dir_fd=self.fd)
            self.tree_fd = os.open(apply.TREE, DIRECTORY, dir_fd=self.fd)
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        os.close(self.tree_fd)
        os.close(self.fd)

    def throw_away(self) -> None:
        """Remove it in the background. If that fails, the next process at the target removes it."""
        remove_in_background(self._above_fd, [self._name], keeps_time=self._is_inside)


class Claim:
    """Exclusive access of this process to a target. Made by `claim`."""

    def __init__(self, target: str, stack: ExitStack, held: LockVisibility, on_recovered: OnRecovered) -> None:
        self.target = target  # resolved
        self.id = id_of(target)
        self._held = held
        self.unsettled: list[tuple[int, str]] = []  # directory, name: moved, but perhaps not on disk yet
        self.notes: list[str] = []  # lines for the user
        self.is_doubtful = False  # a killed run may have left it half changed, without recovery
        self._on_recovered = on_recovered
        self._stack = stack
        self.parent = os.path.dirname(target)
        self.parent_fd = os.open(self.parent, DIRECTORY)
        stack.callback(os.close, self.parent_fd)
        self.target_fd = -1  # -1: missing
        self._open_target()

    @property
    def is_fresh(self) -> bool:
        return self.target_fd < 0

    def _open_target(self) -> None:
        try:
            self.target_fd = os.open(self.target, DIRECTORY)
        except FileNotFoundError:
            return
        self._stack.callback(os.close, self.target_fd)

    def stage(self) -> Staging:
        """Create a directory beside the target. Raises: StorageError; ConfigError if there is no place for it."""
        self.settle()
        name = f"{PREFIX}{self.id}-{secrets.token_hex(6)}"
        above, above_fd = self.parent, self.parent_fd
        if not self._is_usable_parent():
            if self.is_fresh:
                raise ConfigError(f"{self.target}: cannot be created: this user may not write to {self.parent}")
            above, above_fd = self.target, self.target_fd
        with map_os_errors(above):
            staging = Staging(above, above_fd, name, is_inside=above_fd == self.target_fd)
        self._stack.callback(staging.close)
        return staging

    def show(self, staging: Staging) -> None:
        """Move a new target into place atomically. Raises: StorageError."""
        with map_os_errors(self.target):
            renames.move(staging.fd, apply.TREE, self.parent_fd, os.fsencode(os.path.basename(self.target)))

    def hide(self, staging: Staging) -> None:
        """Undo `show`. Raises: StorageError."""
        with map_os_errors(self.target):
            renames.move(self.parent_fd, os.fsencode(os.path.basename(self.target)), staging.fd, apply.TREE)

    def _is_usable_parent(self) -> bool:
        found = os.fstat(self.parent_fd)
        if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
            return self.is_fresh  # other users could replace our directory; but they could replace the target, too
        if not os.access(self.parent, os.W_OK | os.X_OK):
            return False
        return self.is_fresh or _mount_of(self.parent_fd) == _mount_of(self.target_fd)

    def settle(self) -> None:
        """Sync earlier moves before the target changes, as they cannot be undone afterwards."""
        left, self.unsettled = self.unsettled, []
        if left and sync_file_system(self.target_fd):
            for fd, name in left:
                forget(fd, name, keeps_time=fd == self.target_fd)

    # ---- recovery after a killed run ---------------------------------------------------------------------------

    def tidy(self, boot: str) -> None:
        """Complete, undo, or set aside leftovers, and add notes. Raises: StorageError."""
        for fd, is_seen in ((self.parent_fd, self._held.is_beside), (self.target_fd, self._held.is_on_target)):
            if fd < 0:
                continue
            names = [name for name in sorted(os.listdir(fd)) if name.startswith(f"{PREFIX}{self.id}-")]
            if names := [name for name in names if self._tidy(fd, name, boot, is_seen=is_seen)]:
                remove_in_background(fd, names, keeps_time=fd == self.target_fd)

    def _tidy(self, above_fd: int, name: str, boot: str, *, is_seen: bool) -> bool:
        """Return whether nothing in it is needed any more."""
        where = os.path.join(self.target if above_fd == self.target_fd else self.parent, name)
        try:
            fd = os.open(name, DIRECTORY, dir_fd=above_fd)
        except OSError:
            return False
        try:
            found = os.fstat(fd)
            if found.st_uid != os.geteuid() or found.st_mode & 0o077:
                return False  # made by another user
            if not is_seen and time.time() - found.st_mtime < _OLD_S:
                return False
            done = apply_journal.read(fd, where, apply_journal.DONE)
            journal = done or apply_journal.read(fd, where) or self._written_ahead(fd, where)
            if journal is None or journal.target != self.target:
                return True
            return self._end(journal, fd, (above_fd, name), boot, is_done=done is not None)
        except BootseerError as error:
            return self._set_aside((above_fd, name), fd, error)
        finally:
            os.close(fd)

    def _written_ahead(self, fd: int, where: str) -> Journal | None:
        """Return a prepared journal whose final rename was lost at a power failure, if its move has happened."""
        journal = apply_journal.read_ahead(fd, where)
        if journal is None or not journal.is_fresh or not self._is_same(journal):
            return None
        apply_journal.begin(fd)
        return journal

    def _end(self, journal: Journal, fd: int, place: tuple[int, str], boot: str, *, is_done: bool) -> bool:
        """Finish a leftover. Return whether nothing in it is needed any more. Raises: StorageError."""
        is_of_boot = bool(boot) and journal.boot == boot
        if is_done and is_of_boot and self._is_same(journal):
            self.unsettled.append(place)
            return False
        is_there = self._recover(journal, fd, is_of_boot)
        if is_there is None:
            if not is_done:
                self.notes.append(
                    f"{self.target}: is not the directory that an interrupted start was changing; left unchanged"
                )
        else:
            if is_there:
                self.notes.append(f"{self.target}: an interrupted start was completed")
            elif is_of_boot:
                self.notes.append(f"{self.target}: an interrupted start was undone")
            else:
                self.notes.append(f"{self.target}: an interrupted start from before the last boot was undone")
            self._on_recovered(journal, is_there)
        with map_os_errors(self.target):
            if is_there and not journal.marker.is_durable:
                apply_journal.end(fd)
                self.unsettled.append(place)
                return False
            if not is_of_boot:
                sync_file_system(fd)  # sync restored files before the journal is removed
            apply_journal.remove(fd)
        if is_there is False and _has_more(fd, journal):
            kept = self._keep(place)
            self.notes.append(f"{self.target}: files that were added to it since then are in {kept}")
            return False
        return True

    def _is_same(self, journal: Journal) -> bool:
        """Return whether the target is the directory of the journal, and not a newer one."""
        return not self.is_fresh and journal.place.is_of(identity(self.target_fd))

    def _recover(self, journal: Journal, fd: int, is_of_boot: bool) -> bool | None:
        """Return whether the target has the environment now, or is as before; None: it is another directory."""
        if not journal.is_fresh:
            if not self._is_same(journal):
                return None
            return apply.recover(journal, self.target_fd, fd, is_of_boot=is_of_boot)
        name = os.fsencode(os.path.basename(self.target))
        if renames.exists(fd, apply.TREE):  # not moved into place
            if not is_of_boot or not self.is_fresh:
                return False
            renames.move(fd, apply.TREE, self.parent_fd, name)
            self._open_target()
            return True
        if not self._is_same(journal):
            return None
        if is_of_boot:
            return True
        renames.move(self.parent_fd, name, fd, apply.TREE)  # its files may be empty
        self.target_fd = -1  # closed by the stack
        return False

    def _set_aside(self, place: tuple[int, str], fd: int, error: BootseerError) -> bool:
        """Set aside a leftover that can be neither completed nor undone, with a note for the user."""
        self.is_doubtful = True
        old = f"{self.target}: an interrupted start may have left it half changed"
        if not _has_entries(fd, apply.GONE) and not isinstance(error, apply.HalfChangedError):
            self.notes.append(f"{old} ({error}); if it does not work, delete and recreate it")
            return True
        kept = self._keep(place)
        self.notes.append(
            f"{old} ({error}); its earlier content is in {kept}; delete both, and recreate the target"
        )
        return False

    def _keep(self, place: tuple[int, str]) -> str:
        """Rename a staging directory so that no process uses it. Return its path. Raises: StorageError."""
        fd, name = place
        kept = f"{_KEPT}{name.removeprefix(PREFIX)}"
        with map_os_errors(self.target):
            os.rename(name, kept, src_dir_fd=fd, dst_dir_fd=fd)
        return os.path.join(self.target if fd == self.target_fd else self.parent, kept)


def _has_more(fd: int, journal: Journal) -> bool:
    """Return whether it contains more than the environment, except bytecode. Raises: StorageError."""
    known = set(journal.paths)
    found = walk(f"/proc/self/fd/{fd}/{os.fsdecode(apply.TREE)}")
    return any(path and path not in known and b"__pycache__" not in path.split(b"/") for path in found)


def _has_entries(fd: int, name: bytes) -> bool:
    try:
        directory = os.open(name, DIRECTORY, dir_fd=fd)
    except OSError:
        return False
    try:
        return bool(os.listdir(directory))
    finally:
        os.close(directory)


def forget(above_fd: int, name: str, *, keeps_time: bool) -> None:
    """Remove a staging directory whose moves are on disk, in the background."""
    try:
        fd = os.open(name, DIRECTORY, dir_fd=above_fd)
    except OSError:
        return
    try:
        apply_journal.remove(fd)
    except OSError:
        return
    finally:
        os.close(fd)
    remove_in_background(above_fd, [name], keeps_time=keeps_time)


@contextmanager
def claim(
    target: str,
    *,
    environ: Mapping[str, str],
    boot: str,
    wait_s: float = WAIT_S,
    on_recovered: OnRecovered = lambda _journal, _is_complete: None,
) -> Iterator[Claim]:
    """Wait until no other process is at the target, then recover leftovers and yield the claim.

    Args: on_recovered: called with the journal of a run that was completed (True) or undone, before its removal.
    Raises: StorageTimeout; ConfigError; StorageError.
    """
    real = os.path.realpath(target)
    if real == "/":
        raise ConfigError(f"{target}: cannot be a target: it is the root directory")
    with ExitStack() as stack, map_os_errors(target):
        os.makedirs(os.path.dirname(real), mode=0o755, exist_ok=True)
        held = stack.enter_context(locked(real, environ, wait_s))
        claimed = Claim(real, stack, held, on_recovered)
        claimed.tidy(boot)
        yield claimed


def _mount_of(fd: int) -> str:
    """Return the mount id of an open directory; renames are not possible between mounts, even of one disk."""
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii", errors="replace") as file:
        return next((line for line in file if line.startswith("mnt_id:")), "")
