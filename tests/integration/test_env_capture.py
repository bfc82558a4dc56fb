"""Captures of what real installers and scripts do: laid over what was before, the tree gives what is after."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bootseer.env.capture import capture as capturing
from bootseer.env.capture.capture import Capture
from bootseer.errors import CaptureRefused, ConfigError, EditableRefused, SourceChanged
from bootseer.mounts.sandbox.shared import SCRATCH
from bootseer.own_module import command_of
from tests import support_trees
from tests.integration.captured_envs import (
    Captured,
    capture,
    copy_exactly,
    environ_of,
    make_venv,
    paths_of,
    pip,
    restore,
)
from tests.made_wheels import make_wheel
from tests.support import lacking

SITE = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
TAG = sys.implementation.cache_tag
HERE = Path(__file__).parents[2]


def check(captured: Captured, before: Path, after: Path, *, number: int = 0, compiled: bool = False) -> None:
    """That the tree over `before` is `after`; `compiled`: but for bytecode that was added."""
    restore(captured, number, os.fspath(before))
    source, other = support_trees.walk(after), support_trees.walk(before)
    if compiled:
        for path in [path for path in other.facts if path not in source.facts]:
            assert b"/__pycache__" in path
            del other.facts[path]
            other.data.pop(path, None)
    assert support_trees.differences(source, other) == []


class Target:
    """A folder to be captured, and a copy of what it was before."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "target"
        self.path.mkdir()
        self.environ = environ_of(folder)
        self.before = folder / "before"

    def capture(self, change: Callable[[], object], **more: object) -> Captured:
        if not self.before.exists():
            copy_exactly(self.path, self.before)
        return capture([self.path], self.environ, change, **more)  # type: ignore[arg-type]


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    made = Target(tmp_path)
    monkeypatch.setenv("TMPDIR", made.environ["TMPDIR"])
    monkeypatch.setattr("tempfile.tempdir", None)
    return made


# ---- what scripts do ---------------------------------------------------------------------------------------


def test_script_of_all_sorts(target: Target) -> None:
    """One change of each kind; what is not changed is not in the tree."""
    path = target.path
    for name in ("kept", "goes", "emptied", "becomes file", "replaced", "moved"):
        (path / name / "below").mkdir(parents=True)
        (path / name / "file").write_text(f"{name}\n")
        (path / name / "below" / "file").write_text(f"{name} below\n")
    for name in ("becomes folder", "becomes link", "edited", "mode", "same size"):
        (path / name).write_text("old\n")
    (path / "link").symlink_to("edited")
    (path / "broken").symlink_to("/nowhere")

    def change() -> None:
        shutil.rmtree(path / "goes")
        shutil.rmtree(path / "emptied" / "below")
        (path / "emptied" / "file").unlink()
        shutil.rmtree(path / "becomes file")
        (path / "becomes file").write_text("file now\n")
        shutil.rmtree(path / "replaced")
        (path / "replaced" / "other").mkdir(parents=True)
        (path / "replaced" / "file").write_text("another\n")
        (path / "moved").rename(path / "kept" / "moved here")
        (path / "becomes folder").unlink()
        (path / "becomes folder").mkdir(mode=0o700)
        (path / "becomes folder" / "file").write_text("new\n")
        (path / "becomes link").unlink()
        (path / "becomes link").symlink_to("kept")
        (path / "edited").write_text("new and longer\n")
        (path / "mode").chmod(0o755)
        found = (path / "same size").stat()
        (path / "same size").write_text("new\n")
        os.utime(path / "same size", ns=(found.st_atime_ns, found.st_mtime_ns))
        (path / "link").unlink()
        (path / "link").symlink_to("mode")
        (path / "kept" / "below" / "ns").write_bytes(b"")
        os.utime(path / "kept" / "below" / "ns", ns=(1, 1_700_000_000_123_456_789))
        Path(os.fsdecode(os.fsencode(path) + b"/\xff\xfe name\n")).write_bytes(b"x")

    number = (path / "replaced").stat().st_ino
    captured = target.capture(change)
    assert {"0/kept/file", "0/kept/below/file", "0/broken"} & paths_of(captured) == set()
    assert "0/same size" in paths_of(captured)
    # A new directory that got the number of the old one is the same, without what was below.
    is_same = (path / "replaced").stat().st_ino == number
    assert captured.built.facts.deleted == captured.changes.deleted == 4 + is_same
    check(captured, target.before, path)


