"""List the distributions of the interpreter that runs this file: one line of fields separated by NUL.

Run by path in the ranks' interpreter (any Python from 3.8 on, bootseer need not be installed there), so it uses
only the standard library. Names come from the *.dist-info and *.egg-info entries of sys.path. They are not opened,
and importlib.metadata is not used, as it would take ten times as long. Ends when its standard input does.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    if sys.path and sys.path[0] == __file__.rpartition("/")[0]:
        del sys.path[0]  # this directory is not on a rank's path
    # User files with the names of standard modules are listed, not imported.
    _PATH = sys.path[:]
    sys.path[:] = [each for each in _PATH if each.endswith("/lib-dynload")] or _PATH

import fcntl

MARK = "bootseer-distributions"
_F_SETSIG = 10  # missing from the fcntl module
_SIGTERM = 15


def end_with_parent() -> None:
    """End this process by a signal when the parent, at the other end of standard input, is gone."""
    try:
        fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(0, _F_SETSIG, _SIGTERM)
        fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_NONBLOCK | os.O_ASYNC)
        if not os.read(0, 1):
            sys.exit(1)  # it was gone already
    except OSError:
        pass  # nothing to read: the parent lives; or standard input is something else: run by hand


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


def list_names(path: list[str]) -> list[str]:
    """Return distributions on this path as name==version, sorted; the first of a name wins, as in imports."""
    found: dict[str, str] = {}
    for directory in path:
        try:
            entries = sorted(os.listdir(directory or "."))
        except OSError:
            continue  # zip files, and missing directories
        for entry in entries:
            parts = split_entry(entry)
            if parts is not None:
                found.setdefault(*parts)
    return sorted(f"{name}=={version}" if version else name for name, version in found.items())


def describe_interpreter() -> str:
    """Return version and ABI."""
    multiarch = getattr(sys.implementation, "_multiarch", sys.platform)
    tag = (sys.implementation.cache_tag or sys.implementation.name) + getattr(sys, "abiflags", "")
    return f"{sys.version.split()[0]} {tag}-{multiarch}"


def main(path: list[str]) -> None:
    """Write the line."""
    end_with_parent()
    fields = [MARK, describe_interpreter(), *list_names(path)]
    line = "\0".join(field.replace("\n", "?") for field in fields)
    sys.stdout.flush()  # output of the user's start-up code comes before this line
    os.write(1, f"\n{line}\n".encode("utf-8", "backslashreplace"))


if __name__ == "__main__":
    main(_PATH)
