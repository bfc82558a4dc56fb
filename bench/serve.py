"""`bootseer serve` beside a job of 8 ranks: CPU, memory, the ranks' steps, the agent's CPU; 500 open pages.

The job's ranks compute; a heartbeat each step. In windows that alternate, one page is open and /metrics is read
each 5 s, or the server is stopped (SIGSTOP) and nobody asks. `serve.step_ratio`: seconds a step with it over
seconds without, of neighbouring windows. `serve.agent_added_cores`: CPU of bootrun with it less that without.
CPU and memory are those of the server's process, by /proc, in the windows in which it works.

In further windows an event is written each EVENT_S (`serve.cores_with_events`): after each one, a scrape reads the
event files again.

Then PAGES clients read the stream of events, each over its own connection. A file of the job's events gets
EVENTS_PER_S lines a second, each with the time at which it is written. `serve.event_lag_ms` is the 99th percentile
over all clients and events of a round, with ranks that wait, as for a GPU: the server has the lowest priority, so
beside ranks that keep all cores busy it is late (`serve.event_lag_busy_ms`). `serve.dropped_events` counts what
clients have not got in all rounds of both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import resource
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from bench.processes import Running
from bench.record import BenchError, Figures, Target

ROUNDS = 5
RANKS = 8
WINDOW_S = 20.0
SETTLE_S = 1.0  # after the server was stopped or let go
SCRAPE_S = 5.0
EVENT_S = 2.0
PAGES = 500
EVENTS_PER_S, EVENTS = 10, 100
DEADLINE_S = 60.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGESIZE")
TARGETS = {
    "serve.cores": Target(at_most=0.005),
    "serve.rss_mb": Target(at_most=60),
    "serve.step_ratio": Target(at_least=0.99, at_most=1.01),
    "serve.agent_added_cores": Target(at_most=0.005),
    "serve.cores_with_events": Target(at_most=0.02),
    "serve.dropped_events": Target(at_most=0),
    "serve.event_lag_ms": Target(at_most=250),
}
# Steps of some 20 ms of CPU; the number of steps so far goes into a file of the rank's.
RANK = """
import os, sys, time, bootseer
path = os.path.join(sys.argv[1], "steps-" + os.environ["RANK"])
fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
step = 0
while not os.path.exists(os.path.join(sys.argv[1], "end")):
    if os.path.exists(os.path.join(sys.argv[1], "calm")):
        time.sleep(0.02)
    else:
        end_s = time.thread_time() + 0.02
        while time.thread_time() < end_s:
            pass
    step += 1
    bootseer.heartbeat(step, loss=1.0)
    os.pwrite(fd, step.to_bytes(8, "little"), 0)
"""


class _Place(NamedTuple):
    """A job and a server over it."""

    directory: str
    job: Running
    server: Running
    port: int

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=DEADLINE_S) as answer:
            found: bytes = answer.read()
            return found

    def steps(self) -> int:
        """Steps of all ranks so far."""
        total = 0
        for rank in range(RANKS):
            with open(f"{self.directory}/steps-{rank}", "rb") as file:
                total += int.from_bytes(file.read(8), "little")
        return total

    def events(self) -> tuple[str, str]:
        """The directory of the job's events, and its id."""
        (job,) = json.loads(self.get("/api/v1/jobs"))["jobs"]
        return str(job["events"]), str(job["run_id"])