def test_edit_in_the_tick_of_the_look(target: Target) -> None:
    """Files are stamped by a clock that steps: an edit right after the first look is seen all the same."""
    file = target.path / "file"
    for number in range(20):
        file.write_text(f"a{number:03}")
        found = file.stat()

        def change(times: os.stat_result = found, number: int = number) -> None:
            file.write_text(f"b{number:03}")
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))

        made = Capture([os.fspath(target.path)], target.environ)
        made.begin()
        change()
        assert not made.end().is_empty


def test_next_change_has_another_time(target: Target) -> None:
    """Kernels before 6.13 give all changes of a step the same one, so a look ends only when the step has."""
    newest_ns = time.clock_gettime_ns(capturing._REALTIME_COARSE)
    capturing._wait_for_tick(newest_ns)
    assert time.clock_gettime_ns(capturing._REALTIME_COARSE) > newest_ns
    started_s = time.monotonic()
    capturing._wait_for_tick(newest_ns + 10**12)  # of a server whose clock is ahead
    assert time.monotonic() - started_s < 2


def test_hard_links_stay_links(target: Target) -> None:
    (target.path / "old").write_bytes(b"old" * 1000)

    def change() -> None:
        (target.path / "folder").mkdir()
        (target.path / "folder" / "one").write_bytes(b"new" * 1000)
        os.link(target.path / "folder" / "one", target.path / "two")
        os.link(target.path / "old", target.path / "folder" / "again")
        (target.path / "link").symlink_to("two")
        os.link(target.path / "link", target.path / "folder" / "link", follow_symlinks=False)

    captured = target.capture(change)
    assert captured.built.tree.statistics.files == 2
    check(captured, target.before, target.path)


def test_sparse_and_large_files(target: Target) -> None:
    def change() -> None:
        with open(target.path / "sparse", "wb") as file:
            file.seek(3 << 20)
            file.write(b"data")
            file.truncate(9 << 20)
        (target.path / "large").write_bytes(os.urandom(1 << 20) * 3 + b"end")
        (target.path / "empty").touch()

    captured = target.capture(change)
    assert captured.built.tree.statistics.hole_bytes > 8 << 20
    assert captured.built.tree.statistics.stored_bytes < 5 << 20
    check(captured, target.before, target.path)


def test_nothing_changed(target: Target) -> None:
    (target.path / "file").write_text("x")
    captured = target.capture(lambda: None)
    assert captured.changes.is_empty
    assert paths_of(captured) == set()
    assert captured.built.tree.tree.names == [b"", b"0"]


def test_target_that_was_not_there(target: Target) -> None:
    target.path.rmdir()

    def change() -> None:
        (target.path / "folder").mkdir(parents=True)
        (target.path / "folder" / "file").write_text("x")

    captured = capture([target.path], target.environ, change)
    target.before.mkdir()
    check(captured, target.before, target.path)


def test_two_targets(target: Target) -> None:
    """Links from one to the other are no links in the tree: the two may be restored to different disks."""
    second = target.folder / "second"
    second.mkdir()
    (second / "goes").write_text("x")
    copy_exactly(second, target.folder / "second before")
    copy_exactly(target.path, target.before)

    def change() -> None:
        (target.path / "file").write_text("first")
        (second / "goes").unlink()
        (second / "file").write_text("second")
        os.link(second / "file", target.path / "both")

    captured = capture([target.path, second], target.environ, change, hot_paths=[b"1/file", b"0/none", b"none"])
    assert paths_of(captured) == {"0/file", "0/both", "1/goes", "1/file"}
    restore(captured, 0, os.fspath(target.before))
    restore(captured, 1, os.fspath(target.folder / "second before"))
    assert (target.before / "both").read_text() == "second"
    assert sorted(os.listdir(target.folder / "second before")) == ["file"]


