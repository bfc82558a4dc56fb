"""Small text files about a job in the user's cache directory, opened only if no other user could write them.

In: a directory, the key of a job, lines. Out: the same, or OSError and ValueError for a file that cannot be read,
written or trusted. Separate from the contents of the records (hot_imports.py, record.py).
"""

from __future__ import annotations

import os
import stat
import time
from binascii import crc32

from bootseer.light_stdlib import suppress
from bootseer.light_typing import Mapping, NamedTuple

MAX_LISTING_BYTES = 8 << 20  # of a file that a process of the job writes
START_DIRECTORY, START_SUFFIX = "starts", ".start"  # records of prefetched files (record.py)
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class JobKey(NamedTuple):
    """The job that a record belongs to."""

    python: str
    mode: str
    target: str  # absolute for files
    folder: str  # the working directory if module names are resolved in it, else ""
    stamp: str  # of the script's file, "" for modules


def make_key(python: str, mode: str, target: str) -> JobKey:
    """Return the key of the job that is about to run."""
    if mode == "module":
        return JobKey(python, mode, target, _working_directory(), "")
    path = os.path.join(_working_directory(), target)
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return JobKey(python, mode, path, "", "")
    return JobKey(python, mode, path, "", f"{status.st_mtime_ns} {status.st_size}")


def make_start_key(python: str, mode: str, target: str) -> JobKey:
    """Return the key for prefetching: an edited script needs mostly the same files, and each is checked."""
    return make_key(python, mode, target)._replace(stamp="")


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""


def records_dir(environ: Mapping[str, str], kind: str) -> str:
    """Return the directory of records of a kind, which need not exist; "" if it is unknown."""
    given = environ.get("BOOTSEER_CACHE_DIR")
    if given:
        return os.path.join(_working_directory(), given, kind)
    xdg, home = environ.get("XDG_CACHE_HOME", ""), environ.get("HOME", "")
    if xdg.startswith("/"):  # its specification requires to ignore other values
        return os.path.join(xdg, "bootseer", kind)
    return os.path.join(home, ".cache", "bootseer", kind) if home.startswith("/") else ""


def file_name(key: JobKey, suffix: str) -> str:
    """Return the name without the stamp, so that the record of an edited script replaces the old one."""
    base = os.path.basename(key.target)
    readable = "".join(char if char.isascii() and (char.isalnum() or char in "._-") else "_" for char in base)
    check = crc32("\0".join(key[:-1]).encode("utf-8", "surrogateescape"))
    return f"{readable.lstrip('.')[:60]}-{check:08x}{suffix}"


def exists(directory: str, key: JobKey, suffix: str) -> bool:
    """Return whether such a file exists, without checking its content."""
    try:
        return bool(directory) and os.path.isfile(os.path.join(directory, file_name(key, suffix)))
    except ValueError:
        return False


def header(first_line: str, key: JobKey) -> list[str]:
    """Return the lines that state the format of a record and its job."""
    return [first_line, *(f"{field} {_one_line(value)}" for field, value in zip(key._fields, key, strict=True))]


def _one_line(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


# ---- reading -------------------------------------------------------------------------------------------------


def read(directory: str, name: str, max_bytes: int, max_age_s: float) -> str:
    """Return the text of a record, "" if it is too old. Raises: OSError, ValueError."""
    folder = open_owned(directory, os.O_DIRECTORY)
    try:
        file = open_owned(name, 0, folder)
    finally:
        os.close(folder)
    try:
        is_old = time.time() - os.fstat(file).st_mtime > max_age_s
        data = b"" if is_old else read_all(file, max_bytes)
    finally:
        os.close(file)
    return data.decode("utf-8", "surrogateescape")


def read_listing(path: str, max_bytes: int) -> list[str]:
    """Return lines that a process of the job has written, without a truncated last one. Raises: as `read`."""
    fd = open_owned(path, 0)
    try:
        data = read_all(fd, max_bytes)
    finally:
        os.close(fd)
    return data.decode("utf-8", "surrogateescape").split("\n")[:-1]  # the last one is empty or truncated


def open_owned(name: str, flags: int, directory: int | None = None) -> int:
    """Open a file that only this user can write. Raises: OSError or ValueError for others."""
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags, dir_fd=directory)
    try:
        status = os.fstat(fd)
        is_kind = stat.S_ISDIR if flags & os.O_DIRECTORY else stat.S_ISREG
        if not is_kind(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & _OTHERS_WRITE:
            raise PermissionError(f"{name} belongs to another user, or others may write to it")
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_all(fd: int, max_bytes: int) -> bytes:
    """Return the content of a file. Raises: ValueError if it is too large."""
    parts = []
    left = max_bytes
    while part := os.read(fd, left + 1):
        left -= len(part)
        if left < 0:
            raise ValueError(f"more than {max_bytes} bytes")
        parts.append(part)
    return b"".join(parts)


# ---- writing -------------------------------------------------------------------------------------------------


def write(directory: str, name: str, data: bytes, suffix: str, max_records: int) -> str:
    """Write a record, replacing an earlier one, and remove the oldest. Return why that failed, or ""."""
    if not directory:
        return "no directory for it: set BOOTSEER_CACHE_DIR"
    try:
        _make_directories(directory)
        folder = open_owned(directory, os.O_DIRECTORY)
        try:
            _replace(folder, name, data)
            _prune(folder, suffix, max_records)
        finally:
            os.close(folder)
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def _make_directories(path: str) -> None:
    missing = []
    while path and not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for directory in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(directory, 0o700)


def _replace(directory: int, name: str, data: bytes) -> None:
    """Write the file so that readers see the old or the new one."""
    temporary = f".{name}.{os.getpid()}.{time.monotonic_ns()}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory)
    try:
        try:
            while data:
                data = data[os.write(fd, data) :]
        finally:
            os.close(fd)
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        os.unlink(temporary, dir_fd=directory)
        raise


def _prune(directory: int, suffix: str, max_records: int) -> None:
    """Remove the oldest records if there are too many, and temporary files that killed writers left."""
    names = [name for name in os.listdir(directory) if suffix in name]
    if len(names) <= max_records:
        return
    ages = []
    for name in names:
        with suppress(OSError):
            ages.append((os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime_ns, name))
    for _, name in sorted(ages)[:-max_records]:
        with suppress(OSError):
            os.unlink(name, dir_fd=directory)
