"""Samples of this node's ranks from outside: their stats pages and /proc. No rank has to do anything.

In: the ranks of one attempt. Out: RankFacts at each sample. Descriptors stay open between samples. That is
cheaper, and the descriptor of an ended process never shows another process with its number. Sizes of output are
positions of the rank's own descriptors, not read from log directories, whose file system may be what hangs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Protocol

from launcher.base.facts import RankFacts
from launcher.monitor.samples.processes import MAX_BYTES, Stat, parse_stat, parse_wait, read, read_stat
from launcher.ranks.stats_page import read_page

MAX_DESCENDANTS = 64  # of a rank, that are sampled
# The supervisor's time of a rank's start may be a little later than the start; the kernel counts in ticks.
START_ERROR_S = 1.0
_OUTPUTS = ("fdinfo/1", "fdinfo/2")


class Logs(Protocol):
    """The destinations of a rank's output; None for the console."""

    @property
    def stdout_path(self) -> str | None: ...
    @property
    def stderr_path(self) -> str | None: ...


class SampledRank(Protocol):
    @property
    def rank(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def started_ns(self) -> int: ...
    @property
    def page_file(self) -> str: ...
    @property
    def logs(self) -> Logs: ...


class Sampler:
    """See the module's docstring; `close` releases its descriptors."""

    def __init__(self, ranks: Iterable[SampledRank]) -> None:
        """Args: ranks: of one attempt; they need not have started."""
        self._seen = [_RankSampler(rank) for rank in ranks]

    def look(self, now_s: float) -> list[RankFacts]:
        """Sample all ranks, in their order. Args: now_s: of the monotonic clock."""
        return [seen.look(now_s) for seen in self._seen]

    @property
    def numbers_fall(self) -> bool:
        """Whether a rank's heartbeat numbers were seen to decrease: then they do not show its progress."""
        return any(seen.falls for seen in self._seen)

    def close(self) -> None:
        for seen in self._seen:
            seen.close()


class _RankSampler:
    """One rank, and its last observed values."""

    def __init__(self, rank: SampledRank) -> None:
        self._rank = rank
        self._page_fd = _open(rank.page_file) if rank.page_file else -1
        self._fds: dict[str, int] = {}  # of /proc/PID
        self._pid = 0  # 0: not found yet; -1: it has ended
        self._is_inner_known = False  # whether another process than `pid` is the interpreter
        self._steps, self._step_at_s = -1, -1.0
        self._takes_s = self._min_s = 0.0
        self._number: int | None = None  # of the last heartbeat
        self.falls = False  # its numbers do not only increase
        self._output_bytes = [-1, -1]
        self._cpu_ticks = 0  # grows only
        self._last_ticks = 0
        self._io_bytes = -1

    def look(self, now_s: float) -> RankFacts:
        page_pid = self._read_page()
        if self._pid == 0 and self._rank.pid:
            self._begin(self._rank.pid)
        state = wait = ""
        if self._pid > 0 and (stat := self._read_stat()) is not None:
            if page_pid not in (0, self._pid) and not self._is_inner_known:
                stat = self._find_inner(page_pid, stat)
            state = stat.state
            wait = parse_wait(self._read("wchan"))
            self._count_cpu(stat)
            self._read_io()
            self._read_outputs()
        elif self._pid < 0:
            state = "X"  # the kernel's state of a dead process
        return RankFacts(
            rank=self._rank.rank,
            at_s=now_s,
            steps=self._steps,
            step_at_s=self._step_at_s,
            output_bytes=_sum(self._output_bytes),
            cpu_s=self._cpu_ticks / _TICKS if self._pid else -1.0,
            io_bytes=self._io_bytes,
            state=state,
            wait=wait,
            step_takes_s=self._takes_s,
            step_least_s=self._min_s,
        )

    def close(self) -> None:
        self._close_process()
        if self._page_fd >= 0:
            os.close(self._page_fd)
            self._page_fd = -1

    # ---- the process -----------------------------------------------------------------------------------------

    def _begin(self, pid: int) -> None:
        stat = read_stat(pid)
        began_s = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic() + self._rank.started_ns / 1e9
        if stat is None or stat.start_ticks / _TICKS > began_s + START_ERROR_S:
            self._pid = -1  # it has ended; another process may have its number
            return
        self._pid = pid

    def _read_stat(self) -> Stat | None:
        stat = parse_stat(self._read("stat"))
        if stat is None:
            self._close_process()
            self._pid = -1
        return stat

    def _find_inner(self, pid: int, stat: Stat) -> Stat:
        """Switch to the interpreter if PYTHON_EXEC names a program that starts it as its child."""
        self._is_inner_known = True
        if pid not in {each for each, _ in _list_descendants(self._pid, self._read("children"))}:
            return stat
        self._close_process()
        self._pid = pid
        return self._read_stat() or stat

    def _read(self, name: str) -> bytes:
        """Read a file of /proc/PID; its descriptor refers to this process or to none."""
        fd = self._fds.get(name, -1)
        if fd < 0:
            path = f"task/{self._pid}/children" if name == "children" else name
            fd = self._fds[name] = _open(f"/proc/{self._pid}/{path}")
            if fd < 0:
                return b""
        try:
            return os.pread(fd, MAX_BYTES, 0)
        except OSError:
            return b""

    def _close_process(self) -> None:
        for fd in self._fds.values():
            if fd >= 0:
                os.close(fd)
        self._fds.clear()

    # ---- its figures -----------------------------------------------------------------------------------------

    def _read_page(self) -> int:
        """Read the stats page. Returns: pid of the process that counts; 0 for none."""
        page = read_page(self._page_fd) if self._page_fd >= 0 else None
        if page is None:
            return 0
        if page.counts:
            self._steps = page.steps
        if page.step_ns:
            self._step_at_s = page.step_ns / 1e9
            self._takes_s, self._min_s = page.takes_s, page.min_s
        if page.step is not None:
            self.falls |= self._number is not None and page.step < self._number
            self._number = page.step
        return page.pid

    def _count_cpu(self, stat: Stat) -> None:
        ticks = stat.cpu_ticks + stat.waited_ticks
        children = self._read("children")
        if children:
            ticks += sum(each.cpu_ticks + each.waited_ticks for _, each in _list_descendants(self._pid, children))
        # Processes that ended removed their time, so the sum can be smaller than before: then it did not grow.
        self._cpu_ticks += max(0, ticks - self._last_ticks)
        self._last_ticks = ticks

    def _read_io(self) -> None:
        fields = self._read("io").split(None, 4)
        if len(fields) > 3 and fields[0] == b"rchar:" and fields[2] == b"wchar:":
            self._io_bytes = int(fields[1]) + int(fields[3])

    def _read_outputs(self) -> None:
        logs = self._rank.logs
        for place, path in enumerate((logs.stdout_path, logs.stderr_path)):
            if path is None or path == os.devnull:
                continue
            fields = self._read(_OUTPUTS[place]).split(None, 2)
            if len(fields) > 1 and fields[0] == b"pos:":
                self._output_bytes[place] = max(self._output_bytes[place], int(fields[1]))


def _list_descendants(pid: int, children: bytes) -> list[tuple[int, Stat]]:
    """List some descendants of `pid`. Args: children: those of its main thread, as the kernel lists them."""
    found: list[tuple[int, Stat]] = []
    waiting = [(pid, int(child)) for child in children.split()]
    while waiting and len(found) < MAX_DESCENDANTS:
        parent, child = waiting.pop()
        stat = read_stat(child)
        if stat is None or stat.parent != parent:
            continue
        found.append((child, stat))
        waiting += [(child, int(each)) for each in read(f"/proc/{child}/task/{child}/children").split()]
    return found


def _open(path: str) -> int:
    """Open a file; -1 if that fails."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def _sum(values: list[int]) -> int:
    known = [value for value in values if value >= 0]
    return sum(known) if known else -1


_TICKS = os.sysconf("SC_CLK_TCK")
