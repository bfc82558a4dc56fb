"""Files out of the page cache, or in it, and the proof that they are.

`make_cold` writes back and drops what the kernel holds of files, `make_warm` reads them; both look at every
page with mincore afterwards, because the kernel takes either for a wish. What the disk or a hypervisor below
keeps is out of reach, for every program alike.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable

from bench.record import BenchError

COLD_SHARE = 0.01  # of a file's pages may stay
WARM_SHARE = 0.99
TRIES = 5
CHUNK_BYTES = 8 << 20
MEMORY_SYSTEMS = ("tmpfs", "ramfs")


def make_cold(paths: Iterable[str]) -> None:
    """Drops the files from the page cache."""
    for path in list_files(paths):
        share = 1.0
        for _ in range(TRIES):
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
            share = resident_share(path)
            if share < COLD_SHARE:
                break
        else:
            raise BenchError(
                f"{path}: {share:.0%} of it stay in the page cache; does another program have it open?"
            )


def make_warm(paths: Iterable[str]) -> None:
    """Reads the files; again where the kernel has taken pages back meanwhile, as one that reclaims early does."""
    buffer = bytearray(CHUNK_BYTES)
    for path in list_files(paths):
        share = 0.0
        for _ in range(TRIES):
            with open(path, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
            share = resident_share(path)
            if share >= WARM_SHARE:
                break
        else:
            raise BenchError(f"{path}: only {share:.0%} of it stay in the page cache: not enough memory is free")


def resident_share(path: str) -> float:
    """How much of a file is in the page cache."""
    size = os.path.getsize(path)
    if not size:
        return 0.0
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), size) as area:
        libc = ctypes.CDLL(None, use_errno=True)
        pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
        start = ctypes.c_char.from_buffer(area)
        try:
            failed = libc.mincore(ctypes.byref(start), ctypes.c_size_t(size), pages)
        finally:
            del start  # the area cannot be closed while something points into it
    if failed:
        raise OSError(ctypes.get_errno(), "mincore", path)
    return sum(byte & 1 for byte in pages.raw) / len(pages)


def list_files(paths: Iterable[str]) -> list[str]:
    """The files, and those in the folders."""
    found = []
    for path in paths:
        if os.path.isdir(path):
            found += [os.path.join(directory, name) for directory, _, names in os.walk(path) for name in names]
        else:
            found.append(path)
    return found


def check_disk(directory: str, needed_bytes: int) -> None:
    """Files of a bench of disks have to be on one, and to fit."""
    system = file_system(directory)
    if system in MEMORY_SYSTEMS:
        raise BenchError(f"{directory} is on {system}, which is no disk: name another with --folder")
    about = os.statvfs(directory)
    free_bytes = about.f_bavail * about.f_frsize
    if free_bytes < needed_bytes:
        raise BenchError(
            f"{directory} has {free_bytes / 1e9:.1f} GB free, {needed_bytes / 1e9:.1f} are needed: "
            "name another with --folder"
        )


def file_system(directory: str) -> str:
    """The type of the file system that a folder is on."""
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            if before.split(" ", 3)[2] == wanted:
                return after.split(" ", 1)[0]
    return "unknown"
