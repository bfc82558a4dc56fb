"""New files of the operating system: whole and on the disk before they have their name. In the calling thread.

A file is written under a temporary name in its folder, and gets its own by a hard link, which fails if something
has it already, or by a rename, which replaces. Listings leave temporary names out; a crash may leave one behind.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
import threading
from collections.abc import Sequence

from bootseer.storage.local_reading import stat_of
from bootseer.storage.os_errors import map_os_errors
from bootseer.storage.protocol import Stat

TEMPORARY = ".bootseer-tmp-"
_JOIN_BYTES = 64 << 20  # of one copy within the kernel
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1


class NewFile:
    """A file that has no name of its own yet. `give_up` may be called while another call hangs."""

    def __init__(self, full: str) -> None:
        self.full = full
        self._lock = threading.Lock()  # a call that hung and was given up may come back at any time
        self._is_given_up = False
        folder = os.path.dirname(full)
        self._temporary = os.path.join(folder, TEMPORARY + secrets.token_hex(8))
        with map_os_errors(full):
            _make_folders(folder)
            self._fd = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, data: memoryview | bytes) -> None:
        """Appends all of it."""
        view = memoryview(data)
        with self._lock, map_os_errors(self.full):
            while view:
                self._check()
                view = view[os.write(self._fd, view) :]

    def append(self, part: str) -> None:
        """Appends another file without its bytes passing through this process, where the kernel can."""
        with self._lock, map_os_errors(part):
            fd = os.open(part, os.O_RDONLY | os.O_CLOEXEC)
            try:
                at, end = 0, os.fstat(fd).st_size
                while at < end:
                    self._check()
                    count = _copy(fd, self._fd, at, min(_JOIN_BYTES, end - at))
                    if count == 0:
                        raise OSError(errno.EIO, "became shorter while it was joined")
                    at += count
            finally:
                os.close(fd)

    def publish(self, *, replaces: bool) -> Stat:
        """Gives it its name; after a crash of the machine it is still there, whole.

        Raises: AlreadyExists unless it `replaces`.
        """
        with self._lock, map_os_errors(self.full):
            os.fsync(self._fd)
            found = stat_of(os.fstat(self._fd))
            self._check()
            if replaces:
                os.rename(self._temporary, self.full)
            else:
                _rename_new(self._temporary, self.full)
            self._temporary = ""
            sync_folder(os.path.dirname(self.full))
        return found

    def give_up(self) -> None:
        """What has not happened yet does not happen any more."""
        self._is_given_up = True

    def close(self) -> None:
        """Ends it; without a name it is gone."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
            if self._temporary:
                try:
                    os.unlink(self._temporary)
                except OSError:
                    pass  # the folder is gone, or the disk: nothing that could be done about it here
                self._temporary = ""

    def _check(self) -> None:
        if self._is_given_up or self._fd < 0:
            raise OSError(errno.ECANCELED, "was given up")


def _copy(source_fd: int, fd: int, at: int, count: int) -> int:
    try:
        return os.copy_file_range(source_fd, fd, count, at)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    return os.write(fd, os.pread(source_fd, min(count, 1 << 20), at))


def publish_file(full: str, data: bytes, *, if_absent: bool) -> Stat:
    """A small file, whole at any moment."""
    if if_absent and os.path.lexists(full):  # saves the writing; the link decides
        with map_os_errors(full):
            raise FileExistsError(errno.EEXIST, "is there already")
    file = NewFile(full)
    try:
        file.write(data)
        return file.publish(replaces=not if_absent)
    finally:
        file.close()


def concat_files(full: str, parts: Sequence[str]) -> None:
    """Joins files into a new one; they are gone then."""
    file = NewFile(full)
    try:
        for part in parts:
            file.append(part)
        file.publish(replaces=False)
    finally:
        file.close()
    for part in parts:
        delete_path(part)


def delete_path(full: str) -> None:
    """A file, a link, or a folder with all that is in it; what is missing is no error."""
    with map_os_errors(full):
        try:
            os.unlink(full)
        except (FileNotFoundError, NotADirectoryError):
            return
        except (IsADirectoryError, PermissionError):
            if not os.path.isdir(full) or os.path.islink(full):
                raise
            for _ in range(3):  # somebody may be writing into it
                try:
                    shutil.rmtree(full)
                    return
                except FileNotFoundError:
                    continue  # somebody deletes it as well
                except OSError as error:
                    if error.errno != errno.ENOTEMPTY:
                        raise
            if os.path.lexists(full):
                shutil.rmtree(full)


def sync_folder(folder: str) -> None:
    """Names in it survive a crash of the machine."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system whose folders need no such thing
            raise
    finally:
        os.close(fd)


def _make_folders(folder: str) -> None:
    missing = []
    while folder and not os.path.isdir(folder):
        missing.append(folder)
        above = os.path.dirname(folder)
        if above == folder:
            break
        folder = above
    for made in reversed(missing):
        try:
            os.mkdir(made)
        except FileExistsError:
            if not os.path.isdir(made):
                raise NotADirectoryError(errno.ENOTDIR, "a file is in the way of a folder", made) from None
        else:
            sync_folder(os.path.dirname(made))


def _rename_new(temporary: str, full: str) -> None:
    """Raises: FileExistsError if something has the name."""
    try:
        os.link(temporary, full, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
    else:
        os.unlink(temporary)
        return
    # A file system without hard links.
    libc = ctypes.CDLL(None, use_errno=True)
    old, new = os.fsencode(temporary), os.fsencode(full)
    if libc.renameat2(_AT_FDCWD, old, _AT_FDCWD, new, _RENAME_NOREPLACE) == 0:
        return
    if ctypes.get_errno() == errno.EEXIST:
        raise FileExistsError(errno.EEXIST, "is there already", full)
    # One that has neither (some of FUSE): two writers at the same moment may both think that they were first.
    if os.path.lexists(full):
        raise FileExistsError(errno.EEXIST, "is there already", full)
    os.rename(temporary, full)
