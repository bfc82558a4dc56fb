"""Trees from images against what the kernel shows: layers unpacked by GNU tar, one over the other by overlayfs."""

from __future__ import annotations

import os
import random
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest

from bootseer.tree.builder.building import build
from bootseer.tree.builder.from_directory import DirectorySource
from bootseer.tree.builder.from_layers import LayersSource
from bootseer.tree.builder.oci_layout import LayoutImage
from tests.support import lacking
from tests.testing.trees import FileFacts, MemoryPacks, listing, make_tree, snapshot, write_layout, write_tree

pytestmark = pytest.mark.system
TIME = 1_700_000_000
NAMES = "abc"


def need(*programs: str) -> None:
    """Skips where layers cannot be unpacked as their owners have them; with CI set that is an error."""
    missing = [name for name in programs if shutil.which(name) is None]
    if os.geteuid() != 0:
        missing.append("root")
    if missing:
        lacking(f"missing: {', '.join(missing)}")


def tree_of(directory: Path, **options: object) -> dict[bytes, FileFacts]:
    """What is built from a layout."""
    packs = MemoryPacks()
    tree = build(LayersSource(LayoutImage(os.fspath(directory), platform="linux/amd64")), packs.put, **options)  # type: ignore[arg-type]
    packs.index = tree.tree
    return listing(tree.tree, packs)


# ---- layers over layers ------------------------------------------------------------------------------------


def make_layer(chance: random.Random, form: int) -> bytes:
    """An archive of names from a small set, so that layers meet; also with names twice and in any order.

    Left out is what GNU tar does otherwise than those who unpack images: files that replace full folders in one
    layer, links on the way to a name.
    """
    memory = BytesIO()
    kinds: dict[str, str] = {}  # what a name is at this moment
    with tarfile.open(fileobj=memory, mode="w", format=form) as tar:

        def add(name: str, kind: bytes, data: bytes = b"", link: str = "") -> None:
            info = tarfile.TarInfo(name)
            info.type, info.size, info.linkname = kind, len(data), link
            info.mode = chance.choice((0o755, 0o700, 0o644, 0o4755))
            info.uid, info.gid = chance.choice((0, 7)), chance.choice((0, 8))
            info.mtime = TIME + chance.randrange(1000)
            if kind == tarfile.REGTYPE and form == tarfile.PAX_FORMAT:
                if chance.random() < 0.3:
                    info.pax_headers["SCHILY.xattr.user.a"] = str(chance.random())
                if chance.random() < 0.5:
                    info.pax_headers["mtime"] = f"{info.mtime}.{chance.randrange(10**9):09d}"
            tar.addfile(info, BytesIO(data))

        if chance.random() < 0.7:
            add("./", tarfile.DIRTYPE)
        for _ in range(chance.randrange(1, 14)):
            parts = [chance.choice(NAMES) for _ in range(chance.randrange(1, 4))]
            above = ["/".join(parts[:place]) for place in range(1, len(parts))]
            if any(kinds.get(name, "folder") != "folder" for name in above):
                continue
            for name in above:
                kinds.setdefault(name, "folder")
            name, roll = "/".join(parts), chance.random()
            is_full = any(each.startswith(f"{name}/") for each in kinds)
            if roll < 0.2:
                directory = f"{above[-1]}/" if above else ""
                add(f"{directory}.wh.{parts[-1]}", tarfile.REGTYPE)
            elif roll < 0.25 and above:
                add(f"{above[-1]}/.wh..wh..opq", tarfile.REGTYPE)
            elif roll < 0.5:
                add(name, tarfile.DIRTYPE)
                kinds[name] = "folder"
            elif is_full or kinds.get(name) == "folder":
                continue
            elif roll < 0.6 and (
                files := sorted(each for each in kinds if kinds[each] == "file" and each != name)
            ):
                add(name, tarfile.LNKTYPE, link=chance.choice(files))
                kinds[name] = "file"
            elif roll < 0.65:
                add(name, tarfile.SYMTYPE, link="anywhere")
                kinds[name] = "link"
            elif roll < 0.7:
                add(name, tarfile.FIFOTYPE)
                kinds[name] = "fifo"
            else:
                add(name, tarfile.REGTYPE, chance.randbytes(chance.choice((0, 10, 5000, 140_000))))
                kinds[name] = "file"
    return memory.getvalue()


