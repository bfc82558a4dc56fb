"""The directories of compile caches on a node, the variables for ranks, and the lock of the jobs that use them.

Each user and key has one private directory, shared by the ranks and jobs of a node: the frameworks lock and rename
files themselves. Variables that the user has set are never changed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from bootseer.cache_folder import make_private_dir
from bootseer.env.compile_cache.kinds import KINDS, NCCL, CacheKind
from bootseer.env.restore import used_directories as used_directories
from bootseer.env.restore.used_directories import OLD_S, UsedDirectory
from bootseer.errors import ConfigError
from bootseer.mounts.sandbox.shared import first_step
from bootseer.storage.os_errors import map_os_errors

KEY_LETTERS = 32  # of the key, in the directory's name: paths of caches get long
STAGING = ".bootseer-staging-"
_MARK_S, _HOUR_S = 1_000_000, 3600  # times of access before the first are marks, and count hours
_OWN = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_DUMP, _TOPOLOGY = "NCCL_TOPO_DUMP_FILE", "NCCL_TOPO_FILE"


class CachePlace(NamedTuple):
    """A kind of cache, and its directory on this node."""

    kind: CacheKind
    path: str  # absolute


class ChosenCaches(NamedTuple):
    """The caches of this job that are kept."""

    places: list[CachePlace]
    variables: dict[str, str]  # for ranks
    notes: list[str]  # lines for people


def choose_caches(
    root: str, environ: Mapping[str, str], own: Mapping[str, str], *, only: Collection[str] = ()
) -> ChosenCaches:
    """PURE: return the caches to keep, and the variables that set their directories.

    Args: root: the directory of the key. environ: of the ranks. own: further directories, by a name for each.
    only: names of kinds; empty: all but NCCL's.
    Raises: ConfigError.
    """
    places, variables, notes = [], {}, []
    unknown = sorted(set(only) - {kind.name for kind in (*KINDS, NCCL)})
    if unknown:
        names = ", ".join(kind.name for kind in (*KINDS, NCCL))
        raise ConfigError(f"unknown kind of cache {unknown[0]!r}; use one of {names}")
    for kind in KINDS:
        if only and kind.name not in only:
            continue
        path = os.path.join(root, kind.name)
        given = environ.get(kind.variable)
        if given is None:
            variables[kind.variable] = path
        elif not _is_below(given, root):
            notes.append(f"you have set {kind.variable}={given}: that directory is neither filled nor published")
            continue
        else:
            path = os.path.normpath(given)
        places.append(CachePlace(kind, path))
        variables.update((name, value) for name, value in kind.also if name not in environ)
    if NCCL.name in only:
        places.append(CachePlace(NCCL, os.path.join(root, NCCL.name)))
    for name, directory in sorted(own.items()):
        places.append(CachePlace(CacheKind(name), _own_directory(name, directory, root)))
    for first, second in _pairs(places):
        if _is_below(second.path, first.path) or _is_below(first.path, second.path):
            raise ConfigError(
                f"{second.path}: the caches {first.kind.name} and {second.kind.name} overlap;"
                " give each its own directory"
            )
    return ChosenCaches(places, variables, notes)


def early_variables(environ: Mapping[str, str], root: str = "") -> dict[str, str] | None:
    """PURE: return those variables of `choose_caches` that are known before the key is.

    Args: root: the directory of the key, if known from an earlier start; "": only variables without it.
    Returns: None if none is known, as the user has set a directory.
    """
    if any(kind.variable in environ for kind in KINDS):
        return None
    found = {kind.variable: os.path.join(root, kind.name) for kind in KINDS} if root else {}
    return found | {name: value for kind in KINDS for name, value in kind.also if name not in environ}


def topology_variables(place: CachePlace, node_type: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of NCCL: the topology file of a node like this one, or else the file to write it to.

    `node_type`: the result of `key.read_node_type`; "" if it is not known.
    """
    if not node_type or _DUMP in environ or _TOPOLOGY in environ:
        return {}
    path = os.path.join(place.path, f"{node_type}.xml")
    return {_TOPOLOGY if os.path.isfile(path) else _DUMP: path}


def _own_directory(name: str, directory: str, root: str) -> str:
    if _OWN.fullmatch(name) is None or name in {kind.name for kind in (*KINDS, NCCL)}:
        raise ConfigError(
            f"--cache-dir {name}={directory}: the name is invalid or reserved;"
            " use another one of lower-case letters, digits, '-' and '_'"
        )
    if not os.path.isabs(directory) or os.path.normpath(directory) == "/" or _is_below(root, directory):
        raise ConfigError(
            f"--cache-dir {name}={directory}: must be the absolute path of a directory for that cache only"
        )
    return os.path.normpath(directory)


def _is_below(path: str, directory: str) -> bool:
    if not os.path.isabs(path):
        return False
    path, directory = os.path.normpath(path), os.path.normpath(directory)
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def _pairs(places: list[CachePlace]) -> Iterator[tuple[CachePlace, CachePlace]]:
    for number, first in enumerate(places):
        for second in places[number + 1 :]:
            yield first, second


# ---- the directory -----------------------------------------------------------------------------------------


class KeyDirectory(UsedDirectory):
    """The directory of a key on this node, in use until it is closed, or its process ends."""

    def __init__(self, key: str, environ: Mapping[str, str]) -> None:
        """Raises: ConfigError, StorageError if it cannot be created, or belongs to another user."""
        super().__init__(os.path.join(first_step(environ), key[:KEY_LETTERS]))

    def make(self, places: list[CachePlace]) -> None:
        """Create the directories of the caches. Raises: StorageError."""
        for place in places:
            with map_os_errors(place.path):
                make_private_dir(place.path)


def remove_old(environ: Mapping[str, str], older_s: float = OLD_S) -> list[str]:
    """Remove the directories of keys that no job has used for `older_s`; return their paths.

    Raises: ConfigError, StorageError if there is no cache, or it belongs to another user.
    """
    return used_directories.remove_old(first_step(environ), f"[0-9a-f]{{{KEY_LETTERS}}}", older_s)


# ---- times of access ---------------------------------------------------------------------------------------


def mark_unread(path: str, mtime_ns: int, used_s: float) -> None:
    """Mark a file, so that `is_read` detects a later read. `used_s`: its last use, since the epoch.

    The mark is a time of access in January 1970: as many seconds as `used_s` has hours. Raises: OSError.
    """
    atime_s = min(max(1, int(used_s) // _HOUR_S), _MARK_S - 1)
    os.utime(path, ns=(atime_s * 1_000_000_000, mtime_ns), follow_symlinks=False)


def is_read(atime_ns: int) -> bool:
    """Return whether a file was read, or made, after the last mark."""
    return atime_ns >= _MARK_S * 1_000_000_000


def last_use_s(atime_ns: int) -> float:
    """Return the time of a file's last use, to the hour."""
    return atime_ns / 1e9 if is_read(atime_ns) else atime_ns / 1e9 * _HOUR_S


def shows_reads(directory: str) -> bool:
    """Return whether the file system records times of access. It does with `relatime` too: a mark is old enough.

    With `noatime`, only files that a start makes count as used. Then the oldest are evicted first, and those that
    are still needed return when they are made again.
    """
    path = os.path.join(directory, f"{STAGING}probe-{os.getpid()}")
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.write(fd, b"x")
            mark_unread(path, os.fstat(fd).st_mtime_ns, 0)
            os.pread(fd, 1, 0)
            return is_read(os.fstat(fd).st_atime_ns)
        finally:
            os.close(fd)
            os.unlink(path)
    except OSError:
        return False
