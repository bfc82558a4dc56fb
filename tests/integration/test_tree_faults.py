"""What readers of a mounted tree get when something fails: right bytes or an error, within the deadline.

Each test adds lines to a table: case, reads that were right, errors, wrong ones, the slowest read.
BOOTSEER_CAMPAIGN=full kills the daemon at 100 moments instead of a few.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bootseer.blocks.cache import TREES
from bootseer.ipc.client import NotAnsweringError
from bootseer.linux import mount as kernel
from bootseer.mounts.faults import read_faults
from bootseer.mounts.sandbox.overlay import mount_overlay
from bootseer.mounts.sandbox.source import open_source
from bootseer.mounts.tree_daemon import ending as tree_ending
from bootseer.mounts.tree_daemon import mount as tree_mount
from bootseer.mounts.tree_daemon.mount import MountedTree, TreeOptions, list_trees, mount_tree, unmount_tree
from bootseer.mounts.tree_daemon.places import TreeDirectory
from tests.campaign import IS_FULL
from tests.integration.mounted_trees import Outcome, Reader, Trees, trees
from tests.support import is_running, wait_until
from tests.testing.faulty_http import HttpFault, HttpKind

pytestmark = pytest.mark.system
__all__ = ["trees"]  # a fixture

KILLS = 100 if IS_FULL else 5
DEADLINE_S = 1.5
SLACK_S = 1.4  # a loaded machine; waiting twice would be longer
KILLED_S = 10.0  # of a daemon: a read that nobody ends would wait for the default deadline


def place_of(trees: Trees) -> TreeDirectory:
    return TreeDirectory(os.fspath(trees.runtime), trees.built.digest)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def fill(trees: Trees, tree: MountedTree) -> None:
    """All blocks into the cache; none is read."""
    tree.prefetch(whole=True)
    count = trees.built.index.block_count
    wait_until(lambda: tree.status()["cache"]["present"] == count, 30, "all blocks")


def wait_for_files(readers: list[Reader], count: int) -> None:
    wait_until(lambda: sum(each.files for each in readers) >= count, 20, "the readers")


def check(outcome: Outcome, deadline_s: float = DEADLINE_S) -> Outcome:
    assert not outcome["wrong"], outcome
    assert outcome["slowest_s"] < deadline_s + SLACK_S, outcome
    return outcome


# ---- processes that die or stop ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(60 + 10 * KILLS)
def test_daemon_killed_under_load(trees: Trees) -> None:
    chance = random.Random(KILLS)
    outcomes: list[Outcome] = []
    for number in range(KILLS):
        if number % 3 == 0:
            shutil.rmtree(trees.cache, ignore_errors=True)
        tree = trees.mount()
        pid = trees.daemon(tree)
        (trees.top / "until").unlink(missing_ok=True)
        readers = [
            trees.read(tree.folder, how=how, until=os.fspath(trees.top / "until"))
            for how in ("read", "read", "mapped")
        ]
        wait_for_files(readers, chance.choice((0, 1, 1, 5, 20, 100)))
        time.sleep(chance.random() * 0.05)  # any moment will do
        kill(pid)
        trees.wait_gone()
        (trees.top / "until").touch()
        outcomes += [check(each.end(20), KILLED_S) for each in readers]
        assert not is_running(pid)
    trees.note(f"daemon killed at {KILLS} moments", *outcomes)
    assert any(each.errors for each in outcomes)
    again = check(trees.read(trees.mount().folder).end())
    assert not again.errors
    trees.note("  the next mount", again)


def test_daemon_and_reaper_killed(trees: Trees) -> None:
    """Nobody tidies up; whoever comes next does."""
    tree = trees.mount()
    pids = place_of(trees).read_pids()
    assert len(pids) == 2
    until = os.fspath(trees.top / "until")
    reader = trees.read(tree.folder, until=until)
    wait_until(lambda: reader.files > 3, 10)
    for pid in pids:
        kill(pid)
    wait_until(lambda: not any(map(is_running, pids)), 5)
    Path(until).touch()
    trees.note("daemon and minder killed", check(reader.end(), KILLED_S))
    assert trees.mounted()
    again = trees.mount()
    assert len(trees.mounted()) == 2
    outcome = check(trees.read(again.folder).end())
    assert not outcome.errors
    pids = place_of(trees).read_pids()
    for pid in pids:
        kill(pid)
    # The last of a killed process's threads has its lock a little longer than it is seen to run.
    wait_until(lambda: list_trees() == [], 5)
    assert not any(map(is_running, pids)) and not trees.mounted()


def test_reaper_killed(trees: Trees) -> None:
    """The daemon goes on, and ends in order."""
    tree = trees.mount()
    daemon = trees.daemon(tree)
    (minder,) = set(place_of(trees).read_pids()) - {daemon}
    kill(minder)
    wait_until(lambda: not is_running(minder), 5)
    outcome = check(trees.read(tree.folder).end())
    assert not outcome.errors
    assert tree.unmount()
    trees.wait_gone()


def test_daemon_killed_below_an_overlay(trees: Trees) -> None:
    """The job that uses it is lost; the next one is not hindered by what it holds."""
    tree = trees.mount()
    directory, upper, work = (trees.top / name for name in ("shown", "upper", "work"))
    for path in (directory, upper, work):
        path.mkdir()
    mount_overlay([tree.folder], os.fspath(directory), upper=os.fspath(upper), work=os.fspath(work))
    until = os.fspath(trees.top / "until")
    reader = trees.read(os.fspath(directory), until=until)
    wait_for_files([reader], 2)
    kill(trees.daemon(tree))
    trees.wait_gone()
    again = trees.mount()
    Path(until).touch()
    outcome = check(reader.end(), KILLED_S)
    assert outcome.errors
    trees.note("daemon killed below an overlay", outcome)
    (directory / "new").write_bytes(b"written above")  # what was above it still is
    outcome = check(trees.read(again.folder).end())
    assert not outcome.errors
    trees.note("  the next mount, beside it", outcome)
    assert kernel.unmount(os.fspath(directory))


def test_stopped_in_order_while_the_store_hangs(trees: Trees) -> None:
    """Nobody waits for the deadline of a read."""
    tree = trees.mount(deadline_s=60.0)
    trees.server.plan[:] = [HttpFault(HttpKind.SILENCE, "packs/*")]
    reader = trees.read(tree.folder, source=some(trees, "1/file1"))
    wait_until(lambda: tree.status()["device"]["waiting"], 10, "a read that waits")
    pids = place_of(trees).read_pids()
    begin_s = time.monotonic()
    assert tree.unmount()
    assert time.monotonic() - begin_s < 5
    outcome = reader.end(5)
    assert outcome.errors and not outcome["wrong"]
    trees.note("stopped while the store hangs", outcome)
    wait_until(lambda: not any(map(is_running, pids)), 10, "the end of the daemon")


@pytest.mark.parametrize("by", ["unmount", "mount"])
@pytest.mark.parametrize("stopped", ["daemon", "both"])
def test_stopped_daemon_is_ended(trees: Trees, stopped: str, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tree_ending, tree_mount):
        monkeypatch.setattr(module, "ANSWER_S", 1.0)
    tree = trees.mount()
    daemon = trees.daemon(tree)
    until = os.fspath(trees.top / "until")
    reader = trees.read(tree.folder, until=until)
    wait_until(lambda: reader.files > 1, 10)
    pids = place_of(trees).read_pids() if stopped == "both" else [daemon]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    (found,) = list_trees()
    assert found.state == "silent"
    begin_s = time.monotonic()
    again = None
    if by == "unmount":
        assert unmount_tree(tree.digest)
    else:  # the next job is not hindered by it
        again = mount_tree(trees.url, options=TreeOptions(idle_s=0.0))
    took_s = time.monotonic() - begin_s
    Path(until).touch()
    outcome = reader.end(20)
    assert not outcome["wrong"] and outcome.errors
    trees.note(f"{stopped} stopped; ended by {by} in {took_s:.1f} s", outcome)
    wait_until(lambda: not any(map(is_running, pids)), 5)
    if again is not None:
        assert trees.daemon(again) not in pids
        outcome = check(trees.read(again.folder).end())
        assert not outcome.errors
        assert again.unmount()
    trees.wait_gone()


def test_a_stopped_daemon_that_does_not_end_is_reported(trees: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then an image is unpacked: nothing of the mount can be used."""
    for module in (tree_ending, tree_mount):
        monkeypatch.setattr(module, "ANSWER_S", 0.3)
    monkeypatch.setattr(tree_ending, "END_S", 1.0)
    tree = trees.mount()
    pids = place_of(trees).read_pids()
    state = Path(place_of(trees).folder, "state")
    before = state.read_bytes()
    state.write_text("{}")  # whom to end is not known: as one that the kernel does not let end
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    with pytest.raises(NotAnsweringError, match="cannot be ended"):
        mount_tree(trees.url)
    source = open_source(trees.url, ("python3", "train.py"))
    assert (source.how, source.digest) == ("unpacked", tree.digest)
    assert os.path.exists(source.lock_path), "who has it locked keeps the files"
    source.close()
    state.write_bytes(before)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    unmount_tree(tree.digest, force=True)  # if it does not end already: it was asked to while it was stopped
    trees.wait_gone()


