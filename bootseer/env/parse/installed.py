"""Reads which packages set-up has installed from the dist-info directories of installers.

In: the targets, the start time of set-up. Out: packages that it has installed (pins.py).
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterator, Sequence

from bootseer.env.parse.pins import InstalledPackage

MAX_BYTES = 1 << 20
_NEED = re.compile(rb"^Requires-Dist:\s*([A-Za-z0-9][A-Za-z0-9._\-]*)", re.MULTILINE)
_NAME = re.compile(r"(.+)-([^-]+)\.dist-info")


def find_installed(targets: Sequence[str], began_ns: int) -> list[InstalledPackage]:
    """Find new packages. Args: began_ns: the start of set-up, by the clock of files."""
    return [found for directory in _directories(targets) if (found := _read(directory, began_ns)) is not None]


def find_new_records(targets: Sequence[str], began_ns: int) -> Iterator[str]:
    """Yield the RECORD paths of packages that pip has installed since then."""
    for directory in _directories(targets):
        record = os.path.join(directory, "RECORD")
        try:
            is_new = os.stat(record).st_ctime_ns >= began_ns
        except OSError:
            continue
        if is_new and _text(os.path.join(directory, "INSTALLER")).strip() == b"pip":
            yield record


def _directories(targets: Sequence[str]) -> Iterator[str]:
    for target in targets:
        pattern = glob.escape(target)
        for below in ("lib/*/site-packages", "", "*", "lib/*/dist-packages"):
            yield from glob.iglob(os.path.join(pattern, below, "*.dist-info"))


def _read(directory: str, began_ns: int) -> InstalledPackage | None:
    found = _NAME.fullmatch(os.path.basename(directory))
    try:
        is_new = os.stat(os.path.join(directory, "METADATA")).st_ctime_ns >= began_ns
    except OSError:
        return None
    if found is None or not is_new:
        return None
    installer = _text(os.path.join(directory, "INSTALLER")).strip()
    is_asked = os.path.exists(os.path.join(directory, "REQUESTED")) if installer == b"pip" else None
    if installer == b"conda":
        is_asked = False  # conda records it elsewhere; the files of its environments are parsed instead
    is_local, is_folder, source = _source(_text(os.path.join(directory, "direct_url.json")))
    head = _text(os.path.join(directory, "METADATA")).partition(b"\n\n")[0]
    needs = tuple(dict.fromkeys(need.decode() for need in _NEED.findall(head)))
    return InstalledPackage(found[1], found[2], is_asked, is_local, is_folder, source, needs)


def _source(data: bytes) -> tuple[bool, bool, str]:
    """Return whether it is local, whether a directory, and the commit or checksum of its source."""
    if not data:
        return False, False, ""
    try:
        given = json.loads(data)
        if str(given["url"]).startswith("file:"):
            return True, "dir_info" in given, ""
        version, archive = given.get("vcs_info") or {}, given.get("archive_info") or {}
        hashes = archive.get("hashes") or {}
        return False, False, str(version.get("commit_id") or next(iter(hashes.values()), "") or "none")
    except (ValueError, KeyError, TypeError, AttributeError):
        return False, False, ""


def _text(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_BYTES)
    except OSError:
        return b""
