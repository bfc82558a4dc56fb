"""Runs a command of the user beside the job, with all that it starts, for a bounded time; nothing here blocks.

It runs by /bin/sh below a supervisor of its own (bootseer/env/setup_supervisor.py), which ends what the command
leaves, also when bootrun is killed. Its output goes to a file, or into memory where there are no logs. The command
is no rank: what ends ranks does not touch it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import bootseer
from launcher.lines import JsonLines
from launcher.loop import Alarm, EventLoop

END_S = 8.0  # for the supervisor to end everything
MOST_TAIL_BYTES = 64 << 10
SUPERVISOR = os.path.join(os.path.dirname(bootseer.__file__), "env", "setup_supervisor.py")


class Outcome(NamedTuple):
    """What became of a command."""

    status: int | None  # exit status, or minus the signal's number; None: it has none, as it was ended
    is_late: bool
    seconds: float
    tail: str  # the end of what it wrote
    log_path: str  # "" for none

    @property
    def is_well(self) -> bool:
        return self.status == 0

    def describe(self, limit_s: float) -> str:
        """For people, in one line."""
        if self.is_well:
            return f"it ended well after {self.seconds:.1f} s"
        if self.is_late:
            how = f"it was ended, as it took longer than {limit_s:g} s"
        elif self.status is None:
            how = "it was ended"
        else:
            how = f"exit status {self.status}" if self.status > 0 else f"ended by signal {-self.status}"
        lines = [line.strip() for line in self.tail.splitlines() if line.strip()]
        said = "".join(each if each.isprintable() else " " for each in lines[-1][:300]) if lines else ""
        where = f" (all of it: {self.log_path})" if self.log_path else ""
        return f"{how} after {self.seconds:.1f} s{': ' + said if said else ''}{where if said else ''}"


class Hook:
    """A command that runs."""

    def __init__(
        self,
        loop: EventLoop,
        command: str,
        environ: Mapping[str, str],
        log_path: str,
        limit_s: float,
        then: Callable[[Outcome], object],
    ) -> None:
        """Starts it. Args: log_path: is added to; "" for none; then: called once, not after `close`.
        Raises: OSError."""
        cwd = os.getcwd()
        self._then = then
        self._log_path = log_path
        self._status: int | None = None
        self._is_late = False
        self._began_s = time.monotonic()
        self._alarm = Alarm(loop)
        self._lines = JsonLines(loop, self._take, self._on_end)
        if log_path:
            self._log_fd = os.open(log_path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        else:
            self._log_fd = os.memfd_create("bootrun-hook")
        try:
            self._from = os.fstat(self._log_fd).st_size
            self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                self._pid = self._spawn(theirs.fileno(), environ)
            except BaseException:
                self._connection.close()
                raise
            finally:
                theirs.close()
        except BaseException:
            os.close(self._log_fd)
            raise
        self._lines.open(self._connection)
        self._lines.ask("run", prefix=[], commands=[command], cwd=cwd, environ=dict(environ))
        self._alarm.set(limit_s, self._on_late)

    def _spawn(self, fd: int, environ: Mapping[str, str]) -> int:
        argv = [sys.executable, "-I", "-S", "-X", "utf8", SUPERVISOR]
        actions = [(os.POSIX_SPAWN_DUP2, each, to) for each, to in ((fd, 0), (self._log_fd, 1), (self._log_fd, 2))]
        return os.posix_spawn(argv[0], argv, environ, file_actions=actions, setsid=True)

    def end(self) -> None:
        """Ends it with all that it has started; `then` is called when nothing of it is left."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
        self._alarm.set(END_S, self._kill)

    def close(self) -> None:
        """Ends it, and waits for that."""
        if not self._pid:
            return
        self._lines.close()
        self._wait()
        self._drop()

    def _take(self, answer: dict[str, Any]) -> None:
        status = answer.get("status")
        if isinstance(status, int):
            self._status = status

    def _on_late(self) -> None:
        self._is_late = True
        self.end()

    def _kill(self) -> None:
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)  # its connection ends by that

    def _on_end(self, _why: str) -> None:
        """The supervisor is gone, or going: it holds the connection to its end."""
        self._wait()
        took_s = time.monotonic() - self._began_s
        tail = self._read_tail()
        self._drop()
        self._then(Outcome(self._status, self._is_late, took_s, tail, self._log_path))

    def _wait(self) -> None:
        self._alarm.cancel()
        give_up_s = time.monotonic() + END_S
        while not self._has_ended():
            if time.monotonic() > give_up_s:
                os.kill(self._pid, signal.SIGKILL)  # not reaped: its pid is no other's
            time.sleep(0.001)

    def _has_ended(self) -> bool:
        with suppress(ChildProcessError):  # reaped by the handler for orphans (first process of a container)
            return bool(os.waitpid(self._pid, os.WNOHANG)[0])
        return True

    def _read_tail(self) -> str:
        size = os.fstat(self._log_fd).st_size
        return os.pread(self._log_fd, MOST_TAIL_BYTES, max(self._from, size - MOST_TAIL_BYTES)).decode(
            errors="replace"
        )

    def _drop(self) -> None:
        self._pid = 0
        os.close(self._log_fd)