# ---- the store ---------------------------------------------------------------------------------------------


FAULTS = {
    "status 500, for ever": [HttpFault(HttpKind.STATUS, "packs/*", status=500)],
    "status 503, for a while": [HttpFault(HttpKind.STATUS, "packs/*", requests=range(6))],
    "status 404": [HttpFault(HttpKind.STATUS, "packs/*", status=404)],
    "no answer": [HttpFault(HttpKind.SILENCE, "packs/*")],
    "stalls in the body": [HttpFault(HttpKind.STALL, "packs/*", keep_bytes=5000)],
    "stalls once": [HttpFault(HttpKind.STALL, "packs/*", keep_bytes=5000, requests={2})],
    "drips": [HttpFault(HttpKind.DRIP, "packs/*", drip_bytes=100, delay_s=0.05)],
    "short bodies": [HttpFault(HttpKind.SHORT, "packs/*", keep_bytes=3000)],
    "short bodies, for a while": [HttpFault(HttpKind.SHORT, "packs/*", keep_bytes=3000, requests=range(4))],
    "connections reset": [HttpFault(HttpKind.RESET, "packs/*", keep_bytes=100)],
    "another range": [HttpFault(HttpKind.OTHER_RANGE, "packs/*")],
    "no range": [HttpFault(HttpKind.LYING_RANGE, "packs/*")],
    "a flipped bit in one block": [HttpFault(HttpKind.WRONG, "packs/*", first=150_000, last=150_000)],
    "flipped bits, for ever": [HttpFault(HttpKind.WRONG, "packs/*", keep_bytes=77)],
    "flipped bits, for a while": [HttpFault(HttpKind.WRONG, "packs/*", keep_bytes=77, requests=range(3))],
}
MOSTLY_RIGHT = {"a flipped bit in one block"}
HARMLESS = {
    "status 503, for a while",
    "stalls once",
    "short bodies, for a while",
    "flipped bits, for a while",
}


