"""Each limit of [tuning] has an effect: the code that needs it sees the value that BOOTSEER_TUNING sets.

`SEEN` has a function for each limit. It runs with the variable set, and returns the value by which the code acts.
A limit without such a function fails here.
"""

from __future__ import annotations

import asyncio
import os
import re
import selectors
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest

from bootseer import aio
from bootseer.blocks import failover_reader
from bootseer.blocks.failover_reader import FailoverReader, StoreSources
from bootseer.checkpoint.dcp.writer import BUFFER_PART
from bootseer.checkpoint.format.manifest import MIN_UNIT_BYTES
from bootseer.checkpoint.service import resolving
from bootseer.checkpoint.service.loading import Loader, State
from bootseer.checkpoint.writing.committing import collect_garbage, new_version
from bootseer.checkpoint.writing.writer import Geometry, VersionWriter
from bootseer.env.compile_cache import caches
from bootseer.env.compile_cache.caches import FirstStepCaches
from bootseer.env.restore import unpack_processes
from bootseer.env.service import commands
from bootseer.env.service import main as env_service
from bootseer.errors import ConfigError, StorageTimeout
from bootseer.health.finding import OK, Finding
from bootseer.health.runner import Task, run_tasks
from bootseer.logs import sent_to
from bootseer.mounts.tree_daemon import prefetch
from bootseer.mounts.tree_daemon.forked import ForkedHelper
from bootseer.mounts.tree_daemon.mount import mount_tree
from bootseer.mounts.tree_daemon.places import TreeDirectory, locate, prepare
from bootseer.mounts.tree_daemon.starting import TreeOptions, settings_of
from bootseer.peers import Node, serve
from bootseer.peers.auth import derive_key
from bootseer.peers.filling import Filler
from bootseer.peers.link import RangeRead, ReadOutcome
from bootseer.peers.membership import PeersFile
from bootseer.peers.peer import Peer
from bootseer.peers.serve import listen
from bootseer.peers.server import PeerServer
from bootseer.peers.spans import ObjectName
from bootseer.peers.spool import Spool
from bootseer.storage import RangeReader, open_store
from bootseer.storage.hdfs.store import HdfsStore
from bootseer.storage.memory import MemoryStore
from bootseer.trust import PublicKey, SigningKey, Trust, TrustedKey
from bootseer.tuning import DEFAULTS, VARIABLE, current
from bootseer.tuning_limits import LIMITS, is_whole
from launcher.agent.event_shipping import Shipper
from launcher.base.facts import RankFacts
from launcher.cli.parser import parse as parse_line
from launcher.coordinator.escalation import Fault, Ladder, Step
from launcher.coordinator.exclusion import Exclusion, MachineFault
from launcher.coordinator.machines import JobMachines
from launcher.coordinator.restart_policy import StepLimits
from launcher.coordinator.restarts import Restarts
from launcher.coordinator.running import RunningRanks
from launcher.coordinator.state import JobRules, JobState
from launcher.monitor.failure.notes import FailureNotes
from launcher.monitor.hang.settings import HangSettings
from launcher.monitor.samples import stack_collector
from launcher.monitor.samples.stack_collector import StackCollector
from launcher.monitor.watch import HangWatch
from launcher.provision import environment
from launcher.provision.checkpoint import NodeCheckpoint
from launcher.provision.environment import SetupService
from launcher.provision.image import NodeImage
from launcher.provision.image import State as ImageState
from launcher.spec import LaunchSpec, build_spec
from tests.unit.launcher.fake_loop import FakeLoop

PATHS = [f"{package}.{name}" for package, limits in LIMITS.items() for name in limits]
KEY = "ab" * 32
ADA = SigningKey.make(name="ada")


class Place(NamedTuple):
    """What a function of SEEN may use; `value` has been set."""

    value: Any
    folder: Path
    patch: pytest.MonkeyPatch

    def spec(self, *words: str) -> LaunchSpec:
        return build_spec(parse_line([*words, "--standalone", "-m", "train"], os.environ), os.environ)

    def state(self, **changes: object) -> JobState:
        rules: JobRules = self.spec("--max-restarts", "9").job_rules()
        return JobState(rules._replace(**changes))  # type: ignore[arg-type]

    def machines(self) -> JobMachines:
        return JobMachines(self.state(steps=StepLimits(checks_s=1.0)))


