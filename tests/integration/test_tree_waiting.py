"""The daemon that is started before it is known for what: taken, replaced, or ended."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from bootseer.errors import IntegrityError
from bootseer.mounts.tree_daemon import waiting as tree_waiting
from bootseer.mounts.tree_daemon.mount import MountedTree, TreeOptions, mount_tree
from bootseer.mounts.tree_daemon.places import TreeDirectory
from bootseer.mounts.tree_daemon.waiting import (
    WaitingDaemon,
    end_spare_daemon,
    start_spare_daemon,
    take_spare_daemon,
)
from bootseer.tree.compression import compress
from bootseer.tree.index import digest_of
from tests.integration.mounted_trees import TOP, Trees, trees
from tests.support import needs_program, wait_until
from tests.testing.trees import snapshot

pytestmark = pytest.mark.system
__all__ = ["trees"]  # a fixture


@pytest.fixture(autouse=True)
def no_spare() -> Iterator[None]:
    end_spare_daemon()
    yield
    end_spare_daemon()


@pytest.fixture
def store(trees: Trees) -> str:
    """The URL of the tree in a folder."""
    for name, data in trees.built.files.items():
        path = trees.top / "store" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return f"{trees.top}/store@sha256:{trees.built.digest}"


def session() -> int:
    """Of the spare: all its processes are in one."""
    (spare,) = tree_waiting._spare
    return spare._process.pid


def members(number: int) -> list[int]:
    """The processes of a session."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                state, *rest = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(rest[2]) == number and state != "Z":
                found.append(int(name))
    return found


def mount(url: str) -> MountedTree:
    return mount_tree(url, options=TreeOptions(idle_s=0.0))


def session_of(tree: MountedTree) -> int:
    return os.getsid(int(tree.status()["pid"]))


def wait_ready(number: int) -> None:
    """Until there are a daemon, its minder, its maker and its bringer, and nothing else."""
    wait_until(lambda: len(members(number)) == 4, 20, "daemon, minder, maker and bringer")


def test_the_spare_is_taken(trees: Trees, store: str) -> None:
    start_spare_daemon(store)
    start_spare_daemon(store)
    spare = session()
    tree = mount(store)
    assert session_of(tree) == spare
    assert snapshot(tree.folder) == snapshot(trees.built.source)
    pids = TreeDirectory.of_directory(os.path.dirname(tree.folder)).read_pids()
    assert sorted(members(spare)) == sorted(pids)
    assert TreeDirectory.of_directory(os.path.dirname(tree.folder)).has_lock_open(pids[0])
    assert take_spare_daemon() is None
    assert tree.unmount()
    wait_until(lambda: not members(spare), 20, "its end")
    trees.wait_gone()


