"""A folder of this machine as the source of a tree.

Folders are walked by descriptors, names in bytewise order, so that neither the order of a disk nor a symbolic link
that somebody puts there meanwhile matters. Files are read in the packer's threads; one that changes between the
look at it and its last byte is an error that names it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from bootseer.errors import ConfigError, SourceChanged
from bootseer.storage.os_errors import to_storage_error
from bootseer.tree.building import Contents, Progress, piece_count
from bootseer.tree.index import BLOCK_BYTES, HOLE, MOST_XATTR_BYTES, OVERLAY_XATTRS, is_xattr
from bootseer.tree.inodes import Inode
from bootseer.tree.packing import TASK_BYTES, TASK_PIECES, Packer
from bootseer.tree.safe_folders import LastFolder, attribute_path, open_folder, open_root

_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO}  # as of what was there a moment ago
_NO_XATTRS = {errno.ENOTSUP, errno.ENODATA, errno.ENOSYS}


class _Identity(NamedTuple):
    """What shows that a file is the one that was looked at, unchanged."""

    dev: int
    ino: int
    size: int
    mtime_ns: int


class _File(NamedTuple):
    """A regular file with data."""

    folder: tuple[bytes, ...]
    name: bytes
    identity: _Identity
    inode: Inode
    is_sparse: bool


class _Part(NamedTuple):
    """Pieces of a file that go on."""

    file: _File
    first: int  # piece of the file
    pieces: int


class Folder:
    """A source for `build`: a folder with all that is below it.

    `name` stands in the index. `owner`: (uid, gid) of everything, instead of those found. `crosses_mounts`: also
    take what other file systems show below the folder; else a folder that one is mounted on is there, but empty.
    """

    def __init__(
        self, path: str, *, name: str = "", owner: tuple[int, int] | None = None, crosses_mounts: bool = False
    ) -> None:
        self.name = name
        self._path = os.path.abspath(path)
        self._owner = owner
        self._crosses_mounts = crosses_mounts

    def read(self, packer: Packer, hot_paths: Sequence[bytes], on_progress: Progress) -> Contents:
        """As `Source` says. Raises: StorageError for what cannot be read; SourceChanged; ConfigError."""
        if not os.path.isdir("/proc/self/fd"):
            raise ConfigError("/proc is not mounted, and extended attributes cannot be read without it")
        walk = _Walk(self._path, self._owner, crosses_mounts=self._crosses_mounts)
        root = walk.walk()
        files = walk.files
        hot = dict.fromkeys(path for path in hot_paths if path in files)
        tasks = _Tasks(self._path, packer, on_progress)
        for path in hot:
            tasks.add(files[path])
        if hot:
            tasks.end()
            packer.divide()  # else a start would fetch cold files with its last hot ones
        for path, file in files.items():
            if path not in hot:
                tasks.add(file)
        tasks.end()
        return Contents(root, left_out=dict(walk.left_out))


class _Walk:
    """Finds what is there, without data."""

    def __init__(self, path: str, owner: tuple[int, int] | None, *, crosses_mounts: bool) -> None:
        self._path = path
        self._owner = owner
        self._crosses_mounts = crosses_mounts
        self._linked: dict[tuple[int, int], Inode] = {}  # by device and number, of those with several names
        self.files: dict[bytes, _File] = {}  # by path, in the order of the index; each file once
        self.left_out: Counter[str] = Counter()

    def walk(self) -> Inode:
        """The root."""
        with _errors(self._path, b""), open_root(self._path) as root_fd:
            found = os.fstat(root_fd)
            root = self._inode(found)
            root.xattrs = self._xattrs(b"/proc/self/fd/%d" % root_fd, is_link=True)
            below: list[tuple[tuple[bytes, ...], Inode]] = [((), root)]
            while below:
                names, folder = below.pop()
                with _errors(self._path, b"/".join(names)), open_folder(root_fd, names) as fd:
                    folders = self._look_into(fd, names, folder, found.st_dev)
                below += reversed(folders)
        return root

    def _look_into(
        self, fd: int, names: tuple[bytes, ...], folder: Inode, root_dev: int
    ) -> list[tuple[tuple[bytes, ...], Inode]]:
        """Everything in one folder; the folders among it are to be looked into."""
        assert folder.children is not None
        folders = []
        if os.fstat(fd).st_dev != root_dev and not self._crosses_mounts:  # of files, overlayfs makes up devices
            return []
        for name in sorted(map(os.fsencode, os.listdir(fd))):
            with _errors(self._path, b"/".join((*names, name))):
                found = os.stat(name, dir_fd=fd, follow_symlinks=False)
                is_folder = stat.S_ISDIR(found.st_mode)
                inode = self._linked.get((found.st_dev, found.st_ino))
                if inode is None or found.st_nlink < 2 or is_folder:
                    inode = self._look_at(fd, names, name, found)
                folder.children[name] = inode
                if is_folder:
                    folders.append(((*names, name), inode))
        return folders

    def _look_at(self, fd: int, names: tuple[bytes, ...], name: bytes, found: os.stat_result) -> Inode:
        mode = found.st_mode
        inode = self._inode(found)
        if stat.S_ISLNK(mode):
            inode.target = os.readlink(name, dir_fd=fd)
        elif stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            inode.rdev = (os.major(found.st_rdev), os.minor(found.st_rdev))
        elif stat.S_ISREG(mode) and found.st_size:
            inode.size = found.st_size
            piece_count(found.st_size, os.path.join(self._path, os.fsdecode(b"/".join((*names, name)))))
            identity = _Identity(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
            is_sparse = found.st_blocks * 512 < found.st_size
            self.files[b"/".join((*names, name))] = _File(names, name, identity, inode, is_sparse)
        inode.xattrs = self._xattrs(attribute_path(fd, name), is_link=False)
        if found.st_nlink > 1 and not stat.S_ISDIR(mode):
            self._linked[found.st_dev, found.st_ino] = inode
        return inode

    def _inode(self, found: os.stat_result) -> Inode:
        uid, gid = self._owner or (found.st_uid, found.st_gid)
        return Inode(found.st_mode, uid, gid, found.st_mtime_ns)

    def _xattrs(self, path: bytes, *, is_link: bool) -> list[tuple[bytes, bytes]]:
        """Those that can be kept, sorted."""
        pairs = []
        total = 0
        try:
            for name in sorted(map(os.fsencode, os.listxattr(path, follow_symlinks=is_link))):
                value = os.getxattr(path, name, follow_symlinks=is_link)
                if (
                    not is_xattr(name)
                    or name.startswith(OVERLAY_XATTRS)
                    or total + len(name) + len(value) > MOST_XATTR_BYTES
                ):
                    self.left_out["extended attributes"] += 1
                    continue
                total += len(name) + len(value)
                pairs.append((name, value))
        except OSError as error:
            if error.errno not in _NO_XATTRS:
                raise
        return pairs


class _Tasks:
    """Cuts files into pieces and gives them to the packer, many small files or a part of a large one at a time."""

    def __init__(self, path: str, packer: Packer, on_progress: Progress) -> None:
        self._path = path
        self._packer = packer
        self._on_progress = on_progress
        self._parts: list[_Part] = []
        self._bytes = self._count = self._files = 0

    def add(self, file: _File) -> None:
        done = 0
        for begin, end in _data_pieces(self._path, file):
            if begin > done:
                file.inode.add_pieces(HOLE, begin - done)
            first, done = begin, end
            while first < end:
                room = min(TASK_PIECES - self._count, -(-(TASK_BYTES - self._bytes) // BLOCK_BYTES))
                count = min(end - first, room)
                file.inode.add_pieces(self._packer.count + self._count, count)
                self._parts.append(_Part(file, first, count))
                self._count += count
                self._bytes += min(count * BLOCK_BYTES, file.identity.size - first * BLOCK_BYTES)
                first += count
                if self._count >= TASK_PIECES or self._bytes >= TASK_BYTES:
                    self.end()
        pieces = -(-file.identity.size // BLOCK_BYTES)
        if done < pieces:
            file.inode.add_pieces(HOLE, pieces - done)
        self._files += 1

    def end(self) -> None:
        """Gives away what there is."""
        if self._parts:
            self._packer.add_later(self._count, partial(_read, self._path, self._parts))
        self._on_progress(self._bytes, self._files)
        self._parts = []
        self._bytes = self._count = self._files = 0


def _data_pieces(path: str, file: _File) -> Iterator[tuple[int, int]]:
    """(first, end) of the pieces of a file that are not all hole, in order."""
    pieces = -(-file.identity.size // BLOCK_BYTES)
    if not file.is_sparse:
        yield 0, pieces
        return
    with _errors(path, _path(file)), open_root(path) as root_fd, open_folder(root_fd, file.folder) as folder_fd:
        fd = _open(path, file, folder_fd)
        try:
            done = 0
            while (begin := _seek(fd, done * BLOCK_BYTES, os.SEEK_DATA, file.identity.size)) is not None:
                end = _seek(fd, begin, os.SEEK_HOLE, file.identity.size)
                first = max(done, begin // BLOCK_BYTES)
                done = pieces if end is None else min(pieces, -(-end // BLOCK_BYTES))
                if first < done:
                    yield first, done
                if done == pieces:
                    break
        finally:
            os.close(fd)


def _seek(fd: int, offset: int, what: int, size: int) -> int | None:
    """Where data or a hole begins at or after `offset`; None past the end."""
    try:
        found = os.lseek(fd, offset, what)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return None
        if error.errno != errno.EINVAL:
            raise
        found = offset if what == os.SEEK_DATA else size  # a file system that does not know its holes
    return found if found < size else None


def _read(path: str, parts: Sequence[_Part]) -> list[bytes]:
    """In a thread: the pieces of all parts."""
    pieces = []
    with _errors(path, b""), open_root(path) as root_fd, LastFolder(root_fd) as folders:
        for part in parts:
            file = part.file
            with _errors(path, _path(file)):
                fd = _open(path, file, folders.open(file.folder))
                try:
                    for piece in range(part.first, part.first + part.pieces):
                        offset = piece * BLOCK_BYTES
                        length = min(BLOCK_BYTES, file.identity.size - offset)
                        data = os.pread(fd, length, offset)
                        while len(data) < length:
                            more = os.pread(fd, length - len(data), offset + len(data))
                            if not more:
                                raise _changed(path, file)
                            data += more
                        pieces.append(data)
                    if _identity(fd) != file.identity:
                        raise _changed(path, file)
                finally:
                    os.close(fd)
    return pieces


def _open(path: str, file: _File, folder_fd: int) -> int:
    """The file that was looked at, to be closed by the caller."""
    fd = os.open(file.name, _FILE, dir_fd=folder_fd)
    try:
        if _identity(fd) != file.identity:
            raise _changed(path, file)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _identity(fd: int) -> _Identity:
    found = os.fstat(fd)
    return _Identity(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def _path(file: _File) -> bytes:
    return b"/".join((*file.folder, file.name))


def _changed(path: str, file: _File) -> SourceChanged:
    full = os.path.join(path, os.fsdecode(_path(file)))
    return SourceChanged(f"{full}: changed while it was read: build again when nothing writes there")


@contextmanager
def _errors(root: str, path: bytes) -> Iterator[None]:
    """The door for errors of the operating system. What is gone had been there, unless it is the root."""
    try:
        yield
    except OSError as error:
        if not path:
            raise to_storage_error(error, root) from error
        full = os.path.join(root, os.fsdecode(path))
        if error.errno in _GONE:
            raise SourceChanged(
                f"{full}: was taken away while it was read: build again when nothing writes there"
            ) from error
        raise to_storage_error(error, full) from error
