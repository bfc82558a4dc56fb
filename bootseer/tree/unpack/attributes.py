"""Attributes of new files: set as far as this user may, else counted."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import Counter
from collections.abc import Iterable

from bootseer.errors import IntegrityError
from bootseer.tree.index import Index
from bootseer.tree.unpack.safe_directories import attribute_path

SPECIAL_BITS = 0o6000  # run as the owner, run as the group
OPAQUE = (b"trusted.overlay.opaque", b"y")
# For owners outside of a user namespace, and attributes that a file system lacks.
_REFUSED = {errno.EPERM, errno.EACCES, errno.EINVAL, errno.ENOTSUP, errno.ENOSPC, errno.E2BIG, errno.ERANGE}


class Attributes:
    """Sets attributes. Thread-safe.

    `keeps_owners`: set the owners of the index, and with them the attributes that depend on the owner: setuid
    bits, and attributes other than `user.*`.
    """

    def __init__(self, index: Index, *, keeps_owners: bool) -> None:
        self._index = index
        self.keeps_owners = keeps_owners
        self._opaque = frozenset(index.opaque)
        self._lock = threading.Lock()
        self._skipped: Counter[str] = Counter()
        self._umask = 0o777  # no mode is plain
        self._uid, self._gid = os.geteuid(), os.getegid()

    @property
    def skipped(self) -> dict[str, int]:
        """The attributes that were not set, and how often."""
        with self._lock:
            return dict(self._skipped)

    def skip(self, what: str) -> None:
        with self._lock:
            self._skipped[what] += 1

    def expect_plain(self, root_fd: int) -> None:
        """Check once which attributes a new file gets by itself below a new directory; see `plain_modes`."""
        found = os.fstat(root_fd)
        try:
            has_list = "system.posix_acl_default" in os.listxattr(root_fd)
        except OSError:
            has_list = True
        is_own = (found.st_uid, found.st_gid) == (self._uid, self._gid)  # else new files may get its group
        if not has_list and not found.st_mode & stat.S_ISGID and (is_own or not self.keeps_owners):
            self._umask = _read_umask()

    def plain_modes(self) -> list[int]:
        """Return by entry the mode for creating a file that then lacks only its time; -1 if it lacks more."""
        index, mask = self._index, self._umask | 0o7000
        modes = [-1 if mode & mask else mode & 0o777 for mode in index.modes]
        for entry in index.xattrs:
            modes[entry] = -1
        if self.keeps_owners:
            for entry, uid in enumerate(index.uids):
                if uid != self._uid or index.gids[entry] != self._gid:
                    modes[entry] = -1
        return modes

    def plain_directory_modes(self, entries: Iterable[int]) -> dict[int, int]:
        """Return the modes of directories that can have them from the beginning and then need only a time."""
        modes = self.plain_modes()
        return {
            entry: modes[entry]
            for entry in entries
            if entry and modes[entry] >= 0 and modes[entry] & 0o700 == 0o700 and entry not in self._opaque
        }

    def set_open(self, entry: int, fd: int) -> None:
        """Set all attributes of an open file or directory. Raises: OSError."""
        # The order matters: a change of owner clears capabilities, and a mode may forbid setting attributes.
        is_owned = self._chown(entry, fd)
        self._set_xattrs(entry, fd)
        os.fchmod(fd, self._mode(entry, is_owned=is_owned))
        mtime_ns = self._index.mtimes_ns[entry]
        os.utime(fd, ns=(mtime_ns, mtime_ns))

    def set_provisional(self, entry: int, fd: int) -> None:
        """Set attributes of a directory that is being filled: others may read it, but not write yet."""
        self._chown(entry, fd)
        os.fchmod(fd, (self._index.modes[entry] & 0o755) | 0o700)

    def set_named(self, entry: int, directory_fd: int, name: bytes) -> None:
        """Set all attributes of a new file that cannot be opened, by name.

        It follows no link and changes only a new file of this kind, even if another process exchanges it.

        Raises: OSError; IntegrityError when it was exchanged.
        """
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory_fd)
        try:
            found = os.fstat(fd)
            mode = self._index.modes[entry]
            if stat.S_IFMT(found.st_mode) != stat.S_IFMT(mode) or found.st_nlink != 1:
                path = os.fsdecode(self._index.path(entry))
                raise IntegrityError(f"{path}: another process changes files where the tree is unpacked")
            is_link = stat.S_ISLNK(mode)
            # By its descriptor; a link, which has no mode, by its name. Neither follows links.
            file, place = (name, directory_fd) if is_link else (b"/proc/self/fd/%d" % fd, None)
            is_owned = self._chown(entry, file, place, follow=not is_link)
            self._set_xattrs(entry, attribute_path(directory_fd, name) if is_link else file, follow=not is_link)
            if not is_link:
                os.chmod(file, self._mode(entry, is_owned=is_owned))
            mtime_ns = self._index.mtimes_ns[entry]
            os.utime(file, ns=(mtime_ns, mtime_ns), dir_fd=place, follow_symlinks=not is_link)
        finally:
            os.close(fd)

    # ---- single attributes ---------------------------------------------------------------------------------

    def _chown(
        self, entry: int, file: int | bytes, directory_fd: int | None = None, *, follow: bool = False
    ) -> bool:
        """Set the owner; return whether the file has the owner of the index now."""
        if not self.keeps_owners:
            return False
        uid, gid = self._index.uids[entry], self._index.gids[entry]
        try:
            if isinstance(file, int):
                os.fchown(file, uid, gid)
            else:
                os.chown(file, uid, gid, dir_fd=directory_fd, follow_symlinks=follow)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            self.skip("owners")
            return False
        return True

    def _mode(self, entry: int, *, is_owned: bool) -> int:
        mode = stat.S_IMODE(self._index.modes[entry])
        if mode & SPECIAL_BITS and not is_owned:
            self.skip("setuid and setgid bits")
            mode &= ~SPECIAL_BITS
        return mode

    def _set_xattrs(self, entry: int, file: int | bytes, *, follow: bool = True) -> None:
        pairs = self._index.xattrs.get(entry, [])
        if entry in self._opaque and OPAQUE not in pairs:
            pairs = [*pairs, OPAQUE]
        for name, value in pairs:
            if not self.keeps_owners and not name.startswith(b"user."):
                self.skip("extended attributes")
                continue
            try:
                os.setxattr(file, name, value, follow_symlinks=follow)
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
                self.skip("extended attributes")


def _read_umask() -> int:
    """Return the umask of this process without changing it; 0o777 if the system does not report it."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            return next(int(line.split()[1], 8) for line in file if line.startswith("Umask:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return 0o777
