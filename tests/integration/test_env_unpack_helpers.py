"""Environments unpacked by several processes: as by one, and whole whatever becomes of these."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bootseer import aio
from bootseer.blocks.cache import open_cache
from bootseer.env.restore import unpack as restore_unpack
from bootseer.env.restore import unpack_helpers, unpack_processes
from bootseer.env.restore.in_place import is_there
from bootseer.env.restore.restore import Restored, restore
from bootseer.env.restore.unpack_helpers import WORTH_FILES
from bootseer.env.restore.unpack_processes import UnpackProcess
from bootseer.env.service.mount import end_spares
from bootseer.errors import DigestMismatch, StorageError
from bootseer.storage.local.store import LocalStore
from bootseer.tree.reading import StoreBlocks
from bootseer.tree.unpack import portions as materialise_portions
from tests.integration.test_env_restore import (
    IS_ROOT,
    KEY,
    PLAIN,
    TOP,
    Env,
    make_env,
    make_target,
    seen,
    staged,
    tmpfs,
    wait_tidy,
    wanted,
    write,
)
from tests.support import Programs, find_process, is_running, python, wait_until
from tests.testing.trees import Tree, make_tree, write_tree


@pytest.fixture(autouse=True)
def _two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two processes, however many cores there are, and several portions for each, however little there is."""
    monkeypatch.setenv("BOOTSEER_CACHE", os.fspath(tmp_path / "cache"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(materialise_portions, "MIN_COST_BYTES", 1 << 20)
    yield
    aio.close()


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """By whom environments are unpacked, in order."""
    found: list[str] = []
    real = restore_unpack.materialise

    def materialise(*arguments: Any, helpers: Any = None, **more: Any) -> Any:
        found.append("one process" if helpers is None else f"{helpers.count} others")
        return real(*arguments, helpers=helpers, **more)

    monkeypatch.setattr(restore_unpack, "materialise", materialise)
    return found


def large(env: Env) -> Env:
    """Says that it is worth while."""
    env.snapshot = msgspec.structs.replace(env.snapshot, files=WORTH_FILES)
    return env


def make_plain(top: Path) -> Path:
    """More than a portion, of all sizes."""
    chance = random.Random(1)
    for number in range(400):
        write(top / f"0/lib/p{number % 23}/{number}.py", f"x = {number}\n" * (number + 1))
    for number in range(4):
        path = write(top / f"0/lib/large{number}.so", "")
        path.write_bytes(chance.randbytes(1_500_000 + number))
    return top


def admissible(tree: Tree) -> Tree:
    """Without what no environment may have; devices 0:0 say that something was deleted."""
    found: Tree = {}
    for path, node in tree.items():
        is_deletion = stat.S_ISCHR(node.mode) and node.rdev == (0, 0)
        is_kept = is_deletion or stat.S_IFMT(node.mode) in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)
        if is_kept and (node.link is None or node.link in found):
            mode = node.mode if stat.S_ISDIR(node.mode) else node.mode & ~0o6000
            xattrs = tuple(each for each in node.xattrs if each[0] != b"security.capability")
            found[path] = node._replace(mode=mode, xattrs=xattrs)
    return found


# ---- as by one process -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_as_by_one_process(tmp_path: Path, used: list[str], seed: int) -> None:
    """To the last field, with hard links from one portion to the other, holes, odd names, attributes, owners."""
    tree = admissible(make_tree(random.Random(seed), 250, as_root=IS_ROOT))
    (tmp_path / "source/0").mkdir(parents=True)
    write_tree(os.fspath(tmp_path / "source/0"), tree)
    target = tmp_path / "venv"
    env = Env(tmp_path / "source", tmp_path / "store", [target])
    results: list[tuple[Any, Restored, dict[bytes, int]]] = []
    for _ in range(2):
        done = env.restore(ways=("unpack",))
        assert done.notes == ()
        rooms = {path: os.lstat(os.fsencode(target) + b"/" + path).st_blocks for path in seen(target)}
        results.append((seen(target), done, rooms))
        shutil.rmtree(target)
        large(env)
    (alone, by_one, room), (together, by_others, other_room) = results
    assert used == ["one process", "2 others"]
    assert together == alone
    assert dict(by_others.skipped) == dict(by_one.skipped)
    with_holes = [path for path, each in alone.items() if each.size > 512 * room[path] + (1 << 17)]
    assert with_holes or seed
    for path in with_holes:
        assert other_room[path] <= room[path] + 16, "holes stay holes"
    wait_tidy(tmp_path)


def test_a_directory_that_exists(tmp_path: Path, used: list[str]) -> None:
    """Deletions, what hides what was there, files for folders."""
    target = tmp_path / "venv"
    make_target(target)
    env = large(make_env(tmp_path, target))
    counted: list[tuple[int, int]] = []
    done = env.restore(on_progress=lambda size, files: counted.append((size, files)))
    assert (done.how, done.notes, used) == ("unpack", (), ["2 others"])
    assert seen(target) == wanted(tmp_path, target)
    assert sum(files for _, files in counted) == 11
    assert is_there([os.fspath(target)], KEY, env.digest)
    wait_tidy(tmp_path)


def test_little_and_few_cores_are_for_one_process(
    tmp_path: Path, used: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    env = Env(make_plain(tmp_path / "plain"), tmp_path / "store", [tmp_path / "venv"])
    env.restore()
    shutil.rmtree(tmp_path / "venv")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    large(env).restore()
    assert used == ["one process", "one process"]
    wait_tidy(tmp_path)


def test_blocks_that_the_node_has_are_not_asked_for(tmp_path: Path, used: list[str]) -> None:
    """They come from its cache in other processes, too."""
    env = large(Env(make_plain(tmp_path / "plain"), tmp_path / "store", [tmp_path / "venv"]))
    cache = open_cache(os.environ)
    blocks = StoreBlocks(LocalStore(os.fspath(env.store)), env.index)
    with cache.open_tree(env.digest, env.index.block_count) as kept:
        for number, raw in blocks.read_blocks(range(env.index.block_count)):
            kept.fill(number, raw)
    shutil.rmtree(env.store / "packs")
    assert env.restore().notes == ()
    assert used == ["2 others"]
    assert seen(tmp_path / "venv") == seen(tmp_path / "plain/0")
    wait_tidy(tmp_path)


# ---- what may become of them -------------------------------------------------------------------------------

# In each of them, before anything else runs: `in_helper` is told of batches, and may do what it likes.
HOOK = """
import os, sys
if "bootseer.env.restore.unpack_helper" in sys.orig_argv:
    import signal, time
    from bootseer.tree.unpack import tree as materialise
    from bootseer.tree.unpack.private import PrivateWriter
    real_batch, real_portion = PrivateWriter.write_batch, materialise.unpack_portion
    batches = 0
    def write_batch(self, numbers):
        global batches
        batches += 1
        before_batch()
        return real_batch(self, numbers)
    PrivateWriter.write_batch = write_batch
    def before_batch():
        pass
    def at(number):
        return batches == number
"""

TWICE = """
def write_portion(*arguments, on_progress, **more):
    done = real_portion(*arguments, on_progress=on_progress, **more)
    on_progress(0, 1)
    return done
materialise.unpack_portion = write_portion
"""
TOO_MUCH = "materialise.unpack_portion = lambda *a, on_progress, **k: on_progress(1 << 40, 1) or {}"
AWAY = """
from bootseer.errors import Unavailable
def before_batch():
    raise Unavailable("the store is away for a moment")
"""
ENDED = r"an unpack process has ended with status"
SILENT = r"an unpack process has written nothing for 1 s"
WRONG = r"an unpack process sent an impossible report"
FAULTS: dict[str, tuple[str, str]] = {
    "killed": ("def before_batch():\n    if at(2): os.kill(os.getpid(), signal.SIGKILL)", f"{ENDED} -9"),
    "breaks": ("def before_batch():\n    if at(2): raise MemoryError", f"{ENDED} 1"),
    "ends at once": ("os._exit(3)", f"{ENDED} 3"),
    "hangs": ("def before_batch():\n    if at(2): signal.pause()", SILENT),
    "is stopped": ("def before_batch():\n    if at(2): os.kill(os.getpid(), signal.SIGSTOP)", SILENT),
    "never begins": ("signal.pause()", SILENT),
    "has not written": ("materialise.unpack_portion = lambda *a, **k: {}", WRONG),
    "says too much": (TOO_MUCH, WRONG),
    "says it twice": (TWICE, WRONG),
    "says nonsense": ("os.write(1, b'{\\n')", r"an unpack process sent an unreadable report"),
    "cannot reach the store": (AWAY, r"the store is away for a moment"),
}


def hooked(tmp_path: Path, what: str) -> dict[str, str]:
    """Variables with which helpers do that."""
    directory = tmp_path / "hook"
    directory.mkdir(exist_ok=True)
    lines = "".join(f"    {line}\n" for line in what.splitlines())
    (directory / "sitecustomize.py").write_text(HOOK + lines)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([os.fspath(directory), os.fspath(TOP)])}


@pytest.mark.parametrize("name", FAULTS)
def test_one_process_does_it_then(
    tmp_path: Path, used: list[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """One line says so, and nothing is left."""
    if name in ("hangs", "is stopped", "never begins"):
        monkeypatch.setattr(unpack_helpers, "PATIENCE_S", 1.0)
    target = tmp_path / "venv"
    env = large(Env(make_plain(tmp_path / "plain"), tmp_path / "store", [target]))
    what, said = FAULTS[name]
    environ = hooked(tmp_path, what)
    done = restore(env.snapshot, env.tree, environ=environ)
    assert done.how == "unpack"
    assert len(done.notes) == 1
    assert re.fullmatch(f"the environment is unpacked by a single process: {said}", done.notes[0]), done.notes
    assert used == ["2 others", "one process"]
    assert seen(target) == seen(tmp_path / "plain/0")
    assert restore(env.snapshot, env.tree, environ=environ).how == "there"
    wait_tidy(tmp_path)


def test_they_cannot_be_started(tmp_path: Path, used: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    env = large(Env(make_plain(tmp_path / "plain"), tmp_path / "store", [tmp_path / "venv"]))
    monkeypatch.setattr(unpack_processes, "command_of", lambda *_: ["/nowhere/python"])
    done = env.restore()
    assert (done.how, used) == ("unpack", ["one process"])
    assert seen(tmp_path / "venv") == seen(tmp_path / "plain/0")
    wait_tidy(tmp_path)


@pytest.mark.parametrize("what", ["as good as new", "have died", "others are wanted"])
def test_those_that_were_begun_beforehand(tmp_path: Path, used: list[str], what: str) -> None:
    """They are taken when they are as good as new ones; none is left."""
    target = tmp_path / "venv"
    env = large(Env(make_plain(tmp_path / "plain"), tmp_path / "store", [target]))
    environ = dict(os.environ)
    unpack_processes.begin_spare(os.fspath(env.store), environ)
    (spare,) = unpack_processes._spare
    processes = [each.process for each in spare.processes]
    assert len(processes) == 2
    if what == "have died":
        for process in processes:
            process.kill()
            process.wait(10)
    if what == "others are wanted":
        environ["ANOTHER"] = "1"
    done = restore(env.snapshot, env.tree, environ=environ)
    assert (done.how, tuple(done.notes), used) == ("unpack", (), ["2 others"])
    assert seen(target) == seen(tmp_path / "plain/0")
    assert not unpack_processes._spare and all(process.poll() is not None for process in processes)
    wait_tidy(tmp_path)


def test_those_that_are_not_needed_end(tmp_path: Path) -> None:
    unpack_processes.begin_spare(os.fspath(tmp_path), os.environ)
    (spare,) = unpack_processes._spare
    processes = [each.process for each in spare.processes]
    unpack_processes.begin_spare(os.fspath(tmp_path), os.environ)
    assert unpack_processes._spare == [spare], "once"
    end_spares()
    assert not unpack_processes._spare and all(process.poll() is not None for process in processes)


@pytest.mark.parametrize(
    "url", ["", "http://127.0.0.1:1/x", "s3://bucket/x", "file://elsewhere/x", "a::b", "http://[x"]
)
def test_stores_for_which_none_are_begun(url: str) -> None:
    """And what is wrong with a URL is for others to say."""
    unpack_processes.begin_spare(url, os.environ)
    assert unpack_processes._spare == []


def test_a_damaged_block_is_reported_as_ever(tmp_path: Path, used: list[str]) -> None:
    """One process would not read it either."""
    target = tmp_path / "venv"
    before = make_target(target)
    env = large(make_env(tmp_path, target))
    pack = next((env.store / "packs").iterdir())
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    with pytest.raises(DigestMismatch, match=r"block \d+ .* is damaged: its digest is not the one in the index"):
        env.restore()
    assert used == ["2 others"]
    assert seen(target) == before
    wait_tidy(tmp_path)


@pytest.mark.system
def test_a_full_disk(tmp_path: Path, used: list[str]) -> None:
    """One line; and it is not tried again, by whoever else."""
    env = large(Env(make_plain(tmp_path / "plain"), tmp_path / "store", [tmp_path / "small/venv"]))
    with tmpfs(tmp_path / "small", "3m"):
        with pytest.raises(StorageError, match=r"No space left on device: make room there") as caught:
            env.restore()
        assert "\n" not in str(caught.value)
        assert used == ["2 others"]
        wait_tidy(tmp_path / "small")
        assert os.listdir(tmp_path / "small") == []
        assert os.statvfs(tmp_path / "small").f_bfree * 4096 > 2 << 20, "nobody holds what was removed"


FULL = """
from bootseer.errors import StorageError
def before_batch():
    raise StorageError("no room")
"""


def test_what_one_said_last_counts(tmp_path: Path, used: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it has ended before it is told of its next portion."""
    env = large(Env(make_plain(tmp_path / "plain"), tmp_path / "store", [tmp_path / "venv"]))
    real, told = UnpackProcess.tell, Counter[int]()

    def tell(self: UnpackProcess, line: bytes) -> None:
        told[self.said_fd] += 1
        if told[self.said_fd] > 3:  # its order, its beginning and a portion
            self.process.wait(30)
        real(self, line)

    monkeypatch.setattr(UnpackProcess, "tell", tell)
    with pytest.raises(StorageError, match=r"^no room$"):
        restore(env.snapshot, env.tree, environ=hooked(tmp_path, FULL))
    assert max(told.values()) > 3
    assert used == ["2 others"]
    wait_tidy(tmp_path)


# ---- interrupted -------------------------------------------------------------------------------------------

# Tells where it is, and goes on when it may.
WAITING = """
def before_batch():
    if at(2):
        open(os.path.join({folder!r}, str(os.getpid())), "w").close()
        while not os.path.exists({folder!r} + "/go"):
            time.sleep(0.01)
"""


def test_whoever_waits_is_killed(tmp_path: Path, program: Programs) -> None:
    """They end, too; the target is as it was, and the next start goes on."""
    target, places = tmp_path / "venv", tmp_path / "places"
    places.mkdir()
    before = make_target(target)
    make_plain(tmp_path / "source")
    env = large(make_env(tmp_path, target))
    spec = tmp_path / "snapshot"
    spec.write_bytes(msgspec.json.encode(env.snapshot))
    environ = hooked(tmp_path, WAITING.format(folder=os.fspath(places)))
    small = "import os\nfrom bootseer.tree.unpack import portions as m\nm.MIN_COST_BYTES = 1 << 20\n"
    small += "os.sched_getaffinity = lambda _: {0, 1}\n"
    run = program.start(
        *python("-c", small + PLAIN),
        spec,
        env.store,
        env={"PYTHONPATH": environ["PYTHONPATH"], "BOOTSEER_CACHE": os.environ["BOOTSEER_CACHE"]},
    )
    pids = wait_until(lambda: len(found := os.listdir(places)) == 2 and [int(each) for each in found], 30)
    run.signal(signal.SIGKILL)
    assert run.wait().status == -signal.SIGKILL
    assert seen(target) == before
    assert len(staged(tmp_path)) == 2, "the lock and the new files"
    (places / "go").touch()
    for pid in pids:
        wait_until(lambda pid=pid: not is_running(pid), 10, f"the end of {find_process(pid)}")
    assert env.restore().notes == ()
    assert seen(target) == wanted(tmp_path, target)
    wait_tidy(tmp_path)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_all_that_wait_have_enough(tmp_path: Path, used: list[str], error: type[BaseException]) -> None:
    """What `on_progress` raises ends them in the middle: none is left when it comes out."""
    target, places = tmp_path / "venv", tmp_path / "places"
    places.mkdir()
    before = make_target(target)
    make_plain(tmp_path / "source")
    env = large(make_env(tmp_path, target))
    pids: list[int] = []

    def interrupt(_size: int, _files: int) -> None:
        pids.extend(map(int, os.listdir(places)))
        if len(pids) >= 2:
            raise error
        pids.clear()

    environ = hooked(tmp_path, WAITING.format(folder=os.fspath(places)))
    with pytest.raises(error):
        restore(env.snapshot, env.tree, environ=environ, on_progress=interrupt)
    assert [find_process(pid) for pid in pids] == [None, None]
    assert used == ["2 others"]
    assert seen(target) == before
    wait_tidy(tmp_path)
    assert env.restore().how == "unpack"
