"""Trees unpacked into folders: as they were built, hot files first, nothing outside, nothing half."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bootseer import aio
from bootseer.errors import ConfigError, DigestMismatch, IntegrityError, StorageError, Truncated, Unavailable
from bootseer.storage.local.store import LocalStore
from bootseer.storage.memory import MemoryStore
from bootseer.tree.builder.building import build
from bootseer.tree.builder.from_directory import DirectorySource
from bootseer.tree.index import BLOCK_BYTES, Index
from bootseer.tree.reading import StoreBlocks
from bootseer.tree.unpack.tree import TEMPORARY, Materialised, materialise
from tests import support
from tests.support import lacking, wait_until
from tests.testing.faulty_store import Fault, FaultyStore, Kind
from tests.testing.trees import FileFacts, MemoryPacks, make_tree, snapshot, write_tree

MIB = 1 << 20
IS_ROOT = os.geteuid() == 0
TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def packed(directory: os.PathLike[str] | str, **options: Any) -> MemoryPacks:
    packs = MemoryPacks()
    packs.index = build(DirectorySource(os.fspath(directory)), packs.put, **options).tree
    return packs


def unpack(packs: MemoryPacks, directory: Path, **options: Any) -> Materialised:
    directory.mkdir(exist_ok=True)
    assert packs.index is not None
    return materialise(packs.index, os.fspath(directory), packs, **options)


def plain(seen: dict[bytes, FileFacts]) -> dict[bytes, FileFacts]:
    """Without what only root has: owners."""
    return {path: each._replace(uid=0, gid=0) for path, each in seen.items()}


def temporaries(directory: Path) -> list[str]:
    return [
        name for _, _, names in os.walk(directory) for name in names if name.startswith(os.fsdecode(TEMPORARY))
    ]


@pytest.fixture
def plain_tree(tmp_path) -> Path:
    """Files of some sizes, for any user."""
    directory = tmp_path / "source"
    chance = random.Random(1)
    for path, size in [
        ("a/one", 10),
        ("a/two", 5000),
        ("a/large", 5 * MIB + 17),
        ("b/c/three", 200_000),
        ("b/four", 0),
    ]:
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(chance.randbytes(size))
    (directory / "b" / "link").symlink_to("../a/one")
    (directory / "b" / "again").hardlink_to(directory / "a" / "two")
    os.utime(directory / "b", ns=(5, 1_600_000_000_000_000_001))
    return directory


# ---- all attributes ----------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32), entries=st.integers(0, 80), is_private=st.booleans())
def test_made_trees_come_out_as_they_went_in(tmp_path_factory, seed: int, entries: int, is_private: bool) -> None:
    if not IS_ROOT:
        pytest.skip("only root may read files without any rights; for others see the next test")
    base = tmp_path_factory.mktemp("made")
    (base / "source").mkdir()
    write_tree(os.fspath(base / "source"), make_tree(random.Random(seed), entries, as_root=True))
    packs = packed(base / "source")
    assert packs.index is not None
    hot = random.Random(seed).sample(range(packs.index.block_count), packs.index.block_count // 3)
    done = unpack(packs, base / "target", hot=hot, threads=3, is_private=is_private)
    assert snapshot(os.fspath(base / "target")) == snapshot(os.fspath(base / "source"))
    assert done.skipped == {}
    assert sorted(packs.asked) == sorted(set(packs.asked)), "each block once"
    shutil.rmtree(base)


def test_plain_tree_for_any_user(tmp_path, plain_tree) -> None:
    packs = packed(plain_tree)
    seen: list[tuple[int, int]] = []
    done = unpack(packs, tmp_path / "target", on_progress=lambda count, files: seen.append((count, files)))
    assert snapshot(os.fspath(tmp_path / "target")) == snapshot(os.fspath(plain_tree))
    assert (done.files, done.kept_files, done.hot_files) == (5, 0, 0)
    assert done.written_bytes == 10 + 5000 + 5 * MIB + 17 + 200_000
    assert (sum(count for count, _ in seen), sum(files for _, files in seen)) == (done.written_bytes, 4)


AS_USER = """
import json, os, sys
from bootseer.storage.local.store import LocalStore
from bootseer import aio
from bootseer.errors import BootseerError
from bootseer.tree.compression import decompress, compress
from bootseer.tree.index import decode
from bootseer.tree.unpack.tree import materialise
from bootseer.tree.reading import StoreBlocks
import bootseer.storage.engine.ranges, bootseer.storage.local.reading, concurrent.futures.thread
decompress(compress(b"x"), 10, "")  # all is imported: this user may not read the interpreter's folder
store, folder, digest, resume = sys.argv[1:]
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
os.umask(0o027)
with open(f"{store}/index/{digest}", "rb") as file:
    index = decode(file.read(), digest, "index")
