"""The trees of `bench image`: this machine's interpreter with its libraries, and packages that pip installs.

A root has the interpreter, the standard library and the shared libraries at the paths they have here, and the
packages in /opt/env. It is made once: a stamp says of what, and a root with the same stamp is used again.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from bench.ckpt_run import make_environ
from bench.image_programs import DIRECTORIES, Program, import_program, train_program
from bench.record import BenchError, note

PREFIX = "/opt/env"
# Of PyPI: wheels of torch for Linux that bring CUDA. `numpy` as torch warns without it.
CUDA = ("torch==2.15.0", "numpy")
CPU = ("torch==2.13.0", "numpy")
NEEDED_BYTES = {"cuda": 32_000_000_000, "cpu": 8_000_000_000, "": 3_000_000_000}
LIBRARIES = ("libstdc++.so.6", "libgcc_s.so.1", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libutil.so.1")
_LEFT_OUT = ("site-packages", "dist-packages", "test", "tests", "idlelib", "ensurepip", "tkinter", "config-*")
_LAYOUT = 1  # of what is made here; another number makes it anew


class Root(NamedTuple):
    """A root folder, and what it has."""

    folder: str
    size: int  # bytes of files
    files: int
    of: str  # packages and versions, for people
    programs: list[Program]


def make_root(kind: str, directory: str) -> Root:
    """The root of a kind (cuda, cpu, or a folder of Python modules), made in `directory` if it is not there yet.

    Raises: BenchError when pip finds no such packages.
    """
    stamp = _stamp(kind)
    root, stamp_path = os.path.join(directory, "root"), os.path.join(directory, "stamp.json")
    if not _is_made(stamp_path, stamp) or not os.path.isdir(root):
        note(f"making the tree in {root}")
        shutil.rmtree(directory, ignore_errors=True)
        os.makedirs(root)
        if kind in ("cuda", "cpu"):
            install(kind, root)
        else:
            packages = f"{PREFIX}/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
            shutil.copytree(kind, root + packages, symlinks=True)
        add_interpreter(root)
        with open(stamp_path, "w", encoding="utf-8") as file:
            json.dump(stamp, file)
    return describe(kind, root)


def describe(kind: str, root: str) -> Root:
    """What a root has."""
    paths = regular_files(root)
    size = sum(os.path.getsize(path) for path in paths)
    found = glob.glob(f"{root}{PREFIX}/**/site-packages", recursive=True) or glob.glob(
        f"{root}{PREFIX}/**/dist-packages", recursive=True
    )
    if not found:
        raise BenchError(f"{root}: there are no packages in it: take it away, it is made anew")
    search_path = found[0].removeprefix(root)
    interpreter = os.path.realpath(sys._base_executable)  # type: ignore[attr-defined]
    if kind not in ("cuda", "cpu"):
        names = sorted({name.removesuffix(".py") for name in os.listdir(found[0]) if name.isidentifier()
                        or name.endswith(".py")})  # fmt: skip
        return Root(root, size, len(paths), "modules", [import_program(interpreter, search_path, names)])
    of = ", ".join(
        f"{match[1]} {match[2]}"
        for name in ("torch", "numpy")
        for path in glob.glob(f"{found[0]}/{name}-*.dist-info")
        if (match := re.fullmatch(r"(\w+)-(.+)\.dist-info", os.path.basename(path)))
    )
    programs = [import_program(interpreter, search_path, ["torch"]), train_program(interpreter, search_path)]
    return Root(root, size, len(paths), of, programs)


def install(kind: str, root: str) -> None:
    """Packages of a kind, by pip, into a root."""
    wanted = CUDA if kind == "cuda" else CPU
    argv = [sys.executable, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--ignore-installed"]
    argv += ["--no-warn-script-location", "--root", root, "--prefix", PREFIX, *wanted]
    ran = subprocess.run(argv, env=make_environ(), capture_output=True, text=True)
    if ran.returncode:
        raise BenchError(
            f"pip finds no {' '.join(wanted)}; give another index by PIP_INDEX_URL, or another tree by --tree:\n"
            f"{ran.stderr[-2000:]}"
        )
    has_cuda = bool(glob.glob(f"{root}{PREFIX}/**/nvidia/**/libcudart.so*", recursive=True))
    if kind == "cuda" and not has_cuda:
        raise BenchError(
            f"{wanted[0]} as pip finds it brings no CUDA libraries; name an index that has the CUDA wheels by"
            " PIP_INDEX_URL (PyPI has), or measure --tree cpu"
        )


def add_interpreter(root: str) -> None:
    """This interpreter, its standard library and all shared libraries that they need; the folders of a root."""
    interpreter = os.path.realpath(sys._base_executable)  # type: ignore[attr-defined]
    copy(interpreter, root)
    bases = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    bases |= {f"installed_{name}": value for name, value in bases.items()}
    for directory in {sysconfig.get_path(name, vars=bases) for name in ("stdlib", "platstdlib")}:
        left_out = shutil.ignore_patterns(*_LEFT_OUT)
        shutil.copytree(directory, root + directory, symlinks=True, ignore=left_out, dirs_exist_ok=True)
        modules = glob.glob(f"{directory}/lib-dynload/*.so")
        for path in shared_libraries([interpreter, *modules]):
            copy(path, root)
    if os.path.exists("/etc/ld.so.cache"):
        copy("/etc/ld.so.cache", root)
    for name in DIRECTORIES:
        os.makedirs(os.path.join(root, name), exist_ok=True)


def shared_libraries(programs: list[str]) -> list[str]:
    """Paths of what the dynamic linker loads for programs, itself too, and of LIBRARIES."""
    said = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False).stdout
    found = set(re.findall(r"(?:=> |^\s+)(/\S+) \(0x", said, flags=re.MULTILINE))
    known = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    for name in LIBRARIES:
        match = re.search(
            rf"^\s+{re.escape(name)} \([^)]*(?:x86-64|AArch64)[^)]*\) => (\S+)$", known, re.MULTILINE
        )
        if match:
            found.add(match[1])
    return sorted(found)


def copy(path: str, root: str) -> None:
    """A file to the path it has here; of a link what it means."""
    os.makedirs(os.path.dirname(root + path), exist_ok=True)
    shutil.copy2(path, root + path)


def regular_files(directory: str) -> list[str]:
    """All regular files of a folder."""
    return [entry.path for entry in walk(directory) if entry.is_file(follow_symlinks=False)]


def walk(directory: str) -> Iterator[os.DirEntry[str]]:
    with os.scandir(directory) as entries:
        for entry in entries:
            yield entry
            if entry.is_dir(follow_symlinks=False):
                yield from walk(entry.path)


def _stamp(kind: str) -> dict[str, object]:
    what: Iterable[object] = {"cuda": CUDA, "cpu": CPU}.get(kind, ())
    if kind not in ("cuda", "cpu"):
        if not os.path.isdir(kind):
            raise BenchError(f"--tree {kind}: is no folder; give cuda, cpu or a folder of Python modules")
        what = sorted((entry.path, entry.stat().st_mtime_ns) for entry in walk(kind) if entry.is_file())
    return {"layout": _LAYOUT, "of": json.loads(json.dumps(list(what))), "python": sys.version}


def _is_made(path: str, stamp: dict[str, object]) -> bool:
    try:
        with open(path, encoding="utf-8") as file:
            return bool(json.load(file) == stamp)
    except (OSError, ValueError):
        return False
