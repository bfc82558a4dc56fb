"""What set-up has installed, as installers write it down beside packages (dist-info).

In: the targets, when set-up began. Out: packages that it has installed (pins.py).
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterator, Sequence

from bootseer.env.pins import Installed

MOST_BYTES = 1 << 20
_NEED = re.compile(rb"^Requires-Dist:\s*([A-Za-z0-9][A-Za-z0-9._\-]*)", re.MULTILINE)
_NAME = re.compile(r"(.+)-([^-]+)\.dist-info")


def find_installed(targets: Sequence[str], began_ns: int) -> list[Installed]:
    """Args: began_ns: when set-up began, by the clock of files."""
    return [found for folder in _folders(targets) if (found := _read(folder, began_ns)) is not None]


def new_records(targets: Sequence[str], began_ns: int) -> Iterator[str]:
    """Lists of files (RECORD) of packages that pip has installed since then."""
    for folder in _folders(targets):
        record = os.path.join(folder, "RECORD")
        try:
            is_new = os.stat(record).st_ctime_ns >= began_ns
        except OSError:
            continue
        if is_new and _text(os.path.join(folder, "INSTALLER")).strip() == b"pip":
            yield record


def _folders(targets: Sequence[str]) -> Iterator[str]:
    for target in targets:
        pattern = glob.escape(target)
        for below in ("lib/*/site-packages", "", "*", "lib/*/dist-packages"):
            yield from glob.iglob(os.path.join(pattern, below, "*.dist-info"))


def _read(folder: str, began_ns: int) -> Installed | None:
    found = _NAME.fullmatch(os.path.basename(folder))
    try:
        is_new = os.stat(os.path.join(folder, "METADATA")).st_ctime_ns >= began_ns
    except OSError:
        return None
    if found is None or not is_new:
        return None
    installer = _text(os.path.join(folder, "INSTALLER")).strip()
    is_asked = os.path.exists(os.path.join(folder, "REQUESTED")) if installer == b"pip" else None
    if installer == b"conda":
        is_asked = False  # conda says it elsewhere, and what its environments name is looked at
    is_local, is_folder, source = _source(_text(os.path.join(folder, "direct_url.json")))
    head = _text(os.path.join(folder, "METADATA")).partition(b"\n\n")[0]
    needs = tuple(dict.fromkeys(need.decode() for need in _NEED.findall(head)))
    return Installed(found[1], found[2], is_asked, is_local, is_folder, source, needs)


def _source(data: bytes) -> tuple[bool, bool, str]:
    """Whether it is the user's own, whether a folder, and the commit or sum of what it was taken from."""
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
            return file.read(MOST_BYTES)
    except OSError:
        return b""