try:
    done = materialise(index, folder, StoreBlocks(LocalStore(store), index), resume=bool(resume))
    print(json.dumps(done._asdict()))
except BootseerError as error:
    print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
aio.close()
"""


class UserTree:
    """A tree in a store that anybody may read, to be unpacked by nobody."""

    def __init__(self, base: str, source: str) -> None:
        self.store, self.folder = os.path.join(base, "store"), os.path.join(base, "target")
        os.makedirs(os.path.join(self.store, "packs"))
        os.makedirs(os.path.join(self.store, "index"))
        os.mkdir(self.folder)
        os.chown(self.folder, 65534, 65534)
        os.chmod(base, 0o755)

        def put(digest: str, data: bytes) -> None:
            Path(self.store, "packs", digest).write_bytes(data)

        self.tree = build(DirectorySource(source), put)
        Path(self.store, "index", self.tree.digest).write_bytes(self.tree.index_bytes)

    def unpack(self, program: support.Programs, *, resume: bool = False) -> dict[str, Any]:
        run = program(
            sys.executable,
            *("-c", AS_USER, self.store, self.folder, self.tree.digest, "yes" if resume else ""),
            env={"PYTHONPATH": TOP},
        )
        assert run.status == 0, run.stderr
        found: dict[str, Any] = json.loads(run.stdout)
        return found


@pytest.mark.system
@pytest.mark.parametrize("seed", range(3))
def test_ordinary_user_gets_what_he_may_have(tmp_path, program, seed: int) -> None:
    if not IS_ROOT:
        pytest.skip("needs root to make such a tree, and to become somebody else")
    (tmp_path / "source").mkdir()
    tree = make_tree(random.Random(seed), 120, as_root=True)
    tree[b""] = tree[b""]._replace(mode=0o40755)
    write_tree(os.fspath(tmp_path / "source"), tree)
    with tempfile.TemporaryDirectory() as base:
        made = UserTree(base, os.fspath(tmp_path / "source"))
        done = made.unpack(program)
        expected, devices, bits, xattrs = {}, 0, 0, 0
        counted: set[bytes] = set()
        for path, seen in snapshot(os.fspath(tmp_path / "source")).items():
            is_first = seen.first_name not in counted
            counted.add(seen.first_name)
            if stat.S_ISCHR(seen.mode) or stat.S_ISBLK(seen.mode):
                devices += is_first
                continue
            bits += is_first and bool(seen.mode & 0o6000)
            kept = tuple(pair for pair in seen.xattrs if pair[0].startswith(b"user."))
            xattrs += is_first * (len(seen.xattrs) - len(kept))
            expected[path] = seen._replace(mode=seen.mode & ~0o6000, uid=65534, gid=65534, xattrs=kept)
        assert snapshot(made.folder) == expected
        wanted = {"devices": devices, "setuid and setgid bits": bits, "extended attributes": xattrs}
        assert done["skipped"] == {name: count for name, count in wanted.items() if count}
        # Again over what is there: folders that not even their owner may open are no obstacle.
        again = made.unpack(program, resume=True)
        assert snapshot(made.folder) == expected
        assert (again["files"], again["kept_files"]) == (0, done["files"])


@pytest.mark.skipif(not IS_ROOT, reason="needs root")
def test_root_can_have_everything_for_himself(tmp_path) -> None:
    """No file may run as its owner when its owner is another one than it was."""
    (tmp_path / "source").mkdir()
    write_tree(os.fspath(tmp_path / "source"), make_tree(random.Random(5), 100, as_root=True))
    done = unpack(packed(tmp_path / "source"), tmp_path / "target", owners="mine")
    seen = snapshot(os.fspath(tmp_path / "target"))
    assert {(each.uid, each.gid) for each in seen.values()} == {(0, 0)}
    assert not [path for path, each in seen.items() if each.mode & 0o6000 and not stat.S_ISLNK(each.mode)]
    assert not [path for path, each in seen.items() if stat.S_ISCHR(each.mode) or stat.S_ISBLK(each.mode)]
    assert {name for each in seen.values() for name, _ in each.xattrs} == {b"user.plain", b"user.\xff odd=name"}
    assert done.skipped["devices"] > 0


def test_holes_stay_holes(tmp_path) -> None:
    (tmp_path / "source").mkdir()
    with open(tmp_path / "source" / "sparse", "wb") as file:
        file.truncate(1 << 40)
        file.seek(1 << 30)
        file.write(b"data")
    unpack(packed(tmp_path / "source"), tmp_path / "target")
    found = os.stat(tmp_path / "target" / "sparse")
    assert found.st_size == 1 << 40
    assert found.st_blocks * 512 <= 2 * BLOCK_BYTES
    with open(tmp_path / "target" / "sparse", "rb") as file:
        file.seek((1 << 30) - 1)
        assert file.read(6) == b"\0data\0"


# ---- hot files first ---------------------------------------------------------------------------------------


def test_hot_files_are_whole_before_the_others(tmp_path, plain_tree) -> None:
    packs = packed(plain_tree)
    assert packs.index is not None
    index = packs.index
    large = index.names.index(b"large")
    hot = [index.runs[large][0] // 32 + 3]  # one block in its middle
    directory = tmp_path / "target"
    seen: dict[str, Any] = {}

    def look() -> None:
        seen["files"] = sorted(
            str(path.relative_to(directory)) for path in directory.rglob("*") if not path.is_dir()
        )
        seen["asked"] = list(packs.asked)
        seen["modes"] = {stat.S_IMODE(path.stat().st_mode) for path in directory.rglob("*") if path.is_dir()}
        seen["same"] = (directory / "a" / "large").read_bytes() == (plain_tree / "a" / "large").read_bytes()

    done = unpack(packs, directory, hot=hot, on_hot_done=look)
    assert done.hot_files == 1
    # Its last piece lies with small files; they are whole as well, as their block was there.
    assert set(seen["files"]) >= {"a/large", "b/four", "b/link"}
    assert "b/c/three" not in seen["files"]
    assert seen["same"]
    assert seen["modes"] == {0o755}, "as they will be, but only the owner may write"
    needed = {address // 32 for _, address, _ in index.pieces(large)}
    assert set(seen["asked"]) == needed
    assert sorted(packs.asked) == sorted(set(packs.asked))
    assert snapshot(os.fspath(directory)) == snapshot(os.fspath(plain_tree))


def test_small_hot_files_do_not_make_large_ones_hot(tmp_path, plain_tree) -> None:
    packs = packed(plain_tree)
    assert packs.index is not None
    one = packs.index.names.index(b"one")
    shared = packs.index.runs[one][0] // 32
    done = unpack(packs, tmp_path / "target", hot=[shared])
    assert done.hot_files == 2
    assert packs.asked[0] == shared


def test_without_hot_blocks_all_is_there_when_reported(tmp_path, plain_tree) -> None:
    seen = []
    directory = tmp_path / "target"
    unpack(packed(plain_tree), directory, on_hot_done=lambda: seen.append(snapshot(os.fspath(directory))))
    assert seen == [snapshot(os.fspath(plain_tree))]


def test_no_file_is_ever_seen_half(tmp_path) -> None:
    """A program that looks all the time finds each file whole or not at all."""
    source, directory = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    directory.mkdir()
    sizes = {}
    for number in range(60):
        sizes[f"f{number}"] = 20_000 * (number % 20)
        (source / f"f{number}").write_bytes(bytes([number + 1]) * sizes[f"f{number}"])
    packs = packed(source)
    wrong: list[str] = []
    is_done = threading.Event()

    def look() -> None:
        while not is_done.is_set():
            for name, size in sizes.items():
                try:
                    data = (directory / name).read_bytes()
                except FileNotFoundError:
                    continue
                if len(data) != size or b"\0" in data:
                    wrong.append(name)

    looker = threading.Thread(target=look)
    looker.start()
    try:
        unpack(packs, directory, threads=4)
    finally:
        is_done.set()
        looker.join()
    assert wrong == []


# ---- what goes wrong ---------------------------------------------------------------------------------------


class Failing:
    """Gives some blocks, then an error."""

    def __init__(self, packs: MemoryPacks, good: int, error: Exception) -> None:
        self._packs, self._good, self._error = packs, good, error
        self._lock = threading.Lock()

    def read_blocks(self, numbers: Sequence[int], /) -> Iterator[tuple[int, bytes]]:
        for number, raw in self._packs.read_blocks(numbers):
            with self._lock:
                self._good -= 1
                if self._good < 0:
                    raise self._error
            yield number, raw


def half_there(tmp_path: Path, source: Path, good: int = 70) -> tuple[MemoryPacks, Path]:
    packs = packed(source)
    directory = tmp_path / "target"
    directory.mkdir()
    assert packs.index is not None
    with pytest.raises(Unavailable, match="gone"):
        materialise(packs.index, os.fspath(directory), Failing(packs, good, Unavailable("gone")), threads=1)
    return packs, directory


def test_interrupted_run_goes_on(tmp_path, plain_tree) -> None:
    for number in range(300):
        (plain_tree / "a" / f"n{number}").write_bytes(random.Random(number).randbytes(30_000))
    packs, directory = half_there(tmp_path, plain_tree)
    assert temporaries(directory) == []
    before = {path: seen for path, seen in snapshot(os.fspath(directory)).items() if stat.S_ISREG(seen.mode)}
    whole = snapshot(os.fspath(plain_tree))
    assert {path: seen.sha256 for path, seen in before.items()} == {path: whole[path].sha256 for path in before}
    assert 5 < len(before) < 290
    with pytest.raises(ConfigError, match="not empty"):
        unpack(packs, directory)
    (directory / "a" / os.fsdecode(TEMPORARY + b"5")).write_bytes(b"of a run that was killed")
    (directory / "a" / "large").write_bytes(b"not what it should be")
    packs.asked.clear()
    done = unpack(packs, directory, resume=True)
    assert done.kept_files > 5
    assert done.files + done.kept_files == 305
    assert len(packs.asked) < packs.index.block_count  # type: ignore[union-attr]
    assert snapshot(os.fspath(directory)) == whole
    packs.asked.clear()
    assert unpack(packs, directory, resume=True).files == 0
    assert packs.asked == []
    assert snapshot(os.fspath(directory)) == whole


def test_killed_run_goes_on(tmp_path, plain_tree, program) -> None:
    """Killed at any place: a few of them."""
    for number in range(200):
        (plain_tree / "a" / f"n{number}").write_bytes(random.Random(number).randbytes(40_000))
    store, directory = tmp_path / "store", tmp_path / "target"
    (store / "packs").mkdir(parents=True)
    tree = build(
        DirectorySource(os.fspath(plain_tree)), lambda digest, data: (store / "packs" / digest).write_bytes(data)
    )
    (store / "index").write_bytes(tree.index_bytes)
    directory.mkdir()
    text = f"""
