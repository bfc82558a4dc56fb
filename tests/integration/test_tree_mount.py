"""Mounted trees: equal to their source, shared, found again, held, ended; and nothing of them left."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec import structs

from bootseer.blocks.spans import MAX_GAP_BYTES
from bootseer.blocks.trace import ANY_WORKLOAD, Trace
from bootseer.blocks.trace import decode as decode_trace
from bootseer.blocks.trace import encode as encode_trace
from bootseer.errors import BootseerError, ConfigError, NotFound, StorageError, Untrusted
from bootseer.ipc.client import Client
from bootseer.linux import mount as kernel
from bootseer.mounts.sandbox.overlay import mount_overlay
from bootseer.mounts.tree_daemon.ending import Servers
from bootseer.mounts.tree_daemon.mount import (
    MountedTree,
    TreeOptions,
    list_trees,
    mount_tree,
    probe_mount,
    unmount_tree,
)
from bootseer.mounts.tree_daemon.places import TreeDirectory, locate, prepare
from bootseer.mounts.tree_daemon.traces import PAYLOAD_TYPE as TRACE_TYPE
from bootseer.tree.head import HEAD_NAME, make_head
from bootseer.tree.head import PAYLOAD_TYPE as HEAD_TYPE
from bootseer.tree.head import encode as encode_head
from bootseer.trust import KeyDirectory, SigningKey, Trust, parse, seal
from tests.integration.mounted_trees import TOP, Built, Trees, need_mounts, trees
from tests.support import Program, is_running, wait_until
from tests.testing.faulty_http import HttpFault, HttpKind
from tests.testing.trees import make_tree, snapshot, write_tree

pytestmark = pytest.mark.system
__all__ = ["trees"]  # a fixture


def present(tree: MountedTree) -> int:
    return int(tree.status()["cache"]["present"])


@pytest.mark.parametrize("seed", [1, 2])
def test_a_mounted_tree_is_its_source(trees: Trees, seed: int) -> None:
    source = trees.top / "random"
    source.mkdir()
    write_tree(os.fspath(source), make_tree(random.Random(seed), 300, as_root=True))
    trees.built = Built(source)
    trees.server.files.update({name: memoryview(data) for name, data in trees.built.files.items()})
    tree = trees.mount()
    assert snapshot(tree.folder) == snapshot(os.fspath(source))
    options = {each.target: each.options for each in trees.mounted()}
    for target in (tree.folder, os.path.join(os.path.dirname(tree.folder), "device")):
        assert {"ro", "nosuid", "nodev"} <= set(options[target].split(","))


def test_three_mounts_and_four_readers_each_fetch_every_block_once(trees: Trees) -> None:
    tree = trees.mount()
    shown = []
    for number in range(3):
        directories = [trees.top / f"{name}{number}" for name in ("shown", "upper", "work")]
        for directory in directories:
            directory.mkdir()
        mount_overlay(
            [tree.folder],
            os.fspath(directories[0]),
            upper=os.fspath(directories[1]),
            work=os.fspath(directories[2]),
        )
        shown.append(os.fspath(directories[0]))
    readers = [trees.read(directory) for directory in shown for _ in range(4)]
    outcomes = [reader.end(100) for reader in readers]
    for outcome in outcomes:
        assert outcome["right"] and not outcome["wrong"] and not outcome.errors
    trees.note("3 overlays, 4 readers each", *outcomes)
    blocks = tree.status()["blocks"]
    assert blocks["demand_blocks"] + blocks["prefetch_blocks"] == blocks["count"] == trees.built.index.block_count
    requests = [each for each in trees.server.requests if each.path == trees.built.pack and each.method == "GET"]
    for number in range(trees.built.index.block_count):
        _, _, offset, stored_bytes, _ = trees.built.index.block(number)
        asked = sum(
            each.first is not None and each.last is not None and each.first <= offset <= each.last
            for each in requests
        )
        assert asked == 1 or stored_bytes <= MAX_GAP_BYTES, f"block {number} was asked for {asked} times"
    assert trees.server.served_bytes[trees.built.pack] <= trees.built.index.stored_bytes + 3 * MAX_GAP_BYTES


def test_the_second_daemon_asks_the_store_for_nothing(trees: Trees) -> None:
    tree = trees.mount()
    assert trees.read(tree.folder).end()["right"]
    wait_until(lambda: any(trees.cache.rglob("erofs-*")), 10, "the metadata in the cache")
    assert tree.unmount()
    before = len(trees.server.requests)
    again = trees.mount(prefetches=False, records=False)
    outcome = trees.read(again.folder).end()
    assert not outcome["wrong"] and not outcome.errors
    paths = [each.path for each in trees.server.requests[before:]]
    assert [path for path in paths if not path.startswith("traces/")] == []
    trees.note("second start, from the cache", outcome)


def test_one_daemon_however_many_start_it(trees: Trees) -> None:
    found: list[MountedTree | BaseException] = []

    def mount() -> None:
        try:
            found.append(trees.mount())
        except BaseException as error:
            found.append(error)

    threads = [threading.Thread(target=mount) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1, found
    assert [each.fstype for each in trees.mounted()] == ["erofs", "fuse.bootseer"]


def start_mounting(trees: Trees, before: str = "", after: str = "") -> Program:
    """A process that mounts, holds and prints where; with a line more at either end."""
    script = f"""import signal, sys, time
{before}
from bootseer.mounts.tree_daemon.mount import TreeOptions, mount_tree
tree = mount_tree(sys.argv[1], options=TreeOptions(idle_s=0))
lease = tree.hold()
print(tree.folder, flush=True)
{after}
"""
    return trees.run(sys.executable, "-c", script, trees.url)


def test_the_daemon_outlives_its_starter_and_is_found_again(trees: Trees) -> None:
    starter = start_mounting(trees, after="time.sleep(60)")
    wait_until(lambda: "\n" in starter.stdout or starter.process.poll() is not None, 20, "the mount")
    directory = starter.stdout.strip()
    assert directory, starter.stderr
    (found,) = list_trees()
    assert [lease["pid"] for lease in found.status["leases"]] == [starter.pid]
    starter.signal(signal.SIGKILL)
    starter.process.wait()
    outcome = trees.read(directory).end()
    assert not outcome["wrong"] and not outcome.errors
    tree = trees.mount()
    assert (tree.folder, tree.digest) == (directory, trees.built.digest)
    assert tree.status()["pid"] == found.status["pid"]
    wait_until(lambda: not tree.status()["leases"], 5, "the end of the killed starter's lease")
    assert tree.unmount()
    trees.wait_gone()
    assert not tree.unmount() and not unmount_tree(tree.digest)
    assert list_trees() == []


def test_a_starter_that_ignores_the_ends_of_its_children(trees: Trees) -> None:
    ended = start_mounting(trees, before="signal.signal(signal.SIGCHLD, signal.SIG_IGN)").wait(30)
    assert ended.status == 0, ended.stderr
    outcome = trees.read(ended.stdout.strip()).end()
    assert not outcome["wrong"] and not outcome.errors
    assert trees.mount().unmount()
    trees.wait_gone()


def test_it_ends_by_itself_when_nobody_holds_it(trees: Trees) -> None:
    tree = trees.mount(idle_s=0.4)
    first, second = tree.hold(), tree.hold()
    first.close()
    pid = trees.daemon(tree)
    with pytest.raises(AssertionError):
        wait_until(lambda: not is_running(pid), 1.5)
    assert not second.is_lost()
    second.close()
    trees.wait_gone()
    wait_until(lambda: not is_running(pid), 5)
    with pytest.raises(StorageError, match="mount it again"):
        tree.hold()


def test_an_overlay_above_keeps_it(trees: Trees) -> None:
    tree = trees.mount(idle_s=0.3)
    directory, other = trees.top / "shown", trees.top / "other"
    directory.mkdir()
    other.mkdir()
    mount_overlay([tree.folder, os.fspath(other)], os.fspath(directory))
    pid = trees.daemon(tree)
    with pytest.raises(AssertionError):
        wait_until(lambda: not is_running(pid), 1.5)
    for shown in (os.fspath(directory), tree.folder):  # it was taken away for a moment to find that out
        outcome = trees.read(shown).end()
        assert not outcome["wrong"] and not outcome.errors
    assert kernel.unmount(os.fspath(directory))
    trees.wait_gone()


def test_another_directory_keeps_it(trees: Trees) -> None:
    """And it stays the same file system, by whose number the folder is known."""
    tree = trees.mount(idle_s=0.2)
    directory = trees.top / "shown"
    directory.mkdir()
    kernel.mount(tree.folder, os.fspath(directory), "", kernel.BIND)
    devices = {os.stat(each).st_dev for each in (tree.folder, directory)}
    assert len(devices) == 1
    end_s = time.monotonic() + 1.5
    while time.monotonic() < end_s:  # it is shown all the time
        assert {os.stat(each).st_dev for each in (tree.folder, directory)} == devices
        time.sleep(0.01)
    assert kernel.unmount(os.fspath(directory))
    trees.wait_gone()


def test_another_namespace_keeps_it(trees: Trees) -> None:
    """As a job has one of its own, where nothing that happens here is seen."""
    tree = trees.mount(idle_s=0.3)
    script = f"sleep 1.5; exec cat {tree.folder}/0/file0"
    job = trees.run("unshare", "-m", "--propagation", "private", "sh", "-c", script)
    pid = trees.daemon(tree)
    run = job.wait(20)
    assert run.status == 0 and is_running(pid), run.stderr
    with open(job.stdout_path, "rb") as file:
        assert file.read() == Path(trees.built.source, "0/file0").read_bytes()
    trees.wait_gone()


def test_a_private_namespace_cannot_be_served_from_outside(trees: Trees) -> None:
    trees.mount()
    code = f"from bootseer.mounts.tree_daemon.mount import mount_tree; mount_tree({trees.url!r})"
    done = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": TOP}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert "another mount namespace" in done.stderr.splitlines()[-1]


def test_a_file_that_is_open_keeps_it(trees: Trees) -> None:
    tree = trees.mount(idle_s=0.3)
    with open(os.path.join(tree.folder, "0", "file0"), "rb"):
        pid = trees.daemon(tree)
        with pytest.raises(AssertionError):
            wait_until(lambda: not is_running(pid), 1.0)
    trees.wait_gone()


def test_who_comes_later_may_want_it_longer(trees: Trees) -> None:
    tree = trees.mount(idle_s=5)
    assert tree.status()["idle_s"] == 5
    trees.mount(idle_s=50)
    assert tree.status()["idle_s"] == 50
    trees.mount(idle_s=7)
    assert tree.status()["idle_s"] == 50
    trees.mount(idle_s=0)
    assert tree.status()["idle_s"] == 0


def test_what_is_held_is_only_stopped_by_force(trees: Trees) -> None:
    tree = trees.mount()
    with tree.hold() as lease:
        with pytest.raises(ConfigError, match=f"is held by process {os.getpid()}"):
            tree.unmount()
        assert os.listdir(tree.folder)
        assert unmount_tree(tree.folder, force=True)
        wait_until(lease.is_lost, 2)
    trees.wait_gone()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_end_it_in_order(trees: Trees, number: signal.Signals) -> None:
    tree = trees.mount()
    pid = trees.daemon(tree)
    os.kill(pid, number)
    trees.wait_gone()
    wait_until(lambda: not is_running(pid), 5)


def test_after_an_unmount_from_outside_it_ends_and_is_mounted_again(trees: Trees) -> None:
    tree = trees.mount()
    assert kernel.unmount(tree.folder)
    again = trees.mount()
    assert os.listdir(again.folder)


def test_a_start_is_recorded_and_the_next_one_prefetched(trees: Trees) -> None:
    workload = "0123456789abcdef"
    options = TreeOptions(idle_s=0, streams=False)
    tree = mount_tree(trees.url, workload=workload, options=options)
    touched = ["0/file0", "3/file3", "2/file9"]
    for name in touched:
        Path(tree.folder, name).read_bytes()
    assert tree.end_start()
    assert not tree.end_start()
    for name in ("1/file1", "4/file11"):
        Path(tree.folder, name).read_bytes()
    trace = json.loads(Path(tree.trace_path()).read_bytes())
    assert (trace["tree"], trace["workload"], trace["runs"]) == (tree.digest, workload, 1)
    numbers = dict.fromkeys(blocks_of(trees.built, name) for name in touched)
    assert trace["blocks"] == list(dict.fromkeys(number for each in numbers for number in each))
    tree.unmount()
    wait_until(lambda: not list_trees(), 5)
    for path in trees.cache.rglob("*"):
        if path.name in ("data", "present", "saved", "sums"):
            path.unlink()  # what was cached has to come again
    again = mount_tree(trees.url, workload=workload, options=options)
    wait_until(lambda: again.status()["prefetch"].get(workload, {}).get("phase") == "done", 10, "the prefetch")
    status = again.status()
    assert status["blocks"]["prefetch_blocks"] == len(trace["blocks"]) and not status["blocks"]["demand_blocks"]
    for name in touched:
        assert Path(again.folder, name).read_bytes() == Path(trees.built.source, name).read_bytes()
    assert again.status()["blocks"]["waits"] == 0
    assert again.end_start()
    assert json.loads(Path(again.trace_path()).read_bytes())["runs"] == 2


def blocks_of(built: Built, name: str) -> tuple[int, ...]:
    """Blocks of a file, in order."""
    entry = next(each for each in range(len(built.index)) if built.index.path(each) == name.encode())
    return tuple(address * 4096 // (128 << 10) for _, address, _ in built.index.pieces(entry))


def test_after_the_first_step_the_rest_is_streamed(trees: Trees) -> None:
    tree = trees.mount()
    Path(tree.folder, "0/file0").read_bytes()
    assert present(tree) < trees.built.index.block_count
    assert tree.end_start()
    wait_until(lambda: present(tree) == trees.built.index.block_count, 20, "all blocks")


class Published(NamedTuple):
    """A tree at an HTTP server, which nobody can own."""

    url: str
    key: SigningKey


@pytest.fixture
def published(trees: Trees) -> Published:
    """With a head that is signed by this user's key."""
    key = KeyDirectory.find().make("ada")
    index_bytes = trees.built.files[f"index/{trees.built.digest}"]
    head = encode_head(make_head(index_bytes, "image", trees.server.url))
    trees.server.files[HEAD_NAME] = memoryview(seal(head, HEAD_TYPE, key))
    return Published(trees.server.url, key)


