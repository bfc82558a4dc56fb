"""PURE: files of the node that are visible inside an image, and the order in which they are bound.

In: paths that a job needs, and the user's --image-bind. Out: binds that do not repeat each other, outer
directories before their contents. Directories of programs and libraries are never bound unless the user requests
it: they would hide the image's own.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bootseer.errors import UsageError

OWN_DIRECTORY = "/run/bootseer"  # inside; for Bootseer's own files
KERNEL_DIRECTORIES = ("/dev", "/sys", "/proc")
MAX_BINDS = 1000

# If a directory of the node hid these, the image would no longer be that image.
_CODE = tuple(
    f"{top}/{name}"
    for top in ("", "/usr", "/usr/local")
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "libexec")
)
_SYSTEM = (*_CODE, "/boot", "/etc", "/usr/share", "/usr/include", *KERNEL_DIRECTORIES, OWN_DIRECTORY)
_ALONE = ("/opt", "/var", "/run", "/srv", "/mnt", "/media", "/home")  # their contents can be bound


class Bind(NamedTuple):
    """A file or directory of the node, and its path inside."""

    source: str  # absolute, on the node
    target: str  # absolute, inside
    is_read_only: bool = False
    is_optional: bool = False  # left out where the node has no such file


class UnboundPath(NamedTuple):
    """A directory that is bound by default and shall not be."""

    target: str


def parse_bind(text: str) -> Bind | UnboundPath:
    """Parse one --image-bind: `SRC:DST`, `SRC:DST:ro`, `SRC` for the same path, or `no:DST`.

    SRC may be relative. Raises: UsageError.
    """
    parts = text.split(":")
    mode = parts.pop() if parts[-1] in ("ro", "rw") and len(parts) > 1 else "rw"
    if not 1 <= len(parts) <= 2 or not all(parts) or "\0" in text or "\n" in text:
        raise UsageError(f"--image-bind {text!r}: give SRC:DST or SRC:DST:ro, as in /data/set1:/data:ro")
    if parts[0] == "no" and len(parts) == 2:
        return UnboundPath(_target(text, parts[1]))
    if len(parts) == 1 and not parts[0].startswith("/"):
        raise UsageError(f"--image-bind {text!r}: give its path inside, as in {parts[0]}:/data")
    target = _target(text, parts[-1])
    if any(is_within(target, directory) for directory in ("/proc", OWN_DIRECTORY)):
        raise UsageError(f"--image-bind {text!r}: nothing can be bound at or below {target}")
    return Bind(parts[0], target, mode == "ro")


def _target(text: str, path: str) -> str:
    if not path.startswith("/"):
        raise UsageError(f"--image-bind {text!r}: the place inside must be an absolute path, not {path!r}")
    found = normalize(path)
    if found == "/":
        raise UsageError(f"--image-bind {text!r}: / inside is the image; name a directory in it")
    return found


def normalize(path: str) -> str:
    """Return an absolute path without `.`, `..` and repeated slashes."""
    return posixpath.normpath("/" + path.lstrip("/"))


def is_within(path: str, directory: str) -> bool:
    """Return whether a path is this directory or lies in it; both are normalised."""
    return directory == "/" or path == directory or path.startswith(directory + "/")


def why_not_by_default(directory: str) -> str:
    """Return why a directory of the job (working directory, script, HOME) is not bound by default; "" if it is."""
    if directory in _ALONE:
        return "it would hide everything that the image has there"
    for system in _SYSTEM:
        if is_within(directory, system) or is_within(system, directory):
            return f"it would hide the image's own {system}"
    return ""


def plan_binds(given: Iterable[Bind | UnboundPath], default: Sequence[Bind]) -> list[Bind]:
    """Return all binds of a job: the user's override the default ones of the same place.

    Returns: outer ones before their contents; /dev, /sys and /proc last, in this order, so that no link of an
    image leads through them while its places are made.
    """
    wanted = {bind.target: bind for bind in default}
    for each in given:
        if isinstance(each, Bind):
            wanted[each.target] = each
        else:
            wanted.pop(each.target, None)
    if len(wanted) > MAX_BINDS:
        raise UsageError(f"{len(wanted)} directories to bind; at most {MAX_BINDS}")
    planned: list[Bind] = []
    for bind in sorted(wanted.values(), key=_place):
        outer = next((each for each in reversed(planned) if is_within(bind.target, each.target)), None)
        if outer is None or not _shows(outer, bind):
            planned.append(bind)
    return planned


def _place(bind: Bind) -> tuple[int, list[str]]:
    top = next((directory for directory in KERNEL_DIRECTORIES if is_within(bind.target, directory)), "")
    return KERNEL_DIRECTORIES.index(top) + 1 if top else 0, bind.target.split("/")


def _shows(outer: Bind, bind: Bind) -> bool:
    """Return whether a bind already shows what another one requests in it."""
    below = bind.target.removeprefix(outer.target)
    return bind.source == outer.source.rstrip("/") + below and bind.is_read_only == outer.is_read_only


def find_hiding(path: str, binds: Iterable[Bind]) -> str:
    """Return the target of the bind that hides the image's file at `path`; "" if none does."""
    return max((bind.target for bind in binds if is_within(path, bind.target)), key=len, default="")