import os, signal, sys
from bootseer.storage.local.store import LocalStore
from bootseer.tree.unpack import files
from bootseer.tree.index import decode
from bootseer.tree.unpack.tree import materialise
from bootseer.tree.reading import StoreBlocks
index = decode(open({os.fspath(store / "index")!r}, "rb").read(), {tree.digest!r}, "index")
left = int(sys.argv[1])
rename = os.rename
def killed(*args, **kwargs):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    rename(*args, **kwargs)
os.rename = killed
materialise(index, {os.fspath(directory)!r}, StoreBlocks(LocalStore({os.fspath(store)!r}), index), resume=True)
"""
    for left in (0, 1, 50, 120):
        run = program(sys.executable, "-c", text, left, env={"PYTHONPATH": TOP})
        assert run.status == -signal.SIGKILL, run.stderr
    run = program(sys.executable, "-c", text, 1000, env={"PYTHONPATH": TOP})
    assert run.status == 0, run.stderr
    assert snapshot(os.fspath(directory)) == snapshot(os.fspath(plain_tree))


def test_files_from_before_a_power_cut_are_written_again(tmp_path, plain_tree) -> None:
    """Their names and sizes may have been on disk when their bytes were not."""
    for number in range(300):
        (plain_tree / "a" / f"n{number}").write_bytes(random.Random(number).randbytes(30_000))
    packs, directory = half_there(tmp_path, plain_tree)
    whole = snapshot(os.fspath(plain_tree))
    zeros = sorted(path for path in (directory / "a").iterdir() if path.name.startswith("n"))[0]
    found = zeros.stat()
    zeros.write_bytes(bytes(found.st_size))
    os.utime(zeros, ns=(found.st_mtime_ns, found.st_mtime_ns))
    boot_s = time.time() + 0.01
    wait_until(lambda: time.time() > boot_s + 0.05)
    # Interrupted once more: what is kept then is what was written since.
    with pytest.raises(Unavailable, match="gone"):
        materialise(
            packs.index, os.fspath(directory), Failing(packs, 20, Unavailable("gone")), threads=1, resume=True,
            boot_s=boot_s,
        )  # fmt: skip
    done = unpack(packs, directory, resume=True, boot_s=boot_s)
    assert 0 < done.kept_files < 290
    assert snapshot(os.fspath(directory)) == whole
    assert unpack(packs, directory, resume=True).files == 0, "this boot's"


def test_foreign_files_are_not_touched(tmp_path, plain_tree) -> None:
    packs, directory = half_there(tmp_path, plain_tree, good=3)
    (directory / "b" / "mine").write_text("mine")
    with pytest.raises(ConfigError, match="'mine', which is not of this tree"):
        unpack(packs, directory, resume=True)
    assert (directory / "b" / "mine").read_text() == "mine"
    (directory / "b" / "mine").unlink()
    (directory / "b" / "c").rmdir()
    (directory / "b" / "c").write_text("a file now")
    with pytest.raises(ConfigError, match="another type"):
        unpack(packs, directory, resume=True)


def test_two_at_once_are_refused(tmp_path, plain_tree) -> None:
    packs = packed(plain_tree)
    directory = tmp_path / "target"
    errors: list[str] = []

    def another() -> None:
        try:
            unpack(packs, directory, resume=True)
        except ConfigError as error:
            errors.append(str(error))

    unpack(packs, directory, hot=[0], on_hot_done=another)
    assert errors == [f"{directory}: another process is unpacking into it"]
    assert snapshot(os.fspath(directory)) == snapshot(os.fspath(plain_tree))


@pytest.mark.system
def test_full_disk_is_one_clear_error(tmp_path, plain_tree) -> None:
    if not IS_ROOT:
        lacking("mounting a small file system needs root")
    for number in range(100):
        (plain_tree / "a" / f"n{number}").write_bytes(random.Random(number).randbytes(40_000))
    packs = packed(plain_tree)
    directory = tmp_path / "small"
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", directory], check=True)
    try:
        with pytest.raises(StorageError, match=r"small/.*No space left on device: make room there"):
            unpack(packs, directory)
        assert temporaries(directory) == []
        whole = snapshot(os.fspath(plain_tree))
        for path, seen in snapshot(os.fspath(directory)).items():
            if stat.S_ISREG(seen.mode):
                assert seen.sha256 == whole[path].sha256
        subprocess.run(["mount", "-o", "remount,size=64m", directory], check=True)
        unpack(packs, directory, resume=True)
        assert plain(snapshot(os.fspath(directory))) == plain(whole)
    finally:
        subprocess.run(["umount", directory], check=True)


def test_missing_directory_is_named(tmp_path, plain_tree) -> None:
    packs = packed(plain_tree)
    assert packs.index is not None
    with pytest.raises(StorageError, match="nowhere"):
        materialise(packs.index, os.fspath(tmp_path / "nowhere"), packs)


def test_other_blocks_than_those_asked_for(tmp_path, plain_tree) -> None:
    packs = packed(plain_tree)

    class Wrong:
        def read_blocks(self, numbers: Sequence[int], /) -> Iterator[tuple[int, bytes]]:
            return iter([(number + 1, bytes(BLOCK_BYTES)) for number in numbers])

    (tmp_path / "target").mkdir()
    assert packs.index is not None
    with pytest.raises(IntegrityError, match="other blocks"):
        materialise(packs.index, os.fspath(tmp_path / "target"), Wrong())


# ---- somebody else in the folder ---------------------------------------------------------------------------


class Meddling:
    """Does something before each batch of blocks."""

    def __init__(self, packs: MemoryPacks, meddle: Callable[[], object]) -> None:
        self._packs, self._meddle = packs, meddle

    def read_blocks(self, numbers: Sequence[int], /) -> Iterator[tuple[int, bytes]]:
        raws = list(self._packs.read_blocks(numbers))
        self._meddle()
        return iter(raws)


def test_directory_that_becomes_a_link_leads_nowhere(tmp_path, plain_tree) -> None:
    packs = packed(plain_tree)
    assert packs.index is not None
    directory, outside = tmp_path / "target", tmp_path / "outside"
    directory.mkdir()
    outside.mkdir()

    def meddle() -> None:
        if not (directory / "a").is_symlink():
            (directory / "a").rename(directory / "moved")
            (directory / "a").symlink_to(outside)

    with pytest.raises(StorageError):
        materialise(packs.index, os.fspath(directory), Meddling(packs, meddle), threads=1)
    assert list(outside.iterdir()) == []


def test_links_at_the_places_of_files_are_replaced_not_followed(tmp_path, plain_tree) -> None:
    packs = packed(plain_tree)
    assert packs.index is not None
    directory, outside = tmp_path / "target", tmp_path / "outside"
    directory.mkdir()
    outside.write_text("precious")

    def meddle() -> None:
        for entry in range(len(packs.index or ())):
            path = directory / os.fsdecode(packs.index.path(entry))  # type: ignore[union-attr]
            for name in (path, path.parent / os.fsdecode(b"%s%x" % (TEMPORARY, entry))):
                try:
                    name.symlink_to(outside)
                except FileExistsError:
                    pass

    materialise(packs.index, os.fspath(directory), Meddling(packs, meddle), threads=1)
    assert outside.read_text() == "precious"
    assert outside.stat().st_nlink == 1
    for path in (plain_tree / "a").iterdir():
        assert (directory / "a" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("is_link", [True, False])
def test_a_pipe_that_is_exchanged_leads_nowhere(tmp_path, monkeypatch, is_link: bool) -> None:
    """For a link, or another file, to something that belongs to whoever unpacks."""
    (tmp_path / "source").mkdir()
    os.mkfifo(tmp_path / "source" / "pipe", 0o666)
    packs = packed(tmp_path / "source")
    victim = tmp_path / "victim"
    if is_link:
        victim.write_text("mine")
    else:
        os.mkfifo(victim)
    victim.chmod(0o600)
    before = victim.stat()
    mknod = os.mknod

    def exchange(name: bytes, *args: Any, dir_fd: int, **more: Any) -> None:
        mknod(name, *args, dir_fd=dir_fd, **more)
        os.unlink(name, dir_fd=dir_fd)
        if is_link:
            os.symlink(victim, name, dir_fd=dir_fd)
        else:
            os.link(victim, name, dst_dir_fd=dir_fd)

    monkeypatch.setattr(os, "mknod", exchange)
    with pytest.raises(IntegrityError, match="pipe: another process changes files"):
        unpack(packs, tmp_path / "target")
    after = victim.stat()
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)


@pytest.mark.system
def test_root_does_not_unpack_into_directories_of_others(tmp_path, plain_tree) -> None:
    if not IS_ROOT:
        pytest.skip("giving a folder to another user needs root")
    packs = packed(plain_tree)
    (tmp_path / "target").mkdir()
    os.chown(tmp_path / "target", 12345, -1)
    for resume in (False, True):
        with pytest.raises(ConfigError, match="target: belongs to user 12345, not to 0"):
            unpack(packs, tmp_path / "target", resume=resume)
    assert list((tmp_path / "target").iterdir()) == []


@pytest.mark.system
def test_a_directory_that_was_given_to_its_owner_goes_on(tmp_path, plain_tree) -> None:
    if not IS_ROOT:
        pytest.skip("giving a folder to another user needs root")
    os.chown(plain_tree, 12345, 12345)
    packs = packed(plain_tree)
    unpack(packs, tmp_path / "target")
    assert (tmp_path / "target").stat().st_uid == 12345
    assert unpack(packs, tmp_path / "target", resume=True).files == 0


def test_file_that_is_swapped_while_it_is_written(tmp_path) -> None:
    """Of a large file, that several threads write: another one under its name is not touched."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "large").write_bytes(random.Random(3).randbytes(12 * MIB))
    packs = packed(tmp_path / "source")
    assert packs.index is not None
    directory, outside = tmp_path / "target", tmp_path / "outside"
    directory.mkdir()
    outside.write_text("precious")

    def meddle() -> None:
        name = directory / os.fsdecode(b"%s%x" % (TEMPORARY, 1))
        if name.exists():
            name.unlink()
            name.hardlink_to(outside)

    with pytest.raises(IntegrityError, match="another process changes files"):
        materialise(packs.index, os.fspath(directory), Meddling(packs, meddle), threads=1)
    assert outside.read_text() == "precious"


