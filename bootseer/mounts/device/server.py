"""Answers the kernel's requests over /dev/fuse for a device that is presented as a file.

A read is two system calls and the device's own copy: it allocates, locks and logs nothing. Bytes that the device
does not have yet are answered from its callback, while others are read.

Source: fs/fuse/dev.c of Linux.
"""

from __future__ import annotations

import errno
import mmap
import os
import select
import threading
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

from bootseer.logs import get_logger
from bootseer.mounts.device import fuse_wire as wire

_log = get_logger(__name__)

NAME, METADATA = "device", "metadata"
FILE = wire.ROOT + 1
REQUEST_BYTES = 64 << 10  # maximum that the kernel sends at once, as there are no writes
GONE = frozenset({errno.ENOENT, errno.ENODEV, errno.EPERM, errno.ECONNABORTED})  # the requester no longer waits

Done = Callable[["memoryview | bytes | None"], None]


class Device(Protocol):
    """Bytes that can be read by offset. All ranges lie in it. Called from several threads."""

    size: int  # bytes

    def try_read(self, offset: int, target: memoryview) -> bool:
        """Fill `target` without waiting; return False when bytes are missing."""

    def read_later(self, offset: int, length: int, done: Done) -> None:
        """Call `done` once, from any thread, within the device's own deadline: with all bytes, or None."""


class Statistics(NamedTuple):
    """Counts since the start."""

    requests: int  # reads of the device that were answered with data
    late: int  # of these, how many had to wait for the device
    bytes: int
    errors: int  # answers with an error that a program receives
    waiting: int  # reads that wait for the device now
    late_bytes: int = 0  # of `bytes`, those that had to wait


