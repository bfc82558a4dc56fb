"""Indexes that the starter of a daemon looks at itself: believed when it says so, and looked at again when not."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable

import msgspec
import pytest

from bootseer import aio
from bootseer.blocks.cache import TREES, open_cache
from bootseer.env.restore.mounted import TreeCheck
from bootseer.errors import BootseerError, IntegrityError
from bootseer.linux import mount as kernel
from bootseer.mounts.tree_daemon import metadata as tree_metadata
from bootseer.mounts.tree_daemon.mount import TreeOptions, list_trees, mount_tree
from bootseer.mounts.tree_daemon.orders import RIGHT
from bootseer.mounts.tree_daemon.places import TreeDirectory
from bootseer.tree import compression
from bootseer.tree.index import digest_of
from tests.integration.mounted_trees import Built, Trees
from tests.integration.mounted_trees import trees as trees
from tests.support import wait_until

pytestmark = pytest.mark.system


class Looking:
    """A starter that looks at an index until it is told what to say. Implements Vetting."""

    def __init__(self, data: bytes | None) -> None:
        self._data = data
        self._fds: list[int] = []
        self.was_asked = threading.Event()

    def index_bytes(self) -> bytes | None:
        return self._data

    def report(self, fd: int) -> None:
        self._fds.append(fd)
        self.was_asked.set()

    def say(self, said: bytes) -> None:
        for fd in self._fds:
            os.write(fd, said)
            os.close(fd)


def index_of(built: Built) -> bytes:
    return built.files[f"index/{built.digest}"]


def mount(trees: Trees, looking: Looking, said: bytes, meanwhile: Callable[[], object] = lambda: None) -> str:
    """Mounts; says something when the daemon has its order. Where it is."""
    failed: list[BaseException] = []

    def answer() -> None:
        try:
            assert looking.was_asked.wait(30)
            meanwhile()
        except BaseException as error:
            failed.append(error)
        finally:
            looking.say(said)

    answering = threading.Thread(target=answer)
    answering.start()
    try:
        return mount_tree(trees.url, options=TreeOptions(idle_s=0.0), vetting=looking).folder
    finally:
        answering.join()
        assert not failed, failed


def check_reads(trees: Trees, directory: str) -> None:
    outcome = trees.read(directory).end()
    assert outcome["right"] and not outcome["wrong"] and not outcome.errors, outcome


def test_nothing_is_shown_before_it_is_said(trees: Trees) -> None:
    looking = Looking(index_of(trees.built))

    def look() -> None:
        wait_until(trees.mounted, 30, "what the tree is to be made of: as far as the daemon gets")
        for _ in range(50):  # answers of the daemon, time enough to show the tree
            (found,) = list_trees()
            assert found.status["state"] == "starting"
        assert all(kernel.is_fuse(each) for each in trees.mounted()), "the tree itself is by EROFS"
        assert not trees.server.requests, "blocks are not fetched either, and nor is the index"

    check_reads(trees, mount(trees, looking, RIGHT, look))
    (found,) = list_trees()
    assert found.status["state"] == "ready"


def test_what_is_not_said_the_daemon_finds_out(trees: Trees) -> None:
    check_reads(trees, mount(trees, Looking(index_of(trees.built)), b""))


def test_the_next_daemon_needs_nobody_who_looks(trees: Trees) -> None:
    directory = mount(trees, Looking(index_of(trees.built)), RIGHT)
    wait_until(lambda: any(trees.cache.rglob("erofs-*")), 10, "the metadata in the cache")
    check_reads(trees, directory)
    trees.mount().unmount(force=True)
    trees.wait_gone()
    tree = mount_tree(trees.url, options=TreeOptions(idle_s=0.0), vetting=Looking(None))
    check_reads(trees, tree.folder)


def change(trees: Trees, **changes: object) -> bytes:
    """Has the URL mean a tree whose index is not right; its object."""
    raw = msgspec.msgpack.encode(msgspec.structs.replace(trees.built.index, **changes))
    data = compression.compress(raw)
    trees.built.digest = digest_of(data)
    trees.server.files[f"index/{trees.built.digest}"] = memoryview(data)
    return data


def check_refused(trees: Trees, looking: Looking, said: bytes, match: str) -> None:
    with pytest.raises(IntegrityError, match=match):
        mount(trees, looking, said)
    trees.wait_gone()


def test_an_index_that_is_not_right_is_refused(trees: Trees) -> None:
    names = list(trees.built.index.names)
    names[1] = b".."
    check_refused(trees, Looking(change(trees, names=names)), b"", "is not a valid name")


def test_blocks_are_looked_at_whatever_is_said(trees: Trees) -> None:
    blocks = bytearray(trees.built.index.blocks)
    blocks[36:40] = b"\xff" * 4  # the first one's offset in its pack
    check_refused(trees, Looking(change(trees, blocks=bytes(blocks))), RIGHT, "lies outside its pack")


def test_contents_that_are_not_right_are_refused(trees: Trees) -> None:
    runs = [list(each) for each in trees.built.index.runs]
    entry = next(entry for entry, each in enumerate(runs) if each)
    runs[entry][0] = 1 << 40
    check_refused(trees, Looking(change(trees, runs=runs)), b"", "lies outside the device")
    with pytest.raises(IntegrityError, match="lies outside the device"):
        mount_tree(trees.url)
    trees.wait_gone()


def test_an_index_of_another_tree_is_refused(trees: Trees) -> None:
    data = index_of(trees.built)
    check_refused(trees, Looking(data[:-1] + bytes([data[-1] ^ 1])), RIGHT, "sent with the order is not")


def test_a_starter_that_is_killed_while_it_looks(trees: Trees) -> None:
    """Its daemon goes on: who asked for the tree meanwhile gets it."""
    path = trees.top / "index"
    path.write_bytes(index_of(trees.built))
    script = """import sys, time
