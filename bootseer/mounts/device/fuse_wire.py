"""The protocol of /dev/fuse for a directory with a few read-only files: records, and the answers to all but reads.

In: requests as bytes of the kernel. Out: replies as bytes. Pure. Records are those of protocol 7.31, which later
kernels use if the handshake requests it.

Source: include/uapi/linux/fuse.h of Linux.
"""

from __future__ import annotations

import errno
import stat
import struct
from collections.abc import Sequence
from typing import NamedTuple

LOOKUP, FORGET, GETATTR, OPEN, READ, STATFS, RELEASE = 1, 2, 3, 14, 15, 17, 18
INIT, OPENDIR, READDIR, RELEASEDIR, INTERRUPT, DESTROY, NOTIFY_REPLY, BATCH_FORGET = 26, 27, 28, 29, 36, 38, 41, 42
UNANSWERED = frozenset({FORGET, BATCH_FORGET, INTERRUPT, NOTIFY_REPLY})

MAJOR, MINOR = 7, 31
ASYNC_READ, PARALLEL_DIRECTORIES, ASYNC_DIRECT, MAX_PAGES = 1 << 0, 1 << 18, 1 << 15, 1 << 22
NEEDED = ASYNC_READ | ASYNC_DIRECT | MAX_PAGES
# Of an open file: no pages are cached; cached pages stay valid; its close needs no request.
DIRECT_IO, KEEP_CACHE, NO_FLUSH = 1 << 0, 1 << 1, 1 << 5

ROOT = 1  # node number; those of files follow
MAX_READ_BYTES = 1 << 20  # the kernel's limit without special settings
MAX_BACKGROUND = 1024  # reads in flight; EROFS waits for none of its own
PAGE_BYTES = 4096
UNCHANGING_S = 1 << 30
WRITING = 3  # bits of O_WRONLY and O_RDWR

HEAD = struct.Struct("<IIQQ16x")  # length, opcode, request, node
READ_REQUEST = struct.Struct("<IIQQ24xQI20x")  # the same, offset, bytes
HANDLE_READ = struct.Struct("<QQI20x")  # of a read, behind HEAD: number of the open file, offset, bytes
RELEASED = struct.Struct("<Q16x")  # of the end of an open file, behind HEAD: its number
REPLY = struct.Struct("<IiQ")  # length, minus the error, request
_INIT_REQUEST = struct.Struct("<IIII")
_INIT = struct.Struct("<IIIIHHIIHHI28x")
_ATTRIBUTES = struct.Struct("<6Q10I")
_ATTRIBUTES_VALID = struct.Struct("<QII")
_ENTRY_VALID = struct.Struct("<QQQQII")
_OPEN = struct.Struct("<QII")
_OPEN_REQUEST = struct.Struct("<II")
_STATFS = struct.Struct("<5Q4I24x")
_DIRENT = struct.Struct("<QQII")
_READ_AT = struct.Struct("<8xQI20x")
_UNIQUE = struct.Struct("<Q")


class Greeting(NamedTuple):
    """The kernel's first request."""

    major: int
    minor: int
    read_ahead_bytes: int
    flags: int


def read_greeting(request: bytes | memoryview) -> tuple[int, Greeting] | None:
    """Return the number of the request and its contents; None when it is not FUSE_INIT."""
    if len(request) < HEAD.size + _INIT_REQUEST.size:
        return None
    length, opcode, unique, _ = HEAD.unpack_from(request)
    if opcode != INIT or length != len(request):
        return None
    return unique, Greeting(*_INIT_REQUEST.unpack_from(request, HEAD.size))


def why_refused(greeting: Greeting) -> str:
    """Return what this kernel lacks, "" if nothing."""
    if greeting.major != MAJOR or greeting.minor < MINOR:
        return f"FUSE {greeting.major}.{greeting.minor}, but {MAJOR}.{MINOR} is needed"
    if greeting.flags & NEEDED != NEEDED:
        return "no asynchronous direct reads of many pages"
    return ""


def greet(greeting: Greeting) -> bytes:
    """Return the answer. Without ASYNC_DIRECT a read that fails in the middle would end as a short one, which
    EROFS fills up with zeros."""
    flags = NEEDED | greeting.flags & PARALLEL_DIRECTORIES
    read_ahead_bytes = min(greeting.read_ahead_bytes, MAX_READ_BYTES)
    return _INIT.pack(
        MAJOR, MINOR, read_ahead_bytes, flags, MAX_BACKGROUND, MAX_BACKGROUND * 3 // 4, PAGE_BYTES, 1,
        MAX_READ_BYTES // PAGE_BYTES, 0, 0,
    )  # fmt: skip


