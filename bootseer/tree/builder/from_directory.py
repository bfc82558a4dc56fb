"""A directory of this machine as the source of a tree.

It is walked by descriptors, with names in bytewise order. So neither the order of a disk nor a symbolic link
created meanwhile matters. file_pieces.py reads the files; a file that changes between its inspection and its last
byte is an error that names it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from collections.abc import Sequence

from bootseer.errors import ConfigError
from bootseer.tree.builder.building import Progress, SourceContents, piece_count
from bootseer.tree.builder.file_pieces import File, FileTasks, Identity, source_errors
from bootseer.tree.builder.packing import Packer
from bootseer.tree.index import MAX_XATTR_BYTES, OVERLAY_XATTRS, is_xattr
from bootseer.tree.inodes import Inode
from bootseer.tree.status_folder import NAME, is_marked
from bootseer.tree.unpack.safe_directories import attribute_path, open_directory, open_root

STATUS_FOLDER = NAME.encode()
_NO_XATTRS = {errno.ENOTSUP, errno.ENODATA, errno.ENOSYS}


class DirectorySource:
    """A source for `build`: a directory with everything below it.

    `name` is stored in the index. `owner`: (uid, gid) of all files, instead of their own. `crosses_mounts`:
    include other file systems mounted below the directory; otherwise a mount point is an empty directory.
    """

    def __init__(
        self, path: str, *, name: str = "", owner: tuple[int, int] | None = None, crosses_mounts: bool = False
    ) -> None:
        self.name = name
        self._path = os.path.abspath(path)
        self._owner = owner
        self._crosses_mounts = crosses_mounts

    def read(self, packer: Packer, hot_paths: Sequence[bytes], on_progress: Progress) -> SourceContents:
        """Implement `Source.read`. Raises: StorageError for unreadable files; SourceChanged; ConfigError."""
        if not os.path.isdir("/proc/self/fd"):
            raise ConfigError("/proc is not mounted, and extended attributes cannot be read without it")
        walk = _Walk(self._path, self._owner, crosses_mounts=self._crosses_mounts)
        root = walk.walk()
        files = walk.files
        hot = dict.fromkeys(path for path in hot_paths if path in files)
        tasks = FileTasks(self._path, packer, on_progress)
        for path in hot:
            tasks.add(files[path])
        if hot:
            tasks.end()
            packer.end_blocks()  # else a start would fetch cold files with its last hot ones
        for path, file in files.items():
            if path not in hot:
                tasks.add(file)
        tasks.end()
        return SourceContents(root, left_out=dict(walk.left_out))


class _Walk:
    """Finds all files, without their data."""

    def __init__(self, path: str, owner: tuple[int, int] | None, *, crosses_mounts: bool) -> None:
        self._path = path
        self._owner = owner
        self._crosses_mounts = crosses_mounts
        self._linked: dict[tuple[int, int], Inode] = {}  # by device and inode number, of files with several names
        self.files: dict[bytes, File] = {}  # by path, in the order of the index; each file once
        self.left_out: Counter[str] = Counter()

    def walk(self) -> Inode:
        """Walk the tree; return the root."""
        with source_errors(self._path, b""), open_root(self._path) as root_fd:
            found = os.fstat(root_fd)
            root = self._inode(found)
            root.xattrs = self._xattrs(b"/proc/self/fd/%d" % root_fd, is_link=True)
            below: list[tuple[tuple[bytes, ...], Inode]] = [((), root)]
            while below:
                names, directory = below.pop()
                with source_errors(self._path, b"/".join(names)), open_directory(root_fd, names) as fd:
                    directories = self._read_directory(fd, names, directory, found.st_dev)
                below += reversed(directories)
        return root

    def _read_directory(
        self, fd: int, names: tuple[bytes, ...], directory: Inode, root_dev: int
    ) -> list[tuple[tuple[bytes, ...], Inode]]:
        """Inspect the entries of a directory; return its subdirectories, to be walked next."""
        assert directory.children is not None
        directories = []
        if os.fstat(fd).st_dev != root_dev and not self._crosses_mounts:  # for files, overlayfs invents devices
            return []
        for name in sorted(map(os.fsencode, os.listdir(fd))):
            with source_errors(self._path, b"/".join((*names, name))):
                found = os.stat(name, dir_fd=fd, follow_symlinks=False)
                if not names and name == STATUS_FOLDER and is_marked(found):
                    continue  # of the mount from which the tree is built
                is_folder = stat.S_ISDIR(found.st_mode)
                inode = self._linked.get((found.st_dev, found.st_ino))
                if inode is None or found.st_nlink < 2 or is_folder:
                    inode = self._read_entry(fd, names, name, found)
                directory.children[name] = inode
                if is_folder:
                    directories.append(((*names, name), inode))
        return directories

    def _read_entry(self, fd: int, names: tuple[bytes, ...], name: bytes, found: os.stat_result) -> Inode:
        mode = found.st_mode
        inode = self._inode(found)
        if stat.S_ISLNK(mode):
            inode.target = os.readlink(name, dir_fd=fd)
        elif stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            inode.rdev = (os.major(found.st_rdev), os.minor(found.st_rdev))
        elif stat.S_ISREG(mode) and found.st_size:
            inode.size = found.st_size
            piece_count(found.st_size, os.path.join(self._path, os.fsdecode(b"/".join((*names, name)))))
            identity = Identity(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
            is_sparse = found.st_blocks * 512 < found.st_size
            self.files[b"/".join((*names, name))] = File(names, name, identity, inode, is_sparse)
        inode.xattrs = self._xattrs(attribute_path(fd, name), is_link=False)
        if found.st_nlink > 1 and not stat.S_ISDIR(mode):
            self._linked[found.st_dev, found.st_ino] = inode
        return inode

    def _inode(self, found: os.stat_result) -> Inode:
        uid, gid = self._owner or (found.st_uid, found.st_gid)
        return Inode(found.st_mode, uid, gid, found.st_mtime_ns)

    def _xattrs(self, path: bytes, *, is_link: bool) -> list[tuple[bytes, bytes]]:
        return read_xattrs(path, is_link=is_link, left_out=self.left_out)


def read_xattrs(path: bytes, *, is_link: bool, left_out: Counter[str]) -> list[tuple[bytes, bytes]]:
    """Return the extended attributes that a tree can contain, sorted; count others in `left_out`. Raises: OSError.

    `is_link`: the path is a link to the file, like those in /proc.
    """
    pairs = []
    total = 0
    try:
        for name in sorted(map(os.fsencode, os.listxattr(path, follow_symlinks=is_link))):
            value = os.getxattr(path, name, follow_symlinks=is_link)
            if (
                not is_xattr(name)
                or name.startswith(OVERLAY_XATTRS)
                or total + len(name) + len(value) > MAX_XATTR_BYTES
            ):
                left_out["extended attributes"] += 1
                continue
            total += len(name) + len(value)
            pairs.append((name, value))
    except OSError as error:
        if error.errno not in _NO_XATTRS:
            raise
    return pairs
