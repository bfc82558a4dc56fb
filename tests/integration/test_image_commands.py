"""`bootseer image ...` as people run it: real processes, stores, mounts; a registry with TLS and a password."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bootseer import aio
from bootseer.blocks.trace import ANY_WORKLOAD, Trace, encode, merge
from bootseer.image.commands.gc import collect_node, recent_indexes
from bootseer.image.commands.hot import drop_rare
from bootseer.image.commands.run import workload_names
from bootseer.image.commands.traces import add_sources, convert_trace, hot_files
from bootseer.linux import mount as kernel
from bootseer.mounts.sandbox.source import UnpackedSource
from bootseer.mounts.tree_daemon.ending import list_trees, unmount_tree
from bootseer.mounts.tree_daemon.probe import probe_mount
from bootseer.mounts.tree_daemon.traces import PAYLOAD_TYPE as TRACE_TYPE
from bootseer.mounts.unpacked.tree import unpack_tree
from bootseer.storage import Entry
from bootseer.tree.builder.building import build
from bootseer.tree.builder.from_directory import DirectorySource
from bootseer.tree.head import HEAD_NAME
from bootseer.tree.index import BLOCK_UNITS, HOLE
from bootseer.tree.unpack.plan import files_of
from bootseer.trust import Trust, parse
from tests.contract import servers
from tests.integration.image_roots import make_root
from tests.integration.mounted_trees import make_files, need_mounts
from tests.integration.oci_layouts import skopeo
from tests.support import clean_environ, is_running, lacking, needs_program, wait_until
from tests.testing.registry import RegistryServer, why_not
from tests.testing.trees import FileFacts, snapshot, write_layout

BOOTSEER = os.path.join(os.path.dirname(sys.executable), "bootseer")
MIB = 1 << 20


class Commands:
    """`bootseer` of one user, all of whose places are in one folder."""

    def __init__(self, top: Path) -> None:
        self.top = top
        keys = top / "keys"
        keys.mkdir(mode=0o700)
        self.environ = {
            **clean_environ(),
            "BOOTSEER_CACHE": os.fspath(top / "cache"),
            "BOOTSEER_RUNTIME": os.fspath(top / "run"),
            "BOOTSEER_KEYS": os.fspath(keys),
            "TMPDIR": os.fspath(top),
            "HOME": os.fspath(top),
        }

    def __call__(
        self, *words: object, status: int = 0, group: str = "image", cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        argv = [BOOTSEER, group, *map(str, words)]
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=120, check=False, env=self.environ, cwd=cwd or self.top
        )
        assert done.returncode == status, (argv, done.stdout[-2000:], done.stderr[-2000:])
        assert "Traceback" not in done.stderr
        return done

    def ask(self, *words: object, status: int = 0, cwd: Path | None = None) -> Any:
        return json.loads(self(*words, "--json", status=status, cwd=cwd).stdout)

    def make_key(self) -> None:
        self("make", "--name", "tests", group="keys")

    def close(self) -> None:
        pids = []
        for each in list_trees(environ=self.environ):
            pids.append(int(each.status.get("pid", 0)))
            unmount_tree(each.digest, force=True, environ=self.environ)
        while kernel.clear(os.fspath(self.top)):
            pass
        aio.close()
        wait_until(lambda: not any(pid and is_running(pid) for pid in pids), 20, "the end of the daemons")


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Commands]:
    commands = Commands(tmp_path)
    yield commands
    commands.close()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Files of some kinds, for any user."""
    directory = make_files(tmp_path / "source", count=30)
    (directory / "0" / "link").symlink_to("../1/file1")
    (directory / "0" / "again").hardlink_to(directory / "1" / "file1")
    (directory / "0" / "words").write_text("the same words again and again\n" * 9000)
    (directory / "empty").mkdir()
    return directory


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryServer]:
    if reason := why_not():
        lacking(reason)
    with RegistryServer(tmp_path_factory.mktemp("registry")) as server:
        yield server


def know(image: Commands, registry: RegistryServer) -> str:
    """Has the commands know the registry; gives the beginning of its URLs."""
    assert registry.certificates is not None
    image.environ["REGISTRY_AUTH_FILE"] = registry.auth_file
    image.environ["BOOTSEER_REGISTRY_CA"] = registry.certificates.ca
    return f"oci://{registry.host}/{image.top.name.replace('_', '-').lower()}"


def without_times(seen: dict[bytes, FileFacts]) -> dict[bytes, FileFacts]:
    return {path: each._replace(mtime_ns=0) for path, each in seen.items()}


# ---- folders -------------------------------------------------------------------------------------------------


def test_a_directory_is_built_looked_at_and_unpacked(image: Commands, source: Path, tmp_path: Path) -> None:
    image.make_key()
    built = image.ask("build", source, tmp_path / "tree")
    assert (built["files"], built["left_out"], len(built["signed_by"])) == (31, {}, 64)
    again = image.ask("build", f"rootfs:{source}", tmp_path / "other", "--threads", 1)
    assert again["digest"] == built["digest"], "the same bytes"
    found = image.ask("inspect", "tree")
    assert found["digest"] == built["digest"]
    assert (found["because"].split(" (")[0], found["name"]) == ("signed by tests", f"file://{tmp_path}/tree")
    assert (found["files"], found["symlinks"], found["file_bytes"]) == (31, 1, built["raw_bytes"])
    assert found["stored_bytes"] == built["stored_bytes"] < found["file_bytes"]
    assert image.ask("verify", tmp_path / "tree")["right_blocks"] == found["blocks"] > 10
    done = image.ask("materialise", "tree", "out")
    assert (done["files"], done["hot_files"], done["skipped"]) == (31, 0, {})
    assert snapshot(os.fspath(tmp_path / "out")) == snapshot(os.fspath(source))
    assert "is not empty" in image("materialise", "tree", "out", status=1).stderr
    assert image.ask("materialise", "tree", "out", "--resume")["kept_files"] == 31


