"""Trees unpacked for users who cannot mount: what comes first, what is not fetched again, what goes."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer import aio
from bootseer.blocks.cache import TREES, Cache, open_cache
from bootseer.blocks.trace import ANY_WORKLOAD, Trace, encode, workload_key
from bootseer.errors import IntegrityError, StorageTimeout
from bootseer.mounts.unpacked import locks as unpacked_locks
from bootseer.mounts.unpacked.locks import HEARTBEAT_TIMEOUT_S, open_lock
from bootseer.mounts.unpacked.places import is_used, list_unpacked, remove_unpacked, size_when_unpacked
from bootseer.mounts.unpacked.tree import UnpackedTree, unpack_tree
from bootseer.tree.block_codec import unpack_block
from bootseer.tree.index import BLOCK_BYTES
from tests.integration.mounted_trees import Built, make_files
from tests.support import lacking, wait_until
from tests.testing.faulty_http import FaultyHttpServer
from tests.testing.trees import snapshot

MIB = 1 << 20
WORKLOAD = workload_key("python3", "train.py")
COUNT = 80  # files of one block


class Node:
    """A user on a node, and servers of trees."""

    def __init__(self, top: Path, said: list[str]) -> None:
        self.top = top
        self.said = said
        self.environ = {"BOOTSEER_CACHE": f"{top}/cache"}
        self._servers: list[FaultyHttpServer] = []

    @property
    def cache(self) -> Cache:
        return open_cache(self.environ)

    def make(self, seed: int, count: int = COUNT) -> tuple[Built, FaultyHttpServer]:
        """A tree of `count` files of one block each, and who serves it."""
        chance = random.Random(seed)
        directory = self.top / f"source{seed}"
        directory.mkdir()
        for number in range(count):
            (directory / f"file{number:03}").write_bytes(chance.randbytes(BLOCK_BYTES))
        return self.serve(directory)

    def serve(self, directory: Path) -> tuple[Built, FaultyHttpServer]:
        built = Built(directory)
        self._servers.append(FaultyHttpServer(built.files))
        return built, self._servers[-1]

    def unpack(
        self,
        built: Built,
        server: FaultyHttpServer,
        workload: str = WORKLOAD,
        *,
        silent_s: float = HEARTBEAT_TIMEOUT_S,
    ) -> UnpackedTree:
        url = f"{server.url}@sha256:{built.digest}"
        return unpack_tree(url, workload=workload, environ=self.environ, silent_s=silent_s)

    def keep(self, built: Built, numbers: list[int]) -> None:
        """Has the cache have these blocks."""
        with self.cache.open_tree(built.digest, built.index.block_count) as tree:
            self.cache.write_index(built.digest, built.files[f"index/{built.digest}"])
            for number in numbers:
                block = built.index.block(number)
                stored = built.files[built.index.pack_path(block.pack)][block.offset :][: block.stored_bytes]
                raw = unpack_block(stored, block.raw_bytes, "test")
                assert tree.fill(number, raw)

    def record(self, built: Built, hot: list[int], workload: str = WORKLOAD) -> None:
        """Has the cache have a recording."""
        self.keep(built, [])
        trace = Trace(
            tree=built.digest, workload=workload, runs=1, blocks=hot, seen=[1] * len(hot),
            first_ms=list(range(len(hot))),
        )  # fmt: skip
        (Path(self.cache.folder) / TREES / built.digest / f"trace-{workload}.json").write_bytes(encode(trace))

    def close(self) -> None:
        for server in self._servers:
            server.close()
        aio.close()


@pytest.fixture
def node(tmp_path: Path, said: list[str]) -> Iterator[Node]:
    node = Node(tmp_path, said)
    yield node
    node.close()


def requested(server: FaultyHttpServer) -> int:
    """So many requests for packs."""
    return sum(each.path.startswith("packs/") for each in server.requests)


# ---- what comes first ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recorded", [WORKLOAD, ANY_WORKLOAD])
def test_files_of_a_recorded_start_come_first(node: Node, recorded: str) -> None:
    """All others cannot be had: those are there when it fails."""
    built, server = node.make(1)
    hot = [70, 3, 75, 40, 41]
    node.record(built, hot, recorded)
    pack = bytearray(built.files[built.pack])
    for number in set(range(COUNT)) - set(hot):
        pack[built.index.block(number).offset] ^= 1
    server.files[built.pack] = memoryview(bytes(pack))
    with pytest.raises(IntegrityError, match="damaged"):
        node.unpack(built, server)
    place = Path(node.cache.folder) / "unpacked" / built.digest
    assert sorted(each.name for each in (place / "tree").iterdir()) == [
        f"file{number:03}" for number in sorted(hot)
    ]
    assert not (place / "complete").exists()
    server.files[built.pack] = memoryview(built.files[built.pack])
    unpacked = node.unpack(built, server)
    unpacked.close()
    assert snapshot(unpacked.folder) == snapshot(built.source)
    assert unpacked.written_bytes == (COUNT - len(hot)) * BLOCK_BYTES, "it went on"


def test_a_recording_that_cannot_be_read_costs_only_that(node: Node) -> None:
    built, server = node.make(1, count=5)
    node.record(built, [2])
    (path,) = (Path(node.cache.folder) / TREES / built.digest).glob("trace-*")
    path.write_bytes(b"{}")
    unpacked = node.unpack(built, server)
    unpacked.close()
    assert snapshot(unpacked.folder) == snapshot(built.source)
    assert any("a trace is not used" in line for line in node.said)


# ---- what is here already --------------------------------------------------------------------------------------


def test_cached_blocks_are_not_fetched(node: Node) -> None:
    built, server = node.make(1)
    here = [number for number in range(COUNT) if number % 3]
    node.keep(built, here)
    pack = bytearray(built.files[built.pack])
    for number in here:
        pack[built.index.block(number).offset] ^= 1
    server.files[built.pack] = memoryview(bytes(pack))
    unpacked = node.unpack(built, server)
    unpacked.close()
    assert snapshot(unpacked.folder) == snapshot(built.source)
    assert not node.said


def test_with_all_blocks_here_nothing_is_asked_of_the_store(node: Node) -> None:
    built, server = node.make(1, count=40)
    node.keep(built, list(range(40)))
    node.unpack(built, server).close()
    assert not requested(server)
    assert [each.digest for each in node.cache.trees()] == [built.digest]


def test_a_damaged_cached_block_is_fetched(node: Node) -> None:
    built, server = node.make(1, count=40)
    node.keep(built, list(range(40)))
    with open(f"{node.cache.folder}/{TREES}/{built.digest}/data", "r+b") as file:
        file.seek(7 * BLOCK_BYTES + 5)
        file.write(b"wrong")
    unpacked = node.unpack(built, server)
    unpacked.close()
    assert snapshot(unpacked.folder) == snapshot(built.source)
    assert requested(server) == 1


def test_blocks_of_the_last_version_are_not_fetched(node: Node) -> None:
    old, _ = node.make(1)
    node.keep(old, list(range(COUNT)))
    (Path(old.source) / "file007").write_bytes(random.Random("new").randbytes(BLOCK_BYTES))
    new, server = node.serve(Path(old.source))
    unpacked = node.unpack(new, server)
    unpacked.close()
    assert snapshot(unpacked.folder) == snapshot(new.source)
    assert sum(server.served_bytes[name] for name in server.files if name.startswith("packs/")) == BLOCK_BYTES
    assert [each.digest for each in node.cache.trees()] == [old.digest], "no cache is made for it"


def test_without_a_cache_of_blocks_all_is_fetched(node: Node) -> None:
    built, server = node.serve(make_files(node.top / "source", count=20))
    unpacked = node.unpack(built, server)
    unpacked.close()
    assert snapshot(unpacked.folder) == snapshot(built.source)
    assert node.cache.trees() == []


# ---- what goes -------------------------------------------------------------------------------------------------


def test_what_nobody_uses_goes_when_there_is_no_room(node: Node) -> None:
    made = [node.make(seed) for seed in range(4)]
    size = COUNT * BLOCK_BYTES
    node.environ["BOOTSEER_CACHE_LIMIT"] = str(int(2.5 * size))
    first = node.unpack(*made[0])  # in use all the time
    node.unpack(*made[1]).close()
    assert not node.said
    assert {each.digest for each in list_unpacked(node.cache)} == {made[0][0].digest, made[1][0].digest}
    assert all(size <= each.size <= size * 1.1 for each in list_unpacked(node.cache))
    node.unpack(*made[2]).close()
    assert {each.digest for each in list_unpacked(node.cache)} == {made[0][0].digest, made[2][0].digest}
    assert "was evicted: " + made[1][0].digest[:16] in "\n".join(node.said)
    assert snapshot(first.folder) == snapshot(made[0][0].source)

    # All in use: a job cannot run without its image, and is told.
    second = node.unpack(*made[2])
    node.said.clear()
    third = node.unpack(*made[3])
    assert len(list_unpacked(node.cache)) == 3
    assert "the limit is" in node.said[-1]
    for each in (first, second, third):
        assert is_used(node.cache, each.digest)
        each.close()
        assert not is_used(node.cache, each.digest)
    node.unpack(*made[3]).close()
    assert len(list_unpacked(node.cache)) == 3, "nothing is taken away for what is there"


def test_room_is_made_for_what_is_missing_of_an_interrupted_run(node: Node) -> None:
    one, two = node.make(1), node.make(2)
    node.unpack(*one).close()
    node.environ["BOOTSEER_CACHE_LIMIT"] = str(int(2.3 * COUNT * BLOCK_BYTES))
    pack = bytearray(two[0].files[two[0].pack])
    pack[two[0].index.block(COUNT - 1).offset] ^= 1
    two[1].files[two[0].pack] = memoryview(bytes(pack))
    with pytest.raises(IntegrityError):
        node.unpack(*two)
    two[1].files[two[0].pack] = memoryview(two[0].files[two[0].pack])
    node.unpack(*two).close()
    assert len(list_unpacked(node.cache)) == 2
    assert not node.said


def test_a_file_of_holes_needs_no_room(node: Node) -> None:
    """Images have an /var/log/lastlog of gigabytes."""
    directory = node.top / "holes"
    directory.mkdir()
    with open(directory / "lastlog", "wb") as file:
        file.truncate(1 << 36)
        file.seek(1 << 35)
        file.write(b"x")
    os.link(directory / "lastlog", directory / "again")
    built, server = node.serve(directory)
    assert size_when_unpacked(built.index) == BLOCK_BYTES
    node.environ["BOOTSEER_CACHE_LIMIT"] = str(MIB)
    node.unpack(built, server).close()
    assert not node.said
    (there,) = list_unpacked(node.cache)
    assert there.size < MIB


@pytest.mark.system
def test_what_cannot_be_taken_away_ends_no_job(node: Node) -> None:
    if os.geteuid() != 0:
        lacking("a folder that cannot be removed needs a mount: root")
    made = [node.make(seed) for seed in range(3)]
    node.environ["BOOTSEER_CACHE_LIMIT"] = str(int(1.5 * COUNT * BLOCK_BYTES))
    node.unpack(*made[0]).close()
    base = Path(node.cache.folder) / "unpacked"
    (base / made[0][0].digest / "tree" / "busy").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", base / made[0][0].digest / "tree" / "busy"], check=True)
    try:
        second = node.unpack(*made[1])
        second.close()
        assert snapshot(second.folder) == snapshot(made[1][0].source)
        assert any("cannot be evicted" in line and "busy" in line for line in node.said)
        (gone,) = base.glob(".gone-*")
        again = node.unpack(*made[0])
        again.close()
        assert snapshot(again.folder) == snapshot(made[0][0].source), "it is begun anew"
    finally:
        subprocess.run(["umount", *base.glob("*/tree/busy")], check=True)
    node.unpack(*made[2]).close()
    assert not gone.exists()


# ---- with others at once ---------------------------------------------------------------------------------------


def test_who_unpacks_and_gives_no_sign_is_not_waited_for(node: Node) -> None:
    """Stopped, or at a dead disk: the lock is held, and nothing happens."""
    built, server = node.make(1, count=5)
    place = Path(node.cache.folder) / "unpacked" / built.digest
    place.mkdir(parents=True)
    held = open_lock(os.fspath(place))
    assert held.try_hold()
    with pytest.raises(StorageTimeout, match=r"no sign for 0\.3 s: end it .*BOOTSEER_CACHE"):
        node.unpack(built, server, silent_s=0.3)
    held.close()
    node.unpack(built, server, silent_s=0.3).close()


def test_who_unpacks_is_waited_for_as_long_as_it_lives(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacked_locks, "HEARTBEAT_S", 0.05)
    built, server = node.make(1, count=5)
    place = Path(node.cache.folder) / "unpacked" / built.digest
    place.mkdir(parents=True)
    held = open_lock(os.fspath(place))
    assert held.try_hold()
    done: list[float] = []

    def unpack() -> None:
        node.unpack(built, server, silent_s=1.0).close()
        done.append(time.monotonic())

    other = threading.Thread(target=unpack)
    other.start()
    with held.sending_heartbeats():
        other.join(2.5)
        assert other.is_alive() and not done
    free_s = time.monotonic()
    held.close()
    other.join(30.0)
    assert done and done[0] > free_s


def test_without_locks_in_the_cache_the_runtime_directory_has_them(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOOTSEER_RUNTIME", f"{node.top}/runtime")
    inner = fcntl.flock

    def flock(fd: int, operation: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(f"{node.top}/cache"):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        inner(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    built, server = node.make(1, count=5)
    first, second = node.unpack(built, server), node.unpack(built, server)
    assert snapshot(second.folder) == snapshot(built.source) and not second.written_bytes
    assert second.lock_path.startswith(f"{node.top}/runtime/unpacked/")
    first.close()
    assert is_used(node.cache, built.digest) and not remove_unpacked(node.cache, built.digest)
    second.close()
    assert remove_unpacked(node.cache, built.digest)
    others = [threading.Thread(target=lambda: node.unpack(built, server).close()) for _ in range(4)]
    for each in others:
        each.start()
    for each in others:
        each.join(30.0)
    assert requested(server) == 2, "unpacked once each time"
    wait_until(lambda: not is_used(node.cache, built.digest))


# ---- a user who can have no namespaces either ---------------------------------------------------------------


WITHOUT_NAMESPACES = 'echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --bounding-set=-all "$@"'


@pytest.mark.system
def test_who_can_have_no_namespaces_is_reported_before_anything_is_unpacked(node: Node) -> None:
    tried = subprocess.run(["unshare", "-Ur", "sh", "-c", WITHOUT_NAMESPACES, "sh", "true"], capture_output=True)
    if tried.returncode:
        lacking(f"no user namespace with limits of its own: {tried.stderr.decode()}")
    built, server = node.make(1)
    program = os.path.join(os.path.dirname(sys.executable), "bootseer")
    run = [program, "image", "run", f"{server.url}@sha256:{built.digest}", "--", "true"]
    done = subprocess.run(
        ["unshare", "-Ur", "sh", "-c", WITHOUT_NAMESPACES, "sh", *run],
        env={**os.environ, **node.environ}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "no namespaces for an image here" in done.stderr, done.stderr
    assert requested(server) == 0
    assert "is unpacked" not in done.stderr
