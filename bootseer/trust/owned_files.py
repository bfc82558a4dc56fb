"""Reads of local files that no other user could have created or written to.

A file qualifies if it and every directory above it, up to /, belong to one of the given users. Neither group nor
others may write to them. Directories above may have the sticky bit instead (/tmp). The path is walked by
descriptors, each opened in the one before without following links. Links on the path are resolved here, and must
belong to those users too. So no name can be exchanged between a check and a use. POSIX ACLs that grant writing
show in the group bits. Not detected: ACLs of NFSv4, and false reports of a server or the kernel.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Set

MAX_LINKS = 40  # as in the kernel
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_ENTRY = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


class NotOwnedError(Exception):
    """Another user could have created the file; the text names the place on its path, and the reason."""


def own_uids() -> frozenset[int]:
    """Return this user and root. Root can do anything anyway."""
    return frozenset((os.geteuid(), 0))


def trusted_uids() -> frozenset[int]:
    """Return the users that may own the directories above a trusted file: this user and root.

    In a user namespace without all users, as in containers without root, root appears as user `nobody`. It is then
    indistinguishable from other unmapped users.
    """
    uids = own_uids()
    try:
        with open("/proc/self/uid_map", encoding="ascii") as file:
            if file.read().split() == ["0", "0", "4294967295"]:
                return uids
        with open("/proc/sys/kernel/overflowuid", encoding="ascii") as file:
            return uids | {int(file.read())}
    except (OSError, ValueError):
        return uids


def read_owned(
    path: str, *, max_bytes: int, uids: Set[int] | None = None, is_secret: bool = False
) -> tuple[bytes, os.stat_result]:
    """Read a whole file that only `uids` (by default `own_uids`) can have written.

    Args: is_secret: no other user may read it either; a file of root may be shared with a group.

    Raises: NotOwnedError; FileNotFoundError.
    """
    uids = own_uids() if uids is None else uids
    fd = _open_path(path, uids, is_folder=False)
    try:
        status = os.fstat(fd)
        others = 0o077 if status.st_uid == os.geteuid() else 0o007
        if is_secret and status.st_mode & others:
            mode = f"{stat.S_IMODE(status.st_mode):04o}"
            raise NotOwnedError(f"{path} can be read by others (mode {mode}): chmod 600 {path}")
        if status.st_size > max_bytes:
            raise NotOwnedError(f"{path} has {status.st_size} bytes; at most {max_bytes}")
        return _read(fd, path, max_bytes), status
    finally:
        os.close(fd)


def check_owned_directory(path: str, *, uids: Set[int] | None = None) -> None:
    """Check that only `uids` can change the contents of a directory.

    Raises: NotOwnedError; FileNotFoundError.
    """
    os.close(_open_path(path, own_uids() if uids is None else uids, is_folder=True))


def _read(fd: int, path: str, max_bytes: int) -> bytes:
    """Read the very file of an O_PATH descriptor, which was checked."""
    try:
        reading_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise NotOwnedError(f"{path} cannot be read: {error.strerror}") from error
    with open(reading_fd, "rb", buffering=0) as file:
        parts = []
        left = max_bytes + 1
        while left > 0 and (part := file.read(left)):
            parts.append(part)
            left -= len(part)
    if left <= 0:
        raise NotOwnedError(f"{path} has more than {max_bytes} bytes")
    return b"".join(parts)


def _open_path(path: str, uids: Set[int], *, is_folder: bool) -> int:
    """Return an O_PATH descriptor of `path` (absolute), with every step of it checked."""
    if not path.startswith("/"):
        raise ValueError(f"{path!r} is not absolute")
    walk = _Walk(uids)
    try:
        return walk.to(path, is_folder=is_folder)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise NotOwnedError(f"{path} cannot be inspected: {error.strerror}") from error
    finally:
        walk.close()


class _Walk:
    """A walk from / down; `_fds` are the directories from / to the current one, none of them reached by a link."""

    def __init__(self, uids: Set[int]) -> None:
        self._uids = uids
        self._fds: list[int] = []
        self._names: list[str] = []

    def to(self, path: str, *, is_folder: bool) -> int:
        self._enter(os.open("/", _DIRECTORY), "", device=None)
        todo = _steps(path)
        links = 0
        while todo:
            name = todo.pop()
            if name == "..":
                self._leave()
                continue
            fd = os.open(name, _ENTRY, dir_fd=self._fds[-1])
            try:
                status = os.fstat(fd)
                here = "/".join([*self._names, name])
                self._check_owner(status, here)
                if stat.S_ISLNK(status.st_mode):
                    links += 1
                    if links > MAX_LINKS:
                        raise NotOwnedError(f"{path} leads through too many links")
                    target = os.readlink("", dir_fd=fd)  # of the link that was checked
                    if target.startswith("/"):
                        self._leave_all()
                    todo += _steps(target)
                elif stat.S_ISDIR(status.st_mode):
                    device = os.fstat(self._fds[-1]).st_dev
                    directory_fd, fd = fd, -1
                    self._enter(directory_fd, name, device=device)
                else:
                    self._check_file(status, here, is_wanted=not is_folder and not todo)
                    self._check_last()
                    file_fd, fd = fd, -1
                    return file_fd
            finally:
                if fd >= 0:
                    os.close(fd)
        if not is_folder:
            raise NotOwnedError(f"{path} is a directory, not a file")
        self._check_last()
        return os.dup(self._fds[-1])

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def _enter(self, fd: int, name: str, *, device: int | None) -> None:
        self._fds.append(fd)
        self._names.append(name)
        status = os.fstat(fd)
        here = "/".join(self._names) or "/"
        self._check_owner(status, here)
        if status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX:
            raise NotOwnedError(_writable(here, status))
        if status.st_dev != device:
            self._check_mount(status.st_dev, here)

    def _leave(self) -> None:
        if len(self._fds) > 1:  # the parent of / is /
            os.close(self._fds.pop())
            self._names.pop()

    def _leave_all(self) -> None:
        while len(self._fds) > 1:
            self._leave()

    def _check_owner(self, status: os.stat_result, here: str) -> None:
        if status.st_uid not in self._uids:
            raise NotOwnedError(f"{here} belongs to {_user(status.st_uid)}, not to {_users(self._uids)}")

    def _check_last(self) -> None:
        """Check the file's directory: the sticky bit prevents others from exchanging names, not from adding."""
        status = os.fstat(self._fds[-1])
        if status.st_mode & _OTHERS_WRITE:
            raise NotOwnedError(_writable("/".join(self._names) or "/", status))

    def _check_file(self, status: os.stat_result, here: str, *, is_wanted: bool) -> None:
        if not is_wanted or not stat.S_ISREG(status.st_mode):
            raise NotOwnedError(f"{here} is not what it should be: a {'file' if is_wanted else 'directory'}")
        if status.st_mode & _OTHERS_WRITE:
            raise NotOwnedError(_writable(here, status))

    def _check_mount(self, device: int, here: str) -> None:
        """Check the user of a FUSE mount: that user decides the owners of its files."""
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            users = foreign_fuse_users(file.read(), device, self._uids)
        if users:
            raise NotOwnedError(f"{here} is a FUSE file system that user {users[0]} mounted")


def foreign_fuse_users(mountinfo: str, device: int, uids: Set[int]) -> list[str]:
    """Return other users than `uids` that mounted the FUSE file system of this device (/proc/PID/mountinfo)."""
    number = f"{os.major(device)}:{os.minor(device)}"
    found = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(), [*after.split(), "", "", ""][:3]
        if fields[2:3] != [number] or not kind.startswith("fuse"):
            continue
        users = [each.removeprefix("user_id=") for each in options.split(",") if each.startswith("user_id=")]
        found += [user for user in users if not user.isdecimal() or int(user) not in uids]
    return found


def _steps(path: str) -> list[str]:
    """Return the names in a path, last one first."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def _writable(here: str, status: os.stat_result) -> str:
    return f"{here} can be written to by others (mode {stat.S_IMODE(status.st_mode):04o}): chmod go-w {here}"


def _user(uid: int) -> str:
    import pwd

    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"


def _users(uids: Set[int]) -> str:
    if set(uids) == {0}:
        return "root"
    names = [_user(uid) for uid in sorted(uids) if uid] + (["root"] if 0 in uids else [])
    return " or ".join(names)
