"""Alone at a target: the folder in which its new files are made, and what a killed run has left there.

    PARENT/.bootseer-env-ID.lock       held while somebody is at it (target_lock.py)
           .bootseer-env-ID-RANDOM/    tree/     new files, for this user alone until they are moved
                                       gone/     what went
                                       journal   while moves are under way; `done` until all is on disk
           .bootseer-env-kept-.../     what could be neither completed nor put back: for people

PARENT is the folder that the target is in, or the target itself where no rename could lead from one to the other
(a mount, a folder that this user may not write to). ID stands for the target. Whoever has the lock tidies up: what
was left there never ends a later job.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from bootseer.env import apply, apply_journal, renames
from bootseer.env.apply_journal import Journal
from bootseer.env.markers import Marker
from bootseer.env.on_disk import identity, sync_file_system, sync_names
from bootseer.env.target_lock import PREFIX as PREFIX
from bootseer.env.target_lock import Held, id_of, locked
from bootseer.env.trash import remove_later
from bootseer.env.walk import walk
from bootseer.errors import BootseerError, ConfigError
from bootseer.storage.os_errors import map_os_errors
from bootseer.tree.safe_folders import FOLDER

WAIT_S = 600.0
_KEPT = f"{PREFIX}kept-"
_OLD_S = 86_400.0  # where no lock tells who lives

OnRecovered = Callable[[Journal, bool], object]


class Staging:
    """A folder for new files. Closing it closes descriptors only; `throw_away` removes it."""

    def __init__(self, above: str, above_fd: int, name: str, *, is_inside: bool) -> None:
        self._is_inside = is_inside  # the target
        self.folder = os.path.join(above, name)
        self.tree = os.path.join(self.folder, os.fsdecode(apply.TREE))  # where new files are made
        self._above_fd, self._name = above_fd, name
        found = os.fstat(above_fd)
        os.mkdir(name, 0o700, dir_fd=above_fd)
        if is_inside and os.geteuid() in (0, found.st_uid):
            os.utime(above_fd, ns=(found.st_atime_ns, found.st_mtime_ns))
        self.fd = os.open(name, FOLDER, dir_fd=above_fd)
        try:
            sync_names(above_fd)  # before the journal is there
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

    def __init__(self, target: str, stack: ExitStack, held: Held, on_recovered: OnRecovered) -> None:
        self.target = target  # without links on the way
        self.id = id_of(target)
        self._held = held
        self.unsettled: list[tuple[int, str]] = []  # folder, name: moved, but perhaps not on disk yet
        self.notes: list[str] = []  # lines for people
        self.is_doubtful = False  # a killed run may have left it half changed, and that cannot be mended
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
        self.settle()
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

    def settle(self) -> None:
        """Before the target is changed: what was done to it earlier cannot be undone any more then."""
        left, self.unsettled = self.unsettled, []
        if left and sync_file_system(self.target_fd):
            for fd, name in left:
                forget(fd, name, keeps_time=fd == self.target_fd)

    # ---- what a killed run has left ----------------------------------------------------------------------------

    def tidy(self, boot: str) -> None:
        """What cannot be completed or put back is kept aside, and said. Raises: StorageError."""
        for fd, is_seen in ((self.parent_fd, self._held.is_beside), (self.target_fd, self._held.is_on_target)):
            if fd < 0:
                continue
            names = [name for name in sorted(os.listdir(fd)) if name.startswith(f"{PREFIX}{self.id}-")]
            if names := [name for name in names if self._tidy(fd, name, boot, is_seen=is_seen)]:
                remove_later(fd, names, keeps_time=fd == self.target_fd)

    def _tidy(self, above_fd: int, name: str, boot: str, *, is_seen: bool) -> bool:
        """Whether nothing in it is needed any more."""
        where = os.path.join(self.target if above_fd == self.target_fd else self.parent, name)
        try:
            fd = os.open(name, FOLDER, dir_fd=above_fd)
        except OSError:
            return False
        try:
            found = os.fstat(fd)
            if found.st_uid != os.geteuid() or found.st_mode & 0o077:
                return False  # not of our making
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
        """A journal that lost its last name with the power, if its step was taken all the same."""
        journal = apply_journal.read_ahead(fd, where)
        if journal is None or not journal.is_fresh or not self._is_same(journal):
            return None
        apply_journal.begin(fd)
        return journal

    def _end(self, journal: Journal, fd: int, place: tuple[int, str], boot: str, *, is_done: bool) -> bool:
        """The same. Raises: StorageError."""
        is_of_boot = bool(boot) and journal.boot == boot
        if is_done and is_of_boot and self._is_same(journal):
            self.unsettled.append(place)
            return False
        is_there = self._recover(journal, fd, is_of_boot)
        if is_there is None:
            if not is_done:
                self.notes.append(f"{self.target}: is not the folder that an interrupted start was changing: left")
        else:
            if is_there:
                self.recovered = journal.marker
                self.notes.append(f"{self.target}: what an interrupted start had begun was completed")
            elif is_of_boot:
                self.notes.append(f"{self.target}: what an interrupted start had begun was undone")
            else:
                self.notes.append(f"{self.target}: what a start before the last boot had begun was undone")
            self._on_recovered(journal, is_there)
        with map_os_errors(self.target):
            if is_there and not journal.marker.is_durable:
                apply_journal.end(fd)
                self.unsettled.append(place)
                return False
            if not is_of_boot:
                sync_file_system(fd)  # what was put back, before it is forgotten
            apply_journal.remove(fd)
        if is_there is False and _has_more(fd, journal):
            kept = self._keep(place)
            self.notes.append(f"{self.target}: what others put into it since then is in {kept}")
            return False
        return True

    def _is_same(self, journal: Journal) -> bool:
        """Whether the target is the folder that the journal is about, and none that somebody made since."""
        return not self.is_fresh and journal.place.is_of(identity(self.target_fd))

    def _recover(self, journal: Journal, fd: int, is_of_boot: bool) -> bool | None:
        """Whether the target has the environment now, else it is as it was; None: it is not that target."""
        if not journal.is_fresh:
            if not self._is_same(journal):
                return None
            return apply.recover(journal, self.target_fd, fd, is_of_boot=is_of_boot)
        name = os.fsencode(os.path.basename(self.target))
        if renames.exists(fd, apply.TREE):  # it was not shown
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
        self.target_fd = -1  # it is closed at the end
        return False

    def _set_aside(self, place: tuple[int, str], fd: int, error: BootseerError) -> bool:
        """What can be neither completed nor undone: people get what the target had. Nobody tries it again."""
        self.is_doubtful = True
        old = f"{self.target}: an interrupted start may have left it half changed"
        if not _has_entries(fd, apply.GONE) and not isinstance(error, apply.HalfChangedError):
            self.notes.append(f"{old} ({error}): if it does not work, delete it and make it anew")
            return True
        kept = self._keep(place)
        self.notes.append(f"{old} ({error}): what it had is in {kept}: delete both, and make the target anew")
        return False

    def _keep(self, place: tuple[int, str]) -> str:
        """Gives a staging folder another name, which nobody looks at: its path. Raises: StorageError."""
        fd, name = place
        kept = f"{_KEPT}{name.removeprefix(PREFIX)}"
        with map_os_errors(self.target):
            os.rename(name, kept, src_dir_fd=fd, dst_dir_fd=fd)
        return os.path.join(self.target if fd == self.target_fd else self.parent, kept)


def _has_more(fd: int, journal: Journal) -> bool:
    """Whether more came back than the environment had, but for bytecode. Raises: StorageError."""
    known = set(journal.paths)
    found = walk(f"/proc/self/fd/{fd}/{os.fsdecode(apply.TREE)}")
    return any(path and path not in known and b"__pycache__" not in path.split(b"/") for path in found)


def _has_entries(fd: int, name: bytes) -> bool:
    try:
        folder = os.open(name, FOLDER, dir_fd=fd)
    except OSError:
        return False
    try:
        return bool(os.listdir(folder))
    finally:
        os.close(folder)


def forget(above_fd: int, name: str, *, keeps_time: bool) -> None:
    """A staging folder whose moves are on disk: what went is removed in the background."""
    try:
        fd = os.open(name, FOLDER, dir_fd=above_fd)
    except OSError:
        return
    try:
        apply_journal.remove(fd)
    except OSError:
        return
    finally:
        os.close(fd)
    remove_later(above_fd, [name], keeps_time=keeps_time)


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
        held = stack.enter_context(locked(real, environ, wait_s))
        claimed = Claim(real, stack, held, on_recovered)
        claimed.tidy(boot)
        yield claimed


def _mount_of(fd: int) -> str:
    """A number of the mount that an open folder is on: renames lead from none to another, of one disk or not."""
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii", errors="replace") as file:
        return next((line for line in file if line.startswith("mnt_id:")), "")
