"""The process that makes a tree's metadata while its daemon checks the index: right, or the daemon does it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from bootseer.mounts.device.metadata_memory import MetadataMemory
from bootseer.mounts.tree_daemon import metadata as tree_metadata
from bootseer.mounts.tree_daemon import metadata_maker as tree_maker
from bootseer.mounts.tree_daemon.metadata_maker import Maker
from bootseer.mounts.tree_daemon.parts import open_parts
from bootseer.mounts.tree_daemon.settings import Settings
from bootseer.tree import compression, erofs
from bootseer.tree.index import digest_of, encode
from tests.integration.mounted_trees import Built
from tests.made_trees import everything, file, folder, make
from tests.support import is_running, wait_until

TOP = Path(__file__).parents[2]
# Between a word of the test and the next one. Prints what came of it.
PROGRAM = """
import hashlib, json, os, sys, threading
from bootseer.mounts.tree_daemon import metadata_maker as tree_maker
BLOCKS = slice(1060, 1064)
tree_maker.start()
maker = tree_maker.take()
print(json.dumps([maker.pid, threading.active_count()]), flush=True)
path, digest = sys.stdin.readline().split()
with open(path, "rb") as file:
    maker.begin(file.read(), digest)
sys.stdin.readline()
growing = maker.first()
first = b"" if growing is None else bytearray(4096)
is_ready = growing is not None and growing.try_read(0, memoryview(first))
if "first" in sys.argv:
    first[BLOCKS] = bytes(4)
    print(json.dumps([is_ready, first.hex()]), flush=True)
    sys.stdin.readline()
data = None
is_right = maker.is_checked()
size = maker.finish()
assert is_right or not size
if size:
    growing.complete(size)
    data = growing.data
try:
    os.waitpid(-1, 0)
    left = True
except ChildProcessError:
    left = False
print(json.dumps(["" if data is None else hashlib.sha256(data).hexdigest(), left]), flush=True)
assert tree_maker.take().first() is None and not tree_maker.take().finish(), "there is one, once"
sys.stdin.readline()
"""


class Daemon:
    """A process with a maker."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(TOP)},
        )  # fmt: skip
        self.maker, threads = self.hear()
        assert threads == 1

    def say(self, text: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{text}\n")
        self.process.stdin.flush()

    def hear(self) -> tuple[Any, Any]:
        assert self.process.stdout is not None
        first, second = json.loads(self.process.stdout.readline())
        return first, second

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    made = Daemon()
    yield made
    made.close()


def stored(tmp_path: Path, data: bytes) -> tuple[Path, str]:
    path = tmp_path / "index"
    path.write_bytes(data)
    return path, digest_of(data)


def test_it_makes_what_the_daemon_would_make(tmp_path: Path, daemon: Daemon) -> None:
    tree = everything().index
    path, digest = stored(tmp_path, compression.compress(encode(tree)))
    daemon.say(f"{path} {digest}")
    daemon.say()
    assert daemon.hear() == (hashlib.sha256(erofs.metadata(tree, digest)).hexdigest(), False)
    assert not is_running(daemon.maker)


@pytest.mark.parametrize("is_killed", [False, True], ids=["lives", "is killed"])
def test_what_a_mount_reads_is_there_first(tmp_path: Path, is_killed: bool) -> None:
    """Of a tree that takes some time; one that is killed then has not finished."""
    entries = [folder(b"%04d" % number) for number in range(60)]
    entries += [file(b"%04d/module_%05d.py" % (number % 60, number // 60), b"x") for number in range(60_000)]
    tree = make(entries).index
    path, digest = stored(tmp_path, compression.compress(encode(tree)))
    daemon = Daemon("first")
    try:
        daemon.say(f"{path} {digest}")
        daemon.say()
        whole = erofs.metadata(tree, digest)
        first = whole[:4096]
        first[1060:1064] = bytes(4)  # how many blocks there are is not known yet
        assert daemon.hear() == (True, first.hex())
        if is_killed:
            os.kill(daemon.maker, signal.SIGKILL)
        daemon.say()
        made, is_left = daemon.hear()
        assert (made, is_left) in ({("", False)} if is_killed else set()) | {
            (hashlib.sha256(whole).hexdigest(), False)
        }
    finally:
        daemon.close()


@pytest.mark.parametrize("what", ["no index", "another digest"])
def test_what_is_no_index_gives_nothing(tmp_path: Path, daemon: Daemon, what: str) -> None:
    data = compression.compress(encode(everything().index))
    path, digest = stored(tmp_path, b"nonsense" if what == "no index" else data)
    daemon.say(f"{path} {'0' * 64 if what == 'another digest' else digest}")
    daemon.say()
    assert daemon.hear() == ("", False)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_when_it_is_killed_the_daemon_is_reported(tmp_path: Path, daemon: Daemon, when: str) -> None:
    path, digest = stored(tmp_path, compression.compress(encode(everything().index)))
    os.kill(daemon.maker, signal.SIGSTOP if when == "meanwhile" else signal.SIGKILL)
    daemon.say(f"{path} {digest}")
    if when == "meanwhile":
        os.kill(daemon.maker, signal.SIGKILL)
    daemon.say()
    assert daemon.hear() == ("", False)


def test_it_ends_with_the_daemon(daemon: Daemon) -> None:
    daemon.process.kill()
    wait_until(lambda: not is_running(daemon.maker), 10, "its end")


# ---- what the daemon does with it --------------------------------------------------------------------------


class Half(Maker):
    """Has made what comes first, and no more."""

    def __init__(self, first: MetadataMemory) -> None:
        super().__init__(None)
        self._first = first

    def first(self) -> MetadataMemory:
        return self._first


@pytest.mark.parametrize("can_make", [True, False], ids=["made again", "cannot be made"])
def test_a_maker_that_ends_half_way(tmp_path: Path, can_make: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon makes it, and whoever waits for it gets that; or an error."""
    (tmp_path / "source" / "folder").mkdir(parents=True)
    (tmp_path / "source" / "folder" / "file").write_bytes(b"x" * 10_000)
    built = Built(tmp_path / "source")
    for name, data in built.files.items():
        (tmp_path / "store" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "store" / name).write_bytes(data)
    whole = bytes(erofs.metadata(built.index, built.digest))
    first_bytes = erofs.MetadataImage(built.index, built.digest).first_bytes
    half = MetadataMemory(whole[:first_bytes] + bytes(len(whole) - first_bytes), first_bytes)
    monkeypatch.setattr(tree_maker, "take", lambda: Half(half))
    if not can_make:
        monkeypatch.setattr(erofs, "metadata", lambda *_: 1 / 0)
    answers: list[bytes | None] = []

    async def run() -> None:
        settings = Settings(url=os.fspath(tmp_path / "store"), keys=[], cache_folder=os.fspath(tmp_path / "cache"))
        async with AsyncExitStack() as stack:
            parts = await open_parts(stack, settings, built.digest)
            assert await parts.metadata() is half
            await parts.check()
            half.read_later(
                first_bytes, len(whole) - first_bytes, lambda data: answers.append(data and bytes(data))
            )
            assert not answers
            if can_make:
                await parts.finish()
                await parts.keep()
                return
            with pytest.raises(ZeroDivisionError):
                await parts.finish()

    asyncio.run(run())
    assert answers == [whole[first_bytes:] if can_make else None]
    kept = tree_metadata.read(os.fspath(tmp_path / "cache" / "trees" / built.digest), built.digest)
    assert kept == (whole if can_make else None)
