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

from tests.support import MARK, Process, descendants, marked_processes, processes

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
        self._shm = _shm_files()

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
        unused = _shm_files() - self._shm
        if unused:
            unused -= _shm_files_in_use()
        found += [f"file /dev/shm/{name}" for name in sorted(unused)]
        return found


def _open_fds() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            pass  # the one that lists the directory
    return found


def _shm_files() -> set[str]:
    try:
        with os.scandir("/dev/shm") as entries:
            return {entry.name for entry in entries if entry.stat(follow_symlinks=False).st_uid == os.getuid()}
    except OSError:
        return set()


def _shm_files_in_use() -> set[str]:
    used: set[str] = set()
    for process in processes():
        paths = _links(f"/proc/{process.pid}/fd") + _mapped(process.pid)
        used |= {path.split("/")[3] for path in paths if path.startswith("/dev/shm/")}
    return used


def _links(directory: str) -> list[str]:
    found = []
    try:
        for name in os.listdir(directory):
            try:
                found.append(os.readlink(f"{directory}/{name}"))
            except OSError:
                pass  # closed meanwhile, such as the one that lists the directory
    except OSError:
        pass  # the process has ended, or is another user's
    return found


def _mapped(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            return [line.split(maxsplit=5)[5].strip() for line in file if "/dev/shm/" in line]
    except OSError:
        return []
