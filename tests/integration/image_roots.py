"""Root file systems for tests of images: one with an interpreter of this machine at another place, little else.

Files are linked, not copied, where that can be; nothing may write to them. A Python of another version than the
tests' own is taken where there is one.
"""

from __future__ import annotations

import functools
import glob
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from typing import NamedTuple

_LEFT_OUT = {
    "test",
    "tests",
    "idlelib",
    "tkinter",
    "ensurepip",
    "lib2to3",
    "site-packages",
    "__pycache__",
    "pydoc_data",
}
_TELL = "import json, sys; print(json.dumps([sys.base_prefix, sys.base_exec_prefix, list(sys.version_info[:2])]))"
PREFIX = "/usr/local"


class Interpreter(NamedTuple):
    """A Python of this machine."""

    program: str
    prefix: str
    version: tuple[int, int]


@functools.cache
def find_interpreter() -> Interpreter:
    """One of another minor version than ours if there is any, new enough for rank hooks; else our own."""
    places = glob.glob(os.path.dirname(os.path.dirname(sys.base_prefix)) + "/versions/*/bin/python3")
    places += [path for name in ("3.13", "3.12", "3.10", "3.9", "3.14") if (path := shutil.which(f"python{name}"))]
    found = [tell(path) for path in (*places, sys.executable)]
    usable = [each for each in found if each is not None and each.version >= (3, 8)]
    usable.sort(key=lambda each: (each.version != sys.version_info[:2], each.version), reverse=True)
    return usable[0]


def tell(program: str) -> Interpreter | None:
    """What an interpreter says of itself; None if it cannot be run."""
    try:
        run = subprocess.run([program, "-I", "-c", _TELL], capture_output=True, text=True, timeout=30)
        prefix, _, (major, minor) = json.loads(run.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return Interpreter(f"{prefix}/bin/python{major}.{minor}", prefix, (major, minor))


def make_root(directory: str, interpreter: Interpreter | None = None) -> str:
    """A root with /usr/local/bin/python3, /bin/sh, /usr/bin/env and cat; returns the version, as 3.12."""
    interpreter = interpreter or find_interpreter()
    version = f"{interpreter.version[0]}.{interpreter.version[1]}"
    for name in (
        "etc",
        "usr/local/bin",
        "usr/local/lib",
        "usr/bin",
        "bin",
        "lib64",
        "opt/data",
        "var",
        "tmp",
        "home",
    ):
        os.makedirs(os.path.join(directory, name), exist_ok=True)
    library = f"lib/python{version}"
    for base, directories, files in os.walk(os.path.join(interpreter.prefix, library)):
        directories[:] = [name for name in directories if name not in _LEFT_OUT and not name.startswith("config-")]
        place = os.path.join(directory + PREFIX, os.path.relpath(base, interpreter.prefix))
        os.makedirs(place, exist_ok=True)
        for name in files:
            link(os.path.join(base, name), os.path.join(place, name))
    os.makedirs(f"{directory}{PREFIX}/{library}/site-packages", exist_ok=True)
    program = os.path.realpath(interpreter.program)
    link(program, f"{directory}{PREFIX}/bin/python{version}")
    os.symlink(f"python{version}", f"{directory}{PREFIX}/bin/python3")
    programs = {
        shutil.which(name) or "": place
        for name, place in (("dash", "/bin/sh"), ("env", "/usr/bin/env"), ("cat", "/bin/cat"))
    }
    for path, place in programs.items():
        link(os.path.realpath(path), directory + place)
    extensions = glob.glob(f"{directory}{PREFIX}/{library}/lib-dynload/*.so")
    for path in libraries([program, *extensions, *programs]):
        place = directory + path
        os.makedirs(os.path.dirname(place), exist_ok=True)
        if not os.path.lexists(place):
            link(os.path.realpath(path), place)
    write(f"{directory}/etc/passwd", "root:x:0:0:root:/root:/bin/sh\nimageuser:x:4711:4711::/:/bin/sh\n")
    write(f"{directory}/etc/group", "root:x:0:\nimagegroup:x:4711:\n")
    write(f"{directory}/etc/os-release", "ID=made\n")
    write(f"{directory}/opt/data/hello.txt", "from the image\n")
    return version


def add_pip(directory: str, version: str) -> str:
    """Give a root's Python our pip, with its certificates, which Debian keeps apart. Returns its packages."""
    pip = os.path.dirname(str(importlib.import_module("pip").__file__))
    packages = f"{directory}{PREFIX}/lib/python{version}/site-packages"
    shutil.copytree(pip, f"{packages}/pip", ignore=shutil.ignore_patterns("__pycache__"))
    certificates = str(importlib.import_module("pip._vendor.certifi").where())
    if not certificates.startswith(pip):
        os.makedirs(os.path.dirname(directory + certificates), exist_ok=True)
        shutil.copy(certificates, directory + certificates)
    return packages


def libraries(programs: list[str]) -> list[str]:
    """The shared libraries that these need, by the paths under which the loader finds them."""
    run = subprocess.run(["ldd", *programs], capture_output=True, text=True)
    return sorted({found[1] for found in re.finditer(r"(?:=> |^\s+)(/\S+) \(0x", run.stdout, re.MULTILINE)})


def link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
