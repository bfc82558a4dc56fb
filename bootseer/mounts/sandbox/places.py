"""Files of this node that a job sees inside its image by default: directories, devices, names and addresses."""

from __future__ import annotations

import grp
import os
import pwd
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bootseer.mounts.sandbox.accounts import MAX_BYTES, missing_line
from bootseer.mounts.sandbox.binds import Bind, why_not_by_default

_ALWAYS = (
    Bind("/tmp", "/tmp"),  # noqa: S108
    Bind("/etc/resolv.conf", "/etc/resolv.conf", is_read_only=True, is_optional=True),
    Bind("/etc/hosts", "/etc/hosts", is_read_only=True, is_optional=True),
    Bind("/dev", "/dev"),  # with /dev/shm; the kernel decides which devices the caller may open
    Bind("/sys", "/sys", is_optional=True),
    Bind("/proc", "/proc"),
)


class DefaultBinds(NamedTuple):
    """Default binds, and lines about those that are left out."""

    binds: tuple[Bind, ...]
    notes: tuple[str, ...]


def find_places(work: Sequence[str], own: Sequence[str], files: Mapping[str, str]) -> DefaultBinds:
    """Return the default binds. Args:
    work: directories of the job: working directory, the script's, HOME; left out where they would hide the image.
    own: directories that the job's processes need in any case, at their own paths: logs, events, a checkpoint's.
    files: Bootseer's own files, by their place inside.
    """
    binds = list(_ALWAYS)
    notes = []
    for directory in dict.fromkeys(work):
        if not os.path.isabs(directory) or directory == "/" or not os.path.isdir(directory):
            continue
        places = _both(directory)
        reason = next((why for place in places if (why := why_not_by_default(place))), "")
        if reason:
            notes.append(
                f"{directory} of this node is not visible inside the image, as {reason} (--image-bind {directory})"
            )
            continue
        binds += [Bind(places[-1], place) for place in places]
    for directory in dict.fromkeys(own):
        if os.path.isdir(directory):
            places = _both(os.path.abspath(directory))
            binds += [Bind(places[-1], place) for place in places]
    binds += [Bind(source, place, is_read_only=True) for place, source in files.items()]
    return DefaultBinds(tuple(binds), tuple(notes))


def _both(directory: str) -> list[str]:
    """Return the normalised and the real path of a directory."""
    return list(dict.fromkeys((os.path.normpath(directory), os.path.realpath(directory))))


def read_users() -> list[str]:
    """Return the lines of passwd, the caller's own among them."""
    lines = _read_lines("/etc/passwd")
    try:
        found = pwd.getpwuid(os.geteuid())
    except KeyError:
        return lines
    fields = tuple(str(field) for field in found)
    return lines + missing_line(found.pw_uid, fields, lines)


def read_groups() -> list[str]:
    """Return the lines of group, the caller's own groups among them."""
    lines = _read_lines("/etc/group")
    for number in {os.getegid(), *os.getgroups()}:
        try:
            found = grp.getgrgid(number)
        except KeyError:
            continue
        lines += missing_line(number, (found.gr_name, "x", str(number), ""), lines)
    return lines


def _read_lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read(MAX_BYTES).splitlines()
    except OSError:
        return []
