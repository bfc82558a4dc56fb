"""A helper process of bootrun that gets requests and answers them, with json_lines.py over its standard streams.

Unlike a service of the supervisor (supervisor/client.py) it is not a child of the supervisor: its processes can
outlive the job. It has its own session, so a terminal's signals do not reach it. It ends when bootrun closes the
connection. Only `close` and `kill` block, for a moment.
"""

from __future__ import annotations

import os
import time

from bootseer.light_stdlib import signal, socket, suppress
from bootseer.light_typing import Any, Callable, Mapping
from launcher.base import children
from launcher.base.json_lines import JsonLines
from launcher.base.loop import EventLoop

END_S = 0.5  # no process waits for it; after this time it gets SIGTERM

_left: list[int] = []  # processes that continue without bootrun
_ending: list[_End] = []


class ServiceProcess:
    """A helper process of bootrun. `pid` is 0 once it has ended."""

    def __init__(
        self,
        loop: EventLoop,
        argv: list[str],
        environ: Mapping[str, str],
        on_answer: Callable[[dict[str, Any]], object],
        on_end: Callable[[str], object],
        check: Callable[[dict[str, Any]], object] = lambda _: None,
    ) -> None:
        """Start the process. Args: on_end: called once with the reason, not after `close`; check: raises
        InvalidMessageError for an answer that means the process has failed. Raises: OSError."""
        self._loop = loop
        self._on_end = on_end
        self._is_closed = False
        self._lines = JsonLines(loop, on_answer, self._end, check)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            fd = theirs.fileno()
            actions = [(os.POSIX_SPAWN_DUP2, fd, 0), (os.POSIX_SPAWN_DUP2, fd, 1)]
            self.pid = os.posix_spawn(argv[0], argv, environ, file_actions=actions, setsid=True)
            children.add(self.pid)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._lines.open(ours)

    def ask(self, do: str, **fields: object) -> None:
        """Send a request."""
        self._lines.ask(do, **fields)

    def close(self) -> None:
        self._is_closed = True
        if not self._lines.is_open:
            return
        self._lines.close()
        self._wait()

    def kill(self) -> None:
        """Kill a process that may hang, and wait for its end, at most twice END_S: a successor may need what it
        holds."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)  # not reaped: no other process has its pid
        self.close()

    def abandon(self) -> None:
        """Kill a process that may be stuck in the kernel, without waiting for it."""
        self._is_closed = True
        self._lines.close()
        children.reap_left()
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)  # not reaped: no other process has its pid
            children.leave(self.pid)
            self.pid = 0

    def leave(self) -> None:
        """Close the connection and let the process continue: it ends by itself."""
        self._is_closed = True
        self._lines.close()
        if self.pid:
            _left.append(self.pid)

    def _wait(self) -> None:
        for signum in (0, signal.SIGTERM):
            if signum:
                os.kill(self.pid, signum)  # not reaped: no other process has its pid
            end_s = time.monotonic() + END_S
            while self._is_running():
                if time.monotonic() > end_s:
                    break
                time.sleep(0.001)
            else:
                return
        children.leave(self.pid)  # it waits in the kernel
        self.pid = 0

    def _is_running(self) -> bool:
        if self.pid and children.reap(self.pid) is None:
            return True
        self.pid = 0
        return False

    def _end(self, why: str) -> None:
        """Report the end once the process is gone: its successor may need what it holds (locks, directories)."""

        def report() -> None:
            if not self._is_closed:
                self._on_end(why)

        try:
            if self._is_running():
                _End(self._loop, self.pid, report)
                self.pid = 0
                return
        except OSError:  # no descriptor is left
            self._wait()
        report()


class _End:
    """The end of a process that has closed its connection: by itself, else by SIGTERM, else by SIGKILL."""

    def __init__(self, loop: EventLoop, pid: int, then: Callable[[], object]) -> None:
        """Args: then: called when the process is gone. Raises: OSError."""
        self._loop = loop
        self._pid = pid
        self._then = then
        self._fd = os.pidfd_open(pid)  # not reaped: no other process has its pid
        self._timer = loop.call_later(END_S, self._terminate)
        loop.add_reader(self._fd, self._reap)
        _ending.append(self)

    def _terminate(self) -> None:
        self._timer = self._loop.call_later(END_S, self.kill)
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, signum: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, signum)

    def _reap(self) -> None:
        self._timer.cancel()
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        children.reap(self._pid, waits=True)
        _ending.remove(self)
        self._then()


def kill_ending_processes() -> None:
    """Kill processes that have not ended yet, without waiting for them; called at bootrun's end."""
    for each in _ending:
        each.kill()


def has_detached() -> bool:
    """Return whether any process was left."""
    return bool(_left)


def wait_for_detached() -> None:
    """Wait until the processes that were left have ended; the signals that end jobs end them.

    For the first process of a container: its end would end everything in the container.
    """

    def end(*_: object) -> None:
        for pid in _left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, end)
    while _left:
        children.reap(_left[-1], waits=True)
        _left.pop()
