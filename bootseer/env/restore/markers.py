"""Markers: the environment of a target on this node, as a restore or set-up of this user left it.

    CACHE/env/there/<sha256 of the target's path>.json       the marker
                    <sha256 of the target's path>.paths      names that it covers, zstd
                    <sha256 of the target's path>.unclean    set-up has begun there, and did not succeed

A marker is valid if the target is unchanged: type, owner, mode, size and time of each name of the environment, and
the installed distributions. Times of directories do not count, nor do files that programs add (bytecode, caches).
After a reboot it is valid only if the files were on disk when it was written.

A set-up that fails or is killed can leave files that belong to no distribution. No key contains them, and no
difference on top of them does. So a record is written before set-up begins.
"""

from __future__ import annotations

import hashlib
import marshal
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from bootseer import cache_folder as folders
from bootseer.blocks.presence import read_boot_id
from bootseer.blocks.tree_files import write_whole
from bootseer.env.reads.read_list import Reads
from bootseer.errors import IntegrityError
from bootseer.linux.files import read_regular, replace_file
from bootseer.linux.page_cache import is_remote
from bootseer.storage.os_errors import map_os_errors
from bootseer.tree.compression import compress, decompress

FORMAT = "bootseer-env-there/2"
UNCLEAN_FORMAT = "bootseer-env-unclean/1"
DIRECTORY = ("env", "there")
MAX_MARKER_BYTES = 16 << 20
MAX_PATHS_BYTES = 256 << 20
# The names of these entries show which distributions are installed.
_INSTALLED = re.compile(rb"[^/]*\.(dist-info|egg-info|egg-link|pth)")


# Path, mode, owner, group; size, time and target, except for directories. Only the path: the name does not exist.
Row = tuple[Any, ...]


