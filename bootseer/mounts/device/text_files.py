"""A directory of small files, made of texts that change, served over /dev/fuse: for any user, and only to read.

A file has the text of the moment at which it is opened. One thread answers all requests, and waits for nothing but
`texts`, which must return at once. The kernel caches nothing. The connection ends by `kernel.abort`, by
unmounting its last copy, or with this process. Then readers that have a file open get errors, and none hangs.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Mapping

from bootseer.linux import mount as kernel
from bootseer.logs import get_logger
from bootseer.mounts.device import fuse_wire as wire
from bootseer.mounts.device.file import greet, open_fuse
from bootseer.mounts.device.server import GONE, REQUEST_BYTES, SharedDescriptor

_log = get_logger(__name__)

FSTYPE = "fuse.bootseer-status"
MAX_OPEN = 4096  # files at once
_MODES = 0o555, 0o444


class TextFiles:
    """The mount: `start`, then its files can be read until it is unmounted."""

    def __init__(self, directory: str, texts: Callable[[], Mapping[str, bytes]], *, mtime_ns: int = 0) -> None:
        """Args: directory: an empty one; texts: returns them by name, which are the same each time."""
        self.directory = directory
        self._texts, self._mtime_ns = texts, mtime_ns
        self._link: SharedDescriptor | None = None
        self._thread = threading.Thread(target=self._serve, name="text-files", daemon=True)
        self._known: Mapping[str, bytes] = {}
        self._shown = wire.Files((), 0, 0)
        self._open: dict[int, bytes] = {}  # by their numbers
        self._last = 0

    def start(self) -> None:
        """Mount and serve. Raises: ConfigError, StorageError."""
        self._refresh()
        link = self._link = SharedDescriptor(open_fuse())
        flags = kernel.RDONLY | kernel.NODEV | kernel.NOSUID | kernel.NOEXEC | kernel.NOATIME
        data = f"fd={link.fd},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()}"
        try:
            kernel.mount("bootseer", self.directory, FSTYPE, flags, f"{data},default_permissions,allow_other")
            try:
                greet(link.fd, self.directory)
                self._thread.start()
            except BaseException:
                kernel.unmount_lazily(self.directory, kernel.FORCE)
                raise
        except BaseException:
            link.let_go()
            raise

    def is_serving(self) -> bool:
        """Return whether its files can be read; False after an unmount of all its copies."""
        return self._thread.is_alive()

    # ---- internals -----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        assert self._link is not None
        fd, into = self._link.fd, [bytearray(REQUEST_BYTES)]
        try:
            while True:
                try:
                    got = os.readv(fd, into)
                except OSError as caught:
                    if caught.errno in (errno.ENOENT, errno.EAGAIN):
                        continue  # it was interrupted before it was received
                    return
                if not got:
                    return
                self._answer(fd, bytes(memoryview(into[0])[:got]))
        finally:
            self._link.let_go()

    def _answer(self, fd: int, request: bytes) -> None:
        if len(request) < wire.HEAD.size:
            return
        _, opcode, unique, node = wire.HEAD.unpack_from(request)
        if opcode in wire.UNANSWERED:
            return
        try:
            found = self._find(opcode, node, request)
        except Exception as caught:
            _log.info("the status folder: %r", caught)
            found = errno.EIO
        answer = wire.reply(unique, number=found) if isinstance(found, int) else wire.reply(unique, found)
        try:
            os.write(fd, answer)
        except OSError as caught:
            if caught.errno not in GONE:
                _log.info("the status folder: an answer is not taken: %s", caught.strerror)

    def _find(self, opcode: int, node: int, request: bytes) -> bytes | int:
        """Return the payload of the reply, or the number of an error."""
        body = request[wire.HEAD.size :]
        if opcode == wire.READ:
            return self._read(body)
        if opcode == wire.RELEASE and len(body) == wire.RELEASED.size:
            self._open.pop(wire.RELEASED.unpack(body)[0], None)
            return b""
        if opcode in (wire.LOOKUP, wire.GETATTR, wire.OPEN):
            self._refresh()
        found = self._shown.answer(request)
        if opcode == wire.OPEN and not isinstance(found, int) and node != wire.ROOT:
            return self._open_text(node)
        return found

    def _open_text(self, node: int) -> bytes | int:
        if len(self._open) >= MAX_OPEN:
            return errno.ENFILE
        self._last += 1
        self._open[self._last] = list(self._known.values())[node - wire.ROOT - 1]
        return wire.open_reply(self._last, wire.DIRECT_IO | wire.NO_FLUSH)

    def _read(self, body: bytes) -> bytes | int:
        if len(body) != wire.HANDLE_READ.size:
            return errno.EIO
        number, offset, size = wire.HANDLE_READ.unpack(body)
        text = self._open.get(number)
        return errno.EBADF if text is None else text[offset : offset + size]

    def _refresh(self) -> None:
        texts = self._texts()
        if texts is not self._known:
            self._known = texts
            files = [(name, len(text)) for name, text in texts.items()]
            self._shown = wire.Files(
                files, os.geteuid(), os.getegid(), modes=_MODES, mtime_ns=self._mtime_ns, valid_s=0
            )