def test_a_tree_is_trusted_by_its_signature(trees: Trees, published: Published) -> None:
    tree = mount_tree(published.url, options=TreeOptions(idle_s=0))
    assert tree.digest == trees.built.digest
    assert mount_tree(published.url, trust=Trust.load()) == tree
    with pytest.raises(Untrusted, match="is signed by no trusted key"):
        mount_tree(published.url, trust=Trust())
    with pytest.raises(Untrusted):
        mount_tree(published.url, name="another")


@pytest.mark.parametrize("signer", ["trusted", "unknown", "nobody"])
def test_a_new_node_prefetches_by_the_published_trace(trees: Trees, published: Published, signer: str) -> None:
    workload = "0123456789abcdef"
    numbers = blocks_of(trees.built, "2/file2")
    trace = Trace(
        tree=trees.built.digest, workload=workload, runs=1, blocks=list(numbers), seen=[1] * len(numbers),
        first_ms=[0] * len(numbers),
    )  # fmt: skip
    key = {"trusted": published.key, "unknown": SigningKey.make(), "nobody": None}[signer]
    path = f"traces/{trees.built.digest}/{workload}.json"
    trees.server.files[path] = memoryview(seal(encode_trace(trace), TRACE_TYPE, key))
    options = TreeOptions(idle_s=0, streams=False)
    tree = mount_tree(published.url, workload=workload, options=options)
    if signer == "trusted":
        wait_until(lambda: tree.status()["prefetch"].get(workload, {}).get("phase") == "done", 10, "the prefetch")
        assert tree.status()["blocks"]["prefetch_blocks"] == len(set(numbers))
        assert tree.status()["trace"].endswith(path)
    else:
        wait_until(lambda: trees.server.count(path=path), 10)
        Path(tree.folder, "0/file0").read_bytes()
        assert tree.end_start()  # which waits for the look at the trace
        assert tree.status()["trace"] == "" and tree.status()["prefetch"] == {}
        assert "a trace is not used" in Path(tree.status()["log"]).read_text()


