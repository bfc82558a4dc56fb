"""A helper process of bootrun's own, which is told things and answers: JSON lines over its standard streams.

Unlike a service of the guard (guard_client.py) it is no process below the guard: what it starts can outlive the
job. It has a session of its own, so a terminal's signals do not reach it, and ends when this end is closed.
Nothing here blocks; `close` waits for a moment.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from launcher.loop import EventLoop

MOST_LINE_BYTES = 64 << 20  # an answer; they are small
END_S = 0.5  # it holds nothing that others wait for; one that is in the middle of something is told to end


class ServiceProcess:
    """See the module's docstring. `pid` is 0 once it is gone."""

    def __init__(
        self,
        loop: EventLoop,
        argv: list[str],
        environ: Mapping[str, str],
        on_answer: Callable[[dict[str, Any]], object],
        on_end: Callable[[str], object],
    ) -> None:
        """Starts it. Args: on_end: called once with the reason, not after `close`. Raises: OSError."""
        self._loop = loop
        self._on_answer = on_answer
        self._on_end = on_end
        self._incoming = bytearray()
        self._outgoing = bytearray()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            fd = theirs.fileno()
            actions = [(os.POSIX_SPAWN_DUP2, fd, 0), (os.POSIX_SPAWN_DUP2, fd, 1)]
            self.pid = os.posix_spawn(argv[0], argv, environ, file_actions=actions, setsid=True)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        self._connection: socket.socket | None = ours
        loop.add_reader(ours.fileno(), self._read)

    def ask(self, do: str, **fields: object) -> None:
        """Sends an order."""
        import json

        self._outgoing += json.dumps({"do": do, **fields}).encode("ascii") + b"\n"
        self._write()

    def close(self) -> None:
        """Ends it."""
        if self._connection is None:
            return
        connection, self._connection = self._connection, None
        self._loop.remove_reader(connection.fileno())
        self._loop.remove_writer(connection.fileno())
        connection.close()
        for signum in (0, signal.SIGTERM):
            if signum:
                os.kill(self.pid, signum)  # not reaped: its pid is no other's
            end_s = time.monotonic() + END_S
            while self._is_running():
                if time.monotonic() > end_s:
                    break
                time.sleep(0.001)
            else:
                return

    def _is_running(self) -> bool:
        try:
            if not self.pid or not os.waitpid(self.pid, os.WNOHANG)[0]:
                return bool(self.pid)
        except ChildProcessError:
            pass  # reaped by the handler for orphans (first process of a container)
        self.pid = 0
        return False

    def _read(self) -> None:
        assert self._connection is not None
        try:
            data = self._connection.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._incoming += data
        if not data or len(self._incoming) > MOST_LINE_BYTES:
            self._end("it has ended" if not data else "it said what could not be understood")
            return
        *lines, rest = self._incoming.split(b"\n")
        self._incoming = bytearray(rest)
        for line in lines:
            if self._connection is not None:
                self._take(bytes(line))

    def _take(self, line: bytes) -> None:
        import json

        try:
            answer = json.loads(line)
            if not isinstance(answer, dict):
                raise ValueError(answer)
        except ValueError:
            self._end("it said what could not be understood")
            return
        self._on_answer(answer)

    def _write(self) -> None:
        connection = self._connection
        if connection is None:
            return
        try:
            while self._outgoing:
                del self._outgoing[: connection.send(self._outgoing)]
        except BlockingIOError:
            self._loop.add_writer(connection.fileno(), self._write)
            return
        except OSError:
            self._outgoing.clear()  # `_read` sees the end as well
        self._loop.remove_writer(connection.fileno())

    def _end(self, why: str) -> None:
        self.close()
        self._on_end(why)
