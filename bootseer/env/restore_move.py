"""Unpacked files get into their targets, by renames that are written down before (apply.py), and are marked there.

In: parts, one for each target, whose files lie beside it. Out: all targets have their environment, or none has.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property

import msgspec

from bootseer.blocks.present import read_boot_id
from bootseer.env import apply_journal
from bootseer.env.apply import HalfChangedError, Moving, fill_journal, finish
from bootseer.env.apply_journal import Journal
from bootseer.env.known_folder import KnownFolder, known_folder
from bootseer.env.markers import Marker, Markers, open_markers
from bootseer.env.on_disk import NOTHING, identity
from bootseer.env.restore_call import Call
from bootseer.env.restore_there import paths_of
from bootseer.env.staging import Claim, Staging
from bootseer.env.subtree import Subtree
from bootseer.env.walk import walk
from bootseer.storage.os_errors import map_os_errors
from bootseer.storage.page_cache import is_remote


def move(call: Call, parts: Sequence[Part]) -> None:
    """All targets, or none. From the first journal on a killed run is completed by the next one."""
    for part in parts:
        _markers(call, part).remove(part.claim.target)
        part.prepare(_marker(call, part))
    done: list[Part] = []
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


def _mark(call: Call, part: Part) -> None:
    """A target that has just got its environment."""
    target, markers, marker = part.claim.target, _markers(call, part), _marker(call, part)
    if part.claim.is_fresh and not call.skipped and not call.moves():
        known = part.known
        if known is not None and known.is_as_known(target):
            markers.write(marker, known.sha256, part.paths)
            return
    markers.write(marker, walk(target), part.paths)


def _markers(call: Call, part: Part) -> Markers:
    return open_markers(call.environ, part.claim.target)


def _marker(call: Call, part: Part) -> Marker:
    target = part.claim.target
    return Marker(
        target=target,
        key=call.snapshot.key,
        tree=call.snapshot.tree,
        base=call.base,
        reads=call.reads,
        expires_s=call.snapshot.expires_s,
        is_durable=is_remote(target),  # a server has what was closed
    )


class Part:
    """One target, from unpacked files to moved ones."""

    def __init__(self, claimed: Claim, below: Subtree) -> None:
        self.claim, self.below = claimed, below
        self.staging: Staging | None = None
        self._moving: Moving | None = None
        self._is_shown = False
        self.is_kept = False  # what it has staged is still needed when this process is done
        self._written_down: Staging | None = None  # where its journal is

    @cached_property
    def paths(self) -> list[bytes]:
        """All names that the tree says something about."""
        return paths_of(self.below)

    @cached_property
    def known(self) -> KnownFolder | None:
        """What is there when only the tree is."""
        return known_folder(self.below.tree, self.paths)

    def look_ahead(self, call: Call) -> None:
        """Does meanwhile what is needed when all is there."""
        _ = self.paths
        if self.claim.is_fresh:
            with map_os_errors(self.staged.folder):
                apply_journal.write_ahead(self.staged.fd, self._journal(_marker(call, self)))
            self._written_down = self.staged
            _ = self.known

    def prepare(self, marker: Marker) -> None:
        """Writes down what is to be done."""
        with map_os_errors(self.staged.folder):
            if self._written_down is self.staged:
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
            self._moving = Moving(journal, claimed.target_fd, staging.fd)
            return journal
        return msgspec.structs.replace(journal, place=identity(staging.tree_fd) or NOTHING)

    def carry_out(self) -> None:
        if self._moving is None:
            self.claim.show(self.staged)
            self._is_shown = self.is_kept = True
            return
        self.is_kept = True  # what the target had
        try:
            self._moving.carry_out()
        except HalfChangedError:
            raise
        except BaseException:  # it was undone
            self.is_kept = False
            raise

    def undo(self) -> None:
        if self._moving is not None:
            self._moving.undo()
        elif self._is_shown:
            self.claim.hide(self.staged)
        self.is_kept = False

    def end(self) -> None:
        """All is moved. Until it is on disk the next start can undo it."""
        if is_remote(self.claim.target):  # a server has what was closed
            self.forget()
            self.is_kept = False
            return
        with map_os_errors(self.staged.folder):
            apply_journal.end(self.staged.fd)

    def forget(self) -> None:
        """There is nothing to complete any more."""
        finish(self.staged.fd, self.claim.target)

    @property
    def staged(self) -> Staging:
        assert self.staging is not None, "it is unpacked first"
        return self.staging
