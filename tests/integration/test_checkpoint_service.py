"""A node's arena with real processes: read once, written by nobody, gone at the end, and no rank depends on it."""

from __future__ import annotations

import functools
import json
import mmap
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from bootseer import aio
from bootseer.checkpoint.io.arena import READY
from bootseer.checkpoint.io.arena_source import ArenaSource, connect
from bootseer.checkpoint.io.inputs import MemoryInput
from bootseer.checkpoint.io.source import Request, Source
from bootseer.checkpoint.writing.writer import Geometry, write_version
from bootseer.errors import CheckpointError, StorageError
from bootseer.storage.local.store import LocalStore
from tests.integration.service_driver import LIMIT_S, Start, services, wait_until
from tests.testing.faulty_http import FaultyHttpServer
from tests.unit.bootseer.checkpoint.made_files import dcp_metadata, safetensors_file

Attach = Callable[[dict[str, str]], ArenaSource]


@functools.cache
def payload() -> bytes:
    return random.Random(1).randbytes(40 << 20)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Start]:
    yield from services(tmp_path)


@pytest.fixture
def server() -> Iterator[FaultyHttpServer]:
    with FaultyHttpServer({"model.bin": payload()}) as running:
        yield running


@pytest.fixture
def attach() -> Iterator[Attach]:
    found: list[ArenaSource] = []

    def open_arena(answer: dict[str, str]) -> ArenaSource:
        source = connect(answer["address"], answer["digest"])
        assert source is not None
        found.append(source)
        return source

    yield open_arena
    for source in found:
        source.close()
    aio.close()


def is_ready(source: ArenaSource, path: str) -> bool:
    """The first unit of a file."""
    return source._states[source._first_unit[source._numbers[path]]] == READY


def write(path: str) -> None:
    fd = os.open(path, os.O_RDWR)
    try:
        os.write(fd, b"x")
    finally:
        os.close(fd)


def read(source: Source, path: str) -> bytes:
    target = bytearray(source.files[path].size)
    source.read([Request(path, 0, memoryview(target))])
    return bytes(target)


def test_a_checkpoint_is_read_once_for_all_ranks(service: Start, server: FaultyHttpServer) -> None:
    answer = service(server.url_of("model.bin")).load()
    assert answer["did"] == "ready"
    script = (
        "import sys; from bootseer.checkpoint.io.arena_source import connect\n"
        "s = connect(sys.argv[1], sys.argv[2]); v = s.map('model.bin', 0, s.files['model.bin'].size)\n"
        "import hashlib; print(hashlib.sha256(v).hexdigest()); s.close()"
    )
    argv = [sys.executable, "-c", script, answer["address"], answer["digest"]]
    ranks = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    sums = {rank.communicate(timeout=60)[0] for rank in ranks}
    assert len(sums) == 1
    assert Path(answer["path"]).read_bytes() == payload()  # code that knows nothing of it
    assert server.served_bytes["model.bin"] <= 1.01 * len(payload())