def edge(value: float, is_past: Callable[[float], bool], step: float = 0.5) -> float | None:
    """Return `value` if `is_past` is false a little below it, and true a little above it."""
    return value if not is_past(value - step) and is_past(value + step) else None


# ---- the launcher ----------------------------------------------------------------------------------------------


def max_backoff_s(at: Place) -> object:
    state = at.state(backoff_s=1000.0)
    longest_s = Restarts(state, lambda: JobMachines(state))._max_backoff_s
    return [state.restarts.after_failure(0.0, longest_s) for _ in range(3)][-1]


def attempts_without_progress(at: Place) -> object:
    state = at.state()
    progress = Restarts(state, lambda: JobMachines(state))._no_progress
    progress.after_failure(5, 5)
    return next(count for count in range(1, 100) if progress.after_failure(0, 5))


def machine_fault_s(at: Place) -> object:
    def is_forgiven(after_s: float) -> bool:
        exclusion = at.machines()._exclusion
        fault = MachineFault("host", "no network", is_grave=False)
        return [exclusion.after_failure([fault], now_s) for now_s in (0.0, after_s)][-1] == []

    return edge(at.value, is_forgiven)


def calm_s(at: Place) -> object:
    def is_calm(lived_s: float) -> bool:
        ladder = at.machines().recovery._ladder
        steps = [ladder.after_failure(Fault("resource"), each_s).step for each_s in (0.0, lived_s)]
        return steps[-1] is Step.IN_PLACE

    return edge(at.value, is_calm)


def watch(at: Place) -> HangWatch:
    running = RunningRanks(at.state(on_hang="report"))
    list(running.node_sampled(1, (), 0.0))
    assert running._hangs is not None
    return running._hangs


def hangs(at: Place) -> HangSettings:
    return watch(at)._settings


def hang_stacks_s(at: Place) -> object:
    """By the deadline of a query about a hang."""
    hangs, now_s = watch(at), 0.0
    hangs.attempt_began(2, 1, now_s)
    while hangs._open is None:
        now_s += 1.0
        stepped_s = min(now_s, 30.0)
        facts = RankFacts(0, now_s, int(stepped_s), stepped_s, 0, stepped_s, 0, "S", "futex_wait")
        hangs.looked(1, (facts, facts._replace(rank=1)), now_s)
        hangs.tick(now_s)
        assert now_s < 200.0
    return hangs._open.until_s - hangs._open.began_s


def py_spy_s(at: Place) -> object:
    program = at.folder / "py-spy"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    collector = StackCollector(cast(Any, FakeLoop()), [], os.fspath(program))
    collector._left.append(stack_collector._RankQuery(cast(Any, SimpleNamespace(rank=0, pid=1, stacks_file=""))))
    collector._run_py_spy()
    (running,) = collector._running
    collector.close()
    return running._until_s


def failure_records(at: Place) -> object:
    notes = at.state().records.take_notes()
    return edge(at.value, lambda number: notes._page(0, {}, int(number)) is None)


def event_backlog_bytes(at: Place) -> object:
    loop = FakeLoop()
    shipper = Shipper(cast(Any, loop), cast(Any, None), cast(Any, None), 1)

    def is_skipped(size: float) -> bool:
        file = SimpleNamespace(behind=lambda: int(size), skip=lambda *_: None)
        shipper._files = [cast(Any, file)]
        return shipper._skip_oldest()

    return edge(at.value, is_skipped, 1)


def checkpoint_silence_s(at: Place) -> object:
    loop, said = FakeLoop(), list[object]().append
    spec = at.spec("--load-checkpoint", os.fspath(at.folder))
    NodeCheckpoint(cast(Any, loop), cast(Any, None), spec, (), said, said, said)._watch()
    return loop.planned[-1][0]


def image_silence_s(at: Place) -> object:
    loop = FakeLoop()
    spec = at.spec("--image", f"rootfs:{at.folder}")
    image = NodeImage(cast(Any, loop), spec, (), cast(Any, SimpleNamespace(said=None)))
    image._state, image._service = ImageState.OPENING, cast(Any, "running")
    image._watch()
    return loop.planned[-1][0]


def environment_silence_s(at: Place) -> object:
    loop, other = FakeLoop(), cast(Any, None)
    service = SetupService(cast(Any, loop), at.spec(), (), other, other, lambda: True, other, other)
    service._process = cast(Any, "running")
    service.allow(0.0)
    assert at.value < at.spec().join_timeout_s * environment.SILENCE_SHARE
    return loop.planned[-1][0]