@pytest.mark.parametrize("case", FAULTS)
@pytest.mark.parametrize("how", ["read", "mapped"])
def test_store_fails(trees: Trees, case: str, how: str) -> None:
    tree = trees.mount(deadline_s=DEADLINE_S)
    trees.server.plan[:] = FAULTS[case]
    source = trees.built.source if case in MOSTLY_RIGHT else some(trees, "1/file1", "3/file3")
    outcome = trees.read(tree.folder, source=source, how=how).end()
    trees.note(f"{case} ({how})", outcome)
    check(outcome)
    if case in HARMLESS:
        assert not outcome.errors
    else:
        assert outcome.errors
        assert set(outcome) <= {"right", "wrong", "EIO", "SIGBUS", "slowest_s"}
        assert how == "mapped" or bool(outcome["right"]) == (case in MOSTLY_RIGHT)
    trees.server.plan[:] = []
    wait_until(lambda: not check(trees.read(tree.folder).end()).errors, 30, "the store's recovery")


def some(trees: Trees, *names: str) -> str:
    """A folder with a few of the source's files."""
    source = trees.top / "some"
    for name in names:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(os.path.join(trees.built.source, name), source / name)
    return os.fspath(source)


def test_store_is_gone(trees: Trees) -> None:
    """What is cached can be read, the rest cannot."""
    tree = trees.mount(deadline_s=DEADLINE_S)
    Path(tree.folder, "0/file0").read_bytes()
    tree.unmount()
    wait_until(lambda: not list_trees(), 5)
    again = trees.mount(deadline_s=DEADLINE_S)
    trees.server.close()
    assert Path(again.folder, "0/file0").read_bytes() == Path(trees.built.source, "0/file0").read_bytes()
    outcome = check(trees.read(again.folder, source=some(trees, "3/file3")).end())
    trees.note("the store is gone", outcome)
    assert outcome.errors and not outcome["right"]


