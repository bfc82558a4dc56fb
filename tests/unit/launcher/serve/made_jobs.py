"""Status sockets of made jobs, and a server over them, each on a loop in a thread."""

from __future__ import annotations

import asyncio
import http.client
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from bootseer.errors import ConfigError
from launcher.base.listen_address import Address
from launcher.base.loop import Loop
from launcher.serve.access import Access
from launcher.serve.options import Options
from launcher.serve.server import Server
from launcher.status.server import StatusServer

T = TypeVar("T")


def make_status(run_id: str = "run7", ranks: int = 2, **more: Any) -> dict[str, Any]:
    """As bootrun answers."""
    return {
        "format": 1, "run_id": run_id, "script": "train.py", "pid": 77, "host": "node-a", "runs_s": 60.0,
        "state": "running", "waits_for": "", "attempt": 0, "attempt_runs_s": 59.0, "nodes": 1, "least_nodes": 1,
        "node_rank": 0, "world_size": ranks, "restarts": 0, "most_restarts": 3, "last_end": None,
        "last_page": None, "standstill": None, "checks": [], "coordinator": {"nodes": 1}, "logs": None,
        "events": None, "ranks_left_out": 0,
        "ranks": [
            {"rank": rank, "local_rank": rank, "pid": 100 + rank, "state": "running", "process": "S",
             "waits_in": None, "steps": 10, "step": 1010, "steps_per_s": 2.0, "since_step_s": 0.3, "cores": 1.0,
             "rss_bytes": 1 << 30}
            for rank in range(ranks)
        ],
        **more,
    }  # fmt: skip


def make_columns(ranks: int, nodes: int = 1, **more: Any) -> dict[str, Any]:
    """As the coordinator's bootrun answers about all ranks."""
    return {
        "format": 1, "attempt": 0, "nodes": [f"node-{number}" for number in range(nodes)],
        "rank": list(range(ranks)), "node": [rank * nodes // ranks for rank in range(ranks)],
        "steps": [10] * ranks, "since_step_s": [0.3] * ranks, "step_takes_s": [0.5] * ranks,
        "cpu_s": [5.0] * ranks, "process": ["S"] * ranks, "age_s": [0.1] * ranks, **more,
    }  # fmt: skip


class MadeJob:
    """A bootrun that answers what a test sets: a dict, or None for an error."""

    def __init__(self, environ: Mapping[str, str], status: dict[str, Any], columns: dict[str, Any] | None) -> None:
        self.status, self.columns = status, columns
        self.asked = 0
        self._loop = Loop()
        self._server = StatusServer(self._loop, environ, self._answer)
        self.path = self._server.path
        self._stop = os.pipe()
        self._loop.add_reader(self._stop[0], self._end)
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def _answer(self, request: str, then: Callable[[dict[str, Any] | Exception], object]) -> None:
        self.asked += 1
        found = self.status if request == "status" else self.columns
        then(ConfigError("only the node of the coordinator knows all ranks") if found is None else found)

    def _end(self) -> None:
        self._server.close()
        self._loop.stop()

    def close(self) -> None:
        os.write(self._stop[1], b"x")
        self._thread.join(20)
        assert not self._thread.is_alive()
        self._loop.close()
        for fd in self._stop:
            os.close(fd)


@contextmanager
def made_job(
    environ: Mapping[str, str], status: dict[str, Any], columns: dict[str, Any] | None = None
) -> Iterator[MadeJob]:
    """A job that runs until the end."""
    job = MadeJob(environ, status, columns)
    try:
        yield job
    finally:
        job.close()


class Served:
    """A server at a free port of loopback."""

    def __init__(self, environ: Mapping[str, str], token: bytes | None = None) -> None:
        self._environ, self._token = environ, token
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._ended = asyncio.Event()
        self.server: Server
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._ready.wait(20)

    @property
    def port(self) -> int:
        return self.server.port

    def get(self, path: str, **headers: str) -> tuple[int, bytes]:
        """Status and body of the answer to a request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        address = Address("127.0.0.1", 0)
        options = Options(address, Access(address, self._token), None, None, False, True, False)
        self.server = await Server.start(options, self._environ)
        self._ready.set()
        await self._ended.wait()
        await self.server.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(20)
        assert not self._thread.is_alive()


@contextmanager
def served(environ: Mapping[str, str], token: bytes | None = None) -> Iterator[Served]:
    """A server until the end."""
    made = Served(environ, token)
    try:
        yield made
    finally:
        made.close()
