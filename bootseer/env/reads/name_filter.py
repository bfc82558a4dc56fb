"""Which names set-up's watch records, and under which name: by rules, the system and environments. Stdlib only."""

from __future__ import annotations

import os
import re

from bootseer.env.reads.python_directories import is_environment
from bootseer.env.reads.watch_rules import Rules
from bootseer.env.reads.watched_threads import WatchedThreads

_TOOLS = frozenset(
    (*(b".hg", b".svn", b".tox", b".nox", b".mypy_cache", b".ruff_cache", b".pytest_cache"), b".ipynb_checkpoints")
)
_CACHED = re.compile(rb"^(.*/)__pycache__/([^/]+?)\.[^/.]+(?:\.opt-\d)?\.pyc$")
_SYSTEM = (
    *(b"/usr/", b"/lib/", b"/lib32/", b"/lib64/", b"/libx32/", b"/bin/", b"/sbin/", b"/proc/", b"/sys/", b"/dev/"),
    *(b"/run/", b"/var/", b"/etc/", b"/boot/", b"/snap/", b"/nix/store/", b"/gnu/store/"),
)
# Settings of installers are recorded wherever they are.
SETTINGS = (
    *(b"/pip.conf", b"/uv.toml", b"/.condarc", b"/condarc", b"/.mambarc", b"/.pydistutils.cfg"),
    *(b"/pypoetry/config.toml", b"/pdm/config.toml", b"/.python-version"),
)
# Markers of repositories and interpreters are looked up in every parent directory.
_NO_INPUT = re.compile(rb"/(\.git|lib/python\d+\.zip)$")
_FETCHED = re.compile(rb"\b(upload-pack|pack-objects)\b")  # programs that git runs for a fetch
_OF_USERS = re.compile(rb"/(root|home/[^/]+)/\.")


class NameFilter:
    """Decides about names; collects the Git repositories in which names were used."""

    def __init__(self, rules: Rules, threads: WatchedThreads) -> None:
        self._rules = rules
        self._threads = threads
        own = (rules.home + b"/.",) if rules.home else ()
        never = (*(each + b"/" for each in rules.never), *own)
        self._skip = never if rules.only_roots else (*_SYSTEM, *never)
        self._roots = tuple(each + b"/" for each in rules.roots if each != b"/")
        self._above = {above for root in rules.roots for above in _directories_above(root)}
        self._never = frozenset(rules.never)
        # by directory: whether it is part of an interpreter's environment
        self._environments: dict[bytes, bool] = {}
        # by directory outside the roots, in an image: whether it is the node's own
        self._bound: dict[bytes, bool] = {}
        self.gits: set[bytes] = set()
        self.cloned: set[bytes] = set()  # repositories that git has fetched from

    def is_ignored(self, path: bytes) -> bool:
        """Return quickly whether a name is ignored, as most are in the system or a target."""
        return (
            path.startswith(self._skip)
            and not path.startswith(self._roots)
            and not path.endswith(SETTINGS)
            and path.rpartition(b"/")[0] not in self._above
        )

    def is_inside(self, path: bytes) -> bool:
        """Return whether a name is below a root."""
        return path.startswith(self._roots)

    def is_above(self, path: bytes) -> bool:
        """Return whether a name is in a parent directory of a root."""
        return os.path.dirname(path) in self._above

    def place(self, thread: int, path: bytes, maker: int = 0) -> bytes | None:
        """Return the name to record; None: ignored. Args: maker: the creating thread, used instead of `thread`."""
        rules = self._rules
        for literal, root in rules.literal:
            if path == literal or path.startswith(literal + b"/"):
                path = root + path[len(literal) :]
        if path in rules.files:
            return None
        is_inside = self.is_inside(path)
        is_above = self.is_above(path)
        if path.startswith(self._skip) and not is_above and not (is_inside and self._is_nearer(path)):
            return path if path.endswith(SETTINGS) and not rules.only_roots else None
        if path in self._never:
            return None
        if b"/.git/" in path:
            place = path.partition(b"/.git/")[0]
            if thread and _FETCHED.search(self._threads.words(thread)):
                self.cloned.add(place)
            elif is_inside or place in self._above:
                self.gits.add(place)
            return None
        if path.endswith((b"/.git", b".zip")) and _NO_INPUT.search(path):
            return None
        if not _TOOLS.isdisjoint(path.split(b"/")):
            return None
        if path.endswith(b".pyc"):
            source = _CACHED.match(path)
            if source is not None:
                path = source[1] + source[2] + b".py"
        elif path.endswith(b"/__pycache__"):
            return None
        if is_inside:
            return None if self._is_in_environment(path, self._root_of(path)) else path
        if rules.only_roots and (path.startswith(_SYSTEM) or not self._is_bound(thread or maker, path)):
            return None
        if path + b"/" in _SYSTEM or os.path.dirname(path) in rules.programs:
            return None
        if _OF_USERS.match(path):
            return path if path.endswith(SETTINGS) else None
        if path in rules.roots or is_above:
            return path
        if self._is_in_environment(path, b"") or (thread and self._threads.is_compiler(thread)):
            return None
        return path

    def _is_bound(self, thread: int, path: bytes) -> bool:
        """Return whether a directory in an image is the node's own directory of the same path."""
        directory = os.path.dirname(path)
        known = self._bound.get(directory)
        if known is None:
            while not os.path.isdir(directory):
                directory = os.path.dirname(directory)
            try:
                known = os.path.samestat(os.stat(directory), os.stat(b"/proc/%d/root%s" % (thread, directory)))
            except OSError:
                known = False
            self._bound[os.path.dirname(path)] = known
        return known

    def _is_nearer(self, path: bytes) -> bool:
        """Return whether a root lies deeper than all ignored directories that contain the name."""
        root = max(len(each) for each in self._roots if path.startswith(each))
        return all(len(each) < root for each in self._skip if path.startswith(each))

    def _root_of(self, path: bytes) -> bytes:
        return max((each for each in self._roots if path.startswith(each)), key=len)

    def _is_in_environment(self, path: bytes, root: bytes) -> bool:
        """Return whether a path is in an interpreter's environment below the root."""
        directory = os.path.dirname(path)
        asked = []
        is_one = False
        while len(directory) > max(1, len(root)):
            known = self._environments.get(directory)
            if known is not None:
                is_one = known
                break
            asked.append(directory)
            directory = os.path.dirname(directory)
        for directory in reversed(asked):
            is_one = is_one or is_environment(directory)
            self._environments[directory] = is_one
        return is_one


def _directories_above(path: bytes) -> list[bytes]:
    found = []
    while len(path) > 1:
        path = os.path.dirname(path)
        found.append(path)
    return found
