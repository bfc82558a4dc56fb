"""Adapter for mount(2) and related calls: the list of mounts, mounting, and unmounting in any state of the server.

Not mount(8), which makes a loop device of every file. Errors of the system become Bootseer's here, with the fix.

Source: mount(2), umount(2), proc_pid_mountinfo(5); Documentation/filesystems/fuse.rst for `abort`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
from typing import NamedTuple

from bootseer.errors import ConfigError, StorageError
from bootseer.linux.syscalls import libc

RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, NOATIME, BIND = 1, 2, 4, 8, 32, 1024, 4096
FORCE, DETACH, NOFOLLOW = 1, 2, 8  # of unmount
CONNECTIONS = "/sys/fs/fuse/connections"
MAX_DATA_BYTES = 4095  # a page, with its end

_OCTAL = re.compile(rb"\\([0-7]{3})")


class Mount(NamedTuple):
    """One line of the list of mounts."""

    number: int
    parent: int  # number of the mount that it is on
    major: int
    minor: int  # for FUSE also the number of its connection
    root: str  # the part of the file system that is mounted
    target: str
    options: str
    fstype: str
    source: str


def mount(source: str, target: str, fstype: str, flags: int, data: str = "") -> None:
    """Call mount(2).

    Raises: ConfigError when this process, kernel or directory does not support such a mount; StorageError.
    """
    number = try_mount(source, target, fstype, flags, data)
    if number:
        raise mount_error(number, source, target, fstype)


def try_mount(source: str, target: str, fstype: str, flags: int, data: str = "") -> int:
    """Call mount(2), for a caller with an alternative; return 0, or the number of the error."""
    if len(os.fsencode(data)) > MAX_DATA_BYTES:
        return errno.E2BIG
    arguments = (os.fsencode(source), os.fsencode(target), fstype.encode())
    done = libc().mount(*arguments, ctypes.c_ulong(flags), os.fsencode(data) or None)
    return 0 if done == 0 else ctypes.get_errno()


def mount_error(number: int, source: str, target: str, fstype: str) -> ConfigError | StorageError:
    """Return the error for a failed mount(2), for users."""
    kind = fstype or "bind"
    if number in (errno.EPERM, errno.EACCES):
        return ConfigError(
            f"{target}: this process may not mount {kind} there: it needs CAP_SYS_ADMIN; run it as root, or start "
            "the container with --cap-add SYS_ADMIN (and --security-opt apparmor=unconfined under AppArmor)"
        )
    if number == errno.ENODEV:
        module = fstype.partition(".")[0]
        return ConfigError(f"{target}: the kernel does not know {module}: load its module with: modprobe {module}")
    if number == errno.ENOENT:
        missing = target if not os.path.lexists(target) else source
        return ConfigError(f"{target}: cannot be mounted: {missing} does not exist")
    if number == errno.ENOTDIR:
        return ConfigError(f"{target}: cannot be mounted: it, or the source, is not a directory")
    if number == errno.ENOTCONN:
        return ConfigError(f"{target}: is a mount whose server has ended; clean it up with: umount -l {target}")
    if number == errno.EBUSY:
        return ConfigError(f"{target}: is in use by another mount; end that one, or name another directory")
    if number == errno.ENOSPC:
        return ConfigError(f"{target}: too many mounts; the limit is fs.mount-max (sysctl)")
    return StorageError(
        f"{target}: {kind} of {source} could not be mounted: {os.strerror(number).lower()}; dmesg may show why"
    )


def unmount(target: str, flags: int = 0) -> bool:
    """Call umount2(2); return False when nothing is mounted there.

    Raises: StorageError, with EBUSY as its cause while programs use it; ConfigError without the privilege.
    """
    if libc().umount2(os.fsencode(target), flags | NOFOLLOW) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOENT):
        return False
    caught = OSError(number, os.strerror(number))
    if number == errno.EBUSY:
        raise StorageError(f"{target}: is in use: end the programs that use it, then: umount {target}") from caught
    if number == errno.EPERM:
        raise ConfigError(f"{target}: this process may not unmount: it needs CAP_SYS_ADMIN") from caught
    raise StorageError(f"{target}: could not be unmounted: {os.strerror(number).lower()}") from caught


def unmount_lazily(target: str, flags: int = 0) -> bool:
    """Unmount even if it is in use: programs that use it keep it.

    It is also in use if a mount below it has a copy in another namespace (containers that were started since).
    """
    try:
        return unmount(target, flags)
    except StorageError:
        return unmount(target, DETACH)


def clear(directory: str) -> int:
    """End all mounts at and below a directory, also those whose server is stopped or gone; return their number.

    Programs that read from FUSE there get errors from now on. Raises: ConfigError, StorageError.
    """
    found = mounts_below(directory)
    for each in found:
        if is_fuse(each):
            abort(each.minor)
    for each in found:
        unmount_lazily(
            each.target, FORCE if is_fuse(each) else 0
        )  # which aborts too, where fusectl is not mounted
    return len(found)


def abort(connection: int) -> bool:
    """End a FUSE connection: all its requests fail, regardless of its server; return False if it is not possible.

    `connection`: minor number of the mount's device. It accesses nothing that could hang.
    """
    try:
        fd = os.open(f"{CONNECTIONS}/{connection}/abort", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return False  # it has ended, or fusectl is not mounted
    try:
        os.write(fd, b"1")
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def is_fuse(each: Mount) -> bool:
    return each.fstype == "fuse" or each.fstype.startswith("fuse.")


def mounts() -> list[Mount]:
    """Return all mounts of this process's namespace, in the order of mounting."""
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            return parse_mounts(file.read())
    except OSError as caught:
        raise StorageError(f"/proc/self/mountinfo: cannot be read: {caught.strerror}") from caught


def mounts_below(directory: str) -> list[Mount]:
    """Return the mounts at and below a directory, in the order in which they can be unmounted."""
    # The directory itself is not accessed: that would hang for a mount whose server is stopped.
    above, name = os.path.split(os.path.abspath(directory))
    return below(mounts(), os.path.join(os.path.realpath(above), name))


def below(found: list[Mount], directory: str) -> list[Mount]:
    """Return the mounts at and below an absolute directory, the last one first, upper ones before lower ones."""
    prefix = directory.rstrip("/") + "/"
    chosen = [each for each in found if each.target == directory or each.target.startswith(prefix)]
    ordered: dict[int, Mount] = {}

    def take(each: Mount) -> None:
        for other in reversed(chosen):
            if other.parent == each.number != other.number and other.number not in ordered:
                take(other)
        ordered[each.number] = each

    for each in reversed(chosen):
        if each.number not in ordered:
            take(each)
    return list(ordered.values())


def parse_mounts(text: bytes) -> list[Mount]:
    """Return the mounts in /proc/PID/mountinfo; other lines are left out."""
    found = []
    for line in text.split(b"\n"):
        head, _, tail = line.partition(b" - ")
        first, last = head.split(b" "), tail.split(b" ")
        if len(first) < 6 or len(last) < 2:
            continue
        major, _, minor = first[2].partition(b":")
        try:
            numbers = int(first[0]), int(first[1]), int(major), int(minor)
        except ValueError:
            continue
        texts = (first[3], first[4], first[5], last[0], last[1])
        found.append(Mount(*numbers, *(os.fsdecode(_unescaped(each)) for each in texts)))
    return found


def _unescaped(text: bytes) -> bytes:
    return _OCTAL.sub(lambda match: bytes([int(match[1], 8) & 0xFF]), text)
