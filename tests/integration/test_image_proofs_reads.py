"""Any files read in any order through every way of use; and blocks of a tree that many mounts read at once.

The ways: the library (an opened tree and its blocks), a mount, a root under a writable layer, an unpacked folder.
BOOTSEER_CAMPAIGN=full tries more of them.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import shutil
import stat
import subprocess
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bootseer.image.commands.common import opened
from bootseer.linux import mount as kernel
from bootseer.mounts.sandbox.overlay import mount_overlay
from bootseer.mounts.tree_daemon.ending import list_trees
from bootseer.mounts.tree_daemon.mount import TreeOptions, mount_tree
from bootseer.tree.index import BLOCK_UNITS, HOLE, UNIT_BYTES
from bootseer.tree.opening import OpenedTree
from bootseer.tree.reading import StoreBlocks
from bootseer.tree.unpack.tree import materialise
from bootseer.trust import Trust
from tests.campaign import IS_FULL
from tests.integration.mounted_trees import Built, Trees, trees
from tests.integration.test_image_commands import BOOTSEER
from tests.support import is_running, wait_until
from tests.support_trees import differences, walk
from tests.testing.trees import make_tree, write_tree

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root"),
]
__all__ = ["trees"]  # a fixture
BLOCK_BYTES = 128 << 10


# ---- any files, any order --------------------------------------------------------------------------------------


class Access(NamedTuple):
    """One read: of which file, from where and how much, in parts of a whole."""

    file: float
    begin: float
    length: int
    how: str


accesses = st.lists(
    st.builds(
        Access,
        st.floats(0, 1, exclude_max=True),
        st.floats(0, 1),
        st.sampled_from((1, 100, 4096, 5000, BLOCK_BYTES, BLOCK_BYTES + 1, 3 << 20)),
        st.sampled_from(("pread", "mapped", "sendfile", "direct")),
    ),
    min_size=10,
    max_size=60,
)


class Library:
    """Files of a tree by the index and its blocks alone."""

    def __init__(self, tree: OpenedTree) -> None:
        self._index = tree.index
        self._blocks = StoreBlocks(tree.store, tree.index)
        self._entries = {self._index.path(entry): entry for entry in range(len(self._index))}

    def read(self, path: bytes, begin: int, length: int) -> bytes:
        entry = self._entries[path]
        link = self._index.links[entry]
        pieces = [
            (offset, address, size)
            for offset, address, size in self._index.pieces(entry if link == -1 else link)
            if offset < begin + length and offset + size > begin
        ]
        wanted = dict.fromkeys(address // BLOCK_UNITS for _, address, _ in pieces if address != HOLE)
        raws = {number: bytes(raw) for number, raw in self._blocks.read_blocks(list(wanted))}
        found = b""
        for offset, address, size in pieces:
            inside = address % BLOCK_UNITS * UNIT_BYTES
            piece = bytes(size) if address == HOLE else raws[address // BLOCK_UNITS][inside : inside + size]
            assert len(piece) == size
            found += piece[max(0, begin - offset) : begin + length - offset]
        return found


def read_at(root: str, path: bytes, begin: int, length: int, how: str) -> bytes:
    """By the kernel, in one of the ways that it has."""
    with open(os.path.join(os.fsencode(root), path), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if how == "mapped" and size:
            with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                return mapped[begin : begin + length]
        if how == "sendfile":
            memory = os.memfd_create("sent")
            try:
                done = 0
                while done < length and (count := os.sendfile(memory, file.fileno(), begin + done, length - done)):
                    done += count
                return os.pread(memory, length, 0)
            finally:
                os.close(memory)
        if how == "direct":
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # from the device again, not from memory
        return os.pread(file.fileno(), length, begin)


def make_source(directory: Path, seed: int, entries: int) -> list[bytes]:
    """Random files; paths of those that are regular. No whiteouts, which an overlay does not show."""
    made = make_tree(random.Random(seed), entries, as_root=True)
    kept = {path: node for path, node in made.items() if not (stat.S_ISCHR(node.mode) and node.rdev == (0, 0))}
    directory.mkdir()
    write_tree(os.fspath(directory), kept)
    return [path for path, node in kept.items() if stat.S_ISREG(node.mode)]


@pytest.mark.slow
@pytest.mark.timeout(3600 if IS_FULL else 300)
def test_any_files_in_any_order_through_every_way(trees: Trees) -> None:
    counts: Counter[str] = Counter()

    @settings(
        max_examples=200 if IS_FULL else 12, deadline=None, suppress_health_check=list(HealthCheck),
        database=None,
    )  # fmt: skip
    @given(seed=st.integers(0, 1 << 32), entries=st.integers(1, 60), wanted=accesses)
    def check(seed: int, entries: int, wanted: list[Access]) -> None:
        top = trees.top / "example"
        shutil.rmtree(top, ignore_errors=True)
        top.mkdir()
        files = make_source(top / "source", seed, entries)
        built = Built(top / "source")
        # A server of this process could not answer: a fault in a map stops all threads of its interpreter.
        for name, data in built.files.items():
            path = top / "store" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        with ExitStack() as stack:
            ways = open_ways(f"{top}/store@sha256:{built.digest}", top, stack)
            for name, read in ways.items():
                counts[name] += compare(top / "source", files, wanted, read)
            expected = walk(top / "source")
            assert differences(expected, walk(top / "unpacked")) == []
            shown = walk(top / "shown")
            shown.facts[b""] = expected.facts[b""]  # of an overlay that is the writable layer's own
            assert differences(expected, shown) == []
        counts["trees"] += 1
        shutil.rmtree(trees.cache)

    check()
    print(f"| any files, any order | {', '.join(f'{name} {count}' for name, count in counts.items())} reads |")
    assert min(counts[name] for name in ("library", "mount", "overlay", "unpacked")) > 0


Read = Callable[[bytes, int, int, str], bytes]


def open_ways(url: str, top: Path, stack: ExitStack) -> dict[str, Read]:
    """Each way of use of a tree, until the stack's end."""
    tree = stack.enter_context(opened(url, trust=Trust()))
    library = Library(tree)

    mounted = mount_tree(url, options=TreeOptions(idle_s=0, streams=False))
    pid = int(mounted.status()["pid"])
    stack.callback(wait_until, lambda: not is_running(pid), 20, "the end of the daemon")
    stack.callback(mounted.unmount, force=True)
    for name in ("shown", "upper", "work", "unpacked"):
        (top / name).mkdir()
    mount_overlay(
        [mounted.folder], os.fspath(top / "shown"), upper=os.fspath(top / "upper"), work=os.fspath(top / "work")
    )
    stack.callback(kernel.unmount, os.fspath(top / "shown"))
    materialise(tree.index, os.fspath(top / "unpacked"), StoreBlocks(tree.store, tree.index))

    def through(directory: str) -> Read:
        return lambda path, begin, length, how: read_at(directory, path, begin, length, how)

    return {
        "library": lambda path, begin, length, _: library.read(path, begin, length),
        "mount": through(mounted.folder),
        "overlay": through(os.fspath(top / "shown")),
        "unpacked": through(os.fspath(top / "unpacked")),
    }


