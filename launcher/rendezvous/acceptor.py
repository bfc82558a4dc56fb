"""The coordinator's listening sockets: accept in batches while there is room; free and retake the port.

In: a Listener and whether there is room for one more. Out: accepted sockets, by callback. Separate from the
coordinator, because a static job gives its port to rank 0 while ranks run, and takes it back.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable

from bootseer.linux import processes
from launcher.base.loop import Cancellable, EventLoop
from launcher.rendezvous.endpoint import Listener

# More than the nodes that connect between two iterations of the loop: connections that overflow the kernel's queue
# are retried only after a second.
_BATCH = 4096
MAX_FILES = 128 * 1024
_PAUSE_S = 0.05  # while there is no room
_RETAKE_S = 0.1
_RETAKE_REPORTED_S = 5.0


class Acceptor:
    """See the module's docstring; accepts from its creation on."""

    def __init__(
        self,
        loop: EventLoop,
        listener: Listener,
        has_room: Callable[[], bool],
        on_socket: Callable[[socket.socket], object],
        say: Callable[[str], object],
    ) -> None:
        self._loop = loop
        self._listener = listener
        self._has_room = has_room
        self._on_socket = on_socket
        self._say = say
        self._timer: Cancellable | None = None  # the end of a pause, or the next try to take the port
        self._watch()

    @property
    def port(self) -> int:
        return self._listener.port

    @property
    def is_listening(self) -> bool:
        """Whether the coordinator holds the port."""
        return bool(self._listener.sockets)

    def stop(self) -> None:
        """Free the port."""
        self._cancel_timer()
        self._unwatch()
        self._listener.close()

    def resume(self) -> None:
        """Take the port again, now or as soon as it is free."""
        if not self.is_listening and self._timer is None:
            self._retake(self._loop.time() + _RETAKE_REPORTED_S)

    def _retake(self, patience_s: float) -> None:
        self._timer = None
        try:
            self._listener.open()
        except OSError as error:
            # Processes left by rank 0 may hold it a moment longer.
            if self._loop.time() > patience_s:
                self._say(f"warning: port {self.port} is still taken ({error.strerror}): no node can join yet")
                patience_s = float("inf")
            self._timer = self._loop.call_later(_RETAKE_S, self._retake, patience_s)
            return
        self._watch()

    def _watch(self) -> None:
        self._timer = None
        for sock in self._listener.sockets:
            self._loop.add_reader(sock.fileno(), self._on_acceptable, sock)

    def _unwatch(self) -> None:
        for sock in self._listener.sockets:
            self._loop.remove_reader(sock.fileno())

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_acceptable(self, listening: socket.socket) -> None:
        for _ in range(_BATCH):
            if not self._has_room():
                self._pause()
                return
            try:
                sock, _ = listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._say(f"warning: cannot accept more connections: {error.strerror}")
                    self._pause()
                    return
                continue  # this connection has ended already
            sock.setblocking(False)
            self._on_socket(sock)

    def _pause(self) -> None:
        """Pause accepting; connections wait in the kernel's queue."""
        self._unwatch()
        self._cancel_timer()
        self._timer = self._loop.call_later(_PAUSE_S, self._watch)


def raise_file_limit() -> int:
    """Allow one descriptor for each node; ranks inherit the old limit, which the supervisor keeps."""
    return processes.allow_files(MAX_FILES)
