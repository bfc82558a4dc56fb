"""Code of several nodes that opens files by name: a mount below the arena, which reads what is read through it."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from bootseer import aio
from bootseer.checkpoint.io.arena import READY
from bootseer.checkpoint.io.arena_source import connect
from bootseer.checkpoint.io.inputs import MemoryInput
from bootseer.checkpoint.writing.writer import Geometry, write_version
from bootseer.mounts.faults import path_beside, read_faults
from bootseer.storage.local.store import LocalStore
from tests.integration.mounting import need_fuse
from tests.integration.service_driver import (
    ServiceProcess,
    Start,
    arena_descriptors,
    descriptors,
    services,
    wait_until,
)
from tests.testing.faulty_http import FaultyHttpServer

pytestmark = pytest.mark.system

A, B = random.Random(1).randbytes(8 << 20), random.Random(2).randbytes(8 << 20)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Start]:
    need_fuse()
    yield from services(tmp_path)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Two files, striped: they can be opened by name nowhere."""
    files = [(name, MemoryInput([data])) for name, data in (("a/model.bin", A), ("b/model.bin", B))]
    aio.run_sync(write_version(LocalStore(str(tmp_path)), "ckpt", files, geometry=Geometry(1 << 20, 2)))
    return str(tmp_path / "ckpt")


def read(answer: dict[str, str], name: str) -> bytes:
    return Path(answer["path"], name).read_bytes()


