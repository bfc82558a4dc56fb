"""Python's directories: environments, and those that it lists to find modules. Stdlib only."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from bootseer.env.reads.watched_threads import WatchedThreads

_PYTHON = re.compile(rb"(python|pypy)[\d.]*t?")
_OTHERWISE = 1 << 16
_BY_HAND = frozenset((b"-W", b"-X", b"--check-hash-based-pycs"))  # options of Python that take a value


class ImportListings:
    """Distinguishes listings of directories by Python's import from all others."""

    def __init__(self, threads: WatchedThreads, targets: Sequence[bytes]) -> None:
        """Args: targets: directories that set-up fills."""
        self._threads = threads
        self._targets = targets
        # by thread and directory: number of opens, plus `_OTHERWISE` for each relative one
        self._opened: dict[tuple[int, bytes], int] = {}

    def note_open(self, thread: int, path: bytes, *, is_absolute: bool) -> None:
        """Note that a thread opens a directory."""
        opened = thread, os.path.realpath(path)
        self._opened[opened] = self._opened.get(opened, 0) + (1 if is_absolute else _OTHERWISE)

    def is_import(self, thread: int, path: bytes) -> bool:
        """Return whether Python lists a directory to find modules, so that only names of modules matter.

        Python does so once, by the absolute path; any other listing uses all names.
        """
        if self._opened.get((thread, path)) != 1 or _PYTHON.fullmatch(self._threads.program(thread)) is None:
            return False
        return self._is_module_directory(thread, path)

    def _is_module_directory(self, thread: int, path: bytes) -> bool:
        here = os.fsencode(os.readlink(f"/proc/{thread}/cwd"))
        words = self._threads.words(thread).split(b"\0")[:-1]
        if _first_directory(words, here) == path:
            return True
        with open(f"/proc/{thread}/environ", "rb") as file:
            for each in file.read().split(b"\0"):
                if each.startswith(b"PYTHONPATH="):
                    directories = each[11:].split(b":")
                    if path in (os.path.realpath(os.path.join(here, directory)) for directory in directories):
                        return True
        programs = [
            os.path.join(here, words[0]) if words else b"",
            os.fsencode(os.readlink(f"/proc/{thread}/exe")),
        ]
        prefixes = [os.path.dirname(os.path.dirname(each)) for each in programs]
        return any(path in _linked_directories(prefix) for prefix in (*prefixes, *self._targets))


def is_environment(directory: bytes) -> bool:
    if os.path.lexists(directory + b"/pyvenv.cfg") or os.path.lexists(directory + b"/conda-meta"):
        return True
    return os.path.lexists(directory + b"/bin/python3") and bool(_sites(directory))


def _sites(directory: bytes) -> list[bytes]:
    """Return the site-packages of an environment."""
    try:
        names = os.listdir(directory + b"/lib")
    except OSError:
        return []
    found = [
        directory + b"/lib/" + name + b"/site-packages" for name in names if name.startswith((b"python", b"pypy"))
    ]
    return [site for site in found if os.path.isdir(site)]


def _linked_directories(prefix: bytes) -> set[bytes]:
    """Return directories of editable packages in an environment."""
    found = set()
    for site in _sites(prefix):
        for name in os.listdir(site):
            if name.endswith(b".pth"):
                with open(os.path.join(site, name), "rb") as file:
                    found |= {line.strip() for line in file.read(1 << 16).splitlines() if line[:1] == b"/"}
    return found


def _first_directory(words: Sequence[bytes], here: bytes) -> bytes | None:
    """Return the first entry of Python's sys.path, from its command line; None if there is none."""
    place = 1
    while place < len(words):
        word = words[place]
        if not word.startswith(b"-") or word == b"-":
            return here if word == b"-" else os.path.dirname(os.path.realpath(os.path.join(here, word)))
        if word in _BY_HAND:
            place += 2
            continue
        if not word.startswith(b"--"):
            flags = word[1:]
            for letter in (flags[at : at + 1] for at in range(len(flags))):
                if letter in (b"I", b"P"):
                    return None
                if letter in (b"m", b"c"):
                    return here
                if letter in (b"W", b"X"):
                    break
        place += 1
    return here
