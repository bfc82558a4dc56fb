"""Environments put into their places by unpacking: new folders and old ones, killed at every step, by several."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bootseer import aio
from bootseer.env.capture.walk import walk
from bootseer.env.restore import renames
from bootseer.env.restore.in_place import is_there
from bootseer.env.restore.markers import digest_of, open_markers
from bootseer.env.restore.restore import Restored, recover, restore
from bootseer.env.restore.staging import PREFIX, claim
from bootseer.env.restore.sync import sync_targets
from bootseer.env.store.env_tree import OpenEnvTree, StoredTree
from bootseer.env.store.snapshot import Snapshot
from bootseer.errors import BootseerError, ConfigError, DigestMismatch, StorageError, StorageTimeout
from bootseer.tree import compression
from bootseer.tree.builder.building import build
from bootseer.tree.builder.from_directory import DirectorySource
from bootseer.tree.index import Index, encode
from bootseer.tree.index import digest_of as index_digest
from tests.campaign import IS_FULL
from tests.integration.test_materialise_user import USER, User
from tests.support import Programs, lacking, python, wait_until
from tests.testing.trees import FileFacts, MemoryPacks, snapshot

TOP = Path(__file__).parents[2]
IS_ROOT = os.geteuid() == 0
KEY = "ab" * 32
TIME_NS = 1_600_000_000_123_456_789


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("BOOTSEER_CACHE", os.fspath(tmp_path / "cache"))
    yield
    aio.close()


class Env:
    """An environment in a store: the difference in a folder, with `0`, `1` ... in it."""

    def __init__(self, source: Path, store: Path, targets: Sequence[Path], opaque: Sequence[bytes] = ()) -> None:
        (store / "packs").mkdir(parents=True)
        (store / "index").mkdir()
        built = build(
            DirectorySource(os.fspath(source)), lambda digest, data: _put(store / "packs" / digest, data)
        )
        index: Index = built.tree
        places = [entry for entry in range(len(index)) if index.path(entry) in opaque]
        index = msgspec.structs.replace(index, opaque=places)
        data = compression.compress(encode(index))
        digest = index_digest(data)
        _put(store / "index" / digest, data)
        self.store, self.index, self.digest = store, index, digest
        self.snapshot = Snapshot(
            key=KEY,
            tree=digest,
            index_bytes=len(data),
            targets=[os.fspath(target) for target in targets],
            created_s=1e9,
            expires_s=None,
            setup_s=1.0,
            distributions="",
            python="3.11",
            files=1,
            bytes=1,
            deleted=0,
            left_out=[],
            outside=[],
            relocatable=True,
        )
        self.tree = StoredTree(os.fspath(store), digest)

    def restore(self, **more: Any) -> Restored:
        return restore(self.snapshot, self.tree, **more)


def _put(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def write(path: Path, text: str, *, mode: int = 0o644) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    os.utime(path, ns=(TIME_NS, TIME_NS))
    return path


def make_target(target: Path) -> dict[bytes, FileFacts]:
    """What is there before."""
    write(target / "bin/python", "an interpreter", mode=0o755)
    write(target / "bin/pip", "old", mode=0o755)
    write(target / "lib/site/kept/a.py", "kept")
    write(target / "lib/site/gone/a.py", "gone")
    write(target / "lib/site/gone/deep/b.py", "gone")
    write(target / "lib/site/single.py", "old")
    write(target / "lib/site/opaque/old.py", "hidden")
    write(target / "lib/site/was_folder/x", "x")
    write(target / "lib/site/was_file", "x")
    for base, _, _ in os.walk(target):
        os.utime(base, ns=(TIME_NS - 1, TIME_NS - 1))
    return snapshot(os.fspath(target))


def make_difference(source: Path) -> Path:
    """What set-up made of that."""
    top = source / "0"
    write(top / "bin/pip", "new", mode=0o755)
    write(top / "bin/tool", "a tool", mode=0o755)
    for number in range(4):
        write(top / f"lib/site/new/{number}.py", f"new {number}")
    write(top / "lib/site/new/data/large", "x" * 700_000)
    os.link(top / "lib/site/new/0.py", top / "lib/site/new/again.py")
    write(top / "lib/site/single.py", "new")
    write(top / "lib/site/opaque/new.py", "alone")
    write(top / "lib/site/was_folder", "a file now")
    write(top / "lib/site/was_file/x", "a folder now")
    (top / "lib/site/link").symlink_to("single.py")
    os.mknod(top / "lib/site/gone", stat.S_IFCHR, os.makedev(0, 0))
    os.mknod(top / "lib/site/never", stat.S_IFCHR, os.makedev(0, 0))
    (top / "lib/site/new").chmod(0o750)
    for base, directories, _ in os.walk(top):
        for name in directories:
            os.utime(os.path.join(base, name), ns=(TIME_NS + 1, TIME_NS + 1))
    os.utime(top, ns=(TIME_NS + 2, TIME_NS + 2))
    return source


def make_env(tmp_path: Path, target: Path) -> Env:
    source = make_difference(tmp_path / "source")
    return Env(source, tmp_path / "store", [target], opaque=[b"0/lib/site/opaque"])


def wanted(tmp_path: Path, target: Path) -> dict[bytes, FileFacts]:
    """What the target is to be, made by hand."""
    other = tmp_path / "wanted"
    make_target(other)
    site = other / "lib/site"
    for gone in ("gone", "opaque", "was_folder"):
        shutil.rmtree(site / gone)
    (site / "was_file").unlink()
    shutil.copytree(tmp_path / "source/0", other, symlinks=True, dirs_exist_ok=True, copy_function=_copy)
    os.unlink(site / "new/again.py")
    os.link(site / "new/0.py", site / "new/again.py")
    for base, directories, _ in os.walk(tmp_path / "source/0"):
        for name in directories:
            path = os.path.join(base, name)
            shutil.copystat(path, other / os.path.relpath(path, tmp_path / "source/0"))
    shutil.copystat(tmp_path / "source/0", other)
    found = snapshot(os.fspath(other))
    shutil.rmtree(other)
    return found


def _copy(source: str, target: str) -> None:
    if stat.S_ISCHR(os.lstat(source).st_mode):
        return
    if os.path.lexists(target):
        os.unlink(target)
    shutil.copy2(source, target, follow_symlinks=False)


def seen(target: Path) -> dict[bytes, FileFacts]:
    return snapshot(os.fspath(target))


def staged(*directories: Path) -> list[str]:
    return [name for directory in directories for name in os.listdir(directory) if name.startswith(PREFIX)]


def wait_tidy(*directories: Path) -> None:
    wait_until(lambda: not staged(*directories), 30, "the end of what was removed in the background")


# ---- new folders, and markers ------------------------------------------------------------------------------


def test_a_target_that_does_not_exist(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "er" / "venv"
    env = Env(make_plain(tmp_path), tmp_path / "store", [target])
    done = env.restore()
    assert (done.how, done.failures, done.notes, done.prefix) == ("unpack", (), (), ())
    assert seen(target) == seen(tmp_path / "plain" / "0")
    again = env.restore()
    assert (again.how, again.notes) == ("there", ())
    wait_tidy(target.parent)
    assert os.listdir(target.parent) == ["venv"], "neither lock nor staging folder is left"


def make_plain(tmp_path: Path) -> Path:
    top = tmp_path / "plain" / "0"
    write(top / "bin/tool", "#!/bin/sh\n", mode=0o755)
    for number in range(300):
        write(top / f"lib/p{number % 7}/{number}.py", f"x = {number}\n" * (number + 1))
    write(top / "lib/large.so", "0123456789abcdef" * 100_000)
    return tmp_path / "plain"


@pytest.mark.parametrize("what", ["a file's time", "a file's size", "no file", "another mode", "a distribution"])
def test_a_target_that_was_changed_is_not_there(tmp_path: Path, what: str) -> None:
    target = tmp_path / "venv"
    env = Env(make_plain(tmp_path), tmp_path / "store", [target])
    env.restore()
    path = target / "lib/p1/1.py"
    match what:
        case "a file's time":
            os.utime(path, ns=(1, 1))
        case "a file's size":
            path.write_text("longer than it was by far, and at another time")
        case "no file":
            path.unlink()
        case "another mode":
            path.chmod(0o600)
        case "a distribution":
            (target / "lib/other-1.0.dist-info").mkdir()
    assert not is_there([os.fspath(target)], KEY, env.digest)
    before = seen(target)
    whole = seen(tmp_path / "plain/0")
    assert env.restore().how == "unpack"
    found = seen(target)
    assert {path: each for path, each in found.items() if path in whole} == whole
    assert found.keys() - whole.keys() == before.keys() - whole.keys()
    assert is_there([os.fspath(target)], KEY, env.digest)


def test_what_programs_write_beside_does_not_count(tmp_path: Path) -> None:
    target = tmp_path / "venv"
    env = Env(make_plain(tmp_path), tmp_path / "store", [target])
    env.restore()
    (target / "lib/p1/__pycache__").mkdir()
    write(target / "lib/p1/__pycache__/1.pyc", "bytecode")
    assert env.restore().how == "there"
    assert not is_there([os.fspath(target)], "cd" * 32, env.digest), "of another key"


def test_markers_of_another_boot_count_when_all_is_on_disk(tmp_path: Path) -> None:
    target = tmp_path / "venv"
    env = Env(make_plain(tmp_path), tmp_path / "store", [target])
    env.restore(base={"kind": "python"})
    markers = open_markers(os.environ)
    wait_until(lambda: (found := markers.read(os.fspath(target))) is not None and found.is_durable, 60, "syncfs")
    marker = markers.read(os.fspath(target))
    assert marker is not None
    assert (marker.key, marker.tree, marker.base) == (KEY, env.digest, {"kind": "python"})
    later = type(markers)(markers.folder, boot="another")
    assert later.read(os.fspath(target)) == marker
    made = markers.write(msgspec.structs.replace(marker, is_durable=False), walk(os.fspath(target)), [b"bin"])
    assert markers.read(os.fspath(target)) == made
    assert later.read(os.fspath(target)) is None, "its files may be empty"
    sync_targets([os.fspath(target)], os.environ)
    assert later.read(os.fspath(target)) is not None


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff\xfe", b'{"format": "bootseer-env-there/2"}'])
def test_damaged_markers_do_not_count(tmp_path: Path, damage: bytes) -> None:
    target = tmp_path / "venv"
    env = Env(make_plain(tmp_path), tmp_path / "store", [target])
    env.restore()
    directory = Path(open_markers(os.environ).folder)
    for path in directory.iterdir():
        path.write_bytes(damage)
    assert not is_there([os.fspath(target)], KEY, env.digest)
    assert env.restore().how == "unpack"
    assert (directory.stat().st_mode & 0o777, {path.stat().st_mode & 0o777 for path in directory.iterdir()}) == (
        0o700,
        {0o600},
    )


# ---- folders that exist ------------------------------------------------------------------------------------


@pytest.fixture(params=["exchange", "two renames", "no links either"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the file system can do."""
    if request.param != "exchange":
        monkeypatch.setattr(renames, "try_exchange", lambda *_: False)
    if request.param == "no links either":

        def refuse(*_: object, **__: object) -> None:
            raise OSError(errno.EPERM, "no links")

        monkeypatch.setattr(os, "link", refuse_unless_tree(os.link, refuse))
    return str(request.param)


