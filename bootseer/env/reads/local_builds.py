"""Packages from local directories: ensures that set-up rebuilds them, without cached builds of earlier versions.

uv reuses the build of a directory while pyproject.toml, setup.py and setup.cfg are unchanged: an edited module
does not count. Nor does the content of a wheel in a directory of links. pip caches the build of an archive by its
path. So before set-up this module removes such builds from their caches, and the marks in an environment that such
a package is current. Afterwards it detects packages that were still not rebuilt.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from urllib.parse import unquote, urlsplit

LOCK_S = 3.0  # to wait for other processes of uv at its cache
POLL_S = 0.1
MAX_BYTES = 1 << 20
_GONE = ".bootseer-gone-"
_OF_UV = "uv_cache.json"
# Files that describe a package; all others are its content.
_DESCRIPTIONS = {
    *("pyproject.toml", "setup.py", "setup.cfg", "uv.toml", "poetry.toml", "pdm.toml"),
    *("uv.lock", "poetry.lock", "pdm.lock", ".python-version", ".python-versions"),
}


def drop_cached_builds(environ: Mapping[str, str], targets: Sequence[str]) -> list[str]:
    """Remove cached builds before set-up. Returns: lines for the user."""
    notes = []
    cache = _cache_of("uv", environ)
    pattern = glob.escape(cache)
    kept = [path for name in ("path", "editable") for path in glob.glob(f"{pattern}/sdists-v*/{name}")]
    # uv finds a wheel from a file by these; those of downloaded wheels have another suffix.
    kept += glob.glob(f"{pattern}/wheels-v*/*/*/*/*.rev")
    if kept and not _take_away(cache, kept):
        notes.append(f"{cache}: other processes use it, so uv may reuse old builds of local packages")
    for directory in _built_by_pip(environ):
        shutil.rmtree(directory, ignore_errors=True)
    for _, directory in _installed(targets):
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(directory, _OF_UV))
    return notes


def find_stale_package(
    targets: Sequence[str], read: Collection[str], touched: Collection[str], began_ns: int
) -> str:
    """Return why a package from a directory may be outdated after set-up; "" if none is.

    Args: read: files that set-up has read. touched: names that it has accessed. began_ns: the start of set-up, by
        the clock of files.
    """
    for source, directory in _installed(targets):
        if not any(_is_below(path, source) for path in touched):
            continue  # this set-up does not use it
        try:
            is_new = os.stat(os.path.join(directory, "direct_url.json")).st_ctime_ns >= began_ns
        except OSError:
            continue
        if not is_new:
            return f"the package of {source} existed already, and set-up has not rebuilt it"
        is_built = any(_is_below(path, source) and _is_content(path) for path in read)
        if not is_built and any(_is_content(path) for path in _modules(source)):
            return f"the package of {source} came from a cache, and may be older than its source"
    return ""


def _cache_of(name: str, environ: Mapping[str, str]) -> str:
    named = environ.get(f"{name.upper()}_CACHE_DIR", "")
    if named.startswith("/"):
        return named
    above = environ.get("XDG_CACHE_HOME", "")
    return os.path.join(above if above.startswith("/") else os.path.join(environ.get("HOME", "/"), ".cache"), name)


def _built_by_pip(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the directories of pip's cache with builds of local files."""
    for path in glob.iglob(f"{glob.escape(_cache_of('pip', environ))}/wheels/*/*/*/*/origin.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            with open(path, "rb") as file:
                url = json.loads(file.read(MAX_BYTES))["url"]
            if str(url).startswith("file:"):
                yield os.path.dirname(path)


def _take_away(cache: str, paths: Sequence[str]) -> bool:
    """Move paths out of the cache; False if another process has it locked."""
    try:
        lock = os.open(os.path.join(cache, ".lock"), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        lock = -1  # an old uv, which has no lock
    except OSError:
        return False
    try:
        end_s = time.monotonic() + LOCK_S
        while lock >= 0:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > end_s:
                    return False
                time.sleep(POLL_S)
        gone = []
        for path in paths:
            to = os.path.join(os.path.dirname(path), _GONE + secrets.token_hex(8))
            try:
                os.rename(path, to)
            except OSError:
                return False
            gone.append(to)
    finally:
        if lock >= 0:
            os.close(lock)
    if gone:
        threading.Thread(target=_remove, args=(gone,), daemon=True).start()
    return True


def _remove(paths: Sequence[str]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)


def _installed(targets: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield packages built from directories, without those installed in place: the source, the dist-info."""
    for target in targets:
        pattern = glob.escape(target)
        found = [
            *glob.iglob(f"{pattern}/lib/*/site-packages/*.dist-info/direct_url.json"),
            *glob.iglob(f"{pattern}/*.dist-info/direct_url.json"),
            *glob.iglob(f"{pattern}/*/*.dist-info/direct_url.json"),
        ]
        for path in found:
            source = _source_of(path)
            if source and os.path.isdir(source):
                yield os.path.realpath(source), os.path.dirname(path)


def _source_of(path: str) -> str:
    try:
        with open(path, "rb") as file:
            given = json.loads(file.read(MAX_BYTES))
        url, directory = urlsplit(str(given["url"])), given["dir_info"]
        return "" if url.scheme != "file" or directory.get("editable") else unquote(url.path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""  # another kind of source


def _modules(source: str) -> Iterator[str]:
    for above, directories, names in os.walk(source):
        directories[:] = [name for name in directories if not name.startswith(".") and name != "build"]
        yield from (os.path.join(above, name) for name in names if name.endswith(".py"))


def _is_content(path: str) -> bool:
    return os.path.basename(path) not in _DESCRIPTIONS


def _is_below(path: str, directory: str) -> bool:
    return path.startswith(directory + "/")
