"""Keeps what a job imported up to its first step, for the next start of the same job; finds accelerators.

One small text file for each job below the user's cache folder. It names modules that a later start imports, so it
is believed only if nobody but the user could have written it, and checked name by name. Nothing here fails a job:
what cannot be read is no record, what cannot be written is said in words.
"""

from __future__ import annotations

import os
import stat
import time
from binascii import crc32
from collections.abc import Mapping
from typing import NamedTuple

from launcher.ranks.fork_policy import MOST_MODULES, is_module_name

_FIRST_LINE = "bootseer imports 1"
_LAST_LINE = "end"  # without it the file was cut off
_SUFFIX = ".imports"
_MOST_BYTES = 1 << 20
_MOST_LISTING_BYTES = 8 << 20
_MOST_WHY_CHARS = 300
_MOST_DROPPED = 500
_MOST_RECORDS = 256  # scripts in folders of their own for each run would fill the cache
_DAY_S = 86_400
_RECORD_AGE_S = 30 * _DAY_S
_DROPPED_AGE_S = 7 * _DAY_S  # then it is tried again: the library may have been mended
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class Record(NamedTuple):
    """What an earlier start of the job told."""

    modules: tuple[str, ...]
    dropped: dict[str, str]  # modules that failed while preloading: name -> why


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


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""


def cache_dir(environ: Mapping[str, str]) -> str:
    """The folder of the records, which need not exist; "" if none can be told."""
    given = environ.get("BOOTSEER_CACHE_DIR")
    if given:
        return os.path.join(_working_directory(), given, "imports")
    xdg, home = environ.get("XDG_CACHE_HOME", ""), environ.get("HOME", "")
    if xdg.startswith("/"):  # others are to be ignored, says its specification
        return os.path.join(xdg, "bootseer", "imports")
    return os.path.join(home, ".cache", "bootseer", "imports") if home.startswith("/") else ""


# ---- reading -------------------------------------------------------------------------------------------------


def read_record(directory: str, key: JobKey) -> Record | None:
    """What is kept of this job; None for nothing that could be used."""
    found = _read(directory, key)
    return None if found is None else Record(found[0], {name: why for name, (_, why) in found[1].items()})


def _read(directory: str, key: JobKey) -> tuple[tuple[str, ...], dict[str, tuple[int, str]]] | None:
    """The modules, and for each dropped one when and why."""
    if not directory:
        return None
    try:
        folder = _open_ours(directory, os.O_DIRECTORY)
        try:
            file = _open_ours(_file_name(key), 0, folder)
        finally:
            os.close(folder)
        try:
            is_old = time.time() - os.fstat(file).st_mtime > _RECORD_AGE_S
            data = b"" if is_old else _read_all(file, _MOST_BYTES)
        finally:
            os.close(file)
    except (OSError, ValueError):
        return None
    return _parse(data.decode("utf-8", "surrogateescape"), key)


def _parse(text: str, key: JobKey) -> tuple[tuple[str, ...], dict[str, tuple[int, str]]] | None:
    lines = text.split("\n")
    header = _header(key)
    if lines[: len(header)] != header or lines[-2:] != [_LAST_LINE, ""]:
        return None
    now = int(time.time())
    modules: dict[str, None] = {}
    dropped: dict[str, tuple[int, str]] = {}
    for line in lines[len(header) : -2]:
        kind, _, rest = line.partition(" ")
        name, _, rest = rest.partition(" ")
        when, _, why = rest.partition(" ")
        if not is_module_name(name):
            return None
        if kind == "module" and not rest:
            modules[name] = None
        elif kind == "dropped" and when.isascii() and when.isdigit() and len(when) < 16:
            if -_DAY_S < now - int(when) < _DROPPED_AGE_S:
                dropped[name] = int(when), _plain(why)
        else:
            return None
    return tuple(modules)[:MOST_MODULES], dropped


def _open_ours(name: str, flags: int, folder: int | None = None) -> int:
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


def _read_all(fd: int, most_bytes: int) -> bytes:
    """What is in a file; raises ValueError when it is too much."""
    parts = []
    left = most_bytes
    while part := os.read(fd, left + 1):
        left -= len(part)
        if left < 0:
            raise ValueError(f"more than {most_bytes} bytes")
        parts.append(part)
    return b"".join(parts)


def read_listing(path: str) -> list[tuple[str, str]]:
    """The modules that a rank had at its first step: name and file; empty for no such list."""
    try:
        fd = _open_ours(path, 0)
        try:
            data = _read_all(fd, _MOST_LISTING_BYTES)
        finally:
            os.close(fd)
    except (OSError, ValueError):
        return []
    lines = data.decode("utf-8", "surrogateescape").split("\n")[:-1]  # the last one is empty or cut off
    pairs = (line.split("\t") for line in lines)
    return [(pair[0], pair[1]) for pair in pairs if len(pair) == 2]


