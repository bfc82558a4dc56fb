"""Ranks of a real bootrun as tests see them from outside: their pages by the paths that they were given."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from launcher.base.loop import Loop
from launcher.monitor.samples.stack_collector import StackCollector
from launcher.monitor.samples.stacks import RankStacks
from launcher.ranks.stats_page import StatsPage, read_page
from tests.support import Program, descendants, wait_until


class Logs(NamedTuple):
    """Where its output goes."""

    stdout_path: str | None = None
    stderr_path: str | None = None


class SeenRank(NamedTuple):
    """What Sampler and StackCollector want of a rank."""

    rank: int
    pid: int
    page_file: str
    started_ns: int = 1 << 62
    logs: Logs = Logs()

    @property
    def stacks_file(self) -> str:
        return self.page_file

    def page(self) -> StatsPage | None:
        try:
            fd = os.open(self.page_file, os.O_RDONLY)
        except OSError:
            return None
        try:
            return read_page(fd)
        finally:
            os.close(fd)


def find_ranks(job: Program, count: int) -> list[SeenRank]:
    """The ranks of a bootrun, once there are so many that have said so by a file ready-RANK in its folder."""

    def look() -> list[SeenRank] | None:
        if job.process.poll() is not None:
            raise AssertionError(f"bootrun has ended\n{job.stdout}\n{job.stderr}")
        ready = [name for name in os.listdir(job.dir) if name.startswith("ready-")]
        return sorted(_list_ranks(job.pid)) if len(ready) >= count else None

    return wait_until(look, 60.0, f"{count} ranks\n{job.stderr}")


def _list_ranks(bootrun: int) -> list[SeenRank]:
    found = []
    for process in descendants(bootrun):
        try:
            with open(f"/proc/{process.pid}/cmdline", "rb") as file:
                words = file.read().decode().split("\0")
            with open(f"/proc/{process.pid}/environ", "rb") as file:
                environ = dict(pair.split(b"=", 1) for pair in file.read().split(b"\0") if b"=" in pair)
        except OSError:
            continue
        place = next((n for n, word in enumerate(words) if os.path.basename(word).startswith("bootstrap.")), -1)
        # A rank, not what it has forked, nor the preloaded process.
        is_outer = process.ppid not in {rank.pid for rank in found}
        if b"LOCAL_RANK" in environ and is_outer and (place < 0 or words[place + 1] != "preload"):
            page = words[place + 7] if place > 0 else ""
            if os.getsid(process.pid) == process.pid:
                found.append(SeenRank(int(environ[b"RANK"]), process.pid, page))
    return found


def collect(collector: StackCollector, loop: Loop, deadline_s: float = 30.0) -> dict[int, RankStacks]:
    """The stacks, once they are there."""
    found: list[dict[int, RankStacks]] = []
    collector.collect(found.append)
    run_until(loop, lambda: bool(found), deadline_s)
    return found[0]


def run_until(loop: Loop, condition: Callable[[], bool], deadline_s: float) -> None:
    end_s = loop.time() + deadline_s
    while not condition():
        assert loop.time() < end_s
        loop.run_once(0.2)
