"""Prints a description of the interpreter that runs this file, and of its installed packages: one line of JSON.

The line begins with MARK and the argument, so that the caller can separate it from the output of start-up code.
It runs by path in the ranks' interpreter (any Python from 3.8 on, without bootseer). So it uses only the standard
library, and imports no files of the user. The SHA-256 of its RECORD identifies a distribution, as RECORD lists the
checksum of each file. importlib.metadata would take ten times as long.
"""

from __future__ import annotations

import os
import sys

if sys.path[:1] == [__file__.rpartition("/")[0]]:
    del sys.path[0]  # it is not on a rank's path
# Files of the user that have the names of Python's modules are inspected, not imported.
_PATH, _LIBRARY = sys.path[:], os.path.dirname(os.__file__)
sys.path[:] = [each for each in _PATH if each == _LIBRARY or each.endswith("/lib-dynload")] or _PATH

import hashlib
import json
import sysconfig

MARK = "bootseer-base"
_SUMMED = ("RECORD", "METADATA", "PKG-INFO", "installed-files.txt")
_MAX_BYTES = 64 << 20  # of a RECORD


def normalize(name: str) -> str:
    """Normalize a name as in PEP 503: Foo_Bar and foo.bar are one name."""
    return "-".join(filter(None, name.lower().replace("_", "-").replace(".", "-").split("-")))


def split_entry(entry: str) -> tuple[str, str] | None:
    """Return name and version from a metadata entry's file name; None for other entries."""
    for ending in (".dist-info", ".egg-info"):
        if entry.endswith(ending):
            name, _, version = entry[: -len(ending)].partition("-")
            return normalize(name), version.partition("-py")[0] if ending == ".egg-info" else version
    return None


def summed(path: str) -> str:
    """Return the SHA-256 of the file that lists a distribution's files, "" if it has none."""
    names = [os.path.join(path, name) for name in _SUMMED] if os.path.isdir(path) else [path]
    for name in names:
        try:
            with open(name, "rb") as file:
                return hashlib.sha256(file.read(_MAX_BYTES)).hexdigest()
        except OSError:
            continue
    return ""


def list_directory(directory: str) -> tuple[list[list[str]], list[str]]:
    """List the distributions of a sys.path entry as [name, version, checksum], and paths its .pth files add."""
    found = []
    added = []
    try:
        entries = sorted(os.listdir(directory or "."))
    except OSError:
        return [], []  # zip files, and directories that do not exist
    for entry in entries:
        parts = split_entry(entry)
        path = os.path.join(directory, entry)
        if parts is not None:
            found.append([*parts, summed(path)])
        elif entry.endswith(".pth"):
            try:
                with open(path, encoding="utf-8", errors="replace") as file:
                    lines = file.read(_MAX_BYTES).splitlines()
            except OSError:
                continue
            names = [line.strip() for line in lines if line.strip() and not line.startswith(("#", "import "))]
            added += [os.path.realpath(os.path.join(directory, name)) for name in names if "\0" not in name]
    return found, added


def list_conda(prefix: str) -> list[list[str]]:
    """List the packages of a conda environment as [name, "version build"], from the names of its records."""
    try:
        entries = os.listdir(os.path.join(prefix, "conda-meta"))
    except OSError:
        return []
    parts = (entry[:-5].rsplit("-", 2) for entry in sorted(entries) if entry.endswith(".json"))
    return [[part[0], part[1] + " " + part[2]] for part in parts if len(part) == 3]


def find_libc() -> str:
    """Return the C library of this interpreter."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (AttributeError, ValueError, OSError):
        return "other"


def describe() -> dict[str, object]:
    """Return the description, in types of JSON."""
    directories = []
    seen = set()
    for entry in _PATH:
        directory = os.path.realpath(entry or ".")
        if directory not in seen:
            seen.add(directory)
            distributions, added = list_directory(directory)
            directories.append({"folder": directory, "distributions": distributions, "added": added})
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
        "folders": directories,
        "conda": list_conda(sys.prefix),
    }


def main() -> None:
    """Write the line."""
    text = json.dumps(describe())  # ASCII: names that are not UTF-8 as \\udcXX
    sys.stdout.flush()  # the output of the user's start-up code comes before this line
    words = [MARK, sys.argv[1] if len(sys.argv) > 1 else "", text]
    data = ("\n" + " ".join(words) + "\n").encode("ascii")
    while data:
        data = data[os.write(1, data) :]


if __name__ == "__main__":
    main()
