"""Moves an unpacked difference into an existing directory by renames, and completes or undoes a killed run.

In: a directory beside the target with all new files (restore.py unpacks them there); a journal (apply_journal.py).
Out: the target as overlayfs would show it. The files themselves show whether a move is done. So a journal can be
carried out again, or undone, after any of its moves. The old files are kept until all moves are done. Files that
programs have open do not change. No links are followed: names are single names in directories that were opened
step by step. On file systems without RENAME_EXCHANGE, two renames replace one.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from bootseer.env.capture.subtree import Subtree
from bootseer.env.capture.walk import OURS
from bootseer.env.restore import apply_journal, renames
from bootseer.env.restore.apply_journal import Attributes, Journal, MergedDirectory, Move, attributes_of
from bootseer.env.restore.apply_plan import StepKind, plan
from bootseer.env.restore.on_disk import NOTHING, identity
from bootseer.errors import BootseerError, ConfigError, StorageError
from bootseer.storage.os_errors import to_storage_error
from bootseer.tree.unpack.safe_directories import DIRECTORY, LastDirectory

TREE, GONE = b"tree", b"gone"  # in the staging directory: the new files, the removed files


class HalfChangedError(StorageError):
    """A target can be neither completed nor restored."""


def fill_journal(journal: Journal, below: Subtree, target_fd: int, tree_fd: int) -> Journal:
    """Return the journal with its moves. `tree_fd`: the directory with the new files. Raises: StorageError."""
    index = below.tree
    with LastDirectory(target_fd) as there, LastDirectory(tree_fd) as new, _errors(journal.target):

        def look(path: bytes) -> dict[bytes, int]:
            fd = there.open(_names(path))
            found = {}
            for name in map(os.fsencode, os.listdir(fd)):
                if not path and name.startswith(OURS):
                    continue  # new files that are made inside the target
                try:
                    found[name] = os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode
                except FileNotFoundError:
                    pass  # another process has just removed it
            return found

        made = plan(below, look)
        moves = []
        for step in made.steps:
            comes = None
            if step.kind is not StepKind.REMOVE:
                directory, name = _split(step.path)
                comes = identity(new.open(directory), name)
            moves.append(Move(step.kind, step.path, comes or NOTHING))
        directories = []
        for entry in made.folders:
            path = index.path(entry)
            after = Attributes(
                stat.S_IMODE(index.modes[entry]), index.uids[entry], index.gids[entry], index.mtimes_ns[entry]
            )
            directories.append(MergedDirectory(path, attributes_of(os.fstat(there.open(_names(path)))), after))
        try:  # overlayfs: a directory of a lower layer gets another identity with its first change
            os.fchmod(target_fd, stat.S_IMODE(os.fstat(target_fd).st_mode))
        except OSError:
            pass
        place = identity(target_fd) or NOTHING
    return msgspec.structs.replace(journal, moves=moves, folders=directories, place=place)


class JournalRunner:
    """A journal with its open directories; `staging_fd` contains `tree` and, from now on, `gone`."""

    def __init__(self, journal: Journal, target_fd: int, staging_fd: int) -> None:
        self._journal = journal
        self._target_fd, self._staging_fd = target_fd, staging_fd
        with _errors(journal.target):
            try:
                os.mkdir(GONE, 0o700, dir_fd=staging_fd)
            except FileExistsError:
                pass

    def carry_out(self) -> None:
        """Make all moves that are not made yet; undo them on an error. Raises: StorageError, ConfigError."""
        try:
            with self._opened() as steps, _errors(self._journal.target):
                self._let_in(steps)
                for number, move in enumerate(self._journal.moves):
                    steps.do(number, move)
                self._set_attributes(steps, is_after=True)
        except BaseException as error:
            try:
                self.undo()
            except BootseerError as failure:
                raise HalfChangedError(
                    f"{error}; it could not be undone ({failure}); the next start tries again"
                ) from error
            raise

    def undo(self) -> None:
        """Restore the old state of the target. Raises: StorageError, ConfigError."""
        with self._opened() as steps, _errors(self._journal.target):
            self._let_in(steps)
            for number, move in reversed(list(enumerate(self._journal.moves))):
                steps.undo(number, move)
            self._set_attributes(steps, is_after=False)

    @contextmanager
    def _opened(self) -> Iterator[_Steps]:
        with _errors(self._journal.target):
            tree_fd = os.open(TREE, DIRECTORY, dir_fd=self._staging_fd)
            try:
                gone_fd = os.open(GONE, DIRECTORY, dir_fd=self._staging_fd)
                try:
                    with LastDirectory(self._target_fd) as there, LastDirectory(tree_fd) as new:
                        yield _Steps(there, new, gone_fd, self._journal.target)
                finally:
                    os.close(gone_fd)
            finally:
                os.close(tree_fd)

    def _let_in(self, steps: _Steps) -> None:
        """Make the user's own directories writable: their modes may forbid it to a user who is not root."""
        if os.geteuid() == 0:
            return
        for directory in self._journal.folders:
            for place in (steps.there, steps.new):
                fd = place.open(_names(directory.path))
                found = os.fstat(fd)
                if found.st_uid == os.geteuid() and found.st_mode & 0o300 != 0o300:
                    os.fchmod(fd, stat.S_IMODE(found.st_mode) | 0o300)

    def _set_attributes(self, steps: _Steps, *, is_after: bool) -> None:
        """Set the attributes of merged directories, the innermost first."""
        for directory in reversed(self._journal.folders):
            fd = steps.there.open(_names(directory.path))
            wanted = directory.after if is_after else directory.before
            found = attributes_of(os.fstat(fd))
            if found == wanted:
                continue
            is_mine = os.geteuid() in (0, found.uid)
            if self._journal.has_owners and (found.uid, found.gid) != (wanted.uid, wanted.gid):
                os.fchown(fd, wanted.uid, wanted.gid)
                found = attributes_of(os.fstat(fd))
            if is_mine and found.mode != wanted.mode:
                os.fchmod(fd, wanted.mode)
            if is_mine:
                os.utime(fd, ns=(wanted.mtime_ns, wanted.mtime_ns))


