"""Unix sockets between processes of one user: who is at the other end, and listening on a selector's loop."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import struct
from collections.abc import Callable

WAITING = 256  # connections that nobody has accepted yet


def is_own(connection: socket.socket) -> bool:
    """Whether a process of this user is at the other end."""
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(uid == os.geteuid())


class Listener:
    """Calls `take` with each connection that a process of this user makes; others are closed."""

    def __init__(
        self, address: str, selector: selectors.BaseSelector, take: Callable[[socket.socket], object]
    ) -> None:
        self.address = address
        self._selector = selector
        self._take = take
        self._spare_fd = _open_spare()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.bind(address)
        self._socket.listen(WAITING)
        selector.register(self._socket.fileno(), selectors.EVENT_READ, self.accept)

    def accept(self) -> None:
        """The next one that waits, if it still does."""
        try:
            connection, _ = self._socket.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._turn_away()
            return
        try:
            if is_own(connection):
                self._take(connection)
                return
        except OSError:
            pass  # the selector has no room for it
        connection.close()

    def close(self) -> None:
        self._selector.unregister(self._socket.fileno())
        self.close_inherited()
        try:
            os.unlink(self.address)
        except OSError:
            pass  # somebody has cleaned up

    def close_inherited(self) -> None:
        """In a forked child: it is the parent's."""
        self._socket.close()
        os.close(self._spare_fd)

    def _turn_away(self) -> None:
        """No descriptor is left for who waits: it gets to know, and the loop is not woken for it for ever."""
        os.close(self._spare_fd)
        try:
            self._socket.accept()[0].close()
        except OSError:
            pass
        finally:
            self._spare_fd = _open_spare()


def _open_spare() -> int:
    return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
