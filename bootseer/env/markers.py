"""Markers: which environment a target has on this node, as this user's restore or set-up left it.

    CACHE/env/there/<sha256 of the target's path>.json       the marker
                    <sha256 of the target's path>.paths      names that it answers for, zstd
                    <sha256 of the target's path>.unclean    set-up has begun there, and did not end well

A marker counts if the target is still as it was then: by type, owner, mode, size and time of each name that the
environment has, and by the distributions that are installed. Times of folders do not count, nor what programs
write beside (bytecode, caches). After another boot it counts only if the files were on disk when it was written.

What set-up leaves that fails half way, or is killed, need not be a distribution: no key speaks of it, and no
difference that is made on top of it has it. So it is written down before set-up begins.
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
from bootseer.blocks.present import read_boot_id
from bootseer.blocks.tree_files import write_whole
from bootseer.env.reads import Reads
from bootseer.errors import IntegrityError
from bootseer.storage.os_errors import map_os_errors
from bootseer.storage.page_cache import is_remote
from bootseer.tree.compression import compress, decompress

FORMAT = "bootseer-env-there/2"
UNCLEAN_FORMAT = "bootseer-env-unclean/1"
FOLDER = ("env", "there")
MOST_MARKER_BYTES = 16 << 20
MOST_PATHS_BYTES = 256 << 20
# Whatever else is in a target: what these say is installed.
_INSTALLED = re.compile(rb"[^/]*\.(dist-info|egg-info|egg-link|pth)")


# Of a name: its path, mode, owner and group; size, time and target of what is no folder. Only the path: not there.
Row = tuple[Any, ...]


class Entry(Protocol):
    """What bootseer.env.walk tells of a name."""

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
    """What a target has."""

    format: str = FORMAT
    target: str
    key: str
    tree: str  # digest
    base: dict[str, str] = {}  # of the key document: what set-up began with
    reads: Reads | None = None  # by which the key is made; None: nobody knows any more
    expires_s: float | None = None  # since the epoch; None: never
    walk_sha256: str = ""  # of `digest_of`
    boot: str = ""  # in which it was written
    is_durable: bool = False  # the files were on disk by then


class Unclean(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Set-up has begun at a target: until it has ended well nobody knows what is there."""

    format: str = UNCLEAN_FORMAT
    target: str
    before_sha256: str  # of what was there, as `digest_before`; "": nobody could look
    newest_ns: int  # the last change of anything that was in it, by the clock of its file system; 0: it was empty
    is_over: bool = False  # a later set-up has ended well: on top of what this one left


def digest_before(walk: Mapping[bytes, Entry]) -> str:
    """Of all that is in a target, but not of bytecode: each program that runs there writes some."""
    found = {path: entry for path, entry in walk.items() if path and b"__pycache__" not in path.split(b"/")}
    return digest_of(found)


def is_clean(unclean: Unclean, walk: Mapping[bytes, Entry]) -> bool:
    """PURE: whether nothing is left of it: the target is as it was, or empty, or was made anew since."""
    oldest_ns = min((entry.ctime_ns for path, entry in walk.items() if path), default=None)
    if oldest_ns is None or digest_before(walk) == unclean.before_sha256:
        return True
    return 0 < unclean.newest_ns < oldest_ns


def digest_of(walk: Mapping[bytes, Entry], paths: Iterable[bytes] | None = None) -> str:
    """What counts of a target. Args: paths: the names that count, there or not; by default all of the walk."""
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
    """The same of what counts of each name, sorted by path."""
    # Version 2 of marshal has no references: equal rows give equal bytes, ten times as fast as by formatting.
    return hashlib.sha256(marshal.dumps(rows, 2)).hexdigest()


