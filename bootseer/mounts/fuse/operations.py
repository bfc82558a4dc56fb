"""Operations of a read-only mount, answered from the tree and the reader.

Errors are OSError with the number that the program gets. A failure of a store is EIO, with one line in the log
that names the file and the cause. Nothing here depends on FUSE's C side.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import stat
import threading
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from bootseer.errors import BootseerError
from bootseer.logs import get_logger
from bootseer.mounts.fuse.names import Directory, File, Node, Stored, Tree, error, find_files
from bootseer.mounts.fuse.protocol import MountedFiles
from bootseer.mounts.fuse.reading import OpenFile, Reader
from bootseer.mounts.fuse.spool import SpoolFile

_log = get_logger(__name__)

BLOCK_BYTES = 4096
VERSION_ATTRIBUTE = "user.bootseer.version"

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def answered(func: F) -> F:
    """Turn every error into one that the kernel understands."""

    @functools.wraps(func)
    def call(self: Operations, *args: Any) -> Any:
        try:
            return func(self, *args)
        except InterruptedError as caught:
            raise error(errno.EIO) from caught  # the mount ends
        except OSError:
            raise
        except BootseerError as caught:
            _log.info("%s: %s", func.__name__, caught)
            raise error(errno.EIO) from caught
        except Exception as caught:
            _log.info("%s failed: %s", func.__name__, "".join(traceback.format_exception(caught)))
            raise error(errno.EIO) from caught

    return call  # type: ignore[return-value]


class Handle:
    """An open file."""

    def __init__(self, node: File, is_writer: bool, process: int) -> None:
        self.node = node
        self.is_writer = is_writer
        self.process = process  # that opened it, 0 if it is not visible
        self.is_closing = False
        self.reading: OpenFile | None = None
        self.lock = threading.Lock()


class Operations:
    """All operations of a read-only mount."""

    use_ns = True
    is_writable = False

    def __init__(self, tree: Tree, reader: Reader, lock: threading.RLock) -> None:
        self.on_init: Callable[[Any, Any], None] = lambda _conn, _config: None
        self.on_end: Callable[[], None] = lambda: None
        self.context_thread: Callable[[], int] = lambda: 0  # of the requesting program
        self._tree, self._reader, self._lock = tree, reader, lock
        self._owner = os.getuid(), os.getgid()
        self._handles: dict[int, Handle] = {}
        self._directories: dict[int, Directory] = {}
        self._next_handle = 0

    def init_with_config(self, conn: Any, config: Any) -> None:
        self.on_init(conn, config)

    def destroy(self, path: str) -> None:
        del path
        self.on_end()

    # ---- names ------------------------------------------------------------------------------------------------

    @answered
    def getattr(self, path: str | None, handle: int | None = None) -> dict[str, int]:
        with self._lock:
            node: Node = self._handles[handle or 0].node if path is None else self._find(path)
            can_write = 0o200 if self.is_writable else 0
            if isinstance(node, Directory):
                mode = stat.S_IFDIR | 0o555 | can_write
                size, links = 0, 2 + sum(isinstance(each, Directory) for each in node.children.values())
            else:
                assert isinstance(node, File)
                mode = stat.S_IFREG | 0o444 | can_write
                size, links = node.size, int(node.parent is not None)
            return {
                **dict.fromkeys(("st_atime", "st_mtime", "st_ctime"), node.mtime_ns),
                "st_mode": mode,
                "st_size": size,
                "st_blocks": -(-size // 512),
                "st_blksize": BLOCK_BYTES,
                "st_nlink": links,
                "st_uid": self._owner[0],
                "st_gid": self._owner[1],
            }

    @answered
    def opendir(self, path: str) -> int:
        with self._lock:
            return self._new_handle(self._directories, self._tree.find_directory(path))

    @answered
    def releasedir(self, path: str | None, handle: int) -> int:
        del path
        with self._lock:
            self._directories.pop(handle, None)
        return 0

    @answered
    def readdir(self, path: str | None, handle: int) -> list[Any]:
        del path
        with self._lock:
            names = sorted(self._directories[handle].children.items())
            is_folder = [(".", True), ("..", True), *((name, isinstance(node, Directory)) for name, node in names)]
        return [(name, {"st_mode": stat.S_IFDIR if each else stat.S_IFREG}, 0) for name, each in is_folder]

    @answered
    def statfs(self, path: str) -> dict[str, int]:
        del path
        with self._lock:
            files = list(self._tree.root.walk())
        used = sum(-(-file.size // BLOCK_BYTES) for file in files)
        free = self._free_bytes() // BLOCK_BYTES
        return {
            **dict.fromkeys(("f_bsize", "f_frsize"), BLOCK_BYTES),
            **dict.fromkeys(("f_bfree", "f_bavail"), free),
            "f_blocks": used + free,
            "f_files": len(files),
            "f_namemax": 255,
        }

    @answered
    def getxattr(self, path: str, name: str, position: int = 0) -> bytes:
        del position
        if name == VERSION_ATTRIBUTE:
            with self._lock:
                files = find_files(self._tree.find(path))
            if files is not None and files.version:
                return files.version.encode()
        raise error(errno.ENODATA)

    @answered
    def listxattr(self, path: str) -> list[str]:
        with self._lock:
            files = find_files(self._tree.find(path))
        return [VERSION_ATTRIBUTE] if files is not None and files.version else []

    # ---- open files -------------------------------------------------------------------------------------------

    @answered
    def open(self, path: str, flags: int) -> int:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise error(errno.EROFS)
        with self._lock:
            return self._new_handle(self._handles, Handle(self._tree.find_file(path), False, 0))

    def read(self, handle: int, offset: int, length: int, address: int) -> int:
        """Copy to `address`; return the number of bytes."""
        return int(self._read(handle, offset, length, address))

    @answered
    def _read(self, handle: int, offset: int, length: int, address: int) -> int:
        found = self._handles[handle]
        content = found.node.content
        if isinstance(content, SpoolFile):
            try:
                target = memoryview((ctypes.c_char * length).from_address(address)).cast("B")
                return content.read_into(target, offset)
            except ValueError:
                content = found.node.content  # it has become a version meanwhile
        if not isinstance(content, Stored):
            return 0
        with found.lock:
            if found.reading is None or found.reading.files is not content.files:
                if found.reading is not None:
                    self._reader.close(found.reading)
                found.reading = self._reader.open(content.files, content.path)
            reading = found.reading
        try:
            return self._reader.read(reading, offset, length, address)
        except BootseerError as caught:
            _log.info("%s: bytes %s to %s: %s", content.path, offset, offset + length, caught)
            raise error(errno.EIO) from caught

    @answered
    def release(self, path: str | None, handle: int) -> int:
        del path
        with self._lock:
            found = self._handles.pop(handle)
            self._released(found)
        if found.reading is not None:
            self._reader.close(found.reading)
        return 0

    # ---- internals, with the lock held -------------------------------------------------------------------------

    def _find(self, path: str) -> Node:
        return self._tree.find(path)

    def _free_bytes(self) -> int:
        return 0

    def _released(self, handle: Handle) -> None:
        """Handle the last close of a file."""

    def _new_handle(self, handles: dict[int, T], what: T) -> int:
        self._next_handle += 1
        handles[self._next_handle] = what
        return self._next_handle


def show(files: MountedFiles) -> Tree:
    tree = Tree()
    tree.add_all(files)
    return tree
