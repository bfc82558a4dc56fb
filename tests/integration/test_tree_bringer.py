"""The process that brings hot blocks: it brings them all, and whatever becomes of it the tree stays right."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from pathlib import Path

import pytest

from bootseer.blocks.trace import Trace, workload_key
from bootseer.blocks.trace import decode as decode_trace
from bootseer.blocks.trace import encode as encode_trace
from bootseer.mounts.sandbox.source import MountedSource, open_source
from bootseer.mounts.tree_daemon.hot import APART_BLOCKS
from bootseer.mounts.tree_daemon.mount import MountedTree, TreeOptions, mount_tree
from bootseer.mounts.tree_daemon.prefetch_worker import GUESS_NICE, NAME
from bootseer.mounts.tree_daemon.traces import PAYLOAD_TYPE
from bootseer.tree.index import BLOCK_BYTES
from bootseer.trust import KeyDirectory, seal
from tests.integration.mounted_trees import Built, Trees, trees
from tests.support import is_running, processes, wait_until
from tests.testing.faulty_http import HttpFault, HttpKind

pytestmark = pytest.mark.system
__all__ = ["trees"]  # a fixture

WORKLOAD = "0123456789abcdef"
PROGRAM = ("python3", "train.py")
BLOCKS = APART_BLOCKS + 44


@pytest.fixture
def recorded(trees: Trees) -> Trees:
    """A tree of one large file, and a recording that names all of its blocks."""
    source = trees.top / "large"
    source.mkdir()
    (source / "file").write_bytes(random.Random(7).randbytes(BLOCKS * BLOCK_BYTES))
    trees.built = Built(source)
    trees.server.files.update({name: memoryview(data) for name, data in trees.built.files.items()})
    key = KeyDirectory.find().make("ada")
    numbers = list(range(trees.built.index.block_count))
    random.Random(3).shuffle(numbers)
    for workload in (WORKLOAD, workload_key(*PROGRAM)):
        trace = Trace(
            tree=trees.built.digest, workload=workload, runs=1, blocks=numbers, seen=[1] * len(numbers),
            first_ms=[0] * len(numbers),
        )  # fmt: skip
        path = f"traces/{trees.built.digest}/{workload}.json"
        trees.server.files[path] = memoryview(seal(encode_trace(trace), PAYLOAD_TYPE, key))
    return trees


def start(trees: Trees, *, share: float = 1.0) -> MountedTree:
    options = TreeOptions(idle_s=0, streams=False, read_ahead_share=share)
    return mount_tree(trees.url, workload=WORKLOAD, options=options)


def worker_of(trees: Trees, tree: MountedTree) -> int:
    """Its pid, as soon as it asks the store for blocks."""
    before = len(trees.server.requests)
    daemon = trees.daemon(tree)

    def find() -> list[int]:
        return [each.pid for each in processes() if each.name == NAME and each.ppid == daemon]

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
    wait_until(lambda: not has_worker(recorded, tree), 30, "its end")


def test_without_a_trace_it_brings_everything_and_yields(recorded: Trees) -> None:
    for key in [key for key in recorded.server.files if key.startswith("traces/")]:
        del recorded.server.files[key]
    options = TreeOptions(idle_s=0, streams=False, whole_bytes=1 << 40)
    recorded.server.plan.append(HttpFault(HttpKind.SLOW, path="packs/*", delay_s=0.1))
    tree = mount_tree(recorded.url, workload=WORKLOAD, options=options)
    worker = worker_of(recorded, tree)
    wait_until(lambda: os.getpriority(os.PRIO_PROCESS, worker) == GUESS_NICE, 20, "its priority")
    with open(Path(tree.folder, "file"), "rb", buffering=0) as file:
        assert os.pread(file.fileno(), 1, (BLOCKS - 90) * BLOCK_BYTES), "a demand, of which the worker is told"
    wait_until(lambda: is_done(tree), 30, "the prefetch")
    status = tree.status()
    assert status["cache"]["present"] == BLOCKS
    assert status["blocks"]["prefetch_blocks"] > BLOCKS // 2
    assert Path(tree.folder, "file").read_bytes() == (recorded.top / "large" / "file").read_bytes()


def has_worker(trees: Trees, tree: MountedTree) -> bool:
    daemon = trees.daemon(tree)
    return any(each.name == NAME and each.ppid == daemon for each in processes())


def cached_bytes(path: Path) -> int:
    """How much of a file is in the page cache."""
    ran = subprocess.run(
        ["fincore", "--bytes", "--noheadings", "--output", "RES", str(path)], check=True, capture_output=True
    )
    return int(ran.stdout)


@pytest.mark.parametrize("start_number", [1, 2], ids=["blocks come meanwhile", "blocks are cached"])
def test_hot_files_are_in_the_page_cache_before_the_program_reads_them(recorded: Trees, start_number: int) -> None:
    for _ in range(start_number):
        tree = start(recorded)
        wait_until(lambda tree=tree: is_done(tree) and not has_worker(recorded, tree), 30, "the prefetch")
        before = tree.status()
        assert before["read_ahead"] > 0
        size = BLOCKS * BLOCK_BYTES
        assert before["device"]["bytes"] >= size, f"not all was read ahead: {Path(before['log']).read_text()}"
        # The kernel may have dropped single pages again: bytes are counted, not requests.
        is_kept = cached_bytes(Path(tree.folder, "file")) > size * 3 // 4
        assert Path(tree.folder, "file").read_bytes() == (recorded.top / "large" / "file").read_bytes()
        more = tree.status()["device"]["bytes"] - before["device"]["bytes"]
        assert more < size // 2 or not is_kept, f"the program waited for the daemon: {more} of {size} bytes"
        assert tree.unmount(force=True)
        recorded.wait_gone()


def test_some_starts_read_nothing_ahead_and_record_what_is_true(recorded: Trees) -> None:
    tree = start(recorded, share=0.0)
    wait_until(lambda: is_done(tree) and not has_worker(recorded, tree), 30, "the prefetch")
    assert tree.status()["read_ahead"] == 0 and tree.status()["device"]["requests"] == 0
    with open(os.path.join(tree.folder, "file"), "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        file.read(1000)
    assert tree.end_start()
    found = decode_trace(Path(tree.trace_path(WORKLOAD)).read_bytes(), recorded.built.digest, BLOCKS, "x")
    assert found.runs == 2 and max(found.seen) == 2 and found.seen.count(2) < BLOCKS // 2


def test_a_recording_does_not_count_what_was_read_ahead(recorded: Trees) -> None:
    tree = start(recorded)
    wait_until(lambda: is_done(tree) and not has_worker(recorded, tree), 30, "the prefetch")
    assert tree.status()["touched_blocks"] > BLOCKS * 3 // 4
    Path(tree.folder, "file").read_bytes()
    assert not tree.end_start(), "nothing was learned, and it was kept"
    assert not os.path.exists(tree.trace_path(WORKLOAD) or "/nowhere")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_what_it_does_not_bring_comes_all_the_same(recorded: Trees, number: signal.Signals) -> None:
    """A stopped one holds its blocks' locks: nobody waits long for it."""
    recorded.server.plan.append(HttpFault(HttpKind.SLOW, path="packs/*", delay_s=0.2))
    tree = start(recorded)
    pid = worker_of(recorded, tree)
    os.kill(pid, number)
    recorded.server.plan.clear()
    try:
        assert Path(tree.folder, "file").read_bytes() == (recorded.top / "large" / "file").read_bytes()
        if number == signal.SIGKILL:
            wait_until(lambda: is_done(tree), 30, "the prefetch")
            assert f"disabled: it ended with status {-signal.SIGKILL}" in Path(tree.status()["log"]).read_text()
    finally:
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)