def test_nobody_can_write_to_it(service: Start, attach: Attach, tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(payload()[:100_000])
    answer = service(str(tmp_path / "model.bin")).load()
    path = answer["path"]
    with pytest.raises(PermissionError):
        write(path)
    with pytest.raises(PermissionError), open(path, "r+b") as file:
        mmap.mmap(file.fileno(), 4096)
    with pytest.raises(PermissionError):
        os.truncate(path, 10)
    one, two = attach(answer), attach(answer)
    view = one.map("model.bin", 0, 100_000)
    assert view is not None
    view[:4] = b"mine"
    assert read(two, "model.bin") == payload()[:100_000]
    assert Path(path).read_bytes() == payload()[:100_000]
    one.close()
    two.close()
    assert bytes(view[:4]) == b"mine"  # lives as long as somebody looks at it


@pytest.mark.system
@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user: needs root")
def test_another_user_gets_nothing(service: Start, tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(payload()[:5000])
    answer = service(str(tmp_path / "model.bin")).load()
    script = (
        "import os, socket, sys; os.setuid(65534)\n"
        "for act in (lambda: socket.socket(socket.AF_UNIX).connect(sys.argv[1]), lambda: open(sys.argv[2])):\n"
        "    try: act(); print('in')\n"
        "    except PermissionError: print('out')\n"
    )
    argv = [sys.executable, "-c", script, answer["address"], answer["path"]]
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout == "out\nout\n"


def test_another_version_is_not_served(service: Start, tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(payload()[:5000])
    answer = service(str(tmp_path / "model.bin")).load()
    assert connect(answer["address"], "0" * 64) is None
    with pytest.raises(CheckpointError, match="does not answer"):
        connect(str(tmp_path / "nothing"), answer["digest"])


def test_a_reader_that_dies_is_replaced(service: Start, attach: Attach, server: FaultyHttpServer) -> None:
    server.rate = 2e6
    running = service(server.url_of("model.bin"))
    found = running.resolve()
    running.begin_load(found)
    wait_until(lambda: server.served_bytes["model.bin"] > 100_000, "it reads")
    [filler] = running.children()
    os.kill(filler, signal.SIGKILL)
    server.rate = None
    answer = {**running.hear("ready", "direct"), "digest": found["digest"]}
    assert answer["did"] == "ready"
    assert read(attach(answer), "model.bin") == payload()


def test_without_the_service_what_is_there_stays_and_the_rest_is_read(
    service: Start, attach: Attach, tmp_path: Path, server: FaultyHttpServer
) -> None:
    running = service(server.url_of("model.bin"))
    answer = running.load()
    source = attach(answer)
    assert read(source, "model.bin") == payload()
    view = source.map("model.bin", 0, 100)
    running.process.send_signal(signal.SIGKILL)
    running.process.wait()
    assert read(source, "model.bin") == payload()
    assert view is not None and bytes(view) == payload()[:100]
    with pytest.raises(CheckpointError):
        connect(answer["address"], answer["digest"])
    assert source.statistics()["read_bytes"] == 0
    source.close()
    for left in (tmp_path / "tmp").iterdir():  # SIGKILL leaves the folder with its links
        subprocess.run(["rm", "-r", str(left)], check=True)


def test_what_the_store_cannot_give_is_an_error(service: Start, tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    pinned = aio.run_sync(
        write_version(store, "ckpt", [("f", MemoryInput([payload()[:50_000]]))], geometry=Geometry(4096, 2))
    )
    stripe = tmp_path / pinned.files[0].stripes[0]
    stripe.write_bytes(bytes(stripe.stat().st_size))
    answer = service(str(tmp_path / "ckpt")).load()
    assert (answer["did"], answer["kind"], answer["digest"]) == ("failed", "damaged", pinned.digest)
    assert "CRC32C" in answer["why"] and "unit 0 is damaged" in answer["why"]


def test_too_little_memory(service: Start, tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(payload())
    running = service(str(tmp_path / "model.bin"))
    running.order("start", url=running.url, memory_bytes=1 << 20, arena_bytes=0, keep=False)
    answer = running.load()
    assert (answer["did"], answer["path"]) == ("direct", str(tmp_path / "model.bin"))
    assert "do not fit in the arena" in answer["why"]


def test_nothing_there_and_nobody_there(service: Start, tmp_path: Path) -> None:
    assert service(str(tmp_path / "nothing")).resolve()["did"] == "absent"


def test_the_next_attempt_finds_it_there(service: Start, attach: Attach, server: FaultyHttpServer) -> None:
    running = service(server.url_of("model.bin"))
    first = running.load()
    again = running.load()
    assert (again["did"], again["digest"]) == ("ready", first["digest"])
    assert read(attach(again), "model.bin") == payload()
    assert server.served_bytes["model.bin"] <= 1.01 * len(payload())


def test_a_newer_version_takes_its_place(service: Start, attach: Attach, tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))

    def save(data: bytes) -> None:
        aio.run_sync(write_version(store, "ckpt", [("f", MemoryInput([data]))], geometry=Geometry(4096, 2)))

    save(payload()[:50_000])
    running = service(str(tmp_path / "ckpt"))
    first = running.load()
    old = attach(first)
    view = old.map("f", 0, 50_000)
    save(payload()[50_000:100_000])
    second = running.load()
    assert first["digest"] != second["digest"]
    assert read(attach(second), "f") == payload()[50_000:100_000]
    assert view is not None and bytes(view) == payload()[:50_000]  # the last attempt's tensors do not change


def test_what_was_mapped_by_name_does_not_change_with_a_newer_version(service: Start, tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))

    def save(data: bytes) -> None:
        aio.run_sync(write_version(store, "ckpt", [("f", MemoryInput([data]))], geometry=Geometry(4096, 2)))

    save(payload()[:50_000])
    running = service(str(tmp_path / "ckpt"))
    with open(f"{running.load()['path']}/f", "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    save(payload()[50_000:100_000])
    assert Path(running.load()["path"], "f").read_bytes() == payload()[50_000:100_000]
    assert mapped[:] == payload()[:50_000]
    mapped.close()


def test_after_the_first_step_files_are_where_they_were(service: Start, tmp_path: Path) -> None:
    directory = tmp_path / "ckpt"
    directory.mkdir()
    (directory / "config.json").write_bytes(b"{}")
    (directory / "model.bin").write_bytes(payload())
    running = service(str(directory))
    path = Path(running.load()["path"])
    assert path != directory
    running.order("release")
    running.order("statistics")
    assert running.hear("statistics")["arena_bytes"] == 0
    assert (path / "config.json").read_bytes() == b"{}" and (path / "model.bin").read_bytes() == payload()


def test_a_sharded_checkpoint_is_read_by_what_ranks_ask_for(
    service: Start, attach: Attach, tmp_path: Path
) -> None:
    files = {f"__{rank}_0.distcp": payload()[: 20 << 20] for rank in range(3)}
    files[".metadata"] = dcp_metadata({name: len(data) for name, data in files.items()})
    directory = tmp_path / "ckpt"
    directory.mkdir()
    for name, data in files.items():
        (directory / name).write_bytes(data)
    for kind in ("first", "recorded"):
        running = service(str(directory))
        answer = running.load(nnodes=4)
        assert answer["did"] == "ready" and answer["path"] == str(directory)
        source = attach(answer)
        if kind == "recorded":
            wait_until(partial(is_ready, source, "__1_0.distcp"), "it is read ahead")
        assert read(source, "__1_0.distcp") == files["__1_0.distcp"]
        assert read(source, ".metadata") == files[".metadata"]
        assert not is_ready(source, "__0_0.distcp") and not is_ready(source, "__2_0.distcp")
        running.order("release")
        running.close()


def test_what_another_node_does_not_see_yet_is_waited_for(service: Start, tmp_path: Path) -> None:
    """As with a network file system, whose clients show an old listing for a while."""
    directory, hidden = tmp_path / "ckpt", tmp_path / "hidden"
    for step in (20, 30):
        (directory / f"step-{step}").mkdir(parents=True)
        (directory / f"step-{step}" / "model.bin").write_bytes(payload()[:step])
    newest = service(str(directory)).resolve()
    (directory / "step-30").rename(hidden)
    running = service(str(directory))
    assert running.resolve()["version"] == "step-20"
    running.begin_load(newest)
    wait_until(running.children, "somebody looks for it")
    hidden.rename(directory / "step-30")
    answer = running.hear("ready", "direct")
    assert answer["did"] == "ready" and Path(answer["path"], "model.bin").read_bytes() == payload()[:30]


@pytest.mark.parametrize(
    "where",
    [
        pytest.param("Ignoring()", id="where-exceptions-are-ignored"),
        pytest.param("os.fork = lambda: (pid := fork()) and (stop() or pid)", id="at-a-fork"),
        pytest.param("stop()", id="in-a-request"),
    ],
)
def test_it_ends_on_sigterm_wherever_that_comes(where: str, tmp_path: Path) -> None:
    code = f"""
import os, signal
from bootseer.checkpoint.service import service
fork, receive = os.fork, service.CheckpointService._receive_requests
def stop():
    os.kill(os.getpid(), signal.SIGTERM)
class Ignoring:
    def __del__(self):
        stop()
        for _ in range(100): pass
def received(self):
    {where}
    receive(self)
service.CheckpointService._receive_requests = received
service.main()
"""
    (tmp_path / "model.bin").write_bytes(payload()[:30])
    running = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, bufsize=0,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert running.stdin is not None and running.stderr is not None
    with running.stdin, running.stderr:
        for order in ({"do": "start", "url": f"{tmp_path}/model.bin", "memory_bytes": None}, {"do": "resolve"}):
            running.stdin.write(json.dumps(order).encode() + b"\n")
        assert running.wait(LIMIT_S) == 0
        assert running.stderr.read() == b""
    assert os.listdir(tmp_path) == ["model.bin"]


def test_a_client_that_lies_only_loses_its_connection(service: Start, attach: Attach, tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(payload()[:5000])
    answer = service(str(tmp_path / "model.bin")).load()
    for line in (b"{}\n", b"[]\n", b"\xff\n", b'{"do":"want","id":1,"units":[[9,9]]}\n',
                 b'{"do":"asked","spans":[[0,0,999999]]}\n'):  # fmt: skip
        attach(answer)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(LIMIT_S)
            connection.connect(answer["address"])
            connection.sendall(line)
            assert connection.recv(1) == b""
    assert read(attach(answer), "model.bin") == payload()[:5000]


def test_without_a_fallback_a_lost_service_is_an_error(
    service: Start, attach: Attach, server: FaultyHttpServer, tmp_path: Path
) -> None:
    files = {".metadata": dcp_metadata({"big.distcp": len(payload())}), "big.distcp": payload()}
    directory = tmp_path / "ckpt"
    directory.mkdir()
    for name, data in files.items():
        (directory / name).write_bytes(data)
    running = service(str(directory))
    source = attach(running.load())
    running.process.kill()
    running.process.wait()
    with pytest.raises(StorageError, match="arena is gone"):
        read(source, "big.distcp")
    for left in (tmp_path / "tmp").iterdir():
        subprocess.run(["rm", "-r", str(left)], check=True)


def test_of_a_model_that_is_there_twice_one_is_read(service: Start, tmp_path: Path) -> None:
    """The other file can be opened all the same, then and after the memory was given back."""
    directory = tmp_path / "ckpt"
    directory.mkdir()
    whole, other = safetensors_file(4 << 20), safetensors_file(4 << 20, "y")
    (directory / "model.safetensors").write_bytes(whole)
    (directory / "consolidated.safetensors").write_bytes(other)
    (directory / "config.json").write_bytes(b"{}")
    running = service(str(directory))
    answer = running.load()
    assert answer["did"] == "ready" and answer["path"] != str(directory)
    running.order("statistics")
    assert 4 << 20 <= running.hear("statistics")["taken_bytes"] < 5 << 20
    for when in ("in memory", "given back"):
        assert Path(answer["path"], "model.safetensors").read_bytes() == whole, when
        assert Path(answer["path"], "consolidated.safetensors").read_bytes() == other
        running.order("release")