# ---- writing -------------------------------------------------------------------------------------------------


def write_record(directory: str, key: JobKey, record: Record) -> str:
    """Keeps a record in place of an earlier one; returns why that failed, "" if it did not."""
    if not directory:
        return "no folder for it: set BOOTSEER_CACHE_DIR"
    try:
        _make_folders(directory)
        folder = _open_ours(directory, os.O_DIRECTORY)
        try:
            _replace(folder, _file_name(key), _format(directory, key, record))
            _prune(folder)
        finally:
            os.close(folder)
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def _format(directory: str, key: JobKey, record: Record) -> bytes:
    now = int(time.time())
    earlier = _read(directory, key)
    known = {} if earlier is None else earlier[1]
    lines = _header(key)
    for name, why in list(record.dropped.items())[:_MOST_DROPPED]:
        if is_module_name(name):  # the time of its first failure is kept, or it would never be tried again
            lines.append(f"dropped {name} {known[name][0] if name in known else now} {_plain(why)}")
    size = sum(len(line) for line in lines) * 4
    for name in record.modules[:MOST_MODULES]:
        size += len(name.encode("utf-8", "replace")) + len("module \n")
        if is_module_name(name) and size < _MOST_BYTES:
            lines.append(f"module {name}")
    return "\n".join([*lines, _LAST_LINE, ""]).encode("utf-8", "surrogateescape")


def _make_folders(path: str) -> None:
    missing = []
    while path and not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for folder in reversed(missing):
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            pass


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


def _prune(folder: int) -> None:
    """Removes the oldest records when there are too many, and what killed writers left."""
    names = [name for name in os.listdir(folder) if _SUFFIX in name]
    if len(names) <= _MOST_RECORDS:
        return
    ages = []
    for name in names:
        try:
            ages.append((os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime_ns, name))
        except OSError:
            pass
    for _, name in sorted(ages)[:-_MOST_RECORDS]:
        try:
            os.unlink(name, dir_fd=folder)
        except OSError:
            pass


# ---- the file ------------------------------------------------------------------------------------------------


def _header(key: JobKey) -> list[str]:
    fields = zip(key._fields, key, strict=True)
    return [_FIRST_LINE, *(f"{field} {_one_line(value)}" for field, value in fields)]


def _one_line(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _plain(text: str) -> str:
    """Text that may be printed, as one line."""
    return "".join(char if char.isprintable() else " " for char in text[:_MOST_WHY_CHARS]).strip()


def _file_name(key: JobKey) -> str:
    """Without the stamp: the record of an edited script takes the place of the old one."""
    base = os.path.basename(key.target)
    readable = "".join(char if char.isascii() and (char.isalnum() or char in "._-") else "_" for char in base)
    check = crc32("\0".join(key[:-1]).encode("utf-8", "surrogateescape"))
    return f"{readable.lstrip('.')[:60]}-{check:08x}{_SUFFIX}"


# ---- accelerators --------------------------------------------------------------------------------------------

# Beginnings of names in /dev. More than is sure: without a need ranks are exec'd then, which is only slower.
_DEVICES = (
    *("nvidia", "nvhost-gpu", "nvgpu", "nvmap"),  # NVIDIA, also Tegra
    "dxg",  # GPUs under WSL
    "kfd",  # AMD
    *("accel", "hl", "neuron", "davinci"),  # TPU, Gaudi and what uses the kernel's accel class; Trainium; Ascend
    *("cambricon", "ipu", "iluvatar", "mtgpu", "mxcd", "xpu"),
)
_INTEL = "0x8086"


def has_accelerator(root: str = "/") -> bool:
    """Whether this node has a device that a framework might open; a display alone is none."""
    for name in _list(os.path.join(root, "dev")):
        if name.startswith(_DEVICES) and (name != "accel" or _list(os.path.join(root, "dev/accel"))):
            return True
    if any(name.isdigit() for name in _list(os.path.join(root, "dev/vfio"))):
        return True  # TPUs since v5
    return any(_is_intel_card(root, name) for name in _list(os.path.join(root, "dev/dri")))


def _is_intel_card(root: str, name: str) -> bool:
    """Whether it is a card of Intel's and not the graphics that its processors have: those sit on the root bus."""
    device = os.path.join(root, "sys/class/drm", name, "device")
    try:
        with open(os.path.join(device, "vendor"), encoding="ascii", errors="replace") as file:
            is_intel = file.read(16).strip() == _INTEL
    except OSError:
        return False
    return (
        is_intel
        and name.startswith("renderD")
        and not os.path.basename(os.path.realpath(device)).startswith("0000:00:")
    )


def _list(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
