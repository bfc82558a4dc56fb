"""What the kernel asks of a mount, answered from the tree, the reader and the saves.

Errors are OSError with the number that the program gets; what goes wrong in a store is EIO, with one line in the
log that names the file and the cause. Nothing here knows FUSE's C side.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import stat
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from bootseer.errors import BootseerError
from bootseer.mounts.log import Log
from bootseer.mounts.processes import exists, process_of, why_dying
from bootseer.mounts.protocol import MountedFiles
from bootseer.mounts.reading import OpenFile, Reader
from bootseer.mounts.saving import Saves, find_files, is_commit
from bootseer.mounts.spool import Spool, SpoolFile
from bootseer.mounts.tree import File, Folder, Node, Stored, Tree, error

BLOCK_BYTES = 4096
VERSION_ATTRIBUTE = "user.bootseer.version"
COPY_BYTES = 4 << 20
HIDDEN_PREFIX = ".fuse_hidden"  # libfuse renames what is removed while it is open

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def answered(func: F) -> F:
    """Makes every error one that the kernel understands."""

    @functools.wraps(func)
    def call(self: Operations, *args: Any) -> Any:
        try:
            return func(self, *args)
        except InterruptedError as caught:
            raise error(errno.EIO) from caught  # the mount ends
        except OSError:
            raise
        except BootseerError as caught:
            self.log(f"{func.__name__}: {caught}")
            raise error(errno.EIO) from caught
        except Exception as caught:
            self.log(f"{func.__name__} failed: {''.join(traceback.format_exception(caught))}")
            raise error(errno.EIO) from caught

    return call  # type: ignore[return-value]


class Handle:
    """An open file."""

    def __init__(self, node: File, is_writer: bool, process: int) -> None:
        self.node = node
        self.is_writer = is_writer
        self.process = process  # that opened it, 0 if it cannot be seen
        self.is_closing = False
        self.reading: OpenFile | None = None
        self.lock = threading.Lock()


class Operations:
    """All operations of one mount. `saves` and `spool` are None for a mount that only reads."""

    use_ns = True

    def __init__(self, tree: Tree, reader: Reader, log: Log, lock: threading.RLock) -> None:
        self.log = log
        self.saves: Saves | None = None
        self.spool: Spool | None = None
        self.on_init: Callable[[Any, Any], None] = lambda _conn, _config: None
        self.on_end: Callable[[], None] = lambda: None
        self.context_thread: Callable[[], int] = lambda: 0  # of the program that asks
        self._tree, self._reader, self._lock = tree, reader, lock
        self._owner = os.getuid(), os.getgid()
        self._handles: dict[int, Handle] = {}
        self._folders: dict[int, Folder] = {}
        self._hidden: dict[str, File] = {}  # removed or replaced, and still open
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
            can_write = 0o200 if self.saves is not None else 0
            if isinstance(node, Folder):
                mode = stat.S_IFDIR | 0o555 | can_write
                size, links = 0, 2 + sum(isinstance(each, Folder) for each in node.children.values())
            else:
                assert isinstance(node, File)
                mode, size, links = (
                    stat.S_IFREG | 0o444 | can_write,
                    node.size,
                    1 if node.parent is not None else 0,
                )
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
            return self._new_handle(self._folders, self._tree.find_folder(path))

    @answered
    def releasedir(self, path: str | None, handle: int) -> int:
        del path
        with self._lock:
            self._folders.pop(handle, None)
        return 0

    @answered
    def readdir(self, path: str | None, handle: int) -> list[Any]:
        del path
        with self._lock:
            names = sorted(self._folders[handle].children.items())
            is_folder = [(".", True), ("..", True), *((name, isinstance(node, Folder)) for name, node in names)]
        return [(name, {"st_mode": stat.S_IFDIR if each else stat.S_IFREG}, 0) for name, each in is_folder]

    @answered
    def statfs(self, path: str) -> dict[str, int]:
        del path
        with self._lock:
            files = list(self._tree.root.walk())
        used = sum(-(-file.size // BLOCK_BYTES) for file in files)
        free = self.spool.free_bytes() // BLOCK_BYTES if self.spool is not None else 0
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
        is_writer = flags & os.O_ACCMODE != os.O_RDONLY
        if not is_writer:
            with self._lock:
                return self._add(self._tree.find_file(path), is_writer=False)
        saves = self._saves()
        with self._lock:
            saves.begin(_top(path))
            node = self._tree.find_file(path)
            is_sign = node.content is None
            if not is_sign:
                self._to_spool(node, 0 if flags & os.O_TRUNC else None)
                saves.note(node)
            handle = self._add(node, is_writer=not is_sign)
        if is_sign:
            self._commit(path)
        return handle

    @answered
    def create(self, path: str, mode: int, flags: int) -> int:
        del mode, flags
        saves = self._saves()
        assert self.spool is not None
        if is_commit(path):
            with self._lock:
                self._tree.split(path)  # its folder must be there
            self._commit(path)
        with self._lock:
            saves.begin(_top(path))
            folder, name = self._tree.split(path)
            if name in folder.children:
                raise error(errno.EEXIST)
            node = File(None if is_commit(path) else self.spool.create())
            folder.add(name, node)
            saves.note(node)
            return self._add(node, is_writer=node.content is not None)

    def read(self, handle: int, offset: int, length: int, address: int) -> int:
        """Copies to `address`; returns how much."""
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
                content = found.node.content  # has become a version meanwhile
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
            self.log(f"{content.path}: bytes {offset} to {offset + length}: {caught}")
            raise error(errno.EIO) from caught

    @answered
    def write(self, handle: int, offset: int, data: memoryview) -> int:
        found = self._handles[handle]
        node = found.node
        if node.content is None:
            return len(data)  # a mark has no content
        if not isinstance(node.content, SpoolFile):
            raise error(errno.EBADF)
        done = node.content.write(data, offset)
        with self._lock:
            self._set_closing(found, False)
            node.mtime_ns = time.time_ns()
            self._note(node)
        return done

    @answered
    def truncate(self, path: str | None, size: int, handle: int | None = None) -> int:
        saves = self._saves()
        with self._lock:
            node = self._tree.find_file(path) if path is not None else self._handles[handle or 0].node
            if node.content is not None:
                if node.parent is not None and not node.writers:
                    saves.begin(node.top)
                self._to_spool(node, size)
                node.mtime_ns = time.time_ns()
                self._note(node)
        return 0

    @answered
    def flush(self, path: str | None, handle: int) -> int:
        """A program closes its descriptor, or dies; other descriptors of the same open file may be left."""
        del path
        found = self._handles[handle]
        if found.is_writer:
            thread = self.context_thread()
            process = process_of(thread)
            if process == found.process or not exists(found.process):
                why = why_dying(thread)
                with self._lock:
                    found.node.broken = found.node.broken or why
                    self._set_closing(found, True)
        return 0

    @answered
    def release(self, path: str | None, handle: int) -> int:
        del path
        with self._lock:
            found = self._handles.pop(handle)
            node = found.node
            node.writers -= found.is_writer
            self._set_closing(found, False)
            if node.parent is None:
                self._close_removed(node)
            elif found.is_writer and not node.writers:
                self._saves().closed(node)
        if found.reading is not None:
            self._reader.close(found.reading)
        return 0

    @answered
    def fsync(self, path: str | None, only_data: int, handle: int) -> int:
        """Of a file at the top that is written: returns when it is a version."""
        del path, only_data
        if self.saves is not None:
            node = self._handles[handle].node
            with self._lock:
                name = node.name if self.saves.is_waiting(node) else ""
            if name:
                self.saves.commit([name], is_asked=False)
        return 0

    # ---- changes of names -------------------------------------------------------------------------------------

    @answered
    def mkdir(self, path: str, mode: int) -> int:
        del mode
        saves = self._saves()
        with self._lock:
            saves.begin(_top(path))
            folder, name = self._tree.split(path)
            if name in folder.children:
                raise error(errno.EEXIST)
            folder.add(name, Folder())
        return 0

    @answered
    def unlink(self, path: str) -> int:
        saves = self._saves()
        with self._lock:
            hidden = self._hidden.pop(path, None)
            if hidden is not None:
                self._close_removed(hidden)
                return 0
            saves.begin(_top(path))
            self._remove(self._tree.find_file(path))
            saves.removed(_top(path))
        return 0

    @answered
    def rmdir(self, path: str) -> int:
        saves = self._saves()
        with self._lock:
            saves.begin(_top(path))
            folder = self._tree.find_folder(path)
            if any(not isinstance(node, File) or node.content is not None for node in folder.children.values()):
                raise error(errno.ENOTEMPTY)
            if folder.parent is None:
                raise error(errno.EBUSY)
            self._remove(folder)
            saves.removed(_top(path))
        return 0

    @answered
    def rename(self, old: str, new: str, flags: int = 0) -> int:
        no_replace = 1
        saves = self._saves()
        with self._lock:
            if flags & ~no_replace:
                raise error(errno.EINVAL)
            for path in (old, new):
                saves.begin(_top(path))
            node = self._tree.find(old)
            folder, name = self._tree.split(new)
            if name.startswith(HIDDEN_PREFIX) and isinstance(node, File):
                self._remove(node)
                self._hidden[new] = node
                saves.removed(_top(old))
                return 0
            there = folder.children.get(name)
            if there is node:
                return 0
            self._check_rename(node, folder, there, bool(flags))
            if there is not None:
                self._remove(there)
            assert node.parent is not None
            node.parent.remove(node.name)
            folder.add(name, node)
            completed = saves.renamed(node, old)
        if completed:
            saves.commit([completed], is_asked=False)
        return 0

    def chmod(self, path: str | None, mode: int) -> int:
        """Modes and owners are not kept."""
        del path, mode
        return 0

    def chown(self, path: str | None, uid: int, gid: int) -> int:
        del path, uid, gid
        return 0

    @answered
    def utimens(self, path: str | None, times: tuple[int, int] | None = None) -> int:
        if path is not None:
            with self._lock:
                # Numbers this small are the kernel's signs for "now" and "leave it".
                is_given = times is not None and times[1] >= 2 * 10**9
                self._tree.find(path).mtime_ns = times[1] if times is not None and is_given else time.time_ns()
        return 0

    # ---- inner parts, with the lock held ----------------------------------------------------------------------

    def _saves(self) -> Saves:
        if self.saves is None:
            raise error(errno.EROFS)
        return self.saves

    def _find(self, path: str) -> Node:
        return self._hidden[path] if path in self._hidden else self._tree.find(path)

    def _set_closing(self, handle: Handle, is_closing: bool) -> None:
        handle.node.closing += is_closing - handle.is_closing
        handle.is_closing = is_closing

    def _note(self, node: File) -> None:
        if node.parent is not None:
            self._saves().note(node)

    def _commit(self, path: str) -> None:
        names = path.strip("/").split("/")
        self._saves().commit(None if len(names) == 1 else names[:1])

    def _add(self, node: File, *, is_writer: bool) -> int:
        process = 0
        if is_writer:
            node.writers += 1
            process = process_of(self.context_thread())
        return self._new_handle(self._handles, Handle(node, is_writer, process))

    def _new_handle(self, handles: dict[int, T], what: T) -> int:
        self._next_handle += 1
        handles[self._next_handle] = what
        return self._next_handle

    def _to_spool(self, node: File, size: int | None) -> None:
        """Makes a file's bytes ones that can be changed: all of them, or the first `size`, with zeros behind."""
        assert self.spool is not None
        content = node.content
        if size == 0:
            node.broken = ""  # it is written anew
        if isinstance(content, SpoolFile):
            if size is not None:
                content.truncate(size)
            return
        assert isinstance(content, Stored)
        spooled = self.spool.create()
        try:
            self._copy(content, spooled, content.size if size is None else min(size, content.size))
            if size is not None:
                spooled.truncate(size)
        except BaseException:
            spooled.close()
            raise
        node.content = spooled

    def _copy(self, content: Stored, spooled: SpoolFile, length: int) -> None:
        reading = self._reader.open(content.files, content.path)
        buffer = bytearray(min(length, COPY_BYTES))
        try:
            for at in range(0, length, COPY_BYTES):
                count = min(COPY_BYTES, length - at)
                self._reader.read(reading, at, count, ctypes.addressof(ctypes.c_char.from_buffer(buffer)))
                spooled.write(memoryview(buffer)[:count], at)
        finally:
            self._reader.close(reading)

    def _check_rename(self, node: Node, folder: Folder, there: Node | None, no_replace: bool) -> None:
        if node.parent is None:
            raise error(errno.EBUSY)
        if there is not None:
            if no_replace:
                raise error(errno.EEXIST)
            if isinstance(there, Folder) != isinstance(node, Folder):
                raise error(errno.EISDIR if isinstance(there, Folder) else errno.ENOTDIR)
            if isinstance(there, Folder) and there.children:
                raise error(errno.ENOTEMPTY)
        above: Folder | None = folder
        while above is not None:
            if above is node:
                raise error(errno.EINVAL)  # into itself
            above = above.parent

    def _remove(self, node: Node) -> None:
        """Takes a name away. Who has the file open goes on with it; its bytes go with the last one."""
        assert node.parent is not None
        node.parent.remove(node.name)
        if isinstance(node, File):
            self._close_removed(node)

    def _close_removed(self, node: File) -> None:
        if isinstance(node.content, SpoolFile) and all(each.node is not node for each in self._handles.values()):
            node.content.close()


def _top(path: str) -> str:
    return path.strip("/").partition("/")[0]


def show(files: MountedFiles) -> Tree:
    """A tree of all files of a version."""
    tree = Tree()
    tree.add_all(files)
    return tree