def ready_units(answer: dict[str, str], name: str) -> int:
    source = connect(answer["address"], answer["digest"])
    assert source is not None
    try:
        first = source._first_unit[source._numbers[name]]
        return bytes(source._states[first : first + len(A) // source._unit_bytes[0]]).count(READY)
    finally:
        source.close()


def test_each_node_reads_what_its_ranks_open(service: Start, url: str) -> None:
    for kind in ("first", "recorded"):
        running = service(url, nodes=2)
        answer = running.load(nnodes=2)
        assert answer["did"] == "ready" and os.path.ismount(answer["path"])
        if kind == "recorded":
            wait_until(partial(ready_units, answer, "a/model.bin"), "it is read ahead")
        assert read(answer, "a/model.bin") == A
        assert ready_units(answer, "b/model.bin") == 0
        with pytest.raises(OSError):
            Path(answer["path"], "a/model.bin").write_bytes(b"x")
        running.order("release")
        running.close()


def test_memory_is_given_back_while_the_mount_stays(service: Start, url: str) -> None:
    running = service(url, nodes=2)
    answer = running.load(nnodes=2)
    assert read(answer, "a/model.bin") == A
    server = mount_process(running)
    assert arena_descriptors(server)
    running.order("release")
    wait_until(lambda: not arena_descriptors(server), "it lets go")
    assert (read(answer, "b/model.bin"), read(answer, "a/model.bin")) == (B, A)
    assert "reading" in running.errors() and "its memory was released" in running.errors()


def test_links_into_memory_that_is_given_back_lead_to_a_mount(service: Start, url: str) -> None:
    running = service(url)
    answer = running.load()
    assert not os.path.ismount(answer["path"]) and read(answer, "a/model.bin") == A
    running.order("release")
    running.order("release")
    wait_until(lambda: statistics(running)["arena_bytes"] == 0, "it is given back")
    assert (read(answer, "b/model.bin"), read(answer, "a/model.bin")) == (B, A)
    again = running.load()
    assert again["path"] != answer["path"] and read(again, "a/model.bin") == A


def test_a_file_that_does_not_fit_is_a_file(service: Start) -> None:
    with FaultyHttpServer({"model.bin": A}) as server:
        running = service(server.url_of("model.bin"))
        running.order("start", url=running.url, memory_bytes=1 << 20, arena_bytes=0, keep=False)
        answer = running.load()
        assert answer["did"] == "direct" and os.path.basename(answer["path"]) == "model.bin"
        assert Path(answer["path"]).read_bytes() == A


def test_a_reader_that_was_replaced_keeps_no_mount(service: Start, url: str) -> None:
    running = service(url, nodes=2)
    answer = running.load(nnodes=2)
    server = mount_process(running)
    [filler] = [pid for pid in running.children() if pid != server]
    os.kill(filler, signal.SIGKILL)
    wait_until(lambda: set(running.children()) - {server, filler}, "another one reads")
    assert read(answer, "a/model.bin") == A
    [filler] = [pid for pid in running.children() if pid != server]
    of_filler, of_service = (set(descriptors(pid).values()) for pid in (filler, running.process.pid))
    running.order("load", version="", digest="0" * 64, attempt=1, world_size=4, nnodes=2, group_rank=0)
    wait_until(lambda: not Path(f"/proc/{server}").exists(), "the mount ends")
    closed = of_service - set(descriptors(running.process.pid).values())
    assert closed and not closed & of_filler


def mount_process(running: ServiceProcess) -> int:
    [found] = [pid for pid in running.children() if b"rank_mount" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return found


def statistics(running: ServiceProcess) -> dict[str, int]:
    running.order("statistics")
    return running.hear("statistics")


def test_what_was_read_whole_is_there_before_ranks_start(service: Start, url: str) -> None:
    running = service(url, nodes=2)
    answer = running.load(nnodes=2)
    assert (read(answer, "a/model.bin"), read(answer, "b/model.bin")) == (A, B)
    running.order("release")
    running.close()
    answer = service(url, nodes=2).load(nnodes=2)
    assert answer["did"] == "ready" and not os.path.ismount(answer["path"])
    assert (read(answer, "a/model.bin"), read(answer, "b/model.bin")) == (A, B)


def test_the_next_attempt_has_a_mount_of_its_own(service: Start, url: str, tmp_path: Path) -> None:
    running = service(url, nodes=2)
    assert read(running.load(nnodes=2), "a/model.bin") == A
    assert read(running.load(nnodes=2), "a/model.bin") == A
    newer = [(name, MemoryInput([B])) for name in ("a/model.bin", "b/model.bin")]
    aio.run_sync(write_version(LocalStore(str(tmp_path)), "ckpt", newer, geometry=Geometry(1 << 20, 2)))
    assert read(running.load(nnodes=2), "a/model.bin") == B


def test_what_cannot_be_read_is_reported_before_the_reader_has_its_error(service: Start, url: str) -> None:
    running = service(url, nodes=2)
    answer = running.load(nnodes=2)
    for path in Path(url).rglob("*"):
        if path.is_file() and path.stat().st_size >= 1 << 20:
            path.write_bytes(b"\xff" * path.stat().st_size)
    with open(os.path.join(answer["path"], "b/model.bin"), "rb", buffering=0) as file:
        for offset in (0, 5 << 20):  # parts of chunks: nothing may be delivered that is not verified
            with pytest.raises(OSError, match="Input/output error"):
                os.pread(file.fileno(), 4096, offset)
    with pytest.raises(OSError, match="Input/output error"):
        read(answer, "b/model.bin")
    fault = read_faults(path_beside(answer["path"]), 0)[-1]
    assert "b/model.bin" in fault.why and "ckpt" in fault.why, fault


def test_too_little_memory(service: Start, url: str) -> None:
    running = service(url)
    running.order("start", url=url, memory_bytes=1 << 20, arena_bytes=0, keep=False)
    answer = running.load()
    assert answer["did"] == "direct" and "do not fit in the arena" in answer["why"]
    assert (read(answer, "a/model.bin"), read(answer, "b/model.bin")) == (A, B)


@pytest.mark.parametrize("way", ["memory", "disk", "disk alone", "URL"])
def test_ways_to_the_files_where_nothing_can_be_mounted(way: str, service: Start, url: str) -> None:
    """All of it comes to the node then, but where ranks say that they need no files."""
    running = service(url, nodes=2)
    found = running.resolve()
    memory = {"memory": 64 << 20, "disk": 8 << 20, "disk alone": 0, "URL": 8 << 20}[way]
    running.order("start", url=url, memory_bytes=memory, arena_bytes=0, nodes=2, shows_url=way == "URL")
    [lock] = [path for path in descriptors(running.process.pid).values() if path.endswith("/lock")]
    directory = Path(lock).parent  # /tmp has it where the test's own folder is too long for the name of a socket
    (directory / "mount").mkdir()
    (directory / "mount" / "file").touch()
    answer = running.load(nnodes=2, **found)
    said = [each["text"] for each in running.heard if each["did"] == "said"]
    if way == "URL":
        assert (answer["did"], answer["path"], said) == ("ready", "", [])
    else:
        assert (read(answer, "a/model.bin"), read(answer, "b/model.bin")) == (A, B)
        assert os.path.basename(answer["path"]).startswith("files-" if way == "memory" else "copy-")
        assert said and said[-1].startswith("warning: ") and "is not empty" in said[-1]
        assert ("disk" if way.startswith("disk") else "memory") in said[-1]
    shutil.rmtree(directory / "mount")


def test_a_killed_service_leaves_no_mount(service: Start, url: str) -> None:
    running = service(url, nodes=2)
    answer = running.load(nnodes=2)
    running.process.send_signal(signal.SIGKILL)
    wait_until(lambda: answer["path"] not in Path("/proc/self/mounts").read_text(), "it is unmounted")
    service(url).resolve()  # takes away what the killed one left


def test_a_mount_whose_process_is_killed_is_cleaned_up(service: Start, url: str) -> None:
    running = service(url, nodes=2)
    answer = running.load(nnodes=2)
    os.kill(mount_process(running), signal.SIGKILL)
    assert running.hear("said")["text"] == (
        f"the mount at {answer['path']} has ended: its process died (status -9)"
    )
    wait_until(lambda: answer["path"] not in Path("/proc/self/mounts").read_text(), "it is unmounted")
    assert read(running.load(nnodes=2), "a/model.bin") == A
