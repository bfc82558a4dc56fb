"""Trees from folders: the index has what the disk has, the same bytes each time; changes meanwhile are errors."""

from __future__ import annotations

import os
import random
import shutil
import stat

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bootseer.errors import ConfigError, NotFound, PermissionDenied, SourceChanged
from bootseer.tree.builder import building, packing
from bootseer.tree.builder import from_directory as from_directory
from bootseer.tree.builder.building import BuiltTree, build
from bootseer.tree.builder.from_directory import DirectorySource
from bootseer.tree.index import BLOCK_BYTES, BLOCK_UNITS, HOLE, decode
from tests.testing.trees import MemoryPacks, listing, make_tree, snapshot, write_tree

MIB = 1 << 20


def built(directory: os.PathLike[str] | str, **options: object) -> tuple[BuiltTree, MemoryPacks]:
    packs = MemoryPacks()
    source = {name: options.pop(name) for name in ("name", "owner", "crosses_mounts") if name in options}
    tree = build(DirectorySource(os.fspath(directory), **source), packs.put, **options)  # type: ignore[arg-type]
    packs.index = decode(tree.index_bytes, tree.digest, "index")
    assert packs.index == tree.tree
    return tree, packs


def entry_of(tree: BuiltTree, path: bytes) -> int:
    return next(entry for entry in range(len(tree.tree)) if tree.tree.path(entry) == path)


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 1 << 32), st.integers(0, 60))
def test_what_is_built_is_what_is_there(tmp_path_factory, seed: int, entries: int) -> None:
    is_root = os.geteuid() == 0
    directory = tmp_path_factory.mktemp("tree")
    made = make_tree(random.Random(seed), entries, as_root=is_root)
    write_tree(os.fspath(directory), made)
    if not is_root:
        pytest.skip("only root may read files without any rights")
    tree, packs = built(directory)
    assert listing(tree.tree, packs) == snapshot(os.fspath(directory))
    # A copy whose folders have another order on the disk gives the same bytes.
    other = tmp_path_factory.mktemp("other")
    write_tree(os.fspath(other), made, order=random.Random(seed))
    again, more = built(other, threads=1)
    assert again.digest == tree.digest
    assert more.packs == packs.packs
    shutil.rmtree(directory)
    shutil.rmtree(other)


def test_plain_files_for_any_user(tmp_path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"x" * 200_000)
    (tmp_path / "link").symlink_to("folder/file")
    (tmp_path / "empty").touch()
    (tmp_path / "same").hardlink_to(tmp_path / "empty")
    tree, packs = built(tmp_path, name="file:///somewhere")
    assert listing(tree.tree, packs) == snapshot(os.fspath(tmp_path))
    assert tree.tree.source == "file:///somewhere"
    assert tree.tree.tool.startswith("bootseer ")
    assert "zstd" in tree.tree.tool
    seen = tree.statistics
    assert (seen.entries, seen.files, seen.raw_bytes, seen.blocks) == (6, 2, 200_000, 2)
    assert seen.stored_bytes == sum(map(len, packs.packs.values()))
    assert (seen.hole_bytes, seen.unused_bytes, seen.left_out) == (0, 0, {})


def test_empty_directory(tmp_path) -> None:
    tree, packs = built(tmp_path)
    assert listing(tree.tree, packs) == snapshot(os.fspath(tmp_path))
    assert packs.packs == {}


def test_a_time_that_no_index_has_is_the_nearest_one(tmp_path) -> None:
    """ext4 has times up to the year 2446, an index those of 64 bits of nanoseconds."""
    for name, year_s in (("late", 12_000_000_000), ("now", 1_800_000_000)):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (year_s, year_s))
    if os.stat(tmp_path / "late").st_mtime < 10**10:
        pytest.skip("this file system has no such times")
    tree, _ = built(tmp_path)
    times_ns = [tree.tree.mtimes_ns[entry_of(tree, name)] for name in (b"late", b"now")]
    assert times_ns == [(1 << 63) - 1, 1_800_000_000 * 10**9]


def test_hot_files_come_first(tmp_path) -> None:
    for number in range(8):
        (tmp_path / f"f{number}").write_bytes(random.Random(number).randbytes(BLOCK_BYTES))
    tree, _ = built(tmp_path, hot_paths=[b"f5", b"missing", b"f2", b"f5"])
    addresses = {name: tree.tree.runs[entry][0] for entry, name in enumerate(tree.tree.names) if entry}
    order = sorted(addresses, key=addresses.__getitem__)
    assert order == [b"f5", b"f2", b"f0", b"f1", b"f3", b"f4", b"f6", b"f7"]
    with pytest.raises(ConfigError, match="not a path"):
        built(tmp_path, hot_paths=[b"/f5"])