def refuse_unless_tree(real: Callable[..., None], refuse: Callable[..., None]) -> Callable[..., None]:
    """Links within a tree are made when it is unpacked."""

    def link(source: bytes, target: bytes, **more: Any) -> None:
        (refuse if isinstance(target, bytes) and target.isdigit() else real)(source, target, **more)

    return link


def test_a_directory_becomes_what_set_up_made_of_it(tmp_path: Path, kernel: str) -> None:
    target = tmp_path / "venv"
    make_target(target)
    other = tmp_path / "another job"
    os.link(target / "lib/site/single.py", other)
    env = make_env(tmp_path, target)
    with open(target / "bin/pip") as running:
        assert env.restore().how == "unpack"
        assert running.read() == "old", "a program that runs goes on"
    assert seen(target) == wanted(tmp_path, target)
    assert other.read_text() == "old", "hard links of others are not written to"
    assert env.restore().how == "there"
    wait_tidy(tmp_path)


def test_what_is_not_as_expected_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "venv"
    make_target(target)
    env = make_env(tmp_path, target)
    expected = {os.fspath(target): digest_of(walk(os.fspath(target)))}
    write(target / "lib/site/more.py", "meanwhile")
    before = seen(target)
    with pytest.raises(ConfigError, match=r"venv: changed since its environment was looked up; start again"):
        env.restore(expected=expected)
    assert seen(target) == before
    env.restore(expected={os.fspath(target): digest_of(walk(os.fspath(target)))})
    assert (target / "bin/tool").read_text() == "a tool"


