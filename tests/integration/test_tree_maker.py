"""The process that makes a tree's metadata while its daemon checks the index: right, or the daemon does it."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.tree import compression, erofs
from bootseer.tree.index import digest_of, encode
from tests.made_trees import everything
from tests.support import is_running, wait_until

TOP = Path(__file__).parents[2]
# Between a word of the test and the next one. Prints what came of it.
PROGRAM = """
import hashlib, json, os, sys, threading
from bootseer.mounts import tree_maker
tree_maker.start()
maker = tree_maker.take()
print(json.dumps([maker.pid, threading.active_count()]), flush=True)
path, digest = sys.stdin.readline().split()
with open(path, "rb") as file:
    maker.begin(file.read(), digest)
sys.stdin.readline()
data = maker.finish()
try:
    os.waitpid(-1, 0)
    left = True
except ChildProcessError:
    left = False
print(json.dumps(["" if data is None else hashlib.sha256(data).hexdigest(), left]), flush=True)
assert tree_maker.take().finish() is None, "there is one, once"
sys.stdin.readline()
"""


class Daemon:
    """A process with a maker."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(TOP)},
        )  # fmt: skip
        self.maker, threads = self.hear()
        assert threads == 1

    def say(self, text: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{text}\n")
        self.process.stdin.flush()

    def hear(self) -> tuple[int, int]:
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


@pytest.mark.parametrize("what", ["no index", "another digest"])
def test_what_is_no_index_gives_nothing(tmp_path: Path, daemon: Daemon, what: str) -> None:
    data = compression.compress(encode(everything().index))
    path, digest = stored(tmp_path, b"nonsense" if what == "no index" else data)
    daemon.say(f"{path} {'0' * 64 if what == 'another digest' else digest}")
    daemon.say()
    assert daemon.hear() == ("", False)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_when_it_is_killed_the_daemon_is_told(tmp_path: Path, daemon: Daemon, when: str) -> None:
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
