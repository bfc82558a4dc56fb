"""The leak check: what a test left behind, as a list of sentences.

Looked at are processes (by a mark in their environment, which survives double forks and sessions, and by
descent), threads, open descriptors, and files in /dev/shm. What is found is ended, so that one test's leftovers
do not disturb the next. The machine may be shared: a file in /dev/shm counts only if no living process uses it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid

from bench import shm
from tests.support import MARK, Process, descendants, marked_processes

GRACE_S = 5.0  # a test may return as soon as it has seen what it wanted; cleaning up gets this long


class LeakCheck:
    """Remembers what was there before; `leftovers` tells what came and stayed."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self._mark_before = os.environ.get(MARK)
        os.environ[MARK] = self.mark
        self._children = {process.pid for process in descendants(os.getpid())}
        self._threads = set(threading.enumerate())
        self._fds = _open_fds()
        self._shm = shm.files()

    def processes(self) -> list[Process]:
        """Processes of this test that are there now."""
        found = {process.pid: process for process in marked_processes(self.mark)}
        for process in descendants(os.getpid()):
            if process.pid not in self._children:
                found[process.pid] = process
        return list(found.values())

    def leftovers(self, grace_s: float = GRACE_S) -> list[str]:
        """What is still there after `grace_s`; ends the processes among it."""
        end_s = time.monotonic() + grace_s
        while (found := self._look()) and time.monotonic() < end_s:
            time.sleep(0.02)
        for process in self.processes() if found else ():
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        return found

    def close(self) -> None:
        if self._mark_before is None:
            os.environ.pop(MARK, None)
        else:
            os.environ[MARK] = self._mark_before

    def _look(self) -> list[str]:
        found = [f"process {p.pid} (parent {p.ppid}, state {p.state}): {p.command}" for p in self.processes()]
        for thread in set(threading.enumerate()) - self._threads:
            found.append(f"thread {thread.name}")
        for fd, target in _open_fds().items():
            if self._fds.get(fd) != target:
                found.append(f"descriptor {fd}: {target}")
        found += [f"file /dev/shm/{name}" for name in shm.left(self._shm)]
        return found


def _open_fds() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            pass  # the one that lists the directory
    return found