def test_a_damaged_block_changes_nothing(tmp_path: Path) -> None:
    target = tmp_path / "venv"
    before = make_target(target)
    env = make_env(tmp_path, target)
    pack = next((env.store / "packs").iterdir())
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    with pytest.raises(DigestMismatch, match="is damaged"):
        env.restore()
    assert seen(target) == before
    assert not is_there([os.fspath(target)], KEY, env.digest)
    wait_tidy(tmp_path)


def test_somebody_makes_a_name_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All is undone, and theirs stays."""
    target = tmp_path / "venv"
    make_target(target)
    env = make_env(tmp_path, target)
    before = seen(target)
    real = renames.move

    def move(fd: int, name: bytes, to_fd: int, to: bytes, **more: Any) -> None:
        if to == b"new":
            (target / "lib/site/new").mkdir()
        real(fd, name, to_fd, to, **more)

    monkeypatch.setattr(renames, "move", move)
    with pytest.raises(ConfigError, match=r"lib/site/new: another process made this while the environment was"):
        env.restore()
    (target / "lib/site/new").rmdir()
    os.utime(target / "lib/site", ns=(TIME_NS - 1, TIME_NS - 1))
    assert seen(target) == before
    monkeypatch.undo()
    os.environ["BOOTSEER_CACHE"] = os.fspath(tmp_path / "cache")
    wait_tidy(tmp_path)


def test_links_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of the target that are links, or become some after they were looked at."""
    target, outside = tmp_path / "venv", tmp_path / "outside"
    make_target(target)
    outside.mkdir()
    write(outside / "precious", "precious")
    env = make_env(tmp_path, target)
    real = renames.try_exchange

    def exchange(*arguments: Any) -> bool:
        if not (target / "lib").is_symlink():
            (target / "lib").rename(target / "moved")
            (target / "lib").symlink_to(outside)
        return real(*arguments)

    monkeypatch.setattr(renames, "try_exchange", exchange)
    with pytest.raises(BootseerError):
        env.restore()
    assert os.listdir(outside) == ["precious"]
    monkeypatch.setattr(renames, "try_exchange", real)
    (target / "lib").unlink()
    (target / "moved").rename(target / "lib")
    recover([os.fspath(target)])
    (target / "lib/site").rename(outside / "site")
    (target / "lib/site").symlink_to(outside / "site")
    there = seen(outside)
    env.restore()
    assert seen(outside) == there, "a link where the tree has a folder is replaced, not followed"
    assert not (target / "lib/site").is_symlink()
    wait_tidy(tmp_path)


