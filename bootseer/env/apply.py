"""Moves an unpacked difference into a folder that exists, by renames; what a killed run left is ended.

In: a folder beside the target with all new files (restore.py unpacks them there); a journal (apply_journal.py).
Out: the target as overlayfs would show it. Each move can be seen to be done by what lies where, so carrying out a
journal again, or undoing it, can begin after any of them. What was there before is kept until all is done; files
that programs have open stay what they are. Nothing is followed: names are single names in folders that were opened
step by step. File systems without RENAME_EXCHANGE get two renames instead of one.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from bootseer.env import apply_journal, renames
from bootseer.env.apply_journal import Attributes, Folder, Journal, Move, attributes_of
from bootseer.env.apply_plan import Kind, plan
from bootseer.env.on_disk import NOTHING, identity
from bootseer.env.subtree import Subtree
from bootseer.env.walk import OURS
from bootseer.errors import BootseerError, ConfigError, StorageError
from bootseer.storage.os_errors import to_storage_error
from bootseer.tree.safe_folders import FOLDER, LastFolder

TREE, GONE = b"tree", b"gone"  # in the staging folder: what comes, what went


class HalfChangedError(StorageError):
    """A target can be neither completed nor put back."""


def fill_journal(journal: Journal, below: Subtree, target_fd: int, tree_fd: int) -> Journal:
    """With the moves. `tree_fd`: the folder with the new files. Raises: StorageError."""
    index = below.tree
    with LastFolder(target_fd) as there, LastFolder(tree_fd) as new, _errors(journal.target):

        def look(path: bytes) -> dict[bytes, int]:
            fd = there.open(_names(path))
            found = {}
            for name in map(os.fsencode, os.listdir(fd)):
                if not path and name.startswith(OURS):
                    continue  # new files that are made inside the target
                try:
                    found[name] = os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode
                except FileNotFoundError:
                    pass  # somebody took it away just now
            return found

        made = plan(below, look)
        moves = []
        for step in made.steps:
            comes = None
            if step.kind is not Kind.REMOVE:
                folder, name = _split(step.path)
                comes = identity(new.open(folder), name)
            moves.append(Move(step.kind, step.path, comes or NOTHING))
        folders = []
        for entry in made.folders:
            path = index.path(entry)
            after = Attributes(
                stat.S_IMODE(index.modes[entry]), index.uids[entry], index.gids[entry], index.mtimes_ns[entry]
            )
            folders.append(Folder(path, attributes_of(os.fstat(there.open(_names(path)))), after))
        try:  # overlayfs: a folder of a lower layer is another one as soon as it is changed
            os.fchmod(target_fd, stat.S_IMODE(os.fstat(target_fd).st_mode))
        except OSError:
            pass
        place = identity(target_fd) or NOTHING
    return msgspec.structs.replace(journal, moves=moves, folders=folders, place=place)


class Moving:
    """A journal and the open folders that it is about; `staging_fd` has `tree` and, here, `gone`."""

    def __init__(self, journal: Journal, target_fd: int, staging_fd: int) -> None:
        self._journal = journal
        self._target_fd, self._staging_fd = target_fd, staging_fd
        with _errors(journal.target):
            try:
                os.mkdir(GONE, 0o700, dir_fd=staging_fd)
            except FileExistsError:
                pass

    def carry_out(self) -> None:
        """All of it, or what is left of it. Raises: StorageError, ConfigError: then it is undone."""
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
                    f"{error}; and it could not be undone ({failure}): the next start tries"
                ) from error
            raise

    def undo(self) -> None:
        """The target is as it was. Raises: StorageError, ConfigError."""
        with self._opened() as steps, _errors(self._journal.target):
            self._let_in(steps)
            for number, move in reversed(list(enumerate(self._journal.moves))):
                steps.undo(number, move)
            self._set_attributes(steps, is_after=False)

    @contextmanager
    def _opened(self) -> Iterator[_Steps]:
        with _errors(self._journal.target):
            tree_fd = os.open(TREE, FOLDER, dir_fd=self._staging_fd)
            try:
                gone_fd = os.open(GONE, FOLDER, dir_fd=self._staging_fd)
                try:
                    with LastFolder(self._target_fd) as there, LastFolder(tree_fd) as new:
                        yield _Steps(there, new, gone_fd, self._journal.target)
                finally:
                    os.close(gone_fd)
            finally:
                os.close(tree_fd)

    def _let_in(self, steps: _Steps) -> None:
        """An ordinary user may not be allowed to write to a folder of his own."""
        if os.geteuid() == 0:
            return
        for folder in self._journal.folders:
            for place in (steps.there, steps.new):
                fd = place.open(_names(folder.path))
                found = os.fstat(fd)
                if found.st_uid == os.geteuid() and found.st_mode & 0o300 != 0o300:
                    os.fchmod(fd, stat.S_IMODE(found.st_mode) | 0o300)

    def _set_attributes(self, steps: _Steps, *, is_after: bool) -> None:
        """Of merged folders, the innermost first."""
        for folder in reversed(self._journal.folders):
            fd = steps.there.open(_names(folder.path))
            wanted = folder.after if is_after else folder.before
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
    """Single moves. `there`: folders of the target; `new`: of what comes; `gone_fd`: takes what goes."""

    def __init__(self, there: LastFolder, new: LastFolder, gone_fd: int, target: str) -> None:
        self.there, self.new = there, new
        self._gone_fd = gone_fd
        self._target = target

    def do(self, number: int, move: Move) -> None:
        """Nothing if it is done already."""
        folder, name = _split(move.path)
        gone = b"%d" % number
        there = self.there.open(folder)
        if move.kind is Kind.REMOVE:
            if _stat(there, name) is not None:
                renames.move(there, name, self._gone_fd, gone, goes_on=True)
            return
        new = self.new.open(folder)
        if move.kind is Kind.ADD:
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
        """Nothing if it was not done."""
        folder, name = _split(move.path)
        gone = b"%d" % number
        there = self.there.open(folder)
        found = _stat(there, name)
        if move.kind is not Kind.REMOVE:
            new = self.new.open(folder)
            rest = _stat(new, name)
            if move.kind is Kind.ADD:
                if rest is None and _is_new(there, name, move):  # else somebody made another one meanwhile
                    renames.move(there, name, new, name)
                return
            if _is_new(there, name, move):
                if rest is not None:  # the two were exchanged
                    if renames.try_exchange(new, name, there, name):
                        return
                    raise StorageError(f"{self._path(move)}: cannot be exchanged any more")
                renames.move(there, name, new, name)
                found = None
            elif found is not None and not stat.S_ISDIR(found.st_mode):
                return  # the old file; `gone` may have another name of it
        if _stat(self._gone_fd, gone) is not None:
            renames.move(self._gone_fd, gone, there, name, goes_on=True)

    def _replace(self, there: int, new: int, name: bytes, gone: bytes, found: os.stat_result | None) -> None:
        """Without exchanging: what is old gets a place, and for a file there is no moment without its name."""
        coming = _stat(new, name)
        both_files = not any(each is None or stat.S_ISDIR(each.st_mode) for each in (found, coming))
        if both_files and _stat(self._gone_fd, gone) is None:
            try:
                os.link(name, gone, src_dir_fd=there, dst_dir_fd=self._gone_fd, follow_symlinks=False)
            except OSError:
                both_files = False  # another user's file, or no hard links there
        if both_files:
            os.rename(name, name, src_dir_fd=new, dst_dir_fd=there)
            return
        if found is not None:
            renames.move(there, name, self._gone_fd, gone, goes_on=True)
        renames.move(new, name, there, name)

    def _changed(self, move: Move) -> ConfigError:
        return ConfigError(f"{self._path(move)}: was made while the environment was put there: start again")

    def _path(self, move: Move) -> str:
        return os.path.join(self._target, os.fsdecode(move.path))


def recover(journal: Journal, target_fd: int, staging_fd: int, *, is_of_boot: bool) -> bool:
    """Ends what a killed run has begun: True if the target has the environment now, False if it is as it was.

    Args: is_of_boot: the machine has not been started anew since. Raises: HalfChangedError; StorageError.
    """
    moving = Moving(journal, target_fd, staging_fd)
    if is_of_boot:
        try:
            moving.carry_out()
        except HalfChangedError:
            raise
        except BootseerError:
            return False  # something stands in its way; it was undone
        return True
    try:
        moving.undo()
    except BootseerError as error:
        raise HalfChangedError(str(error)) from error
    return False


def finish(staging_fd: int, target: str) -> None:
    """Nothing is to be completed any more; what lies in the staging folder can go. Raises: StorageError."""
    with _errors(target):
        apply_journal.remove(staging_fd)


def _names(path: bytes) -> Sequence[bytes]:
    return tuple(path.split(b"/")) if path else ()


def _split(path: bytes) -> tuple[Sequence[bytes], bytes]:
    """Names of its folder, and its own."""
    *folder, name = path.split(b"/")
    return tuple(folder), name


def _is_new(fd: int, name: bytes, move: Move) -> bool:
    """Whether what has that name is what the move brings."""
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
