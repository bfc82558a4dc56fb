"""What ranks and savers do with a node's arena: parts of large checkpoints, saves left there, bad luck."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from bootseer import aio
from bootseer.checkpoint.io import arena_source
from bootseer.checkpoint.io.arena_source import ArenaSource, connect
from bootseer.checkpoint.io.inputs import MemoryInput, Stream
from bootseer.checkpoint.io.source import Request, Source
from bootseer.checkpoint.opening import open_source
from bootseer.checkpoint.versions.resolve import Pinned
from bootseer.checkpoint.writing.saved_units import VARIABLE, SavedUnits
from bootseer.checkpoint.writing.writer import Geometry, write_version
from bootseer.storage.local.store import LocalStore
from tests.integration.service_driver import ServiceProcess, arena_descriptors, wait_until
from tests.unit.bootseer.checkpoint.made_files import dcp_metadata

MIB = 1 << 20
DATA = random.Random(2).randbytes(20 * MIB)
SHARDS = {f"__{rank}_0.distcp": DATA[rank:] + DATA[:rank] for rank in range(3)}
SHARDS[".metadata"] = dcp_metadata({name: len(DATA) for name in SHARDS})


class Node:
    """Keepers of one test and the ranks that attach to them."""

    def __init__(self, folder: Path) -> None:
        self._directory = folder
        self._services: list[ServiceProcess] = []
        self._sources: list[Source] = []

    def start(self, url: str | Path, **start: object) -> ServiceProcess:
        service = ServiceProcess(self._directory, str(url))
        self._services.append(service)
        if start:
            order = {"memory_bytes": None, "arena_bytes": 0, "keep": False, "local_world_size": 2, **start}
            service.order("start", url=str(url), **order)
            service.hear("listening")
            service.hear("listening")  # the driver has sent one as well
        return service

    def attach(self, answer: dict[str, str], fallback: Callable[[], Source] | None = None) -> ArenaSource:
        source = connect(answer["address"], answer["digest"], fallback)
        assert source is not None
        self._sources.append(source)
        return source

    def close(self) -> None:
        for source in self._sources:
            source.close()
        aio.close()
        for service in self._services:
            service.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    found = Node(tmp_path)
    yield found
    found.close()
    assert "Traceback" not in (tmp_path / "keeper.err").read_text()
    assert os.listdir(tmp_path / "tmp") == []


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    directory = tmp_path / "ckpt"
    directory.mkdir()
    for name, data in SHARDS.items():
        (directory / name).write_bytes(data)
    return directory


def read(source: Source, path: str, start: int = 0, end: int | None = None) -> bytes:
    target = bytearray((source.files[path].size if end is None else end) - start)
    source.read([Request(path, start, memoryview(target))])
    return bytes(target)


def statistics(service: ServiceProcess) -> dict[str, int]:
    service.order("statistics")
    return service.hear("statistics")


def save(directory: Path, data: bytes, stripes: int = 1) -> Pinned:
    """As a rank does that was started with the variable."""
    half = len(data) // 2

    async def chunks():  # type: ignore[no-untyped-def]
        for start in range(half, len(data), 10_000):
            yield data[start : start + 10_000]

    sources = [("a", MemoryInput([data[:half]])), ("b", Stream(chunks()))]
    store = LocalStore(str(directory))
    return aio.run_sync(write_version(store, "ckpt", sources, geometry=Geometry(64 << 10, stripes)))


def ruin(directory: Path, pinned: Pinned) -> None:
    """Whoever reads the stripes now gets zeros."""
    for file in pinned.files:
        for stripe in file.stripes:
            path = directory / stripe
            path.write_bytes(bytes(path.stat().st_size))


# ---- parts ---------------------------------------------------------------------------------------------------


def test_only_what_ranks_ask_for_is_fetched_and_the_next_load_knows_it(node: Node, shards: Path) -> None:
    service = node.start(shards)
    answer = service.load(nnodes=3, group_rank=1)
    assert statistics(service)["ready_units"] <= 1  # the metadata
    source = node.attach(answer)
    assert read(source, "__1_0.distcp", 5 * MIB, 9 * MIB) == SHARDS["__1_0.distcp"][5 * MIB : 9 * MIB]
    assert read(source, ".metadata") == SHARDS[".metadata"]
    assert statistics(service)["ready_units"] == 1 + 4
    source.close()
    service.order("release")
    assert statistics(service)["arena_bytes"] == 0
    again = service.load(nnodes=3, group_rank=1)
    wait_until(lambda: statistics(service)["ready_units"] == 1 + 4, "what was read is read ahead")
    assert read(node.attach(again), "__1_0.distcp", 5 * MIB, 9 * MIB) == SHARDS["__1_0.distcp"][5 * MIB : 9 * MIB]
    assert statistics(service)["ready_units"] == 1 + 4


def test_what_does_not_fit_is_read_from_the_store(node: Node, shards: Path) -> None:
    service = node.start(shards, memory_bytes=8 * MIB)
    answer = service.load(nnodes=3)
    assert answer["did"] == "ready"
    opened: list[Source] = []

    def fallback() -> Source:
        opened.append(open_source(shards).source)
        return opened[-1]

    source = node.attach(answer, fallback)
    assert read(source, "__0_0.distcp", 0, 6 * MIB) == SHARDS["__0_0.distcp"][: 6 * MIB]
    assert not opened
    for path, data in SHARDS.items():
        assert read(source, path) == data
    assert opened
    assert statistics(service)["taken_bytes"] <= 8 * MIB


def test_many_threads_of_a_rank_read_at_once(node: Node, shards: Path) -> None:
    source = node.attach(node.start(shards).load(nnodes=3))
    found: dict[int, bytes] = {}

    def work(number: int) -> None:
        path = f"__{number % 3}_0.distcp"
        target = bytearray(len(DATA))
        view = memoryview(target)
        cuts = [0, 1, 4095, 70_000, 3 * MIB + 5, 11 * MIB, len(DATA)]
        source.read([Request(path, a, view[a:b]) for a, b in pairwise(cuts)])
        found[number] = bytes(target)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found[number] == SHARDS[f"__{number % 3}_0.distcp"] for number in range(6))


def test_when_all_ranks_have_their_part_the_memory_is_given_up(node: Node, shards: Path) -> None:
    service = node.start(shards, local_world_size=2, quiet_s=0.0)
    answer = service.load(nnodes=3)
    script = (
        "import sys; from bootseer.checkpoint.io.arena_source import connect\n"
        "from bootseer.checkpoint.io.source import Request\n"
        "s = connect(sys.argv[1], sys.argv[2]); s.read([Request('.metadata', 0, memoryview(bytearray(9)))])\n"
        "if sys.argv[3]: s.close()"
    )

    def run(rank: str, closes: str) -> None:
        argv = [sys.executable, "-c", script, answer["address"], answer["digest"], closes]
        subprocess.run(argv, check=True, env={**os.environ, "LOCAL_RANK": rank})

    run("0", "yes")
    run("1", "")  # dies before it has all
    assert statistics(service)["arena_bytes"] > 0
    run("1", "yes")
    wait_until(lambda: statistics(service)["arena_bytes"] == 0, "released")


def test_thousands_of_files_and_few_descriptors(node: Node, tmp_path: Path) -> None:
    directory = tmp_path / "many"
    directory.mkdir()
    for number in range(1500):
        (directory / f"layer-{number:05d}-with-a-name-of-some-length.bin").write_bytes(b"%d" % number * 10)
    answer = node.start(directory).load()
    assert answer["did"] == "ready"
    assert (Path(answer["path"]) / "layer-01499-with-a-name-of-some-length.bin").read_bytes() == b"1499" * 10
    script = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "from bootseer.checkpoint.io.arena_source import connect; s = connect(sys.argv[1], sys.argv[2])\n"
        "views = [s.map(f'layer-{n:05d}-with-a-name-of-some-length.bin', 0, 4) for n in range(40)]\n"
        "print(bytes(views[7]))"
    )
    argv = [sys.executable, "-c", script, answer["address"], answer["digest"]]
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout == "b'7777'\n"


# ---- views ---------------------------------------------------------------------------------------------------


def test_what_a_rank_does_to_its_tensors_it_does_not_read_again(node: Node, tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(DATA)
    source = node.attach(node.start(tmp_path / "model.bin").load())
    first = source.map("model.bin", 5000, 100_000)
    assert first is not None
    first[:] = bytes(100_000)
    second = source.map("model.bin", 5000, 100_000)
    assert second is not None and bytes(second) == DATA[5000:105_000]
    assert read(source, "model.bin", 0, 200_000) == DATA[:200_000]
    assert bytes(first) == bytes(100_000)


def test_a_view_outlives_source_and_service_and_then_its_memory_goes(node: Node, tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(DATA)
    service = node.start(tmp_path / "model.bin")
    source = node.attach(service.load())
    view = source.map("model.bin", 0, len(DATA))
    assert view is not None
    part = view[MIB : 2 * MIB]
    source.close()
    service.close()
    del view
    assert bytes(part) == DATA[MIB : 2 * MIB]
    assert "bootseer-arena" in Path("/proc/self/maps").read_text()
    del part
    assert "bootseer-arena" not in Path("/proc/self/maps").read_text()


def test_memory_that_a_rank_lets_go_of_is_given_back(node: Node, tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(DATA)
    service = node.start(tmp_path / "model.bin")
    opened: list[Source] = []

    def fallback() -> Source:
        opened.append(open_source(tmp_path / "model.bin").source)
        return opened[-1]

    source = node.attach(service.load(), fallback)
    assert read(source, "model.bin", 0, 100) == DATA[:100]
    with source._opened(0) as fd:  # another thread is at it
        source.let_go()
        assert fd is not None and os.pread(fd, 100, 0) == DATA[:100]
        assert arena_descriptors(os.getpid()) == [fd]
    assert arena_descriptors(os.getpid()) == []
    assert not opened
    assert read(source, "model.bin") == DATA and opened
    source.let_go()


def test_a_forked_child_asks_for_itself(node: Node, shards: Path) -> None:
    answer = node.start(shards).load(nnodes=3)
    script = (
        "import os, sys; from bootseer.checkpoint.io.arena_source import connect\n"
        "s = connect(sys.argv[1], sys.argv[2]); s.map('__0_0.distcp', 0, 10)\n"
        "pid = os.fork()\n"
        "name = '__1_0.distcp' if pid else '__2_0.distcp'\n"
        "ok = bytes(s.map(name, 0, 10)) == open(os.path.join(sys.argv[3], name), 'rb').read(10)\n"
        "sys.exit(not ok or (os.waitpid(pid, 0)[1] if pid else 0))"
    )
    argv = [sys.executable, "-c", script, answer["address"], answer["digest"], str(shards)]
    subprocess.run(argv, check=True)


# ---- saves ---------------------------------------------------------------------------------------------------


def test_a_restart_from_the_newest_save_reads_nothing(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, DATA[:MIB])
    service = node.start(tmp_path / "ckpt", arena_bytes=4 * MIB)
    old = node.attach(service.load())
    view = old.map("a", 0, MIB // 2)
    monkeypatch.setenv(VARIABLE, saves(service))
    pinned = save(tmp_path, DATA[MIB : 3 * MIB], stripes=2)
    ruin(tmp_path, pinned)
    assert statistics(service)["saved_bytes"] == 2 * MIB
    answer = service.load()
    assert answer["did"] == "ready" and answer["version"] == pinned.version
    source = node.attach(answer)
    assert read(source, "a") + read(source, "b") == DATA[MIB : 3 * MIB]
    assert (Path(answer["path"]) / "b").read_bytes() == DATA[2 * MIB : 3 * MIB]
    assert view is not None and bytes(view) == DATA[: MIB // 2]
    source.map("a", 0, MIB)[:] = bytes(MIB)  # type: ignore[index]
    service.order("release")
    wait_until(lambda: statistics(service)["arena_bytes"] == 0, "it is given back once its files are elsewhere")
    again = node.attach(service.load())  # the memory is the saves': it is there for the next failure
    assert read(again, "a") + read(again, "b") == DATA[MIB : 3 * MIB]


def saves(service: ServiceProcess) -> str:
    found = [each["saves"] for each in service.heard if each["did"] == "listening"]
    assert found[-1]
    return str(found[-1])


def test_what_a_saver_left_is_not_trusted(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not eager: a slow look ahead would find the saved version and take what has been left so far.
    service = node.start(tmp_path / "ckpt", arena_bytes=4 * MIB, is_eager=False)
    pinned = save(tmp_path, DATA[:MIB])
    left = SavedUnits(saves(service), pinned.version)
    assert left.leave("a", 64 << 10, 0, memoryview(bytes(64 << 10)))  # not what was written
    assert left.leave("a", 64 << 10, 1, memoryview(DATA)[64 << 10 : 128 << 10])
    assert left.leave("no such file", 4096, 0, memoryview(b"x"))
    left.close()
    source = node.attach(service.load())
    assert read(source, "a") + read(source, "b") == DATA[:MIB]


def test_the_oldest_save_makes_room_for_the_newest(node: Node, tmp_path: Path) -> None:
    service = node.start(tmp_path / "ckpt", arena_bytes=MIB)
    (tmp_path / "ckpt").mkdir()
    unit = memoryview(DATA)[: 512 << 10]
    for number in range(5):
        left = SavedUnits(saves(service), f"{number:020d}-000000000000")
        assert [left.leave("a", len(unit), at, unit) for at in range(3)] == [True, True, False]
        assert statistics(service)["saved_bytes"] == MIB
    older = SavedUnits(saves(service), f"{1:020d}-000000000000")
    assert not older.leave("a", len(unit), 0, unit)


def test_a_saver_that_lies_only_loses_its_connection(node: Node, tmp_path: Path) -> None:
    service = node.start(tmp_path / "ckpt", arena_bytes=MIB)
    (tmp_path / "ckpt").mkdir()
    order = '{"version": "%s", "path": "%s", "unit_bytes": 4096, "unit": %d, "length": %d}\n'
    version = f"{1:020d}-000000000000"
    for line in ("[]\n", "{}\n", order % ("1", "a", 0, 1), order % (version, "../a", 0, 1),
                 order % (version, "a", -1, 1), order % (version, "a", 0, 5000),
                 order % (version, "a", 1 << 60, 1), order % (version, "a", 0, 4000)):  # fmt: skip
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(20)
            connection.connect(saves(service))
            buffer = os.memfd_create("buffer")
            os.write(buffer, b"x" * 100)
            socket.send_fds(connection, [b"\n"], [buffer])
            os.close(buffer)
            connection.sendall(line.encode())
            assert connection.recv(1) == b"", line
    assert statistics(service)["saved_bytes"] == 0


def test_a_save_does_not_need_the_service(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nobody"))
    save(tmp_path, DATA[:MIB])
    service = node.start(tmp_path / "ckpt")
    source = node.attach(service.load())
    assert read(source, "a") + read(source, "b") == DATA[:MIB]


# ---- bad luck ------------------------------------------------------------------------------------------------


def test_a_service_that_says_nothing_is_left(node: Node, shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_source, "SILENCE_LIMIT_S", 0.3)
    service = node.start(shards)
    source = node.attach(service.load(nnodes=3), lambda: open_source(shards).source)
    service.process.send_signal(signal.SIGSTOP)
    try:
        assert read(source, "__0_0.distcp") == SHARDS["__0_0.distcp"]
    finally:
        service.process.send_signal(signal.SIGCONT)


def test_what_a_killed_service_left_goes_with_the_next(node: Node, tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(DATA[:5000])
    other = node.start(tmp_path / "model.bin")
    answer = other.load()
    killed = node.start(tmp_path / "model.bin")
    killed.load()
    killed.process.kill()
    killed.process.wait()
    assert len(os.listdir(tmp_path / "tmp")) == 2
    node.start(tmp_path / "model.bin").load()
    assert len(os.listdir(tmp_path / "tmp")) == 2
    assert Path(answer["path"]).read_bytes() == DATA[:5000]


@pytest.mark.system
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts: needs root")
def test_a_tiny_dev_shm_does_not_matter(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.bin").write_bytes(DATA)
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\nexec unshare -m sh -c 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec \"$@\"' sh "
        f'{sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    answer = node.start(tmp_path / "model.bin").load()
    assert answer["did"] == "ready"
    assert Path(answer["path"]).read_bytes() == DATA