# ---- killed at every step ----------------------------------------------------------------------------------

KILLED = """
import json, os, signal, sys
left = int(sys.argv[1])
from bootseer.env.restore import apply_journal, renames, restore, unpack as restore_unpack
from bootseer.env.store.env_tree import StoredTree
from bootseer.env.store.snapshot import decode
from bootseer.env.restore.markers import Markers

is_unpacking = False

def count():
    global left
    left -= not is_unpacking
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)

def counted(func):
    def call(*args, **kwargs):
        count()
        found = func(*args, **kwargs)
        count()
        return found
    return call

def unpack(*args, **kwargs):
    global is_unpacking
    is_unpacking = True
    found = materialise(*args, **kwargs)
    is_unpacking = False
    return found

materialise, restore_unpack.materialise = restore_unpack.materialise, unpack
renames._rename = counted(renames._rename)
os.rename, os.link, os.utime = counted(os.rename), counted(os.link), counted(os.utime)
apply_journal.remove = counted(apply_journal.remove)
Markers.write = counted(Markers.write)
if sys.argv[2] == "two renames":
    renames.try_exchange = lambda *_: False
snapshot = decode(open(sys.argv[3], "rb").read(), "it")
done = restore.restore(snapshot, StoredTree(sys.argv[4], snapshot.tree))
print(json.dumps([done.how, list(done.notes), left]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["exchange", "two renames"])
@pytest.mark.parametrize("boot", ["the same", "another"])
def test_killed_at_every_step(tmp_path: Path, program: Programs, how: str, boot: str) -> None:
    """The target is then as it was or as it is to be, whole; and the next start goes on.

    What another boot makes of it is looked at after every third step, and with BOOTSEER_CAMPAIGN=full after each.
    """
    stride = 1 if boot == "the same" or IS_FULL else 3
    target = tmp_path / "venv"
    before = make_target(target)
    shutil.copytree(target, tmp_path / "kept", symlinks=True)
    env = make_env(tmp_path, target)
    after = wanted(tmp_path, target)
    spec = tmp_path / "snapshot"
    spec.write_bytes(msgspec.json.encode(env.snapshot))
    results: list[str] = []
    steps = 0
    while True:
        run = program(
            sys.executable, "-c", KILLED, steps, how, spec, env.store,
            env={"PYTHONPATH": os.fspath(TOP), "BOOTSEER_CACHE": os.environ["BOOTSEER_CACHE"]},
        )  # fmt: skip
        if run.status == 0:
            break
        assert run.status == -signal.SIGKILL, run.stderr
        notes = recover_in(boot, target)
        found = seen(target)
        assert found in (before, after), f"step {steps}: {changes(found, before, after)}"
        is_done = found == after
        assert is_there([os.fspath(target)], KEY, env.digest) == is_done, steps
        results.append("completed" if is_done else "undone")
        assert not notes or ("was completed" in notes[0]) == is_done, (steps, notes)
        assert env.restore().how == ("there" if is_done else "unpack")
        assert seen(target) == after
        shutil.rmtree(target)
        shutil.copytree(tmp_path / "kept", target, symlinks=True)
        for base, _, _ in os.walk(tmp_path / "kept"):
            shutil.copystat(base, target / os.path.relpath(base, tmp_path / "kept"))
        steps += stride
    assert results[0] == "undone"
    assert len(results) >= 25 // stride
    assert ("completed" in results[:-1]) == (boot == "the same"), results
    wait_tidy(tmp_path)


@pytest.mark.slow
def test_killed_where_there_was_nothing(tmp_path: Path, program: Programs) -> None:
    target = tmp_path / "venv"
    env = Env(make_plain(tmp_path), tmp_path / "store", [target])
    spec = tmp_path / "snapshot"
    spec.write_bytes(msgspec.json.encode(env.snapshot))
    results = []
    for steps in range(100):
        run = program(
            sys.executable, "-c", KILLED, steps, "exchange", spec, env.store,
            env={"PYTHONPATH": os.fspath(TOP), "BOOTSEER_CACHE": os.environ["BOOTSEER_CACHE"]},
        )  # fmt: skip
        if run.status == 0:
            break
        recover([os.fspath(target)])
        is_done = target.exists()
        assert is_there([os.fspath(target)], KEY, env.digest) == is_done
        results.append(is_done)
        assert env.restore().how == ("there" if is_done else "unpack")
        assert seen(target) == seen(tmp_path / "plain/0")
        shutil.rmtree(target)
    assert set(results) == {True, False}
    wait_tidy(tmp_path)


def test_killed_while_it_unpacks(tmp_path: Path, program: Programs) -> None:
    """What lies beside the target is taken away by the next start."""
    target = tmp_path / "venv"
    before = make_target(target)
    env = make_env(tmp_path, target)
    spec = tmp_path / "snapshot"
    spec.write_bytes(msgspec.json.encode(env.snapshot))
    kill = "import os, signal\nfrom bootseer.tree.unpack import private as m\nwrite = m.write_all\n"
    kill += "m.write_all = lambda *a: (write(*a), os.kill(os.getpid(), signal.SIGKILL))\n"
    run = program(
        *python("-c", kill + PLAIN),
        spec,
        env.store,
        env={"PYTHONPATH": os.fspath(TOP), "BOOTSEER_CACHE": os.environ["BOOTSEER_CACHE"]},
    )
    assert run.status == -signal.SIGKILL, run.stderr
    assert len(staged(tmp_path)) == 2, "the lock and the new files"
    assert seen(target) == before
    assert recover([os.fspath(target)]) == []
    wait_tidy(tmp_path)
    env.restore()
    assert seen(target) == wanted(tmp_path, target)


def recover_in(boot: str, target: Path) -> list[str]:
    if boot == "the same":
        return recover([os.fspath(target)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bootseer.env.restore.claim.read_boot_id", lambda: "another")
        return recover([os.fspath(target)])


def changes(
    found: dict[bytes, FileFacts], before: dict[bytes, FileFacts], after: dict[bytes, FileFacts]
) -> object:
    return [
        {path for path in found.keys() | other.keys() if found.get(path) != other.get(path)}
        for other in (before, after)
    ]


# ---- several processes -------------------------------------------------------------------------------------

PLAIN = """
import json, os, sys
from bootseer.env.store.env_tree import StoredTree
from bootseer.env.restore.restore import restore
from bootseer.env.store.snapshot import decode
from bootseer.errors import BootseerError
snapshot = decode(open(sys.argv[1], "rb").read(), "it")
try:
    done = restore(snapshot, StoredTree(sys.argv[2], snapshot.tree), wait_s=60)
    print(json.dumps([done.how, list(done.notes), dict(done.skipped)]))
