"""A node's keeper as bootrun drives it: `python -m bootseer.checkpoint.service.service`, JSON lines over stdin and
stdout.

A `Node` makes memory ready (start), finds the version (resolve), loads it (load) and gives the variables with
which its ranks find the arena. CPU time is that of the keeper and all that it started, in nanoseconds from the
kernel; memory is what its memfds hold, seen from outside.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from bench.ckpt_run import Load, Program, load, make_environ, programs, python
from bench.fork import with_descendants
from bench.record import BenchError

DEADLINE_S = 180.0
STILL_S = 10.0  # memory that has not grown for so long will not
READY_SHARE = 0.99


class Fill(NamedTuple):
    """One load of a file into an arena that was ready, and a rank that took its tensors from there."""

    ready_s: float  # until the memory was there
    ready_cpu_s: float
    seconds: float  # from the order to load until the last byte was there
    cpu_s: float
    size_bytes: int
    load: Load

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.size_bytes / self.seconds

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / self.size_bytes * 1e9

    @property
    def ready_cpu_s_per_gb(self) -> float:
        return self.ready_cpu_s / self.size_bytes * 1e9


class Node:
    """One keeper. Made by `open_node`."""

    def __init__(self, program: Program, url: str) -> None:
        self._program = program
        self._url = url
        self._pinned: dict[str, str] = {}

    def start(self, ranks: int, memory_bytes: int | None = None) -> None:
        """Time zero of a job."""
        self._order(
            "start",
            url=self._url,
            local_world_size=ranks,
            memory_bytes=memory_bytes,
            arena_bytes=0,
            keep=True,
        )

    def resolve(self) -> None:
        """Finds the version."""
        self._order("resolve")
        answer = self._hear("resolved")
        self._pinned = {"version": answer["version"], "digest": answer["digest"]}

    def load(self, ranks: int, group_rank: int = 0, nodes: int = 1) -> dict[str, str]:
        """Loads this node's part; returns variables for its ranks."""
        self._order(
            "load", **self._pinned, world_size=ranks * nodes, group_rank=group_rank, nnodes=nodes, attempt=0
        )
        answer = self._hear("ready")
        return {
            "BOOTSEER_CHECKPOINT": answer["path"] or self._url,
            "BOOTSEER_CHECKPOINT_URL": self._url,
            "BOOTSEER_CHECKPOINT_VERSION": self._pinned["version"],
            "BOOTSEER_CHECKPOINT_DIGEST": self._pinned["digest"],
            "BOOTSEER_ARENA": answer["address"],
        }

    def end(self) -> None:
        """The ranks have what they need: the arena goes, what was read is recorded, the keeper ends."""
        self._order("release")
        self._program.close_input()
        self._program.wait(DEADLINE_S)

    def wait_memory(self, size_bytes: int) -> None:
        """Until its memfds hold so much."""
        found = 0
        grown_s = time.monotonic()
        while found < READY_SHARE * size_bytes:
            time.sleep(0.02)
            now = held_bytes(self._program.pid)
            if now > found:
                found, grown_s = now, time.monotonic()
            elif time.monotonic() > grown_s + STILL_S:
                raise self._program.failure(f"made {found} of {size_bytes} bytes of memory ready")

    def cpu_s(self) -> float:
        """CPU time so far of the keeper and all below it."""
        return sum(map(cpu_of, with_descendants([self._program.pid])))

    def _order(self, do: str, **fields: object) -> None:
        self._program.say(json.dumps({"do": do, **fields}))

    def _hear(self, did: str) -> dict[str, Any]:
        """The answer; the keeper says other things in between."""
        failed: list[str] = []

        def is_answer(line: str) -> bool:
            said = json.loads(line)["did"]
            if said in ("unresolved", "absent", "direct"):
                failed.append(line)
            return bool(failed) or said == did

        line = self._program.listen(is_answer, DEADLINE_S)
        if failed:
            raise BenchError(f"the keeper of {self._url} does not do it: {line}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def open_node(url: str, cache: str) -> Iterator[Node]:
    """A keeper for a checkpoint; `cache` is where it records what was read."""
    argv = python("bootseer.checkpoint.service.service")
    with programs([(argv, make_environ(BOOTSEER_CACHE_DIR=cache))]) as (program,):
        yield Node(program, url)


def fill_and_load(path: str, cache: str, before: Callable[[], object] = lambda: None) -> Fill:
    """Makes memory ready, calls `before`, loads a local file, and has a rank take its tensors."""
    size = os.path.getsize(path)
    with open_node(path, cache) as node:
        began_s = time.monotonic()
        node.start(ranks=1)
        node.resolve()
        node.wait_memory(size)
        ready_s, ready_cpu_s = time.monotonic() - began_s, node.cpu_s()
        before()
        began_s, began_cpu_s = time.monotonic(), node.cpu_s()
        environ = node.load(ranks=1)
        seconds, cpu_s = time.monotonic() - began_s, node.cpu_s() - began_cpu_s
        taken = load("arena", "", **environ)
        node.end()
    return Fill(ready_s, ready_cpu_s, seconds, cpu_s, size, taken)


def cpu_of(pid: int) -> float:
    """CPU seconds of a process and of those that it has waited for; 0 when it is gone."""
    try:
        # The clock of another process: see clock_getcpuclockid(3).
        own_s = time.clock_gettime(~pid << 3 | 2)
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return own_s + (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


def held_bytes(pid: int) -> int:
    """Memory in the memfds of a process and all below it."""
    found: dict[int, int] = {}
    for each in with_descendants([pid]):
        directory = f"/proc/{each}/fd"
        try:
            for name in os.listdir(directory):
                link = os.path.join(directory, name)
                if os.readlink(link).startswith("/memfd:"):
                    about = os.stat(link)
                    found[about.st_ino] = about.st_blocks * 512
        except OSError:
            continue  # closed, or ended, in the meantime
    return sum(found.values())