def test_the_text_is_for_people(image: Commands, source: Path) -> None:
    done = image("build", source, "tree")
    assert done.stdout.startswith("tree ") and " blocks (" in done.stdout
    assert "is not signed" in done.stderr and "bootseer keys make" in done.stderr
    assert "is not signed" not in image("keys", status=2).stderr
    assert "unsigned, but only you can write there" in image("inspect", "tree").stdout
    assert "0 faults" in image("verify", "tree").stdout


def test_another_key_signs(image: Commands, source: Path, tmp_path: Path) -> None:
    image.make_key()
    (tmp_path / "keys").rename(tmp_path / "theirs")
    (tmp_path / "keys").mkdir(mode=0o700)
    image.make_key()
    built = image.ask("build", source, "tree", "--key", tmp_path / "theirs" / "own.pem")
    own = json.loads(image("show", "--json", group="keys").stdout)["keyid"]
    assert len(built["signed_by"]) == 64 and built["signed_by"] != own
    assert image.ask("inspect", "tree")["because"] == "unsigned, but only you can write there"
    image("trust", tmp_path / "theirs" / "own.pub", "--name", "others", group="keys")
    assert image.ask("inspect", "tree")["because"].startswith("signed by others")
    assert image.ask("build", source, "tree", "--unsigned")["signed_by"] == ""
    os.chmod(tmp_path / "theirs" / "own.pem", 0o644)
    error = image("build", source, "tree", "--key", tmp_path / "theirs" / "own.pem", status=1).stderr
    assert "can be read by others" in error and "chmod 600" in error


def test_a_build_goes_on_where_one_was_killed(image: Commands, tmp_path: Path) -> None:
    source = make_files(tmp_path / "large", count=200)
    argv = [BOOTSEER, "image", "build", os.fspath(source), "tree", "--threads", "1"]
    with subprocess.Popen(argv, env=image.environ, cwd=tmp_path) as killed:
        wait_until(lambda: list((tmp_path / "tree" / "packs").glob("*")), 30, "a pack")
        killed.kill()
    assert not (tmp_path / "tree" / HEAD_NAME).exists()
    assert "there is no tree here" in image("inspect", "tree", status=1).stderr
    image("build", source, "tree")
    assert image.ask("verify", "tree")["fault_count"] == 0


def test_a_build_that_is_interrupted(image: Commands, tmp_path: Path) -> None:
    source = make_files(tmp_path / "large", count=400)
    with subprocess.Popen(
        [BOOTSEER, "image", "build", os.fspath(source), "tree", "--threads", "1"], env=image.environ, cwd=tmp_path,
        stderr=subprocess.PIPE, text=True,
    ) as program:  # fmt: skip
        wait_until(lambda: list((tmp_path / "tree" / "packs").glob("*")), 30, "a pack")
        program.send_signal(signal.SIGINT)
        _, said = program.communicate(timeout=30)
    assert program.returncode == 130 and "Traceback" not in said
    assert not (tmp_path / "tree" / HEAD_NAME).exists()


def test_verify_names_every_wrong_block(image: Commands, source: Path, tmp_path: Path) -> None:
    image("build", source, "tree")
    pack = next((tmp_path / "tree" / "packs").iterdir())
    right = pack.read_bytes()
    wrong = bytearray(right)
    for place in (0, len(right) // 2, len(right) - 1):
        wrong[place] ^= 0xFF
    pack.write_bytes(wrong)
    found = image.ask("verify", "tree", status=1)
    faults = [each["block"] for each in found["faults"]]
    assert found["fault_count"] == len(faults) == 3 and len(set(faults)) == 3 and min(faults) >= 0
    assert all("is damaged" in each["what"] and each["pack"] == f"packs/{pack.name}" for each in found["faults"])
    assert found["right_blocks"] == found["blocks"] - 3
    assert "block " in image("verify", "tree", status=1).stdout

    pack.write_bytes(right[: len(right) // 2])
    found = image.ask("verify", "tree", status=1)
    assert f"has {len(right) // 2} bytes instead of {len(right)}" in found["faults"][0]["what"]
    ends = [each for each in found["faults"] if "lies past the end of its pack" in each["what"]]
    assert len(ends) == found["fault_count"] - 1 == found["blocks"] - found["right_blocks"] > 1
    assert "of a file of" in image("materialise", "tree", "out", status=1).stderr

    pack.unlink()
    found = image.ask("verify", "tree", status=1)
    assert (found["faults"][0]["what"], found["right_blocks"]) == ("is missing", 0)
    image("build", source, "tree")  # mends what is damaged
    assert image.ask("verify", "tree")["fault_count"] == 0


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["build", "{tmp}/nothing", "tree"], 1, "{tmp}/nothing: does not exist; give a directory"),
        (["build", "hdfs://somewhere/x", "tree"], 1, "give a directory, an OCI layout, or docker://"),
        (["build", "{tmp}/tree", "other"], 1, "{tmp}/tree: is already a tree"),
        (["build", "{tmp}/source", "tree", "--owner", "me"], 2, "--owner 'me': give two numbers"),
        (["build", "{tmp}/source", "tree", "--platform", "linux/amd64"], 1, "of files, not an OCI layout"),
        (["build", "{tmp}/source", "tree", "--key", "{tmp}/none"], 1, "{tmp}/none: there is no such key"),
        (["build", "{tmp}/source", "{tmp}/t@sha256:" + "0" * 64], 1, "names a digest"),
        (["build", "{tmp}/source", "/proc/nothing"], 1, "/proc/nothing"),
        (["build", "{tmp}/source", "other", "--hot", "{tmp}/tree"], 1, "has no access trace"),
        (["inspect", "{tmp}/source"], 1, "there is no tree here"),
        (["inspect", "{tmp}/newer"], 1, "this Bootseer reads bootseer-tree/1: take a newer one"),
        (["inspect", "{tmp}/tree@sha256:" + "0" * 64], 1, ": not found ("),
        (["inspect", "{tmp}/tree@sha256:short"], 1, "must be 64 hex digits"),
        (["inspect", "{tmp}/tree", "--name", "another"], 1, "not 'another': publish it under that name"),
        (["prefetch", "{tmp}/tree"], 1, "has no access trace"),
        (["umount", "{tmp}/source"], 1, "nothing is mounted there"),
        (["mount", "{tmp}/tree", "{tmp}/source"], 1, "is not empty"),
        (["mount", "{tmp}/tree", "{tmp}/nothing"], 1, "{tmp}/nothing: not found ("),
        (["mount", "{tmp}/tree", "/proc"], 1, "/proc: proc is mounted there already"),
        (["push", "{tmp}/tree", "{tmp}/x"], 1, "is not a registry; push to oci://"),
        (["pull", "{tmp}/tree", "{tmp}/x"], 1, "is not a registry; pull from oci://"),
        (["gc", "--store", "oci://localhost/x:1"], 1, "delete the tag there"),
        (["gc", "--store", "{tmp}/tree", "--keep", "x"], 1, "a tree digest is 64 hex digits"),
        (["gc", "--store", "{tmp}/tree", "--all"], 2, "--limit and --all are options for this node's cache"),
        (["hot", "show", "{tmp}/tree", "--workload", "x"], 1, "16 hex digits"),
        (["hot", "merge", "{tmp}/tree"], 1, "has no access trace"),
        (["run", "{tmp}/tree"], 1, "the image has no command"),
        (["fly"], 2, "No such command"),
    ],
)
def test_mistakes(words: list[str], status: int, says: str, image: Commands, source: Path, tmp_path: Path) -> None:
    if "{tmp}/newer" in words:
        make_newer(tmp_path / "newer")
    elif any("{tmp}/tree" in word for word in words):
        image("build", source, "tree", "--unsigned")
    done = image(*(word.replace("{tmp}", str(tmp_path)) for word in words), status=status)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("bootseer: what this node")]
    assert says.replace("{tmp}", str(tmp_path)) in done.stderr
    if status == 1:
        assert len(lines) == 1 and lines[0].startswith("bootseer: error: "), done.stderr


