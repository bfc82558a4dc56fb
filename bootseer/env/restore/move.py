"""Moving of unpacked files into their targets, by journaled renames (apply.py), and writing of the markers.

In: parts, one for each target, with files beside it. Out: all targets have their environment, or none has.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import repeat
from operator import itemgetter

import msgspec

from bootseer.blocks.presence import read_boot_id
from bootseer.env.capture.subtree import Subtree
from bootseer.env.capture.walk import walk
from bootseer.env.restore import apply_journal
from bootseer.env.restore.apply import HalfChangedError, JournalRunner, fill_journal, finish
from bootseer.env.restore.apply_journal import Journal
from bootseer.env.restore.call import RestoreCall
from bootseer.env.restore.in_place import paths_of
from bootseer.env.restore.markers import Marker, Markers, Row, digest_of_rows, open_markers
from bootseer.env.restore.on_disk import NOTHING, identity
from bootseer.env.restore.staging import Claim, Staging
from bootseer.linux.page_cache import is_remote
from bootseer.storage.os_errors import map_os_errors
from bootseer.tree.index import Index

SAMPLES = 64
_KINDS = frozenset({stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK})


def move(call: RestoreCall, parts: Sequence[TargetMove]) -> None:
    """Move the files of all targets, or of none. After the first journal, the next run completes a killed one."""
    for part in parts:
        _markers(call, part).remove(part.claim.target)
        part.prepare(_marker(call, part))
    done: list[TargetMove] = []
    try:
        for part in parts:
            part.carry_out()
            done.append(part)
    except BaseException:
        for part in reversed(done):
            part.undo()
        for part in parts:
            if not part.is_kept:
                part.forget()
        raise
    for part in parts:
        _mark(call, part)
    for part in parts:
        part.end()


def _mark(call: RestoreCall, part: TargetMove) -> None:
    """Write the marker of a target that just received its environment."""
    target, markers, marker = part.claim.target, _markers(call, part), _marker(call, part)
    if part.claim.is_fresh and not call.skipped and not call.moves():
        known = part.known
        if known is not None and known.matches_sample(target):
            markers.write(marker, known.sha256, part.paths)
            return
    markers.write(marker, walk(target), part.paths)


def _markers(call: RestoreCall, part: TargetMove) -> Markers:
    return open_markers(call.environ, part.claim.target)


def _marker(call: RestoreCall, part: TargetMove) -> Marker:
    target = part.claim.target
    return Marker(
        target=target,
        key=call.snapshot.key,
        tree=call.snapshot.tree,
        base=call.base,
        reads=call.reads,
        expires_s=call.snapshot.expires_s,
        is_durable=is_remote(target),  # a server has the data of closed files
    )


class TargetMove:
    """The state of one target, from unpacked to moved files."""

    def __init__(self, claimed: Claim, below: Subtree) -> None:
        self.claim, self.below = claimed, below
        self.staging: Staging | None = None
        self._moving: JournalRunner | None = None
        self._is_shown = False
        self.is_kept = False  # its staged files are needed after this process ends
        self._journaled: Staging | None = None  # the staging directory that holds its journal

    @cached_property
    def paths(self) -> list[bytes]:
        """All names that the tree sets or deletes."""
        return paths_of(self.below)

    @cached_property
    def known(self) -> ComputedWalk | None:
        """The content of the target if it has only the tree."""
        return known_directory(self.below.tree, self.paths)

    def prepare_ahead(self, call: RestoreCall) -> None:
        """Prepare, while files are unpacked, what the move needs."""
        _ = self.paths
        if self.claim.is_fresh:
            with map_os_errors(self.staged.folder):
                apply_journal.write_ahead(self.staged.fd, self._journal(_marker(call, self)))
            self._journaled = self.staged
            _ = self.known

    def prepare(self, marker: Marker) -> None:
        """Write the journal."""
        with map_os_errors(self.staged.folder):
            if self._journaled is self.staged:
                apply_journal.begin(self.staged.fd)
            else:
                apply_journal.write(self.staged.fd, self._journal(marker))

    def _journal(self, marker: Marker) -> Journal:
        staging, claimed = self.staged, self.claim
        journal = Journal(
            target=claimed.target,
            boot=read_boot_id(),
            is_fresh=claimed.is_fresh,
            has_owners=os.geteuid() == 0,
            moves=[],
            folders=[],
            marker=marker,
            paths=self.paths,
        )
        if not claimed.is_fresh:
            journal = fill_journal(journal, self.below, claimed.target_fd, staging.tree_fd)
            self._moving = JournalRunner(journal, claimed.target_fd, staging.fd)
            return journal
        return msgspec.structs.replace(journal, place=identity(staging.tree_fd) or NOTHING)

    def carry_out(self) -> None:
        if self._moving is None:
            self.claim.show(self.staged)
            self._is_shown = self.is_kept = True
            return
        self.is_kept = True  # what the target had before
        try:
            self._moving.carry_out()
        except HalfChangedError:
            raise
        except BaseException:  # undone
            self.is_kept = False
            raise

    def undo(self) -> None:
        if self._moving is not None:
            self._moving.undo()
        elif self._is_shown:
            self.claim.hide(self.staged)
        self.is_kept = False

    def end(self) -> None:
        """Mark the move as complete; until it is on disk, the next start can undo it."""
        if is_remote(self.claim.target):  # a server has the data of closed files
            self.forget()
            self.is_kept = False
            return
        with map_os_errors(self.staged.folder):
            apply_journal.end(self.staged.fd)

    def forget(self) -> None:
        """Remove the staged files, as there is nothing left to complete."""
        finish(self.staged.fd, self.claim.target)

    @property
    def staged(self) -> Staging:
        assert self.staging is not None, "unpacking comes first"
        return self.staging


class ComputedWalk:
    """A directory that was unpacked from a tree. `sha256`: equals `digest_of` a walk of it."""

    def __init__(self, rows: list[Row]) -> None:
        """`rows`: sorted by path."""
        self._rows = rows
        self.sha256 = digest_of_rows(rows)

    def matches_sample(self, directory: str) -> bool:
        """Return whether a sample of the directory's names is as expected."""
        above = os.fsencode(directory)
        return all(_is_so(above, row) for row in self._rows[:: max(1, len(self._rows) // SAMPLES)])


def known_directory(index: Index, paths: Sequence[bytes]) -> ComputedWalk | None:
    """Describe a directory that is unpacked from `index`; None if it must be walked.

    Args: paths: of its entries, in their order, followed by names that must not exist.
    """
    if not {stat.S_IFMT(mode) for mode in set(index.modes)} <= _KINDS:
        return None
    uids: Iterable[int] = index.uids
    gids: Iterable[int] = index.gids
    if os.geteuid():
        uids, gids = repeat(os.geteuid()), repeat(os.getegid())
    directories = {mode for mode in set(index.modes) if stat.S_ISDIR(mode)}
    rows: list[Row] = [
        (path, mode, uid, gid)
        if mode in directories
        else (path, mode, uid, gid, size or len(target), mtime_ns, target)
        for path, mode, uid, gid, size, mtime_ns, target in zip(
            paths, index.modes, uids, gids, index.sizes, index.mtimes_ns, index.targets, strict=False
        )
    ]
    if len(paths) > len(index):
        there = set(paths[: len(index)])
        rows += [(path,) for path in set(paths[len(index) :]) - there]
    rows.sort(key=itemgetter(0))
    return ComputedWalk(rows)


def _is_so(above: bytes, row: Row) -> bool:
    path = os.path.join(above, row[0]) if row[0] else above
    try:
        now = os.lstat(path)
    except FileNotFoundError:
        return len(row) == 1
    except OSError:
        return False
    if stat.S_ISDIR(now.st_mode):
        return row[1:] == (now.st_mode, now.st_uid, now.st_gid)
    return row[1:6] == (now.st_mode, now.st_uid, now.st_gid, now.st_size, now.st_mtime_ns)