@pytest.mark.parametrize("names", [("a", "a"), ("a", "a/b"), ("a/b", "a"), ("a", "link/b")])
def test_targets_in_one_another(tmp_path: Path, names: tuple[str, str]) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "link").symlink_to("a")
    with pytest.raises(ConfigError, match="one target lies in the other"):
        Capture([os.fspath(tmp_path / name) for name in names], {})


def test_target_that_is_taken_away(target: Target) -> None:
    with pytest.raises(CaptureRefused, match="target: does not exist after set-up"):
        target.capture(target.path.rmdir)


def test_same_difference_is_the_same_tree(target: Target) -> None:
    """Nothing of when or where it was captured is in it."""

    def change(path: Path) -> None:
        (path / "package").mkdir()
        (path / "package" / "module.py").write_text("X = 1 in {'a', 'b', 'c', 'd', 'e'}\n")
        for each in (path / "package" / "module.py", path / "package", path):
            os.utime(each, ns=(10**18, 10**18))

    digests = set()
    for name in ("one", "two"):
        path = target.folder / name / "target"
        path.mkdir(parents=True)
        # The same path, as it stands in bytecode.
        (target.folder / "here").unlink(missing_ok=True)
        (target.folder / "here").symlink_to(path)
        captured = capture(
            [target.folder / "here"], target.environ, lambda path=path: change(path), python=sys.executable
        )
        assert captured.built.facts.compiled == 1
        digests.add(captured.built.tree.digest)
    assert len(digests) == 1


def captured_mtime_ns(captured: Captured) -> int:
    """Of the first target itself."""
    return captured.built.tree.tree.mtimes_ns[1]


# ---- after the second look ---------------------------------------------------------------------------------


def test_what_training_writes_is_not_in_the_tree(target: Target) -> None:
    path = target.path
    (path / "package").mkdir()

    def change() -> None:
        (path / "package" / "module.py").write_text("X = 1\n")

    def train() -> None:
        (path / "data").mkdir()
        (path / "data" / "downloaded").write_bytes(b"x" * 1000)
        (path / "package" / "__pycache__").mkdir()
        (path / "package" / "__pycache__" / f"module.{TAG}.pyc").write_bytes(b"what a rank wrote")
        os.utime(path, ns=(1, 1))

    captured = target.capture(change, then=train, python=sys.executable)
    cache = "0/package/__pycache__"
    assert paths_of(captured) == {"0/package", "0/package/module.py", cache, f"{cache}/module.{TAG}.pyc"}
    restore(captured, 0, os.fspath(target.before))
    assert (
        b"what a rank wrote" not in (target.before / "package" / "__pycache__" / f"module.{TAG}.pyc").read_bytes()
    )
    assert target.before.stat().st_mtime_ns > 1


@pytest.mark.parametrize(
    "how", ["longer", "same size and time", "gone", "link", "replaced", "mode", "folder gone"]
)
def test_file_that_changes_before_it_is_read_is_named(target: Target, how: str) -> None:
    file = target.path / "folder" / "file"

    def change() -> None:
        file.parent.mkdir()
        file.write_bytes(b"x" * 1000)

    def change_again() -> None:
        found = file.stat()
        if how == "longer":
            file.write_bytes(b"x" * 1001)
        elif how == "same size and time":
            file.write_bytes(b"y" * 1000)
            os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))
        elif how == "mode":
            file.chmod(0o600)
        elif how == "folder gone":
            shutil.rmtree(file.parent)
        else:
            file.rename(target.folder / "away")
            if how == "link":
                file.symlink_to(target.folder / "away")
            if how == "replaced":
                shutil.copy2(target.folder / "away", file)

    with pytest.raises(SourceChanged, match=f"{file.parent}"):
        target.capture(change, then=change_again)