def reply(unique: int, payload: bytes = b"", number: int = 0) -> bytes:
    """Return a reply to write; `number`: of an error."""
    return REPLY.pack(REPLY.size + len(payload), -number, unique) + payload


def interrupted(body: bytes | memoryview) -> int:
    """Return the request whose program got a signal; 0 for none."""
    return int(_UNIQUE.unpack_from(body)[0]) if len(body) >= _UNIQUE.size else 0


class Files:
    """A directory with files in it, as described to the kernel. Their nodes are ROOT + 1 and so on."""

    def __init__(
        self,
        files: Sequence[tuple[str, int]],
        uid: int,
        gid: int,
        *,
        modes: tuple[int, int] = (0o500, 0o400),
        mtime_ns: int = 0,
        valid_s: int = UNCHANGING_S,
    ) -> None:
        """Args: files: names and sizes (bytes); modes: of the directory and its files; mtime_ns: below 1 s."""
        self._valid_s = valid_s
        self._names = {name.encode(): node for node, (name, _) in enumerate(files, ROOT + 1)}
        self._blocks = sum(-(-size // PAGE_BYTES) for _, size in files)
        folder_mode, file_mode = stat.S_IFDIR | modes[0], stat.S_IFREG | modes[1]
        self._attributes = {ROOT: _attributes(ROOT, folder_mode, 0, uid, gid, mtime_ns)}
        for node, (_, size) in enumerate(files, ROOT + 1):
            self._attributes[node] = _attributes(node, file_mode, size, uid, gid, mtime_ns)

    def answer(self, request: bytes | memoryview) -> bytes | int:
        """Return the payload of the reply to any request but a read of a file, or the number of an error."""
        if len(request) < HEAD.size:
            return errno.EIO
        length, opcode, _, node = HEAD.unpack_from(request)
        if length != len(request):
            return errno.EIO
        body = bytes(request[HEAD.size :])
        if opcode == LOOKUP:
            return self._look_up(node, body)
        if opcode == GETATTR:
            known = self._attributes.get(node)
            return errno.ENOENT if known is None else _ATTRIBUTES_VALID.pack(self._valid_s, 0, 0) + known
        if opcode == STATFS:
            return _STATFS.pack(self._blocks, 0, 0, len(self._names), 0, PAGE_BYTES, 255, PAGE_BYTES, 0)
        if opcode in (OPEN, OPENDIR):
            return self._open(opcode, node, body)
        if opcode == READDIR:
            return self._list(node, body)
        if opcode in (RELEASE, RELEASEDIR, DESTROY):
            return b""
        # For FLUSH and ACCESS this means that the kernel need not send another.
        return errno.ENOSYS

    def _look_up(self, directory: int, body: bytes) -> bytes | int:
        node = self._names.get(body[:-1]) if directory == ROOT and body.endswith(b"\0") else None
        if node is None:
            return errno.ENOENT
        return _ENTRY_VALID.pack(node, 0, self._valid_s, self._valid_s, 0, 0) + self._attributes[node]

    def _open(self, opcode: int, node: int, body: bytes) -> bytes | int:
        if node not in self._attributes or len(body) < _OPEN_REQUEST.size:
            return errno.ENOENT
        if opcode == OPEN and _OPEN_REQUEST.unpack_from(body)[0] & WRITING:
            return errno.EROFS
        return _OPEN.pack(0, 0 if node == ROOT else KEEP_CACHE, 0)

    def _list(self, node: int, body: bytes) -> bytes | int:
        if node != ROOT or len(body) < _READ_AT.size:
            return errno.ENOTDIR
        offset, max_bytes = _READ_AT.unpack_from(body)
        names = [(b".", ROOT), (b"..", ROOT), *self._names.items()]
        listed = b""
        for place in range(offset, len(names)):
            name, number = names[place]
            kind = stat.S_IFDIR if number == ROOT else stat.S_IFREG
            record = _DIRENT.pack(number, place + 1, len(name), kind >> 12) + name
            record += bytes(-len(record) % 8)
            if len(listed) + len(record) > max_bytes:
                break
            listed += record
        return listed


def open_reply(number: int, flags: int) -> bytes:
    """Return the payload of the reply to a request for an open file."""
    return _OPEN.pack(number, flags, 0)


def _attributes(node: int, mode: int, size: int, uid: int, gid: int, mtime_ns: int) -> bytes:
    """Return the attributes of a node. Seconds of its times are 0, as none has one."""
    times = (0, 0, 0, 0, mtime_ns, 0)
    return _ATTRIBUTES.pack(node, size, -(-size // 512), *times, mode, 1, uid, gid, 0, PAGE_BYTES, 0)
