"""The names that set-up commands have used, each with its state at the first access. Stdlib only."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from typing import Any

from bootseer.env.reads.name_filter import SETTINGS, NameFilter
from bootseer.env.reads.watch_rules import Rules

MAX_TOUCHED = 50_000  # recorded names
MAX_NAMES = 20_000  # of one directory that is listed
# smaller files are hashed at the first access, so that their state at that time is known
MAX_HASHED_BYTES = 1 << 20


class _AccessedName:
    """A recorded name, and its state at the first access."""

    __slots__ = ("digest", "links", "names", "ops", "was")

    def __init__(self, was: list[int] | None) -> None:
        self.was = was  # kind and mode, inode, size, mtime and ctime in ns; None: missing
        self.ops = ""
        self.digest = ""  # SHA-256 of a small file that was read
        self.names: list[str] | None = None  # of a listed directory; names of directories end in a slash
        self.links = ""


class NameRecords:
    """Records accesses; a name that the commands have made is not recorded."""

    def __init__(self, rules: Rules, names: NameFilter, miss: Callable[[str], object]) -> None:
        """Args: miss: called with the reason if the record becomes incomplete."""
        self._rules = rules
        self._names = names
        self._miss = miss
        self._touched: dict[bytes, _AccessedName] = {}
        self.made: set[bytes] = set()

    def touch(self, thread: int, path: bytes, op: str) -> None:
        """Record an access. Args: op: its kind, one letter (make_list.py)."""
        place = self._names.place(thread, path)
        if place is None:
            return
        found = self._touched.get(place)
        if found is None:
            made = self._made_above(place)
            if made:
                real = os.path.realpath(place)
                if os.path.islink(made) and real != place and not self._made_above(real):
                    self.touch(thread, real, op)  # the commands have made only the link
                return
            was = state_of(place, follow=op != "k")
            if self._is_private_temporary(place, was is not None):
                return
            if len(self._touched) >= MAX_TOUCHED:
                self._miss(f"more than {MAX_TOUCHED} names were looked up")
                return
            found = self._touched[place] = _AccessedName(was)
        elif op not in found.ops and self._made_above(place) and not (op == "r" and "a" in found.ops):
            return  # by now it contains what the commands wrote
        if op in found.ops:
            return
        found.ops += op
        if op in "ra" and not found.digest and found.was is not None and stat.S_ISREG(found.was[0]):
            self._hash(place, found)
        elif op == "n":
            self._take_names(place, found)
        elif op == "k":
            try:
                found.links = os.fsdecode(os.readlink(place))
            except OSError:
                found.links = ""

    def touched(self) -> dict[str, dict[str, Any]]:
        """Return the accessed names, in a form for JSON."""
        return {
            os.fsdecode(path): {
                "ops": found.ops,
                "was": found.was,
                "digest": found.digest,
                "names": found.names,
                "links": found.links,
            }
            for path, found in self._touched.items()
        }

    def _is_private_temporary(self, path: bytes, is_there: bool) -> bool:
        """Return whether a name in a temporary directory is private to a program: missing, or made just now."""
        temporary = max((each for each in self._rules.temporary if path.startswith(each)), key=len, default=b"")
        if not temporary or (self._names.is_inside(path) and not self._names.is_inside(temporary[:-1])):
            return False  # the working directory is in a temporary one, not the reverse
        if not is_there:
            return not self._names.is_above(path) and not path.endswith(SETTINGS)
        if self._rules.makes:
            return False  # its creation would have been reported
        top = temporary + path[len(temporary) :].partition(b"/")[0]
        return os.lstat(top).st_ctime_ns >= self._rules.began_ns

    def _hash(self, path: bytes, found: _AccessedName) -> None:
        assert found.was is not None
        if found.was[2] > MAX_HASHED_BYTES:
            return
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb", buffering=0) as file:
            found.digest = hashlib.file_digest(file, "sha256").hexdigest()

    def _take_names(self, path: bytes, found: _AccessedName) -> None:
        names = []
        with os.scandir(path) as entries:
            for entry in entries:
                if os.path.join(path, entry.name) not in self.made:
                    end = "/" if entry.is_dir(follow_symlinks=False) else ""
                    names.append(os.fsdecode(entry.name) + end)
                if len(names) > MAX_NAMES:
                    self._miss(f"{os.fsdecode(path)} has more than {MAX_NAMES} names")
                    break
        found.names = sorted(names)

    def make(self, thread: int, path: bytes) -> None:
        """Record that the commands create or replace a name."""
        place = self._names.place(0, path, thread)
        if place is not None and not self._made_above(place):
            self.made.add(place)

    def _made_above(self, path: bytes) -> bytes:
        """Return the name, or its nearest parent directory, that the commands have made; b"" for none."""
        made = self.made
        while len(path) > 1:
            if path in made:
                return path
            path = path.rpartition(b"/")[0]
        return b""


def state_of(path: bytes, *, follow: bool = True) -> list[int] | None:
    """Return kind and mode, inode, size, mtime and ctime in ns; None if it is missing."""
    try:
        info = os.stat(path, follow_symlinks=follow)
    except OSError:
        return None
    return [info.st_mode, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns]
