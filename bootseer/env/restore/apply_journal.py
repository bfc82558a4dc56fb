"""The journal of changes to a target, written before the first one, so that a killed run is completed or undone.

It is one JSON file in the staging directory, on disk before the first step. Its name is `journal` during the
moves, and `done` when all moves are made but the new files may not be on disk yet. The files themselves show
whether a step is done, so nothing is written between steps. After a reboot the new files may be empty: then the
steps are undone. Only this user's own journals are read, with bounds: paths stay below the target.

The journal of a new target can be written early (`journal.new`), so that its fsync overlaps with other writes. Its
last name need not be on disk before the only step: after a reboot the identity of the target shows whether the
step was made.
"""

from __future__ import annotations

import os
import stat
from typing import Any

import msgspec

from bootseer.blocks.tree_files import write_at
from bootseer.env.restore.apply_plan import StepKind
from bootseer.env.restore.markers import Marker
from bootseer.env.restore.on_disk import NOTHING, Identity, sync_names
from bootseer.errors import IntegrityError

READY, NAME, DONE = b"journal.new", b"journal", b"done"
FORMAT = "bootseer-env-journal/2"
MAX_BYTES = 256 << 20


class Attributes(msgspec.Struct, frozen=True, array_like=True):
    mode: int  # permissions
    uid: int
    gid: int
    mtime_ns: int


class Move(msgspec.Struct, frozen=True, array_like=True):
    """A step, and the identity that shows whether it was made."""

    kind: StepKind
    path: bytes
    comes: Identity = NOTHING  # of the new entry


class MergedDirectory(msgspec.Struct, frozen=True, array_like=True):
    path: bytes
    before: Attributes
    after: Attributes


class Journal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: str = FORMAT
    target: str
    boot: str  # in which it was written
    is_fresh: bool = False  # the target did not exist: one rename makes it
    place: Identity = NOTHING  # of the target, or of the directory that becomes the target
    has_owners: bool  # owners are set too, not only modes and times
    moves: list[Move]
    folders: list[MergedDirectory]  # parents first; the target itself first of all
    marker: Marker  # written when all is done
    paths: list[bytes]  # that the marker covers, "" for the target itself


def write(fd: int, journal: Journal) -> None:
    """Write a journal atomically to an open staging directory, and sync it. Raises: OSError."""
    _write(fd, journal)
    begin(fd)
    sync_names(fd)


def write_ahead(fd: int, journal: Journal) -> None:
    """Write the journal of a fresh target before its files exist; the caller calls `begin` when they do."""
    assert journal.is_fresh
    _write(fd, journal)
    sync_names(fd)


def begin(fd: int) -> None:
    """Make the journal valid: from now on a killed run is completed. Raises: OSError."""
    os.rename(READY, NAME, src_dir_fd=fd, dst_dir_fd=fd)


def _write(fd: int, journal: Journal) -> None:
    data = msgspec.json.encode(journal)
    file = os.open(READY, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=fd)
    try:
        write_at(file, data, 0)
        os.fsync(file)
    finally:
        os.close(file)


def read(fd: int, where: str, name: bytes = NAME) -> Journal | None:
    """Read a journal; None if there is none, so nothing was moved. Raises: IntegrityError; OSError."""
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
    except FileNotFoundError:
        return None
    with open(file, "rb") as opened:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
            raise IntegrityError(f"{where}: is not a journal")
        data = opened.read(MAX_BYTES)
    try:
        journal = msgspec.json.decode(data, type=Journal)
    except msgspec.MsgspecError as error:
        raise IntegrityError(f"{where}: invalid journal: {error}") from error
    paths = [move.path for move in journal.moves] + [
        directory.path for directory in journal.folders if directory.path
    ]
    if journal.format != FORMAT or not all(map(_is_inside, paths)):
        raise IntegrityError(f"{where}: is not a journal of this version")
    return journal


def read_ahead(fd: int, where: str) -> Journal | None:
    """Return the journal of `write_ahead`, or None if it is missing or incomplete. Raises: OSError."""
    try:
        return read(fd, where, READY)
    except IntegrityError:
        return None  # a killed run was writing it


def end(fd: int) -> None:
    """Record that all moves are made; the old files are kept until the new ones are synced. Raises: OSError."""
    os.rename(NAME, DONE, src_dir_fd=fd, dst_dir_fd=fd)


def remove(fd: int) -> None:
    """Remove the journal: the target is complete. Raises: OSError."""
    for name in (READY, NAME, DONE):
        try:
            os.unlink(name, dir_fd=fd)
        except FileNotFoundError:
            pass


def attributes_of(status: Any) -> Attributes:
    """Return the attributes of a stat result."""
    return Attributes(stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, status.st_mtime_ns)


def _is_inside(path: bytes) -> bool:
    return all(name not in (b"", b".", b"..") and b"\0" not in name for name in path.split(b"/"))