def make_newer(directory: Path) -> None:
    from bootseer.tree.head import PAYLOAD_TYPE
    from bootseer.trust import seal

    directory.mkdir()
    (directory / HEAD_NAME).write_bytes(seal(b'{"format": "bootseer-tree/2", "more": 1}', PAYLOAD_TYPE, None))


def test_a_cache_that_cannot_be_used(image: Commands, source: Path, tmp_path: Path) -> None:
    image("build", source, "tree")
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    image.environ["BOOTSEER_CACHE"] = os.fspath(tmp_path / "shared")
    error = image("prefetch", "tree", "--all", status=1).stderr
    assert "others may write to it" in error and "chmod 700" in error
    done = image("inspect", "tree")  # needs none
    assert "access traces of this node disabled" in done.stderr
    if os.geteuid() == 0:
        (tmp_path / "theirs").mkdir(mode=0o700)
        os.chown(tmp_path / "theirs", 65534, 65534)
        image.environ["BOOTSEER_CACHE"] = os.fspath(tmp_path / "theirs")
        assert "belongs to user 65534" in image("prefetch", "tree", "--all", status=1).stderr


def test_a_cache_that_is_full_says_so(image: Commands, source: Path) -> None:
    image("build", source, "tree")
    image.environ["BOOTSEER_CACHE_LIMIT"] = "1K"
    assert "reached its limit" in image("prefetch", "tree", "--all", status=1).stderr


# ---- node and store: what is not needed ------------------------------------------------------------------------


def test_prefetch_and_gc_of_a_node(image: Commands, source: Path, tmp_path: Path) -> None:
    built = image.ask("build", source, "tree")
    done = image.ask("prefetch", "tree", "--all")
    assert done["fetched_blocks"] == done["blocks"] == built["blocks"]
    assert done["fetched_bytes"] == done["size"] > MIB
    assert image.ask("prefetch", "tree", "--all")["fetched_bytes"] == 0
    would = image.ask("gc", "--all", "--dry-run")
    assert [each["digest"] for each in would["removed"]] == [built["digest"]] and would["freed_bytes"] > MIB
    assert image.ask("gc")["removed"] == []
    gone = image.ask("gc", "--limit", "1KiB")
    assert [each["digest"] for each in gone["removed"]] == [built["digest"]]
    assert image.ask("gc", "--all", "--dry-run")["removed"] == []
    assert not (tmp_path / "cache" / "trees" / built["digest"]).exists()


def test_gc_of_unpacked_trees(image: Commands, source: Path, tmp_path: Path) -> None:
    digest = image.ask("build", source, "tree")["digest"]
    unpacked = unpack_tree(os.fspath(tmp_path / "tree"), trust=Trust.load(image.environ), environ=image.environ)
    try:
        assert image.ask("gc", "--older", 0)["removed"] == [], "it is in use"
    finally:
        unpacked.close()
    assert image.ask("gc")["removed"] == [], "it was used a moment ago"
    (would,) = image.ask("gc", "--older", 0, "--dry-run")["removed"]
    assert (would["digest"], would["kind"]) == (digest, "unpacked") and would["size"] > MIB
    (gone,) = image.ask("gc", "--older", 0)["removed"]
    assert gone["size"] == would["size"] and list((tmp_path / "cache" / "unpacked").iterdir()) == []


@pytest.mark.system
def test_gc_goes_on_when_an_unpacked_tree_cannot_be_taken_away(
    image: Commands, source: Path, tmp_path: Path
) -> None:
    if os.geteuid() != 0:
        lacking("a folder that cannot be removed needs a mount: root")
    trust = Trust.load(image.environ)
    digests = []
    for number in range(2):
        (source / "new").write_bytes(os.urandom(MIB))
        digests.append(image.ask("build", source, f"tree{number}")["digest"])
        unpack_tree(os.fspath(tmp_path / f"tree{number}"), trust=trust, environ=image.environ).close()
    base = tmp_path / "cache" / "unpacked"
    busy = base / digests[0] / "tree" / "empty"  # the least recently used, so that it is the first to go
    kernel.mount("tmpfs", os.fspath(busy), "tmpfs", 0)
    done = image("gc", "--older", 0, "--json")
    assert [each["digest"] for each in json.loads(done.stdout)["removed"]] == digests[1:]
    assert "cannot remove an unused unpacked tree" in done.stderr
    (gone,) = base.iterdir()
    assert gone.name.startswith(".gone-")
    assert "cannot be removed" in image("gc").stderr
    kernel.unmount(os.fspath(gone / "tree" / "empty"))
    image("gc", "--all", "--dry-run")
    assert gone.exists()
    image("gc")
    assert not gone.exists()


