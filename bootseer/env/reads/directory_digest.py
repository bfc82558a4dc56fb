"""SHA-256 of files and directories that decide the result of set-up.

A directory's digest is that of the sorted list of its entries: relative path, kind, whether it is executable,
SHA-256 of the content or of the target of a link. Times, owners and other mode bits do not count: they differ
between two checkouts of the same files. Files that tools create and that are not installed are left out. For a
project these include the files of its builds. For a directory that the user declared they are only those that
change by themselves (.git, __pycache__ ...); the targets of its links count like its own entries.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from bootseer.errors import ConfigError, KeyUnknown
from bootseer.linux.child_processes import run_limited
from bootseer.storage.os_errors import to_storage_error

MAX_FILES = 100_000
MAX_BYTES = 10_000_000_000
GIT_S = 20.0
END_BYTES = 64 << 10  # of an archive
_PART_BYTES = 1 << 20  # of a file, read at once

_TOOLS_DIRECTORIES = {
    *(b".git", b".hg", b".svn", b"__pycache__"),
    *(b".tox", b".nox", b".mypy_cache", b".ruff_cache", b".pytest_cache", b".ipynb_checkpoints"),
}
_SKIPPED_DIRECTORIES = _TOOLS_DIRECTORIES | {b".eggs", b"node_modules"}
_BUILD = b"build"  # of setuptools, if it has only such entries; else a directory of the project itself
_OF_BUILDS = (b"lib", b"bdist.", b"temp.", b"scripts-", b"__editable__.")
_NO_FILES = ("/proc", "/sys")
_SKIPPED_ENDS = (b".pyc", b".pyo", b".egg-info", b".dist-info")
ARCHIVES = (b".whl", b".zip", b".tar.gz", b".tgz", b".tar.bz2", b".tar.xz", b".conda", b".egg", b".html")
# Files that the build of a package reads; the rest of an editable install is used in place.
_BUILD_NAMES = {
    *(b"makefile", b"cmakelists.txt", b"meson.build", b"meson.options", b"manifest.in", b"cargo.lock", b"build"),
    *(b"__init__.py", b"__about__.py", b"__version__.py", b"_version.py", b"version.py", b"version"),
}
_BUILD_ENDS = (
    *(b".toml", b".cfg", b".in", b".txt", b".cmake", b".mk", b".c", b".cc", b".cpp", b".cxx", b".cu", b".cuh"),
    *(
        b".h",
        b".hh",
        b".hpp",
        b".hxx",
        b".pyx",
        b".pxd",
        b".pxi",
        b".rs",
        b".f",
        b".f90",
        b".s",
        b".proto",
        b".bazel",
    ),
)


class _Entry(NamedTuple):
    path: bytes  # relative
    info: os.stat_result


def digest_file(path: str) -> str:
    """Return the SHA-256 of a file in hex. Raises: KeyUnknown if it is not a regular file, or cannot be read."""
    try:
        return digest_open(os.fsencode(path))
    except OSError as error:
        raise KeyUnknown(f"{path}: cannot be read as an input of set-up: {error.strerror}") from error


def digest_directory(path: str, excluded: Collection[str] = ()) -> str:
    """Return the digest of a directory. `excluded`: resolved paths of directories to leave out, such as targets.

    Raises: KeyUnknown for more than MAX_FILES or MAX_BYTES, and for unreadable files; ConfigError.
    """
    return _digest(path, _walk_all(path, excluded))


def digest_archives(path: str) -> str:
    """Return the digest of the archives directly in a directory, where an installer searches for packages.

    It covers the name, the size and the SHA-256 of the end of each archive. There zip and the compressions have
    the checksums of the content (a wheel also that of its RECORD). So a start need not read gigabytes of wheels.
    """
    entries = (each for each in _walk(path, (), is_deep=False) if each.path.endswith(ARCHIVES))
    return _digest(path, entries, end_bytes=END_BYTES)


def digest_project(path: str, excluded: Collection[str] = (), *, is_editable: bool = False) -> str:
    """Return the digest of a directory to install: of all files that git does not ignore; without git, of all.

    Of an editable one, it covers only the files that its build reads, and the names of its modules. Their content
    is used in place, so an edited line of the user's code does not change the environment.
    """
    entries: Iterable[_Entry] | None = _list_by_git(path, excluded)
    if entries is None:
        entries = _walk(path, excluded)
    return _digest(path, entries, is_editable=is_editable)


def _digest(directory: str, entries: Iterable[_Entry], *, is_editable: bool = False, end_bytes: int = 0) -> str:
    lines: list[bytes] = []
    left_bytes = MAX_BYTES
    top = os.fsencode(directory)
    for path, info in entries:
        if len(lines) >= MAX_FILES:
            raise KeyUnknown(f"{directory}: has more than {MAX_FILES} files: {_WAY_OUT}")
        kind, content = b"", ""
        if stat.S_ISLNK(info.st_mode):
            kind, target = b"l", os.readlink(os.path.join(top, path))
            content = hashlib.sha256(target).hexdigest()
        elif stat.S_ISREG(info.st_mode):
            kind = b"x" if info.st_mode & 0o100 else b"f"
            if is_editable and not _is_of_build(path):
                if not path.endswith(b".py"):
                    continue
                kind = b"n"
            else:
                left_bytes -= min(info.st_size, end_bytes) if end_bytes else info.st_size
                if left_bytes < 0:
                    raise KeyUnknown(f"{directory}: has more than {MAX_BYTES} bytes: {_WAY_OUT}")
                try:
                    content = digest_open(os.path.join(top, path), end_bytes)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    shown = os.fsdecode(os.path.join(top, path))
                    raise KeyUnknown(f"{shown}: cannot be read as an input of set-up: {error.strerror}") from error
        else:
            continue  # sockets, fifos, devices are not installed
        lines.append(b"%s %s %d %s\n" % (kind, content.encode(), len(path), path))
    return hashlib.sha256(b"".join(sorted(lines))).hexdigest()


_WAY_OUT = (
    "it cannot be hashed at each start; declare only the deciding files with --setup-input, or install a wheel"
)


def digest_open(path: bytes, end_bytes: int = 0) -> str:
    """Return the digest of a whole file, or of its size and its end."""
    # Without blocking: the file may have been replaced by a fifo.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        if info.st_size > MAX_BYTES:
            raise OSError(errno.EFBIG, f"it has more than {MAX_BYTES} bytes")
        digest = hashlib.sha256()
        if end_bytes:
            digest.update(b"%d\n" % info.st_size)
            os.lseek(fd, max(0, info.st_size - end_bytes), os.SEEK_SET)
        # Not hashlib.file_digest: it makes a buffer of 256 KiB for each file, and most have a few.
        left_bytes = end_bytes or sys.maxsize
        while part := os.read(fd, min(left_bytes, info.st_size + 1, _PART_BYTES)):
            digest.update(part)
            left_bytes -= len(part)
        return digest.hexdigest()
    finally:
        os.close(fd)


def _is_of_build(path: bytes) -> bool:
    directory, _, name = path.rpartition(b"/")
    name = name.lower()
    is_top = not directory and name.endswith((b".py", b".lock", b".sh"))
    return is_top or name in _BUILD_NAMES or name.endswith(_BUILD_ENDS)


def _walk(path: str, excluded: Collection[str], *, is_deep: bool = True) -> Iterator[_Entry]:
    left_out = {os.fsencode(each) for each in excluded}
    directories = [b""]
    while directories:
        directory = directories.pop()
        for entry in _scan(path, directory):
            below = directory + b"/" + entry.name if directory else entry.name
            try:
                info = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISDIR(info.st_mode):
                if is_deep and not _is_skipped(entry.name, entry.path) and not _is_foreign(entry.path, left_out):
                    directories.append(below)
            elif not entry.name.endswith(_SKIPPED_ENDS) or (stat.S_ISLNK(info.st_mode)):
                yield _Entry(below, info)


def _walk_all(path: str, excluded: Collection[str]) -> Iterator[_Entry]:
    """Walk a declared directory, without leftovers of tools; yield links and their targets."""
    top = os.fsencode(path)
    left_out = [os.path.realpath(os.fsencode(each)) for each in (*excluded, *_NO_FILES)]
    seen: set[tuple[int, int]] = set()
    directories, linked = [b""], list[bytes]()
    while directories or linked:
        if directories:
            directory = directories.pop()
        else:  # in a fixed order: the target of two links counts for the first one
            linked.sort(reverse=True)
            directory = linked.pop()
        try:
            here = os.stat(os.path.join(top, directory) if directory else top)
        except OSError:
            here = None
        if here is not None:
            if (here.st_dev, here.st_ino) in seen:
                continue
            seen.add((here.st_dev, here.st_ino))
        for entry in _scan(path, directory):
            below = directory + b"/" + entry.name if directory else entry.name
            try:
                info = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISDIR(info.st_mode):
                if entry.name not in _TOOLS_DIRECTORIES and not _is_foreign(entry.path, left_out):
                    directories.append(below)
                continue
            yield _Entry(below, info)
            behind = _behind(entry.path, left_out) if stat.S_ISLNK(info.st_mode) else None
            if behind is None:
                continue
            if stat.S_ISDIR(behind.st_mode):
                linked.append(below)
            else:
                yield _Entry(below, behind)


def _behind(link: bytes, left_out: Collection[bytes]) -> os.stat_result | None:
    """Return the stat result of a link's target; None if it is missing, or does not belong to an input."""
    real = os.path.realpath(link)
    try:
        info = os.stat(real)
    except OSError:
        return None
    if any(real == each or real.startswith(each + b"/") for each in left_out):
        return None
    is_foreign = stat.S_ISDIR(info.st_mode) and _is_foreign(real, left_out)
    return None if is_foreign else info