@pytest.mark.parametrize("kind", ["folder", "web"])
def test_nothing_is_imported_between_its_order_and_the_mount(
    trees: Trees, store: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    url = trees.url if kind == "web" else store
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    start_spare_daemon(url)
    tree = mount(url)
    log = Path(TreeDirectory.of_directory(os.path.dirname(tree.folder)).log_path).read_text()
    assert "import time" not in log, "what is imported late stands in the log, as that came with the order"


def test_a_spare_that_has_died_is_replaced(trees: Trees, store: str) -> None:
    start_spare_daemon(store)
    spare = session()
    wait_ready(spare)
    os.killpg(spare, signal.SIGKILL)
    tree = mount(store)
    assert session_of(tree) != spare and not members(spare)
    assert snapshot(tree.folder) == snapshot(trees.built.source)


def test_a_spare_ends_at_sigterm(trees: Trees, store: str) -> None:
    start_spare_daemon(store)
    spare = session()
    wait_ready(spare)
    minder = min(members(spare))
    os.kill(minder, signal.SIGTERM)
    wait_until(lambda: not members(spare), 20, "its end")
    assert session_of(mount(store)) != spare


def test_a_spare_that_nobody_needs_ends(trees: Trees, store: str) -> None:
    tree = mount(store)
    start_spare_daemon(store)
    spare = session()
    assert mount(store) == tree
    wait_until(lambda: not members(spare), 20, "its end")
    start_spare_daemon(store)
    spare = session()
    end_spare_daemon()
    wait_until(lambda: not members(spare), 20, "its end")
    start_spare_daemon(store, unless_served=os.fspath(trees.runtime))
    assert take_spare_daemon() is None


def test_a_spare_of_other_surroundings_is_not_taken(
    trees: Trees, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_spare_daemon(store)
    spare = session()
    cache = trees.top / "other"
    monkeypatch.setenv("BOOTSEER_CACHE", os.fspath(cache))
    tree = mount(store)
    assert session_of(tree) != spare
    assert list(cache.iterdir())
    wait_until(lambda: not members(spare), 20, "its end")


def test_a_spare_ends_with_its_starter(trees: Trees, store: str) -> None:
    code = (
        "import os, sys, time\n"
        "from bootseer.mounts.tree_daemon import waiting as tree_waiting\n"
        "tree_waiting.start_spare_daemon(sys.argv[1])\n"
        "child = os.fork()\n"  # which execs nothing, and holds nothing of the spare
        "if child:\n"
        "    print(tree_waiting._spare[0]._process.pid, child, flush=True)\n"
        "time.sleep(1000)\n"
    )
    starter = trees.run(sys.executable, "-c", code, store, env={"PYTHONPATH": TOP})
    wait_until(lambda: "\n" in starter.stdout, 20, "the spare")
    spare, child = map(int, starter.stdout.split())
    try:
        wait_ready(spare)
        starter.signal(signal.SIGKILL)
        wait_until(lambda: not members(spare), 20, "its end")
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_url_is_not_seen_in_the_list_of_processes(trees: Trees) -> None:
    start_spare_daemon("https://user:secret@example.org/store")
    spare = session()
    wait_ready(spare)
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in members(spare)]
    assert lines and all(b"secret" not in line and line.endswith(b"\0https\0") for line in lines)


@needs_program("setpriv")
def test_none_is_started_where_nothing_can_be_mounted(trees: Trees) -> None:
    code = (
        "import os\n"
        "from bootseer.mounts.tree_daemon import waiting as tree_waiting\n"
        "tree_waiting.start_spare_daemon('/store')\n"
        "assert tree_waiting._spare == [], tree_waiting._spare\n"
    )
    run = trees.run("setpriv", "--bounding-set=-sys_admin", sys.executable, "-c", code, env={"PYTHONPATH": TOP})
    assert run.wait().status == 0, run.stderr


def test_a_daemon_that_is_killed_after_its_order_leaves_nothing(trees: Trees, store: str) -> None:
    start_spare_daemon(store)
    tree = mount(store)
    minder, daemon = TreeDirectory.of_directory(os.path.dirname(tree.folder)).read_pids()
    os.kill(daemon, signal.SIGKILL)
    trees.wait_gone()
    wait_until(lambda: not os.path.exists(f"/proc/{minder}"), 20, "the minder's end")
    assert session_of(mount(store)) != daemon


def test_an_index_that_does_not_stand_its_check_is_not_mounted(trees: Trees, store: str) -> None:
    """Although its metadata is made meanwhile, and could be mounted."""
    tree = trees.built.index
    data = compress(msgspec.msgpack.encode(msgspec.structs.replace(tree, uids=[1 << 32, *tree.uids[1:]])))
    digest = digest_of(data)
    (trees.top / "store/index" / digest).write_bytes(data)
    start_spare_daemon(store)
    spare = session()
    wait_ready(spare)
    with pytest.raises(IntegrityError, match="an owner is impossible"):
        mount(f"{trees.top}/store@sha256:{digest}")
    wait_until(lambda: not members(spare), 20, "their end")
    assert not trees.mounted() and not (trees.runtime / "trees" / digest).exists()


def test_one_that_waits_can_be_closed_at_once(trees: Trees) -> None:
    daemon = WaitingDaemon()
    daemon.close()
    wait_until(lambda: not members(daemon._process.pid), 20, "its end")
