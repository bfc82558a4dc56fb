"""Runs a command of the user and its children beside the job, for a limited time; nothing here blocks.

/bin/sh runs it below a separate supervisor (bootseer/env/service/supervisor.py), which ends processes that the
command leaves, also if bootrun is killed. Its output goes to a file, or to memory if there are no logs; a command
that writes too much is stopped. The command is not a rank: the stop of an attempt does not end it.
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
from launcher.base import children
from launcher.base.json_lines import JsonLines
from launcher.base.loop import Alarm, EventLoop

END_S = 8.0  # for the supervisor to end all processes, and to end itself after SIGKILL
LOOK_S = 0.25  # between two checks of the output's size
MAX_LOG_BYTES, MAX_MEMORY_BYTES = 1 << 30, 16 << 20
MAX_TAIL_BYTES = 64 << 10
SUPERVISOR = os.path.join(os.path.dirname(bootseer.__file__), "env", "service", "supervisor.py")


class CommandResult(NamedTuple):
    status: int | None  # exit status, or minus the signal's number; None if it was stopped
    is_late: bool
    seconds: float
    tail: str  # the end of its output
    log_path: str  # "" for none
    is_large: bool = False  # it was stopped because of its output

    @property
    def is_well(self) -> bool:
        return self.status == 0

    def describe(self, limit_s: float) -> str:
        if self.is_well:
            return f"it succeeded after {self.seconds:.1f} s"
        if self.is_late:
            how = f"it was stopped, as it took longer than {limit_s:g} s"
        elif self.is_large:
            most = MAX_LOG_BYTES if self.log_path else MAX_MEMORY_BYTES
            how = f"it was stopped, as it wrote more than {most >> 20} MiB to its output"
        elif self.status is None:
            how = "it was stopped"
        else:
            how = f"exit status {self.status}" if self.status > 0 else f"ended by signal {-self.status}"
        lines = [line.strip() for line in self.tail.splitlines() if line.strip()]
        said = "".join(each if each.isprintable() else " " for each in lines[-1][:300]) if lines else ""
        where = f" (full output: {self.log_path})" if self.log_path else ""
        return f"{how} after {self.seconds:.1f} s{': ' + said if said else ''}{where if said else ''}"


class UserCommand:
    def __init__(
        self,
        loop: EventLoop,
        command: str,
        environ: Mapping[str, str],
        log_path: str,
        limit_s: float,
        then: Callable[[CommandResult], object],
    ) -> None:
        """Start it. Args: log_path: the output is appended; "" for none; then: called once, not after `close`.
        Raises: OSError."""
        cwd = os.getcwd()
        self._then = then
        self._log_path = log_path
        self._status: int | None = None
        self._is_late = self._is_large = self._is_ending = False
        self._max_bytes = MAX_LOG_BYTES if log_path else MAX_MEMORY_BYTES
        self._began_s = time.monotonic()
        self._alarm, self._look = Alarm(loop), Alarm(loop)
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
        self._look.set(LOOK_S, self._on_look)

    def _spawn(self, fd: int, environ: Mapping[str, str]) -> int:
        argv = [sys.executable, "-I", "-S", "-X", "utf8", SUPERVISOR]
        actions = [(os.POSIX_SPAWN_DUP2, each, to) for each, to in ((fd, 0), (self._log_fd, 1), (self._log_fd, 2))]
        pid = os.posix_spawn(argv[0], argv, environ, file_actions=actions, setsid=True)
        children.add(pid)
        return pid

    def end(self) -> None:
        """End it with all processes that it has started; `then` is called when none is left, or the rest does not
        die."""
        if self._is_ending:
            return
        self._is_ending = True
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
        self._alarm.set(END_S, self._kill)

    def close(self) -> None:
        """End it, and wait for its end, at most twice END_S."""
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

    def _on_look(self) -> None:
        if os.fstat(self._log_fd).st_size - self._from <= self._max_bytes:
            self._look.set(LOOK_S, self._on_look)
        elif not self._is_ending:
            self._is_large = True
            self.end()

    def _kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)  # this closes its connection
        self._alarm.set(END_S, self._give_up)

    def _give_up(self) -> None:
        """Leave the supervisor, which waits in the kernel and cannot be killed."""
        self._lines.close()
        self._conclude()

    def _on_end(self, _why: str) -> None:
        """Wait for the supervisor, which ends: it keeps the connection open until its end."""
        self._wait()
        self._conclude()

    def _conclude(self) -> None:
        took_s = time.monotonic() - self._began_s
        tail = self._read_tail()
        self._drop()
        self._then(CommandResult(self._status, self._is_late, took_s, tail, self._log_path, self._is_large))

    def _wait(self) -> None:
        """Wait for the supervisor, then kill it; leave it if it waits in the kernel."""
        self._alarm.cancel()
        for is_killed in (False, True):
            if is_killed:
                os.kill(self._pid, signal.SIGKILL)  # not reaped, so the pid is its own
            until_s = time.monotonic() + END_S
            while time.monotonic() < until_s:
                if self._has_ended():
                    return
                time.sleep(0.001)

    def _has_ended(self) -> bool:
        return children.reap(self._pid) is not None

    def _read_tail(self) -> str:
        size = os.fstat(self._log_fd).st_size
        return os.pread(self._log_fd, MAX_TAIL_BYTES, max(self._from, size - MAX_TAIL_BYTES)).decode(
            errors="replace"
        )

    def _drop(self) -> None:
        self._pid = 0
        self._alarm.cancel()
        self._look.cancel()
        os.close(self._log_fd)
