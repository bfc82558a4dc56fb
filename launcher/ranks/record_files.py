"""Small text files about a job in the user's cache folder: opened only if nobody else could have written them.

In: a folder, the key of a job, lines. Out: the same, or OSError and ValueError for whatever cannot be read,
written or believed. Separate from what the records say (hot_imports.py, start_record.py).
"""

from __future__ import annotations

import os
import stat
import time
from binascii import crc32
from collections.abc import Mapping
from contextlib import suppress

from bootseer.light_typing import NamedTuple

MOST_LISTING_BYTES = 8 << 20  # of what a process of the job writes
START_FOLDER, START_SUFFIX = "starts", ".start"  # of what is read ahead (start_record.py)
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class JobKey(NamedTuple):
    """Which job a record belongs to."""

    python: str
    mode: str
    target: str  # absolute for files
    folder: str  # the working directory where it decides what a module's name means, else ""
    stamp: str  # of the script's file, "" for modules


def make_key(python: str, mode: str, target: str) -> JobKey:
    """The key of what is about to be run."""
    if mode == "module":
        return JobKey(python, mode, target, _working_directory(), "")
    path = os.path.join(_working_directory(), target)
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return JobKey(python, mode, path, "", "")
    return JobKey(python, mode, path, "", f"{status.st_mtime_ns} {status.st_size}")


def make_start_key(python: str, mode: str, target: str) -> JobKey:
    """The same of what is read ahead: an edited script needs mostly the same, and each file is checked."""
    return make_key(python, mode, target)._replace(stamp="")


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""


def records_dir(environ: Mapping[str, str], kind: str) -> str:
    """The folder of the records of a kind, which need not exist; "" if none can be told."""
    given = environ.get("BOOTSEER_CACHE_DIR")
    if given:
        return os.path.join(_working_directory(), given, kind)
    xdg, home = environ.get("XDG_CACHE_HOME", ""), environ.get("HOME", "")
    if xdg.startswith("/"):  # others are to be ignored, says its specification
        return os.path.join(xdg, "bootseer", kind)
    return os.path.join(home, ".cache", "bootseer", kind) if home.startswith("/") else ""


def file_name(key: JobKey, suffix: str) -> str:
    """Without the stamp: the record of an edited script takes the place of the old one."""
    base = os.path.basename(key.target)
    readable = "".join(char if char.isascii() and (char.isalnum() or char in "._-") else "_" for char in base)
    check = crc32("\0".join(key[:-1]).encode("utf-8", "surrogateescape"))
    return f"{readable.lstrip('.')[:60]}-{check:08x}{suffix}"


def exists(directory: str, key: JobKey, suffix: str) -> bool:
    """Whether there is such a file, of which nothing is known yet."""
    try:
        return bool(directory) and os.path.isfile(os.path.join(directory, file_name(key, suffix)))
    except ValueError:
        return False


def header(first_line: str, key: JobKey) -> list[str]:
    """The lines that say what a record is, and of which job."""
    return [first_line, *(f"{field} {_one_line(value)}" for field, value in zip(key._fields, key, strict=True))]


def _one_line(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


# ---- reading -------------------------------------------------------------------------------------------------


def read(directory: str, name: str, most_bytes: int, most_age_s: float) -> str:
    """What a record holds, "" if it is too old. Raises: OSError, ValueError."""
    folder = open_ours(directory, os.O_DIRECTORY)
    try:
        file = open_ours(name, 0, folder)
    finally:
        os.close(folder)
    try:
        is_old = time.time() - os.fstat(file).st_mtime > most_age_s
        data = b"" if is_old else read_all(file, most_bytes)
    finally:
        os.close(file)
    return data.decode("utf-8", "surrogateescape")


def read_listing(path: str, most_bytes: int) -> list[str]:
    """Lines that a process of the job has written; without the last one if it is cut off. Raises: as `read`."""
    fd = open_ours(path, 0)
    try:
        data = read_all(fd, most_bytes)
    finally:
        os.close(fd)
    return data.decode("utf-8", "surrogateescape").split("\n")[:-1]  # the last one is empty or cut off


def open_ours(name: str, flags: int, folder: int | None = None) -> int:
    """Opens what only this user can have written; raises OSError or ValueError otherwise."""
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags, dir_fd=folder)
    try:
        status = os.fstat(fd)
        is_kind = stat.S_ISDIR if flags & os.O_DIRECTORY else stat.S_ISREG
        if not is_kind(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & _OTHERS_WRITE:
            raise PermissionError(f"{name} is not ours, or others may write to it")
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_all(fd: int, most_bytes: int) -> bytes:
    """What is in a file; raises ValueError when it is too much."""
    parts = []
    left = most_bytes
    while part := os.read(fd, left + 1):
        left -= len(part)
        if left < 0:
            raise ValueError(f"more than {most_bytes} bytes")
        parts.append(part)
    return b"".join(parts)


# ---- writing -------------------------------------------------------------------------------------------------


def write(directory: str, name: str, data: bytes, suffix: str, most_records: int) -> str:
    """Puts a record in place of an earlier one; the oldest of too many go. Returns why that failed, or ""."""
    if not directory:
        return "no folder for it: set BOOTSEER_CACHE_DIR"
    try:
        _make_folders(directory)
        folder = open_ours(directory, os.O_DIRECTORY)
        try:
            _replace(folder, name, data)
            _prune(folder, suffix, most_records)
        finally:
            os.close(folder)
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def _make_folders(path: str) -> None:
    missing = []
    while path and not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for folder in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)


def _replace(folder: int, name: str, data: bytes) -> None:
    """Readers see the old file or the new one."""
    temporary = f".{name}.{os.getpid()}.{time.monotonic_ns()}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        try:
            while data:
                data = data[os.write(fd, data) :]
        finally:
            os.close(fd)
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        os.unlink(temporary, dir_fd=folder)
        raise


def _prune(folder: int, suffix: str, most_records: int) -> None:
    """Removes the oldest records when there are too many, and what killed writers left."""
    names = [name for name in os.listdir(folder) if suffix in name]
    if len(names) <= most_records:
        return
    ages = []
    for name in names:
        with suppress(OSError):
            ages.append((os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime_ns, name))
    for _, name in sorted(ages)[:-most_records]:
        with suppress(OSError):
            os.unlink(name, dir_fd=folder)