from bootseer.mounts.tree_daemon.mount import TreeOptions, mount_tree
class Looking:
    def index_bytes(self):
        return open(sys.argv[2], "rb").read()
    def report(self, fd):
        print("looking", flush=True)
mount_tree(sys.argv[1], options=TreeOptions(idle_s=0), vetting=Looking())
"""
    starter = trees.run(sys.executable, "-c", script, trees.url, os.fspath(path))
    control = TreeDirectory(os.fspath(trees.runtime), trees.built.digest).control_path
    wait_until(lambda: "looking" in starter.stdout and os.path.exists(control), 30, "the daemon")
    starter.signal(signal.SIGKILL)
    starter.process.wait()
    check_reads(trees, trees.mount().folder)


# ---- who looks: environments -------------------------------------------------------------------------------


def admit(trees: Trees) -> TreeCheck:
    return TreeCheck(trees.url, trees.built.digest, 1, {}, trees.environ)


def test_who_admits_an_environment_says_whether_its_index_is_right(trees: Trees) -> None:
    """Right for a mount, if not for an environment: this one has other folders at its top."""
    admission = admit(trees)
    assert admission.index_bytes() == index_of(trees.built)
    reads, writes = os.pipe()
    admission.report(writes)
    with open(reads, "rb", buffering=0) as pipe:
        assert (pipe.read(2), pipe.read(2)) == (RIGHT, b"")
    with pytest.raises(IntegrityError, match="instead of one directory for each of 1 targets"):
        admission.check()


@pytest.mark.parametrize("what", ["damaged", "not right", "not there"])
def test_nothing_is_said_of_what_is_not_right(trees: Trees, what: str) -> None:
    if what == "not right":
        change(trees, modes=[0] * len(trees.built.index))
    elif what == "damaged":
        trees.server.files[f"index/{trees.built.digest}"] = memoryview(b"something else")
    else:
        del trees.server.files[f"index/{trees.built.digest}"]
    admission = admit(trees)
    assert (admission.index_bytes() is None) == (what != "not right")
    reads, writes = os.pipe()
    admission.report(writes)
    with open(reads, "rb", buffering=0) as pipe:
        assert pipe.read() == b""
    with pytest.raises(BootseerError):
        admission.check()


def test_what_this_node_has_shown_is_not_checked_as_a_whole_again(trees: Trees) -> None:
    cache = open_cache(trees.environ)
    tree = cache.open_tree(trees.built.digest, trees.built.index.block_count)
    tree_metadata.store(os.path.join(cache.folder, TREES, trees.built.digest), trees.built.digest, b"metadata")
    admission = admit(trees)
    assert admission.index_bytes() is None
    reads, writes = os.pipe()
    admission.report(writes)
    with open(reads, "rb", buffering=0) as pipe:
        assert pipe.read() == b""
    tree.close()
    aio.close()
