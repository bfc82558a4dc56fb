"""The door to namespaces: unshare(2), pivot_root(2), and mounts that are carried from one namespace to another.

As kernel.py is for mount(2): errors of the system become ours, with the way out.

Source: unshare(2), user_namespaces(7), pivot_root(2), open_tree(2), move_mount(2), mount_setattr(2).
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import struct
from typing import Any

from bootseer.errors import ConfigError, StorageError
from bootseer.mounts import kernel

MOVE, REC, SLAVE = 8192, 16384, 1 << 19  # flags of mount(2) that kernel.py has no use for
RDONLY, NOSUID, NODEV = 1, 2, 4  # MOUNT_ATTR_*
_NEWNS, _NEWUSER = 0x00020000, 0x10000000
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442  # the same on all architectures
_CLONE, _RECURSIVE, _CLOEXEC = 1, 0x8000, os.O_CLOEXEC
_EMPTY_SOURCE = 0x4  # MOVE_MOUNT_F_EMPTY_PATH
_AT_FDCWD = -100
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def separate() -> bool:
    """Gives this process mounts of its own; True if it needed a user namespace for it.

    Mounts that the node makes later come here too, those made here go nowhere. The process has one thread.
    Raises: ConfigError when this user can have neither.
    """
    uid, gid = os.geteuid(), os.getegid()
    number = _call("unshare", _NEWNS)
    is_user = False
    if number in (errno.EPERM, errno.EACCES):
        is_user = True
        number = _call("unshare", _NEWNS | _NEWUSER)
        if not number:
            _map_self(uid, gid)
    if number:
        raise _no_namespaces(f"unshare: {os.strerror(number).lower()}")
    try:
        kernel.mount("none", "/", "", REC | SLAVE)
    except StorageError as error:
        raise ConfigError(
            "no namespaces for an image here: / is no mount, as in a chroot: bind the folder that is / here onto "
            "itself before the chroot (mount --bind DIR DIR), or take a container"
        ) from error
    except ConfigError as error:
        raise _no_namespaces(str(error)) from error
    return is_user


def probe() -> None:
    """Has a child try `separate`. Raises: ConfigError as that does."""
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            separate()
        except ConfigError as error:
            os.write(write_fd, str(error).encode())
        finally:
            os._exit(0)
    os.close(write_fd)
    with open(read_fd, "rb") as file:
        said = file.read().decode()
    os.waitpid(pid, 0)
    if said:
        raise ConfigError(said)


def _no_namespaces(why: str) -> ConfigError:
    return ConfigError(
        f"no namespaces for an image here ({why}): run it as root, or allow "
        "user namespaces (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns=0; in "
        "a container --cap-add SYS_ADMIN), or run the job by apptainer or podman --rootfs on the unpacked "
        "image (bootseer image materialise)"
    )


def _map_self(uid: int, gid: int) -> None:
    """This user is the same user inside; nobody else is anybody."""
    try:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            fd = os.open(f"/proc/self/{name}", os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(fd, text.encode())
            finally:
                os.close(fd)
    except OSError as error:
        raise ConfigError(f"a user namespace cannot be set up here ({error}): run it as root") from error


def pivot(folder: str, old: str) -> bool:
    """Makes a mount the root of this process and its namespace; the old root is mounted at the name `old` in it.

    Not on top of it, as pivot_root(2) has it in an example: `..` in the root would lead there.
    Returns: whether the old root is there; where the node's own root is an initramfs or a chroot it is not, and
    this process is only moved.
    """
    os.chdir(folder)
    number = _call("pivot_root", b".", os.fsencode(old))
    if not number:
        return True
    if number != errno.EINVAL:
        raise StorageError(f"{folder}: cannot be made the root folder: {os.strerror(number).lower()}")
    kernel.mount(".", "/", "", MOVE)
    os.chroot(".")
    return False


def set_attributes(folder: str, attributes: int) -> bool:
    """Adds attributes to a mount and those below it; False if this kernel (before 5.12) has no such call.

    Raises: StorageError.
    """
    packed = struct.pack("QQQQ", attributes, 0, 0, 0)
    if _syscall(_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(folder), _RECURSIVE, packed, len(packed)) == 0:
        return True
    number = ctypes.get_errno()
    if number == errno.ENOSYS:
        return False
    raise StorageError(f"{folder}: cannot be restricted: {os.strerror(number).lower()}")


def copy_mount(path: str) -> int:
    """A descriptor of a copy of what is mounted at `path`, for another namespace; to be closed.

    Raises: ConfigError without the privilege or on a kernel before 5.2; StorageError.
    """
    fd = _syscall(_OPEN_TREE, _AT_FDCWD, os.fsencode(path), _CLONE | _RECURSIVE | _CLOEXEC)
    if fd >= 0:
        return fd
    number = ctypes.get_errno()
    if number in (errno.EPERM, errno.ENOSYS):
        raise ConfigError(f"{path}: cannot be shown inside an image: {os.strerror(number).lower()}")
    raise StorageError(f"{path}: cannot be shown inside an image: {os.strerror(number).lower()}")


def attach(fd: int, folder: str) -> None:
    """Mounts a copy (`copy_mount`) at a folder of this process's namespace. Raises: StorageError."""
    if _syscall(_MOVE_MOUNT, fd, b"", _AT_FDCWD, os.fsencode(folder), _EMPTY_SOURCE):
        number = ctypes.get_errno()
        raise StorageError(f"{folder}: cannot be shown inside the image: {os.strerror(number).lower()}")


def die_with_parent(signum: int) -> None:
    """This process gets a signal when its parent ends; not if that has happened already."""
    _libc().prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)


def set_name(name: str) -> None:
    """The name of this process in ps and top (15 bytes)."""
    _libc().prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def _call(name: str, *arguments: Any) -> int:
    return 0 if getattr(_libc(), name)(*arguments) == 0 else ctypes.get_errno()


def _syscall(number: int, *arguments: int | bytes) -> int:
    """For calls that have no name in every C library; -1 with an errno."""
    words = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return int(_libc().syscall(ctypes.c_long(number), *words))


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return libc
