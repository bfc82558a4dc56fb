"""A blocking connection over which two processes of one user exchange messages."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from bootseer.ipc.framing import InvalidMessageError, LineBuffer, decode, encode

MAX_MESSAGE_BYTES = 512 << 20  # manifests of many files are long
SEND_LIMIT_S = 30.0  # for an end that reads nothing
READ_BYTES = 1 << 20
MAX_DESCRIPTORS = 8  # in one receive
decode(encode({}))  # imports json now: a fork that has entered the root of an image must not


class Channel:
    """Sends and receives messages over a socket or two pipes. Any thread may send; one thread receives.

    A lost end, an invalid message and a send that takes longer than SEND_LIMIT_S end it: `receive` returns None.
    """

    def __init__(
        self,
        connection: socket.socket | None,
        read_fd: int = -1,
        write_fd: int = -1,
        *,
        max_bytes: int = MAX_MESSAGE_BYTES,
        takes_descriptors: bool = False,
    ) -> None:
        """Give a connection without a timeout SEND_LIMIT_S, which makes its descriptor one that does not block.

        Args: takes_descriptors: messages may come with descriptors; without it the kernel closes them.
        """
        self._connection = connection
        self._takes_descriptors = takes_descriptors
        self.fd = connection.fileno() if connection is not None else read_fd
        self._write_fd = connection.fileno() if connection is not None else write_fd
        self._buffer = LineBuffer(max_bytes)
        self._received: deque[dict[str, Any]] = deque()
        self._lock = threading.Lock()
        self._is_broken = False
        self.is_invalid = False  # the other end has sent an invalid message
        self.descriptors: list[int] = []  # received with messages, oldest first; the caller closes them
        if connection is not None and connection.gettimeout() is None:
            connection.settimeout(SEND_LIMIT_S)

    @classmethod
    def of_streams(cls, read_fd: int, write_fd: int, *, max_bytes: int = MAX_MESSAGE_BYTES) -> Channel:
        """Return a channel over two pipes."""
        return cls(None, read_fd, write_fd, max_bytes=max_bytes)

    @classmethod
    def of_standard_input(cls, *, max_bytes: int = MAX_MESSAGE_BYTES) -> Channel:
        """Return a channel over the socket that is standard input. What libraries print goes to stderr then."""
        connection = socket.socket(fileno=os.dup(0))
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        os.dup2(null, 0)
        os.dup2(2, 1)
        os.close(null)
        return cls(connection, max_bytes=max_bytes)

    @property
    def is_broken(self) -> bool:
        """Whether a send has failed, or an invalid message has arrived."""
        return self._is_broken

    def receive_ready(self) -> list[dict[str, Any]] | None:
        """Return the messages that have arrived; None at the end. Never blocks on a socket."""
        if not self._received and not self._fill():
            return None
        found = list(self._received)
        self._received.clear()
        return found

    def receive(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """Wait for the next message; None at the end. Raises: TimeoutError."""
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._received:
            if self._is_broken:
                return None
            if not wait_readable(self.fd, None if end_s is None else end_s - time.monotonic()):
                raise TimeoutError
            if not self._fill():
                return None
        return self._received.popleft()

    def send(self, message: object, descriptors: Sequence[int] = ()) -> None:
        """Send a message and wait until it is out. A message to a lost end is dropped; `receive` shows the end."""
        data = memoryview(encode(message))
        with self._lock:
            if self._is_broken:
                return
            try:
                if self._connection is not None:
                    if descriptors:
                        data = data[socket.send_fds(self._connection, [data], list(descriptors)) :]
                    self._connection.sendall(data)
                    return
                self._write(data)
            except OSError:
                self._break()

    def shutdown(self) -> None:
        """Tell the other end that no message follows."""
        if self._connection is not None:
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close both directions."""
        if self._connection is not None:
            self._connection.close()
        else:
            for fd in {self.fd, self._write_fd}:
                os.close(fd)

    def _fill(self) -> bool:
        """Read once; False at the end."""
        if self._is_broken:
            return False
        try:
            data = self._read()
            if not data:
                return False
            self._received += map(decode, self._buffer.feed(data))
            return True
        except BlockingIOError:
            return True
        except (OSError, InvalidMessageError) as error:
            self._is_broken, self.is_invalid = True, isinstance(error, InvalidMessageError)
            return False

    def _read(self) -> bytes:
        if self._connection is None or not self._takes_descriptors:
            return os.read(self.fd, READ_BYTES)
        if not wait_readable(self.fd, 0):  # recv_fds would wait for as long as a send may take
            raise BlockingIOError
        data, descriptors, _, _ = socket.recv_fds(self._connection, READ_BYTES, MAX_DESCRIPTORS)
        for fd in descriptors:
            os.set_inheritable(fd, False)
        self.descriptors += descriptors
        return data

    def _write(self, data: memoryview) -> None:
        """Write to a pipe, in parts that a writable pipe takes without blocking. Raises: TimeoutError, OSError."""
        end_s = time.monotonic() + SEND_LIMIT_S
        poll = select.poll()
        poll.register(self._write_fd, select.POLLOUT)
        while data:
            if not poll.poll(max(0.0, end_s - time.monotonic()) * 1000):
                raise TimeoutError
            data = data[os.write(self._write_fd, data[: select.PIPE_BUF]) :]

    def _break(self) -> None:
        """Half a message may be out: the other end could understand nothing after it."""
        self._is_broken = True
        if self._connection is not None:
            try:
                self._connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the other end has closed it


def wait_readable(fd: int, timeout_s: float | None) -> bool:
    """Wait until a descriptor can be read or has ended; return whether that is within `timeout_s`."""
    poll = select.poll()  # `select` takes no descriptor from 1024 on
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000))