def test_hot_files_share_no_block_with_others(tmp_path) -> None:
    for number in range(40):
        (tmp_path / f"f{number:02}").write_bytes(random.Random(number).randbytes(2 * BLOCK_BYTES + 3000 + number))
    hot_paths = [b"f31", b"f07", b"f20"]
    tree, packs = built(tmp_path, hot_paths=hot_paths)
    blocks: dict[bool, set[int]] = {True: set(), False: set()}
    for entry, name in enumerate(tree.tree.names):
        if entry:
            pieces = tree.tree.pieces(entry)
            blocks[name in hot_paths] |= {address // BLOCK_UNITS for _, address, _ in pieces}
    assert blocks[True] == set(range(7)), "six of their own, one for what is left of them"
    assert not blocks[True] & blocks[False]
    assert listing(tree.tree, packs) == snapshot(os.fspath(tmp_path))


def test_attributes_of_overlays_are_left_out(tmp_path) -> None:
    """As of the upper folder of an overlay: a mount of the tree would hide what lies below, or look elsewhere."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    names = ["user.overlay.opaque", "user.overlay.redirect"]
    if os.geteuid() == 0:
        names += ["trusted.overlay.opaque", "trusted.overlay.metacopy"]
    try:
        for name in names:
            os.setxattr(tmp_path / "folder", name, b"y")
        os.setxattr(tmp_path / "file", "user.overlay.origin", b"y")
        os.setxattr(tmp_path / "file", "user.overlayed", b"y")
        os.setxattr(tmp_path, "user.overlay.opaque", b"y")
    except OSError as error:
        pytest.skip(f"no such attributes here: {error}")
    tree, _ = built(tmp_path)
    assert tree.tree.xattrs == {entry_of(tree, b"file"): [(b"user.overlayed", b"y")]}
    assert tree.statistics.left_out == {"extended attributes": len(names) + 2}


def test_owner_is_mapped(tmp_path) -> None:
    (tmp_path / "file").touch()
    tree, _ = built(tmp_path, owner=(7, 8))
    assert (set(tree.tree.uids), set(tree.tree.gids)) == ({7}, {8})


def test_holes_are_neither_read_nor_stored(tmp_path) -> None:
    """A file of a tebibyte: nobody could read it."""
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 40)
        file.seek(5 * BLOCK_BYTES + 100)
        file.write(b"data")
        file.seek((1 << 40) - 1)
        file.write(b"end")
    tree, packs = built(tmp_path)
    index = tree.tree
    entry = entry_of(tree, b"sparse")
    assert index.sizes[entry] == (1 << 40) + 2
    runs = index.runs[entry]
    assert runs[:2] == [HOLE, 5]
    assert runs[2] != HOLE
    assert tree.statistics.blocks == 3
    assert tree.statistics.hole_bytes >= (1 << 40) - 2 * BLOCK_BYTES
    assert index.packs
    assert sum(map(len, packs.packs.values())) < MIB


def test_sparse_and_full_of_zeros_are_the_same(tmp_path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "file").write_bytes(bytes(MIB) + b"x" + bytes(MIB))
    with open(tmp_path / "b" / "file", "wb") as file:
        file.seek(MIB)
        file.write(b"x")
        file.truncate(2 * MIB + 1)
    for directory in ("a", "b"):
        os.utime(tmp_path / directory / "file", ns=(5, 5))
        os.utime(tmp_path / directory, ns=(5, 5))
    assert built(tmp_path / "a")[0].digest == built(tmp_path / "b")[0].digest


def test_file_systems_below_are_left_empty_unless_asked(tmp_path) -> None:
    """/dev/shm is another file system than /dev: no mount has to be made for this."""
    if os.stat("/dev").st_dev == os.stat("/dev/shm").st_dev:
        pytest.skip("/dev/shm is no file system of its own")
    walk = from_directory._Walk("/dev", None, crosses_mounts=False)
    root = walk.walk()
    assert root.children is not None
    assert root.children[b"shm"].children == {}


@pytest.mark.parametrize("how", ["longer", "shorter", "touched", "replaced", "gone", "link"])
def test_file_that_changes_is_named(tmp_path, monkeypatch, how: str) -> None:
    """Between the look at it and the read."""
    path = tmp_path / "folder" / "file"
    path.parent.mkdir()
    path.write_bytes(b"x" * 300_000)
    walk = from_directory._Walk.walk

    def walk_and_change(self: from_directory._Walk) -> object:
        root = walk(self)
        if how == "longer":
            with open(path, "ab") as file:
                file.write(b"more")
        elif how == "shorter":
            os.truncate(path, 10)
        elif how == "touched":
            os.utime(path, ns=(1, 1))
        else:
            found = path.stat()
            path.unlink()
            if how == "replaced":
                path.write_bytes(b"y" * 300_000)
                os.utime(path, ns=(found.st_mtime_ns, found.st_mtime_ns))
            if how == "link":
                (tmp_path / "target").write_bytes(b"secret")
                path.symlink_to(tmp_path / "target")
        return root

    keeps_number = open(path, "rb")  # noqa: SIM115  # else the new file may get the same
    monkeypatch.setattr(from_directory._Walk, "walk", walk_and_change)
    with keeps_number, pytest.raises(SourceChanged, match=f"{path}: "):
        built(tmp_path)


def test_file_that_changes_within_a_read(tmp_path, monkeypatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 300_000)
    pread = os.pread

    def pread_and_write(fd: int, length: int, offset: int) -> bytes:
        data = pread(fd, length, offset)
        os.utime(path, ns=(1, 1))
        return data

    monkeypatch.setattr(from_directory.os, "pread", pread_and_write)
    with pytest.raises(SourceChanged, match="file: changed"):
        built(tmp_path)


def test_directory_that_becomes_a_link_is_not_followed(tmp_path, monkeypatch) -> None:
    (tmp_path / "tree" / "folder").mkdir(parents=True)
    (tmp_path / "tree" / "folder" / "file").write_bytes(b"x" * 10)
    shutil.copytree(tmp_path / "tree", tmp_path / "elsewhere")
    walk = from_directory._Walk.walk

    def walk_and_swap(self: from_directory._Walk) -> object:
        root = walk(self)
        shutil.rmtree(tmp_path / "tree" / "folder")
        (tmp_path / "tree" / "folder").symlink_to(tmp_path / "elsewhere" / "folder")
        return root

    monkeypatch.setattr(from_directory._Walk, "walk", walk_and_swap)
    with pytest.raises(SourceChanged):
        built(tmp_path / "tree")


def test_errors_name_the_file(tmp_path) -> None:
    with pytest.raises(NotFound, match="nowhere"):
        built(tmp_path / "nowhere")
    if os.geteuid():
        (tmp_path / "secret").write_bytes(b"x")
        (tmp_path / "secret").chmod(0)
        with pytest.raises(PermissionDenied, match="secret"):
            built(tmp_path)


def test_attributes_that_cannot_be_kept_are_counted(tmp_path) -> None:
    (tmp_path / "file").touch()
    try:
        os.setxattr(tmp_path / "file", b"user.kept", b"1")
        os.setxattr(tmp_path / "file", b"user.large", b"x" * 3500)
    except OSError as error:
        pytest.skip(f"no such attributes here: {error}")
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr(from_directory, "MAX_XATTR_BYTES", 1000)
        tree, _ = built(tmp_path)
    assert tree.tree.xattrs == {1: [(b"user.kept", b"1")]}
    assert tree.statistics.left_out == {"extended attributes": 1}


def test_index_that_no_reader_would_take(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(building, "MAX_INDEX_BYTES", 100)
    with pytest.raises(ConfigError, match="has an index of"):
        built(tmp_path)


def test_progress(tmp_path) -> None:
    for number in range(5):
        (tmp_path / f"f{number}").write_bytes(b"x" * (number * 300_000))
    seen = []
    built(tmp_path, on_progress=lambda count, files: seen.append((count, files)))
    assert sum(count for count, _ in seen) == 3_000_000
    assert sum(files for _, files in seen) == 4
    assert len(seen) > 2


@pytest.mark.leaks
def test_nothing_is_left_after_an_error(tmp_path, monkeypatch) -> None:
    for number in range(50):
        (tmp_path / f"f{number}").write_bytes(random.Random(number).randbytes(200_000))
    monkeypatch.setattr(packing, "PACK_BYTES", MIB)

    def put(_: str, __: bytes) -> None:
        raise ConfigError("full")

    with pytest.raises(ConfigError, match="full"):
        build(DirectorySource(os.fspath(tmp_path)), put)


def test_sockets_and_fifos_do_not_block(tmp_path) -> None:
    os.mkfifo(tmp_path / "fifo")
    os.mknod(tmp_path / "socket", stat.S_IFSOCK | 0o600)
    tree, packs = built(tmp_path)
    assert listing(tree.tree, packs) == snapshot(os.fspath(tmp_path))
