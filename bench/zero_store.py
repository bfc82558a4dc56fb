"""A store that shows a folder by FUSE, each answer a fixed time late: `bench zero` starts jobs from it.

    python -m bench.zero_store SOURCE MOUNT_POINT LATENCY_MS VALID_S COUNTS_FILE

Read only. Requests wait beside each other, as in a store behind a network: what is late is the answer, not the
next one. The kernel may keep names, attributes and pages (VALID_S, FOPEN_KEEP_CACHE), as stores allow whose files
do not change under a job; all else is as libfuse has it by default. Prints one line when it can be used; when it
is unmounted it writes the number of requests of each kind. Root, as it mounts for all users.
"""

from __future__ import annotations

import errno
import heapq
import json
import os
import resource
import select
import stat
import struct
import sys
import time
from collections import Counter

from bootseer.linux import mount as kernel
from bootseer.mounts.device import fuse_wire as wire

READLINK, FLUSH, READDIRPLUS = 5, 25, 44
NAMES = {
    wire.LOOKUP: "lookup",
    wire.GETATTR: "getattr",
    wire.OPEN: "open",
    wire.READ: "read",
    wire.RELEASE: "release",
    wire.OPENDIR: "opendir",
    wire.READDIR: "readdir",
    READLINK: "readlink",
    READDIRPLUS: "readdirplus",
}
# As libfuse asks for them: reads beside each other, names with their attributes, links kept.
FLAGS = 1 << 0 | 1 << 13 | 1 << 14 | 1 << 18 | 1 << 23
BUFFER_BYTES = 256 << 10
MAX_WRITE_BYTES = 128 << 10
_INIT = struct.Struct("<IIIIHHIIHHI28x")
_ATTRIBUTES = struct.Struct("<6Q10I")
_ATTRIBUTES_VALID = struct.Struct("<QII")
_ENTRY = struct.Struct("<QQQQII")
_OPEN = struct.Struct("<QII")
_READ = struct.Struct("<QQI")
_DIRENT = struct.Struct("<QQII")
_STATFS = struct.Struct("<5Q4I24x")


