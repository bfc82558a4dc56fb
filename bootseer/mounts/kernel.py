"""The door to mount(2) and its kin: what is mounted where, and the end of it whatever state its server is in.

Not mount(8), which makes a loop device of every file. Errors of the system become ours here, with the way out.

Source: mount(2), umount(2), proc_pid_mountinfo(5); Documentation/filesystems/fuse.rst for `abort`.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import re
from typing import Any, NamedTuple

from bootseer.errors import ConfigError, StorageError

RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, NOATIME, BIND = 1, 2, 4, 8, 32, 1024, 4096
FORCE, DETACH, NOFOLLOW = 1, 2, 8  # of unmount
CONNECTIONS = "/sys/fs/fuse/connections"
MOST_DATA_BYTES = 4095  # a page, with its end

_OCTAL = re.compile(rb"\\([0-7]{3})")


class Mount(NamedTuple):
    """One line of the list of mounts."""

    number: int
    parent: int  # number of the mount that it is on
    major: int
    minor: int  # of FUSE also the number of its connection
    root: str  # what of the file system is shown
    target: str
    options: str
    fstype: str
    source: str


def mount(source: str, target: str, fstype: str, flags: int, data: str = "") -> None:
    """mount(2).

    Raises: ConfigError when this process, kernel or folder cannot have such a mount; StorageError when it fails.
    """
    number = try_mount(source, target, fstype, flags, data)
    if number:
        raise mount_error(number, source, target, fstype)


def try_mount(source: str, target: str, fstype: str, flags: int, data: str = "") -> int:
    """mount(2) for who has a second way: 0, or the number of the error."""
    if len(os.fsencode(data)) > MOST_DATA_BYTES:
        return errno.E2BIG
    arguments = (os.fsencode(source), os.fsencode(target), fstype.encode())
    done = _libc().mount(*arguments, ctypes.c_ulong(flags), os.fsencode(data) or None)
    return 0 if done == 0 else ctypes.get_errno()


def mount_error(number: int, source: str, target: str, fstype: str) -> ConfigError | StorageError:
    """What to tell a user of a failed mount(2)."""
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
        return ConfigError(f"{target}: cannot be mounted, as {missing} does not exist")
    if number == errno.ENOTDIR:
        return ConfigError(f"{target}: cannot be mounted: it, or what is to be shown there, is no folder")
    if number == errno.ENOTCONN:
        return ConfigError(f"{target}: is a mount whose server is gone; clean it up with: umount -l {target}")
    if number == errno.EBUSY:
        return ConfigError(f"{target}: is in use by another mount; end that one, or name another folder")
    if number == errno.ENOSPC:
        return ConfigError(f"{target}: too many mounts; the limit is fs.mount-max (sysctl)")
    return StorageError(
        f"{target}: {kind} of {source} could not be mounted: {os.strerror(number).lower()}; dmesg may say why"
    )


def unmount(target: str, flags: int = 0) -> bool:
    """umount2(2); False when nothing is mounted there.

    Raises: StorageError, with EBUSY as its cause while programs use it; ConfigError without the privilege.
    """
    if _libc().umount2(os.fsencode(target), flags | NOFOLLOW) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOENT):
        return False
    caught = OSError(number, os.strerror(number))
    if number == errno.EBUSY:
        raise StorageError(
            f"{target}: is in use: end the programs that work in it, then: umount {target}"
        ) from caught
    if number == errno.EPERM:
        raise ConfigError(f"{target}: this process may not unmount: it needs CAP_SYS_ADMIN") from caught
    raise StorageError(f"{target}: could not be unmounted: {os.strerror(number).lower()}") from caught


def unmount_anyway(target: str, flags: int = 0) -> bool:
    """Takes a mount out of the tree of files, also while it is in use: then who uses it goes on with it.

    In use is also what another one stands on that a namespace has a copy of (containers that were started since).
    """
    try:
        return unmount(target, flags)
    except StorageError:
        return unmount(target, DETACH)


def clear(folder: str) -> int:
    """Ends all mounts at and below a folder, also those whose server is stopped or gone; how many there were.

    Who reads from FUSE there gets errors from now on. Raises: ConfigError, StorageError.
    """
    found = mounts_below(folder)
    for each in found:
        if is_fuse(each):
            abort(each.minor)
    for each in found:
        unmount_anyway(
            each.target, FORCE if is_fuse(each) else 0
        )  # which aborts too, where fusectl is not mounted
    return len(found)


def abort(connection: int) -> bool:
    """Ends a FUSE connection: all its requests fail, whatever its server does; False if that cannot be done here.

    `connection`: minor number of the mount's device. Looks at nothing that could hang.
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
    """All of this process's namespace, in the order in which they were made."""
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            return parse_mounts(file.read())
    except OSError as caught:
        raise StorageError(f"/proc/self/mountinfo: cannot be read: {caught.strerror}") from caught


def mounts_below(folder: str) -> list[Mount]:
    """Mounts at and below a folder, in the order in which they can be unmounted."""
    # The folder itself is not looked at: of a mount whose server is stopped that would hang.
    above, name = os.path.split(os.path.abspath(folder))
    return below(mounts(), os.path.join(os.path.realpath(above), name))


def below(found: list[Mount], folder: str) -> list[Mount]:
    """Those at and below an absolute folder, the last one first, and what is on another one always before it."""
    prefix = folder.rstrip("/") + "/"
    chosen = [each for each in found if each.target == folder or each.target.startswith(prefix)]
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
    """Of /proc/PID/mountinfo; lines of other shapes are left out."""
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


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)
