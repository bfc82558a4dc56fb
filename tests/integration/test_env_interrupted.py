"""What is in place is never lost or half: power goes, starts are killed, folders exchanged, nodes share one."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bootseer import aio
from bootseer.env.capture.walk import walk
from bootseer.env.restore import renames
from bootseer.env.restore import restore as restoring
from bootseer.env.restore.in_place import is_there
from bootseer.env.restore.markers import is_clean, open_markers
from bootseer.env.restore.restore import exclusive_at, recover
from bootseer.env.restore.staging import PREFIX, claim
from bootseer.env.restore.sync import sync_targets
from bootseer.env.restore.unpack_helpers import WORTH_FILES
from bootseer.errors import StorageError, StorageTimeout
from tests.integration.test_env_restore import (
    IS_ROOT,
    KEY,
    KILLED,
    TOP,
    Env,
    changes,
    make_env,
    make_plain,
    make_target,
    recover_in,
    seen,
    staged,
    wait_tidy,
    wanted,
    write,
)
from tests.support import Programs, lacking, python, wait_until
from tests.testing.trees import FileFacts


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("BOOTSEER_CACHE", os.fspath(tmp_path / "cache"))
    yield
    aio.close()


@pytest.fixture
def unsettled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is synced yet, as on a busy disk: by `sync_targets` only."""
    monkeypatch.setattr(restoring, "sync_later", lambda *_: None)


# ---- the power goes ----------------------------------------------------------------------------------------


@contextmanager
def disk(image: Path, directory: Path) -> Iterator[None]:
    directory.mkdir(exist_ok=True)
    made = subprocess.run(["mount", "-o", "loop,commit=1", image, directory], capture_output=True, text=True)
    if made.returncode:
        lacking(f"no loop mounts here: {made.stderr}")
    try:
        yield
    finally:
        wait_until(
            lambda: subprocess.run(["umount", directory], capture_output=True).returncode == 0, 30, "umount"
        )