def test_what_another_workload_needs_is_fetched_by_another_process(recorded: Trees) -> None:
    """The one that was forked early is gone by then."""
    tree = mount_tree(recorded.url, workload="f" * 16, options=TreeOptions(idle_s=0, streams=False))
    wait_until(lambda: not has_worker(recorded, tree), 20, "the end of one that nobody needs")
    tree.prefetch(WORKLOAD)
    wait_until(lambda: is_done(tree), 30, "the prefetch")
    status = tree.status()
    assert status["cache"]["present"] == BLOCKS and status["cache"]["filled"] == 0, "the daemon has written blocks"
    wait_until(lambda: not has_worker(recorded, tree), 30, "its end")
    assert "failed" not in Path(status["log"]).read_text()


@pytest.mark.parametrize("how", ["unmounted", "killed"])
def test_it_ends_with_the_daemon(recorded: Trees, how: str) -> None:
    recorded.server.plan.append(HttpFault(HttpKind.SLOW, path="packs/*", delay_s=2.0))
    tree = start(recorded)
    pid = worker_of(recorded, tree)
    if how == "unmounted":
        assert tree.unmount(force=True)
    else:
        os.kill(recorded.daemon(tree), signal.SIGKILL)
    wait_until(lambda: not is_running(pid), 10, "its end")
    recorded.wait_gone()


@pytest.mark.parametrize("is_small", [True, False])
def test_a_small_tree_of_which_nothing_is_known_is_fetched_whole(recorded: Trees, is_small: bool) -> None:
    size = recorded.built.index.stored_bytes
    options = TreeOptions(idle_s=0, streams=False, whole_bytes=size if is_small else size - 1)
    tree = mount_tree(recorded.url, workload="f" * 16, options=options)
    if is_small:
        wait_until(lambda: tree.status()["prefetch"].get("f" * 16, {}).get("phase") == "done", 30, "the prefetch")
    status = tree.status()
    assert status["cache"]["present"] == (BLOCKS if is_small else 0)
    assert status["read_ahead"] == 0, "it would count as what the start needs"


def test_what_no_start_needs_comes_some_time_after_the_first_step(recorded: Trees) -> None:
    """Whoever asks for all of it has it at once."""
    tree = mount_tree(recorded.url, workload="f" * 16, options=TreeOptions(idle_s=0, stream_after_s=3600.0))
    tree.end_start()
    assert "whole" not in tree.status()["prefetch"]
    tree.prefetch(whole=True)
    wait_until(lambda: tree.status()["prefetch"].get("whole", {}).get("phase") == "done", 30, "the prefetch")
    assert tree.status()["cache"]["present"] == BLOCKS


def test_all_of_it_is_streamed_after_the_first_step(recorded: Trees) -> None:
    tree = mount_tree(recorded.url, workload="f" * 16, options=TreeOptions(idle_s=0, stream_after_s=0.0))
    tree.end_start()
    wait_until(lambda: tree.status()["prefetch"].get("whole", {}).get("phase") == "done", 30, "the prefetch")
    assert tree.status()["cache"]["present"] == BLOCKS


def test_a_start_that_is_to_be_recorded_in_any_case_reads_nothing_ahead(recorded: Trees) -> None:
    source = open_source(recorded.url, PROGRAM, reads_ahead=False)
    try:
        assert isinstance(source, MountedSource)
        with open(os.path.join(source.folder, "file"), "rb", buffering=0) as file:
            file.read(1000)
        found = source.first_step()
        assert found["recorded"] == 1.0 and found.get("read_ahead", 0) == 0
    finally:
        source.close()