class _Steps:
    """Single moves. `there`: directories of the target; `new`: of the new files; `gone_fd`: for removed files."""

    def __init__(self, there: LastDirectory, new: LastDirectory, gone_fd: int, target: str) -> None:
        self.there, self.new = there, new
        self._gone_fd = gone_fd
        self._target = target

    def do(self, number: int, move: Move) -> None:
        """Make a move unless it is made already."""
        directory, name = _split(move.path)
        gone = b"%d" % number
        there = self.there.open(directory)
        if move.kind is StepKind.REMOVE:
            if _stat(there, name) is not None:
                renames.move(there, name, self._gone_fd, gone, goes_on=True)
            return
        new = self.new.open(directory)
        if move.kind is StepKind.ADD:
            if _stat(new, name) is not None:
                try:
                    renames.move(new, name, there, name)
                except FileExistsError as error:
                    raise self._changed(move) from error
            return
        found = _stat(there, name)
        if found is not None and _is_new(there, name, move):
            return
        if (
            found is not None
            and _stat(self._gone_fd, gone) is None
            and renames.try_exchange(new, name, there, name)
        ):
            return
        self._replace(there, new, name, gone, found)

    def undo(self, number: int, move: Move) -> None:
        """Undo a move unless it was never made."""
        directory, name = _split(move.path)
        gone = b"%d" % number
        there = self.there.open(directory)
        found = _stat(there, name)
        if move.kind is not StepKind.REMOVE:
            new = self.new.open(directory)
            rest = _stat(new, name)
            if move.kind is StepKind.ADD:
                if rest is None and _is_new(there, name, move):  # else another process has made this file
                    renames.move(there, name, new, name)
                return
            if _is_new(there, name, move):
                if rest is not None:  # the two were exchanged
                    if renames.try_exchange(new, name, there, name):
                        return
                    raise StorageError(f"{self._path(move)}: can no longer be exchanged")
                renames.move(there, name, new, name)
                found = None
            elif found is not None and not stat.S_ISDIR(found.st_mode):
                return  # the old file; `gone` may have a hard link to it
        if _stat(self._gone_fd, gone) is not None:
            renames.move(self._gone_fd, gone, there, name, goes_on=True)

    def _replace(self, there: int, new: int, name: bytes, gone: bytes, found: os.stat_result | None) -> None:
        """Replace without an exchange: keep the old entry in `gone`; the name of a file never disappears."""
        coming = _stat(new, name)
        both_files = not any(each is None or stat.S_ISDIR(each.st_mode) for each in (found, coming))
        if both_files and _stat(self._gone_fd, gone) is None:
            try:
                os.link(name, gone, src_dir_fd=there, dst_dir_fd=self._gone_fd, follow_symlinks=False)
            except OSError:
                both_files = False  # another user's file, or a file system without hard links
        if both_files:
            os.rename(name, name, src_dir_fd=new, dst_dir_fd=there)
            return
        if found is not None:
            renames.move(there, name, self._gone_fd, gone, goes_on=True)
        renames.move(new, name, there, name)

    def _changed(self, move: Move) -> ConfigError:
        return ConfigError(
            f"{self._path(move)}: another process made this while the environment was restored; start again"
        )

    def _path(self, move: Move) -> str:
        return os.path.join(self._target, os.fsdecode(move.path))


def recover(journal: Journal, target_fd: int, staging_fd: int, *, is_of_boot: bool) -> bool:
    """Complete or undo a killed run: True if the target now has the environment, False if it is as before.

    Args: is_of_boot: the machine has not rebooted since. Raises: HalfChangedError; StorageError.
    """
    moving = JournalRunner(journal, target_fd, staging_fd)
    if is_of_boot:
        try:
            moving.carry_out()
        except HalfChangedError:
            raise
        except BootseerError:
            return False  # it was undone
        return True
    try:
        moving.undo()
    except BootseerError as error:
        raise HalfChangedError(str(error)) from error
    return False


def finish(staging_fd: int, target: str) -> None:
    """Remove the journal: the staging directory can then be removed. Raises: StorageError."""
    with _errors(target):
        apply_journal.remove(staging_fd)


def _names(path: bytes) -> Sequence[bytes]:
    return tuple(path.split(b"/")) if path else ()


def _split(path: bytes) -> tuple[Sequence[bytes], bytes]:
    """Return the names of the parent directory, and the last name."""
    *directory, name = path.split(b"/")
    return tuple(directory), name


def _is_new(fd: int, name: bytes, move: Move) -> bool:
    return move.comes.is_of(identity(fd, name))


def _stat(fd: int, name: bytes) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        return None


@contextmanager
def _errors(where: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        name = f": {error.filename}" if isinstance(error.filename, str) else ""
        raise to_storage_error(error, where + name) from error