except BootseerError as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""


def test_one_of_several_unpacks(tmp_path: Path, program: Programs) -> None:
    target = tmp_path / "venv"
    make_target(target)
    env = make_env(tmp_path, target)
    spec = tmp_path / "snapshot"
    spec.write_bytes(msgspec.json.encode(env.snapshot))
    environ = {"PYTHONPATH": os.fspath(TOP), "BOOTSEER_CACHE": os.environ["BOOTSEER_CACHE"]}
    runs = [program.start(*python("-c", PLAIN), spec, env.store, env=environ) for _ in range(3)]
    found = [json.loads(run.wait(60).stdout) for run in runs]
    assert sorted(how for how, *_ in found) == ["there", "there", "unpack"], found
    assert seen(target) == wanted(tmp_path, target)
    wait_tidy(tmp_path)


def test_waiting_is_bounded(tmp_path: Path) -> None:
    target = tmp_path / "venv"
    env = Env(make_plain(tmp_path), tmp_path / "store", [target])
    late = pytest.raises(StorageTimeout, match=r"venv: another process has locked it for 0.1 s")
    with claim(os.fspath(target), environ=os.environ, boot="this"), late:
        env.restore(wait_s=0.1)
    assert env.restore(wait_s=0.1).how == "unpack"


# ---- other users, file systems and places ------------------------------------------------------------------


