"""Packages of folders of the user's own: set-up builds them anew, whatever was kept of earlier ones.

uv takes a build of a folder for current as long as pyproject.toml, setup.py and setup.cfg are: an edited module
does not count. Nor does the content of a wheel in a folder of links. pip keeps what it has built of an archive by
its path. So all that is taken out of their caches before set-up, and what says in an environment that such a
package is current. What was not built anew all the same is found afterwards.
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

LOCK_S = 3.0  # for other processes of uv at its cache
LOOK_S = 0.1
MOST_BYTES = 1 << 20
_GONE = ".bootseer-gone-"
_OF_UV = "uv_cache.json"
# They say what a package is; what it consists of is the rest.
_DESCRIPTIONS = {
    *("pyproject.toml", "setup.py", "setup.cfg", "uv.toml", "poetry.toml", "pdm.toml"),
    *("uv.lock", "poetry.lock", "pdm.lock", ".python-version", ".python-versions"),
}


def refresh(environ: Mapping[str, str], targets: Sequence[str]) -> list[str]:
    """Before set-up. Returns: lines for people."""
    notes = []
    cache = _cache_of("uv", environ)
    pattern = glob.escape(cache)
    kept = [path for name in ("path", "editable") for path in glob.glob(f"{pattern}/sdists-v*/{name}")]
    # By these it finds a wheel of a file; one that was fetched has another end.
    kept += glob.glob(f"{pattern}/wheels-v*/*/*/*/*.rev")
    if kept and not _take_away(cache, kept):
        notes.append(f"{cache}: other processes use it, so uv may take what it has built of local packages before")
    for folder in _built_by_pip(environ):
        shutil.rmtree(folder, ignore_errors=True)
    for _, folder in _installed(targets):
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(folder, _OF_UV))
    return notes


def find_stale(targets: Sequence[str], read: Collection[str], touched: Collection[str], began_ns: int) -> str:
    """After set-up: why a package of a folder may be that of before its last change; "" for none.

    Args: read: files that set-up has read. touched: names that it has looked up. began_ns: when it began, by the
        clock of files.
    """
    for source, folder in _installed(targets):
        if not any(_is_below(path, source) for path in touched):
            continue  # this set-up has nothing to do with it
        try:
            is_new = os.stat(os.path.join(folder, "direct_url.json")).st_ctime_ns >= began_ns
        except OSError:
            continue
        if not is_new:
            return f"the package of {source} was there already, and set-up has not built it anew"
        is_built = any(_is_below(path, source) and _is_content(path) for path in read)
        if not is_built and any(_is_content(path) for path in _modules(source)):
            return f"the package of {source} was taken from a cache, and maybe it was built before its last change"
    return ""


def _cache_of(name: str, environ: Mapping[str, str]) -> str:
    named = environ.get(f"{name.upper()}_CACHE_DIR", "")
    if named.startswith("/"):
        return named
    above = environ.get("XDG_CACHE_HOME", "")
    return os.path.join(above if above.startswith("/") else os.path.join(environ.get("HOME", "/"), ".cache"), name)


def _built_by_pip(environ: Mapping[str, str]) -> Iterator[str]:
    """Folders of pip's cache with what it has built of files of this machine."""
    for path in glob.iglob(f"{glob.escape(_cache_of('pip', environ))}/wheels/*/*/*/*/origin.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            with open(path, "rb") as file:
                url = json.loads(file.read(MOST_BYTES))["url"]
            if str(url).startswith("file:"):
                yield os.path.dirname(path)


def _take_away(cache: str, paths: Sequence[str]) -> bool:
    """False: another process has the cache locked."""
    try:
        lock = os.open(os.path.join(cache, ".lock"), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        lock = -1  # of an old uv, which locks nothing
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
                time.sleep(LOOK_S)
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
    """Packages of folders, not in place: the folder, and that of what is known of the package."""
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
            given = json.loads(file.read(MOST_BYTES))
        url, folder = urlsplit(str(given["url"])), given["dir_info"]
        return "" if url.scheme != "file" or folder.get("editable") else unquote(url.path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""  # of something else


def _modules(source: str) -> Iterator[str]:
    for above, folders, names in os.walk(source):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "build"]
        yield from (os.path.join(above, name) for name in names if name.endswith(".py"))


def _is_content(path: str) -> bool:
    return os.path.basename(path) not in _DESCRIPTIONS


def _is_below(path: str, folder: str) -> bool:
    return path.startswith(folder + "/")
