"""Collector of the stacks of a rank's child processes, when the rank waits for them: workers of a DataLoader.

In: a rank whose stacks are known. Out: its children (stacks.py), with Python stacks where that is safe. A child
that was forked, and has not exec'd, has the rank's handler, and its descriptor of the rank's file. It gets the
signal on the same conditions as the rank (stack_collector.py), one child at a time, as all write into one file.
Children younger than MIN_AGE_S get none: they may be about to exec. Of all others /proc shows name and state.
"""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress

from bootseer.linux.processes import read_process
from launcher.monitor.samples.processes import is_same_file, read_signals, read_wait
from launcher.monitor.samples.stacks import MAX_CHILDREN, ChildProcess, find_main, parse_stacks
from launcher.ranks.stats_page import StatsPage

MIN_AGE_S = 2.0
CHILD_S, CHILDREN_S = 3.0, 4.0  # for one child to answer, and for all of a rank
MAX_THREADS = 1024
# Waits of programs in the kernel. In others the child may be within execve, after which the signal would end it.
_WAITS = re.compile(
    r"(?:futex_|poll_schedule|do_poll|do_select|ep_poll|pipe_read|anon_pipe_read|unix_stream|sk_wait|wait_woken"
    r"|hrtimer_nanosleep|do_nanosleep|do_wait|do_sigtimedwait|sigsuspend|inet_csk_accept)"
)
MAX_LISTED = 256
MAX_READ_BYTES = 256 << 10
ANSWERING = ("S", "R")  # states in which a process runs a handler at once
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


class ChildStacks:
    """One query; call `look` until it returns the children. `fd` stays the caller's."""

    def __init__(self, pid: int, page: StatsPage | None, fd: int, now_s: float) -> None:
        """Args: page: of the rank, None: no child gets a signal."""
        self._pid, self._page, self._fd = pid, page, fd
        self._until_s = now_s + CHILDREN_S
        self._left = sorted(_list_children(pid)[:MAX_LISTED])[:MAX_CHILDREN]
        self._found: list[ChildProcess] = []
        self._asked: ChildProcess | None = None
        self._asked_until_s = 0.0
        self._begin = self._size = 0  # of the file
        self.is_unanswered = False  # a child may still write: send no more signals for now

    def look(self, now_s: float) -> tuple[ChildProcess, ...] | None:
        """Take answers, and go on with the next child. Return all children when there is no more to do."""
        if self._asked is not None:
            size = os.fstat(self._fd).st_size
            is_whole, self._size = self._begin < size == self._size, size
            if not is_whole and now_s < self._asked_until_s:
                return None
            self.is_unanswered = not is_whole
            self._found.append(self._read(self._asked) if is_whole else self._asked)
            self._asked = None
        while self._left:
            child = self._describe(self._left.pop(0))
            if child is None:
                continue
            if not self.is_unanswered and now_s < self._until_s and self._ask(child):
                self._asked, self._asked_until_s = child, now_s + CHILD_S
                return None
            self._found.append(child)
        return tuple(self._found)

    def _describe(self, pid: int) -> ChildProcess | None:
        seen = read_process(pid)
        if seen is None or seen.parent != self._pid or seen.state in ("Z", "X"):
            return None
        return ChildProcess(pid, seen.name, seen.state, read_wait(pid))

    def _ask(self, child: ChildProcess) -> bool:
        page = self._page
        if page is None or not page.stacks_signal or child.state not in ANSWERING:
            return False
        if child.state != "R" and not _WAITS.match(child.wait):
            return False
        try:
            pidfd = os.pidfd_open(child.pid)  # from here on the signal reaches no other process
        except OSError:
            return False
        try:
            seen, signals, bit = read_process(child.pid), read_signals(child.pid), 1 << (page.stacks_signal - 1)
            if seen is None or signals is None or seen.parent != self._pid:
                return False
            age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - seen.start_ticks / _TICKS_A_SECOND
            if age_s < MIN_AGE_S or not is_same_file(child.pid, page.stacks_fd, self._fd):
                return False
            if not signals.caught & bit or (signals.blocked | signals.pending) & bit:
                return False
            self._begin = self._size = os.fstat(self._fd).st_size
            signal.pidfd_send_signal(pidfd, page.stacks_signal)
            return True
        except OSError:
            return False
        finally:
            os.close(pidfd)

    def _read(self, child: ChildProcess) -> ChildProcess:
        assert self._page is not None
        text = os.pread(self._fd, min(self._size - self._begin, MAX_READ_BYTES), self._begin)
        threads = parse_stacks(text.decode("ascii", "replace"))
        return child._replace(main=find_main(threads, self._page.main_thread))


def _list_children(pid: int) -> list[int]:
    """Return the children that any thread of a process has started."""
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    for thread in threads[:MAX_THREADS]:
        with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb", buffering=0) as file:
            found += map(int, file.read().split())
    return found
