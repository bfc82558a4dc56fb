"""Where first-step caches lie on a node, what ranks are told of them, and who uses them at this moment.

One folder for each user and key, for this user alone, shared by the ranks and jobs of a node: the frameworks lock
and rename themselves. Variables that the user has set are never changed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from bootseer.cache_folder import make_private
from bootseer.env import used_folders
from bootseer.env.caches_kinds import KINDS, NCCL, Kind
from bootseer.env.used_folders import OLD_S, UsedFolder
from bootseer.errors import ConfigError
from bootseer.mounts.image_shared import first_step
from bootseer.storage.os_errors import map_os_errors

KEY_LETTERS = 32  # of the key, in the folder's name: paths of caches get long
STAGING = ".bootseer-staging-"
_MARK_S, _HOUR_S = 1_000_000, 3600  # times of access before the first are marks, and count hours
_OWN = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_DUMP, _TOPOLOGY = "NCCL_TOPO_DUMP_FILE", "NCCL_TOPO_FILE"


class Place(NamedTuple):
    """A kind of cache, and where it is on this node."""

    kind: Kind
    path: str  # absolute


class Choice(NamedTuple):
    """What is kept of this job."""

    places: list[Place]
    variables: dict[str, str]  # for ranks
    notes: list[str]  # lines for people


def choose(root: str, environ: Mapping[str, str], own: Mapping[str, str], *, only: Collection[str] = ()) -> Choice:
    """PURE: which caches are kept, and the variables that say so.

    Args: root: the folder of the key. environ: that ranks will have. own: further folders, by a name for each.
    only: names of kinds; none: all but NCCL's.
    Raises: ConfigError.
    """
    places, variables, notes = [], {}, []
    unknown = sorted(set(only) - {kind.name for kind in (*KINDS, NCCL)})
    if unknown:
        names = ", ".join(kind.name for kind in (*KINDS, NCCL))
        raise ConfigError(f"there is no kind of cache {unknown[0]!r}: one of {names}")
    for kind in KINDS:
        if only and kind.name not in only:
            continue
        path = os.path.join(root, kind.name)
        given = environ.get(kind.variable)
        if given is None:
            variables[kind.variable] = path
        elif not _is_below(given, root):
            notes.append(f"{kind.variable}={given} is yours: that folder is neither filled nor kept")
            continue
        else:
            path = os.path.normpath(given)
        places.append(Place(kind, path))
        variables.update((name, value) for name, value in kind.also if name not in environ)
    if NCCL.name in only:
        places.append(Place(NCCL, os.path.join(root, NCCL.name)))
    for name, folder in sorted(own.items()):
        places.append(Place(Kind(name), _own_folder(name, folder, root)))
    for first, second in _pairs(places):
        if _is_below(second.path, first.path) or _is_below(first.path, second.path):
            raise ConfigError(
                f"{second.path}: the caches {first.kind.name} and {second.kind.name} lie in one another:"
                " give each a folder of its own"
            )
    return Choice(places, variables, notes)


def early_variables(environ: Mapping[str, str], root: str = "") -> dict[str, str] | None:
    """PURE: of those that `choose` will give to ranks, what is known before the key is.

    Args: root: the folder of the key, if it is known from an earlier start; "": only what does not depend on it.
    Returns: None where nothing is known before, as the user has given a folder.
    """
    if any(kind.variable in environ for kind in KINDS):
        return None
    found = {kind.variable: os.path.join(root, kind.name) for kind in KINDS} if root else {}
    return found | {name: value for kind in KINDS for name, value in kind.also if name not in environ}


def topology_variables(place: Place, node_type: str, environ: Mapping[str, str]) -> dict[str, str]:
    """What NCCL is told: the topology of a node just like this one, if it is known, else to write it down.

    `node_type`: what `caches_key.read_node_type` says; "" if it is not known.
    """
    if not node_type or _DUMP in environ or _TOPOLOGY in environ:
        return {}
    path = os.path.join(place.path, f"{node_type}.xml")
    return {_TOPOLOGY if os.path.isfile(path) else _DUMP: path}


def _own_folder(name: str, folder: str, root: str) -> str:
    if _OWN.fullmatch(name) is None or name in {kind.name for kind in (*KINDS, NCCL)}:
        raise ConfigError(f"--cache-dir {name}={folder}: take another name: small letters, digits, '-' and '_'")
    if not os.path.isabs(folder) or os.path.normpath(folder) == "/" or _is_below(root, folder):
        raise ConfigError(
            f"--cache-dir {name}={folder}: has to be an absolute path of a folder of that cache alone"
        )
    return os.path.normpath(folder)


def _is_below(path: str, folder: str) -> bool:
    if not os.path.isabs(path):
        return False
    path, folder = os.path.normpath(path), os.path.normpath(folder)
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _pairs(places: list[Place]) -> Iterator[tuple[Place, Place]]:
    for number, first in enumerate(places):
        for second in places[number + 1 :]:
            yield first, second


# ---- the folder --------------------------------------------------------------------------------------------


class KeyFolder(UsedFolder):
    """The folder of a key on this node, in use until it is closed, or its holder ends."""

    def __init__(self, key: str, environ: Mapping[str, str]) -> None:
        """Raises: ConfigError, StorageError when there is no place for it, or it is another user's."""
        super().__init__(os.path.join(first_step(environ), key[:KEY_LETTERS]))

    def make(self, places: list[Place]) -> None:
        """The folders of the caches. Raises: StorageError."""
        for place in places:
            with map_os_errors(place.path):
                make_private(place.path)


def remove_old(environ: Mapping[str, str], older_s: float = OLD_S) -> list[str]:
    """Takes away folders of keys that no job has used for so long; gives their paths.

    Raises: ConfigError, StorageError when there is no cache, or it is another user's.
    """
    return used_folders.remove_old(first_step(environ), f"[0-9a-f]{{{KEY_LETTERS}}}", older_s)


# ---- what is read ------------------------------------------------------------------------------------------


def mark(path: str, mtime_ns: int, used_s: float) -> None:
    """From now on `is_read` tells whether somebody reads the file. `used_s`: its last use, since the epoch.

    The mark is a time of access in January 1970: as many seconds as `used_s` has hours. Raises: OSError.
    """
    atime_s = min(max(1, int(used_s) // _HOUR_S), _MARK_S - 1)
    os.utime(path, ns=(atime_s * 1_000_000_000, mtime_ns), follow_symlinks=False)


def is_read(atime_ns: int) -> bool:
    """Whether a file was read, or made, after the last mark."""
    return atime_ns >= _MARK_S * 1_000_000_000


def last_use_s(atime_ns: int) -> float:
    """When a file was of use, to the hour."""
    return atime_ns / 1e9 if is_read(atime_ns) else atime_ns / 1e9 * _HOUR_S


def shows_reads(folder: str) -> bool:
    """Whether the file system keeps times of access: with `relatime`, too, a mark is older than any change.

    Where it is mounted with `noatime`, no file is seen to be used but those that a start makes: then the oldest go
    first, and what is still of use comes back when it is made again.
    """
    path = os.path.join(folder, f"{STAGING}probe-{os.getpid()}")
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.write(fd, b"x")
            mark(path, os.fstat(fd).st_mtime_ns, 0)
            os.pread(fd, 1, 0)
            return is_read(os.fstat(fd).st_atime_ns)
        finally:
            os.close(fd)
            os.unlink(path)
    except OSError:
        return False