@pytest.mark.system
def test_ordinary_users(tmp_path: Path, program: Programs) -> None:
    """What root made belongs to them; their folders that they may not write to are no obstacle."""
    if not IS_ROOT:
        lacking("becoming another user needs root")
    top = Path(tempfile.mkdtemp(prefix="bootseer-user-"))  # pytest's own folders are closed to others
    top.chmod(0o755)
    user = User(top)
    try:
        target = user.home / "venv"
        make_target(target)
        (target / "lib/site").chmod(0o555)
        source = make_difference(top / "source")
        (source / "0/lib/site/new").chmod(0o555)
        (source / "0/lib/site").chmod(0o555)
        env = Env(source, top / "store", [target], opaque=[b"0/lib/site/opaque"])
        for base, directories, files in os.walk(user.home):
            for name in (*directories, *files):
                os.chown(os.path.join(base, name), USER, USER, follow_symlinks=False)
        spec = top / "snapshot"
        spec.write_bytes(msgspec.json.encode(env.snapshot))
        cache = os.fspath(user.home / "cache")
        run = user.start(sys.executable, "-c", PLAIN, str(spec), str(env.store), BOOTSEER_CACHE=cache).wait()
        assert run.status == 0, run.stderr
        how, notes, _ = json.loads(run.stdout)
        assert (how, notes) == ("unpack", []), run.stdout
        found = seen(target)
        assert {each.uid for each in found.values()} == {USER}
        assert (target / "lib/site/new/0.py").read_text() == "new 0"
        assert not (target / "lib/site/gone").exists()
        assert found[b"lib/site"].mode & 0o777 == 0o555
        assert found[b"lib/site/new"].mode & 0o777 == 0o555
        wait_tidy(user.home)
        run = user.start(sys.executable, "-c", PLAIN, str(spec), str(env.store), BOOTSEER_CACHE=cache).wait()
        assert json.loads(run.stdout)[0] == "there"
    finally:
        user.close()
        shutil.rmtree(top)


@contextmanager
def tmpfs(directory: Path, size: str) -> Iterator[None]:
    if not IS_ROOT:
        lacking("mounting a small file system needs root")
    directory.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=755", "none", directory], check=True)
    try:
        yield
    finally:
        wait_until(
            lambda: subprocess.run(["umount", directory], capture_output=True).returncode == 0, 30, "umount"
        )