def test_names_of_ours_in_a_tree(tmp_path) -> None:
    (tmp_path / "source").mkdir()
    for name in (TEMPORARY + b"1", TEMPORARY + b"2", b"z"):
        (tmp_path / "source" / os.fsdecode(name)).write_bytes(name)
    unpack(packed(tmp_path / "source"), tmp_path / "target")
    assert snapshot(os.fspath(tmp_path / "target")) == snapshot(os.fspath(tmp_path / "source"))


# ---- blocks from a store -----------------------------------------------------------------------------------


class InStore:
    """A tree in a store whose reads may fail."""

    def __init__(self, source: Path, *plan: Fault) -> None:
        inner = MemoryStore(f"materialise-{random.getrandbits(64):x}")
        built = build(
            DirectorySource(os.fspath(source)),
            lambda digest, data: aio.run_sync(inner.publish(f"packs/{digest}", data)),
        )
        self.index: Index = built.tree
        self.store = FaultyStore(inner, plan)

    def blocks(self) -> StoreBlocks:
        return StoreBlocks(self.store, self.index)


@pytest.fixture(autouse=True)
def loop() -> Iterator[None]:
    yield
    aio.close()


def test_from_a_store(tmp_path, plain_tree) -> None:
    made = InStore(plain_tree)
    (tmp_path / "target").mkdir()
    materialise(made.index, os.fspath(tmp_path / "target"), made.blocks())
    assert snapshot(os.fspath(tmp_path / "target")) == snapshot(os.fspath(plain_tree))
    assert made.store.count("read_into") < made.index.block_count, "neighbours are read together"