def _scan(path: str, directory: bytes) -> list[os.DirEntry[bytes]]:
    """Return the entries of a directory below; none if it was removed meanwhile."""
    top = os.fsencode(path)
    try:
        with os.scandir(os.path.join(top, directory) if directory else top) as found:
            return list(found)
    except FileNotFoundError:
        if not directory:
            raise ConfigError(f"{path}: there is no such directory") from None
        return []
    except OSError as error:
        raise KeyUnknown(str(to_storage_error(error, os.fsdecode(os.path.join(top, directory))))) from error


def _is_skipped(name: bytes, path: bytes) -> bool:
    if name == _BUILD:
        try:
            return all(each.startswith(_OF_BUILDS) for each in os.listdir(path))
        except OSError:
            return False
    return name in _SKIPPED_DIRECTORIES or name.endswith(_SKIPPED_ENDS)


def _is_foreign(path: bytes, left_out: Collection[bytes]) -> bool:
    """Return whether a directory is not an input: a target, the store, or another environment."""
    return os.path.realpath(path) in left_out or os.path.lexists(os.path.join(path, b"pyvenv.cfg"))


def _list_by_git(path: str, excluded: Collection[str]) -> list[_Entry] | None:
    """List the files of a git repository; None if it is not one."""
    # No program from the configuration of the repository is run.
    words = ["git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-C", path]
    words += ["ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environ["GIT_OPTIONAL_LOCKS"] = "0"
    try:
        done = run_limited(words, timeout_s=GIT_S, environ=environ)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0 or not done.stdout:
        return None
    top = os.fsencode(path)
    left_out = {os.fsencode(each) for each in excluded}
    known_folders: dict[bytes, bool] = {b"": True}

    def belongs(directory: bytes) -> bool:
        if directory not in known_folders:
            above, _, name = directory.rpartition(b"/")
            path = os.path.join(top, directory)
            known_folders[directory] = (
                belongs(above) and not _is_skipped(name, path) and not _is_foreign(path, left_out)
            )
        return known_folders[directory]

    found: list[_Entry] = []
    for below in sorted({name.rstrip(b"/") for name in done.stdout.split(b"\0") if name}):
        directory, _, name = below.rpartition(b"/")
        try:
            info = os.lstat(os.path.join(top, below))
        except OSError:
            continue  # deleted without git
        if name.endswith(_SKIPPED_ENDS) or not belongs(directory):
            continue
        if stat.S_ISDIR(info.st_mode):  # a submodule, or a repository within
            if belongs(below):
                inner = os.fsdecode(os.path.join(top, below))
                found += (_Entry(below + b"/" + each.path, each.info) for each in _walk(inner, excluded))
        else:
            found.append(_Entry(below, info))
    return found
