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
from bootseer.checkpoint.arena import READY
from bootseer.checkpoint.arena_client import connect
from bootseer.checkpoint.inputs import MemoryInput
from bootseer.checkpoint.writer import Geometry, write_version
from bootseer.storage.local import LocalStore
from tests.integration.keeper_driver import Start, keepers, wait_until
from tests.integration.mounting import need_fuse

pytestmark = pytest.mark.system

A, B = random.Random(1).randbytes(8 << 20), random.Random(2).randbytes(8 << 20)


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Start]:
    need_fuse()
    yield from keepers(tmp_path)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Two files, striped: they can be opened by name nowhere."""
    files = [(name, MemoryInput([data])) for name, data in (("a/model.pt", A), ("b/model.pt", B))]
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


def test_each_node_reads_what_its_ranks_open(keeper: Start, url: str) -> None:
    for kind in ("first", "recorded"):
        running = keeper(url, nodes=2)
        answer = running.load(nnodes=2)
        assert answer["did"] == "ready" and os.path.ismount(answer["path"])
        if kind == "recorded":
            wait_until(partial(ready_units, answer, "a/model.pt"), "it is read ahead")
        assert read(answer, "a/model.pt") == A
        assert ready_units(answer, "b/model.pt") == 0
        with pytest.raises(OSError):
            Path(answer["path"], "a/model.pt").write_bytes(b"x")
        running.order("release")
        running.close()


def test_what_was_read_whole_is_there_before_ranks_start(keeper: Start, url: str) -> None:
    running = keeper(url, nodes=2)
    answer = running.load(nnodes=2)
    assert (read(answer, "a/model.pt"), read(answer, "b/model.pt")) == (A, B)
    running.order("release")
    running.close()
    answer = keeper(url, nodes=2).load(nnodes=2)
    assert answer["did"] == "ready" and not os.path.ismount(answer["path"])
    assert (read(answer, "a/model.pt"), read(answer, "b/model.pt")) == (A, B)


def test_the_next_attempt_has_a_mount_of_its_own(keeper: Start, url: str, tmp_path: Path) -> None:
    running = keeper(url, nodes=2)
    assert read(running.load(nnodes=2), "a/model.pt") == A
    assert read(running.load(nnodes=2), "a/model.pt") == A
    newer = [(name, MemoryInput([B])) for name in ("a/model.pt", "b/model.pt")]
    aio.run_sync(write_version(LocalStore(str(tmp_path)), "ckpt", newer, geometry=Geometry(1 << 20, 2)))
    assert read(running.load(nnodes=2), "a/model.pt") == B


def test_too_little_memory(keeper: Start, url: str) -> None:
    running = keeper(url)
    running.order("start", url=url, memory_bytes=1 << 20, arena_bytes=0, keep=False)
    answer = running.load()
    assert answer["did"] == "direct" and "do not fit in the arena" in answer["why"]
    assert (read(answer, "a/model.pt"), read(answer, "b/model.pt")) == (A, B)


def test_ranks_get_the_url_where_nothing_can_be_mounted(keeper: Start, url: str) -> None:
    running = keeper(url, nodes=2)
    found = running.resolve()
    [folder] = running.temporary.iterdir()
    (folder / "mount").mkdir()
    (folder / "mount" / "file").touch()
    answer = running.load(nnodes=2, **found)
    assert (answer["did"], answer["path"]) == ("ready", "")
    [said] = [each["text"] for each in running.heard if each["did"] == "said"]
    assert said.startswith("the checkpoint has no path, ranks find its URL:") and "is not empty" in said
    shutil.rmtree(folder / "mount")


def test_a_killed_keeper_leaves_no_mount(keeper: Start, url: str) -> None:
    running = keeper(url, nodes=2)
    answer = running.load(nnodes=2)
    running.process.send_signal(signal.SIGKILL)
    wait_until(lambda: answer["path"] not in Path("/proc/self/mounts").read_text(), "it is unmounted")
    keeper(url).resolve()  # takes away what the killed one left


def test_a_mount_whose_process_is_killed_is_cleaned_up(keeper: Start, url: str) -> None:
    running = keeper(url, nodes=2)
    answer = running.load(nnodes=2)
    for pid in running.children():
        if b"rank_mount" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: answer["path"] not in Path("/proc/self/mounts").read_text(), "it is unmounted")
    assert read(running.load(nnodes=2), "a/model.pt") == A