def test_from_a_directory_that_is_a_store(tmp_path, plain_tree) -> None:
    (tmp_path / "store" / "packs").mkdir(parents=True)
    built = build(
        DirectorySource(os.fspath(plain_tree)),
        lambda digest, data: (tmp_path / "store" / "packs" / digest).write_bytes(data),
    )
    (tmp_path / "target").mkdir()
    blocks = StoreBlocks(LocalStore(os.fspath(tmp_path / "store")), built.tree)
    materialise(built.tree, os.fspath(tmp_path / "target"), blocks)
    assert snapshot(os.fspath(tmp_path / "target")) == snapshot(os.fspath(plain_tree))


def test_damaged_block_is_read_another_way(tmp_path, plain_tree) -> None:
    made = InStore(plain_tree, Fault(Kind.WRONG, attempts={0}, first=700_000, last=700_000, calls={0}))
    (tmp_path / "target").mkdir()
    materialise(made.index, os.fspath(tmp_path / "target"), made.blocks())
    assert snapshot(os.fspath(tmp_path / "target")) == snapshot(os.fspath(plain_tree))
    assert [call.attempt for call in made.store.calls].count(1) == 1


def test_block_that_stays_damaged_is_named(tmp_path, plain_tree) -> None:
    made = InStore(plain_tree, Fault(Kind.WRONG, last=0))
    (tmp_path / "target").mkdir()
    with pytest.raises(
        DigestMismatch, match=r"memory://.*: block \d+ at byte \d+ of packs/[0-9a-f]{64} is damaged"
    ):
        materialise(made.index, os.fspath(tmp_path / "target"), made.blocks(), threads=1)
    assert temporaries(tmp_path / "target") == []


