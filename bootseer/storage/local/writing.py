"""New files of the operating system, whole and synced before they get their name. In the calling thread.

A file is written under a temporary name in its directory. It gets its own name by a hard link, which fails if the
name exists, or by a rename, which replaces. Listings omit temporary names; a crash may leave one behind.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import threading
from collections.abc import Sequence
from contextlib import suppress

from bootseer.errors import StorageError
from bootseer.linux.syscalls import call
from bootseer.storage.local.reading import stat_of
from bootseer.storage.os_errors import map_os_errors
from bootseer.storage.protocol import Stat

TEMPORARY = ".bootseer-tmp-"
_JOIN_BYTES = 64 << 20  # of one copy inside the kernel
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1


class NewFile:
    """A file without its final name. `give_up` may be called while another call hangs."""

    def __init__(self, full: str) -> None:
        self.full = full
        self._lock = threading.Lock()  # an abandoned call may return at any time
        self._is_given_up = False
        directory = os.path.dirname(full)
        self._temporary = os.path.join(directory, TEMPORARY + secrets.token_hex(8))
        with map_os_errors(full):
            _make_directories(directory)
            self._fd = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, data: memoryview | bytes) -> None:
        """Append all of `data`."""
        view = memoryview(data)
        with self._lock, map_os_errors(self.full):
            while view:
                self._check()
                view = view[os.write(self._fd, view) :]

    def append(self, part: str) -> None:
        """Append another file, copied by the kernel where possible."""
        with self._lock, map_os_errors(part):
            fd = os.open(part, os.O_RDONLY | os.O_CLOEXEC)
            try:
                at, end = 0, os.fstat(fd).st_size
                while at < end:
                    self._check()
                    count = _copy(fd, self._fd, at, min(_JOIN_BYTES, end - at))
                    if count == 0:
                        raise OSError(errno.EIO, "the file became shorter during the copy")
                    at += count
            finally:
                os.close(fd)

    def publish(self, *, replaces: bool) -> Stat:
        """Give the file its name, durably: it survives a crash of the machine, whole.

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
            sync_directory(os.path.dirname(self.full))
        return found

    def give_up(self) -> None:
        """Make all later steps fail."""
        self._is_given_up = True

    def close(self) -> None:
        """Close the file, and delete it if it has no name."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
            if self._temporary:
                try:
                    os.unlink(self._temporary)
                except OSError:
                    pass  # the directory or the disk is gone
                self._temporary = ""

    def _check(self) -> None:
        if self._is_given_up or self._fd < 0:
            raise OSError(errno.ECANCELED, "the write was cancelled")


def _copy(source_fd: int, fd: int, at: int, count: int) -> int:
    try:
        return os.copy_file_range(source_fd, fd, count, at)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    return os.write(fd, os.pread(source_fd, min(count, 1 << 20), at))


def publish_file(full: str, data: bytes, *, if_absent: bool) -> Stat:
    """Publish a small file atomically."""
    if if_absent and os.path.lexists(full):  # avoids the write; the link decides
        with map_os_errors(full):
            raise FileExistsError(errno.EEXIST, "already exists")
    file = NewFile(full)
    try:
        file.write(data)
        return file.publish(replaces=not if_absent)
    finally:
        file.close()


def concat_files(full: str, parts: Sequence[str]) -> None:
    """Join files into a new one, and delete them."""
    file = NewFile(full)
    try:
        for part in parts:
            file.append(part)
        file.publish(replaces=False)
    finally:
        file.close()
    for part in parts:
        with suppress(StorageError):  # the file is complete
            delete_path(part)


def delete_path(full: str) -> None:
    """Delete a file, a link, or a directory with its contents; a missing path is no error."""
    with map_os_errors(full):
        try:
            os.unlink(full)
        except (FileNotFoundError, NotADirectoryError):
            return
        except (IsADirectoryError, PermissionError):
            if not os.path.isdir(full) or os.path.islink(full):
                raise
            for _ in range(3):  # another process may be writing into it
                try:
                    shutil.rmtree(full)
                    return
                except FileNotFoundError:
                    continue  # another process deletes it as well
                except OSError as error:
                    if error.errno != errno.ENOTEMPTY:
                        raise
            if os.path.lexists(full):
                shutil.rmtree(full)


def sync_directory(directory: str) -> None:
    """Make the names in a directory survive a crash of the machine."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system whose directories need no sync
            raise
    finally:
        os.close(fd)


def _make_directories(directory: str) -> None:
    missing = []
    while directory and not os.path.isdir(directory):
        missing.append(directory)
        above = os.path.dirname(directory)
        if above == directory:
            break
        directory = above
    for made in reversed(missing):
        try:
            os.mkdir(made)
        except FileExistsError:
            if not os.path.isdir(made):
                raise NotADirectoryError(errno.ENOTDIR, "a file has the name of a directory", made) from None
        else:
            sync_directory(os.path.dirname(made))


def _rename_new(temporary: str, full: str) -> None:
    """Rename without replacing. Raises: FileExistsError if the name exists."""
    try:
        os.link(temporary, full, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
    else:
        with suppress(OSError):  # the file has its name, and listings omit the temporary one
            os.unlink(temporary)
        return
    # A file system without hard links.
    old, new = os.fsencode(temporary), os.fsencode(full)
    number = call("renameat2", _AT_FDCWD, old, _AT_FDCWD, new, _RENAME_NOREPLACE)
    if number == 0:
        return
    if number == errno.EEXIST:
        raise FileExistsError(errno.EEXIST, "already exists", full)
    # Without both (some FUSE file systems), two concurrent writers may both succeed.
    if os.path.lexists(full):
        raise FileExistsError(errno.EEXIST, "already exists", full)
    os.rename(temporary, full)
