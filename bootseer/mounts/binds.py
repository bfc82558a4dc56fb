"""PURE: what of the node is seen inside an image, and in which order it is put there.

In: paths that a job needs, and what the user asked for. Out: binds that do not repeat each other, outer folders
before what lies in them. Folders of programs and libraries are never taken from the node unless the user says so:
they would hide the image's own.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bootseer.errors import UsageError

OWN_FOLDER = "/run/bootseer"  # inside; for what is ours there
KERNEL_FOLDERS = ("/dev", "/sys", "/proc")
MOST_BINDS = 1000

# Hidden by a folder of the node, an image would not be that image any more.
_CODE = tuple(
    f"{top}/{name}"
    for top in ("", "/usr", "/usr/local")
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "libexec")
)
_SYSTEM = (*_CODE, "/boot", "/etc", "/usr/share", "/usr/include", *KERNEL_FOLDERS, OWN_FOLDER)
_ALONE = ("/opt", "/var", "/run", "/srv", "/mnt", "/media", "/home")  # what lies in them can be bound


class Bind(NamedTuple):
    """A file or folder of the node, and where it is seen inside."""

    source: str  # absolute, on the node
    target: str  # absolute, inside
    is_read_only: bool = False
    is_optional: bool = False  # left out where the node has no such file


class Without(NamedTuple):
    """A folder that is bound by default, and is not to be."""

    target: str


def parse_bind(text: str) -> Bind | Without:
    """One --image-bind: `SRC:DST`, `SRC:DST:ro`, `SRC` for the same path, or `no:DST`.

    SRC may be relative. Raises: UsageError.
    """
    parts = text.split(":")
    mode = parts.pop() if parts[-1] in ("ro", "rw") and len(parts) > 1 else "rw"
    if not 1 <= len(parts) <= 2 or not all(parts) or "\0" in text or "\n" in text:
        raise UsageError(f"--image-bind {text!r}: give SRC:DST or SRC:DST:ro, as in /data/set1:/data:ro")
    if parts[0] == "no" and len(parts) == 2:
        return Without(_target(text, parts[1]))
    if len(parts) == 1 and not parts[0].startswith("/"):
        raise UsageError(f"--image-bind {text!r}: say where it is seen inside, as in {parts[0]}:/data")
    target = _target(text, parts[-1])
    if any(is_within(target, folder) for folder in ("/proc", OWN_FOLDER)):
        raise UsageError(f"--image-bind {text!r}: nothing can be bound at or below {target}")
    return Bind(parts[0], target, mode == "ro")


def _target(text: str, path: str) -> str:
    if not path.startswith("/"):
        raise UsageError(f"--image-bind {text!r}: the place inside must be an absolute path, not {path!r}")
    found = normalize(path)
    if found == "/":
        raise UsageError(f"--image-bind {text!r}: / inside is the image; name a folder in it")
    return found


def normalize(path: str) -> str:
    """An absolute path without `.`, `..` and repeated slashes."""
    return posixpath.normpath("/" + path.lstrip("/"))


def is_within(path: str, folder: str) -> bool:
    """Whether a path is this folder, or lies in it; both normalised."""
    return folder == "/" or path == folder or path.startswith(folder + "/")


def why_not_by_default(folder: str) -> str:
    """Why a folder of the job (working directory, script, HOME) is not bound unless asked for; "" if it is."""
    if folder in _ALONE:
        return "it would hide all that the image has there"
    for system in _SYSTEM:
        if is_within(folder, system) or is_within(system, folder):
            return f"it would hide the image's own {system}"
    return ""


def plan_binds(given: Iterable[Bind | Without], default: Sequence[Bind]) -> list[Bind]:
    """All binds of a job: the user's win over the default ones of the same place.

    Returns: outer ones before what lies in them; /dev, /sys and /proc last, in this order, so that no link of an
    image leads through them while its places are made.
    """
    wanted = {bind.target: bind for bind in default}
    for each in given:
        if isinstance(each, Bind):
            wanted[each.target] = each
        else:
            wanted.pop(each.target, None)
    if len(wanted) > MOST_BINDS:
        raise UsageError(f"{len(wanted)} folders to bind; at most {MOST_BINDS}")
    planned: list[Bind] = []
    for bind in sorted(wanted.values(), key=_place):
        outer = next((each for each in reversed(planned) if is_within(bind.target, each.target)), None)
        if outer is None or not _shows(outer, bind):
            planned.append(bind)
    return planned


def _place(bind: Bind) -> tuple[int, list[str]]:
    top = next((folder for folder in KERNEL_FOLDERS if is_within(bind.target, folder)), "")
    return KERNEL_FOLDERS.index(top) + 1 if top else 0, bind.target.split("/")


def _shows(outer: Bind, bind: Bind) -> bool:
    """Whether a bind shows already what another one asks for in it."""
    below = bind.target.removeprefix(outer.target)
    return bind.source == outer.source.rstrip("/") + below and bind.is_read_only == outer.is_read_only


def find_hiding(path: str, binds: Iterable[Bind]) -> str:
    """The target of the bind that hides what an image has at `path`; "" if none does."""
    return max((bind.target for bind in binds if is_within(path, bind.target)), key=len, default="")