class _Window(NamedTuple):
    """What was seen in one window."""

    step_s: float  # of all ranks together: the time of one step of any rank
    server_cores: float
    agent_cores: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Beside the common ones."""
    parser.add_argument("--window", type=float, default=WINDOW_S, metavar="S", help="seconds of one window")
    parser.add_argument("--pages", type=int, default=PAGES, help="clients of the stream of events")


def run(args: argparse.Namespace) -> Figures:
    """`args.rounds` rounds of both parts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    samples: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        samples.setdefault(name, []).append(value)

    with _begun() as place:
        for number in range(args.rounds):
            ways = (True, False) if number % 2 else (False, True)
            found = {is_on: _look(place, is_on, args.window) for is_on in ways}
            on, off = found[True], found[False]
            note("cores", on.server_cores)
            note("cores_with_events", _look(place, True, args.window, with_events=True).server_cores)
            note("rss_mb", _rss_bytes(place.server.pid) / 1e6)
            note("step_ratio", on.step_s / off.step_s)
            note("agent_added_cores", on.agent_cores - off.agent_cores)
            note("agent_cores", off.agent_cores)
        dropped = 0
        for name in ("event_lag_busy_ms", "event_lag_ms"):
            if name == "event_lag_ms":
                open(f"{place.directory}/calm", "w").close()
            for _ in range(args.rounds):
                before_s = _cpu_s(place.server.pid)
                lags_ms, missing = asyncio.run(_watch(place, args.pages))
                note(name, sorted(lags_ms)[int(len(lags_ms) * 0.99)])
                note(
                    f"{name.removesuffix('_ms').removeprefix('event_')}_cpu_s", _cpu_s(place.server.pid) - before_s
                )
                dropped += missing
        note("dropped_events", dropped)  # of all rounds: a median would hide some
        note("rss_with_pages_mb", _rss_bytes(place.server.pid) / 1e6)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    figures = Figures()
    for name, values in samples.items():
        units = {"cores": "cores", "mb": "MB", "ratio": "ratio", "ms": "ms", "events": "events", "s": "s"}
        unit = "cores" if name.startswith("cores") else units[name.rpartition("_")[2]]
        figures.add(f"serve.{name}", unit, values)
    return figures


@contextmanager
def _begun() -> Iterator[_Place]:
    scripts = os.path.dirname(sys.executable)
    with tempfile.TemporaryDirectory(prefix="bench-serve-") as directory:
        os.mkdir(f"{directory}/rt", 0o700)
        environ = {**os.environ, "BOOTSEER_RUNTIME": f"{directory}/rt"}
        with open(f"{directory}/rank.py", "w", encoding="utf-8") as file:
            file.write(RANK)
        words = ["--standalone", "--nproc-per-node", str(RANKS), "--log-dir", f"{directory}/logs"]
        argv = [f"{scripts}/bootrun", *words, f"{directory}/rank.py", directory]
        job = Running(argv, environ, f"{directory}/job.out")
        server = Running([f"{scripts}/bootseer", "serve", "0"], environ, f"{directory}/serve.out")
        try:
            _wait_until(lambda: "http://" in server.text(), server)
            port = int(server.text().rpartition(":")[2].strip().rstrip("/"))
            place = _Place(directory, job, server, port)
            _wait_until(lambda: b'"attempt":0' in place.get("/api/v1/jobs"), job)
            _wait_until(lambda: all(os.path.exists(f"{directory}/steps-{rank}") for rank in range(RANKS)), job)
            yield place
        finally:
            open(f"{directory}/end", "w").close()
            for signum in (signal.SIGCONT, signal.SIGTERM):
                try:
                    os.kill(server.pid, signum)
                except ProcessLookupError:
                    pass  # it has ended; what it said is in the error
            job.wait(DEADLINE_S)
            server.wait(DEADLINE_S)


def _wait_until(is_true: Any, program: Running) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not is_true():
        if time.monotonic() > end_s:
            raise BenchError(f"it does not come up: {program.text()[-2000:]}")
        time.sleep(0.1)


# ---- beside the ranks ----------------------------------------------------------------------------------------


def _look(place: _Place, is_on: bool, window_s: float, *, with_events: bool = False) -> _Window:
    """One window: with one page and scrapes, or with the server stopped."""
    os.kill(place.server.pid, signal.SIGCONT if is_on else signal.SIGSTOP)
    return asyncio.run(_measure(place, is_on, window_s, with_events))


async def _measure(place: _Place, is_on: bool, window_s: float, with_events: bool) -> _Window:
    tasks = []
    if with_events:
        tasks.append(asyncio.create_task(_write_events(place)))
    if is_on:
        tasks += [
            asyncio.create_task(_read_stream(place.port, "none", {})),
            asyncio.create_task(_scrape(place)),
        ]
    await asyncio.sleep(SETTLE_S)
    began_s, steps = time.monotonic(), place.steps()
    server_s, agent_s = _cpu_s(place.server.pid), _cpu_s(place.job.pid)
    await asyncio.sleep(window_s)
    took_s = time.monotonic() - began_s
    made = place.steps() - steps
    window = _Window(
        took_s / max(made, 1),
        (_cpu_s(place.server.pid) - server_s) / took_s,
        (_cpu_s(place.job.pid) - agent_s) / took_s,
    )
    for task in tasks:
        task.cancel()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(ended, Exception) and not isinstance(ended, asyncio.CancelledError):
            raise BenchError(f"a client has failed: {ended!r}")
    return window


