"""A keeper process as bootrun drives it, for tests: orders out, answers in."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from bootseer import aio
from bootseer.own_module import command_of

LIMIT_S = 60.0
Start = Callable[..., "ServiceProcess"]


class ServiceProcess:
    """`python -m bootseer.checkpoint.service.service` for one checkpoint; `folder` gets its caches and temporary
    files.
    """

    def __init__(self, folder: Path, url: str, **start: Any) -> None:
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        caches = dict.fromkeys(("BOOTSEER_CACHE", "BOOTSEER_CACHE_DIR"), str(folder / "cache"))
        environ = {**os.environ, "TMPDIR": str(self.temporary), **caches}
        self._errors = (folder / "keeper.err").open("ab+")
        self.process = subprocess.Popen(
            command_of("bootseer.checkpoint.service.service"),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environ,
        )  # fmt: skip
        self.url = url
        self.attempt = -1
        self.heard: list[dict[str, Any]] = []
        self.order("start", url=url, memory_bytes=None, arena_bytes=0, keep=False, local_world_size=2, **start)

    def order(self, do: str, **fields: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self, *dids: str) -> dict[str, Any]:
        """The next answer of these kinds."""
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            answer: dict[str, Any] = json.loads(line)
            self.heard.append(answer)
            if answer["did"] in dids:
                return answer
        raise AssertionError(f"the keeper has ended: {self.errors()}\n{self.heard}")

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode()

    def resolve(self) -> dict[str, Any]:
        self.order("resolve")
        return self.hear("resolved", "absent", "unresolved")

    def load(self, *, nnodes: int = 1, group_rank: int = 0, **found: Any) -> dict[str, Any]:
        """Resolves and loads; the answer of the load, with version and digest."""
        found = found or self.resolve()
        pinned = {"version": found["version"], "digest": found["digest"]}
        self.begin_load(pinned, nnodes=nnodes, group_rank=group_rank)
        while (answer := self.hear("ready", "direct", "failed"))["attempt"] != self.attempt:
            pass  # of a load that was begun and not waited for
        return {**answer, **pinned}

    def begin_load(self, found: dict[str, Any], *, nnodes: int = 1, group_rank: int = 0) -> None:
        """Without waiting for the answer; each load is an attempt of its own."""
        self.attempt += 1
        self.order(
            "load", version=found["version"], digest=found["digest"], attempt=self.attempt,
            world_size=2 * nnodes, nnodes=nnodes, group_rank=group_rank,
        )  # fmt: skip

    def children(self) -> list[int]:
        pid = self.process.pid
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def close(self) -> None:
        """As bootrun does: the input ends, then so does the keeper, with everything that it made."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait(LIMIT_S)
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._errors.close()


def services(directory: Path) -> Iterator[Start]:
    """For a fixture: starts keepers; in the end they leave nothing behind."""
    started: list[ServiceProcess] = []

    def start(url: str, **more: object) -> ServiceProcess:
        started.append(ServiceProcess(directory, url, **more))
        return started[-1]

    yield start
    aio.close()
    for each in started:
        each.close()
        assert "Traceback" not in (directory / "keeper.err").read_text()

    def nothing_is_left() -> bool:
        """What a keeper that was killed has made goes by its children, else by the next keeper."""
        if started and os.listdir(directory / "tmp"):
            ServiceProcess(directory, started[-1].url).close()
        return not os.listdir(directory / "tmp")

    wait_until(nothing_is_left, "no temporary files")


def wait_until(condition: Any, what: str) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s, f"never: {what}"
        time.sleep(0.005)


def descriptors(pid: int) -> dict[int, str]:
    """What a process has open."""
    found = {}
    for number in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # it has just been closed
            found[int(number)] = os.readlink(f"/proc/{pid}/fd/{number}")
    return found


def arena_descriptors(pid: int) -> list[int]:
    """Those by which it keeps an arena's memory."""
    return [number for number, name in descriptors(pid).items() if "memfd:bootseer-arena" in name]
