"""Adapter for namespaces: unshare(2), pivot_root(2), and mounts that are moved from one namespace to another.

As mount.py for mount(2): errors of the system become Bootseer's, with the fix.

Source: unshare(2), user_namespaces(7), pivot_root(2), open_tree(2), move_mount(2), mount_setattr(2).
"""

from __future__ import annotations

import errno
import os
import struct

from bootseer.errors import ConfigError, StorageError
from bootseer.light_typing import NoReturn
from bootseer.linux import mount as kernel
from bootseer.linux.syscalls import call, last_errno, syscall

MOVE, REC, SLAVE = 8192, 16384, 1 << 19  # flags of mount(2) that mount.py does not use
RDONLY, NOSUID, NODEV = 1, 2, 4  # MOUNT_ATTR_*
_NEWNS, _NEWUSER = 0x00020000, 0x10000000
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442  # the same on all architectures
_CLONE, _RECURSIVE, _CLOEXEC = 1, 0x8000, os.O_CLOEXEC
_EMPTY_SOURCE = 0x4  # MOVE_MOUNT_F_EMPTY_PATH
_AT_FDCWD = -100


def separate() -> bool:
    """Give this process its own mount namespace; return True if that needed a user namespace.

    Later mounts of the node appear here too, those made here appear nowhere else. The process has one thread.
    Raises: ConfigError when this user can have neither.
    """
    uid, gid = os.geteuid(), os.getegid()
    number = call("unshare", _NEWNS)
    is_user = False
    if number in (errno.EPERM, errno.EACCES):
        is_user = True
        number = call("unshare", _NEWNS | _NEWUSER)
        if not number:
            _map_self(uid, gid)
    if number:
        raise _no_namespaces(f"unshare: {os.strerror(number).lower()}")
    try:
        kernel.mount("none", "/", "", REC | SLAVE)
    except StorageError as error:
        raise ConfigError(
            "no namespaces for an image here: / is not a mount, as in a chroot: bind the directory of / onto "
            "itself before the chroot (mount --bind DIR DIR), or use a container"
        ) from error
    except ConfigError as error:
        raise _no_namespaces(str(error)) from error
    return is_user


def probe() -> None:
    """Try `separate` in a child. Raises: ConfigError as that does."""
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    with open(read_fd, "rb") as file:
        try:
            pid = os.fork()
            if pid == 0:
                _be_probe(write_fd)
        except OSError as error:
            raise _no_namespaces(f"no process for a trial: {error}") from error
        finally:
            os.close(write_fd)
        said = file.read().decode("utf-8", "replace")
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if said:
        raise ConfigError(said)
    if status:
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        raise _no_namespaces(f"a trial process {how}")


def _be_probe(write_fd: int) -> NoReturn:
    """Try `separate`, and write why it fails, in the child; an exit status of 0 means that it works."""
    status = 1
    try:
        try:
            separate()
            status = 0
        except ConfigError as error:
            os.write(write_fd, str(error).encode())
        except Exception as error:
            os.write(write_fd, str(_no_namespaces(f"{type(error).__name__}: {error}")).encode())
    finally:
        os._exit(status)


def _no_namespaces(why: str) -> ConfigError:
    return ConfigError(
        f"no namespaces for an image here ({why}): run it as root, or allow "
        "user namespaces (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns=0; in "
        "a container --cap-add SYS_ADMIN), or run the job by apptainer or podman --rootfs on the unpacked "
        "image (bootseer image materialise)"
    )


def _map_self(uid: int, gid: int) -> None:
    """Map this user to itself inside; no other user is mapped."""
    try:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            fd = os.open(f"/proc/self/{name}", os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(fd, text.encode())
            finally:
                os.close(fd)
    except OSError as error:
        raise ConfigError(f"a user namespace cannot be set up here ({error}): run it as root") from error


def pivot(directory: str, old: str) -> bool:
    """Make a mount the root of this process and its namespace; the old root is mounted at the name `old` in it.

    Not on top of it, as in an example of pivot_root(2): `..` in the root would lead there.
    Returns: whether the old root is there. Where the node's own root is an initramfs or a chroot it is not, and
    this process is only moved.
    """
    os.chdir(directory)
    number = call("pivot_root", b".", os.fsencode(old))
    if not number:
        return True
    if number != errno.EINVAL:
        raise StorageError(f"{directory}: cannot be made the root directory: {os.strerror(number).lower()}")
    kernel.mount(".", "/", "", MOVE)
    os.chroot(".")
    return False


def set_attributes(directory: str, attributes: int) -> bool:
    """Add attributes to a mount and those below it; return False if this kernel (before 5.12) has no such call.

    Raises: StorageError.
    """
    packed = struct.pack("QQQQ", attributes, 0, 0, 0)
    if syscall(_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(directory), _RECURSIVE, packed, len(packed)) == 0:
        return True
    number = last_errno()
    if number == errno.ENOSYS:
        return False
    raise StorageError(f"{directory}: cannot be restricted: {os.strerror(number).lower()}")


def copy_mount(path: str) -> int:
    """Return a descriptor of a copy of the mount at `path`, for another namespace; the caller closes it.

    Raises: ConfigError without the privilege or on a kernel before 5.2; StorageError.
    """
    fd = syscall(_OPEN_TREE, _AT_FDCWD, os.fsencode(path), _CLONE | _RECURSIVE | _CLOEXEC)
    if fd >= 0:
        return fd
    number = last_errno()
    if number in (errno.EPERM, errno.ENOSYS):
        raise ConfigError(f"{path}: cannot be shown inside an image: {os.strerror(number).lower()}")
    raise StorageError(f"{path}: cannot be shown inside an image: {os.strerror(number).lower()}")


def attach(fd: int, directory: str) -> None:
    """Mount a copy (`copy_mount`) at a directory of this process's namespace. Raises: StorageError."""
    if syscall(_MOVE_MOUNT, fd, b"", _AT_FDCWD, os.fsencode(directory), _EMPTY_SOURCE):
        number = last_errno()
        raise StorageError(f"{directory}: cannot be shown inside the image: {os.strerror(number).lower()}")