class Markers:
    """Those of this user on this node."""

    def __init__(self, folder: str, *, boot: str | None = None) -> None:
        """`folder`: for this user alone; see `open_markers`."""
        self.folder = folder
        self.boot = read_boot_id() if boot is None else boot

    def read(self, target: str) -> Marker | None:
        """The marker of a target, whether or not the target is still like that; None for one that cannot count."""
        data = self._read(self._name(target) + ".json", MOST_MARKER_BYTES)
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
        """When the environment of a target was made, since the epoch; 0 if there is no marker."""
        try:
            return os.stat(os.path.join(self.folder, self._name(target) + ".json")).st_mtime
        except OSError:
            return 0.0

    def date(self, target: str, made_s: float) -> None:
        """Notes when it was made: by default when the marker was written. Raises: StorageError."""
        with map_os_errors(self.folder):
            os.utime(os.path.join(self.folder, self._name(target) + ".json"), (made_s, made_s))

    def is_there(self, marker: Marker, walk: Mapping[bytes, Entry]) -> bool:
        """Whether the target, as it was walked just now, is still what the marker says."""
        paths = self._paths(marker)
        return paths is not None and digest_of(walk, paths) == marker.walk_sha256

    def write(self, marker: Marker, found: Mapping[bytes, Entry] | str, paths: Sequence[bytes]) -> Marker:
        """The marker, completed and kept.

        Args:
            found: a walk of the target, or `digest_of` one with these paths.
            paths: the names in the tree, those that it deletes too.
        Raises: StorageError.
        """
        walk_sha256 = found if isinstance(found, str) else digest_of(found, paths)
        made = msgspec.structs.replace(marker, walk_sha256=walk_sha256, boot=self.boot)
        with map_os_errors(self.folder):
            folders.make_private(self.folder)
            # The names first: a marker without its own counts for nothing.
            name = self._name(marker.target)
            seal = made.walk_sha256.encode()
            self._put(name + ".paths", compress(seal + b"\0" + b"\0".join(paths)))
            self._put(name + ".json", msgspec.json.encode(made))
        return made

    def make_durable(self, marker: Marker) -> None:
        """To be called when the files are on disk. One that was replaced meanwhile stays as it is."""
        if self.read(marker.target) == marker:
            made_s = self.made_s(marker.target)
            with map_os_errors(self.folder):
                durable = msgspec.structs.replace(marker, is_durable=True)
                write_whole(self.folder, self._name(marker.target) + ".json", msgspec.json.encode(durable))
            self.date(marker.target, made_s)

    def remove(self, target: str) -> None:
        """Before the target is changed. Raises: StorageError."""
        with map_os_errors(self.folder):
            for suffix in (".json", ".paths"):
                try:
                    os.unlink(os.path.join(self.folder, self._name(target) + suffix))
                except FileNotFoundError:
                    pass

    def paths(self, marker: Marker) -> list[bytes] | None:
        """The names that it answers for; None where they are not known."""
        return self._paths(marker)

    # ---- set-up that has begun ---------------------------------------------------------------------------------

    def unclean(self, target: str) -> Unclean | None:
        """What was written down of a target. What cannot be read counts, as if nothing had been known before."""
        name = self._name(target) + ".unclean"
        if not os.path.lexists(os.path.join(self.folder, name)):
            return None
        try:
            found = msgspec.json.decode(self._read(name, MOST_MARKER_BYTES) or b"", type=Unclean)
        except msgspec.MsgspecError:
            found = None
        if found is None or found.format != UNCLEAN_FORMAT or found.target != target:
            return Unclean(target=target, before_sha256="", newest_ns=0)
        return found

    def begin(self, target: str, walk: Mapping[bytes, Entry] | None) -> None:
        """Before set-up: on disk when it returns. Args: walk: of just now; None: nobody could look.

        What an earlier one has left stays written down. Raises: StorageError.
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
        """Nobody knows what is there, until it is made anew. Args: walk: of just now. Raises: StorageError."""
        newest_ns = max((entry.ctime_ns for path, entry in walk.items() if path), default=0)
        self._put_unclean(Unclean(target=target, before_sha256="", newest_ns=newest_ns))

    def end(self, target: str, *, is_clean: bool) -> None:
        """Set-up has ended well. Args: is_clean: it began with what its key says. Raises: StorageError."""
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
            folders.make_private(self.folder)
            write_whole(self.folder, self._name(unclean.target) + ".unclean", msgspec.json.encode(unclean))

    # ---- files -----------------------------------------------------------------------------------------------

    def _name(self, target: str) -> str:
        return hashlib.sha256(os.fsencode(target)).hexdigest()

    def _paths(self, marker: Marker) -> list[bytes] | None:
        data = self._read(self._name(marker.target) + ".paths", MOST_PATHS_BYTES)
        if data is None:
            return None
        try:
            seal, *paths = decompress(data, MOST_PATHS_BYTES, self.folder).split(b"\0")
        except IntegrityError:
            return None
        return paths if seal == marker.walk_sha256.encode() else None

    def _read(self, name: str, most_bytes: int) -> bytes | None:
        try:
            fd = os.open(
                os.path.join(self.folder, name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            )
            with open(fd, "rb") as file:
                status = os.fstat(fd)
                if status.st_uid != os.geteuid() or status.st_mode & 0o022 or not stat.S_ISREG(status.st_mode):
                    return None
                data = file.read(most_bytes + 1)
        except OSError:
            return None
        return data if len(data) <= most_bytes else None

    def _put(self, name: str, data: bytes) -> None:
        """Whole or not at all, but not synced: after a power cut a marker that is not durable does not count."""
        path = os.path.join(self.folder, name)
        temporary = f"{path}.{os.getpid()}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(temporary, flags, 0o600), "wb") as file:
            file.write(data)
        os.replace(temporary, path)


def open_markers(environ: Mapping[str, str], target: str = "") -> Markers:
    """In the cache of this user, which is checked to be his alone.

    Args: target: markers of one on a network file system are those of all nodes that have the same cache.
    Raises: ConfigError, StorageError.
    """
    base = folders.locate(environ, os.geteuid())
    if target and is_remote(target) and is_remote(base):
        return Markers(os.path.join(folders.prepare(base, node="shared"), *FOLDER))
    return Markers(os.path.join(folders.prepare(base), *FOLDER))