class SharedDescriptor:
    """A descriptor that its last user closes, so that a late answer is never written to another file."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._users = 1
        self._lock = threading.Lock()
        _open.add(fd)

    def hold(self) -> bool:
        """Add a user; return False when it is closed already."""
        with self._lock:
            if not self._users:
                return False
            self._users += 1
            return True

    def is_connected(self) -> bool:
        """Return whether the kernel is still connected; False after an unmount."""
        if not self.hold():
            return False
        try:
            looked = select.poll()
            looked.register(self.fd, 0)
            return not looked.poll(0)  # POLLERR from the moment at which the connection ends
        finally:
            self.let_go()

    def let_go(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            _open.discard(self.fd)
            os.close(self.fd)


class _Counts:
    """Counts of one thread, so that counting needs no lock."""

    def __init__(self) -> None:
        self.requests = self.bytes = self.errors = 0


class Server:
    """Answers requests from a descriptor."""

    def __init__(self, link: SharedDescriptor, device: Device, metadata: Device | None) -> None:
        """`metadata`: is served as a second file, if given; reads of it are not counted."""
        self._link = link
        self._device, self._metadata = device, metadata
        files = [(NAME, device.size)]
        if metadata is not None:
            files.append((METADATA, metadata.size))
        self._shown = wire.Files(files, os.geteuid(), os.getegid())
        self._lock = threading.Lock()
        self._waiting: set[int] = set()
        self._counts: list[_Counts] = []
        self._late = _Counts()

    def run(self) -> None:
        """Serve requests, in each of its threads, until the connection ends."""
        counts = _Counts()
        with self._lock:
            self._counts.append(counts)
        fd, total, try_read = self._link.fd, self._device.size, self._device.try_read
        request = bytearray(REQUEST_BYTES)
        into = [request]
        # The reply's head lies before a page, so that data begins with one.
        area = memoryview(mmap.mmap(-1, wire.PAGE_BYTES + wire.MAX_READ_BYTES))
        head, data = wire.PAGE_BYTES - wire.REPLY.size, wire.PAGE_BYTES
        readv, write, unpack, pack = os.readv, os.write, wire.READ_REQUEST.unpack_from, wire.REPLY.pack_into
        read, read_bytes, reply_bytes = wire.READ, wire.READ_REQUEST.size, wire.REPLY.size
        while True:
            try:
                got = readv(fd, into)
            except OSError as caught:
                if caught.errno in (errno.ENOENT, errno.EAGAIN):
                    continue  # it was interrupted before it was received
                return
            if not got:
                return
            length, opcode, unique, node, offset, size = unpack(request)
            if opcode != read or node != FILE or got != read_bytes or length != got or offset + size > total:
                self._answer(bytes(memoryview(request)[:got]), counts)
                continue
            end = data + size
            try:
                if not try_read(offset, area[data:end]):
                    self._answer_later(unique, offset, size)
                    continue
            except Exception as caught:
                _log.info("bytes %s to %s: %r", offset, offset + size, caught)
                self._fail(unique, errno.EIO, counts)
                continue
            pack(area, head, reply_bytes + size, 0, unique)
            try:
                write(fd, area[head:end])
            except OSError as caught:
                if caught.errno not in GONE:
                    self._fail(unique, errno.EIO, counts)
                continue
            counts.requests += 1
            counts.bytes += size

    def forget(self) -> None:
        """Drop all pending answers."""
        with self._lock:
            self._waiting.clear()

    def statistics(self) -> Statistics:
        with self._lock:
            every = [*self._counts, self._late]
            return Statistics(
                requests=sum(each.requests for each in every),
                late=self._late.requests,
                bytes=sum(each.bytes for each in every),
                errors=sum(each.errors for each in every),
                waiting=len(self._waiting),
                late_bytes=self._late.bytes,
            )

    # ---- internals -----------------------------------------------------------------------------------------

    def _answer(self, request: bytes, counts: _Counts) -> None:
        """Answer a request that is no ordinary read of the device."""
        if len(request) < wire.HEAD.size:
            counts.errors += 1
            return
        _, opcode, unique, _ = wire.HEAD.unpack_from(request)
        if opcode == wire.INTERRUPT:
            self._interrupt(wire.interrupted(request[wire.HEAD.size :]), counts)
        elif opcode == wire.READ:
            self._read_rarely(request, unique, counts)
        elif opcode not in wire.UNANSWERED:
            found = self._shown.answer(request)
            if isinstance(found, int):
                self._fail(unique, found, counts)
            else:
                self._write(wire.reply(unique, found))

    def _read_rarely(self, request: bytes, unique: int, counts: _Counts) -> None:
        """Answer a read of the metadata, or one past the end of the device."""
        if len(request) != wire.READ_REQUEST.size:
            self._fail(unique, errno.EIO, counts)
            return
        length, _, _, node, offset, size = wire.READ_REQUEST.unpack(request)
        if length != len(request) or size > wire.MAX_READ_BYTES:
            self._fail(unique, errno.EIO, counts)
        elif node == FILE + 1 and self._metadata is not None:
            self._read_metadata(self._metadata, unique, offset, size)
        elif node == FILE and offset >= self._device.size:
            self._write(wire.reply(unique))
        elif node == FILE:
            self._answer_later(unique, offset, self._device.size - offset)
        else:
            self._fail(unique, errno.EIO, counts)

    def _read_metadata(self, metadata: Device, unique: int, offset: int, size: int) -> None:
        target = bytearray(max(0, min(size, metadata.size - offset)))
        if metadata.try_read(offset, memoryview(target)):
            self._write(wire.reply(unique, bytes(target)))
        else:
            self._answer_later(unique, offset, len(target), metadata)

    def _interrupt(self, unique: int, counts: _Counts) -> None:
        """Answer a read whose program got a signal: the program cannot end before its read does."""
        with self._lock:
            is_waiting = unique in self._waiting
            self._waiting.discard(unique)
        if is_waiting:
            self._fail(unique, errno.EINTR, counts)

    def _answer_later(self, unique: int, offset: int, size: int, metadata: Device | None = None) -> None:
        counts = self._late if metadata is None else _Counts()
        with self._lock:
            self._waiting.add(unique)
        finish = partial(self._finish, counts, unique, offset, size)
        try:
            (metadata or self._device).read_later(offset, size, finish)
        except Exception as caught:
            _log.info("bytes %s to %s: %r", offset, offset + size, caught)
            finish(None)

    def _finish(
        self, counts: _Counts, unique: int, offset: int, size: int, data: memoryview | bytes | None
    ) -> None:
        """Send a late answer, from any thread."""
        with self._lock:
            if unique not in self._waiting:
                return  # it was interrupted, or the server has ended
            self._waiting.discard(unique)
        if data is not None and len(data) != size:
            # EROFS would fill up a short answer with zeros.
            _log.info("bytes %s to %s: the device gave %s bytes", offset, offset + size, len(data))
            data = None
        if not self._link.hold():
            return
        try:
            if data is None:
                self._write(wire.reply(unique, number=errno.EIO))
                is_sent = False
            else:
                is_sent = self._write(wire.REPLY.pack(wire.REPLY.size + size, 0, unique), data)
        finally:
            self._link.let_go()
        with self._lock:
            if is_sent:
                counts.requests += 1
                counts.bytes += size
            self._late.errors += data is None

    def _fail(self, unique: int, number: int, counts: _Counts) -> None:
        counts.errors += number not in (errno.ENOSYS, errno.ENOENT)
        self._write(wire.reply(unique, number=number))

    def _write(self, *parts: bytes | memoryview) -> bool:
        """Write an answer; return whether the kernel accepted it. A refused one is replaced by an error."""
        try:
            os.writev(self._link.fd, parts)
        except OSError as caught:
            if caught.errno not in GONE and len(parts) > 1:
                self._write(wire.reply(wire.REPLY.unpack(parts[0])[2], number=errno.EIO))
            return False
        return True


_open: set[int] = set()


def _close_in_child() -> None:
    for fd in _open:
        os.close(fd)
    _open.clear()


os.register_at_fork(after_in_child=_close_in_child)
