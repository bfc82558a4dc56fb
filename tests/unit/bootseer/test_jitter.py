"""Random numbers of the user's program are the user's: Bootseer takes none, and has others in each process.

A program may seed `random` alike on all nodes, and its results depend on what it draws.
"""

from __future__ import annotations

import ast
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer import aio, jitter
from bootseer.checkpoint.io.inputs import MemoryInput
from bootseer.checkpoint.io.source import Request
from bootseer.checkpoint.opening import open_source
from bootseer.checkpoint.writing.writer import Geometry, write_version
from bootseer.errors import Unavailable
from bootseer.linux import page_cache
from bootseer.storage.engine.ranges import RangeReader, RangeRequest
from bootseer.storage.local.store import LocalStore
from tests.testing.faulty_store import Fault, FaultyStore, Kind

TOP = Path(__file__).parents[3]
OWN = {"Random", "SystemRandom"}  # classes of generators that have a state of their own


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    random.seed(7)
    before = random.getstate()
    yield
    assert random.getstate() == before, "the numbers of the user's program are others now"


def write(path: Path) -> LocalStore:
    store = LocalStore(os.fspath(path))
    aio.run_sync(write_version(store, "ck", [("f", MemoryInput([b"x" * 50_000]))], geometry=Geometry(4096, 2)))
    return store


@pytest.mark.parametrize("verify", ["sampled", "units", "full", "none"])
def test_a_checkpoint_is_written_and_read(verify: str, tmp_path: Path) -> None:
    write(tmp_path)
    with open_source(tmp_path / "ck", verify=verify) as opened:
        target = bytearray(50_000)
        opened.source.read([Request("f", 0, memoryview(target))])
    assert target == b"x" * 50_000


def test_a_read_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 1000)
    store = FaultyStore(LocalStore(os.fspath(tmp_path)), [Fault(Kind.ERROR, calls={0})])
    target = bytearray(1000)
    aio.run_sync(RangeReader(store).read([RangeRequest("f", 0, memoryview(target))]))
    assert target == b"x" * 1000 and len(store.calls) > 1


def test_a_call_is_tried_again() -> None:
    async def call(attempt: int) -> int:
        if not attempt:
            raise Unavailable("once")
        return attempt

    assert aio.run_sync(aio.retry(aio.RetryPolicy(base_s=0.001), call)) == 1


def test_the_page_cache_is_probed(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 100_000)
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    try:
        assert 0 <= page_cache._probed_share(fd, 0, 100_000) <= 1
    finally:
        os.close(fd)


def test_processes_that_seed_alike_have_other_numbers_of_ours() -> None:
    code = """
import random
random.seed(1)
from bootseer import jitter
print(jitter.jitter(), jitter.randrange(1 << 40))
"""
    argv = [sys.executable, "-c", code]
    first, second = (subprocess.run(argv, capture_output=True, text=True, cwd=TOP).stdout for _ in range(2))
    assert first and first != second


def test_forks_have_other_numbers_of_ours() -> None:
    """Ranks are forks of one process."""
    seen = set()
    for _ in range(2):
        read_end, write_end = os.pipe()
        if not (pid := os.fork()):
            os.write(write_end, str(jitter.randrange(1 << 60)).encode())
            os._exit(0)
        os.waitpid(pid, 0)
        os.close(write_end)
        with open(read_end) as file:
            seen.add(file.read())
    assert len(seen) == 2


def test_nothing_of_ours_draws_from_the_generator_of_the_program() -> None:
    found = []
    for path in [path for top in ("bootseer", "launcher") for path in (TOP / top).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            drawn: set[str] = set()
            if isinstance(node, ast.ImportFrom) and node.module == "random":
                drawn = {alias.name for alias in node.names}
            elif (
                isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random"
            ):
                drawn = {node.attr}
            found += [f"{path.relative_to(TOP)}: {name}" for name in drawn - OWN]
    # What the fork server compares of a program's state, and what it leaves to it.
    assert [each for each in found if "launcher/in_rank/" not in each] == []
