"""Accept connections of this user's processes on a selector's loop."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Callable

from bootseer.ipc.unix_sockets import is_own

WAITING = 256  # connections that are not accepted yet
PAUSE_S = 0.01  # while the node has no descriptor


class Listener:
    """Calls `take` with each connection from a process of this user; closes others."""

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
        """Accept the next waiting connection, if it is still there."""
        try:
            connection, _ = self._socket.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._turn_away()
            return
        if self._spare_fd < 0:
            self._take_spare()
        try:
            if is_own(connection):
                self._take(connection)
                return
        except OSError:
            pass  # the selector cannot register it
        connection.close()

    def close(self) -> None:
        self._selector.unregister(self._socket.fileno())
        self._socket.close()
        self._close_spare()
        try:
            os.unlink(self.address)
        except OSError:
            pass  # it was removed already

    def _turn_away(self) -> None:
        """Close a connection for which no descriptor is left, so that it does not wake the loop for ever."""
        self._close_spare()
        try:
            self._socket.accept()[0].close()
        except OSError:
            pass  # the node has none either (ENFILE); the next wake-up tries again
        if not self._take_spare():
            time.sleep(PAUSE_S)  # otherwise the loop would turn without pause

    def _take_spare(self) -> bool:
        try:
            self._spare_fd = _open_spare()
        except OSError:
            return False
        return True

    def _close_spare(self) -> None:
        fd, self._spare_fd = self._spare_fd, -1
        if fd >= 0:
            os.close(fd)


def _open_spare() -> int:
    return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