async def _write_events(place: _Place) -> None:
    """An event each EVENT_S, after each of which a scrape makes the report of the start anew."""
    path, run_id = await asyncio.to_thread(place.events)
    while True:
        _append(f"{path}/agent-window.jsonl", run_id, "window", 0)
        await asyncio.sleep(EVENT_S)


def _append(path: str, run_id: str, node: str, number: int) -> None:
    line = {
        "v": 1, "wall_ns": time.time_ns(), "mono_ns": time.monotonic_ns(), "run_id": run_id, "node": node,
        "rank": None, "attempt": 0, "stage": None, "kind": "instant", "name": "bench", "value": number,
    }  # fmt: skip
    with open(path, "ab") as file:
        file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")


async def _scrape(place: _Place) -> None:
    while True:
        await asyncio.to_thread(place.get, "/metrics")
        await asyncio.sleep(SCRAPE_S)


def _cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def _rss_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * PAGE_BYTES


# ---- many pages ----------------------------------------------------------------------------------------------


async def _watch(place: _Place, pages: int) -> tuple[list[float], int]:
    """Milliseconds from the write of each event to each client, and how many did not come."""
    directory, run_id = await asyncio.to_thread(place.events)
    mark = f"bench-{time.time_ns()}"  # only this round's
    lags_ms: list[dict[int, float]] = [{} for _ in range(pages)]
    readers = [asyncio.create_task(_read_stream(place.port, mark, lags)) for lags in lags_ms]
    await asyncio.sleep(5.0)  # until all have what was before
    for number in range(EVENTS):
        _append(f"{directory}/agent-{mark}.jsonl", run_id, mark, number)
        await asyncio.sleep(1 / EVENTS_PER_S)
    end_s = time.monotonic() + DEADLINE_S  # late is not lost
    while any(len(lags) < EVENTS for lags in lags_ms) and time.monotonic() < end_s:
        await asyncio.sleep(0.1)
    for reader in readers:
        reader.cancel()
    ended = await asyncio.gather(*readers, return_exceptions=True)
    broken = [each for each in ended if not isinstance(each, asyncio.CancelledError)]
    if broken:
        raise BenchError(f"{len(broken)} of {pages} streams have ended: {broken[0]!r}")
    return [lag for lags in lags_ms for lag in lags.values()], sum(EVENTS - len(lags) for lags in lags_ms)


async def _read_stream(port: int, mark: str, lags_ms: dict[int, float]) -> None:
    """Reads events until it is cancelled; notes how late those of the node `mark` are, by their number."""
    name = (await asyncio.to_thread(_first_job, port)).encode()
    loop = asyncio.get_running_loop()
    transport, page = await loop.create_connection(lambda: _Page(loop, mark, lags_ms), "127.0.0.1", port)
    try:
        transport.write(b"GET /api/v1/jobs/%b/events HTTP/1.1\r\nHost: localhost\r\n\r\n" % name)
        await page.ended
        raise BenchError(f"the stream has ended, or is refused: {page.head!r}")
    finally:
        transport.close()


class _Page(asyncio.Protocol):
    """A client that costs little, as all share the machine's cores with the server."""

    def __init__(self, loop: asyncio.AbstractEventLoop, mark: str, lags_ms: dict[int, float]) -> None:
        self.ended: asyncio.Future[None] = loop.create_future()
        self.head = b""
        self._lags_ms = lags_ms
        pattern = rb'"wall_ns":(\d+)[^\n]*"node":"%b"[^\n]*"value":(\d+)[^\n]*\n'
        self._wanted = re.compile(pattern % mark.encode())
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        now_ns = time.time_ns()
        if not self.head:
            self.head = data[:100]
            if b" 200 " not in self.head:
                self.connection_lost(None)
                return
        data = self._rest + data
        for found in self._wanted.finditer(data):
            self._lags_ms.setdefault(int(found[2]), (now_ns - int(found[1])) / 1e6)
        self._rest = data[data.rfind(b"\n") + 1 :]

    def connection_lost(self, error: Exception | None) -> None:
        del error
        if not self.ended.done():
            self.ended.set_result(None)


_names: dict[int, str] = {}


def _first_job(port: int) -> str:
    if port not in _names:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/jobs", timeout=DEADLINE_S) as answer:
            _names[port] = str(json.load(answer)["jobs"][0]["run_id"])
    return _names[port]