WORKLOAD = "0123456789abcdef"


@pytest.fixture
def store(trees: Trees) -> Path:
    """A folder with the tree."""
    found = trees.top / "store"
    for name, data in trees.built.files.items():
        (found / name).parent.mkdir(parents=True, exist_ok=True)
        (found / name).write_bytes(data)
    return found


def record(url: str, digest: str, options: TreeOptions) -> MountedTree:
    """A start that reads one file."""
    tree = mount_tree(f"{url}@sha256:{digest}", workload=WORKLOAD, options=options)
    Path(tree.folder, "4/file4").read_bytes()
    assert tree.end_start()
    return tree


def test_the_first_recording_of_a_workload_is_shared(trees: Trees, store: Path) -> None:
    key = KeyDirectory.find().make("ada")
    tree = record(os.fspath(store), trees.built.digest, TreeOptions(idle_s=0, streams=False, shares=True))
    folder = store / f"traces/{trees.built.digest}"
    wait_until((folder / f"{WORKLOAD}.json").exists, 10, "the recording of the first node")
    envelope = parse((folder / f"{WORKLOAD}.json").read_bytes(), TRACE_TYPE, "the trace")
    assert [each.keyid for each in envelope.signatures] == [key.keyid]
    trace = decode_trace(envelope.payload, tree.digest, trees.built.index.block_count, "the trace")
    assert trace.blocks == list(dict.fromkeys(blocks_of(trees.built, "4/file4")))
    wait_until((folder / "any.json").exists, 10, "the trace for those who cannot list the folder")
    envelope = parse((folder / "any.json").read_bytes(), TRACE_TYPE, "the trace")
    assert [each.keyid for each in envelope.signatures] == [key.keyid]
    of_all = decode_trace(envelope.payload, tree.digest, trees.built.index.block_count, "the trace")
    assert of_all == structs.replace(trace, workload=ANY_WORKLOAD)


