"""Tells what the interpreter that runs this file is, and what is installed for it: one line of JSON.

The line begins with MARK and the argument, by which the caller tells it from what start-up code prints.
Run by path in the ranks' interpreter (any Python from 3.8 on, bootseer need not be installed there), so it uses
the standard library only and imports nothing of the user's. A distribution is known by the SHA-256 of its RECORD,
which lists the sum of each of its files. importlib.metadata would take ten times as long.
"""

from __future__ import annotations

import os
import sys

if sys.path[:1] == [__file__.rpartition("/")[0]]:
    del sys.path[0]  # it is not on a rank's path
# What the user has called as Python's modules are is looked at, not imported.
_PATH, _LIBRARY = sys.path[:], os.path.dirname(os.__file__)
sys.path[:] = [each for each in _PATH if each == _LIBRARY or each.endswith("/lib-dynload")] or _PATH

import hashlib
import json
import sysconfig

MARK = "bootseer-base"
_SUMMED = ("RECORD", "METADATA", "PKG-INFO", "installed-files.txt")
_MOST_BYTES = 64 << 20  # of a RECORD


def normalize(name: str) -> str:
    """As PEP 503 has it: Foo_Bar and foo.bar are one name."""
    return "-".join(filter(None, name.lower().replace("_", "-").replace(".", "-").split("-")))


def split_entry(entry: str) -> tuple[str, str] | None:
    """Name and version out of a metadata entry's file name; None for other entries."""
    for ending in (".dist-info", ".egg-info"):
        if entry.endswith(ending):
            name, _, version = entry[: -len(ending)].partition("-")
            return normalize(name), version.partition("-py")[0] if ending == ".egg-info" else version
    return None


def summed(path: str) -> str:
    """SHA-256 of what tells a distribution's files, "" where it has nothing that does."""
    names = [os.path.join(path, name) for name in _SUMMED] if os.path.isdir(path) else [path]
    for name in names:
        try:
            with open(name, "rb") as file:
                return hashlib.sha256(file.read(_MOST_BYTES)).hexdigest()
        except OSError:
            continue
    return ""


def list_folder(folder: str) -> tuple[list[list[str]], list[str]]:
    """The distributions of a folder of sys.path as [name, version, sum], and the paths that its .pth files add."""
    found = []
    added = []
    try:
        entries = sorted(os.listdir(folder or "."))
    except OSError:
        return [], []  # zip files, and folders that are not there
    for entry in entries:
        parts = split_entry(entry)
        path = os.path.join(folder, entry)
        if parts is not None:
            found.append([*parts, summed(path)])
        elif entry.endswith(".pth"):
            try:
                with open(path, encoding="utf-8", errors="replace") as file:
                    lines = file.read(_MOST_BYTES).splitlines()
            except OSError:
                continue
            names = [line.strip() for line in lines if line.strip() and not line.startswith(("#", "import "))]
            added += [os.path.realpath(os.path.join(folder, name)) for name in names if "\0" not in name]
    return found, added


def list_conda(prefix: str) -> list[list[str]]:
    """Packages of a conda environment as [name, "version build"], from the names of its records."""
    try:
        entries = os.listdir(os.path.join(prefix, "conda-meta"))
    except OSError:
        return []
    parts = (entry[:-5].rsplit("-", 2) for entry in sorted(entries) if entry.endswith(".json"))
    return [[part[0], part[1] + " " + part[2]] for part in parts if len(part) == 3]


def find_libc() -> str:
    """The C library that this interpreter runs with."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (AttributeError, ValueError, OSError):
        return "other"


def describe() -> dict[str, object]:
    """Everything, as JSON has it."""
    folders = []
    seen = set()
    for entry in _PATH:
        folder = os.path.realpath(entry or ".")
        if folder not in seen:
            seen.add(folder)
            distributions, added = list_folder(folder)
            folders.append({"folder": folder, "distributions": distributions, "added": added})
    base = getattr(sys, "base_prefix", sys.prefix)
    return {
        "version": sys.version.split()[0],
        "implementation": sys.implementation.name,
        "build": sys.version,
        "abi": "{}{}".format(sys.implementation.cache_tag or "", getattr(sys, "abiflags", "")),
        "platform": sysconfig.get_platform(),
        "libc": find_libc(),
        "arch": os.uname().machine,
        "prefix": os.path.realpath(sys.prefix),
        "base_prefix": os.path.realpath(base),
        "is_venv": sys.prefix != base,
        "is_conda": os.path.isdir(os.path.join(sys.prefix, "conda-meta")),
        "purelib": sysconfig.get_path("purelib") or "",
        "platlib": sysconfig.get_path("platlib") or "",
        "scripts": sysconfig.get_path("scripts") or "",
        "folders": folders,
        "conda": list_conda(sys.prefix),
    }


def main() -> None:
    """Writes the line."""
    text = json.dumps(describe())  # ASCII: names that are no UTF-8 as \\udcXX
    sys.stdout.flush()  # what the user's start-up code printed comes before our line
    words = [MARK, sys.argv[1] if len(sys.argv) > 1 else "", text]
    data = ("\n" + " ".join(words) + "\n").encode("ascii")
    while data:
        data = data[os.write(1, data) :]


if __name__ == "__main__":
    main()
