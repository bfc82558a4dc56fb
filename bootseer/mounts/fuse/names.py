"""The names under a mount: directories and files, and where each file's bytes are.

Nothing here locks; callers that change the tree hold the mount's lock.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from typing import NamedTuple

from bootseer.errors import IntegrityError
from bootseer.mounts.fuse.protocol import MountedFiles
from bootseer.mounts.fuse.spool import SpoolFile

MAX_DEPTH = 64  # of directories


class Stored(NamedTuple):
    """Bytes of a version."""

    files: MountedFiles
    path: str

    @property
    def size(self) -> int:
        return self.files.files[self.path].size


class Node:
    """A name in a directory; without `parent` once it is removed."""

    def __init__(self) -> None:
        self.name = ""
        self.parent: Directory | None = None
        self.mtime_ns = time.time_ns()

    @property
    def path(self) -> str:
        names = [self.name]
        above = self.parent
        while above is not None and above.parent is not None:
            names.append(above.name)
            above = above.parent
        return "/".join(reversed(names))

    @property
    def top(self) -> str:
        """Return the first name of its path."""
        return self.path.partition("/")[0]


class File(Node):
    """A file. `content`: None for a mark, an empty file with a meaning."""

    def __init__(self, content: Stored | SpoolFile | None) -> None:
        super().__init__()
        self.content = content
        self.writers = 0  # open for writing
        self.closing = 0  # of these, closed by their programs, which the kernel has not confirmed yet
        self.broken = ""  # why it is not complete
        self.parts: set[str] = set()  # the files in it, if it is a list of parts,
        self.parts_at = -1  # as of this change
        self.changed = 0  # number of its last change, of all changes under this mount; 0 for none

    @property
    def size(self) -> int:
        return 0 if self.content is None else self.content.size


class Directory(Node):
    def __init__(self) -> None:
        super().__init__()
        self.children: dict[str, Node] = {}

    def add(self, name: str, node: Node) -> None:
        node.name, node.parent = name, self
        self.children[name] = node
        self.mtime_ns = time.time_ns()

    def remove(self, name: str) -> Node:
        node = self.children.pop(name)
        node.parent = None
        self.mtime_ns = time.time_ns()
        return node

    def walk(self) -> Iterator[File]:
        """Yield all files below, including marks."""
        for node in list(self.children.values()):
            if isinstance(node, Directory):
                yield from node.walk()
            elif isinstance(node, File):
                yield node


class Tree:
    """Paths as the kernel gives them: with a `/` at the start."""

    def __init__(self) -> None:
        self.root = Directory()

    def add_all(self, files: MountedFiles) -> None:
        """Add all files of a version. Raises IntegrityError for invalid names."""
        for path, found in files.files.items():
            names = path.split("/")
            if len(names) > MAX_DEPTH or any(name in ("", ".", "..") or "\0" in name for name in names):
                raise IntegrityError(f"{path[:200]!r} cannot be the path of a file")
            directory = self.root
            for name in names[:-1]:
                below = directory.children.get(name)
                if below is None:
                    below = Directory()
                    below.mtime_ns = found.mtime_ns
                    directory.add(name, below)
                if not isinstance(below, Directory):
                    raise IntegrityError(f"{path[:200]!r} lies below a file")
                directory = below
            if names[-1] in directory.children:
                raise IntegrityError(f"{path[:200]!r} is listed twice")
            node = File(Stored(files, path))
            node.mtime_ns = found.mtime_ns
            directory.add(names[-1], node)
            directory.mtime_ns = max(found.mtime_ns, *(each.mtime_ns for each in directory.children.values()))

    def find(self, path: str) -> Node:
        """Return the node at a path. Raises OSError (ENOENT, ENOTDIR)."""
        node: Node = self.root
        for name in path.split("/"):
            if name:
                if not isinstance(node, Directory):
                    raise error(errno.ENOTDIR)
                below = node.children.get(name)
                if below is None:
                    raise error(errno.ENOENT)
                node = below
        return node

    def find_file(self, path: str) -> File:
        node = self.find(path)
        if not isinstance(node, File):
            raise error(errno.EISDIR)
        return node

    def find_directory(self, path: str) -> Directory:
        node = self.find(path)
        if not isinstance(node, Directory):
            raise error(errno.ENOTDIR)
        return node

    def split(self, path: str) -> tuple[Directory, str]:
        """Return the directory of an existing or new name, and the name."""
        above, _, name = path.rstrip("/").rpartition("/")
        return self.find_directory(above), name


def files_of(node: Node) -> list[File]:
    """Return a file itself, or all files of a directory."""
    if isinstance(node, Directory):
        return list(node.walk())
    assert isinstance(node, File)
    return [node]


def find_files(node: Node) -> MountedFiles | None:
    """Return the one version that has all bytes of a file or directory, None if there is none."""
    found = [file.content for file in files_of(node) if file.content is not None]
    stored = {id(each.files): each.files for each in found if isinstance(each, Stored)}
    is_one = len(stored) == 1 and not any(isinstance(each, SpoolFile) for each in found)
    return next(iter(stored.values())) if is_one else None


def error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