def test_pack_that_is_too_short(tmp_path, plain_tree) -> None:
    made = InStore(plain_tree)
    path = made.index.pack_path(0)
    data = bytearray(made.index.packs[0][1] - 1000)
    aio.run_sync(made.store.inner.publish(path, bytes(data)))
    (tmp_path / "target").mkdir()
    with pytest.raises((Truncated, DigestMismatch)):
        materialise(made.index, os.fspath(tmp_path / "target"), made.blocks())


def test_frame_that_holds_something_else(tmp_path) -> None:
    """The digest is right, so whoever built the tree is wrong; nothing larger than a block is made of it."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "file").write_bytes(b"text " * 10_000)
    made = InStore(tmp_path / "source")
    row = bytearray(made.index.blocks)
    row[44:48] = (BLOCK_BYTES).to_bytes(4, "little")
    index = msgspec.structs.replace(made.index, blocks=bytes(row))
    (tmp_path / "target").mkdir()
    with pytest.raises(IntegrityError, match="block 0 at byte 0"):
        materialise(index, os.fspath(tmp_path / "target"), StoreBlocks(made.store, index))


def test_unavailable_store(tmp_path, plain_tree) -> None:
    made = InStore(plain_tree, Fault(Kind.ERROR, error=StorageError))
    (tmp_path / "target").mkdir()
    with pytest.raises(StorageError, match="by plan"):
        materialise(made.index, os.fspath(tmp_path / "target"), made.blocks())


def test_progress_that_fails_ends_the_threads(tmp_path, plain_tree) -> None:
    """The leak check looks for them."""

    def fail(_: int, __: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        unpack(packed(plain_tree), tmp_path / "target", on_progress=fail)
    assert temporaries(tmp_path / "target") == []


def test_file_systems_without_attributes_are_counted(tmp_path, plain_tree, monkeypatch) -> None:
    try:
        os.setxattr(plain_tree / "a" / "one", b"user.some", b"value")
    except OSError as error:
        pytest.skip(f"no extended attributes here: {error}")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    packs = packed(plain_tree)
    monkeypatch.setattr(os, "setxattr", refuse)
    assert unpack(packs, tmp_path / "target").skipped == {"extended attributes": 1}