def test_gc_where_the_cache_has_no_locks(image: Commands, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = image.ask("build", source, "tree")["digest"]
    image("prefetch", "tree", "--all")
    for name in ("BOOTSEER_CACHE", "BOOTSEER_RUNTIME"):
        monkeypatch.setenv(name, image.environ[name])
    (would,) = collect_node(max_bytes=0, unused_s=0, is_dry=True).removed
    assert would.digest == digest
    inner = fcntl.fcntl

    def refuse(fd: int, command: int, *rest: Any) -> Any:
        if command == fcntl.F_OFD_SETLK:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        return inner(fd, command, *rest)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    for is_dry in (True, False):
        assert collect_node(max_bytes=0, unused_s=0, is_dry=is_dry).removed == []


@pytest.mark.system
def test_an_unpacked_image_is_opened_again_when_another_one_was_pushed(
    image: Commands, registry: RegistryServer, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job is bound to the tree that it began with, whatever the tag means by now."""
    image.make_key()
    url = f"{know(image, registry)}:v1"
    for name in image.environ.keys() - os.environ.keys() | {"HOME", "TMPDIR"}:
        monkeypatch.setenv(name, image.environ[name])
    digest = image.ask("build", source, url)["digest"]
    trust = Trust.load()

    def open_it(pinned: str) -> UnpackedSource:
        return UnpackedSource(url, trust, "", pinned, ANY_WORKLOAD, 0.0)

    first = open_it("")
    first.close()
    before = snapshot(first.folder)
    (source / "0" / "words").write_text("another image\n")
    now = image.ask("build", source, url)["digest"]
    again = open_it(digest)
    again.close()
    assert (again.digest, again.folder, again.first_step()["written_bytes"]) == (digest, first.folder, 0)
    shutil.rmtree(image.top / "cache")  # as on a node that comes later
    later = open_it(digest)
    later.close()
    assert later.digest == digest and snapshot(later.folder) == before
    newest = open_it("")
    newest.close()
    assert newest.digest == now


def test_gc_of_unpacked_trees_beyond_the_limit(image: Commands, source: Path, tmp_path: Path) -> None:
    """The least recently used go first, but for those in use."""
    trust = Trust.load(image.environ)
    digests, opened = [], []
    for number in range(3):
        (source / "new").write_bytes(os.urandom(MIB))
        digests.append(image.ask("build", source, f"tree{number}")["digest"])
        opened.append(unpack_tree(os.fspath(tmp_path / f"tree{number}"), trust=trust, environ=image.environ))
    for each in opened[1:]:
        each.close()
    try:
        size = {each["digest"]: each["size"] for each in image.ask("gc", "--all", "--dry-run")["removed"]}
        assert size.keys() == set(digests[1:]), "the first one is in use"
        limit = size[digests[1]] * 5 // 2
        (would,) = image.ask("gc", "--limit", limit, "--dry-run")["removed"]
        (gone,) = image.ask("gc", "--limit", limit)["removed"]
        assert gone["digest"] == would["digest"] == digests[1]
        assert image.ask("gc", "--limit", limit)["removed"] == []
    finally:
        opened[0].close()


def test_what_is_prefetched_is_not_fetched_to_be_unpacked(image: Commands, source: Path, tmp_path: Path) -> None:
    image.ask("build", source, "tree")
    image.ask("prefetch", "tree", "--all")
    shutil.rmtree(tmp_path / "tree" / "packs")
    image("materialise", "tree", "out")
    assert snapshot(os.fspath(tmp_path / "out")) == snapshot(os.fspath(source))
    (tmp_path / "cache").chmod(0o777)
    told = image("materialise", "tree", "again", status=1).stderr
    assert "block cache disabled" in told and "chmod 700" in told


def test_gc_of_a_store(image: Commands, source: Path, tmp_path: Path) -> None:
    old = image.ask("build", source, "tree")["digest"]
    (source / "1" / "file1").write_bytes(os.urandom(3 * MIB))
    new = image.ask("build", source, "tree")["digest"]
    assert old != new and len(list((tmp_path / "tree" / "index").iterdir())) == 2
    assert image.ask("gc", "--store", "tree")["paths"] == [], "the old one was of use a moment ago"
    assert image.ask("gc", "--store", "tree", "--older", 0, "--keep", old)["paths"] == []
    would = image.ask("gc", "--store", "tree", "--older", 0, "--dry-run")
    assert f"index/{old}" in would["paths"] and would["packs"] > 0
    assert image.ask("verify", f"tree@sha256:{old}")["fault_count"] == 0, "nothing has gone"
    done = image.ask("gc", "--store", "tree", "--older", 0)
    assert done["paths"] == would["paths"] and done["digest"] == new
    assert image.ask("verify", "tree")["fault_count"] == 0
    assert image.ask("gc", "--store", "tree", "--older", 0)["paths"] == []
    image("inspect", f"tree@sha256:{old}", status=1)


def test_gc_of_a_store_after_a_step_back(image: Commands, source: Path, tmp_path: Path) -> None:
    """Jobs may still read the tree that was the newest a moment ago."""
    first = image.ask("build", source, "tree")["digest"]
    before = (source / "1" / "file1").read_bytes(), os.stat(source / "1" / "file1").st_mtime_ns
    (source / "1" / "file1").write_bytes(os.urandom(MIB))
    second = image.ask("build", source, "tree")["digest"]
    directory, now_s = tmp_path / "tree" / "index", time.time()
    days = {first: 10, second: 9}
    for digest, age in days.items():
        os.utime(directory / digest, (now_s - age * 86400, now_s - age * 86400))
    (source / "1" / "file1").write_bytes(before[0])
    os.utime(source / "1" / "file1", ns=(before[1], before[1]))
    assert image.ask("build", source, "tree")["digest"] == first
    assert os.stat(directory / first).st_mtime > now_s - 3600, "it is the newest from now on"
    assert image.ask("gc", "--store", "tree", "--older", 7)["paths"] == []
    image("inspect", f"tree@sha256:{second}")
    os.utime(directory / first, (now_s - 10 * 86400,) * 2)  # as it was left by earlier versions
    assert image.ask("gc", "--store", "tree", "--older", 7)["paths"] == []
    image("build", source, "tree")
    assert os.stat(directory / first).st_mtime < now_s - 9 * 86400, "nothing is written where nothing changes"
    os.utime(tmp_path / "tree" / HEAD_NAME, (now_s - 8 * 86400,) * 2)
    assert f"index/{second}" in image.ask("gc", "--store", "tree", "--older", 7, "--dry-run")["paths"]


# ---- layers --------------------------------------------------------------------------------------------------


def make_layers() -> tuple[list[bytes], dict[str, bytes]]:
    """Archives of three layers, with whiteouts and an opaque folder, and what is seen of their files."""

    def archive(*members: tuple[str, bytes | None]) -> bytes:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for name, data in members:
                member = tarfile.TarInfo(name)
                member.mtime = 1_700_000_000
                member.type = tarfile.DIRTYPE if data is None else tarfile.REGTYPE
                member.mode, member.size = (0o755, 0) if data is None else (0o644, len(data))
                tar.addfile(member, io.BytesIO(data or b""))
        return buffer.getvalue()

    large = bytes(range(256)) * 2000
    layers = [
        archive(("a", None), ("a/kept", b"kept"), ("a/gone", b"gone"), ("b", None), ("b/below", large)),
        archive(("a/.wh.gone", b""), ("b", None), ("b/.wh..wh..opq", b""), ("b/above", large[::-1])),
        archive(("a/kept", b"newer"), ("c", None), ("c/last", b"last")),
    ]
    return layers, {"a/kept": b"newer", "b/above": large[::-1], "c/last": b"last"}


def contents_of(directory: Path) -> dict[str, bytes]:
    return {
        os.path.relpath(path, directory): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def test_a_layout_is_built(image: Commands, tmp_path: Path) -> None:
    layers, seen = make_layers()
    write_layout(os.fspath(tmp_path / "layout"), layers, run={"Env": ["A=b"], "Cmd": ["/bin/sh"]})
    image("build", "layout", "tree", "--platform", "linux/amd64")
    found = image.ask("inspect", "tree")
    assert (found["config"]["env"], found["config"]["cmd"]) == (["A=b"], ["/bin/sh"])
    image("materialise", "tree", "out")
    assert contents_of(tmp_path / "out") == seen
    assert (
        "no image for linux/riscv64"
        in image("build", "layout", "x", "--platform", "linux/riscv64", status=1).stderr
    )
    blob = max((tmp_path / "layout" / "blobs" / "sha256").iterdir(), key=lambda path: path.stat().st_size)
    blob.write_bytes(blob.read_bytes()[:-20] + bytes(20))
    assert "layer" in image("build", "layout", "x", "--platform", "linux/amd64", status=1).stderr
    assert not (tmp_path / "x" / HEAD_NAME).exists()


@pytest.mark.system
@needs_program("skopeo")
def test_an_image_of_a_registry_becomes_a_tree_there(
    image: Commands, registry: RegistryServer, tmp_path: Path
) -> None:
    image.make_key()
    base = know(image, registry)
    layers, seen = make_layers()
    write_layout(os.fspath(tmp_path / "layout"), layers)
    name = base.removeprefix(f"oci://{registry.host}")
    skopeo(registry, tmp_path, "copy", f"oci:{tmp_path}/layout", f"docker://REGISTRY{name}:image")
    built = image.ask("build", f"{base}:image", f"{base}:tree", "--platform", "linux/amd64")
    assert built["name"] == f"{base}:tree"
    again = image.ask("build", f"docker://{registry.host}{name}:image", "tree", "--platform", "linux/amd64")
    assert again["digest"] == built["digest"], "the same bytes"
    assert image.ask("verify", f"{base}:tree")["fault_count"] == 0
    image("materialise", f"{base}:tree", "out")
    assert contents_of(tmp_path / "out") == seen
    if not os.geteuid() and not probe_mount():
        (tmp_path / "mnt").mkdir()
        image("mount", f"{base}:tree", "mnt")
        assert snapshot(os.fspath(tmp_path / "mnt")) == snapshot(os.fspath(tmp_path / "out"))
    for words, says in (
        (("build", f"{base}:tree", "x"), "is already a tree"),
        (("build", "layout", f"{base}:image", "--platform", "linux/amd64"), "is already an image"),
        (("build", f"{base}:none", "x"), ":none"),
        (("inspect", f"{base}:none"), ":none"),
        (("build", f"{base}:image", "x", "--owner", "0:0"), "its layers give the owners of its files"),
    ):
        assert says in image(*words, status=1).stderr
    assert registry.password not in json.dumps([built, again])


@pytest.mark.system
def test_push_and_pull(image: Commands, registry: RegistryServer, source: Path, tmp_path: Path) -> None:
    image.make_key()
    base = know(image, registry)
    digest = image.ask("build", source, "tree")["digest"]
    pushed = image.ask("push", "tree", f"{base}:v1")
    assert (pushed["digest"], pushed["moved_bytes"], pushed["name"]) == (digest, pushed["size"], f"{base}:v1")
    assert image.ask("push", "tree", f"{base}:v2")["moved_bytes"] < 2000, "only tree.json is another one"
    assert image.ask("inspect", f"{base}:v1")["because"].startswith("signed by tests")
    pulled = image.ask("pull", f"{base}:v1", "copy")
    assert (pulled["digest"], pulled["name"]) == (digest, f"file://{tmp_path}/copy")
    assert image.ask("verify", "copy")["fault_count"] == 0
    assert image.ask("pull", f"{base}:v1", "copy")["moved_bytes"] < 0.1 * pulled["size"]
    image("pull", f"{base}:v1", "mirror", "--as-is")
    assert "request it by its own name" in image("inspect", "mirror", status=1).stderr
    image("inspect", "mirror", "--name", f"{base}:v1")

    # Somebody who trusts nobody: a registry is no place of his own.
    shutil.rmtree(tmp_path / "keys")
    (tmp_path / "keys").mkdir(mode=0o700)
    for words in (("inspect", f"{base}:v1"), ("pull", f"{base}:v1", "x"), ("mount", f"{base}:v1", "x")):
        (tmp_path / "x").mkdir(exist_ok=True)
        assert "is signed by no trusted key" in image(*words, status=1).stderr
    assert "unsigned trees in a registry are not" in image("push", "copy", f"{base}:v3", "--unsigned").stderr
    assert "is not signed" in image("inspect", f"{base}:v3", status=1).stderr

    # Nor does it become believed by being taken into a place of his own.
    image("push", "copy", f"{base}:evil", "--unsigned", "--name", f"file://{tmp_path}/own")
    for more in (("--as-is",), ("--as-is", "--source-name", f"file://{tmp_path}/own"), ()):
        assert "is not signed" in image("pull", f"{base}:evil", "own", *more, status=1).stderr
        assert not (tmp_path / "own").exists()
    image.make_key()
    assert "there is no such key" in image("pull", f"{base}:v1", "own", "--key", "none", status=1).stderr
    assert not (tmp_path / "own").exists(), "the key comes first"


@pytest.mark.system
def test_traces_go_with_their_trees(
    image: Commands, registry: RegistryServer, source: Path, tmp_path: Path
) -> None:
    image.make_key()
    base = know(image, registry)
    built = image.ask("build", source, f"{base}:v1")
    recorded = Trace(
        tree=built["digest"], workload="1" * 16, runs=1, blocks=[4, 2, 3], seen=[1, 1, 1], first_ms=[1, 2, 3]
    )
    (tmp_path / "node.json").write_bytes(encode(recorded))
    (merged,) = image.ask("hot", "merge", f"{base}:v1", "node.json")["traces"]
    assert (merged["workload"], merged["hot_blocks"]) == ("1" * 16, 3)
    assert image.ask("pull", f"{base}:v1", "copy")["traces"] == 1
    (there,) = image.ask("hot", "show", "copy")["traces"]
    assert there["hot_blocks"] == 3 and there["where"].endswith(f"/traces/{built['digest']}/{'1' * 16}.json")
    (source / "0" / "words").write_text("other words")
    assert image.ask("build", source, f"{base}:v2", "--hot", "copy")["carried_traces"] == 1
    found = image.ask("inspect", f"{base}:v2")
    assert found["traces"] == 1 and found["hot_blocks"] >= 3 and 0 < found["hot_share"] < 0.5
    image("build", source, "next", "--hot", f"{base}:v1")
    assert image.ask("push", "next", f"{base}:v3")["traces"] == 1
    assert image.ask("inspect", f"{base}:v3")["hot_blocks"] == found["hot_blocks"]
    assert image.ask("push", "next", f"{base}:v4", "--no-traces", "--name", "other")["traces"] == 0
    assert "not 'oci://" in image("inspect", f"{base}:v4", status=1).stderr
    assert image.ask("inspect", f"{base}:v4", "--name", "other")["digest"] == found["digest"]


# ---- mounts and programs ---------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_root(os.fspath(tmp_path / "root"))
    return tmp_path / "root"


@pytest.mark.system
def test_a_tree_is_mounted_and_unmounted(image: Commands, source: Path, tmp_path: Path) -> None:
    need_mounts()
    digest = image.ask("build", source, "tree")["digest"]
    directory = tmp_path / "mnt"
    directory.mkdir()
    assert image.ask("mount", "tree", "mnt", "--idle", 1)["digest"] == digest
    assert snapshot(os.fspath(directory)) == snapshot(os.fspath(source))
    with pytest.raises(OSError, match="Read-only"):
        (directory / "new").write_text("")
    listed = image.ask("mounts")["trees"]
    assert [each["digest"] for each in listed] == [digest] and os.fspath(directory) in listed[0]["folders"]
    assert "is mounted there already" in image("mount", "tree", "mnt", status=1).stderr
    with (directory / "1" / "file1").open("rb"):
        assert "is in use" in image("umount", "mnt", status=1).stderr
    (tmp_path / "link").symlink_to(directory)
    done = image("record", "tree", "--", "true", status=1).stderr
    assert f"{directory}: the tree is mounted there, and a recording needs it exclusively" in done
    assert image.ask("umount", "link")["digest"] == digest
    assert list(directory.iterdir()) == []
    assert "nothing is mounted there" in image("umount", "mnt", status=1).stderr
    wait_until(lambda: image.ask("mounts")["trees"] == [], 20, "the end of the daemon")
    image("mount", "tree", "mnt")
    (listed,) = list_trees(environ=image.environ)
    ended = image.ask("umount", digest[:16])
    assert (ended["is_served"], ended["is_saving"]) == (False, False)
    assert not is_running(listed.status["pid"]), "it has saved what it keeps, too"
    assert not list((tmp_path / "cache" / "trees" / digest).glob(".tmp-*"))
    assert image.ask("mounts")["trees"] == []


@pytest.mark.system
def test_a_mount_of_another_kind_is_left_alone(image: Commands, tmp_path: Path) -> None:
    need_mounts()
    directory = tmp_path / "mnt"
    directory.mkdir()
    kernel.mount("tmpfs", os.fspath(directory), "tmpfs", 0)
    try:
        assert "is a mount of tmpfs, not a tree" in image("umount", "mnt", status=1).stderr
    finally:
        kernel.unmount(os.fspath(directory))


@pytest.mark.system
def test_programs_run_in_an_image(image: Commands, root: Path, tmp_path: Path) -> None:
    need_mounts()
    image("build", root, "tree")
    told = image("run", "tree", "--env", "SHOWN=yes", "--bind", f"{tmp_path}/keys:/data:ro", "--", "python3", "-c",
                 "import os, sys; print(sys.prefix, os.environ['SHOWN'], os.path.isdir('/data')); sys.exit(7)",
                 status=7)  # fmt: skip
    assert told.stdout == "/usr/local yes True\n"
    assert image("run", f"rootfs:{root}", "--", "cat", "/opt/data/hello.txt").stdout == "from the image\n"
    error = image("run", "tree", "--", "nothing-like-that", status=127).stderr
    assert "nothing-like-that" in error
    assert "give NAME=VALUE" in image("run", "tree", "--env", "x", "--", "cat", status=2).stderr
    assert "only reads of a tree can be" in image("record", f"rootfs:{root}", "--", "cat", status=1).stderr


@pytest.mark.system
def test_a_start_is_recorded_prefetched_and_carried_over(image: Commands, root: Path, tmp_path: Path) -> None:
    need_mounts()
    image.make_key()
    image("build", root, "tree")
    command = ("python3", "-c", "import json, decimal; print(decimal.Decimal(7))")
    done = image("record", "tree", "--", *command)
    assert done.stdout == "7\n" and "hot blocks" in done.stderr
    told = json.loads(image("record", "tree", "--publish", "--json", "--", *command).stdout.splitlines()[-1])
    assert (told["status"], told["runs"], told["is_published"]) == (0, 2, True)
    assert 5 < told["hot_blocks"] <= told["blocks"]
    shown = image.ask("hot", "show", "tree", "--files")
    assert [each["workload"] for each in shown["traces"]] == [told["workload"]] * 2, "here and in the store"
    paths = [each["path"] for each in shown["files"]]
    assert any(path.endswith("/decimal.py") for path in paths) and len(paths) == len(set(paths))

    shutil.rmtree(tmp_path / "cache", ignore_errors=True)  # as on another node
    done = image.ask("prefetch", "tree")
    assert done["fetched_blocks"] == done["blocks"] == told["hot_blocks"]
    found = image.ask("inspect", "tree")
    assert (found["traces"], found["hot_blocks"], found["hot_bytes"]) == (1, told["hot_blocks"], done["size"])

    (root / "opt" / "data" / "hello.txt").write_text("another image\n")
    built = image.ask("build", root, "next", "--hot", "tree")
    assert built["carried_traces"] == 1
    (there,) = image.ask("hot", "show", "next")["traces"]
    assert there["workload"] == told["workload"] and there["hot_blocks"] > 5
    assert image.ask("verify", "next")["fault_count"] == 0
    image("materialise", "next", "out", "--ready", "ready")
    assert snapshot(os.fspath(tmp_path / "out")) == snapshot(os.fspath(root))
    assert (tmp_path / "ready").exists()


@pytest.mark.system
def test_recordings_are_merged_and_pruned(image: Commands, root: Path, tmp_path: Path) -> None:
    need_mounts()
    image.make_key()
    image("build", root, "tree")
    both = [
        json.loads(image("record", "tree", "--json", "--", "python3", "-c", each).stdout)
        for each in ("import json", "import csv")
    ]
    assert both[1]["runs"] == 2
    image("hot", "merge", "tree", "--output", "node.json")
    (merged,) = image.ask("hot", "merge", "tree")["traces"]
    assert merged["runs"] == 2
    (merged,) = image.ask("hot", "merge", "tree", "node.json")["traces"]
    assert merged["runs"] == 2, "this node, the store and the file have the same two"
    before = image.ask("hot", "show", "tree")["traces"]
    assert any(each["blocks"] > 0 for each in before)
    pruned = image.ask("hot", "prune", "tree", "--share", 1)["traces"]
    assert all(each["blocks"] == each["hot_blocks"] > 0 for each in pruned)
    (tmp_path / "node.json").write_text("{}")
    assert "node.json: is not an access trace" in image("hot", "merge", "tree", "node.json", status=1).stderr
    image("hot", "prune", "tree", "--forget")
    assert image.ask("hot", "show", "tree")["traces"] == []


def test_published_recordings_are_found_at_a_web_server(image: Commands, source: Path, tmp_path: Path) -> None:
    """A web server cannot be listed, and who unpacks or prefetches there knows no workload's key."""
    image.make_key()
    (tmp_path / "web").mkdir()
    with servers.serve_directory(tmp_path / "web") as server:
        url = f"{server}/tree"
        digest = image.ask("build", source, "web/tree", "--name", url)["digest"]
        error = image("prefetch", url, status=1).stderr
        assert "a web server does not list them" in error and "--workload" in error
        traces = tmp_path / "web" / "tree" / "traces" / digest

        def publish(workload: str, blocks: list[int], recordings: list[str]) -> None:
            count = len(blocks)
            trace = Trace(
                tree=digest, workload=workload, runs=len(recordings) or 1, blocks=blocks,
                seen=[len(recordings) or 1] * count, first_ms=list(range(count)), recordings=recordings,
            )  # fmt: skip
            (tmp_path / "node.json").write_bytes(encode(trace))
            image("hot", "merge", "web/tree", "node.json", "--name", url)

        publish("1" * 16, [4, 2, 3], [])
        assert parse((traces / "any.json").read_bytes(), TRACE_TYPE, "any.json").signatures, "as the others"
        assert image.ask("prefetch", url, "--workload", "1" * 16)["blocks"] == 3
        assert image.ask("prefetch", url)["blocks"] == 3
        assert image.ask("prefetch", url, "--workload", "9" * 16)["blocks"] == 3, "as none of it is known"
        assert image.ask("materialise", url, "out")["hot_files"] > 0

        publish("2" * 16, [5], ["ab" * 8])
        publish(ANY_WORKLOAD, [6], ["cd" * 8])  # of a start that nobody gave a name
        for _ in range(2):
            image("hot", "merge", "web/tree", "--name", url)  # again and again: each counts once
        listed = image.ask("hot", "show", "web/tree", "--name", url)["traces"]
        assert [(each["workload"], each["runs"]) for each in listed] == [
            (workload, 1) for workload in (ANY_WORKLOAD, "1" * 16, "2" * 16)
        ]
        (there,) = image.ask("hot", "show", url)["traces"]
        assert (there["workload"], there["runs"], there["blocks"]) == (ANY_WORKLOAD, 3, 5)
        assert there["where"] == f"{url}/traces/{digest}/any.json"
        assert image.ask("prefetch", url)["blocks"] == 5, "though less than half of the starts had each"
        found = image.ask("inspect", "web/tree", "--name", url)
        assert (found["traces"], found["hot_blocks"]) == (3, 5), "where it can be listed, of the others alone"

        (traces / "any.json").write_bytes((traces / f"{'1' * 16}.json").read_bytes())
        error = image("prefetch", url, "--workload", "9" * 16).stderr
        assert f"any.json: is that of another workload, {'1' * 16}" in error

        image("hot", "prune", "web/tree", "--name", url, "--forget")
        assert os.listdir(traces) == [], "what was forgotten is served no more"


@pytest.mark.system
def test_run_gets_the_signals(image: Commands, root: Path, tmp_path: Path) -> None:
    need_mounts()
    image("build", root, "tree")
    told = tmp_path / "told"
    script = "import signal, time; print(1, flush=True); signal.pause()"
    with told.open("wb") as out:
        argv = [BOOTSEER, "image", "run", "tree", "--", "python3", "-c", script]
        with subprocess.Popen(argv, env=image.environ, cwd=tmp_path, stdout=out) as program:
            wait_until(lambda: told.read_bytes() == b"1\n", 30, "the program")
            program.send_signal(signal.SIGTERM)
            assert program.wait(20) == 128 + signal.SIGTERM


# ---- decisions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("python3 train.py --lr 1", ("python3", "train.py")),
        ("/usr/bin/python3.12 -u -X dev train.py", ("python3", "train.py")),
        ("python -m train.main x", ("python3", "train.main")),
        ("python -c code", ("python3", "-c")),
        ("python", ("python3", "")),
        ("/bin/serve config", ("/bin/serve", "")),
    ],
)
def test_workloads(command: str, names: tuple[str, str]) -> None:
    assert workload_names(command.split()) == names