def compare(source: Path, files: list[bytes], wanted: list[Access], read: Read) -> int:
    """Three threads read, each in an order of its own; how many reads were right, which is all of them."""
    if not files:
        return 0
    todo: list[tuple[bytes, int, int, str, bytes]] = []
    for access in wanted:
        path = files[int(access.file * len(files))]
        data = (Path(os.fsdecode(os.path.join(os.fsencode(source), path)))).read_bytes()
        begin = int(access.begin * len(data))
        todo.append((path, begin, access.length, access.how, data[begin : begin + access.length]))

    def work(seed: int) -> int:
        mine = list(todo)
        random.Random(seed).shuffle(mine)
        for path, begin, length, how, right in mine:
            assert read(path, begin, length, how) == right, (path, begin, length, how)
        return len(mine)

    with ThreadPoolExecutor(3) as pool:
        return sum(pool.map(work, range(3)))


# ---- many mounts ---------------------------------------------------------------------------------------------

FILES, MOUNTS, PROCESSES = 80, 3, 4


@pytest.mark.timeout(300)
def test_three_mounts_at_once_four_processes_each_fetch_every_block_once(trees: Trees) -> None:
    """By the commands, all started at the same moment on a node that has nothing; counted by the server.

    All blocks are longer than what a request may read for nobody, so bytes can be counted exactly.
    """
    source = trees.top / "whole"
    chance = random.Random(3)
    for number in range(FILES):
        path = source / f"{number % 5}" / f"file{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(chance.randbytes(BLOCK_BYTES * chance.choice((1, 1, 2, 3))))
    trees.built = Built(source)
    trees.server.files = {name: memoryview(data) for name, data in trees.built.files.items()}
    index = trees.built.index
    directories = [trees.top / f"mnt{number}" for number in range(MOUNTS)]
    for directory in directories:
        directory.mkdir()

    mounts = [
        trees.run(BOOTSEER, "image", "mount", trees.url, os.fspath(directory), "--json")
        for directory in directories
    ]
    for program in mounts:
        run = program.wait(60)
        assert run.status == 0, run.stderr
        assert json.loads(run.stdout)["digest"] == trees.built.digest
    readers = [
        trees.read(os.fspath(directory), how=("read", "mapped")[number % 2])
        for directory in directories
        for number in range(PROCESSES)
    ]
    outcomes = [reader.end(200) for reader in readers]
    assert all(outcome["right"] and not outcome["wrong"] and not outcome.errors for outcome in outcomes)

    asked: Counter[int] = Counter()
    requests = [each for each in trees.server.requests if each.method == "GET" and each.path.startswith("packs/")]
    for number in range(index.block_count):
        block = index.block(number)
        for each in requests:
            assert each.first is not None and each.last is not None
            if each.path == index.pack_path(block.pack) and each.first <= block.offset <= each.last:
                asked[number] += 1
    served = sum(count for name, count in trees.server.served_bytes.items() if name.startswith("packs/"))
    (status,) = [each.status for each in list_trees()]
    print(
        f"| {MOUNTS} mounts, {PROCESSES} processes each | {index.block_count} blocks, {index.stored_bytes} bytes |"
        f" {sum(asked.values())} fetched in {len(requests)} requests | {served} bytes served |"
        f" {sum(outcome['right'] for outcome in outcomes)} reads |"
    )
    assert set(asked) == set(range(index.block_count))
    assert set(asked.values()) == {1}, "every block once"
    assert served == index.stored_bytes
    blocks = status["blocks"]
    assert blocks["demand_blocks"] + blocks["prefetch_blocks"] == index.block_count
    for directory in directories:
        done = subprocess.run(
            [BOOTSEER, "image", "umount", directory], env={**os.environ, **trees.environ},
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