# ---- stores ----------------------------------------------------------------------------------------------------


def timeout_s(at: Place) -> object:
    assert TreeOptions().resolved().store_timeout_s == at.value, "also in daemons of mounted trees"
    return cast(Any, open_store(os.fspath(at.folder)))._timeout_s


def max_requests(at: Place) -> object:
    return RangeReader(MemoryStore("a"))._pace._most


def io_threads(at: Place) -> object:
    """By the calls that run at once."""
    pool, gate, running = aio._Threads("tuned"), threading.Event(), []

    async def main() -> None:
        calls = [aio._Call(lambda: (running.append(0), gate.wait(20.0)), ()) for _ in range(at.value + 3)]
        for call in calls:
            pool.submit(call)
        while len(running) < at.value:
            await asyncio.sleep(0.001)
        assert (len(pool.calls), pool.threads) == (3, at.value)
        count = len(running)
        gate.set()
        for call in calls:
            await call.is_done
        pool.end_idle()
        assert count == at.value

    asyncio.run(main())
    return at.value


def hdfs_avoid_s(at: Place) -> object:
    store = cast(HdfsStore, open_store("hdfs://localhost:9870/a", options={}))
    store._replicas.blame(["a:1"], 0.0)
    return edge(at.value, lambda now_s: not store._replicas.is_suspect("a:1", now_s))


def upload_part_bytes(at: Place) -> object:
    pytest.importorskip("obstore")
    store = cast(Any, open_store("s3://bucket/a"))

    async def check_new(_: str) -> None:
        return None

    at.patch.setattr(store, "check_new", check_new)

    async def begin() -> int:
        found = 0
        with pytest.raises(ZeroDivisionError):
            async with store.create("a") as writer:
                found = writer._part_bytes
                raise ZeroDivisionError
        return found

    return asyncio.run(begin())


# ---- blocks and mounts -----------------------------------------------------------------------------------------


def unpack_threads(at: Place) -> object:
    at.patch.setattr(failover_reader, "usable_cores", lambda: 1000)
    other = cast(Any, None)
    return FailoverReader(other, other, other, other)._compute._value


def store_rest_s(at: Place) -> object:
    sources, began_s = StoreSources([MemoryStore("a"), MemoryStore("b")]), time.monotonic()
    sources.failed(sources.ordered()[0], StorageTimeout("late"))
    assert [source.place for source in sources.ordered()] == [1, 0]
    return pytest.approx(sources._down_until_s[0] - began_s, abs=0.5)


def idle_s(at: Place) -> object:
    return settings_of("file:///a", Trust([]), None, "", TreeOptions(), {})["idle_s"]


def ready_s(at: Place) -> object:
    """By the error of a mount that waits for another process."""
    environ = {
        "BOOTSEER_RUNTIME": os.fspath(at.folder / "runtime"),
        "BOOTSEER_CACHE": os.fspath(at.folder / "cache"),
    }
    lock = TreeDirectory(prepare(locate(environ)), KEY).try_claim()
    try:
        with pytest.raises(StorageTimeout) as raised:
            mount_tree(os.fspath(at.folder), trust=Trust([]), digest=KEY, environ=environ)
    finally:
        os.close(lock)
    found = re.search(r"mounting it for (.*) s", str(raised.value))
    assert found is not None
    return float(found[1])


def daemon_log_bytes(at: Place) -> object:
    """In a process of its own, as the daemon inherits the variable."""
    log = at.folder / "log"
    code = "from bootseer.mounts.tree_daemon.serving import _print; _print('a line')"

    def is_emptied(size: float) -> bool:
        log.write_bytes(bytes(int(size)))
        with log.open("ab") as file:
            subprocess.run([sys.executable, "-c", code], stderr=file, check=True)
        return log.stat().st_size < size

    return edge(at.value, is_emptied, 1)


def worker_silence_s(at: Place) -> object:
    said: list[str] = []
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    process = subprocess.Popen(["sleep", "60"], stdin=theirs.fileno())
    process.returncode = 0  # the worker's owner waits for it
    at.patch.setattr(prefetch, "_waiting", [ForkedHelper(process.pid, ours)])
    at.patch.setattr(prefetch, "encode", lambda _: (b"head", b"body"))
    with theirs, sent_to(said.append):
        asyncio.run(prefetch.PrefetchWorker().run(cast(Any, None)))
    found = re.search(r"it has sent nothing for (.*) s;", said[0])
    assert found is not None
    return float(found[1])


