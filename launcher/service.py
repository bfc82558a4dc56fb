"""A helper process of bootrun's own, which is told things and answers, by lines.py over its standard streams.

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
from contextlib import suppress

from bootseer.light_typing import Any
from launcher.lines import JsonLines
from launcher.loop import EventLoop

END_S = 0.5  # it holds nothing that others wait for; one that is in the middle of something is told to end

_left: list[int] = []  # processes that go on without us
_abandoned: list[int] = []  # that have been killed, to be reaped later


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
        self._on_end = on_end
        self._lines = JsonLines(loop, on_answer, self._end)
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
        self._lines.open(ours)

    def ask(self, do: str, **fields: object) -> None:
        """Sends an order."""
        self._lines.ask(do, **fields)

    def close(self) -> None:
        """Ends it."""
        if not self._lines.is_open:
            return
        self._lines.close()
        self._wait()

    def kill(self) -> None:
        """Ends one that may hang."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)  # it was not waited for, so the pid is its own
        self.close()

    def abandon(self) -> None:
        """Ends one that the kernel may hold, and waits for nothing."""
        self._lines.close()
        _reap_abandoned()
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            _abandoned.append(self.pid)
            self.pid = 0

    def leave(self) -> None:
        """Closes this end and lets it go on: it ends by itself."""
        self._lines.close()
        if self.pid:
            _left.append(self.pid)

    def _wait(self) -> None:
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

    def _end(self, why: str) -> None:
        self._wait()
        self._on_end(why)


def _reap_abandoned() -> None:
    for pid in _abandoned[:]:
        try:
            if os.waitpid(pid, os.WNOHANG)[0]:
                _abandoned.remove(pid)
        except ChildProcessError:
            _abandoned.remove(pid)


def has_left() -> bool:
    """Whether there are any."""
    return bool(_left)


def wait_for_left() -> None:
    """Until those that were left have ended; the signals that end jobs end them.

    For the first process of a container: with it everything in the container ends.
    """

    def end(*_: object) -> None:
        for pid in _left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, end)
    while _left:
        with suppress(ChildProcessError):  # reaped by the handler for orphans
            os.waitpid(_left[-1], 0)
        _left.pop()
