"""PURE: the names of users and groups inside an image.

The node's come first, so that files of HOME and of shared directories have the same names as outside. The image's
own follow, for its programs, where neither name nor number is taken.
"""

from __future__ import annotations

from collections.abc import Iterable

MAX_BYTES = 4 << 20  # of one file
_NUMBER = 2  # field of passwd and group


def merge_accounts(node: Iterable[str], image: Iterable[str]) -> str:
    """Merge the lines of passwd or group of both into one file; invalid lines are left out."""
    names: set[str] = set()
    numbers: set[str] = set()
    lines = []
    for source in (node, image):
        chosen = []
        for line in source:
            fields = line.rstrip("\n").split(":")
            if len(fields) <= _NUMBER or not fields[0] or not fields[_NUMBER].isdecimal():
                continue  # comments, and the `+` of NIS
            if fields[0] not in names and fields[_NUMBER] not in numbers:
                chosen.append((fields[0], fields[_NUMBER], ":".join(fields)))
        # Two names of one number are fine within one file.
        names.update(name for name, _, _ in chosen)
        numbers.update(number for _, number, _ in chosen)
        lines += [line for _, _, line in chosen]
    return "".join(line + "\n" for line in dict.fromkeys(lines))


def missing_line(number: int, fields: tuple[str, ...], node: Iterable[str]) -> list[str]:
    """Return the caller's own line if the node's file lacks it, as with names from a directory service."""
    if any(line.split(":")[_NUMBER : _NUMBER + 1] == [str(number)] for line in node):
        return []
    if any(":" in field or "\n" in field for field in fields):
        return []
    return [":".join(fields)]
