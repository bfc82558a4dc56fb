"""A checkpoint makes way while what imports wait for is brought to the node; and nothing else does."""

from __future__ import annotations

import functools
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.mounts.tree_daemon import io_priority as hot_first
from tests.integration.service_driver import Start, services, wait_until
from tests.testing.faulty_http import FaultyHttpServer, HttpFault, HttpKind

LOOK_S = 0.3  # several looks of the keeper


@functools.cache
def payload() -> bytes:
    return random.Random(3).randbytes(48 << 20)  # three units, each of two pieces


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv("BOOTSEER_RUNTIME", os.fspath(directory))
    return os.fspath(directory)


@pytest.fixture
def service(tmp_path: Path, runtime: str) -> Iterator[Start]:
    yield from services(tmp_path)


@pytest.mark.parametrize(("processors", "reads"), [(1, 0), (3, 0), (4, 1), (256, 1)])
def test_imports_need_processors_too(processors: int, reads: int) -> None:
    assert hot_first.reads_beside(processors) == reads


def test_it_reads_no_more_than_that_meanwhile(service: Start, runtime: str) -> None:
    reads = hot_first.reads_beside(len(os.sched_getaffinity(0)))
    with FaultyHttpServer({"model.bin": payload()}) as server:
        running = service(server.url_of("model.bin"))
        found = running.resolve()
        begun = server.count()
        server.plan = [HttpFault(HttpKind.HELD, "model.bin")]
        with hot_first.fetching_hot(runtime):
            running.begin_load(found)
            wait_until(lambda: server.count() == begun + 2 * reads, "the first unit to be asked for")
            time.sleep(LOOK_S)  # nothing else may come; if it did it would have by now
            assert server.count() == begun + 2 * reads
        wait_until(lambda: server.count() == begun + 6, "the others to be asked for")
        server.let_go.set()
        answer = running.hear("ready", "direct")
        assert Path(answer["path"]).read_bytes() == payload()


def test_who_brings_is_seen_until_all_have(runtime: str) -> None:
    assert not hot_first.is_fetching_hot(runtime)
    with hot_first.fetching_hot(runtime):
        with hot_first.fetching_hot(runtime):
            assert hot_first.is_fetching_hot(runtime)
        assert hot_first.is_fetching_hot(runtime)
    assert not hot_first.is_fetching_hot(runtime)


def test_one_that_was_killed_brings_nothing(runtime: str) -> None:
    code = (
        "import sys\nfrom bootseer.mounts.tree_daemon import io_priority as hot_first\n"
        "with hot_first.fetching_hot(sys.argv[1]):\n    print(flush=True)\n    input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, runtime], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    assert hot_first.is_fetching_hot(runtime)
    process.kill()
    process.communicate()
    assert not hot_first.is_fetching_hot(runtime)


def test_without_a_directory_nobody_makes_way(tmp_path: Path) -> None:
    nowhere = os.fspath(tmp_path / "nowhere")
    with hot_first.fetching_hot(nowhere):
        assert not hot_first.is_fetching_hot(nowhere)
    assert not hot_first.is_fetching_hot("")
