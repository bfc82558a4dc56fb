"""Trees by the commands alone, mounted and unpacked, against their sources: nothing about them is another.

A virtual environment with torch, a system with all kinds of files, and an image of layers from a registry with TLS
and a password. BOOTSEER_CAMPAIGN=full adds a fresh Debian by debootstrap, and takes all of the environment.
Each test adds a line of a table.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import random
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import support_trees
from tests.campaign import IS_FULL
from tests.integration.flat_stack import need_tool
from tests.integration.mounted_trees import need_mounts
from tests.integration.oci_layouts import SKOPEO, skopeo
from tests.integration.test_image_commands import Commands, know
from tests.support import lacking
from tests.support_trees import Walked, differences, sums, walk
from tests.testing.registry import RegistryServer, why_not
from tests.testing.trees import write_layout

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(os.geteuid() != 0, reason="all attributes: needs root"),
]
# What torch needs, and pip. The rest of this environment is as large again, and nothing else.
TORCHS = re.compile(
    r"(torch|torchgen|functorch|numpy|sympy|isympy|mpmath|networkx|jinja2|markupsafe|filelock|fsspec|nvidia|triton"
    r"|typing_extensions|pip)(\W.*)?", re.IGNORECASE,
)  # fmt: skip

LARGE_BYTES = 64 << 20  # larger ones, torch's own, are unpacked and compared in test_image_proofs_users.py anyway


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Commands]:
    need_mounts()
    commands = Commands(tmp_path)
    commands.make_key()
    yield commands
    commands.close()
    shutil.rmtree(tmp_path)  # gigabytes, which pytest would keep


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryServer]:
    if reason := why_not() or ("" if SKOPEO else "skopeo is not installed"):
        lacking(reason)
    with RegistryServer(tmp_path_factory.mktemp("registry")) as server:
        yield server


def prove(image: Commands, source: str, expected: Walked, *words: str) -> dict[str, Any]:
    """Builds it twice, mounts it, checks the metadata that the daemon made, unpacks it; what `build` told.

    `source` as `build` takes it, `expected` what it holds; `words` are for `build`.
    """
    top, took_s = image.top, {}
    began_s = time.monotonic()

    def note(what: str) -> None:
        nonlocal began_s
        took_s[what], began_s = time.monotonic() - began_s, time.monotonic()

    built: dict[str, Any] = image.ask("build", source, top / "tree", "--name", "tests/tree", *words)
    note("build")
    again = image.ask("build", source, top / "again", "--name", "tests/tree", "--threads", 1, *words)
    note("build again")
    assert again["digest"] == built["digest"]
    assert sums(top / "again") == sums(top / "tree"), "the same bytes, whatever the number of threads"
    shutil.rmtree(top / "again")

    (top / "mnt").mkdir()
    assert image.ask("mount", "tree", "mnt", "--name", "tests/tree")["digest"] == built["digest"]
    device = top / "run" / "trees" / built["digest"] / "device"
    checked = subprocess.run(
        [need_tool("fsck.erofs"), f"--device={device}/device", device / "metadata"], capture_output=True, text=True
    )
    assert (checked.returncode, checked.stderr) == (0, ""), checked.stderr
    note("fsck")
    shown = walk(top / "mnt")
    assert differences(expected, shown) == []
    note("mounted")
    image("umount", "mnt")
    image("umount", built["digest"])

    done = image.ask("materialise", "tree", "out", "--name", "tests/tree")
    assert done["skipped"] == {}
    unpacked = walk(top / "out")
    assert differences(expected, unpacked) == []
    note("unpacked")
    shutil.rmtree(top / "out")
    times = ", ".join(f"{name} {took:.1f} s" for name, took in took_s.items())
    print(
        f"| {source.replace(os.fspath(top), '')[:40]:40} | {len(expected.facts):6} names,"
        f" {expected.links:4} hard links, {built['raw_bytes'] / 1e6:7.1f} MB | {times} |"
    )
    return built


# ---- the comparison itself -----------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[Path], object]] = {
    "sha256": lambda folder: _poke(folder / "a/file"),
    "size": lambda folder: os.truncate(folder / "a/file", 5001),
    "mode": lambda folder: os.chmod(folder / "a/file", 0o4644),
    "uid": lambda folder: os.chown(folder / "a", 7, -1),
    "gid": lambda folder: os.chown(folder / "link", -1, 7, follow_symlinks=False),
    "mtime_ns": lambda folder: os.utime(folder / "a", ns=(0, 1_600_000_000_000_000_002)),
    "xattrs": lambda folder: os.setxattr(folder / "a/file", "user.one", b"2"),
    "target": lambda folder: _link(folder / "link"),
    "device": lambda folder: _node(folder / "null"),
    "names": lambda folder: _unlink(folder / "a/second"),
    "holes": lambda folder: _fill(folder / "sparse"),
    "is new": lambda folder: (folder / "a/new").touch(),
    "is missing": lambda folder: (folder / "empty").rmdir(),
}


def _times_kept(path: Path, work: Callable[[], object]) -> None:
    found = path.lstat()
    work()
    os.utime(path, ns=(0, found.st_mtime_ns), follow_symlinks=False)


def _poke(path: Path) -> None:
    _times_kept(path, lambda: path.write_bytes(b"x" + path.read_bytes()[1:]))


def _link(path: Path) -> None:
    path.unlink()
    path.symlink_to("elsewhere")


def _node(path: Path) -> None:
    path.unlink()
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))


def _unlink(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)


def _fill(path: Path) -> None:
    _times_kept(path, lambda: path.write_bytes(bytes(path.stat().st_size)))


@pytest.mark.parametrize("what", CHANGES)
def test_every_difference_is_seen(what: str, tmp_path: Path) -> None:
    """Or the tests below would say nothing."""
    for folder in (tmp_path / "one", tmp_path / "other"):
        (folder / "a").mkdir(parents=True)
        (folder / "empty").mkdir()
        (folder / "a/file").write_bytes(b"1234" * 1250)
        (folder / "a/second").hardlink_to(folder / "a/file")
        (folder / "link").symlink_to("a")
        os.mknod(folder / "null", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        (folder / "sparse").touch()
        os.truncate(folder / "sparse", 1 << 20)
        os.setxattr(folder / "a/file", "user.one", b"1")
        for path in (*folder.rglob("*"), folder):
            os.utime(path, ns=(0, 1_600_000_000_000_000_001), follow_symlinks=False)
    assert differences(walk(tmp_path / "one"), walk(tmp_path / "other")) == []
    CHANGES[what](tmp_path / "other")
    found = differences(walk(tmp_path / "one"), walk(tmp_path / "other"))
    assert any(f": {what}" in line for line in found), found


# ---- folders ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_environment_with_torch(image: Commands, tmp_path: Path) -> None:
    """The one that these tests run in."""
    if importlib.util.find_spec("torch") is None:
        lacking("torch is not installed")
    support_trees.copy_still(sys.prefix, os.fspath(tmp_path / "venv"))
    (packages,) = (tmp_path / "venv").glob("lib/python3*/site-packages")
    for path in [] if IS_FULL else list(packages.iterdir()):
        if not TORCHS.fullmatch(path.name):
            shutil.rmtree(path) if is_folder(path) else path.unlink()
    for path in [] if IS_FULL else list(packages.rglob("*.so*")):
        if path.lstat().st_size > LARGE_BYTES:
            path.unlink()
    expected = walk(tmp_path / "venv")
    assert any(b"libtorch" in path for path in expected.facts)
    prove(image, os.fspath(tmp_path / "venv"), expected)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_system_with_all_kinds_of_files(image: Commands, tmp_path: Path) -> None:
    support_trees.make_system(tmp_path / "system")
    expected = walk(tmp_path / "system")
    modes = {fact["mode"] for fact in expected.facts.values()}
    assert expected.links and any(int(str(mode), 8) & 0o6000 for mode in modes)
    prove(image, os.fspath(tmp_path / "system"), expected)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not IS_FULL, reason="fetches a Debian: BOOTSEER_CAMPAIGN=full")
def test_a_debian_by_debootstrap(image: Commands, tmp_path: Path) -> None:
    debian = tmp_path / "debian"
    with open("/etc/os-release", encoding="utf-8") as file:
        (codename,) = re.findall(r"^VERSION_CODENAME=(\w+)$", file.read(), re.MULTILINE)
    done = subprocess.run(
        [need_tool("debootstrap"), "--variant=minbase", codename, debian, "http://deb.debian.org/debian"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    expected = walk(debian)
    prove(image, os.fspath(debian), expected)


# ---- layers of a registry ------------------------------------------------------------------------------------


class Layers:
    """Layers of an image, and by plain means what they add up to: each unpacked by GNU tar over those below it.

    What a layer takes away is taken from what is there before it is unpacked; folders that it does not name
    stay as they are. (https://github.com/opencontainers/image-spec/blob/main/layer.md)
    """

    def __init__(self, top: Path) -> None:
        self.archives: list[bytes] = []
        self.root = top / "expected"
        self.root.mkdir()
        self._staged = top / "staged"
        self._top = top

    def add(self, make: Callable[[Path], object], *members: tuple[str, str]) -> None:
        """A layer of what `make` puts into a folder; `members` are hard links to what lower layers have."""
        self._staged.mkdir()
        make(self._staged)
        archive = subprocess.run(
            ["tar", "-c", "--format=posix", "--sparse", "--xattrs", "--xattrs-include=*", "--numeric-owner",
             "--sort=name", "-C", self._staged, *(sorted(os.listdir(self._staged)) if self.archives else ["."])],
            check=True, capture_output=True,
        ).stdout  # fmt: skip
        shutil.rmtree(self._staged)
        buffer = io.BytesIO(archive)
        if members:
            with tarfile.open(fileobj=buffer, mode="a") as tar:
                for name, target in members:
                    info = tarfile.TarInfo(name)
                    info.type, info.linkname = tarfile.LNKTYPE, target
                    tar.addfile(info)
        self.archives.append(buffer.getvalue())
        self._apply(self.archives[-1])

    def _apply(self, archive: bytes) -> None:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            members = tar.getmembers()
        names = [os.path.normpath(member.name) for member in members]
        for name in names:
            above, last = os.path.split(self.root / name)
            if last == ".wh..wh..opq":
                for each in os.listdir(above) if os.path.isdir(above) else ():
                    self._remove(os.path.join(above, each))
            elif last.startswith(".wh."):
                self._remove(os.path.join(above, last[4:]))
        for member in members:
            path = self.root / member.name
            if os.path.lexists(path) and is_folder(path) != member.isdir():
                self._remove(os.fspath(path))
            for attribute in os.listxattr(path) if is_folder(path) else ():
                os.removexattr(path, attribute)  # tar only adds
        directories = [path for path in (self.root, *self.root.rglob("*")) if is_folder(path)]
        before = {path: path.lstat().st_mtime_ns for path in directories}
        command = ["tar", "-x", "-p", "--numeric-owner", "--same-owner", "--xattrs", "--xattrs-include=*",
                   "--delay-directory-restore", "--exclude=.wh.*", "-C", os.fspath(self.root)]  # fmt: skip
        subprocess.run(command, input=archive, check=True)
        named = {self.root / name for name in names}
        for path, mtime_ns in before.items():
            if path not in named and is_folder(path):
                os.utime(path, ns=(mtime_ns, mtime_ns))

    @staticmethod
    def _remove(path: str) -> None:
        above = os.path.dirname(path)
        found = os.lstat(above).st_mtime_ns
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)
        os.utime(above, ns=(found, found))


def is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def put(
    path: Path, data: bytes = b"", mode: int = 0o644, owner: tuple[int, int] = (0, 0), time_ns: int = 0
) -> None:
    """A file with its folders; each name has a time of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    os.chown(path, *owner)
    os.chmod(path, mode)
    own_ns = random.Random(os.fsencode(path.name)).randrange(10**15)
    os.utime(path, ns=(0, time_ns or 1_700_000_000_000_000_000 + own_ns))


def first(layer: Path) -> None:
    for number in range(40):
        put(layer / f"usr/lib/{number % 4}/module{number}", random.Random(number).randbytes(number * 9000))
    put(layer / "usr/bin/su", b"#!/bin/sh\n", 0o4755, (0, 42))
    put(layer / "home/user/notes", b"mine", 0o600, (1000, 4_000_000_000), -1_500_000_000)
    put(layer / "etc/gone", b"by a whiteout")
    put(layer / "etc/changed", b"old")
    put(layer / "etc/back", b"removed, and made again by the next layer")
    put(layer / "var/cache/one/index", b"hidden by an opaque folder")
    put(layer / "var/cache/two", b"so is this")
    put(layer / "was-file", b"becomes a folder")
    put(layer / "was-folder/deep/er/file", b"becomes a file")
    put(layer / "was-link-target/file", b"stays")
    (layer / "was-link").symlink_to("was-link-target")
    os.setxattr(layer / "usr/bin/su", "security.capability", support_trees.CAPABILITY)
    os.setxattr(layer / "etc/changed", "user.old", b"old")
    os.setxattr(layer / "etc", "user.folder", b"\0\xff\n=")
    put(layer / "shared/first", b"two names" * 30_000)
    (layer / "shared/second").hardlink_to(layer / "shared/first")
    put(layer / "shared/third", b"a name of the next layer is added")
    os.mkfifo(layer / "var/fifo")
    os.mknod(layer / "var/null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    with (layer / "var/sparse").open("wb") as file:
        file.truncate(5 << 20)
        file.seek(3 << 20)
        file.write(b"data")
    put(layer / ("long" * 60) / ("name" * 60), b"long")
    put(layer / os.fsdecode(b"not-utf8-\xff\xfe"), b"bytes")
    (layer / "tmp").mkdir()
    os.chmod(layer / "tmp", 0o1777)


def second(layer: Path) -> None:
    put(layer / "etc/.wh.gone")
    put(layer / "etc/.wh.back")
    put(layer / "etc/.wh.never-was")
    put(layer / "etc/changed", b"new", 0o640, (5, 6))
    put(layer / "var/cache/.wh..wh..opq")
    put(layer / "var/cache/one/other", b"beside what is hidden")
    put(layer / "was-file/now", b"a folder")
    put(layer / "was-folder", b"now a file")
    (layer / "was-link").mkdir()
    put(layer / "was-link/file", b"the link is gone")
    put(layer / "home/user/kept", b"no name of the folder's own", owner=(1000, 1000))


def third(layer: Path) -> None:
    put(layer / "etc/back", b"again")
    put(layer / "shared/.wh.first")
    put(layer / "usr/lib/.wh.1")
    put(layer / "usr/lib/1/only", b"a whiteout hides what is below, not what is beside it")
    put(layer / "a/b/c/d", b"in folders that nobody else has")


def fourth(layer: Path) -> None:
    put(layer / "a/b/.wh.c")
    put(layer / "usr/lib/0/module0", b"the last one")
    (layer / "usr/lib/link").symlink_to("../../../../etc/passwd")
    put(layer / "usr/lib/2/.wh..wh..opq")


@pytest.mark.timeout(300)
def test_layers_of_a_registry(image: Commands, registry: RegistryServer, tmp_path: Path) -> None:
    base = know(image, registry)
    layers = Layers(tmp_path)
    layers.add(first)
    layers.add(second, ("shared/fourth", "shared/third"))
    layers.add(third)
    layers.add(fourth, ("a/same", "etc/back"))
    expected = walk(layers.root)
    assert not expected.facts.keys() & {
        b"etc/gone", b"var/cache/one/index", b"usr/lib/1/module1", b"shared/first", b"a/b/c", b"usr/lib/2/module2",
    }  # fmt: skip
    assert {b"etc/back", b"usr/lib/1/only", b"shared/second", b"was-file/now"} < expected.facts.keys()
    assert expected.links == 2

    write_layout(os.fspath(tmp_path / "layout"), layers.archives)
    name = base.removeprefix(f"oci://{registry.host}")
    skopeo(registry, tmp_path, "copy", f"oci:{tmp_path}/layout", f"docker://REGISTRY{name}:image")
    platform = ("--platform", "linux/amd64")
    image.environ["REGISTRY_AUTH_FILE"] = os.devnull
    denied = image("build", f"{base}:image", "no", *platform, status=1).stderr
    assert "log in" in denied or "password" in denied or "401" in denied, denied
    know(image, registry)
    built = prove(image, f"{base}:image", expected, *platform)

    # Its way through the registry: as a tree there, and back.
    pushed = image.ask("push", "tree", f"{base}:tree", "--source-name", "tests/tree", "--name", "tests/tree")
    assert pushed["digest"] == built["digest"]
    (tmp_path / "there").mkdir()
    image("mount", f"{base}:tree", "there", "--name", "tests/tree")
    assert differences(expected, walk(tmp_path / "there")) == []
    image("umount", "there")
    image("materialise", f"{base}:tree", "back", "--name", "tests/tree")
    assert differences(expected, walk(tmp_path / "back")) == []
    said = json.dumps(image.ask("inspect", f"{base}:tree", "--name", "tests/tree"))
    assert registry.password not in said
