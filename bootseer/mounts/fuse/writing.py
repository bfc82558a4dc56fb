"""Operations of a writable mount.

Written files are in the spool until they are part of a version; `PendingSaves` decides when that is.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time

from bootseer.mounts.fuse.names import Directory, File, Node, Stored, Tree, error
from bootseer.mounts.fuse.operations import Handle, Operations, answered
from bootseer.mounts.fuse.reading import Reader
from bootseer.mounts.fuse.saving import PendingSaves, is_commit
from bootseer.mounts.fuse.spool import Spool, SpoolFile

COPY_BYTES = 4 << 20
HIDDEN_PREFIX = ".fuse_hidden"  # libfuse renames files that are removed while open
NO_REPLACE = 1  # RENAME_NOREPLACE
_EXITING = 0x4  # PF_EXITING
_FLAGS, _EXIT_CODE = 6, 49  # fields of /proc/PID/stat after the state, which is field 0


class WritableOperations(Operations):
    is_writable = True

    def __init__(
        self, tree: Tree, reader: Reader, lock: threading.RLock, saves: PendingSaves, spool: Spool
    ) -> None:
        super().__init__(tree, reader, lock)
        self._saves, self._spool = saves, spool
        self._hidden: dict[str, File] = {}  # removed or replaced, and still open

    # ---- open files -------------------------------------------------------------------------------------------

    @answered
    def open(self, path: str, flags: int) -> int:
        is_writer = flags & os.O_ACCMODE != os.O_RDONLY
        if not is_writer:
            with self._lock:
                return self._add(self._tree.find_file(path), is_writer=False)
        with self._lock:
            self._saves.begin(_top(path))
            node = self._tree.find_file(path)
            is_sign = node.content is None
            if not is_sign:
                self._to_spool(node, 0 if flags & os.O_TRUNC else None)
                self._saves.note(node)
            handle = self._add(node, is_writer=not is_sign)
        if is_sign:
            self._commit(path)
        return handle

    @answered
    def create(self, path: str, mode: int, flags: int) -> int:
        del mode, flags
        if is_commit(path):
            with self._lock:
                self._tree.split(path)  # its directory must exist
            self._commit(path)
        with self._lock:
            self._saves.begin(_top(path))
            directory, name = self._tree.split(path)
            if name in directory.children:
                raise error(errno.EEXIST)
            node = File(None if is_commit(path) else self._spool.create())
            directory.add(name, node)
            self._saves.note(node)
            return self._add(node, is_writer=node.content is not None)

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
        with self._lock:
            node = self._tree.find_file(path) if path is not None else self._handles[handle or 0].node
            if node.content is not None:
                if node.parent is not None and not node.writers:
                    self._saves.begin(node.top)
                self._to_spool(node, size)
                node.mtime_ns = time.time_ns()
                self._note(node)
        return 0

    @answered
    def flush(self, path: str | None, handle: int) -> int:
        """Handle the close of a descriptor, or its program's death; others of the same open file may remain."""
        del path
        found = self._handles[handle]
        if found.is_writer:
            thread = self.context_thread()
            process = process_of(thread)
            if process == found.process or not exists(found.process):
                why = death_reason(thread)
                with self._lock:
                    found.node.broken = found.node.broken or why
                    self._set_closing(found, True)
        return 0

    @answered
    def fsync(self, path: str | None, only_data: int, handle: int) -> int:
        """Sync a file; one at the top that is being written is a version when this returns."""
        del path, only_data
        node = self._handles[handle].node
        with self._lock:
            name = node.name if self._saves.is_waiting(node) else ""
        if name:
            self._saves.commit([name], is_asked=False)
        return 0

    # ---- changes of names -------------------------------------------------------------------------------------

    @answered
    def mkdir(self, path: str, mode: int) -> int:
        del mode
        with self._lock:
            self._saves.begin(_top(path))
            directory, name = self._tree.split(path)
            if name in directory.children:
                raise error(errno.EEXIST)
            directory.add(name, Directory())
        return 0

    @answered
    def unlink(self, path: str) -> int:
        with self._lock:
            hidden = self._hidden.pop(path, None)
            if hidden is not None:
                self._close_removed(hidden)
                return 0
            self._saves.begin(_top(path))
            self._remove(self._tree.find_file(path))
            self._saves.removed(_top(path))
        return 0

    @answered
    def rmdir(self, path: str) -> int:
        with self._lock:
            self._saves.begin(_top(path))
            directory = self._tree.find_directory(path)
            if any(not isinstance(node, File) or node.content is not None for node in directory.children.values()):
                raise error(errno.ENOTEMPTY)
            if directory.parent is None:
                raise error(errno.EBUSY)
            self._remove(directory)
            self._saves.removed(_top(path))
        return 0

    @answered
    def rename(self, old: str, new: str, flags: int = 0) -> int:
        with self._lock:
            if flags & ~NO_REPLACE:
                raise error(errno.EINVAL)
            for path in (old, new):
                self._saves.begin(_top(path))
            node = self._tree.find(old)
            directory, name = self._tree.split(new)
            if name.startswith(HIDDEN_PREFIX) and isinstance(node, File):
                self._remove(node)
                self._hidden[new] = node
                self._saves.removed(_top(old))
                return 0
            there = directory.children.get(name)
            if there is node:
                return 0
            self._check_rename(node, directory, there, bool(flags))
            if there is not None:
                self._remove(there)
            assert node.parent is not None
            node.parent.remove(node.name)
            directory.add(name, node)
            completed = self._saves.renamed(node, old)
        if completed is not None:
            self._saves.commit([completed], is_asked=False)
        return 0

    def chmod(self, path: str | None, mode: int) -> int:
        """Do nothing: modes and owners are not stored."""
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

    # ---- internals, with the lock held -------------------------------------------------------------------------

    def _free_bytes(self) -> int:
        return self._spool.free_bytes()

    def _released(self, handle: Handle) -> None:
        node = handle.node
        node.writers -= handle.is_writer
        self._set_closing(handle, False)
        if node.parent is None:
            self._close_removed(node)
        elif handle.is_writer and not node.writers:
            self._saves.closed(node)

    def _find(self, path: str) -> Node:
        return self._hidden[path] if path in self._hidden else self._tree.find(path)

    def _set_closing(self, handle: Handle, is_closing: bool) -> None:
        handle.node.closing += is_closing - handle.is_closing
        handle.is_closing = is_closing

    def _note(self, node: File) -> None:
        if node.parent is not None:
            self._saves.note(node)

    def _commit(self, path: str) -> None:
        names = path.strip("/").split("/")
        self._saves.commit(None if len(names) == 1 else names[:1])

    def _add(self, node: File, *, is_writer: bool) -> int:
        process = 0
        if is_writer:
            node.writers += 1
            process = process_of(self.context_thread())
        return self._new_handle(self._handles, Handle(node, is_writer, process))

    def _to_spool(self, node: File, size: int | None) -> None:
        """Make a file's bytes changeable: all of them, or the first `size`, followed by zeros."""
        content = node.content
        if size == 0:
            node.broken = ""  # it is being rewritten
        if isinstance(content, SpoolFile):
            if size is not None:
                content.truncate(size)
            return
        assert isinstance(content, Stored)
        spooled = self._spool.create()
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

    def _check_rename(self, node: Node, directory: Directory, there: Node | None, no_replace: bool) -> None:
        if node.parent is None:
            raise error(errno.EBUSY)
        if there is not None:
            if no_replace:
                raise error(errno.EEXIST)
            if isinstance(there, Directory) != isinstance(node, Directory):
                raise error(errno.EISDIR if isinstance(there, Directory) else errno.ENOTDIR)
            if isinstance(there, Directory) and there.children:
                raise error(errno.ENOTEMPTY)
        above: Directory | None = directory
        while above is not None:
            if above is node:
                raise error(errno.EINVAL)  # into itself
            above = above.parent

    def _remove(self, node: Node) -> None:
        """Remove a name. Programs that have the file open keep it; its bytes go with the last close."""
        assert node.parent is not None
        node.parent.remove(node.name)
        if isinstance(node, File):
            self._close_removed(node)

    def _close_removed(self, node: File) -> None:
        if isinstance(node.content, SpoolFile) and all(each.node is not node for each in self._handles.values()):
            node.content.close()


def _top(path: str) -> str:
    return path.strip("/").partition("/")[0]


def process_of(thread_id: int) -> int:
    """Return the process of a thread; 0 if it is not visible."""
    try:
        with open(f"/proc/{thread_id}/status", "rb") as file:
            for line in file:
                if line.startswith(b"Tgid:"):
                    return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return 0


def exists(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def death_reason(thread_id: int) -> str:
    """Return why a thread that closes a file is dying, "" if it is not."""
    try:
        with open(f"/proc/{thread_id}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        flags, code = int(fields[_FLAGS]), int(fields[_EXIT_CODE])
    except (OSError, ValueError, IndexError):
        return "it was closed by a process that is not visible from here"
    if not flags & _EXITING or not code:
        return ""
    how = f"was killed by signal {code & 0x7F}" if code & 0x7F else f"ended with status {code >> 8}"
    return f"its writer, process {thread_id}, {how} before it closed the file"
