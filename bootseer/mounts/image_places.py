"""What of this node a job sees inside its image without being asked: its folders, devices, names and addresses."""

from __future__ import annotations

import grp
import os
import pwd
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bootseer.mounts.accounts import MOST_BYTES, missing_line
from bootseer.mounts.binds import Bind, why_not_by_default

_ALWAYS = (
    Bind("/tmp", "/tmp"),  # noqa: S108
    Bind("/etc/resolv.conf", "/etc/resolv.conf", is_read_only=True, is_optional=True),
    Bind("/etc/hosts", "/etc/hosts", is_read_only=True, is_optional=True),
    Bind("/dev", "/dev"),  # with /dev/shm; what the caller may open of it the kernel decides
    Bind("/sys", "/sys", is_optional=True),
    Bind("/proc", "/proc"),
)


class Places(NamedTuple):
    """Binds that nobody asked for, and lines about those that are not made."""

    binds: tuple[Bind, ...]
    notes: tuple[str, ...]


def find_places(work: Sequence[str], own: Sequence[str], files: Mapping[str, str]) -> Places:
    """Args:
    work: folders of the job: working directory, the script's, HOME; left out where they would hide the image.
    own: folders that the job's processes need in any case, at their own paths: logs, events, a checkpoint's.
    files: of ours, by their place inside.
    """
    binds = list(_ALWAYS)
    notes = []
    for folder in dict.fromkeys(work):
        if not os.path.isabs(folder) or folder == "/" or not os.path.isdir(folder):
            continue
        places = _both(folder)
        reason = next((why for place in places if (why := why_not_by_default(place))), "")
        if reason:
            notes.append(
                f"{folder} of this node is not seen inside the image, as {reason} (--image-bind {folder})"
            )
            continue
        binds += [Bind(places[-1], place) for place in places]
    for folder in dict.fromkeys(own):
        if os.path.isdir(folder):
            places = _both(os.path.abspath(folder))
            binds += [Bind(places[-1], place) for place in places]
    binds += [Bind(source, place, is_read_only=True) for place, source in files.items()]
    return Places(tuple(binds), tuple(notes))


def _both(folder: str) -> list[str]:
    """A folder as it is named, and as it really is."""
    return list(dict.fromkeys((os.path.normpath(folder), os.path.realpath(folder))))


def read_users() -> list[str]:
    """Lines of passwd, the caller's own among them."""
    lines = _read_lines("/etc/passwd")
    try:
        found = pwd.getpwuid(os.geteuid())
    except KeyError:
        return lines
    fields = tuple(str(field) for field in found)
    return lines + missing_line(found.pw_uid, fields, lines)


def read_groups() -> list[str]:
    """Lines of group, the caller's own groups among them."""
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
            return file.read(MOST_BYTES).splitlines()
    except OSError:
        return []
