"""The status folder of mounted trees: its values, at once whatever the store does; nothing is left at any end."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bootseer.errors import StorageError
from bootseer.linux import mount as kernel
from bootseer.mounts.tree_daemon.mount import list_trees, unmount_tree
from bootseer.mounts.tree_daemon.places import TreeDirectory
from bootseer.mounts.tree_daemon.status_folder import PATIENCE_S
from bootseer.mounts.tree_daemon.status_texts import NAMES
from bootseer.tree.status_folder import NAME
from tests.integration.image_roots import make_root
from tests.integration.mounted_trees import Built, Trees, trees
from tests.support import clean_environ, is_running, wait_until
from tests.testing.faulty_http import FaultyHttpServer, HttpFault, HttpKind
from tests.testing.trees import snapshot

pytestmark = pytest.mark.system
__all__ = ["trees"]  # a fixture

BOOTSEER = os.path.join(os.path.dirname(sys.executable), "bootseer")
GONE = {errno.ENOTCONN, errno.ECONNABORTED, errno.ENOENT, errno.EIO, errno.ENODEV}
AT_ONCE_S = PATIENCE_S + 1.5  # a loaded machine


def run(trees: Trees, *words: object, status: int = 0) -> subprocess.CompletedProcess[str]:
    """`bootseer image ...`"""
    argv = [BOOTSEER, "image", *map(str, words)]
    environ = {**clean_environ(), **trees.environ, "HOME": os.fspath(trees.top)}
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=120, check=False, env=environ, cwd=trees.top
    )
    assert done.returncode == status, (argv, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done


def mount(trees: Trees, *options: object) -> Path:
    """Mounted by the command, at a directory; its status folder."""
    directory = trees.top / "mnt"
    directory.mkdir(exist_ok=True)
    run(trees, "mount", trees.url, directory, "--status-folder", "--no-prefetch", *options)
    return directory / NAME


def read(folder: Path, name: str = "state") -> str:
    """The text of a file, which must come at once."""
    begin_s = time.monotonic()
    text = (folder / name).read_text()
    assert time.monotonic() - begin_s < AT_ONCE_S
    return text


def facts(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(read(folder, "status.json"))
    return found


def is_readable(path: Path) -> bool:
    try:
        return path.read_bytes() is not None
    except OSError:
        return False


def status_mounts(trees: Trees) -> list[str]:
    """Those of this test's trees and directories: other tests have their own."""
    own = (f"{trees.runtime}/", f"{trees.top}/")
    found = [each.target for each in kernel.mounts() if each.fstype == "fuse.bootseer-status"]
    return [target for target in found if target.startswith(own)]


def serve_again(trees: Trees, change: Callable[[Path], object]) -> None:
    """The source is changed and built anew."""
    change(Path(trees.built.source))
    trees.built = Built(Path(trees.built.source))
    trees.server.close()
    trees.server = FaultyHttpServer(trees.built.files)


# ---- values ------------------------------------------------------------------------------------------------


def test_values_follow_what_is_read(trees: Trees) -> None:
    folder = mount(trees)
    assert sorted(os.listdir(folder)) == sorted(NAMES)
    before = facts(folder)
    assert (before["state"], before["fetched_ratio"], before["blocks"]["present"]) == ("mounted", 0.0, 0)
    assert (read(folder), read(folder, "fetched_ratio")) == ("mounted\n", "0.0000\n")
    assert read(folder, "source") == f"url {trees.server.url}\ndigest sha256:{trees.built.digest}\n"
    wanted = Path(trees.built.source, "0/file0").read_bytes() + Path(trees.built.source, "3/file3").read_bytes()
    assert (folder.parent / "0/file0").read_bytes() + (folder.parent / "3/file3").read_bytes() == wanted
    wait_until(lambda: float(read(folder, "fetched_ratio")) > 0, 10, "the share")
    after = facts(folder)
    assert 0 < after["fetched_ratio"] < 1 and after["state"] == "mounted"
    assert after["bytes"]["store"] > 0 and after["stalls"]["count"] > 0 and after["stalls"]["seconds"] > 0
    assert read(folder, "bytes").splitlines()[0] == f"store {after['bytes']['store']}"
    (tree,) = list_trees()
    assert after["blocks"]["present"] == tree.status["cache"]["present"]
    assert after["bytes"]["store"] == tree.status["blocks"]["store_bytes"]
    outcome = trees.read(os.fspath(folder.parent)).end()
    assert not outcome["wrong"] and not outcome.errors
    wait_until(lambda: read(folder) == "complete\n", 10, "all blocks")
    assert read(folder, "fetched_ratio") == "1.0000\n"