@pytest.mark.parametrize("has_lock", [True, False])
def test_the_end_of_who_serves_a_tree_is_waited_for(trees: Trees, has_lock: bool) -> None:
    """It outlives its mounts while it saves; a process that only has its number is not waited for."""
    place = TreeDirectory(prepare(locate(trees.environ)), trees.built.digest)
    lock = place.try_claim()
    server = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[lock] if has_lock else []
    )
    try:
        place.write_state({"daemon": server.pid})
        with Servers(place) as servers:
            place.remove()  # as it does itself before it saves
            began_s = time.monotonic()
            assert servers.wait_end(0.2) is not has_lock
            assert not has_lock or time.monotonic() - began_s > 0.15
            server.communicate(b"\n")
            assert servers.wait_end(10.0)
    finally:
        server.kill()
        server.communicate()
        os.close(lock)


def test_it_tells_how_the_image_wants_to_be_run(trees: Trees) -> None:
    for _ in range(2):  # made, and from the cache
        tree = trees.mount()
        assert tree.config() == trees.built.index.config
        wait_until(lambda: any(trees.cache.rglob("erofs-*")), 10, "the metadata in the cache")
        tree.unmount()
        wait_until(lambda: not list_trees(), 5)


def test_what_cannot_be_opened_says_why_and_leaves_nothing(trees: Trees) -> None:
    with pytest.raises(Untrusted, match="bootseer keys"):
        trees.server.files["tree.json"] = memoryview(
            b'{"payload": "", "payloadType": "application/vnd.bootseer.tree.v1+json", "signatures": []}'
        )
        mount_tree(trees.server.url)
    with pytest.raises(NotFound):
        mount_tree(f"{trees.server.url}@sha256:{'1' * 64}")
    trees.server.files[f"index/{trees.built.digest}"] = memoryview(b"damaged")
    with pytest.raises(BootseerError, match=r"index/\w+: is damaged"):
        trees.mount()
    wait_until(lambda: not os.listdir(trees.runtime / "trees"), 5, "the end of the folders")
    assert list_trees() == []


