"""Runs a command of the user beside the job, with all that it starts, for a bounded time; nothing here blocks.

It runs by /bin/sh below a supervisor of its own (bootseer/env/setup_supervisor.py), which ends what the command
leaves, also when bootrun is killed. Its output goes to a file, or into memory where there are no logs; one that
writes too much there is ended. The command is no rank: what ends ranks does not touch it.
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

END_S = 8.0  # for the supervisor to end everything, and to go when it is killed
LOOK_S = 0.25  # at how much there is of the output
MOST_LOG_BYTES, MOST_MEMORY_BYTES = 1 << 30, 16 << 20
MOST_TAIL_BYTES = 64 << 10
SUPERVISOR = os.path.join(os.path.dirname(bootseer.__file__), "env", "setup_supervisor.py")


class Outcome(NamedTuple):
    """What became of a command."""

    status: int | None  # exit status, or minus the signal's number; None: it has none, as it was ended
    is_late: bool
    seconds: float
    tail: str  # the end of what it wrote
    log_path: str  # "" for none
    is_large: bool = False  # it was ended for that

    @property
    def is_well(self) -> bool:
        return self.status == 0

    def describe(self, limit_s: float) -> str:
        """For people, in one line."""
        if self.is_well:
            return f"it ended well after {self.seconds:.1f} s"
        if self.is_late:
            how = f"it was ended, as it took longer than {limit_s:g} s"
        elif self.is_large:
            most = MOST_LOG_BYTES if self.log_path else MOST_MEMORY_BYTES
            how = f"it was ended, as it wrote more than {most >> 20} MiB to its output"
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
        self._is_late = self._is_large = self._is_ending = False
        self._most_bytes = MOST_LOG_BYTES if log_path else MOST_MEMORY_BYTES
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
        return os.posix_spawn(argv[0], argv, environ, file_actions=actions, setsid=True)

    def end(self) -> None:
        """Ends it with all that it has started; `then` is called when nothing of it is left,
        or what is left does not die."""
        if self._is_ending:
            return
        self._is_ending = True
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
        self._alarm.set(END_S, self._kill)

    def close(self) -> None:
        """Ends it, and waits for that, at most twice END_S."""
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
        if os.fstat(self._log_fd).st_size - self._from <= self._most_bytes:
            self._look.set(LOOK_S, self._on_look)
        elif not self._is_ending:
            self._is_large = True
            self.end()

    def _kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)  # its connection ends by that
        self._alarm.set(END_S, self._give_up)

    def _give_up(self) -> None:
        """It waits in the kernel: nobody can end it."""
        self._lines.close()
        self._conclude()

    def _on_end(self, _why: str) -> None:
        """The supervisor is gone, or going: it holds the connection to its end."""
        self._wait()
        self._conclude()

    def _conclude(self) -> None:
        took_s = time.monotonic() - self._began_s
        tail = self._read_tail()
        self._drop()
        self._then(Outcome(self._status, self._is_late, took_s, tail, self._log_path, self._is_large))

    def _wait(self) -> None:
        """What does not even end when it is killed is left: it waits in the kernel."""
        self._alarm.cancel()
        for is_killed in (False, True):
            if is_killed:
                os.kill(self._pid, signal.SIGKILL)  # not reaped: its pid is no other's
            until_s = time.monotonic() + END_S
            while time.monotonic() < until_s:
                if self._has_ended():
                    return
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
        self._alarm.cancel()
        self._look.cancel()
        os.close(self._log_fd)
