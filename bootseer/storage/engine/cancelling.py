"""Cancelling a blocking request from another thread, by its socket."""

from __future__ import annotations

import socket
import threading


class RequestCancelled(Exception):  # noqa: N818
    """The request was cancelled; ends its thread."""


class CancelHandle:
    """A handle that reaches the connection of a request from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Not the connection, which forgets its socket while a response is still read from it.
        self._socket: socket.socket | None = None
        self.is_cut = False
        self.held = 0  # sockets so far: whether a request may have been sent

    def hold(self, connected: socket.socket | None) -> None:
        """Register the socket of the request, or None at its end. Raises: RequestCancelled."""
        with self._lock:
            self._socket = connected
            self.held += connected is not None
            if self.is_cut and connected is not None:
                raise RequestCancelled

    def cut(self) -> None:
        """Shut the socket down, so that waiting reads end."""
        with self._lock:
            self.is_cut = True
            if self._socket is not None:
                try:
                    # Not SSLSocket's own method, which drops the encryption while the other thread reads.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
                except OSError:
                    pass  # not connected any more