def test_new_name_elsewhere_is_no_change(target: Target) -> None:
    """uv links files of its cache into the next environment while this one is being captured."""
    file = target.path / "file"
    captured = target.capture(
        lambda: file.write_bytes(b"x" * 1000), then=lambda: os.link(file, target.folder / "other")
    )
    assert paths_of(captured) == {"0/file"}


def test_build_that_is_interrupted(target: Target) -> None:
    """What progress raises ends it, and nothing is left: no thread, no process, no file."""

    def change() -> None:
        for number in range(300):
            (target.path / f"module{number}.py").write_text("x = [1]\n" * 200)

    made = Capture([os.fspath(target.path)], target.environ, python=sys.executable)
    made.begin()
    change()
    made.end()

    def stop(_bytes: int, _files: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made.build(lambda *_: None, on_progress=stop)
    assert os.listdir(target.environ["TMPDIR"]) == []
    assert os.listdir(os.path.join(target.environ["BOOTSEER_CACHE"], *SCRATCH)) == []
    packs: dict[str, bytes] = {}
    assert made.build(packs.__setitem__).facts.compiled == 300  # it can be built again


@pytest.mark.parametrize("next_one", ["capture", "settling"])
def test_what_a_killed_build_left_goes_with_the_next_one(target: Target, next_one: str) -> None:
    """Its bytecode is hundreds of files; of a build that lives nothing is taken away."""
    directory = Path(target.environ["BOOTSEER_CACHE"], *SCRATCH)
    program = (
        "import sys; from tests.integration.test_env_capture import build_and_wait; build_and_wait(sys.argv[1])"
    )
    building = []
    for number in range(2):
        path = target.folder / f"built{number}"
        path.mkdir()
        command = [sys.executable, "-c", program, os.fspath(path)]
        process = subprocess.Popen(
            command, cwd=HERE, env=target.environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdout is not None and process.stdout.readline() == b"compiled\n"
        building.append(process)
    lives, dies = building
    assert sorted(len(list(each.glob("*.pyc"))) for each in directory.iterdir() if each.is_dir()) == [5, 5]
    dies.kill()
    dies.communicate()
    assert sum(each.is_dir() for each in directory.iterdir()) == 2, "nobody has seen yet that it is dead"
    if next_one == "capture":
        target.capture(lambda: (target.path / "file").write_text("x"))
    else:
        subprocess.run(command_of("bootseer.env.restore.sync"), env=target.environ, check=True)
    left = list(directory.iterdir())
    assert sorted(each.is_dir() for each in left) == [False, True]
    lives.communicate(b"go on")
    assert lives.returncode == 0
    assert list(directory.iterdir()) == []


def build_and_wait(path: str) -> None:
    """A process that builds, and stops when bytecode is there."""

    def put(_digest: str, _data: bytes) -> None:
        print("compiled", flush=True)
        sys.stdin.read()

    made = Capture([path], dict(os.environ), python=sys.executable)
    made.begin()
    for number in range(5):
        (Path(path) / f"module{number}.py").write_text("x = [1]\n" * 200)
    made.end()
    made.build(put)


def test_without_a_cache_the_scratch_is_a_temporary_directory(target: Target) -> None:
    target.environ["BOOTSEER_CACHE"] = "not absolute"
    found = target.capture(lambda: (target.path / "module.py").write_text("x = 1\n"), python=sys.executable)
    assert found.built.facts.compiled == 1
    assert os.listdir(target.environ["TMPDIR"]) == []


def test_idle_build_leaves_the_caller_as_it_is(target: Target) -> None:
    made = Capture([os.fspath(target.path)], target.environ)
    made.begin()
    (target.path / "file").write_text("x")
    made.end()
    niceness, before = [], os.nice(0)
    made.build(lambda *_: niceness.append(os.getpriority(os.PRIO_PROCESS, 0)), is_idle=True)
    assert niceness == [19]
    assert os.getpriority(os.PRIO_PROCESS, 0) == os.nice(0) == before


# ---- what is left out --------------------------------------------------------------------------------------


def test_credentials_and_what_is_no_file(target: Target) -> None:
    path = target.path
    (path / ".netrc").write_text("machine old login a password b\n")  # was there before: not ours to tell
    key = "-----BEGIN RSA PRIVATE KEY-----\nMIIB\n"

    def change() -> None:
        (path / "home").mkdir()
        (path / "home" / ".pypirc").write_text("[pypi]\n")
        (path / "pip.conf").write_text("[global]\nindex-url = https://me:secret@host/simple\n")
        (path / "id_rsa").write_text(key)
        (path / "server.pem").write_text(key)
        (path / ".lock").touch()
        os.mkfifo(path / "fifo")
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(os.fspath(path / "socket"))
        site = path / SITE
        (site / "moto" / "keys").mkdir(parents=True)
        (site / "moto" / "keys" / "ca.key").write_text(key)

    captured = target.capture(change)
    left_out = {
        "home/.pypirc",
        "pip.conf",
        "id_rsa",
        "server.pem",
        ".lock",
        "fifo",
        "socket",
        f"{SITE}/moto/keys/ca.key",
    }
    told = left_out - {".lock"}  # uv's own, and empty
    assert captured.built.facts.left_out == sorted(os.path.join(path, name) for name in told)
    assert paths_of(captured) & {f"0/{name}" for name in left_out} == set()
    assert "0/home" in paths_of(captured)
    for data in captured.packs.values():
        assert b"PRIVATE KEY" not in data


def test_key_that_a_package_brings_is_kept(target: Target) -> None:
    """Its RECORD names it: it is no secret, and the package does not work without it."""
    key = "-----BEGIN RSA PRIVATE KEY-----\nMIIB\n"
    venv = make_venv(target.path)
    wheel = make_wheel(target.folder / "wheels", "moto", "1.0", files={"moto/ca.key": key})
    captured = target.capture(lambda: pip(venv, target.environ, "install", "--no-deps", wheel))
    assert captured.built.facts.left_out == []
    assert f"0/{SITE}/moto/ca.key" in paths_of(captured)


def test_rights_that_no_environment_may_have(target: Target) -> None:
    def change() -> None:
        (target.path / "program").write_text("x")
        (target.path / "program").chmod(0o4755)

    captured = target.capture(change)
    assert captured.built.facts.notes == ["1 x setuid or setgid bits could not be kept"]
    restore(captured, 0, os.fspath(target.before))
    assert (target.before / "program").stat().st_mode & 0o7777 == 0o755


def test_cache_in_a_target_is_no_part_of_it(target: Target) -> None:
    environ = target.environ | {"PIP_CACHE_DIR": os.fspath(target.path / "cache" / "pip")}

    def change() -> None:
        (target.path / "cache" / "pip").mkdir(parents=True)
        (target.path / "cache" / "pip" / "wheel").write_text("x")
        (target.path / "file").write_text("x")

    assert paths_of(capture([target.path], environ, change)) == {"0/cache", "0/file"}


def test_links_into_a_cache(target: Target) -> None:
    cache = Path(target.environ["UV_CACHE_DIR"])
    cache.mkdir(parents=True)
    with pytest.raises(CaptureRefused, match=r"a link into a cache .*UV_LINK_MODE=copy"):
        target.capture(lambda: (target.path / "module.py").symlink_to(cache / "module.py"))


def test_what_is_written_elsewhere_is_named(target: Target) -> None:
    home, cwd = Path(target.environ["HOME"]), target.folder / "cwd"
    (home / ".local" / "bin").mkdir(parents=True)
    (home / ".local" / "bin" / "old").write_text("x")
    (cwd / "my.egg-info").mkdir(parents=True)
    made = Capture([os.fspath(target.path)], target.environ, cwd=os.fspath(cwd), without=[f"{cwd}/setup.log"])
    made.begin()
    (home / ".local" / "bin" / "tool").write_text("x")
    (home / ".local" / "bin" / "old").write_text("changed")
    (home / ".cache" / "pip").mkdir(parents=True)
    (home / ".local" / "lib" / "python").mkdir(parents=True)
    (cwd / "my.egg-info" / "PKG-INFO").write_text("x")
    (cwd / "built.so").write_text("x")
    (cwd / "setup.log").write_text("x")
    (target.path / "file").write_text("x")
    assert made.end().outside == sorted(
        [
            *(f"{home}/.local/bin/old", f"{home}/.local/bin/tool", f"{home}/.local/lib"),
            *(f"{cwd}/built.so", f"{cwd}/my.egg-info/PKG-INFO"),
        ]
    )


# ---- installers --------------------------------------------------------------------------------------------


@pytest.fixture
def venv(target: Target) -> str:
    return make_venv(target.path)


def test_pip_install(target: Target, venv: str) -> None:
    wheels = target.folder / "wheels"
    make_wheel(wheels, "base-lib", "1.0", files={"base_lib/data/table.txt": "x" * 5000})
    make_wheel(wheels, "app", "2.0", requires=["base-lib"], scripts={"app": "app:main"})

    captured = target.capture(
        lambda: pip(venv, target.environ, "install", "--find-links", os.fspath(wheels), "app")
    )
    found = paths_of(captured)
    assert {f"0/{SITE}/app/__init__.py", f"0/{SITE}/base_lib/data/table.txt", "0/bin/app"} <= found
    assert not any("pyvenv.cfg" in path for path in found)
    assert captured.built.facts.compiled == 0  # pip did
    check(captured, target.before, target.path)
    program = subprocess.run([target.before / "bin" / "app"], capture_output=True, text=True, check=False)
    assert program.stdout == "2.0\n", program.stderr


def test_pip_upgrade_and_uninstall(target: Target, venv: str) -> None:
    wheels = target.folder / "wheels"
    old = make_wheel(wheels, "lib", "1.0", files={"lib/old.py": "", "lib/sub/only_old.py": ""})
    gone = make_wheel(wheels, "gone", "1.0")
    pip(venv, target.environ, "install", "--no-deps", old, gone)
    new = make_wheel(wheels, "lib", "2.0", files={"lib/new.py": "", "lib/__init__.py": "VERSION = 2\n"})

    def change() -> None:
        pip(venv, target.environ, "install", "--no-deps", "--upgrade", new)
        pip(venv, target.environ, "uninstall", "-y", "gone")

    captured = target.capture(change)
    assert captured.built.facts.deleted > 0
    check(captured, target.before, target.path)
    assert not (target.before / SITE / "lib" / "old.py").exists()
    assert not (target.before / SITE / "gone").exists()
    assert not (target.before / SITE / "lib-1.0.dist-info").exists()


def _uv() -> str:
    found = shutil.which("uv", path=os.path.dirname(sys.executable)) or shutil.which("uv")
    if found is None:
        lacking("uv is not installed")
    return found


@pytest.mark.parametrize("mode", ["copy", "hardlink", "symlink"])
def test_uv_install(target: Target, venv: str, mode: str) -> None:
    """It writes no bytecode, so that is added; it is what Python itself would have written."""
    uv = _uv()
    wheel = make_wheel(target.folder / "wheels", "lib", "1.0", files={"lib/template.py": "{{ no python }}\n"})
    environ = target.environ | {"UV_LINK_MODE": mode, "UV_OFFLINE": "1", "UV_NO_CONFIG": "1"}
    environ |= {"UV_PYTHON_DOWNLOADS": "never"}

    def change() -> None:
        command = [uv, "pip", "install", "-q", "--no-index", "--python", f"{venv}/bin/python", wheel]
        done = subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    if mode == "symlink":
        with pytest.raises(CaptureRefused, match="UV_LINK_MODE=copy"):
            target.capture(change)
        return
    captured = target.capture(change)
    compiled = f"{SITE}/lib/__pycache__/__init__.{TAG}.pyc"
    assert captured.built.facts.compiled == 1
    assert f"0/{compiled}" in paths_of(captured)
    (target.path / ".lock").unlink(missing_ok=True)  # uv's own, which is left out
    assert captured.built.facts.left_out == []
    os.utime(target.path, ns=(target.path.stat().st_atime_ns, captured_mtime_ns(captured)))
    check(captured, target.before, target.path, compiled=True)
    subprocess.run([f"{venv}/bin/python", "-c", "import lib"], check=True, env={"PYTHONHASHSEED": "0"})
    assert (target.before / compiled).read_bytes() == (target.path / compiled).read_bytes()
    assert (target.before / compiled).stat().st_mode == (target.path / compiled).stat().st_mode


def test_bytecode_is_used(target: Target, venv: str) -> None:
    """Stale bytecode and none at all become valid; what is valid is taken as it is."""
    site = target.path / SITE

    def change() -> None:
        for name in ("valid", "stale", "none"):
            (site / f"{name}.py").write_text("X = 1\n")
        command = [f"{venv}/bin/python", "-m", "compileall", "-q", "-o", "0", os.fspath(site)]
        subprocess.run(command, check=True)
        (site / "__pycache__" / f"none.{TAG}.pyc").unlink()
        (site / "stale.py").write_text("X = 1000\n")

    captured = target.capture(change)
    assert captured.built.facts.compiled == 2
    restored = target.folder / "restored"
    copy_exactly(target.before, restored)
    restore(captured, 0, os.fspath(restored))
    for name in ("valid", "stale", "none"):
        source = (restored / SITE / f"{name}.py").stat()
        header = (restored / SITE / "__pycache__" / f"{name}.{TAG}.pyc").read_bytes()[:16]
        assert header[:4] == importlib.util.MAGIC_NUMBER
        assert header[4:] == b"".join(
            number.to_bytes(4, "little") for number in (0, int(source.st_mtime), source.st_size)
        )
    shutil.rmtree(target.path)
    restored.rename(target.path)
    program = "import stale, none; print(stale.X, none.X)"
    done = subprocess.run([f"{venv}/bin/python", "-v", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "1000 1\n"
    assert f"code object from '{site}/stale.py'" not in done.stderr
    assert f"code object from '{site}/__pycache__/stale.{TAG}.pyc'" in done.stderr


def test_many_are_compiled_by_several(target: Target, venv: str) -> None:
    site = target.path / SITE

    def change() -> None:
        for number in range(200):
            (site / f"module{number}.py").write_text(f"X = {number}\n")
        Path(os.fsdecode(os.fsencode(site) + b"/odd\xff\nname.py")).write_text("X = 1\n")

    assert target.capture(change).built.facts.compiled == 201


# ---- packages in place -------------------------------------------------------------------------------------

BACKEND = textwrap.dedent("""
    import os, zipfile
    def _wheel(folder, editable):
        name = "inplace-1.0-py3-none-any.whl"
        with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
            def add(path, text):
                wheel.writestr(path, text)
            if editable:
                add("__editable__.inplace-1.0.pth", os.getcwd() + "\\n")
            else:
                add("inplace.py", open("inplace.py").read())
            add("inplace-1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: inplace\\nVersion: 1.0\\n")
            add("inplace-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
            add("inplace-1.0.dist-info/RECORD", "")
        return name
    def build_wheel(folder, config_settings=None, metadata_directory=None):
        return _wheel(folder, False)
    def build_editable(folder, config_settings=None, metadata_directory=None):
        return _wheel(folder, True)
""")


def make_project(directory: Path) -> str:
    """A project with a build backend of its own: nothing has to be fetched for it."""
    directory.mkdir(parents=True)
    (directory / "inplace.py").write_text("X = 1\n")
    (directory / "backend.py").write_text(BACKEND)
    (directory / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "inplace"\nversion = "1.0"\n'
    )
    return os.fspath(directory)


def test_package_in_place_out_of_reach(target: Target, venv: str) -> None:
    project = make_project(target.folder / "project")
    with pytest.raises(EditableRefused, match=f"^inplace is installed in place from {project}, .*--setup-input"):
        target.capture(lambda: pip(venv, target.environ, "install", "--no-deps", "-e", project))


def test_package_in_place_as_an_input(target: Target, venv: str) -> None:
    project = make_project(target.folder / "project")
    captured = target.capture(
        lambda: pip(venv, target.environ, "install", "--no-deps", "-e", project), inputs=[project]
    )
    assert captured.built.facts.required == [project]
    check(captured, target.before, target.path)


def test_package_in_place_in_a_target(target: Target, venv: str) -> None:
    project = make_project(target.path / "src" / "project")
    captured = target.capture(lambda: pip(venv, target.environ, "install", "--no-deps", "-e", project))
    assert captured.built.facts.required == []
    check(captured, target.before, target.path)
    direct = json.loads((target.before / SITE / "inplace-1.0.dist-info" / "direct_url.json").read_text())
    assert direct["dir_info"] == {"editable": True}


def test_package_that_was_in_place_before(target: Target, venv: str) -> None:
    """It is not of these commands: the base of the key answers for it."""
    project = make_project(target.folder / "project")
    pip(venv, target.environ, "install", "--no-deps", "-e", project)
    wheel = make_wheel(target.folder / "wheels", "lib", "1.0")
    captured = target.capture(lambda: pip(venv, target.environ, "install", "--no-deps", wheel))
    assert captured.built.facts.required == []
    check(captured, target.before, target.path)


# ---- in an image -------------------------------------------------------------------------------------------

ON_OVERLAY = """
import os, shutil, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from tests.integration.captured_envs import capture, environ_of, paths_of
folder = Path(sys.argv[1])
target = folder / "merged" / "env"
def change():
    (target / "edited").write_text("new")
    (target / "package" / "goes.py").unlink()
    shutil.rmtree(target / "replaced")
    (target / "replaced").mkdir()
    (target / "replaced" / "new").write_text("x")
    os.link(target / "edited", target / "again")
def read_again():
    for path in [target, *target.rglob("*")]:
        path.is_file() and path.read_bytes()
captured = capture([target], environ_of(folder), change, then=read_again)
tree = captured.built.tree.tree
print(sorted(paths_of(captured)), [tree.path(entry) for entry in tree.opaque], captured.built.facts.deleted)
"""


@pytest.mark.system
def test_target_in_an_image(tmp_path: Path) -> None:
    """An overlay whose layers lie on different disks: numbers of files are made up, devices too."""
    for name in ("lower", "upper", "merged"):
        (tmp_path / name).mkdir()
    mounts = """
        mount -t tmpfs none lower && mount -t tmpfs none upper || exit 77
        mkdir -p lower/env/package lower/env/replaced upper/up upper/work
        for f in edited kept package/goes.py package/kept.py replaced/old; do echo $f > lower/env/$f; done
        mount -t overlay none -o lowerdir=lower,upperdir=upper/up,workdir=upper/work merged || exit 77
        exec "$@"
    """
    command = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        mounts,
        "sh",
        sys.executable,
        "-c",
        ON_OVERLAY,
        os.fspath(tmp_path),
    ]
    done = subprocess.run([*command, os.getcwd()], cwd=tmp_path, capture_output=True, text=True)
    if done.returncode in (1, 77) and "Traceback" not in done.stderr:
        lacking(f"overlays cannot be mounted: {done.stderr}")
    names = ["again", "edited", "package", "package/goes.py", "replaced", "replaced/new"]
    assert done.stdout == f"{[f'0/{name}' for name in names]} [b'0/replaced'] 1\n", done.stderr
