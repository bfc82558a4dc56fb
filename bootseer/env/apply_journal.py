"""What is being done to a target, written down before it is begun: a run that was killed is completed, or undone.

One JSON file in the staging folder, on disk before the first step: `journal` while moves are under way, `done`
when all were made but the new files may not be on disk yet. Each step can be seen to be done or not by what lies
where, so nothing is written between steps. After another boot of the machine the new files may be empty: then the
steps are undone. Only this user's own journals are read, and still with bounds: paths stay below the target.

That a new target is to be made can be written down long before (`journal.new`), so that the disk is waited for
while others write. Then its last name need not be on disk before the one step there is: after another boot the
target tells by its identity whether the step was taken.
"""

from __future__ import annotations

import os
import stat
from typing import Any

import msgspec

from bootseer.blocks.tree_files import write_at
from bootseer.env.apply_plan import Kind
from bootseer.env.markers import Marker
from bootseer.env.on_disk import NOTHING, Identity, sync_names
from bootseer.errors import IntegrityError

READY, NAME, DONE = b"journal.new", b"journal", b"done"
FORMAT = "bootseer-env-journal/2"
MOST_BYTES = 256 << 20


class Attributes(msgspec.Struct, frozen=True, array_like=True):
    """Of a folder."""

    mode: int  # permissions
    uid: int
    gid: int
    mtime_ns: int


class Move(msgspec.Struct, frozen=True, array_like=True):
    """A step, and how to know what has become of it."""

    kind: Kind
    path: bytes
    comes: Identity = NOTHING  # of what is not there yet


class Folder(msgspec.Struct, frozen=True, array_like=True):
    """A folder that is merged."""

    path: bytes
    before: Attributes
    after: Attributes


class Journal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The moves of one target."""

    format: str = FORMAT
    target: str
    boot: str  # in which it was written
    is_fresh: bool = False  # there was no target: one rename makes it
    place: Identity = NOTHING  # of the target; of what becomes the target
    has_owners: bool  # owners are set, not only modes and times
    moves: list[Move]
    folders: list[Folder]  # parents first; the target itself first of all
    marker: Marker  # that is written when all is done
    paths: list[bytes]  # that it answers for, "" for the target itself


def write(fd: int, journal: Journal) -> None:
    """Into an open staging folder, whole or not at all, and on disk. Raises: OSError."""
    _write(fd, journal)
    begin(fd)
    sync_names(fd)


def write_ahead(fd: int, journal: Journal) -> None:
    """The same, of a fresh target, when its files are not there yet: `begin` is called when they are."""
    assert journal.is_fresh
    _write(fd, journal)
    sync_names(fd)


def begin(fd: int) -> None:
    """From now on a run that is killed is completed. Raises: OSError."""
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
    """None when there is none: nothing was moved. Raises: IntegrityError; OSError."""
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
    except FileNotFoundError:
        return None
    with open(file, "rb") as opened:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_BYTES:
            raise IntegrityError(f"{where}: is no journal")
        data = opened.read(MOST_BYTES)
    try:
        journal = msgspec.json.decode(data, type=Journal)
    except msgspec.MsgspecError as error:
        raise IntegrityError(f"{where}: cannot be understood: {error}") from error
    paths = [move.path for move in journal.moves] + [folder.path for folder in journal.folders if folder.path]
    if journal.format != FORMAT or not all(map(_is_inside, paths)):
        raise IntegrityError(f"{where}: is no journal of this version")
    return journal


def read_ahead(fd: int, where: str) -> Journal | None:
    """The one of `write_ahead`, if it is whole. Raises: OSError."""
    try:
        return read(fd, where, READY)
    except IntegrityError:
        return None  # it was being written


def end(fd: int) -> None:
    """All moves are made; what was there before is kept until the new files are on disk. Raises: OSError."""
    os.rename(NAME, DONE, src_dir_fd=fd, dst_dir_fd=fd)


def remove(fd: int) -> None:
    """With it gone the target is as it should be. Raises: OSError."""
    for name in (READY, NAME, DONE):
        try:
            os.unlink(name, dir_fd=fd)
        except FileNotFoundError:
            pass


def attributes_of(status: Any) -> Attributes:
    """Of a stat result."""
    return Attributes(stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, status.st_mtime_ns)


def _is_inside(path: bytes) -> bool:
    return all(name not in (b"", b".", b"..") and b"\0" not in name for name in path.split(b"/"))