@pytest.mark.system
def test_a_full_disk(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "1m"):
        target = tmp_path / "small" / "venv"
        before = make_target(target)
        env = make_env(tmp_path, target)
        large = write(tmp_path / "source/0/lib/site/new/larger", "")
        large.write_bytes(os.urandom(2 << 20))
        env = Env(tmp_path / "source", tmp_path / "store2", [target])
        with pytest.raises(StorageError, match=r"No space left on device: make room there") as caught:
            env.restore()
        assert "\n" not in str(caught.value)
        assert seen(target) == before
        wait_tidy(tmp_path / "small")
        subprocess.run(["mount", "-o", "remount,size=64m", tmp_path / "small"], check=True)
        assert env.restore().how == "unpack"
        wait_tidy(tmp_path / "small")


@pytest.mark.system
def test_a_target_that_is_a_mount(tmp_path: Path) -> None:
    """New files are made inside it, as no rename leads there from beside."""
    with tmpfs(tmp_path / "venv", "64m"):
        target = tmp_path / "venv"
        make_target(target)
        env = make_env(tmp_path, target)
        assert env.restore().how == "unpack"
        wait_tidy(target, tmp_path)
        assert seen(target) == wanted(tmp_path, target)
        assert env.restore().how == "there"


@pytest.mark.system
def test_two_targets_on_two_file_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All or none."""
    with tmpfs(tmp_path / "other", "64m"):
        first, second = tmp_path / "venv", tmp_path / "other" / "data"
        before = make_target(first)
        write(second / "old", "old")
        was = seen(second)
        source = make_difference(tmp_path / "source")
        write(source / "1/old", "new")
        write(source / "1/more", "more")
        os.link(source / "0/bin/tool", source / "1/linked")
        env = Env(source, tmp_path / "store", [first, second], opaque=[b"0/lib/site/opaque"])
        real = renames.try_exchange

        def fail(fd: int, name: bytes, other_fd: int, other: bytes) -> bool:
            if name == b"old":
                raise OSError(errno.EIO, "input/output error")
            return real(fd, name, other_fd, other)

        monkeypatch.setattr(renames, "try_exchange", fail)
        with pytest.raises(StorageError, match="input/output error"):
            env.restore()
        assert (seen(first), seen(second)) == (before, was)
        assert recover(env.snapshot.targets) == []
        monkeypatch.setattr(renames, "try_exchange", real)
        assert env.restore().how == "unpack"
        assert seen(first) == wanted(tmp_path, first)
        assert (second / "old").read_text() == "new"
        assert (second / "linked").read_text() == "a tool"
        assert env.restore().how == "there"
        wait_tidy(tmp_path, tmp_path / "other")


@pytest.mark.system
def test_in_a_container_directories_of_the_image_cannot_be_moved(tmp_path: Path) -> None:
    """Folders of a lower layer of overlayfs: what goes is moved one by one, and can be put back."""
    if not IS_ROOT:
        lacking("mounting an overlay needs root")
    lower, root = tmp_path / "lower", tmp_path / "root"
    make_target(lower / "venv")
    with tmpfs(tmp_path / "upper", "64m"):
        for name in ("upper/up", "upper/work", "root"):
            (tmp_path / name).mkdir()
        options = f"lowerdir={lower},upperdir={tmp_path}/upper/up,workdir={tmp_path}/upper/work,redirect_dir=off"
        made = subprocess.run(
            ["mount", "-t", "overlay", "-o", options, "none", root], capture_output=True, text=True
        )
        if made.returncode:
            lacking(f"no overlay here: {made.stderr}")
        try:
            target = root / "venv"
            before = seen(target)
            env = make_env(tmp_path, target)
            real = renames._rename
            left = [12]

            def fail(*arguments: Any) -> int:
                left[0] -= 1
                return errno.EIO if left[0] == 0 else real(*arguments)

            with pytest.MonkeyPatch.context() as patch, pytest.raises(StorageError):
                patch.setattr(renames, "_rename", fail)
                env.restore()
            assert left[0] <= 0
            assert seen(target) == before, changes(seen(target), before, before)
            assert env.restore().how == "unpack"
            assert seen(target) == wanted(tmp_path, target)
            wait_tidy(root)
        finally:
            wait_until(lambda: subprocess.run(["umount", root], capture_output=True).returncode == 0, 30, "umount")


# ---- other paths -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_venv_at_another_path(tmp_path: Path) -> None:
    """Its programs run, pip finds nothing wrong, uninstalls, and bytecode is not compiled anew."""
    from tests.made_wheels import make_wheel

    place = tmp_path / "made" / "here" / "venv"
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    make_wheel(wheels, "toolbox", "1.0", scripts={"hello": "toolbox:main"}, files={
        "toolbox/__init__.py": "import sys\ndef main():\n    print('hello', sys.prefix)\n"
    })  # fmt: skip
    subprocess.run([*python("-m", "venv", "--without-pip"), place], check=True)
    pip = [*python("-m", "pip"), "--python", f"{place}/bin/python", "--no-input", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "-q", "--no-index", "--find-links", wheels, "toolbox"], check=True)
    (tmp_path / "source").mkdir()
    place.rename(tmp_path / "source" / "0")
    env = Env(tmp_path / "source", tmp_path / "store", [place])
    for target in (tmp_path / "there", tmp_path / ("n" * 120) / "venv", tmp_path / "with space" / "venv"):
        done = env.restore(targets=[os.fspath(target)])
        assert done.how == "unpack"
        run = subprocess.run([target / "bin/hello"], capture_output=True, text=True)
        assert (run.stdout, run.stderr) == (f"hello {target}\n", "")
        assert os.fspath(place).encode() not in (target / "bin/activate").read_bytes()
        pip[4] = f"{target}/bin/python"
        subprocess.run([*pip, "check"], check=True, capture_output=True)
        check = "import importlib.metadata as m, base64, hashlib, sys\n"
        check += "for f in m.files('toolbox'):\n"
        check += "    if f.hash: assert f.hash.value == base64.urlsafe_b64encode(hashlib.sha256("
        check += "f.locate().read_bytes()).digest()).rstrip(b'=').decode(), f\n"
        check += "import toolbox, importlib.util as u; c = toolbox.__cached__; h = open(c, 'rb').read(16)\n"
        check += "import os; s = os.stat(toolbox.__file__)\n"
        check += "assert int.from_bytes(h[8:12], 'little') == int(s.st_mtime)\n"
        subprocess.run([target / "bin/python", "-B", "-c", check], check=True)
        subprocess.run([*pip, "uninstall", "-q", "-y", "toolbox"], check=True)
        assert not (target / "bin/hello").exists()
        assert env.restore(targets=[os.fspath(target)]).how == "unpack", "somebody uninstalled something"
        wait_tidy(target.parent)


def test_what_cannot_be_moved_is_reported(tmp_path: Path) -> None:
    plain_env = make_plain(tmp_path)
    env = Env(plain_env, tmp_path / "store", [tmp_path / "venv"])
    env.snapshot = msgspec.structs.replace(env.snapshot, relocatable=False)
    with pytest.raises(ConfigError, match="its snapshot is not relocatable"):
        env.restore(targets=[os.fspath(tmp_path / "other")])
    assert not (tmp_path / "other").exists()
    write(plain_env / "0/lib/__editable___x_finder.py", f"MAPPING = {{'x': '{tmp_path}/venv/src'}}\n")
    env = Env(plain_env, tmp_path / "store2", [tmp_path / "venv"])
    with pytest.raises(ConfigError, match=r"lib/__editable___x_finder.py contains its own path"):
        env.restore(targets=[os.fspath(tmp_path / "other")])
    wait_tidy(tmp_path)
    assert not (tmp_path / "other").exists()


# ---- ways --------------------------------------------------------------------------------------------------


def test_what_fails_is_reported_and_the_next_way_is_taken(tmp_path: Path) -> None:
    class NoStore:
        url = ""

        @contextmanager
        def open(self) -> Iterator[OpenEnvTree]:
            if os.fspath(target):
                raise StorageError("the store is not there")
            yield OpenEnvTree(env.index, MemoryPacks())

    target = tmp_path / "venv"
    env = Env(make_plain(tmp_path), tmp_path / "store", [target])
    with pytest.raises(StorageError, match="the store is not there"):
        restore(env.snapshot, NoStore())
    assert not target.exists()
    assert env.restore().how == "unpack"
    assert restore(env.snapshot, NoStore()).how == "there", "nothing of the store is needed"
    with pytest.raises(ConfigError, match="no method is left to restore the environment: there"):
        (target / "bin/tool").unlink()
        env.restore(ways=["there"])
