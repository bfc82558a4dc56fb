"""Making `Reads` from what was watched while set-up ran (setup_watch.py), and the states before set-up.

In: the watcher's report, a sample of this node that is taken now (current_state.py). Out: `SetupReads`. A name
that another process has changed since it was read is reported: the inputs of the result are unknown then.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from bootseer.env.reads import read_list as kinds
from bootseer.env.reads.current_state import ABSENT, DIRECTORY, OTHER, ReadStates, is_settings, kind_of, link_text
from bootseer.env.reads.read_list import MAX_READS, OBSERVED, Reads, label

MAX_TEXT_BYTES = 256 << 10
_WAS_UNKNOWN = "changed by set-up"


class SetupReads(NamedTuple):
    """What set-up has read."""

    reads: Reads
    states: dict[str, str]  # by label, as in the key
    changed: str  # the first name that another process has changed meanwhile; "" for none


class _Touched(NamedTuple):
    """A record of the watcher."""

    ops: str
    was: list[int] | None  # mode, inode, size, mtime and ctime in ns
    digest: str
    names: list[str] | None
    links: str


def why_unseen(report: Mapping[str, Any] | None) -> str:
    """PURE: return why the reads of set-up are unknown; "" if they are known."""
    if report is None:
        return "set-up was not watched"
    why = [str(each) for each in report.get("why", ())]
    return "; ".join(why[:3])


def make_reads(
    report: Mapping[str, Any], guess: str, now: ReadStates, texts: Iterable[str] = (), declared: Iterable[str] = ()
) -> SetupReads | str:
    """Return the reads of set-up, or why they are unknown.

    Args: guess: key of the first guess. texts: texts that may contain paths as the user means them. declared:
        names of files and directories that are part of the key anyway.
    Raises: KeyUnknown if they are too much to read at each start.
    """
    return _ReadsBuilder(report, guess, now, texts, declared).make()


class _ReadsBuilder:
    def __init__(
        self,
        report: Mapping[str, Any],
        guess: str,
        now: ReadStates,
        texts: Iterable[str],
        declared: Iterable[str],
    ) -> None:
        self._guess, self._now = guess, now
        self._touched = {
            path: _Touched(each["ops"], each["was"], each["digest"], each["names"], each["links"])
            for path, each in report["touched"].items()
        }
        self._made = set(report["made"])
        self._gits, self._cloned = report["gits"], report.get("cloned", ())
        self._above = set(_directories_above(now.cwd))
        self._texts = list(texts)
        self._declared = {now.path_of(name) for name in declared}
        self._has_read_texts = False
        self._was: dict[tuple[str, str], str] = {}
        self._left: dict[str, tuple[str, str]] = {}
        self._names_made: dict[str, list[str]] = {}
        self._changed = ""

    def make(self) -> SetupReads | str:
        found = {path: each for path, each in self._touched.items() if self._matters(path, each)}
        try:
            for path in found:
                path.encode()
        except UnicodeEncodeError:
            return "a name that set-up looks up is not UTF-8"
        made_in: dict[str, list[str]] = {}
        for path in self._made:
            directory, name = os.path.split(path)
            made_in.setdefault(directory, []).append(name)
        self._now.ignore(path for path, each in found.items() if "n" in each.ops)
        for path, each in sorted(found.items()):
            self._add(path, each, made_in.get(path, []))
        for directory in map(self._now.name_of, self._gits):
            self._was[directory, kinds.GIT] = self._now.state(directory, kinds.GIT)
        for directory in map(self._now.name_of, self._cloned):
            self._was[directory, kinds.REFS] = self._now.state(directory, kinds.REFS)
        if len(self._was) > MAX_READS:
            return f"set-up looks up more than {MAX_READS} names"
        reads = Reads(
            guess=self._guess,
            how=OBSERVED,
            is_placed=any(self._is_placed(path) for path in found),
            reads=sorted(self._was),
            made={name: sorted(names) for name, names in sorted(self._names_made.items())},
            left=dict(sorted(self._left.items())),
        )
        return SetupReads(reads, {label(*each): state for each, state in sorted(self._was.items())}, self._changed)

    # ---- relevant names --------------------------------------------------------------------------------------

    def _matters(self, path: str, touched: _Touched) -> bool:
        if path in self._declared or any(above in self._declared for above in _directories_above(path)):
            return False
        above = self._touched.get(os.path.dirname(path))
        if above is not None and above.was is None and touched.was is None:
            return False  # because its directory is missing
        if set(touched.ops) <= ({"x", "a"} if touched.was is None and not self._is_inside(path) else {"a"}):
            return False  # a program that was searched for in each directory, or a file that was only written
        if self._is_inside(path):
            return True
        is_folder = touched.was is not None and stat.S_ISDIR(touched.was[0])
        if os.path.dirname(path) in self._above:
            return not is_folder or "n" in touched.ops
        if set(touched.ops) & set("rn"):
            return not is_folder or "n" in touched.ops
        return is_settings(path) or (above is not None and "n" in above.ops)

    def _is_inside(self, path: str) -> bool:
        return path == self._now.cwd or self._now.cwd == "/" or path.startswith(self._now.cwd + "/")

    def _is_placed(self, path: str) -> bool:
        """Return whether the path may depend on the working directory: no text contains it, or a part of it."""
        if self._is_inside(path) or is_settings(path) or os.path.dirname(path) in self._above:
            return False
        if not self._has_read_texts:
            self._has_read_texts = True
            self._texts += filter(None, map(_text_of, filter(self._is_inside, self._touched)))
        while path.count("/") > 1:
            if any(path in text for text in self._texts):
                return False
            path = os.path.dirname(path)
        return True

    # ---- earlier states --------------------------------------------------------------------------------------

    def _add(self, path: str, touched: _Touched, made_in: list[str]) -> None:
        name, ops = self._now.name_of(path), touched.ops
        is_folder = touched.was is not None and stat.S_ISDIR(touched.was[0])
        is_file = touched.was is not None and stat.S_ISREG(touched.was[0])
        if (is_file or touched.was is None) and os.path.dirname(path) in self._above:
            self._compare(path, os.path.basename(path), kinds.ABOVE, touched)
            return
        if "n" in ops:
            if made_in:
                self._names_made[name] = made_in
            names = touched.names
            is_known = names is not None  # the names before other processes added some
            self._was[name, kinds.NAMES] = (
                self._now.names_state(path, names or (), made_in)
                if is_known
                else self._now.state(name, kinds.NAMES, made_in)
            )
        elif "i" in ops:
            self._was[name, kinds.MODULES] = self._now.state(name, kinds.MODULES)
        if "k" in ops and touched.links:
            self._was[name, kinds.LINK] = link_text(touched.links)
        if path == self._now.cwd:
            return
        if "r" in ops and not is_folder:
            self._compare(path, name, kinds.SETTINGS if is_settings(path) else kinds.FILE, touched)
        elif not (is_folder and ("n" in ops or "i" in ops or self._is_listed_by_parent(path))):
            self._compare(path, name, kinds.THERE, touched)

    def _is_listed_by_parent(self, path: str) -> bool:
        """Return whether the state of the parent directory already shows that this directory exists."""
        above = self._touched.get(os.path.dirname(path))
        return above is not None and "n" in above.ops and path not in self._made and self._now.counts(path)

    def _compare(self, path: str, name: str, kind: str, touched: _Touched) -> None:
        """Compare the state at the first access with the present state."""
        now = self._now.state(name, kind)
        was = now if seen_of(path) == touched.was else _state_of(kind, touched)
        self._was[name, kind] = was
        if was == now:
            return
        if path in self._made or any(above in self._made for above in _directories_above(path)):
            self._left[label(name, kind)] = (was, now)
        elif kind != kinds.THERE and not self._changed:
            self._changed = name


def _text_of(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_TEXT_BYTES).decode(errors="replace")
    except OSError:
        return ""


def seen_of(path: str) -> list[int] | None:
    """Return the state of a path in the watcher's format; None if it is missing."""
    try:
        info = os.stat(path)
    except OSError:
        return None
    return [info.st_mode, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns]


def _state_of(kind: str, touched: _Touched) -> str:
    """PURE: return the state in the format of current_state.py."""
    if touched.was is None:
        return ABSENT
    mode = touched.was[0]
    if kind == kinds.THERE:
        return kind_of(mode)
    if not stat.S_ISREG(mode):
        return DIRECTORY if stat.S_ISDIR(mode) else OTHER
    if kind != kinds.FILE or not touched.digest:
        return _WAS_UNKNOWN
    return touched.digest + (" x" if mode & 0o100 else "")


def _directories_above(path: str) -> list[str]:
    found = []
    while path != "/":
        path = os.path.dirname(path)
        found.append(path)
    return found
