"""Attributes of an entry for a file that was just made: what this user may set is set, the rest is counted."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import Counter

from bootseer.tree.index import Index
from bootseer.tree.safe_folders import attribute_path

SPECIAL_BITS = 0o6000  # run as the owner, run as the group
OPAQUE = (b"trusted.overlay.opaque", b"y")
# Of owners that a user namespace does not map, and of attributes that a file system does not have.
_REFUSED = {errno.EPERM, errno.EACCES, errno.EINVAL, errno.ENOTSUP, errno.ENOSPC, errno.E2BIG, errno.ERANGE}


class Attributes:
    """Sets them. For any number of threads.

    `keeps_owners`: set those of the index, and with them what only makes sense then: bits that run a program as
    its owner, and attributes that are not `user.*`.
    """

    def __init__(self, index: Index, *, keeps_owners: bool) -> None:
        self._index = index
        self.keeps_owners = keeps_owners
        self._opaque = frozenset(index.opaque)
        self._lock = threading.Lock()
        self._skipped: Counter[str] = Counter()

    @property
    def skipped(self) -> dict[str, int]:
        """What was not set, and how often."""
        with self._lock:
            return dict(self._skipped)

    def skip(self, what: str) -> None:
        with self._lock:
            self._skipped[what] += 1

    def set_open(self, entry: int, fd: int) -> None:
        """All, of an open file or folder. Raises: OSError."""
        # The order matters: a change of owner takes capabilities away, a mode may forbid to set attributes.
        is_owned = self._chown(entry, fd)
        self._set_xattrs(entry, fd)
        os.fchmod(fd, self._mode(entry, is_owned=is_owned))
        mtime_ns = self._index.mtimes_ns[entry]
        os.utime(fd, ns=(mtime_ns, mtime_ns))

    def set_provisional(self, entry: int, fd: int) -> None:
        """Of a folder that is being filled: others may look into it as they will, but not write yet."""
        self._chown(entry, fd)
        os.fchmod(fd, (self._index.modes[entry] & 0o755) | 0o700)

    def set_named(self, entry: int, folder_fd: int, name: bytes) -> None:
        """All, of what cannot be opened, in a folder that nobody else can write to. Raises: OSError."""
        is_owned = self._chown(entry, name, folder_fd)
        self._set_xattrs(entry, attribute_path(folder_fd, name))
        if not stat.S_ISLNK(self._index.modes[entry]):
            os.chmod(name, self._mode(entry, is_owned=is_owned), dir_fd=folder_fd)
        mtime_ns = self._index.mtimes_ns[entry]
        os.utime(name, ns=(mtime_ns, mtime_ns), dir_fd=folder_fd, follow_symlinks=False)

    # ---- one at a time -------------------------------------------------------------------------------------

    def _chown(self, entry: int, file: int | bytes, folder_fd: int | None = None) -> bool:
        """Whether it has the owner of the index now."""
        if not self.keeps_owners:
            return False
        uid, gid = self._index.uids[entry], self._index.gids[entry]
        try:
            if isinstance(file, int):
                os.fchown(file, uid, gid)
            else:
                os.chown(file, uid, gid, dir_fd=folder_fd, follow_symlinks=False)
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

    def _set_xattrs(self, entry: int, file: int | bytes) -> None:
        pairs = self._index.xattrs.get(entry, [])
        if entry in self._opaque and OPAQUE not in pairs:
            pairs = [*pairs, OPAQUE]
        for name, value in pairs:
            if not self.keeps_owners and not name.startswith(b"user."):
                self.skip("extended attributes")
                continue
            try:
                os.setxattr(file, name, value, follow_symlinks=isinstance(file, int))
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
                self.skip("extended attributes")