def test_the_rest_of_the_tree_is_as_it_was_built(trees: Trees) -> None:
    folder = mount(trees)
    wanted = snapshot(trees.built.source)
    shown = snapshot(list_trees()[0].folder)  # the same files; the folder is mounted only in the other directory
    assert shown.pop(NAME.encode()).size == 0
    assert shown == wanted
    assert os.listdir(folder.parent) == os.listdir(list_trees()[0].folder)
    wait_until(lambda: any(trees.cache.rglob("erofs-*-status")), 10, "the metadata in the cache")
    run(trees, "umount", trees.built.digest)
    kernel.unmount(os.fspath(folder.parent))
    plain = trees.mount()  # the metadata of one kind are not those of the other
    assert snapshot(plain.folder) == wanted
    plain.unmount()
    wait_until(lambda: not list_trees(), 10)
    again = mount(trees)  # by the cached metadata
    assert facts(again)["source"]["digest"] == trees.built.digest


def test_a_source_that_fails_is_named_without_its_password(trees: Trees) -> None:
    url = trees.server.url.replace("://", "://ada:secret@")
    directory = trees.top / "mnt"
    directory.mkdir()
    run(trees, "mount", f"{url}@sha256:{trees.built.digest}", directory, "--status-folder", "--no-prefetch",
        "--deadline", "2")  # fmt: skip
    folder = directory / NAME
    assert read(folder) == "mounted\n"
    trees.server.plan[:] = [HttpFault(HttpKind.STATUS, "packs/*", status=503)]
    with pytest.raises(OSError, match="Input/output error"):
        (directory / "2/file2").read_bytes()
    wait_until(lambda: read(folder).startswith("failing\n"), 10, "the failure")
    word, line = read(folder).splitlines()
    assert "packs/" in line, line
    found = facts(folder)
    assert (found["state"], found["error"]) == (word, line) and found["blocks"]["failing"] > 0
    assert "secret" not in "".join(read(folder, name) for name in NAMES)
    trees.server.plan.clear()
    wait_until(lambda: is_readable(directory / "2/file2"), 10, "the store")
    assert (directory / "2/file2").read_bytes() == Path(trees.built.source, "2/file2").read_bytes()
    wait_until(lambda: read(folder) == "mounted\n", 10, "the end of the failure")
    assert facts(folder)["error"] == ""


def test_it_answers_at_once_while_the_store_is_silent(trees: Trees) -> None:
    folder = mount(trees, "--deadline", "60")
    trees.server.plan[:] = [HttpFault(HttpKind.SILENCE, "packs/*")]
    reader = trees.run("cat", os.fspath(folder.parent / "1/file1"))
    wait_until(lambda: facts(folder)["stalls"]["count"] > 0, 10, "a reader that waits")
    assert read(folder) == "fetching\n"
    first_s = facts(folder)["stalls"]["seconds"]
    begin_s = time.monotonic()
    for number in range(1000):
        read(folder, NAMES[number % len(NAMES)])
    assert time.monotonic() - begin_s < 30
    assert facts(folder)["stalls"]["seconds"] > first_s
    assert is_running(reader.pid)
    run(trees, "umount", trees.built.digest, "--force")


def test_many_readers_at_once(trees: Trees) -> None:
    folder = mount(trees)
    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(lambda _: read(folder), range(400)))
    assert set(texts) == {"mounted\n"}


# ---- readers -----------------------------------------------------------------------------------------------