# ---- peers -----------------------------------------------------------------------------------------------------


def max_connections(at: Place) -> object:
    """By the connections that a server does not close."""
    listener = listen("127.0.0.1", 0)
    server = PeerServer(listener, PeersFile(""), Spool(os.fspath(at.folder / "spool")))

    async def main() -> int:
        serving = asyncio.create_task(server.serve())
        clients = [socket.create_connection(listener.getsockname(), 5.0) for _ in range(at.value + 3)]
        while server.statistics()["refused"] != 3:
            await asyncio.sleep(0.001)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        for client in clients:
            client.close()
        return len(clients) - 3

    try:
        return asyncio.run(asyncio.wait_for(main(), 20.0))
    finally:
        listener.close()
        os.close(server._spool.fd)


def begin_s(at: Place) -> object:
    """By how long a read waits for a peer that does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        peer = Peer(Node("a", "127.0.0.1", silent.getsockname()[1]), "b", derive_key(b"x" * 32, "run"))
        began_s = time.monotonic()
        name = ObjectName("0" * 16, "a", "etag")
        result = asyncio.run(peer.read(name, 0, memoryview(bytearray(4)), lambda: 60.0))
    took_s = time.monotonic() - began_s
    assert result.ending is ReadOutcome.LATE
    return at.value if at.value <= took_s < DEFAULTS.peers.begin_s else took_s


def stall_s(at: Place) -> object:
    async def main() -> float:
        read = RangeRead(cast(Any, None), 0, memoryview(b""), lambda: 1e9)
        read.record_life()
        lived_s = asyncio.get_running_loop().time()
        return edge(at.value, lambda after_s: lived_s + after_s >= read.end_s, step=0.1) or 0.0

    return asyncio.run(main())


def ranges_at_once(at: Place) -> object:
    return Filler(cast(Any, None), cast(Any, None))._memory._places._value


def spool_bytes(at: Place) -> object:
    given: list[int] = []

    def make(_folder: str, max_bytes: int) -> object:
        given.append(max_bytes)
        raise ConfigError("no server is needed here")

    at.patch.setattr(serve, "Spool", make)
    at.patch.setattr(serve.processes, "allow_files", lambda _count: None)
    serve.main(["peers.json", "--spool", "spool"])
    return given[0]


# ---- environments ----------------------------------------------------------------------------------------------


def setup_log_bytes(at: Place) -> object:
    log = SimpleNamespace(size=0)
    running = commands._RunningCommands([], {}, cast(Any, None), cast(Any, log), time.monotonic() + 60.0)

    def is_too_much(size: float) -> bool:
        log.size = size
        return running._why_end() == "too much"

    return edge(at.value, is_too_much, 1)


def unpack_processes_(at: Place) -> object:
    at.patch.setattr(unpack_processes, "usable_cores", lambda: 1000)
    return unpack_processes.cores()


def publish_s(at: Place) -> object:
    timer = env_service.end_later()
    timer.cancel()
    return timer.interval


def compile_cache(at: Place, name: str) -> FirstStepCaches:
    trust = Trust([TrustedKey(PublicKey(ADA.public, "ada"), "/keys/ada.pub")])
    environ = {"BOOTSEER_CACHE": os.fspath(at.folder / name)}
    return FirstStepCaches(KEY, environ, url=os.fspath(at.folder / "store"), trust=trust, signing_key=ADA)


def cache_bytes(at: Place) -> object:
    """By the size that is left after a seed."""
    with closing(compile_cache(at, "a")) as cache:
        for number in range(4):
            file = Path(cache.path, "inductor", f"a{number}", "code.py")
            file.parent.mkdir(parents=True)
            file.write_bytes(bytes(at.value // 2))
        cache.seed()
        return sum(file.stat().st_size for file in Path(cache.path).rglob("code.py"))


def cache_seed_s(at: Place) -> object:
    """By the limit that fetching gets, on a clock of its own."""
    given: list[Callable[[], bool]] = []

    def unpack(*_: object, has_time: Callable[[], bool]) -> Any:
        given.append(has_time)
        return SimpleNamespace(refused=[], files=0, size=0)

    with closing(compile_cache(at, "a")) as first, closing(compile_cache(at, "b")) as second:
        file = Path(first.path, "inductor", "ab", "code.py")
        file.parent.mkdir(parents=True)
        file.write_bytes(b"code")
        os.utime(file, (time.time(), time.time() - 60.0))
        assert first.capture(settle_s=0.0).files == 1
        now_s = time.monotonic()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(caches, "unpack", unpack)
            patch.setattr(caches, "time", SimpleNamespace(monotonic=lambda: now_s, time_ns=time.time_ns))
            second.seed()
            (has_time,) = given

            def is_over(after_s: float) -> bool:
                patch.setattr(caches, "time", SimpleNamespace(monotonic=lambda: now_s + after_s))
                return not has_time()

            return edge(at.value, is_over, 0.1)


# ---- checkpoints and health checks -----------------------------------------------------------------------------


def save_buffer_bytes(at: Place) -> object:
    geometry = Geometry(unit_bytes=MIN_UNIT_BYTES, stripes=1)
    writer = VersionWriter(MemoryStore("a"), "", "1", geometry=geometry)
    assert BUFFER_PART > 1
    return writer._buffers._room._value * MIN_UNIT_BYTES


def resolve_s(at: Place) -> object:
    return resolving.retry_policy().budget_s


def store_silence_s(at: Place) -> object:
    def is_given_up(after_s: float) -> bool:
        gone: list[object] = []
        answers = SimpleNamespace(say_alive=lambda: None, send=None)
        with selectors.DefaultSelector() as selector:
            loader = Loader(os.fspath(at.folder), selector, cast(Any, None), cast(Any, answers))
        loader._state, loader._awaited.is_waiting = State.LOADING, True
        at.patch.setattr(loader, "_memory", SimpleNamespace(is_filling=True, retry=lambda _: None))
        at.patch.setattr(loader, "_serve_own_path", lambda *why: gone.append(why))
        loader._awaited.plan([(0, 0)], time.monotonic() - after_s)
        loader._awaited.add_away([(0, 0)], "no answer", time.monotonic())
        loader._retry_units()
        return bool(gone)

    return edge(at.value, is_given_up)


def unfinished_s(at: Place) -> object:
    def is_deleted(age_s: float) -> bool:
        store = MemoryStore(uuid.uuid4().hex)
        version = aio.run_sync(new_version(store, "a"))
        aio.run_sync(store.publish(f"a/v-{version}/00000.s000", b"part"))
        now_s = time.time()
        return bool(aio.run_sync(collect_garbage(store, "a", keep=1, now_s=now_s + age_s)))

    return edge(at.value, is_deleted, 30.0)


def checks_at_once(at: Place) -> object:
    """By the checks that wait for each other."""

    def meet(number: int) -> list[Finding]:
        (at.folder / f"{number}").touch()
        end_s = time.monotonic() + 10.0
        while len(os.listdir(at.folder)) < at.value and time.monotonic() < end_s:
            time.sleep(0.005)
        count = len(os.listdir(at.folder))
        time.sleep(0.1)
        return [Finding("made", OK, f"{count}", "")]

    tasks = [Task("made", f"{number}", lambda number=number: meet(number)) for number in range(at.value)]  # type: ignore[misc]
    assert {each.what for found in run_tasks(tasks, 20.0) for each in found} == {f"{at.value}"}
    for name in os.listdir(at.folder):
        os.unlink(at.folder / name)
    late = Task("made", "late", lambda: [Finding("made", OK, f"{len(os.listdir(at.folder))}", "")])
    *_, (last,) = run_tasks([*tasks, late], 20.0)
    assert last.what == f"{at.value}", "it began after one of the others"
    return at.value


Seen = Callable[[Place], object]
SEEN: dict[str, tuple[tuple[float, float], Seen]] = {
    "launcher.max_backoff_s": ((2.5, 400.0), max_backoff_s),
    "launcher.attempts_without_progress": ((1, 7), attempts_without_progress),
    "launcher.machine_fault_s": ((60.0, 7200.0), machine_fault_s),
    "launcher.calm_s": ((60.0, 7200.0), calm_s),
    "launcher.hang_first_s": ((60.0, 7200.0), lambda at: hangs(at).first_s),
    "launcher.hang_busy_s": ((60.0, 7200.0), lambda at: hangs(at).busy_s),
    "launcher.hang_working_s": ((60.0, 7200.0), lambda at: hangs(at).working_s),
    "launcher.hang_stacks_s": ((2.0, 60.0), hang_stacks_s),
    "launcher.py_spy_s": ((0.5, 60.0), py_spy_s),
    "launcher.failure_records": ((1, 5000), failure_records),
    "launcher.event_backlog_bytes": ((2 << 20, 1 << 30), event_backlog_bytes),
    "launcher.checkpoint_silence_s": ((70.0, 600.0), checkpoint_silence_s),
    "launcher.image_silence_s": ((60.0, 7200.0), image_silence_s),
    "launcher.environment_silence_s": ((30.0, 150.0), environment_silence_s),
    "storage.timeout_s": ((1.5, 120.0), timeout_s),
    "storage.max_requests": ((3, 200), max_requests),
    "storage.io_threads": ((4, 9), io_threads),
    "storage.hdfs_avoid_s": ((5.0, 600.0), hdfs_avoid_s),
    "storage.upload_part_bytes": ((5 << 20, 64 << 20), upload_part_bytes),
    "blocks.unpack_threads": ((1, 32), unpack_threads),
    "blocks.store_rest_s": ((2.0, 600.0), store_rest_s),
    "mounts.idle_s": ((1.0, 3600.0), idle_s),
    "mounts.ready_s": ((1.0, 1.2), ready_s),
    "mounts.daemon_log_bytes": ((64 << 10, 1 << 20), daemon_log_bytes),
    "mounts.worker_silence_s": ((0.5, 0.7), worker_silence_s),
    "peers.max_connections": ((8, 11), max_connections),
    "peers.begin_s": ((0.1, 1.5), begin_s),
    "peers.stall_s": ((0.5, 12.0), stall_s),
    "peers.ranges_at_once": ((1, 100), ranges_at_once),
    "peers.spool_bytes": ((2 << 20, 1 << 40), spool_bytes),
    "env.setup_log_bytes": ((1 << 20, 1 << 40), setup_log_bytes),
    "env.unpack_processes": ((1, 64), unpack_processes_),
    "env.publish_s": ((10.0, 86_400.0), publish_s),
    "env.cache_bytes": ((1 << 20, 2 << 20), cache_bytes),
    "env.cache_seed_s": ((0.5, 500.0), cache_seed_s),
    "checkpoint.save_buffer_bytes": ((1 << 20, 1 << 30), save_buffer_bytes),
    "checkpoint.resolve_s": ((5.0, 500.0), resolve_s),
    "checkpoint.store_silence_s": ((5.0, 600.0), store_silence_s),
    "checkpoint.unfinished_s": ((60.0, 604_800.0), unfinished_s),
    "health.checks_at_once": ((1, 3), checks_at_once),
}


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    aio.close()


def test_each_limit_has_a_test_of_its_effect() -> None:
    assert list(SEEN) == PATHS


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("path", SEEN)
def test_the_code_sees_the_value_that_is_set(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, _, name = path.partition(".")
    values, seen = SEEN[path]
    for number, value in enumerate(values):
        monkeypatch.setenv(VARIABLE, f"{path}={value}")
        assert getattr(getattr(current(), package), name) == value
        folder = tmp_path / str(number)
        folder.mkdir()
        with monkeypatch.context() as patch:
            found = seen(Place(int(value) if is_whole(name) else float(value), folder, patch))
        assert found == value


# Its default is above what the default join_timeout allows.
OF_LAUNCHER = [path for path in SEEN if path.startswith("launcher.") and path != "launcher.environment_silence_s"]


@pytest.mark.parametrize("path", OF_LAUNCHER)
def test_without_a_value_the_code_uses_the_default(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    value = getattr(DEFAULTS.launcher, path.partition(".")[2])
    assert SEEN[path][1](Place(value, tmp_path, monkeypatch)) == value


def test_parts_that_are_made_without_limits_have_the_same_defaults() -> None:
    limits = DEFAULTS.launcher
    hang = HangSettings()
    assert (hang.first_s, hang.busy_s) == (limits.hang_first_s, limits.hang_busy_s)
    assert (hang.working_s, hang.stacks_s) == (limits.hang_working_s, limits.hang_stacks_s)
    assert (Exclusion()._again_s, Ladder()._calm_s) == (limits.machine_fault_s, limits.calm_s)
    assert FailureNotes("job")._max_pages == limits.failure_records