class AnswerError(Exception):
    """An answer that is an error."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Directory:
    """What is shown: node numbers of paths below `source`, and the answers to requests."""

    def __init__(self, source: str, valid_s: float) -> None:
        self._paths: list[bytes] = [b"", os.fsencode(os.path.realpath(source))]
        self._nodes = {self._paths[1]: wire.ROOT}
        self._valid = int(valid_s), int(valid_s % 1 * 1e9)
        self._directories: dict[int, list[bytes]] = {}
        self.counts: Counter[str] = Counter()

    def answer(self, opcode: int, node: int, body: bytes) -> bytes:
        """The payload of a reply. Raises: AnswerError, OSError."""
        self.counts[NAMES.get(opcode, "other")] += 1
        path = self._paths[node]
        if opcode == wire.LOOKUP:
            return self._entry(os.path.join(path, body[:-1]))
        if opcode == wire.GETATTR:
            return _ATTRIBUTES_VALID.pack(*self._valid, 0) + _attributes(os.lstat(path))
        if opcode == READLINK:
            return os.readlink(path)
        if opcode == wire.OPEN:
            return _OPEN.pack(os.open(path, os.O_RDONLY | os.O_CLOEXEC), wire.KEEP_CACHE, 0)
        if opcode == wire.READ:
            handle, offset, size = _READ.unpack_from(body)
            return os.pread(handle, size, offset)
        if opcode == wire.RELEASE:
            os.close(_READ.unpack_from(body)[0])
            return b""
        if opcode == wire.OPENDIR:
            self._directories[node] = [b".", b"..", *os.listdir(path)]
            return _OPEN.pack(0, 0, 0)
        if opcode in (wire.READDIR, READDIRPLUS):
            return self._list(node, body, is_plus=opcode == READDIRPLUS)
        if opcode == wire.RELEASEDIR:
            return b""
        if opcode == wire.STATFS:
            return _STATFS.pack(1 << 20, 0, 0, 1 << 20, 0, wire.PAGE_BYTES, 255, wire.PAGE_BYTES, 0)
        raise AnswerError(errno.ENOSYS)  # of FLUSH and ACCESS: the kernel need not ask again

    def _entry(self, path: bytes) -> bytes:
        status = os.lstat(path)
        node = self._nodes.get(path)
        if node is None:
            node = self._nodes[path] = len(self._paths)
            self._paths.append(path)
        seconds, nanoseconds = self._valid
        return _ENTRY.pack(node, 0, seconds, seconds, nanoseconds, nanoseconds) + _attributes(status)

    def _list(self, node: int, body: bytes, *, is_plus: bool) -> bytes:
        _, offset, max_bytes = _READ.unpack_from(body)
        names = self._directories.get(node, [])
        listed = bytearray()
        for place in range(offset, len(names)):
            name = names[place]
            path = os.path.join(self._paths[node], name)
            status = os.lstat(path)
            record = _DIRENT.pack(status.st_ino, place + 1, len(name), stat.S_IFMT(status.st_mode) >> 12) + name
            record += bytes(-len(record) % 8)
            if is_plus:
                is_itself = name in (b".", b"..")
                record = (bytes(_ENTRY.size + _ATTRIBUTES.size) if is_itself else self._entry(path)) + record
            if len(listed) + len(record) > max_bytes:
                break
            listed += record
        return bytes(listed)


def _attributes(status: os.stat_result) -> bytes:
    times = (status.st_atime_ns, status.st_mtime_ns, status.st_ctime_ns)
    return _ATTRIBUTES.pack(
        *(status.st_ino, status.st_size, status.st_blocks),
        *(each // 10**9 for each in times),
        *(each % 10**9 for each in times),
        *(status.st_mode, status.st_nlink, status.st_uid, status.st_gid, 0, wire.PAGE_BYTES, 0),
    )


def greet(request: bytes) -> bytes:
    """The answer to the kernel's first request. Raises: AnswerError."""
    found = wire.read_greeting(request)
    if found is None:
        raise AnswerError(errno.EPROTO)
    unique, greeting = found
    payload = _INIT.pack(
        *(wire.MAJOR, wire.MINOR, greeting.read_ahead_bytes, greeting.flags & FLAGS, 0, 0, MAX_WRITE_BYTES, 1),
        *(0, 0, 0),
    )
    return wire.reply(unique, payload)


def serve(fd: int, directory: Directory, latency_s: float) -> None:
    """Answers until the kernel lets go."""
    late: list[tuple[float, int, bytes]] = []
    while True:
        wait_s = max(0.0, late[0][0] - time.monotonic()) if late else None
        if select.select([fd], [], [], wait_s)[0]:
            try:
                while True:
                    request = os.read(fd, BUFFER_BYTES)
                    _, opcode, unique, node = wire.HEAD.unpack_from(request)
                    if opcode in wire.UNANSWERED:
                        continue
                    try:
                        answer = wire.reply(unique, directory.answer(opcode, node, request[wire.HEAD.size :]))
                    except AnswerError as failed:
                        answer = wire.reply(unique, number=failed.number)
                    except OSError as error:
                        answer = wire.reply(unique, number=error.errno or errno.EIO)
                    heapq.heappush(late, (time.monotonic() + latency_s, unique, answer))
            except BlockingIOError:
                pass
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                if error.errno not in (errno.ENOENT, errno.EINTR):
                    raise
        now_s = time.monotonic()
        while late and late[0][0] <= now_s:
            try:
                os.write(fd, heapq.heappop(late)[2])
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENODEV):  # who asked no longer waits
                    raise


def main(source: str, target: str, latency_ms: str, valid_s: str, counts_file: str) -> None:
    """Mounts, serves, writes the counts."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    data = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
    kernel.mount("zero-store", target, "fuse.zero-store", kernel.RDONLY | kernel.NODEV | kernel.NOSUID, data)
    directory = Directory(source, float(valid_s))
    os.write(fd, greet(os.read(fd, BUFFER_BYTES)))
    os.set_blocking(fd, False)
    print("ready", flush=True)
    serve(fd, directory, float(latency_ms) / 1000)
    with open(counts_file, "w", encoding="ascii") as file:
        json.dump(directory.counts, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