class Entry(Protocol):
    """The attributes of a name, as of bootseer.env.capture.walk."""

    @property
    def mode(self) -> int: ...
    @property
    def uid(self) -> int: ...
    @property
    def gid(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def mtime_ns(self) -> int: ...
    @property
    def ctime_ns(self) -> int: ...
    @property
    def target(self) -> bytes: ...


class Marker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The environment of a target."""

    format: str = FORMAT
    target: str
    key: str
    tree: str  # digest
    base: dict[str, str] = {}  # of the key document: the state before set-up
    reads: Reads | None = None  # from which the key is made; None: unknown
    expires_s: float | None = None  # since the epoch; None: never
    walk_sha256: str = ""  # of `digest_of`
    boot: str = ""  # in which it was written
    is_durable: bool = False  # the files were on disk by then


class Unclean(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The record of a set-up that has begun at a target: until it succeeds, the state of the target is unknown."""

    format: str = UNCLEAN_FORMAT
    target: str
    before_sha256: str  # of the old state, as `digest_before`; "": it could not be read
    newest_ns: int  # the last change of its old files, by the clock of its file system; 0: it was empty
    is_over: bool = False  # a later set-up has succeeded, on top of the leftovers of this one


def digest_before(walk: Mapping[bytes, Entry]) -> str:
    """Return the digest of all files in a target except bytecode, which each program writes."""
    found = {path: entry for path, entry in walk.items() if path and b"__pycache__" not in path.split(b"/")}
    return digest_of(found)


def is_clean(unclean: Unclean, walk: Mapping[bytes, Entry]) -> bool:
    """PURE: return whether no leftovers exist: the target is as before, or empty, or was recreated since."""
    oldest_ns = min((entry.ctime_ns for path, entry in walk.items() if path), default=None)
    if oldest_ns is None or digest_before(walk) == unclean.before_sha256:
        return True
    return 0 < unclean.newest_ns < oldest_ns


def digest_of(walk: Mapping[bytes, Entry], paths: Iterable[bytes] | None = None) -> str:
    """Return the digest of a target. `paths`: the names to cover, existing or not; by default the whole walk."""
    if paths is None:
        chosen = sorted(walk)
    else:
        installed = {path for path in walk if _INSTALLED.fullmatch(path.rpartition(b"/")[2])}
        chosen = sorted(installed.union(paths))
    rows: list[Row] = []
    for path in chosen:
        entry = walk.get(path)
        if entry is None:
            rows.append((path,))
        elif stat.S_ISDIR(entry.mode):
            rows.append((path, entry.mode, entry.uid, entry.gid))
        else:
            size, mtime_ns = entry.size, entry.mtime_ns
            rows.append((path, entry.mode, entry.uid, entry.gid, size, mtime_ns, entry.target))
    return digest_of_rows(rows)


def digest_of_rows(rows: list[Row]) -> str:
    """Return the digest of rows that are sorted by path."""
    # Version 2 of marshal has no references: equal rows give equal bytes, ten times as fast as by formatting.
    return hashlib.sha256(marshal.dumps(rows, 2)).hexdigest()


class Markers:
    """The markers of this user on this node."""

    def __init__(self, folder: str, *, boot: str | None = None) -> None:
        """`folder`: for this user alone; see `open_markers`."""
        self.folder = folder
        self.boot = read_boot_id() if boot is None else boot

    def read(self, target: str) -> Marker | None:
        """Read the marker of a target, without checking the target; None if there is no valid one."""
        data = self._read(self._name(target) + ".json", MAX_MARKER_BYTES)
        if data is None:
            return None
        try:
            marker = msgspec.json.decode(data, type=Marker)
        except msgspec.MsgspecError:
            return None
        if marker.format != FORMAT or marker.target != target:
            return None
        is_of_boot = bool(marker.boot) and marker.boot == self.boot
        return marker if marker.is_durable or is_of_boot else None

    def made_s(self, target: str) -> float:
        """Return when the environment of a target was made, since the epoch; 0 if there is no marker."""
        try:
            return os.stat(os.path.join(self.folder, self._name(target) + ".json")).st_mtime
        except OSError:
            return 0.0

    def date(self, target: str, made_s: float) -> None:
        """Record when it was made; the default is when the marker was written. Raises: StorageError."""
        with map_os_errors(self.folder):
            os.utime(os.path.join(self.folder, self._name(target) + ".json"), (made_s, made_s))

    def is_there(self, marker: Marker, walk: Mapping[bytes, Entry]) -> bool:
        """Return whether a fresh walk of the target agrees with the marker."""
        paths = self._paths(marker)
        return paths is not None and digest_of(walk, paths) == marker.walk_sha256

    def write(self, marker: Marker, found: Mapping[bytes, Entry] | str, paths: Sequence[bytes]) -> Marker:
        """Complete and write a marker, and return it.

        Args:
            found: a walk of the target, or `digest_of` one with these paths.
            paths: the names in the tree, including those that it deletes.
        Raises: StorageError.
        """
        walk_sha256 = found if isinstance(found, str) else digest_of(found, paths)
        made = msgspec.structs.replace(marker, walk_sha256=walk_sha256, boot=self.boot)
        with map_os_errors(self.folder):
            folders.make_private_dir(self.folder)
            # The names first: a marker without them is not valid.
            name = self._name(marker.target)
            seal = made.walk_sha256.encode()
            self._put(name + ".paths", compress(seal + b"\0" + b"\0".join(paths)))
            self._put(name + ".json", msgspec.json.encode(made))
        return made

    def make_durable(self, marker: Marker) -> None:
        """Record that the files are on disk. A marker that was replaced meanwhile is not changed."""
        if self.read(marker.target) == marker:
            made_s = self.made_s(marker.target)
            with map_os_errors(self.folder):
                durable = msgspec.structs.replace(marker, is_durable=True)
                write_whole(self.folder, self._name(marker.target) + ".json", msgspec.json.encode(durable))
            self.date(marker.target, made_s)

    def remove(self, target: str) -> None:
        """Remove the marker, before the target is changed. Raises: StorageError."""
        with map_os_errors(self.folder):
            for suffix in (".json", ".paths"):
                try:
                    os.unlink(os.path.join(self.folder, self._name(target) + suffix))
                except FileNotFoundError:
                    pass

    def paths(self, marker: Marker) -> list[bytes] | None:
        """Return the names that a marker covers; None if they are not known."""
        return self._paths(marker)

    # ---- set-up that has begun ---------------------------------------------------------------------------------

    def unclean(self, target: str) -> Unclean | None:
        """Read the record of a set-up at a target. An unreadable one counts as a record of an unknown state."""
        name = self._name(target) + ".unclean"
        if not os.path.lexists(os.path.join(self.folder, name)):
            return None
        try:
            found = msgspec.json.decode(self._read(name, MAX_MARKER_BYTES) or b"", type=Unclean)
        except msgspec.MsgspecError:
            found = None
        if found is None or found.format != UNCLEAN_FORMAT or found.target != target:
            return Unclean(target=target, before_sha256="", newest_ns=0)
        return found

    def begin(self, target: str, walk: Mapping[bytes, Entry] | None) -> None:
        """Record that set-up begins; synced to disk. Args: walk: a fresh one; None: the target cannot be read.

        The record of an earlier set-up that left files is kept. Raises: StorageError.
        """
        earlier = self.unclean(target)
        if earlier is not None and (walk is None or not is_clean(earlier, walk)):
            made = msgspec.structs.replace(earlier, is_over=False)
        else:
            newest_ns = max((entry.ctime_ns for path, entry in (walk or {}).items() if path), default=0)
            before = "" if walk is None else digest_before(walk)
            made = Unclean(target=target, before_sha256=before, newest_ns=newest_ns)
        self._put_unclean(made)

    def doubt(self, target: str, walk: Mapping[bytes, Entry]) -> None:
        """Record that the state is unknown until the target is recreated. `walk`: fresh. Raises: StorageError."""
        newest_ns = max((entry.ctime_ns for path, entry in walk.items() if path), default=0)
        self._put_unclean(Unclean(target=target, before_sha256="", newest_ns=newest_ns))

    def end(self, target: str, *, is_clean: bool) -> None:
        """Record that set-up has succeeded. `is_clean`: from the state in its key. Raises: StorageError."""
        if is_clean:
            with map_os_errors(self.folder):
                try:
                    os.unlink(os.path.join(self.folder, self._name(target) + ".unclean"))
                except FileNotFoundError:
                    pass
        else:
            found = self.unclean(target)
            if found is not None:
                self._put_unclean(msgspec.structs.replace(found, is_over=True))

    def _put_unclean(self, unclean: Unclean) -> None:
        with map_os_errors(self.folder):
            folders.make_private_dir(self.folder)
            write_whole(self.folder, self._name(unclean.target) + ".unclean", msgspec.json.encode(unclean))

    # ---- files -----------------------------------------------------------------------------------------------

    def _name(self, target: str) -> str:
        return hashlib.sha256(os.fsencode(target)).hexdigest()

    def _paths(self, marker: Marker) -> list[bytes] | None:
        data = self._read(self._name(marker.target) + ".paths", MAX_PATHS_BYTES)
        if data is None:
            return None
        try:
            seal, *paths = decompress(data, MAX_PATHS_BYTES, self.folder).split(b"\0")
        except IntegrityError:
            return None
        return paths if seal == marker.walk_sha256.encode() else None

    def _read(self, name: str, max_bytes: int) -> bytes | None:
        return read_regular(os.path.join(self.folder, name), max_bytes, is_own=True)

    def _put(self, name: str, data: bytes) -> None:
        """Write a file atomically, without a sync: a marker that is not durable is invalid after a power cut."""
        replace_file(os.path.join(self.folder, name), data)


def open_markers(environ: Mapping[str, str], target: str = "") -> Markers:
    """Open the markers in the cache of this user, which is verified to be private.

    Args: target: all nodes with the same cache share the markers of a target on a network file system.
    Raises: ConfigError, StorageError.
    """
    base = folders.locate(environ, os.geteuid())
    if target and is_remote(target) and is_remote(base):
        return Markers(os.path.join(folders.prepare(base, node="shared"), *DIRECTORY))
    return Markers(os.path.join(folders.prepare(base), *DIRECTORY))
