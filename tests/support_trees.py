"""Compares a file tree with what something made of it: every attribute, every byte, every hole, by name.

Written for itself, from what POSIX shows: it shares no code with what it judges, nor with tests.testing.trees.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

STEP_BYTES = 1 << 20
PIECE_BYTES = 128 << 10  # holes of a tree are pieces that have no byte but zero
CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")  # security.capability: cap_net_raw=ep

Facts = Mapping[str, object]


class Walked(NamedTuple):
    """A tree that was looked at."""

    facts: dict[bytes, Facts]  # by path, b"" for the tree's own folder
    data: dict[bytes, list[tuple[int, int]]]  # of regular files: begin and end of what is no hole, in bytes
    links: int  # further names of files


def walk(directory: str | os.PathLike[str]) -> Walked:
    """Looks at all of it; for root, as files may have no rights at all."""
    root = os.fsencode(directory)
    facts: dict[bytes, Facts] = {}
    data: dict[bytes, list[tuple[int, int]]] = {}
    names: dict[tuple[int, int], list[bytes]] = {}
    for path in sorted(_paths(root)):
        full = os.path.join(root, path) if path else root
        found = os.lstat(full)
        kind = stat.S_IFMT(found.st_mode)
        fact: dict[str, object] = {
            "mode": oct(found.st_mode),
            "uid": found.st_uid,
            "gid": found.st_gid,
            "mtime_ns": found.st_mtime_ns,
            "xattrs": {
                name: os.getxattr(full, name, follow_symlinks=False)
                for name in sorted(os.listxattr(full, follow_symlinks=False))
            },
        }
        if kind == stat.S_IFREG:
            fact["size"] = found.st_size
            fact["sha256"], data[path] = _read(full)
        elif kind == stat.S_IFLNK:
            fact["size"] = found.st_size
            fact["target"] = os.readlink(full)
        elif kind in (stat.S_IFCHR, stat.S_IFBLK):
            fact["device"] = (os.major(found.st_rdev), os.minor(found.st_rdev))
        if kind != stat.S_IFDIR:
            names.setdefault((found.st_dev, found.st_ino), []).append(path)
        facts[path] = fact
    for group in names.values():
        for path in group:
            facts[path] = {**facts[path], "names": tuple(group)}
    return Walked(facts, data, sum(len(group) - 1 for group in names.values()))


def differences(source: Walked, other: Walked, *, most: int = 20) -> list[str]:
    """What is not the same, a line each: of which name, which attribute, what it was and what it is.

    A hole may be larger than it was, as zeros need not be stored, but never smaller; bytes are compared anyway.
    """
    found = []
    for path in sorted(source.facts.keys() | other.facts.keys()):
        was, now = source.facts.get(path), other.facts.get(path)
        if was is None or now is None:
            found.append(f"{path!r}: is {'new' if was is None else 'missing'}")
            continue
        for name in sorted(was.keys() | now.keys()):
            if was.get(name) != now.get(name):
                found.append(f"{path!r}: {name}: {was.get(name)!r} became {now.get(name)!r}")
    for path, pieces in other.data.items():
        for begin, end in pieces:
            if path in source.data and not _is_within(begin, end, source.data[path]):
                found.append(f"{path!r}: holes: data at {begin}..{end} where there was a hole")
                break
    return found if len(found) <= most else [*found[:most], f"and {len(found) - most} more"]


def sums(directory: str | os.PathLike[str]) -> dict[str, str]:
    """Path and SHA-256 of every file: two stores are the same bytes if these are equal."""
    found = {}
    for above, _, files in os.walk(directory):
        for name in files:
            path = os.path.join(above, name)
            with open(path, "rb") as file:
                found[os.path.relpath(path, directory)] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def copy_still(source: str, target: str) -> None:
    """Copies a folder that others may write to, so that it stays as it is: by hard links if possible."""

    def link(one: str, other: str) -> None:
        try:
            os.link(one, other, follow_symlinks=False)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            shutil.copy2(one, other)

    # What Python is just writing beside a module has a number behind its name.
    aside = shutil.ignore_patterns("*.pyc.*")
    shutil.copytree(source, target, symlinks=True, copy_function=link, ignore=aside)


def _paths(root: bytes) -> Iterator[bytes]:
    yield b""
    for above, directories, files in os.walk(root, onerror=_raise):
        for name in (*directories, *files):
            yield os.path.relpath(os.path.join(above, name), root)


def _raise(error: OSError) -> None:
    raise error


def _read(path: bytes) -> tuple[str, list[tuple[int, int]]]:
    """The digest of a file's bytes, and where it has any."""
    digest = hashlib.sha256()
    pieces = []
    with open(path, "rb", buffering=0) as file:
        fd = file.fileno()
        end, size = 0, os.fstat(fd).st_size
        while end < size:
            try:
                begin = os.lseek(fd, end, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                break  # a hole to the end
            end = os.lseek(fd, begin, os.SEEK_HOLE)
            pieces.append((begin, end))
        os.lseek(fd, 0, os.SEEK_SET)
        done = 0
        while data := file.read(STEP_BYTES):  # also what is said to be a hole
            digest.update(data)
            done += len(data)
        if done != size:
            raise AssertionError(f"{path!r} has {done} bytes, not {size}")
    return digest.hexdigest(), pieces


def _is_within(begin: int, end: int, pieces: list[tuple[int, int]]) -> bool:
    """Whether it is covered, up to pieces."""
    begin = begin // PIECE_BYTES * PIECE_BYTES
    for first, last in pieces:
        if begin >= end:
            return True
        if first // PIECE_BYTES * PIECE_BYTES <= begin < -(-last // PIECE_BYTES) * PIECE_BYTES:
            begin = max(begin, -(-last // PIECE_BYTES) * PIECE_BYTES)
    return begin >= end


def make_system(directory: Path) -> None:
    """A root file system's worth of everything, by the machine's own: programs, links, owners, bits, devices."""
    directory.mkdir()
    for name in (
        "etc/alternatives",
        "etc/terminfo",
        "usr/sbin",
        "usr/share/perl",
        "usr/share/zoneinfo",
        "usr/lib/python3",
    ):
        if os.path.isdir(f"/{name}"):
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            copy_whole(f"/{name}", directory / name)
    for name in ("bin", "sbin", "lib"):
        (directory / name).symlink_to(f"usr/{name}")
    (directory / "usr/bin").mkdir()
    for each in ("passwd", "gpasswd", "dash", "env", "cat", "perl", "wall", "chage"):
        if found := shutil.which(each):
            copy_whole(os.path.realpath(found), directory / "usr/bin" / each)
    (directory / "dev").mkdir()
    for name, kind, number in (("null", stat.S_IFCHR, (1, 3)), ("sda", stat.S_IFBLK, (8, 0))):
        os.mknod(directory / "dev" / name, kind | 0o660, os.makedev(*number))
    os.mkfifo(directory / "dev" / "initctl")
    (directory / "tmp").mkdir()
    os.chmod(directory / "tmp", 0o1777)
    (directory / "var/mail").mkdir(parents=True)
    os.chown(directory / "var/mail", 0, 8)
    os.chmod(directory / "var/mail", 0o2775)
    (directory / "usr/bin/again").hardlink_to(directory / "usr/bin/cat")
    os.setxattr(directory / "usr/bin/env", "security.capability", CAPABILITY)
    os.setxattr(directory / "etc", "user.origin", b"\0\xff")
    with open(directory / "var/sparse", "wb") as file:
        file.truncate(64 << 20)
        file.seek(9 << 20)
        file.write(b"in the middle")
    os.utime(directory / "var/sparse", ns=(0, -1_234_567_890_123))


def copy_whole(source: str, target: Path) -> None:
    """By cp, with all attributes."""
    done = subprocess.run(["cp", "-a", source, os.fspath(target)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
