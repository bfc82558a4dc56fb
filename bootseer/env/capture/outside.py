"""Detection of files that set-up commands write outside the targets: no snapshot contains them.

Compares cheap samples from before and after, of the places where installers write. They have names, sizes and
times only, and are bounded in number and time. Directories that were not sampled twice are not reported. So this
finds the usual mistakes and does not prove that there are none.
"""

from __future__ import annotations

import glob
import os
import stat
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

MAX_ENTRIES = 50_000
SAMPLE_S = 0.3
MAX_NAMES = 1000
OWN_DIRECTORIES = (
    "BOOTSEER_CACHE",
    "BOOTSEER_RUNTIME",
    "BOOTSEER_KEYS",
    "BOOTSEER_CACHE_DIR",
    "BOOTSEER_EVENTS_DIR",
)

DirectorySamples = dict[
    str, dict[str, tuple[int, int, int]]
]  # by directory, by name: (mtime in ns, size, inode); for directories zeros


class SampledPlace(NamedTuple):
    folder: str
    is_deep: bool  # False: only its names, and the content of its *.egg-info


def cache_directories(environ: Mapping[str, str]) -> list[str]:
    """Return cache and temporary directories of installers and Bootseer, which belong to no environment."""
    home = environ.get("HOME", "")
    found = [environ.get("XDG_CACHE_HOME", ""), home and os.path.join(home, ".cache")]
    found += [environ.get(name, "") for name in ("PIP_CACHE_DIR", "UV_CACHE_DIR", "TMPDIR", "CONDA_PKGS_DIRS")]
    found += [environ.get(name, "") for name in OWN_DIRECTORIES]
    return sorted({os.path.normpath(each) for each in (*found, "/tmp", "/var/tmp") if each.startswith("/")})  # noqa: S108


def places(environ: Mapping[str, str], targets: Sequence[str], cwd: str) -> list[SampledPlace]:
    """Return the places to sample, the most important first."""
    found = [SampledPlace(cwd, False)]
    for target in targets:
        found += [SampledPlace(directory, True) for directory in _base_site_packages(target)]
    home = environ.get("HOME", "")
    if home.startswith("/"):
        found.append(SampledPlace(os.path.join(home, ".local"), True))
    return [*found, SampledPlace("/usr/local", True)]


def sample(
    wanted: Sequence[SampledPlace],
    without: Sequence[str],
    *,
    max_entries: int = MAX_ENTRIES,
    timeout_s: float = SAMPLE_S,
) -> DirectorySamples:
    """Sample the places, their top directories first; skip `without` and missing directories."""
    passed = set(without)
    seen: DirectorySamples = {}
    end_s = time.monotonic() + timeout_s
    todo = deque(wanted)
    count = 0
    while todo and count < max_entries and time.monotonic() < end_s:
        place = todo.popleft()
        if place.folder in seen or place.folder in passed:
            continue
        names, directories = _sample_directory(place.folder)
        seen[place.folder] = names
        count += len(names)
        for name in directories:
            path = os.path.join(place.folder, name)
            if path not in passed and (place.is_deep or name.endswith(".egg-info")):
                todo.append(SampledPlace(path, True))
    return seen


def compare(before: DirectorySamples, after: DirectorySamples, without: Sequence[str]) -> list[str]:
    """Return new, changed and missing paths, sorted, at most MAX_NAMES; of a new directory only itself. Pure."""
    passed = set(without)
    found = []
    for directory in after.keys() & before.keys():
        was, now = before[directory], after[directory]
        for name in was.keys() | now.keys():
            path = os.path.join(directory, name)
            if was.get(name) != now.get(name) and path not in passed:
                found.append(path)
    return sorted(found)[:MAX_NAMES]


def _sample_directory(directory: str) -> tuple[dict[str, tuple[int, int, int]], list[str]]:
    """Return the names in a directory, and which of them are directories."""
    names: dict[str, tuple[int, int, int]] = {}
    directories = []
    try:
        with os.scandir(directory) as entries:
            for each in entries:
                if each.name == "__pycache__" or each.name.endswith(".pyc"):
                    continue  # Python writes it on import
                try:
                    now = each.stat(follow_symlinks=False)
                except OSError:
                    continue
                if stat.S_ISDIR(now.st_mode):
                    directories.append(each.name)
                    names[each.name] = (0, 0, 0)
                else:
                    names[each.name] = (now.st_mtime_ns, now.st_size, now.st_ino)
    except OSError:
        pass  # it is missing, or this user may not read it
    return names, sorted(directories)


def _base_site_packages(target: str) -> list[str]:
    """Return the site-packages of the interpreter that a virtual environment was made from."""
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