class Overlay:
    """The oracle: each layer unpacked by itself, with overlayfs's own marks for what it hides."""

    def __init__(self, folder: Path) -> None:
        self._directory = folder
        self._layers: list[Path] = []
        self._add_empty()

    def _add_empty(self) -> Path:
        layer = self._directory / f"l{len(self._layers)}"
        layer.mkdir()
        self._layers.append(layer)
        return layer

    def add(self, archive: bytes) -> None:
        before = self.snapshot()
        layer = self._add_empty()
        subprocess.run(
            [
                "tar",
                "-x",
                "-p",
                "--delay-directory-restore",
                "--numeric-owner",
                "--xattrs",
                "--xattrs-include=*",
                "-C",
                os.fspath(layer),
            ],
            input=archive,
            check=True,
        )
        with tarfile.open(fileobj=BytesIO(archive)) as tar:
            members = [(member.name.removeprefix("./").rstrip("/."), member.isdir()) for member in tar]
        names = {name for name, _ in members}
        named = {name for name, is_folder in members if is_folder}
        for above, directories, files in os.walk(layer, topdown=False):
            self._mark(above, directories, files)
            path = os.path.relpath(above, layer) if above != os.fspath(layer) else ""
            if path not in named:  # nobody said what it is like
                seen = before.get(os.fsencode(path))
                if seen is None or not stat.S_ISDIR(seen.mode) or hides(names, path):
                    seen = FileFacts(0o40755, 0, 0, 0, 0, "", b"", (0, 0), (), b"")
                os.chown(above, seen.uid, seen.gid)
                os.chmod(above, stat.S_IMODE(seen.mode))
                os.utime(above, ns=(seen.mtime_ns, seen.mtime_ns))

    @staticmethod
    def _mark(above: str, directories: list[str], names: list[str]) -> None:
        found = os.stat(above)
        for name in names:
            if name == ".wh..wh..opq":
                os.setxattr(above, "trusted.overlay.opaque", b"y")
            elif name.startswith(".wh."):
                hidden = os.path.join(above, name[4:])
                if not os.path.lexists(hidden):
                    os.mknod(hidden, stat.S_IFCHR, os.makedev(0, 0))
                elif name[4:] in directories:
                    os.setxattr(hidden, "trusted.overlay.opaque", b"y")
            else:
                continue
            os.unlink(os.path.join(above, name))
        os.utime(above, ns=(found.st_mtime_ns, found.st_mtime_ns))

    def snapshot(self) -> dict[bytes, FileFacts]:
        if len(self._layers) < 2:
            return snapshot(os.fspath(self._layers[0]))
        shown = self._directory / "shown"
        shown.mkdir(exist_ok=True)
        # By short names: mount of util-linux 2.41 gives the kernel no option of more than 255 characters.
        lower = ":".join(os.path.relpath(layer, self._directory) for layer in reversed(self._layers))
        options = f"ro,lowerdir={lower}"
        subprocess.run(["mount", "-t", "overlay", "none", "-o", options, shown], cwd=self._directory, check=True)
        try:
            return snapshot(os.fspath(shown))
        finally:
            subprocess.run(["umount", shown], check=True)


def hides(names: set[str], path: str) -> bool:
    """Whether a layer with these names hides what lower ones have at the path of a folder."""
    parts = path.split("/")
    for place in range(len(parts)):
        above = "".join(f"{part}/" for part in parts[:place])
        if f"{above}.wh.{parts[place]}" in names or f"{above}.wh..wh..opq" in names:
            return True
    return False


@pytest.mark.parametrize("seed", range(40))
def test_layers_are_what_overlayfs_shows(tmp_path, seed: int) -> None:
    need("tar", "mount")
    chance = random.Random(seed)
    overlay = Overlay(tmp_path)
    archives = []
    for _ in range(chance.randrange(1, 6)):
        archives.append(make_layer(chance, chance.choice((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT))))
        overlay.add(archives[-1])
    expected = overlay.snapshot()
    directory = tmp_path / "image"
    write_layout(os.fspath(directory), archives, packer=chance.choice(("gzip", "zstd", "none")))
    found = tree_of(directory)
    if b"" in found and not any(b"./\0" in archive[:600] for archive in archives):
        expected[b""] = found[b""]  # nobody said what the root is like
    assert found == expected
    hot = [path for path, each in expected.items() if each.size]
    chance.shuffle(hot)
    assert tree_of(directory, hot_paths=hot) == found


# ---- archives of real programs -----------------------------------------------------------------------------


@pytest.fixture
def made(tmp_path) -> Iterator[Path]:
    need("tar")
    directory = tmp_path / "tree"
    directory.mkdir()
    tree = make_tree(random.Random(11), 150, as_root=True)
    # GNU tar keeps no sockets and no further names of devices and fifos; an image has no whiteouts.
    tree = {
        path: node
        for path, node in tree.items()
        if stat.S_IFMT(node.mode) in (stat.S_IFDIR, stat.S_IFREG, stat.S_IFLNK)
        or (node.link is None and not stat.S_ISSOCK(node.mode) and (not stat.S_ISCHR(node.mode) or node.rdev[0]))
    }
    write_tree(os.fspath(directory), tree)
    yield directory
    shutil.rmtree(directory)


@pytest.mark.parametrize(
    "sparse",
    [
        [],
        ["--sparse", "--sparse-version=1.0"],
        ["--sparse", "--sparse-version=0.1"],
        ["--sparse", "--sparse-version=0.0"],
    ],
)
def test_archive_of_gnu_tar_in_pax_format(tmp_path, made, sparse: list[str]) -> None:
    """All attributes with nanoseconds: the tree is that of the folder itself."""
    archive = run_tar(made, "--format=posix", "--xattrs", "--xattrs-include=*", *sparse)
    directory = tmp_path / "image"
    write_layout(os.fspath(directory), [archive], packer="zstd")
    found = tree_of(directory)
    expected = snapshot(os.fspath(made))
    assert found == expected
    packs = MemoryPacks()
    tree = build(DirectorySource(os.fspath(made)), packs.put)
    packs.index = tree.tree
    assert listing(tree.tree, packs) == found


def test_archive_of_gnu_tar_in_gnu_format(tmp_path, made) -> None:
    """Whole seconds, no extended attributes."""
    directory = tmp_path / "image"
    write_layout(os.fspath(directory), [run_tar(made, "--format=gnu", "--sparse")])
    found = tree_of(directory)
    expected = {
        path: seen._replace(mtime_ns=seen.mtime_ns // 10**9 * 10**9, xattrs=())
        for path, seen in snapshot(os.fspath(made)).items()
    }
    assert found == expected


def run_tar(directory: Path, *flags: str) -> bytes:
    return subprocess.run(
        ["tar", "-c", "--numeric-owner", *flags, "-C", os.fspath(directory), "."], check=True, capture_output=True
    ).stdout
