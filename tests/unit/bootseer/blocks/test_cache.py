"""The cache of a user: what is used stays, what is old goes first, what is half removed is never seen."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from pathlib import Path

import pytest

from bootseer.blocks.cache import GONE, Cache
from bootseer.blocks.cache import open_cache as open_user_cache
from bootseer.blocks.tree_cache import TreeCache
from bootseer.blocks.tree_files import USE_BYTE
from bootseer.cache_folder import Limit
from bootseer.errors import ConfigError, StorageError
from bootseer.linux.locks import try_lock
from tests.support import wait_until
from tests.unit.bootseer.blocks.trees import Tree, fill_all, make_tree, open_cache, open_root

TREES = [make_tree(6, source=f"tree {n}") for n in range(4)]


def put(root: Cache, *trees: Tree, used_s: int = 1_000_000) -> None:
    """Caches trees whole; the first one is the oldest."""
    for age, tree in enumerate(trees):
        with open_cache(root, tree) as cache:
            fill_all(cache, tree)
        lock = os.path.join(root.folder, "trees", tree.digest, "lock")
        os.utime(lock, (used_s + age, used_s + age))


def digests(root: Cache) -> list[str]:
    return [tree.digest for tree in root.trees()]


@pytest.fixture
def root(tmp_path: Path) -> Cache:
    return open_root(tmp_path)


def test_variables_make_a_cache(tmp_path: Path) -> None:
    directory = os.fspath(tmp_path / "mine")
    root = open_user_cache({"BOOTSEER_CACHE": directory, "BOOTSEER_CACHE_LIMIT": "3MiB"})
    assert (root.folder, root.limit_bytes()) == (directory, 3 << 20)
    assert open_user_cache({"BOOTSEER_CACHE": directory}).limit == Limit()
    with pytest.raises(ConfigError):
        open_user_cache({"BOOTSEER_CACHE": directory, "BOOTSEER_CACHE_LIMIT": "a lot"})


def test_sizes_are_those_on_disk(root: Cache) -> None:
    with open_cache(root, TREES[0]) as cache:
        empty = root.statistics()["bytes"]
        assert empty < 100_000  # the file of blocks is a hole of 768 KiB
        cache.fill(0, TREES[0].raws[0])
        cache.save()
        assert 128 << 10 <= root.statistics()["bytes"] - empty < 160 << 10


def test_the_least_recently_used_go_first(root: Cache) -> None:
    put(root, *TREES)
    sizes = [tree.size_bytes for tree in root.trees()]
    done = root.collect(sum(sizes[:2]))
    assert (done.trees, done.left_bytes) == (2, sum(sizes[:2]))
    assert digests(root) == [TREES[3].digest, TREES[2].digest]
    with open_cache(root, TREES[2]):
        pass  # used now
    root.collect(sizes[0])
    assert digests(root) == [TREES[2].digest]
    statistics = root.statistics()
    assert (statistics["evicted"], statistics["trees"]) == (3, 1)


def test_a_tree_in_use_stays_whoever_uses_it(root: Cache) -> None:
    put(root, *TREES)
    with open_root(os.path.dirname(root.folder)).open_tree(TREES[0].digest, TREES[0].count) as cache:
        done = root.collect(0)
        assert (done.trees, digests(root)) == (3, [TREES[0].digest])
        assert cache.missing(range(TREES[0].count)) == []
        assert cache.try_read_block(1) == TREES[0].raws[1]
    assert root.collect(0).trees == 1
    assert root.trees() == []


def test_a_tree_that_grows_pushes_out_others(tmp_path: Path) -> None:
    root = open_root(tmp_path)
    put(root, TREES[0])
    room = root.statistics()["bytes"] * 3 // 2
    root = open_root(tmp_path, limit=Limit(max_bytes=room))
    big = make_tree(600, source="big")
    with open_cache(root, big) as cache:
        for number, raw in enumerate(big.raws):
            cache.fill(number, raw)
        assert digests(root) == [big.digest]  # the other one went
        assert cache.full_reason  # and it was not enough
        assert 0 < cache.statistics()["filled"] < big.count
        kept = set(range(big.count)) - set(cache.missing(range(big.count)))
        assert all(cache.try_read_block(number, len(big.raws[number])) == big.raws[number] for number in kept)


def test_an_evicted_tree_can_be_cached_again(root: Cache) -> None:
    put(root, TREES[0])
    root.collect(0)
    assert root.read_index(TREES[0].digest) is None
    with open_cache(root, TREES[0]) as cache:
        assert cache.missing(range(6)) == list(range(6))
        fill_all(cache, TREES[0])
        assert root.read_index(TREES[0].digest) == TREES[0].data


def test_opening_and_evicting_at_once(root: Cache) -> None:
    """Whoever has a tree open finds what it has written, at any time."""
    tree = TREES[0]
    errors: list[str] = []
    is_over = threading.Event()

    def use(first: int) -> None:
        number = first
        while not is_over.wait(0.001):
            with open_cache(root, tree) as cache:
                number = (number + 1) % tree.count
                if not cache.fill(number, tree.raws[number]):
                    errors.append("refused")
                if cache.try_read_block(number, len(tree.raws[number])) != tree.raws[number]:
                    errors.append(f"block {number} is lost")
                if not os.path.exists(os.path.join(root.folder, "trees", tree.digest, "lock")):
                    errors.append("taken away while in use")

    users = [threading.Thread(target=use, args=(first,)) for first in range(2)]
    for thread in users:
        thread.start()
    end_s = time.monotonic() + 30.0
    while root.collect(0) and root.statistics()["evicted"] < 3 and time.monotonic() < end_s:
        pass
    is_over.set()
    for thread in users:
        thread.join()
    assert not errors
    assert root.statistics()["evicted"] >= 3
    root.collect(0)
    assert os.listdir(os.path.join(root.folder, "trees")) == []


def test_whoever_waits_for_a_tree_that_goes_gets_a_new_one(root: Cache) -> None:
    put(root, TREES[0])
    path = Path(root.folder) / "trees" / TREES[0].digest
    lock = os.open(path / "lock", os.O_RDWR)
    assert try_lock(lock, USE_BYTE)  # as one who is about to take it away
    opened: list[TreeCache] = []
    thread = threading.Thread(target=lambda: opened.append(open_cache(root, TREES[0])))
    thread.start()
    inode = os.fstat(lock).st_ino
    wait_until(lambda: any(_opens(fd, inode) for fd in os.listdir("/proc/self/fd") if int(fd) != lock))
    path.rename(path.parent / (GONE + "0123"))
    os.close(lock)
    thread.join()
    with opened[0] as cache:
        assert cache.missing(range(6)) == list(range(6))
        fill_all(cache, TREES[0])
        assert digests(root) == [TREES[0].digest]
    with open_cache(root, TREES[0]) as cache:
        assert cache.missing(range(6)) == []


def _opens(fd: str, inode: int) -> bool:
    try:
        return os.fstat(int(fd)).st_ino == inode
    except OSError:
        return False


def test_what_a_killed_collection_left_is_removed(root: Cache) -> None:
    put(root, TREES[0])
    trees = Path(root.folder) / "trees"
    (trees / TREES[0].digest).rename(trees / (GONE + "0123"))
    (trees / TREES[1].digest).mkdir()  # somebody was killed between two steps of opening it
    (trees / "README").write_text("not ours")
    root.collect(0)
    assert sorted(os.listdir(trees)) == ["README"]


def test_files_in_the_making_that_nobody_makes_any_more_go(root: Cache) -> None:
    put(root, TREES[0])
    directory = Path(root.folder) / "trees" / TREES[0].digest
    for name, age_s in ((".tmp-saved-1", 7200), (".tmp-saved-2", 0)):
        (directory / name).write_bytes(b"")
        now_s = (directory / name).stat().st_mtime
        os.utime(directory / name, (now_s - age_s, now_s - age_s))
    with open_cache(root, TREES[0]):
        assert not (directory / ".tmp-saved-1").exists()
        assert (directory / ".tmp-saved-2").exists()


def test_an_index_is_kept_as_it_is_or_not_at_all(root: Cache) -> None:
    tree = TREES[0]
    assert root.read_index(tree.digest) is None
    with open_cache(root, tree):
        assert root.read_index(tree.digest) == tree.data
        with pytest.raises(ValueError, match="another tree"):
            root.write_index(TREES[1].digest, tree.data)
        (Path(root.folder) / "trees" / tree.digest / "index").write_bytes(TREES[1].data)
        assert root.read_index(tree.digest) is None


@pytest.mark.parametrize("digest", ["../../../etc", "AB" * 32, "", "ab" * 31, "ab" * 32 + "\n"])
def test_only_digests_name_trees(root: Cache, digest: str) -> None:
    for call in (lambda: root.open_tree(digest, 1), lambda: root.read_index(digest)):
        with pytest.raises(ValueError, match="no digest"):
            call()


def test_a_file_in_the_place_of_a_directory_is_an_error_of_ours(root: Cache) -> None:
    os.makedirs(os.path.join(root.folder, "trees"))
    path = os.path.join(root.folder, "trees", TREES[0].digest)
    Path(path).write_bytes(b"")
    with pytest.raises(StorageError, match=TREES[0].digest):
        root.open_tree(TREES[0].digest, 1)


def test_a_link_is_not_followed(root: Cache, tmp_path: Path) -> None:
    with open_cache(root, TREES[0]):
        pass
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    data = Path(root.folder) / "trees" / TREES[0].digest / "data"
    data.unlink()
    data.symlink_to(victim)
    with pytest.raises(StorageError):
        root.open_tree(TREES[0].digest, TREES[0].count)
    assert victim.read_bytes() == b"mine"


# ---- file systems that fail ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_without_locks_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str], number: int
) -> None:
    """Lustre without -o flock, some of FUSE."""

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    root = Cache(os.fspath(tmp_path / "cache"))
    put(root, TREES[1])
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with open_cache(root, TREES[0]) as cache:
        assert "has no locks" in cache.full_reason and "BOOTSEER_CACHE" in cache.full_reason
        assert not cache.fill(0, TREES[0].raws[0])
        assert cache.try_read_block(0) is None
        cache.save()
    assert said and os.strerror(number) in said[0]
    assert root.collect(0).trees == 0, "without locks nobody knows what is in use"


def test_a_tree_whose_directory_cannot_be_read_costs_only_itself(root: Cache) -> None:
    """As ESTALE or EIO would: here the kernel says ELOOP."""
    put(root, TREES[0])
    path = Path(root.folder) / "trees" / TREES[1].digest
    path.symlink_to(path)
    assert digests(root) == [TREES[0].digest, TREES[1].digest]
    with open_cache(root, TREES[2]) as cache:
        assert cache.fill(0, TREES[2].raws[0])
    assert root.collect(0).trees == 2


def test_room_that_cannot_be_made_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    root = Cache(os.fspath(tmp_path / "cache"), limit=Limit(max_bytes=1))

    def fail(_: object) -> os.statvfs_result:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with open_cache(root, TREES[0]) as cache:
        monkeypatch.setattr(root, "_remove_gone", lambda: fail(None))
        assert cache.fill(0, TREES[0].raws[0]), "the disk is not full"
    assert any("no space can be freed" in line and "Stale" in line for line in said)
