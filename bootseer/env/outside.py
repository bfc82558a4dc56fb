"""What set-up commands wrote outside the targets: it is in no capture, and is missed on the next node.

Cheap looks before and after, at the places where installers write: names, sizes and times only, broad rather than
deep, within bounds of number and time. What was not looked at twice is not reported; so this finds the usual
mistakes and is no proof that there are none.
"""

from __future__ import annotations

import glob
import os
import stat
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

MOST_ENTRIES = 50_000
LOOK_S = 0.3
MOST_NAMES = 1000
OWN_FOLDERS = ("BOOTSEER_CACHE", "BOOTSEER_RUNTIME", "BOOTSEER_KEYS", "BOOTSEER_CACHE_DIR", "BOOTSEER_EVENTS_DIR")

Seen = dict[
    str, dict[str, tuple[int, int, int]]
]  # by folder, by name: (mtime in ns, size, number); of folders zeros


class Place(NamedTuple):
    """A folder to look at."""

    folder: str
    is_deep: bool  # else only its names, and what is in its *.egg-info


def cache_folders(environ: Mapping[str, str]) -> list[str]:
    """Of installers, for temporary files, and our own: what is there is no part of an environment."""
    home = environ.get("HOME", "")
    found = [environ.get("XDG_CACHE_HOME", ""), home and os.path.join(home, ".cache")]
    found += [environ.get(name, "") for name in ("PIP_CACHE_DIR", "UV_CACHE_DIR", "TMPDIR", "CONDA_PKGS_DIRS")]
    found += [environ.get(name, "") for name in OWN_FOLDERS]
    return sorted({os.path.normpath(each) for each in (*found, "/tmp", "/var/tmp") if each.startswith("/")})  # noqa: S108


def places(environ: Mapping[str, str], targets: Sequence[str], cwd: str) -> list[Place]:
    """Where to look, most telling first."""
    found = [Place(cwd, False)]
    for target in targets:
        found += [Place(folder, True) for folder in _base_site_packages(target)]
    home = environ.get("HOME", "")
    if home.startswith("/"):
        found.append(Place(os.path.join(home, ".local"), True))
    return [*found, Place("/usr/local", True)]


def look(
    wanted: Sequence[Place],
    without: Sequence[str],
    *,
    most_entries: int = MOST_ENTRIES,
    timeout_s: float = LOOK_S,
) -> Seen:
    """What is there now, folders nearest to the places first; nothing of `without`, and of what is gone."""
    passed = set(without)
    seen: Seen = {}
    end_s = time.monotonic() + timeout_s
    todo = deque(wanted)
    count = 0
    while todo and count < most_entries and time.monotonic() < end_s:
        place = todo.popleft()
        if place.folder in seen or place.folder in passed:
            continue
        names, folders = _look_into(place.folder)
        seen[place.folder] = names
        count += len(names)
        for name in folders:
            path = os.path.join(place.folder, name)
            if path not in passed and (place.is_deep or name.endswith(".egg-info")):
                todo.append(Place(path, True))
    return seen


def compare(before: Seen, after: Seen, without: Sequence[str]) -> list[str]:
    """Paths that are new, different or gone, sorted, at most MOST_NAMES; of a new folder only itself. Pure."""
    passed = set(without)
    found = []
    for folder in after.keys() & before.keys():
        was, now = before[folder], after[folder]
        for name in was.keys() | now.keys():
            path = os.path.join(folder, name)
            if was.get(name) != now.get(name) and path not in passed:
                found.append(path)
    return sorted(found)[:MOST_NAMES]


def _look_into(folder: str) -> tuple[dict[str, tuple[int, int, int]], list[str]]:
    """Names in a folder, and those of folders among them."""
    names: dict[str, tuple[int, int, int]] = {}
    folders = []
    try:
        with os.scandir(folder) as entries:
            for each in entries:
                if each.name == "__pycache__" or each.name.endswith(".pyc"):
                    continue  # Python writes it when it imports
                try:
                    now = each.stat(follow_symlinks=False)
                except OSError:
                    continue
                if stat.S_ISDIR(now.st_mode):
                    folders.append(each.name)
                    names[each.name] = (0, 0, 0)
                else:
                    names[each.name] = (now.st_mtime_ns, now.st_size, now.st_ino)
    except OSError:
        pass  # it is not there, or not for this user
    return names, sorted(folders)


def _base_site_packages(target: str) -> list[str]:
    """Of the interpreter that a virtual environment was made from."""
    try:
        with open(os.path.join(target, "pyvenv.cfg"), encoding="utf-8", errors="replace") as file:
            lines = file.read(1 << 16).splitlines()
    except OSError:
        return []
    for line in lines:
        name, _, value = line.partition("=")
        if name.strip() == "home":
            prefix = glob.escape(os.path.dirname(value.strip()))
            return sorted(
                glob.glob(f"{prefix}/lib/python*/site-packages") + glob.glob(f"{prefix}/lib/python*/dist-packages")
            )
    return []
