"""The changes of set-up commands as the source of a tree: directories "0", "1", ... of its root.

There is no new search: the files found at the end of the commands are read, by descriptors, and only if they are
unchanged. Later changes by other processes are not in the tree.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from bootseer.env.capture.difference import Difference
from bootseer.env.capture.walk import Entry, Walk
from bootseer.env.store.admissible import CAPABILITY
from bootseer.errors import ConfigError, SourceChanged
from bootseer.tree.builder.building import Progress, SourceContents, piece_count
from bootseer.tree.builder.file_pieces import File, FileTasks, Identity, changed, source_errors
from bootseer.tree.builder.from_directory import read_xattrs
from bootseer.tree.builder.packing import Packer
from bootseer.tree.inodes import Inode
from bootseer.tree.unpack.safe_directories import LastDirectory, attribute_path, open_root

WHITEOUT_RDEV = (0, 0)
_OTHERS_RIGHTS = stat.S_ISUID | stat.S_ISGID


class CompiledFile(NamedTuple):
    """Bytecode that was compiled for a source of the changes."""

    name: bytes  # in the scratch directory
    source: bytes  # relative to the target


class CapturedTarget(NamedTuple):
    folder: str
    after: Walk
    difference: Difference
    left_out: frozenset[bytes]  # paths of the changes
    compiled: Mapping[bytes, CompiledFile]  # by path relative to the target


class EnvSource:
    """A source for `build`. Args: scratch: directory of compiled files. name: goes into the index."""

    def __init__(self, parts: Sequence[CapturedTarget], *, scratch: str = "", name: str = "") -> None:
        self.name = name
        self._parts = parts
        self._scratch = scratch

    def read(self, packer: Packer, hot_paths: Sequence[bytes], on_progress: Progress) -> SourceContents:
        """Read the files, as in `Source`; hot paths begin with the number of a target.

        Raises: SourceChanged naming a file that has changed since set-up ended; StorageError; ConfigError.
        """
        if not os.path.isdir("/proc/self/fd"):
            raise ConfigError("/proc is not mounted, and extended attributes cannot be read without it")
        first = self._parts[0].after[b""]
        root = Inode(stat.S_IFDIR | 0o755, first.uid, first.gid, first.mtime_ns)
        assert root.children is not None
        left_out: Counter[str] = Counter()
        files: dict[bytes, tuple[str, File]] = {}  # by path in the tree: the directory that it is read from
        for number, part in enumerate(self._parts):
            place = b"%d" % number
            layout = _Layout(part, self._scratch, left_out)
            root.children[place] = layout.lay_out()
            files.update((place + b"/" + path, found) for path, found in layout.files.items())
        hot = dict.fromkeys(path for path in hot_paths if path in files)
        _add(packer, [files[path] for path in hot], on_progress)
        if hot:
            packer.end_blocks()  # otherwise a start would fetch cold files together with its last hot ones
        _add(packer, [found for path, found in files.items() if path not in hot], on_progress)
        return SourceContents(root, left_out=dict(left_out))


def _add(packer: Packer, files: Sequence[tuple[str, File]], on_progress: Progress) -> None:
    """Give data to the packer, in this order."""
    tasks: FileTasks | None = None
    below = ""
    for directory, file in files:
        if tasks is None or directory != below:
            if tasks is not None:
                tasks.end()
            tasks, below = FileTasks(directory, packer, on_progress), directory
        tasks.add(file)
    if tasks is not None:
        tasks.end()


class _Layout:
    """The inodes of a target's changes, without data."""

    def __init__(self, part: CapturedTarget, scratch: str, left_out: Counter[str]) -> None:
        self._part = part
        self._scratch = scratch
        self._left_out = left_out
        self._inodes: dict[bytes, Inode] = {}
        self._linked: dict[tuple[int, int], Inode] = {}  # by device and inode number, of files with several names
        self.files: dict[bytes, tuple[str, File]] = {}  # files with data, grouped by directory

    def lay_out(self) -> Inode:
        """Return the inode of the target, with all below it."""
        part = self._part
        with (
            source_errors(part.folder, b""),
            open_root(part.folder) as root_fd,
            LastDirectory(root_fd) as directories,
        ):
            root = self._directory(directories, b"")
            opaque = frozenset(part.difference.opaque)
            for path in sorted(part.difference.changed, key=_by_directory):
                if path in part.left_out or path in part.compiled:
                    continue
                if stat.S_ISDIR(part.after[path].mode):
                    self._directory(directories, path)
                else:
                    self._add(directories, path, self._look_at(directories, path))
            for path in opaque:
                self._directory(directories, path).is_opaque = True
            for path in part.difference.deleted:
                whiteout = Inode(stat.S_IFCHR)
                whiteout.rdev = WHITEOUT_RDEV
                self._add(directories, path, whiteout)
            self._add_compiled(directories)
        return root

    def _directory(self, directories: LastDirectory, path: bytes) -> Inode:
        """Return the inode of a directory; it may be only a parent of changes."""
        known = self._inodes.get(path)
        if known is not None:
            return known
        entry = self._part.after[path]
        inode = _inode(entry)
        with source_errors(self._part.folder, path):
            fd = directories.open(tuple(path.split(b"/")) if path else ())
            inode.xattrs = read_xattrs(b"/proc/self/fd/%d" % fd, is_link=True, left_out=self._left_out)
        self._inodes[path] = inode
        if path:
            self._add(directories, path, inode)
        return inode

    def _add(self, directories: LastDirectory, path: bytes, inode: Inode) -> None:
        above, _, name = path.rpartition(b"/")
        children = self._directory(directories, above).children
        assert children is not None
        children[name] = inode

    def _look_at(self, directories: LastDirectory, path: bytes) -> Inode:
        """Return the inode of a file or link, if it is unchanged."""
        part, entry = self._part, self._part.after[path]
        linked = self._linked.get((entry.dev, entry.ino)) if entry.nlink > 1 else None
        above, _, name = path.rpartition(b"/")
        names = tuple(above.split(b"/")) if above else ()
        with source_errors(part.folder, path):
            fd = directories.open(names)
            now = os.stat(name, dir_fd=fd, follow_symlinks=False)
            identity = identity_of(entry)
            if now.st_mode != entry.mode or (now.st_uid, now.st_gid) != (entry.uid, entry.gid):
                raise changed(part.folder, path)
            if not identity.is_of(now):
                raise changed(part.folder, path)
            if linked is not None:
                return linked
            inode = _inode(entry)
            inode.xattrs = read_xattrs(attribute_path(fd, name), is_link=False, left_out=self._left_out)
        self._take_rights(inode)
        if stat.S_ISREG(entry.mode) and entry.size:
            inode.size = entry.size
            piece_count(entry.size, os.path.join(part.folder, os.fsdecode(path)))
            is_sparse = now.st_blocks * 512 < entry.size
            self.files[path] = (part.folder, File(names, name, identity, inode, is_sparse))
        if entry.nlink > 1:
            self._linked[entry.dev, entry.ino] = inode
        return inode

    def _take_rights(self, inode: Inode) -> None:
        """Remove rights that no environment may contain, as readers would refuse the tree."""
        if inode.mode & _OTHERS_RIGHTS:
            inode.mode &= ~_OTHERS_RIGHTS
            self._left_out["setuid or setgid bits"] += 1
        kept = [pair for pair in inode.xattrs if pair[0] != CAPABILITY]
        if len(kept) < len(inode.xattrs):
            inode.xattrs = kept
            self._left_out["capabilities"] += 1

    def _add_compiled(self, directories: LastDirectory) -> None:
        part = self._part
        with source_errors(self._scratch, b""):
            for path, compiled in sorted(part.compiled.items()):
                source = part.after[compiled.source]
                inode = Inode(
                    stat.S_IFREG | ((source.mode | 0o200) & 0o666), source.uid, source.gid, source.mtime_ns
                )
                found = os.stat(os.path.join(self._scratch, os.fsdecode(compiled.name)))
                inode.size = found.st_size
                identity = Identity(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
                self.files[path] = (self._scratch, File((), compiled.name, identity, inode, False))
                self._cache_directory(directories, path.rpartition(b"/")[0])
                self._add(directories, path, inode)

    def _cache_directory(self, directories: LastDirectory, path: bytes) -> None:
        """Add a `__pycache__` that set-up has not made, with the attributes of its parent."""
        entry = self._part.after.get(path)
        if path in self._inodes or (entry is not None and stat.S_ISDIR(entry.mode)):
            return
        above = self._part.after[path.rpartition(b"/")[0]]
        self._inodes[path] = Inode(above.mode & ~0o7000, above.uid, above.gid, above.mtime_ns)
        self._add(directories, path, self._inodes[path])


def identity_of(entry: Entry) -> Identity:
    """Return the identity that a file must have to be unchanged."""
    return Identity(entry.dev, entry.ino, entry.size, entry.mtime_ns, entry.ctime_ns, entry.nlink)


def open_files(
    part_directory: str, after: Walk, paths: Sequence[bytes], max_bytes: int
) -> Iterator[tuple[bytes, bytes]]:
    """Yield the first bytes of files with their paths; changed files are skipped.

    Raises: StorageError.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with (
        source_errors(part_directory, b""),
        open_root(part_directory) as root_fd,
        LastDirectory(root_fd) as directories,
    ):
        for path in paths:
            above, _, name = path.rpartition(b"/")
            try:
                with source_errors(part_directory, path):
                    fd = os.open(name, flags, dir_fd=directories.open(tuple(above.split(b"/")) if above else ()))
                    try:
                        if not identity_of(after[path]).is_of(os.fstat(fd)):
                            continue
                        yield path, os.pread(fd, max_bytes, 0)
                    finally:
                        os.close(fd)
            except SourceChanged:
                continue


def _inode(entry: Entry) -> Inode:
    inode = Inode(entry.mode, entry.uid, entry.gid, entry.mtime_ns)
    inode.target = entry.target
    return inode


def _by_directory(path: bytes) -> tuple[bytes, bytes]:
    above, _, name = path.rpartition(b"/")
    return above, name
