"""Files of this machine that nobody else could have put there or written to.

A file counts when it and every folder above it, up to /, belongs to one of the given users and neither group nor
others may write to it; folders with the sticky bit (/tmp) may stand above. The way is walked by descriptors, each
opened in the one before without following links; links on the way are resolved here, and belong to those users
too. So there is no moment between a check and a use in which a name could be exchanged. POSIX ACLs that let
somebody write show in the group bits. Not seen: ACLs of NFSv4, and what a server or the kernel lies about.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Set

MOST_LINKS = 40  # as the kernel
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_ENTRY = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


class NotOwnedError(Exception):
    """Somebody else could have put it there; the text says where on the way, and why."""


def own_uids() -> frozenset[int]:
    """This user, and root, who can do anything anyway."""
    return frozenset((os.geteuid(), 0))


def trusted_uids() -> frozenset[int]:
    """Users who may own the folders above one of ours: this user and root.

    In a user namespace without all users, as containers without root have them, root is shown as nobody, and
    cannot be told from others that are not mapped either.
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
    path: str, *, most_bytes: int, uids: Set[int] | None = None, is_secret: bool = False
) -> tuple[bytes, os.stat_result]:
    """A whole file that only `uids` (by default `own_uids`) can have written.

    Args: is_secret: nobody else may read it either; a file that root provides may be shared with a group.

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
        if status.st_size > most_bytes:
            raise NotOwnedError(f"{path} has {status.st_size} bytes; at most {most_bytes}")
        return _read(fd, path, most_bytes), status
    finally:
        os.close(fd)


def check_owned_folder(path: str, *, uids: Set[int] | None = None) -> None:
    """That nobody but `uids` can change what is in a folder.

    Raises: NotOwnedError; FileNotFoundError.
    """
    os.close(_open_path(path, own_uids() if uids is None else uids, is_folder=True))


def _read(fd: int, path: str, most_bytes: int) -> bytes:
    """Of what an O_PATH descriptor stands for: the very file that was checked."""
    try:
        reading_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise NotOwnedError(f"{path} cannot be read: {error.strerror}") from error
    with open(reading_fd, "rb", buffering=0) as file:
        parts = []
        left = most_bytes + 1
        while left > 0 and (part := file.read(left)):
            parts.append(part)
            left -= len(part)
    if left <= 0:
        raise NotOwnedError(f"{path} has more than {most_bytes} bytes")
    return b"".join(parts)


def _open_path(path: str, uids: Set[int], *, is_folder: bool) -> int:
    """An O_PATH descriptor of what `path` (absolute) leads to, every step of it checked."""
    if not path.startswith("/"):
        raise ValueError(f"{path!r} is not absolute")
    walk = _Walk(uids)
    try:
        return walk.to(path, is_folder=is_folder)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise NotOwnedError(f"{path} cannot be looked at: {error.strerror}") from error
    finally:
        walk.close()


class _Walk:
    """From / down; `_fds` are the folders from / to where it is, none of them reached by a link."""

    def __init__(self, uids: Set[int]) -> None:
        self._uids = uids
        self._fds: list[int] = []
        self._names: list[str] = []

    def to(self, path: str, *, is_folder: bool) -> int:
        self._enter(os.open("/", _FOLDER), "", device=None)
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
                    if links > MOST_LINKS:
                        raise NotOwnedError(f"{path} leads through too many links")
                    target = os.readlink("", dir_fd=fd)  # of the link that was checked
                    if target.startswith("/"):
                        self._leave_all()
                    todo += _steps(target)
                elif stat.S_ISDIR(status.st_mode):
                    device = os.fstat(self._fds[-1]).st_dev
                    folder_fd, fd = fd, -1
                    self._enter(folder_fd, name, device=device)
                else:
                    self._check_file(status, here, is_wanted=not is_folder and not todo)
                    self._check_last()
                    file_fd, fd = fd, -1
                    return file_fd
            finally:
                if fd >= 0:
                    os.close(fd)
        if not is_folder:
            raise NotOwnedError(f"{path} is a folder, not a file")
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
        if len(self._fds) > 1:  # above / is /
            os.close(self._fds.pop())
            self._names.pop()

    def _leave_all(self) -> None:
        while len(self._fds) > 1:
            self._leave()

    def _check_owner(self, status: os.stat_result, here: str) -> None:
        if status.st_uid not in self._uids:
            raise NotOwnedError(f"{here} belongs to {_user(status.st_uid)}, not to {_users(self._uids)}")

    def _check_last(self) -> None:
        """The folder it is in: the sticky bit keeps others from exchanging names, not from adding some."""
        status = os.fstat(self._fds[-1])
        if status.st_mode & _OTHERS_WRITE:
            raise NotOwnedError(_writable("/".join(self._names) or "/", status))

    def _check_file(self, status: os.stat_result, here: str, *, is_wanted: bool) -> None:
        if not is_wanted or not stat.S_ISREG(status.st_mode):
            raise NotOwnedError(f"{here} is not what it should be: a {'file' if is_wanted else 'folder'}")
        if status.st_mode & _OTHERS_WRITE:
            raise NotOwnedError(_writable(here, status))

    def _check_mount(self, device: int, here: str) -> None:
        """Who mounts a FUSE file system says himself whose its files are."""
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            users = foreign_fuse_users(file.read(), device, self._uids)
        if users:
            raise NotOwnedError(f"{here} is a FUSE file system that user {users[0]} mounted")


def foreign_fuse_users(mountinfo: str, device: int, uids: Set[int]) -> list[str]:
    """Who else than `uids` mounted the FUSE file system of this device, if it is one (/proc/PID/mountinfo)."""
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
    """Names in it, the first one last."""
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