def test_a_tree_is_recent_until_the_next_one_is_old() -> None:
    indexes = [Entry("a", 1, False, 100.0), Entry("b", 1, False, 900.0), Entry("c", 1, False, 950.0)]
    assert recent_indexes(indexes, 1000.0, 60.0) == {"b", "c"}
    assert recent_indexes(indexes, 1000.0, 200.0) == {"a", "b", "c"}
    assert recent_indexes(indexes, 1000.0, 20.0) == set()
    assert recent_indexes([Entry("x", 1, False, 0.0)], 1000.0, 20.0) == {"x"}, "of unknown age"
    assert recent_indexes(indexes, 1000.0, 0.0) == set()
    assert recent_indexes(indexes, 1000.0, 20.0, head_mtime_s=990.0) == {"c"}, "until an older one was taken up"
    assert recent_indexes([Entry("x", 1, False, 0.0)], 1000.0, 20.0, head_mtime_s=100.0) == {"x"}
    assert recent_indexes([], 1000.0, 20.0, head_mtime_s=990.0) == set()


def test_what_few_recordings_saw_goes() -> None:
    trace = Trace(tree="0" * 64, workload="0" * 16, runs=4, blocks=[5, 3, 9], seen=[4, 2, 1], first_ms=[1, 2, 3])
    assert drop_rare(trace, 0.5).blocks == [5, 3]
    assert drop_rare(trace, 1).seen == [4]
    assert drop_rare(trace, 0) == trace


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32))
def test_a_trace_means_the_same_files_in_another_tree(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """Whatever the order of blocks: what is carried there and back is there again, in the same order."""
    chance = random.Random(seed)
    directory = tmp_path_factory.mktemp("made")
    for number in range(12):
        size = chance.choice((0, 10, 5000, 131_072, 300_000))
        (directory / f"file{number}").write_bytes(chance.randbytes(size))
    one = build(DirectorySource(os.fspath(directory)), lambda *_: None, threads=1)
    paths = [b"file%d" % number for number in chance.sample(range(12), 5)]
    other = build(DirectorySource(os.fspath(directory)), lambda *_: None, threads=1, hot_paths=paths)
    shutil.rmtree(directory)
    pieces = [piece for entry in range(len(one.tree)) for piece in one.tree.pieces(entry)]
    users = Counter(address // BLOCK_UNITS for _, address, _ in pieces if address != HOLE)
    # A block that several files share lies in several blocks elsewhere, and their order need not stay.
    whole = [each for each in range(one.tree.block_count) if users[each] == 1]
    blocks = chance.sample(whole, len(whole) // 2)
    trace = Trace(
        tree=one.digest, workload="1" * 16, runs=2, blocks=blocks, seen=[chance.choice((1, 2)) for _ in blocks],
        first_ms=list(range(len(blocks))),
    )  # fmt: skip
    there = convert_trace(one.tree, trace, other.tree, other.digest)
    if there is None:
        assert not blocks
        return
    back = convert_trace(other.tree, there, one.tree, one.digest)
    assert back is not None and set(blocks) <= set(back.blocks)
    assert [each for each in back.blocks if each in blocks] == merge([trace]).blocks


def test_sources_of_compiled_modules_are_hot_with_them(tmp_path: Path) -> None:
    """Python imports nothing whose source it does not see, and does not read it."""
    (tmp_path / "package" / "__pycache__").mkdir(parents=True)
    for name, size in (
        ("module.py", 300_000),
        ("other.py", 300_000),
        ("__pycache__/module.cpython-311.pyc", 200_000),
    ):
        (tmp_path / "package" / name).write_bytes(random.Random(name).randbytes(size))
    index = build(DirectorySource(os.fspath(tmp_path)), lambda *_: None).tree
    (compiled,) = [entry for entry in files_of(index) if index.path(entry).endswith(b".pyc")]
    hot = add_sources(index, [index.runs[compiled][0] // 32])
    assert [os.path.basename(each.path) for each in hot_files(index, hot)] == [
        "module.cpython-311.pyc",
        "module.py",
    ]