# ---- the cache ---------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    chance = random.Random(1)
    data = bytearray(path.read_bytes())
    for _ in range(max(20, len(data) // 50_000)):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    with path.open("r+b") as file:  # the same file
        file.write(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 3)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def fill_with_zeros(path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(bytes(size))


def fill_with_ones(path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(b"\1" * size)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "flipped bits": flip,
    "cut": cut,
    "empty": empty,
    "zeros": fill_with_zeros,
    "ones": fill_with_ones,
    "removed": Path.unlink,
}
NAMES = ("data", "sums", "present", "index", "erofs")
CASES = [
    (name, how, when)
    for name in NAMES
    for how in DAMAGES
    for when in ("while it is mounted", "before it is mounted")
]


def cached_file(trees: Trees, name: str) -> Path:
    directory = trees.cache / TREES / trees.built.digest
    return next(path for path in directory.iterdir() if path.name.partition("-")[0] == name)


@pytest.mark.parametrize(("name", "how", "when"), CASES)
def test_cache_is_damaged(trees: Trees, name: str, how: str, when: str) -> None:
    tree = trees.mount(deadline_s=DEADLINE_S)
    fill(trees, tree)
    wait_until(lambda: any(trees.cache.rglob("erofs-*")), 10, "the metadata in the cache")
    if when == "before it is mounted":
        tree.unmount()
        wait_until(lambda: not list_trees(), 5)
        DAMAGES[how](cached_file(trees, name))
        tree = trees.mount(deadline_s=DEADLINE_S)
    else:
        DAMAGES[how](cached_file(trees, name))
    outcome = check(trees.read(tree.folder).end())
    trees.note(f"{name}: {how}, {when}", outcome)
    assert not outcome.errors  # all of it can be fetched again


def test_cache_is_damaged_and_the_store_is_gone(trees: Trees) -> None:
    tree = trees.mount(deadline_s=DEADLINE_S)
    fill(trees, tree)
    trees.server.close()
    flip(cached_file(trees, "data"))
    names = [f"{number}/file{number}" for number in range(7)]
    outcome = check(trees.read(tree.folder, source=some(trees, *names)).end())
    trees.note("data: flipped bits, and the store is gone", outcome)
    assert outcome.errors and outcome["right"]


@pytest.mark.parametrize("room", ["from the start", "later"])
def test_disk_is_full(trees: Trees, room: str) -> None:
    """The tree has some 12 MB."""
    trees.cache.mkdir()
    kernel.mount("tmpfs", os.fspath(trees.cache), "tmpfs", 0, "size=6m,mode=700")
    if room == "from the start":
        os.mkdir(trees.cache / "other")
        with pytest.raises(OSError, match="No space"), open(trees.cache / "other" / "data", "wb") as file:
            for _ in range(7 << 6):
                file.write(bytes(1 << 14))
    tree = trees.mount(deadline_s=5.0)
    outcome = check(trees.read(tree.folder).end(), 5.0)
    trees.note(f"disk full, {room}", outcome)
    assert not outcome.errors
    assert tree.status()["not_kept"]
    pids = place_of(trees).read_pids()
    assert tree.unmount()
    wait_until(lambda: not any(map(is_running, pids)), 10)
    assert kernel.unmount(os.fspath(trees.cache))


# ---- what is known of it -------------------------------------------------------------------------------------


def test_what_cannot_be_read_is_reported_and_remembered(trees: Trees) -> None:
    """Before the reader has its error; and by the next mount, until it can be read again."""
    tree = trees.mount(deadline_s=0.3)
    assert tree.unreadable == ()
    trees.server.plan[:] = [HttpFault(HttpKind.WRONG, "packs/*", keep_bytes=7)]
    before_ns = time.monotonic_ns()
    with pytest.raises(OSError, match="Input/output error"):
        Path(tree.folder, "0/file0").read_bytes()
    (fault, *_) = read_faults(tree.faults_path, before_ns)
    assert fault.is_damage and fault.blocks
    assert (
        trees.server.url in fault.why
        and trees.built.pack in fault.why
        and f"block {fault.blocks[0]}," in fault.why
    )
    again = trees.mount()  # by the same daemon
    assert again.is_damaged and again.unreadable
    again.unmount()
    wait_until(lambda: not list_trees(), 5)
    other = trees.mount(deadline_s=0.3)  # by another one
    assert other.is_damaged and trees.built.pack in other.unreadable[0]
    trees.server.plan[:] = []
    assert trees.mount().unreadable == (), "somebody has mended the store"
    assert not check(trees.read(tree.folder).end()).errors
    trees.server.plan[:] = [HttpFault(HttpKind.STATUS, "packs/*", status=500)]


def test_the_end_of_a_daemon_is_reported(trees: Trees) -> None:
    tree = trees.mount()
    kill(trees.daemon(tree))
    trees.wait_gone()
    assert [each.why for each in read_faults(tree.faults_path, 0)] == [
        "the process that serves its files was killed by signal 9"
    ]
    again = trees.mount()
    lease = again.hold()
    assert again.unmount(force=True)
    lease.close()
    assert read_faults(tree.faults_path, 0)[-1].why == "it was unmounted by force"
