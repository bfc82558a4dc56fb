"""PURE: which installed packages are not pinned, so that set-up on another day would install others.

In: installers' records of each package, and all text that set-up used (commands, files that it read). Out: names.
A package counts as requested if its installer records that, if no other package needs it, or if one of the user's
own needs it. It is pinned if a text has its version, or the commit or checksum of its source. Dependencies of
pinned packages are not checked.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

_EXACT = re.compile(
    r"(?<![\w.\-])([A-Za-z0-9][A-Za-z0-9._\-]*)\s*(?:\[[^\]\n]*\])?\s*={2,3}\s*([0-9][A-Za-z0-9.!+_\-]*)"
)
# uv.lock, poetry.lock, pdm.lock, pylock.toml
_LOCKED = re.compile(r"^\s*name\s*=\s*\"([^\"\n]+)\"\s*\n\s*version\s*=\s*\"([^\"\n]+)\"", re.MULTILINE)
_CONDA = re.compile(r"^\s*-?\s*(?:[\w.\-]+::)?([A-Za-z0-9_.\-]+)=([0-9][\w.!+\-]*)(?:=\w+)?\s*$", re.MULTILINE)
_ZEROS = re.compile(r"(\.0)+(?=$|\+)")


class InstalledPackage(NamedTuple):
    """A package that set-up has installed."""

    name: str
    version: str
    is_asked: bool | None  # requested by the user, by its installer's record; None: not recorded
    is_local: bool  # from the user's own directory or archive
    is_folder: bool  # from a directory: its dependencies are the user's choice as well
    source: str  # commit or checksum of its source; "" for an index
    needs: tuple[str, ...]  # names of packages


def canonical(name: str) -> str:
    """Return a package name in the form in which PEP 503 compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def find_unpinned(packages: Collection[InstalledPackage], texts: Iterable[str]) -> list[str]:
    """Return names and versions of packages that are not pinned, sorted."""
    known = list(texts)
    pins = {(canonical(name), _plain(version)) for text in known for name, version in _pins_of(text)}
    needed = {
        canonical(need) for each in packages for need in each.needs if canonical(each.name) != canonical(need)
    }
    own = {canonical(need) for each in packages if each.is_folder for need in each.needs}
    found = []
    for each in packages:
        name = canonical(each.name)
        is_asked = (name not in needed) if each.is_asked is None else each.is_asked
        if each.is_local or not (is_asked or name in own) or (name, _plain(each.version)) in pins:
            continue
        if each.source and any(each.source in text for text in known):
            continue
        found.append(f"{each.name} {each.version}")
    return sorted(found)


def _pins_of(text: str) -> Iterable[tuple[str, str]]:
    yield from _EXACT.findall(text)
    yield from _LOCKED.findall(text)
    yield from _CONDA.findall(text)


def _plain(version: str) -> str:
    return _ZEROS.sub("", version.lower().replace("-", ".").replace("_", "."))
