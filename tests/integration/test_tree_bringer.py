"""The process that brings hot blocks: it brings them all, and whatever becomes of it the tree stays right."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from bootseer.blocks.trace import Trace
from bootseer.blocks.trace import encode as encode_trace
from bootseer.mounts.tree_hot import APART_BLOCKS
from bootseer.mounts.tree_mount import MountedTree, TreeOptions, mount_tree
from bootseer.mounts.tree_traces import PAYLOAD_TYPE
from bootseer.testing.faulty_http import HttpFault, HttpKind
from bootseer.tree.index import BLOCK_BYTES
from bootseer.trust import KeyFolder, seal
from tests.integration.mounted_trees import Built, Trees, trees
from tests.support import is_running, processes, wait_until

pytestmark = pytest.mark.system
__all__ = ["trees"]  # a fixture

WORKLOAD = "0123456789abcdef"
BLOCKS = APART_BLOCKS + 44
MODULE = "bootseer.mounts.tree_bringer"


@pytest.fixture
def recorded(trees: Trees) -> Trees:
    """A tree of one large file, and a recording that names all of its blocks."""
    source = trees.top / "large"
    source.mkdir()
    (source / "file").write_bytes(random.Random(7).randbytes(BLOCKS * BLOCK_BYTES))
    trees.built = Built(source)
    trees.server.files.update({name: memoryview(data) for name, data in trees.built.files.items()})
    key = KeyFolder.find().make("ada")
    numbers = list(range(trees.built.index.block_count))
    random.Random(3).shuffle(numbers)
    trace = Trace(
        tree=trees.built.digest, workload=WORKLOAD, runs=1, blocks=numbers, seen=[1] * len(numbers),
        first_ms=[0] * len(numbers),
    )  # fmt: skip
    path = f"traces/{trees.built.digest}/{WORKLOAD}.json"
    trees.server.files[path] = memoryview(seal(encode_trace(trace), PAYLOAD_TYPE, key))
    return trees


def start(trees: Trees) -> MountedTree:
    return mount_tree(trees.url, workload=WORKLOAD, options=TreeOptions(idle_s=0, streams=False))


def bringer_of(trees: Trees, tree: MountedTree) -> int:
    """Its pid, as soon as it asks the store for blocks."""
    before = len(trees.server.requests)
    daemon = trees.daemon(tree)

    def find() -> list[int]:
        return [each.pid for each in processes() if MODULE in each.command and each.ppid == daemon]

    wait_until(lambda: find() and len(trees.server.requests) > before, 20, "the process that brings blocks")
    return find()[0]


def is_done(tree: MountedTree) -> bool:
    return bool(tree.status()["prefetch"].get(WORKLOAD, {}).get("phase") == "done")


def test_it_brings_all_hot_blocks_and_the_daemon_tells_of_them(recorded: Trees) -> None:
    tree = start(recorded)
    wait_until(lambda: is_done(tree), 30, "the prefetch")
    status = tree.status()
    assert status["blocks"]["prefetch_blocks"] == BLOCKS and status["blocks"]["demand_blocks"] == 0
    assert status["blocks"]["requests"] >= BLOCKS * BLOCK_BYTES // (1 << 20)
    assert status["prefetch"][WORKLOAD]["hot_s"] > 0
    assert status["cache"]["present"] == BLOCKS and status["cache"]["filled"] == 0, "the daemon has written blocks"
    assert Path(tree.folder, "file").read_bytes() == (recorded.top / "large" / "file").read_bytes()
    assert tree.status()["blocks"]["waits"] == 0
    assert not [each for each in processes() if MODULE in each.command]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_what_it_does_not_bring_comes_all_the_same(recorded: Trees, number: signal.Signals) -> None:
    """A stopped one holds its blocks' locks: nobody waits long for it."""
    recorded.server.plan.append(HttpFault(HttpKind.SLOW, path="packs/*", delay_s=0.2))
    tree = start(recorded)
    pid = bringer_of(recorded, tree)
    os.kill(pid, number)
    recorded.server.plan.clear()
    try:
        assert Path(tree.folder, "file").read_bytes() == (recorded.top / "large" / "file").read_bytes()
        if number == signal.SIGKILL:
            wait_until(lambda: is_done(tree), 30, "the prefetch")
            assert f"failed: it ended with status {-signal.SIGKILL}" in Path(tree.status()["log"]).read_text()
    finally:
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("how", ["unmounted", "killed"])
def test_it_ends_with_the_daemon(recorded: Trees, how: str) -> None:
    recorded.server.plan.append(HttpFault(HttpKind.SLOW, path="packs/*", delay_s=2.0))
    tree = start(recorded)
    pid = bringer_of(recorded, tree)
    if how == "unmounted":
        assert tree.unmount(force=True)
    else:
        os.kill(recorded.daemon(tree), signal.SIGKILL)
    wait_until(lambda: not is_running(pid), 10, "its end")
    recorded.wait_gone()