def test_who_ends_it_does_not_wait_for_its_start(trees: Trees) -> None:
    trees.server.plan[:] = [HttpFault(HttpKind.SILENCE)]
    errors: list[BaseException] = []

    def mount() -> None:
        try:
            trees.mount()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=mount)
    thread.start()
    place = TreeDirectory(os.fspath(trees.runtime), trees.built.digest)
    wait_until(lambda: os.path.exists(place.control_path), 10, "the daemon")
    wait_until(lambda: trees.server.requests, 10, "its first request")
    assert unmount_tree(trees.built.digest)
    thread.join(10)
    assert len(errors) == 1 and "was ended while it was starting" in str(errors[0])
    trees.wait_gone()


def test_requests_that_make_no_sense_cost_only_their_connection(trees: Trees) -> None:
    tree = trees.mount()
    for data in (b"\n", b"[]\n", b'{"do": 1}\n', b'{"do": "nothing"}\n', b"\xff\n", b"[" * 50_000 + b"\n"):
        control = Client.connect(tree.control)
        assert control is not None
        with control:
            control._connection.sendall(data)
            assert '"kind": "ConfigError"' in json.dumps(control._channel.receive(60.0))
            assert control.ask("status")["state"] == "ready"
    for data in (b"x" * 100_000, b'{"do": "status"}'):
        control = Client.connect(tree.control)
        assert control is not None
        with control:
            try:
                control._connection.sendall(data)
            except OSError:
                pass  # it was closed while we wrote
    for request in ({"idle_s": -1}, {"idle_s": "1"}, {"workload": "../../etc"}, {"workload": 5}):
        control = Client.connect(tree.control)
        assert control is not None
        with control, pytest.raises(ConfigError):
            control.ask("hello", **request)
    assert tree.status()["state"] == "ready"


def test_probe_says_whether_trees_can_be_mounted() -> None:
    need_mounts()
    assert probe_mount() == ""
    drop = ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin", sys.executable, "-P", "-c"]
    code = "from bootseer.mounts.tree_daemon.mount import probe_mount; print(probe_mount())"
    said = subprocess.run([*drop, code], capture_output=True, text=True, check=True).stdout
    assert "CAP_SYS_ADMIN" in said