def sync_names(directory: Path) -> None:
    """All names and attributes are on disk then; what new files hold is not."""
    fd = os.open(directory, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


@pytest.mark.system
@pytest.mark.usefixtures("unsettled")
@pytest.mark.parametrize(("is_fresh", "helped"), [(False, False), (True, False), (True, True)])
def test_the_power_goes_after_a_restore(tmp_path: Path, is_fresh: bool, helped: bool) -> None:
    """The disk has the new names but not what is in the files: what was there before is put back."""
    if not IS_ROOT or shutil.which("mkfs.ext4") is None:
        lacking("a disk of its own needs root and mkfs.ext4")
    image, after, place = tmp_path / "disk", tmp_path / "disk-after", tmp_path / "place"
    subprocess.run(["truncate", "-s", "48M", image], check=True)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    target = place / "venv"
    with disk(image, place):
        if is_fresh:
            env = Env(make_plain(tmp_path), tmp_path / "store", [target])
        else:
            before = make_target(target)
            env = make_env(tmp_path, target)
        if helped:  # then the journal is written ahead
            env.snapshot = msgspec.structs.replace(env.snapshot, files=WORTH_FILES)
        os.sync()
        assert env.restore().how == "unpack"
        sync_names(place)
        subprocess.run(["cp", "--sparse=always", image, after], check=True)
        whole = seen(target)
    with disk(after, place):
        assert seen(target) != whole, "else nothing was lost, and this shows nothing"
        notes = recover_in("another", target)
        if is_fresh:
            assert not target.exists()
        else:
            assert seen(target) == before, changes(seen(target), before, before)
        assert notes == [f"{target}: an interrupted start from before the last boot was undone"]
        assert recover_in("another", target) == []
        assert env.restore().how == "unpack"
        assert seen(target) == whole
        sync_targets([os.fspath(target)], os.environ)
        assert recover_in("another", target) == []
        assert seen(target) == whole, "it is on disk by now"
        wait_tidy(place)


@pytest.mark.usefixtures("unsettled")
@pytest.mark.parametrize("is_fresh", [False, True])
def test_a_target_that_is_removed_before_it_is_on_disk(tmp_path: Path, is_fresh: bool) -> None:
    """Nothing of it is left beside it then."""
    target = tmp_path / "venv"
    if is_fresh:
        env = Env(make_plain(tmp_path), tmp_path / "store", [target])
    else:
        make_target(target)
        env = make_env(tmp_path, target)
    env.restore()
    assert len(staged(tmp_path)) == 1
    shutil.rmtree(target)
    sync_targets([os.fspath(target)], os.environ)
    wait_tidy(tmp_path)


@pytest.mark.usefixtures("unsettled")
def test_what_was_there_is_kept_until_all_is_on_disk(tmp_path: Path) -> None:
    target = tmp_path / "venv"
    make_target(target)
    env = make_env(tmp_path, target)
    env.restore()
    assert len(staged(tmp_path)) == 1
    assert recover([os.fspath(target)]) == [], "nothing was interrupted"
    assert len(staged(tmp_path)) == 1, "and it is kept still"
    assert env.restore().how == "there"
    sync_targets([os.fspath(target)], os.environ)
    wait_tidy(tmp_path)
    assert recover_in("another", target) == []
    assert seen(target) == wanted(tmp_path, target)


@pytest.mark.usefixtures("unsettled")
def test_what_users_added_is_kept_when_the_rest_is_undone(tmp_path: Path) -> None:
    target = tmp_path / "venv"
    before = make_target(target)
    env = make_env(tmp_path, target)
    env.restore()
    write(target / "lib/site/new/__pycache__/a.pyc", "bytecode")
    write(target / "lib/site/new/notes.txt", "the user's own")
    undone, note = recover_in("another", target)
    [kept] = staged(tmp_path)
    assert undone == f"{target}: an interrupted start from before the last boot was undone"
    assert note == f"{target}: files that were added to it since then are in {tmp_path / kept}"
    assert (tmp_path / kept / "tree/lib/site/new/notes.txt").read_text() == "the user's own"
    assert {path: each for path, each in seen(target).items() if path != b"lib/site"} == {
        path: each for path, each in before.items() if path != b"lib/site"
    }
    assert recover_in("another", target) == []
    assert env.restore().how == "unpack"


@pytest.mark.usefixtures("unsettled")
def test_who_changes_it_next_syncs_what_is_not_yet(tmp_path: Path) -> None:
    """Else set-up would run over what the next boot undoes."""
    target = tmp_path / "venv"
    make_target(target)
    env = make_env(tmp_path, target)
    env.restore()
    with exclusive_at([os.fspath(target)], environ=os.environ):
        write(target / "lib/site/more.py", "of set-up")
    there = seen(target)
    assert recover_in("another", target) == []
    assert seen(target) == there
    wait_tidy(tmp_path)


def test_a_start_begins_again_what_was_killed_before_it_was_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "venv"
    make_target(target)
    env = make_env(tmp_path, target)
    with monkeypatch.context() as patch:
        patch.setattr(restoring, "sync_later", lambda *_: None)
        env.restore()
    assert recover([os.fspath(target)]) == []
    wait_tidy(tmp_path)
    assert is_there([os.fspath(target)], KEY, env.digest)
    assert recover_in("another", target) == []
    assert seen(target) == wanted(tmp_path, target)


# ---- leftovers that cannot be understood -------------------------------------------------------------------


def leave(directory: Path, target: Path, env: Env) -> Path:
    """What a restore leaves that is not synced; its name was read from there."""
    env.restore()
    name, *more = staged(directory)
    assert not more
    return directory / name


@pytest.mark.usefixtures("unsettled")
@pytest.mark.parametrize("data", [b"", b"{}", b"\xff\xfe", b'{"format": "bootseer-env-journal/1"}'])
def test_a_journal_that_cannot_be_read_ends_no_job(tmp_path: Path, data: bytes) -> None:
    target = tmp_path / "venv"
    env = Env(make_plain(tmp_path), tmp_path / "store", [target])
    left = leave(tmp_path, target, env)
    (left / "done").unlink()
    (left / "journal").write_bytes(data)
    there = seen(target)
    [note] = recover([os.fspath(target)])
    assert note.startswith(f"{target}: an interrupted start may have left it half changed ({left}: ")
    assert note.endswith("if it does not work, delete and recreate it")
    assert "\n" not in note
    wait_tidy(tmp_path)
    assert recover([os.fspath(target)]) == []
    assert seen(target) == there


@pytest.mark.usefixtures("unsettled")
@pytest.mark.parametrize("boot", ["this", "another"])
def test_a_step_whose_journal_has_not_got_its_name_is_undone_or_completed(tmp_path: Path, boot: str) -> None:
    """A disk may have the name of the target, and not yet the last one of the journal that was written ahead."""
    target = tmp_path / "venv"
    env = Env(make_plain(tmp_path), tmp_path / "store", [target])
    left = leave(tmp_path, target, env)
    (left / "done").rename(left / "journal.new")
    there = seen(target)
    [note] = recover_in("another", target) if boot == "another" else recover([os.fspath(target)])
    if boot == "another":
        assert note == f"{target}: an interrupted start from before the last boot was undone"
        assert not target.exists()
    else:
        assert note == f"{target}: an interrupted start was completed"
        assert seen(target) == there
        sync_targets([os.fspath(target)], os.environ)
    wait_tidy(tmp_path)
    assert env.restore().how == ("unpack" if boot == "another" else "there")
    assert seen(target) == there


@pytest.mark.usefixtures("unsettled")
@pytest.mark.parametrize("boot", ["this", "another"])
@pytest.mark.parametrize("is_torn", [False, True])
def test_a_journal_that_was_written_ahead_of_files_counts_for_nothing(
    tmp_path: Path, is_torn: bool, boot: str
) -> None:
    """Who is killed then leaves a tree that is not whole: it is thrown away."""
    target = tmp_path / "venv"
    env = Env(make_plain(tmp_path), tmp_path / "store", [target])
    left = leave(tmp_path, target, env)
    (left / "done").rename(left / "journal.new")
    target.rename(left / "tree")
    if is_torn:
        os.truncate(left / "journal.new", 100)
    assert (recover_in("another", target) if boot == "another" else recover([os.fspath(target)])) == []
    wait_tidy(tmp_path)
    assert not target.exists()
    assert env.restore().how == "unpack"


@pytest.mark.usefixtures("unsettled")
def test_what_the_target_had_is_never_thrown_away_unasked(tmp_path: Path) -> None:
    target = tmp_path / "venv"
    make_target(target)
    env = make_env(tmp_path, target)
    left = leave(tmp_path, target, env)
    (left / "done").rename(left / "journal")
    (left / "journal").write_bytes(b"")
    gone = seen(left / "gone")
    [note] = recover([os.fspath(target)])
    [kept] = staged(tmp_path)
    assert note.endswith(f"; its earlier content is in {tmp_path / kept}; delete both, and recreate the target")
    assert seen(tmp_path / kept / "gone") == gone
    assert recover([os.fspath(target)]) == []
    assert staged(tmp_path) == [kept]
    markers = open_markers(os.environ)
    doubt = markers.unclean(os.fspath(target))
    assert doubt is not None
    assert not is_clean(doubt, walk(os.fspath(target))), "what is there is not to be published"
    shutil.rmtree(target)
    wait_until(lambda: bool(make_anew(target)) and is_clean(doubt, walk(os.fspath(target))), 30, "a new one")


def make_anew(target: Path) -> dict[bytes, FileFacts]:
    shutil.rmtree(target, ignore_errors=True)
    return make_target(target)


def test_what_cannot_be_undone_now_is_undone_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "venv"
    before = make_target(target)
    env = make_env(tmp_path, target)
    after = wanted(tmp_path, target)
    real, left = renames._rename, [6]

    def fail(*arguments: Any) -> int:
        left[0] -= 1
        return errno.EIO if left[0] <= 0 else real(*arguments)

    with monkeypatch.context() as patch, pytest.raises(StorageError, match="it could not be undone"):
        patch.setattr(renames, "_rename", fail)
        env.restore()
    assert seen(target) not in (before, after)
    [note] = recover([os.fspath(target)])
    assert note == f"{target}: an interrupted start was completed"
    assert seen(target) == after
    wait_tidy(tmp_path)


# ---- another folder ----------------------------------------------------------------------------------------


def killed_in_the_middle(tmp_path: Path, target: Path, env: Env, program: Programs, steps: int) -> None:
    spec = tmp_path / "snapshot"
    spec.write_bytes(msgspec.json.encode(env.snapshot))
    environ = {"PYTHONPATH": os.fspath(TOP), "BOOTSEER_CACHE": os.environ["BOOTSEER_CACHE"]}
    run = program(*python("-c", KILLED), steps, "exchange", spec, env.store, env=environ)
    assert run.status == -signal.SIGKILL, run.stderr


@pytest.mark.parametrize("boot", ["the same", "another"])
def test_a_target_that_was_made_again_by_hand_is_left_alone(tmp_path: Path, program: Programs, boot: str) -> None:
    target = tmp_path / "venv"
    before = make_target(target)
    env = make_env(tmp_path, target)
    killed_in_the_middle(tmp_path, target, env, program, 12)
    assert seen(target) not in (before, wanted(tmp_path, target)), "it was killed in the middle"
    shutil.rmtree(target)
    make_target(target)
    shutil.copytree(tmp_path / "source/0/lib/site/new", target / "lib/site/new")  # by pip, say
    write(target / "bin/tool", "the user's own")
    there = seen(target)
    [note] = recover_in(boot, target)
    assert note == f"{target}: is not the directory that an interrupted start was changing; left unchanged"
    assert seen(target) == there
    assert recover_in(boot, target) == []
    wait_tidy(tmp_path)
    assert env.restore().how == "unpack"


@pytest.mark.parametrize("boot", ["the same", "another"])
def test_what_somebody_made_in_it_meanwhile_is_theirs(tmp_path: Path, program: Programs, boot: str) -> None:
    target = tmp_path / "venv"
    before = make_target(target)
    env = make_env(tmp_path, target)
    killed_in_the_middle(tmp_path, target, env, program, 4)
    theirs = [target / "bin/tool", target / "lib/site/link"]
    for path in theirs:
        if os.path.lexists(path):
            path.unlink()
        write(path, "the user's own")
    [note] = recover_in(boot, target)
    assert note.endswith("undone")
    assert [path.read_text() for path in theirs] == ["the user's own"] * 2
    found = seen(target)
    assert {path for path in found if path not in before} == {b"bin/tool", b"lib/site/link"}
    files = {path: each for path, each in before.items() if not stat_is_directory(each)}
    assert {path: found.get(path) for path in files} == files
    assert recover_in(boot, target) == []
    wait_tidy(tmp_path)


def stat_is_directory(each: FileFacts) -> bool:
    return stat.S_ISDIR(each.mode)


# ---- targets that several nodes have -----------------------------------------------------------------------

HOLD = """
import os, sys
from bootseer.env.restore.staging import claim
with claim(sys.argv[1], environ=os.environ, boot="this", wait_s=60) as claimed:
    staging = claimed.stage()
    open(staging.tree + "/alive", "w").close()
    print("held", flush=True)
    sys.stdin.readline()
    print(os.listdir(staging.tree), flush=True)
"""

LOOK = """
import os, sys
from bootseer.env.restore.restore import recover
from bootseer.errors import StorageTimeout
try:
    print(recover([sys.argv[1]], environ=os.environ, wait_s=float(sys.argv[2])))
except StorageTimeout as error:
    print("busy:", error)
"""


@pytest.mark.system
def test_two_nodes_with_one_volume_exclude_each_other(tmp_path: Path) -> None:
    """A mount at the target: the folder above it is each node's own."""
    if not IS_ROOT:
        lacking("mounting needs root")
    volume, target = tmp_path / "volume", tmp_path / "place" / "venv"
    before = make_target(volume)
    target.parent.mkdir()

    def node(number: int, code: str, *words: str) -> subprocess.Popen[str]:
        own = tmp_path / f"own{number}"
        (own / "venv").mkdir(parents=True, exist_ok=True)
        shell = f'mount --bind {own} {target.parent} && mount --bind {volume} {target} && exec "$@"'
        return subprocess.Popen(
            ["unshare", "--mount", "/bin/sh", "-c", shell, "sh", sys.executable, "-c", code, target, *words],
            env={**os.environ, "PYTHONPATH": os.fspath(TOP), "BOOTSEER_CACHE": f"{own}/cache"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    with node(1, HOLD) as first:
        assert first.stdin is not None
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with node(2, LOOK, "0.2") as second:
            said = second.communicate()[0]
        assert said.startswith(f"busy: {target}: another process has locked it for 0.2 s (lock: {target})"), said
        first.stdin.write("\n")
        first.stdin.flush()
        assert first.stdout.readline() == "['alive']\n", "its new files are its own as long as it lives"
    with node(2, LOOK, "30") as third:
        assert third.communicate()[0] == "[]\n", "the lock went with its holder"
    wait_tidy(volume)
    wait_until(lambda: seen(volume) == before, 10, "its times: they are set when all else is gone")


def refuse_directories(number: int) -> Any:
    real = fcntl.flock

    def flock(fd: int, operation: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}") or number in (errno.ENOLCK, errno.EOPNOTSUPP):
            raise OSError(number, os.strerror(number))
        real(fd, operation)

    return flock


def test_where_directories_cannot_be_locked_a_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS; seen by a node whose folder above the target is another one."""
    target = tmp_path / "venv"
    make_target(target)
    env = make_env(tmp_path, target)
    monkeypatch.setattr(fcntl, "flock", refuse_directories(errno.EBADF))
    before = os.stat(target).st_mtime_ns
    with claim(os.fspath(target), environ=os.environ, boot="this") as claimed:
        assert os.stat(target).st_mtime_ns == before
        for name in staged(tmp_path):  # the other node does not see it
            (tmp_path / name).unlink()
        with pytest.raises(StorageTimeout, match=r"another process has locked it"):
            recover([os.fspath(target)], wait_s=0.1)
        assert not claimed.notes
    assert env.restore().how == "unpack"
    [lock] = staged(target)
    assert lock == f"{PREFIX}inside.lock"
    assert env.restore().how == "there", "the lock is no part of it"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_where_nothing_can_be_locked_nobody_removes_what_may_be_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """As on Lustre without `flock`."""
    target = tmp_path / "venv"
    make_target(target)
    env = make_env(tmp_path, target)
    monkeypatch.setattr(fcntl, "flock", refuse_directories(number))
    with claim(os.fspath(target), environ=os.environ, boot="this") as first:
        living = first.stage()
        assert env.restore().how == "unpack"
        assert os.path.isdir(living.tree)
        living.throw_away()
    wait_until(lambda: not os.path.exists(living.folder), 30, "the end of what was removed")
    assert seen(target) == wanted(tmp_path, target)