def test_any_user_can_read_and_none_can_write(trees: Trees) -> None:
    folder = mount(trees)
    nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    done = subprocess.run([*nobody, "cat", *NAMES], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("mounted\n0.0000\nstore ")
    changes: list[Callable[[], object]] = [
        lambda: (folder / "state").write_text("x"),
        (folder / "new").touch,
        (folder / "state").unlink,
        lambda: os.truncate(folder / "state", 0),
        lambda: os.chmod(folder / "state", 0o666),
        (folder / "new").mkdir,
        lambda: os.utime(folder / "state"),
    ]
    for change in changes:
        with pytest.raises(OSError) as caught:
            change()
        assert caught.value.errno == errno.EROFS
    assert (os.stat(folder).st_mode & 0o777, os.stat(folder / "state").st_mode & 0o777) == (0o555, 0o444)
    for name in ("none", "../device", "state/x"):
        with pytest.raises((FileNotFoundError, NotADirectoryError)):
            (folder / name).read_text()


def test_an_open_file_keeps_its_text(trees: Trees) -> None:
    folder = mount(trees)
    fd = os.open(folder / "status.json", os.O_RDONLY)
    try:
        before = facts(folder)["bytes"]["store"]
        begin = os.read(fd, 10)
        (folder.parent / "0/file0").read_bytes()
        wait_until(lambda: facts(folder)["bytes"]["store"] > before, 10)
        rest = b"".join(iter(lambda: os.read(fd, 7), b""))
        assert json.loads(begin + rest)["bytes"]["store"] == before
        assert os.pread(fd, 100, 1 << 40) == b"" and os.pread(fd, 10, 0) == begin
    finally:
        os.close(fd)


# ---- ends --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("holds", ["file", "directory", "working directory"])
def test_a_reader_does_not_hinder_an_unmount(trees: Trees, holds: str) -> None:
    folder = mount(trees, "--idle", "0.3")
    script = {"file": "exec 3<state; cd /", "directory": "exec 3<.; cd /", "working directory": ":"}[holds]
    reader = trees.run("sh", "-c", f"cd {folder} && {script}; echo; exec sleep 100")
    wait_until(lambda: reader.stdout, 10, "the reader")
    run(trees, "umount", folder.parent)
    assert os.listdir(folder.parent) == []
    trees.wait_gone()
    assert status_mounts(trees) == [] and is_running(reader.pid)


def test_a_program_that_uses_the_tree_keeps_the_folder_too(trees: Trees) -> None:
    folder = mount(trees)
    with (folder.parent / "0/file0").open("rb"):
        assert "is in use" in run(trees, "umount", folder.parent, status=1).stderr
        assert read(folder) == "mounted\n" or read(folder) == "complete\n"
    run(trees, "umount", folder.parent)
    assert not folder.exists()


def test_the_folder_alone_keeps_no_daemon(trees: Trees) -> None:
    tree = trees.mount(idle_s=0.3)
    pid = trees.daemon(tree)
    with Path(tree.status_folder(), "state").open("rb", buffering=0) as file:
        trees.wait_gone()
        with pytest.raises(OSError) as caught:
            file.read()
        assert caught.value.errno in GONE
    wait_until(lambda: not is_running(pid), 10)


@pytest.mark.parametrize("killed", ["daemon", "daemon and reaper"])
def test_nothing_is_left_of_a_killed_daemon(trees: Trees, killed: str) -> None:
    folder = mount(trees)
    place = TreeDirectory(os.fspath(trees.runtime), trees.built.digest)
    (tree,) = list_trees()
    pids = place.read_pids() if killed != "daemon" else [tree.status["pid"]]
    with (folder / "state").open("rb", buffering=0) as file:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        if killed == "daemon":
            trees.wait_gone()
        else:
            wait_until(lambda: not any(map(is_running, pids)), 10)
            with pytest.raises(OSError) as caught:
                read(folder)
            assert caught.value.errno in GONE
            wait_until(lambda: list_trees() == [], 10)  # the next user of the node cleans up
        assert status_mounts(trees) == []
        with pytest.raises(OSError) as caught:
            file.read()
        assert caught.value.errno in GONE
    assert kernel.unmount(os.fspath(folder.parent)), "without an error, as nothing is mounted in it"
    again = mount(trees)
    assert read(again) == "mounted\n"


def test_a_stopped_daemon_is_ended_with_the_folder(trees: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = mount(trees)
    (tree,) = list_trees()
    reader = trees.run("cat", os.fspath(folder / "state"), os.fspath(folder / "state"))
    reader.wait(10)
    os.kill(tree.status["pid"], signal.SIGSTOP)
    reader = trees.run("cat", os.fspath(folder / "state"))
    monkeypatch.setattr("bootseer.mounts.tree_daemon.ending.ANSWER_S", 1.0)
    assert unmount_tree(tree.digest)
    assert reader.wait(10).status != 0
    assert status_mounts(trees) == []
    assert kernel.unmount(os.fspath(folder.parent))


def test_an_unmount_of_the_folder_by_others_is_repaired_at_the_next_request(trees: Trees) -> None:
    tree = trees.mount()
    folder = tree.status_folder()
    assert tree.status_folder() == folder and len(status_mounts(trees)) == 1
    assert kernel.unmount(folder)
    assert tree.status_folder() == folder and len(status_mounts(trees)) == 1
    assert read(Path(folder)) == "mounted\n"


def test_a_folder_whose_connection_was_aborted_is_replaced_at_the_next_request(trees: Trees) -> None:
    tree = trees.mount()
    folder = tree.status_folder()
    (status,) = (each for each in kernel.mounts() if each.target == os.path.realpath(folder))
    held = os.open(folder, os.O_PATH)
    with pytest.raises(StorageError):
        kernel.unmount(status.target, kernel.FORCE)  # it is in use, so only its connection ends
    with pytest.raises(OSError):
        os.listdir(folder)
    assert tree.status_folder() == folder and len(status_mounts(trees)) == 1
    assert read(Path(folder)) == "mounted\n"
    os.close(held)


def test_one_folder_where_the_runtime_directory_is_behind_a_link(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As /var/run is: the kernel lists the mount by its real path."""
    real = trees.top / "real"
    real.mkdir(0o700)
    link = trees.top / "link"
    link.symlink_to(real)
    monkeypatch.setenv("BOOTSEER_RUNTIME", os.fspath(link / "rt"))
    tree = trees.mount()
    folder = tree.status_folder()
    assert tree.status_folder() == folder
    found = [each for each in kernel.mounts() if each.target.startswith(f"{real}/") and "status" in each.fstype]
    assert len(found) == 1
    assert read(Path(folder)) == "mounted\n"
    assert unmount_tree(tree.digest)


def test_many_requests_at_once_make_one_folder(trees: Trees) -> None:
    tree = trees.mount()
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda _: tree.status_folder(), range(16)))) == 1
    assert len(status_mounts(trees)) == 1
    assert tree.unmount()
    trees.wait_gone()
    assert status_mounts(trees) == []


# ---- where there is none -----------------------------------------------------------------------------------


def test_a_tree_keeps_its_own_directory(trees: Trees) -> None:
    serve_again(trees, lambda source: [(source / NAME).mkdir(), (source / NAME / "state").write_text("mine")])
    directory = trees.top / "mnt"
    directory.mkdir()
    done = run(trees, "mount", trees.url, directory, "--status-folder")
    (line,) = [each for each in done.stderr.splitlines() if "status folder" in each]
    assert "status folder disabled: the tree has a .bootseer of its own" in line
    assert (directory / NAME / "state").read_text() == "mine"
    assert snapshot(os.fspath(directory)) == snapshot(trees.built.source)
    assert status_mounts(trees) == []
    run(trees, "umount", directory)


def test_a_tree_that_is_served_without_the_place(trees: Trees) -> None:
    trees.mount()
    directory = trees.top / "mnt"
    directory.mkdir()
    done = run(trees, "mount", trees.url, directory, "--status-folder", "--json")
    assert "status folder disabled: this node serves the tree without it" in done.stderr
    assert json.loads(done.stdout)["status_folder"] == ""
    assert snapshot(os.fspath(directory)) == snapshot(trees.built.source)
    run(trees, "umount", directory)


def test_a_build_from_a_mount_is_the_same_tree(trees: Trees) -> None:
    folder = mount(trees)
    for directory in (folder.parent, Path(list_trees()[0].folder)):  # with the folder, and with its place only
        assert NAME in os.listdir(directory)
        assert Built(directory).digest == trees.built.digest


def test_no_folder_unless_it_is_requested(trees: Trees) -> None:
    directory = trees.top / "mnt"
    directory.mkdir()
    run(trees, "mount", trees.url, directory)
    assert snapshot(os.fspath(directory)) == snapshot(trees.built.source)
    assert status_mounts(trees) == [] and len(trees.mounted()) == 2
    assert not (trees.runtime / "trees" / trees.built.digest / "status").exists()


# ---- in images ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("writable", ["tmpfs", "none"])
def test_programs_in_an_image_see_it(trees: Trees, writable: str) -> None:
    serve_again(trees, lambda source: make_root(os.fspath(source)))
    command = ("sh", "-c", f"cat /{NAME}/*; echo x > /{NAME}/state")
    done = run(trees, "run", trees.url, "--writable", writable, "--", *command, status=2)
    assert (
        f"digest sha256:{trees.built.digest}\n" in done.stdout
        and f'"digest": "{trees.built.digest}"' in done.stdout
    )
    assert "Read-only file system" in done.stderr and "status folder" not in done.stderr
    done = run(trees, "run", trees.url, "--bind", f"no:/{NAME}", "--", "cat", f"/{NAME}/state", status=1)
    assert "No such file" in done.stderr
    unmount_tree(trees.built.digest, force=True)
    trees.wait_gone()
    assert status_mounts(trees) == []


@pytest.mark.slow
def test_a_file_in_its_place_among_kept_writes_fails_no_program(trees: Trees) -> None:
    serve_again(trees, lambda source: make_root(os.fspath(source)))
    kept = trees.top / "kept"
    words = ("run", trees.url, "--writable", kept, "--")
    assert run(trees, *words, "cat", f"/{NAME}/fetched_ratio").stdout.startswith("0.")
    assert os.listdir(kept / "upper" / NAME) == []
    (kept / "upper" / NAME).rmdir()
    (kept / "upper" / NAME).write_text("mine")
    done = run(trees, *words, "cat", f"/{NAME}")
    assert done.stdout == "mine" and "status folder disabled: " in done.stderr


@pytest.mark.slow
def test_an_image_keeps_its_own_directory(trees: Trees) -> None:
    def change(source: Path) -> None:
        make_root(os.fspath(source))
        (source / NAME).write_text("mine")

    serve_again(trees, change)
    done = run(trees, "run", trees.url, "--", "cat", f"/{NAME}")
    assert done.stdout == "mine"
    assert "status folder disabled: the image has a /.bootseer of its own" in done.stderr


@pytest.mark.slow
def test_ranks_see_it_soon_after_their_start(trees: Trees) -> None:
    """Their start does not wait for it."""
    serve_again(trees, lambda source: make_root(os.fspath(source)))
    (trees.top / "rank.py").write_text(
        "import os, sys, time\n"
        f"while not os.path.exists('/{NAME}/state'):\n"
        "    time.sleep(0.02)\n"
        f"print(open('/{NAME}/source').read())\n"
    )
    job = trees.run(
        *(os.path.join(os.path.dirname(BOOTSEER), "bootrun"), "--standalone", "--nproc-per-node", "2"),
        *("--image", trees.url, "--image-bind", f"{trees.top}:{trees.top}", os.fspath(trees.top / "rank.py")),
    ).wait(60)
    assert job.status == 0, job.stderr
    assert job.stdout.count(f"digest sha256:{trees.built.digest}\n") == 2 and "status folder" not in job.stderr
    unmount_tree(trees.built.digest, force=True)
    trees.wait_gone()
    assert status_mounts(trees) == []
