"""Trees from layers of images: what lies over what, what hostile and damaged layers come to.

Layers against a real overlayfs: tests/integration/test_build_image.py.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import stat
import tarfile
import tempfile
import tracemalloc
import zlib
from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.errors import (
    BootseerError,
    ConfigError,
    DigestMismatch,
    IntegrityError,
    NotFound,
    StorageError,
    Truncated,
)
from bootseer.storage.oci.manifest import Descriptor, digest_of
from bootseer.tree.builder import tar_stream
from bootseer.tree.builder.building import BuiltTree, build
from bootseer.tree.builder.from_layers import LayersSource
from bootseer.tree.builder.layer_stream import read_layer
from bootseer.tree.builder.oci_layout import LayoutImage
from bootseer.tree.builder.tar_stream import MAX_HEADER_BYTES, TarStream
from bootseer.tree.index import BLOCK_BYTES, Config
from tests.testing.trees import (
    FileFacts,
    MemoryPacks,
    listing,
    write_blob,
    write_layout,
    write_layout_index,
)

TIME = 1_700_000_000
MIB = 1 << 20
TAR = "application/vnd.oci.image.layer.v1.tar"


class M(NamedTuple):
    """A member of an archive."""

    name: str
    data: bytes = b""
    kind: bytes = tarfile.REGTYPE
    link: str = ""
    mode: int = 0o644
    uid: int = 0
    mtime: float = TIME
    pax: dict[str, str] = {}  # noqa: RUF012
    dev: tuple[int, int] = (0, 0)


def folder(name: str, mode: int = 0o755, **fields: object) -> M:
    return M(name, kind=tarfile.DIRTYPE, mode=mode, **fields)  # type: ignore[arg-type]


def symlink(name: str, target: str) -> M:
    return M(name, kind=tarfile.SYMTYPE, link=target, mode=0o777)


def hard(name: str, target: str) -> M:
    return M(name, kind=tarfile.LNKTYPE, link=target)


def archive(members: Sequence[M], form: int = tarfile.PAX_FORMAT) -> bytes:
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w", format=form, encoding="utf-8", errors="surrogateescape") as tar:
        for member in members:
            info = tarfile.TarInfo(member.name)
            info.type, info.linkname, info.mode, info.uid = member.kind, member.link, member.mode, member.uid
            info.size, info.mtime, info.pax_headers = len(member.data), member.mtime, dict(member.pax)
            info.devmajor, info.devminor = member.dev
            tar.addfile(info, io.BytesIO(member.data))
    return memory.getvalue()


class Image(NamedTuple):
    """A source of layers in memory."""

    layers: list[Descriptor]
    config: bytes
    stored: list[bytes]
    opened: list[str]  # digests

    def open(self, layer: Descriptor) -> BinaryIO:
        self.opened.append(layer.digest)
        return io.BytesIO(self.stored[[each.digest for each in self.layers].index(layer.digest)])


def image(archives: Sequence[bytes], stored: Sequence[bytes] | None = None) -> Image:
    """The lowest first. `stored`: what is stored of them."""
    stored = list(archives if stored is None else stored)
    layers = [Descriptor(media_type=TAR, digest=digest_of(data), size=len(data)) for data in stored]
    config = {"architecture": "amd64", "rootfs": {"type": "layers", "diff_ids": list(map(digest_of, archives))}}
    return Image(layers, json.dumps(config).encode(), stored, [])


def build_image(made: Image, **options: object) -> tuple[BuiltTree, dict[bytes, FileFacts]]:
    packs = MemoryPacks()
    most = {"max_bytes": options.pop("max_bytes")} if "max_bytes" in options else {}
    tree = build(LayersSource(made, name="the image", **most), packs.put, **options)  # type: ignore[arg-type]
    packs.index = tree.tree
    return tree, listing(tree.tree, packs)


def merged(*layers: Sequence[M], **options: object) -> dict[bytes, FileFacts]:
    """What these layers show, the lowest first."""
    return build_image(image([archive(layer) for layer in layers]), **options)[1]


def paths(seen: dict[bytes, FileFacts]) -> list[str]:
    """Folders end in "/"; without the root."""
    return [os.fsdecode(path) + "/" * stat.S_ISDIR(each.mode) for path, each in sorted(seen.items()) if path]


def sha256(data: bytes) -> str:
    return digest_of(data).removeprefix("sha256:")


# ---- what lies over what -----------------------------------------------------------------------------------


def test_upper_files_hide_lower_ones() -> None:
    seen = merged([M("a", b"low", uid=1), M("b", b"low")], [M("a", b"up", mode=0o600, uid=2)])
    assert paths(seen) == ["a", "b"]
    assert (seen[b"a"].sha256, seen[b"a"].uid, seen[b"a"].mode) == (sha256(b"up"), 2, stat.S_IFREG | 0o600)


def test_whiteout_hides_lower_layers_only_whatever_its_place() -> None:
    low = [folder("d"), M("d/x", b"low"), M("d/y", b"low")]
    for up in ([M("d/.wh.x"), M("d/x", b"up")], [M("d/x", b"up"), M("d/.wh.x")]):
        seen = merged(low, up)
        assert paths(seen) == ["d/", "d/x", "d/y"]
        assert seen[b"d/x"].sha256 == sha256(b"up")
    assert paths(merged(low, [M("d/.wh.x")])) == ["d/", "d/y"]
    assert paths(merged(low, [M(".wh.d")])) == []
    assert paths(merged(low, [M(".wh.d"), folder("d"), M("d/z")])) == ["d/", "d/z"]
    assert paths(merged(low, [M("d/.wh.x")], [M("d/x", b"top")])) == ["d/", "d/x", "d/y"]


def test_whiteout_of_a_middle_layer() -> None:
    low = [folder("d"), M("d/x"), folder("d/e"), M("d/e/f")]
    middle = [M(".wh.d")]
    up = [folder("d"), M("d/new")]
    assert paths(merged(low, middle, up)) == ["d/", "d/new"]
    assert paths(merged(low, [folder("d"), M("d/mid"), M("d/.wh.e")], [M("d/e/top")])) == [
        "d/", "d/e/", "d/e/top", "d/mid", "d/x",
    ]  # fmt: skip


def test_opaque_directory_hides_what_lower_layers_have_in_it() -> None:
    low = [folder("d", mode=0o700), M("d/x"), folder("d/e"), M("d/e/f")]
    for up in ([M("d/.wh..wh..opq"), M("d/new")], [M("d/new"), M("d/.wh..wh..opq")]):
        assert paths(merged(low, up)) == ["d/", "d/new"]
    assert paths(merged(low, [M(".wh..wh..opq"), M("only")])) == ["only"]
    assert paths(merged(low, [folder("d"), M("d/.wh..wh..opq")], [M("d/x", b"top")])) == ["d/", "d/x"]


def test_overlayfs_whiteout_device() -> None:
    seen = merged([M("x"), M("y")], [M("x", kind=tarfile.CHRTYPE, dev=(0, 0))])
    assert paths(seen) == ["y"]


def test_directory_and_file_replace_each_other() -> None:
    low = [folder("a"), M("a/x"), M("b", b"low")]
    assert paths(merged(low, [M("a", b"now a file"), folder("b"), M("b/y")])) == ["a", "b/", "b/y"]
    assert paths(merged(low, [M("a", b"file")], [folder("a"), M("a/top")])) == ["a/", "a/top", "b"]
    assert paths(merged(low, [symlink("a", "elsewhere")])) == ["a", "b"]


def test_last_of_two_in_a_layer_wins() -> None:
    seen = merged([M("x", b"first"), M("x", b"second"), folder("d"), M("d/f"), M("d", b"file now")])
    assert paths(seen) == ["d", "x"]
    assert seen[b"x"].sha256 == sha256(b"second")
    seen = merged([M("x"), folder("x", mode=0o700), M("x/y"), folder("x", mode=0o711)])
    assert paths(seen) == ["x/", "x/y"]
    assert stat.S_IMODE(seen[b"x"].mode) == 0o711


def test_bytes_that_are_stored_for_nothing_are_counted() -> None:
    first, second = random.Random(1).randbytes(BLOCK_BYTES), random.Random(2).randbytes(BLOCK_BYTES)
    tree, _ = build_image(image([archive([M("x", first), M("x", second)])]))
    assert tree.statistics.unused_bytes == BLOCK_BYTES
    tree, _ = build_image(image([archive([M("x", first)]), archive([M("x", second)])]))
    assert tree.statistics.unused_bytes == 0
    assert tree.statistics.stored_bytes == BLOCK_BYTES


def test_directories_that_are_not_named_are_made_or_inherited() -> None:
    seen = merged([folder("a", mode=0o700, uid=5)], [M("a/b/c")])
    assert paths(seen) == ["a/", "a/b/", "a/b/c"]
    assert (seen[b"a"].uid, stat.S_IMODE(seen[b"a"].mode)) == (5, 0o700)
    assert (seen[b"a/b"].uid, stat.S_IMODE(seen[b"a/b"].mode), seen[b"a/b"].mtime_ns) == (0, 0o755, 0)


def test_the_root_has_attributes() -> None:
    seen = merged([folder("./", mode=0o711), M("./x")], [M("/y"), M("z//z")])
    assert stat.S_IMODE(seen[b""].mode) == 0o711
    assert paths(seen) == ["x", "y", "z/", "z/z"]


def test_links_of_the_layer_itself_are_followed_within_the_root() -> None:
    seen = merged(
        [
            symlink("lib", "usr/lib"),
            symlink("up", "../../usr"),
            M("lib/a"),
            M("up/b"),
            symlink("abs", "/usr"),
            M("abs/c"),
        ]
    )
    assert paths(seen) == ["abs", "lib", "up", "usr/", "usr/b", "usr/c", "usr/lib/", "usr/lib/a"]
    # Each layer is unpacked on its own, so a link of a lower layer is replaced, as overlayfs does it.
    assert paths(merged([symlink("lib", "usr/lib"), M("usr/lib/a")], [M("lib/b")])) == [
        "lib/", "lib/b", "usr/", "usr/lib/", "usr/lib/a",
    ]  # fmt: skip


# ---- hard links --------------------------------------------------------------------------------------------


def test_hard_links_of_a_layer() -> None:
    seen = merged([M("a", b"data", uid=3), hard("b", "./a"), hard("c", "/b"), hard("a", "a")])
    assert {each.first_name for path, each in seen.items() if path} == {b"a"}
    assert {each.sha256 for path, each in seen.items() if path} == {sha256(b"data")}


def test_hard_link_outlives_its_first_name() -> None:
    seen = merged([M("a", b"old"), hard("b", "a"), M("a", b"new")])
    assert (seen[b"a"].sha256, seen[b"b"].sha256) == (sha256(b"new"), sha256(b"old"))
    seen = merged([M("a", b"old"), hard("b", "a")], [M(".wh.a")])
    assert paths(seen) == ["b"]
    assert seen[b"b"].sha256 == sha256(b"old")


def test_data_of_a_hidden_name_is_read_in_a_second_pass() -> None:
    made = image([archive([M("a", b"old"), hard("b", "a")]), archive([M("a", b"new")])])
    _, seen = build_image(made)
    assert (seen[b"a"].sha256, seen[b"b"].sha256) == (sha256(b"new"), sha256(b"old"))
    assert made.opened == [made.layers[1].digest, made.layers[0].digest, made.layers[0].digest]


def test_hard_link_to_a_file_of_a_lower_layer() -> None:
    low, up = [folder("d"), M("d/a", b"low", uid=9)], [hard("b", "d/a"), hard("c", "b")]
    seen = merged(low, up)
    assert {seen[path].first_name for path in (b"b", b"c", b"d/a")} == {b"b"}
    assert seen[b"b"].uid == 9
    seen = merged(low, up, [M("d/.wh.a")])
    assert paths(seen) == ["b", "c", "d/"]
    assert seen[b"c"].sha256 == sha256(b"low")
    # By way of a link in between, and hidden by the very layer that links.
    seen = merged(low, [hard("m", "d/a")], [hard("n", "m"), M(".wh.m"), M(".wh.d")])
    assert paths(seen) == ["n"]
    assert seen[b"n"].sha256 == sha256(b"low")


@pytest.mark.parametrize(
    ("layers", "culprit"),
    [
        ([[hard("b", "missing")]], "'b' is a hard link to 'missing', which does not exist"),
        ([[M("a")], [M(".wh.a")], [hard("b", "a")]], "'b' is a hard link to 'a', which does not exist"),
        ([[folder("d")], [hard("b", "d")]], "'b' is a hard link to 'd', which does not exist"),
        ([[folder("d"), hard("b", "d")]], "'b' is a hard link to a directory"),
        ([[hard("b", "/")]], "'b' is a hard link to the root"),
        ([[M("a"), M("a/b")]], "'a/b' lies below a file"),
        ([[symlink("a", "b"), symlink("b", "a"), M("a/x")]], "'a/x' is reached by too many links"),
        ([[M("../x")]], "'../x' is not a path below the root"),
        ([[M("a/../../x")]], "is not a path below the root"),
        ([[hard("x", "../../etc/shadow")]], "is not a path below the root"),
        ([[M("a" * 256)]], "is not a path below the root"),
        ([[M("/".join("a" * 1030))]], "is not a path below the root"),
        ([[M(".wh.")]], "hides nothing"),
        ([[M("d/.wh...")]], "hides nothing"),
        ([[M("x", kind=b"V")]], "unknown type"),
        ([[symlink("x", "")]], "is a link with an impossible target"),
        ([[M("x", uid=1 << 33)]], "has an impossible owner, time or device"),
        ([[M("x", kind=tarfile.BLKTYPE, dev=(4096, 0))]], "has an impossible owner, time or device"),
        ([[M("x", pax={"mtime": "9" * 19})]], "has an impossible owner, time or device"),
        ([[M("x", pax={"mtime": "soon"})]], "not a tar archive"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_an_error(layers: list[list[M]], culprit: str) -> None:
    with pytest.raises(IntegrityError, match=r"the image: layer \d of \d \(sha256:") as caught:
        merged(*layers)
    assert culprit in str(caught.value)
    assert "\n" not in str(caught.value)


def test_hidden_broken_hard_link_harms_nobody() -> None:
    assert paths(merged([hard("b", "missing"), M("a")], [M(".wh.b")])) == ["a"]


def test_metadata_of_aufs_is_left_out() -> None:
    tree, seen = build_image(image([archive([M(".wh..wh.plnk/1.2"), M(".wh..wh.aufs"), M("x")])]))
    assert paths(seen) == ["x"]
    assert tree.statistics.left_out == {"names of aufs": 2}


# ---- archives ----------------------------------------------------------------------------------------------


def test_times_owners_and_attributes() -> None:
    pax = {
        "mtime": "1700000000.123456789",
        "SCHILY.xattr.user.a": "\udcff\x00=\n",
        "SCHILY.xattr.security.capability": "\x01\x00\x00\x02",
        "SCHILY.xattr.trusted.overlay.opaque": "y",
        "SCHILY.xattr.system.other": "x",
        "uid": "3000000000",
    }
    tar = archive([M("x", b"1", pax=pax), M("y", pax={"mtime": "-1.5"}), M("z", mtime=-7)])
    assert b"21 hdrcharset=BINARY\n" in tar, "as tarfile writes values that are no UTF-8; others do not"
    for data in (tar, tar.replace(b"21 hdrcharset=BINARY\n", b"21 comment=xxxxxxxxx\n")):
        tree, seen = build_image(image([data]))
        assert seen[b"x"].mtime_ns == 1_700_000_000_123_456_789
        assert seen[b"x"].uid == 3_000_000_000
        assert seen[b"x"].xattrs == ((b"security.capability", b"\1\0\0\2"), (b"user.a", b"\xff\x00=\n"))
        assert (seen[b"y"].mtime_ns, seen[b"z"].mtime_ns) == (-1_500_000_000, -7_000_000_000)
        assert tree.statistics.left_out == {"extended attributes": 2}


def test_gnu_format_long_and_odd_names() -> None:
    odd = b"d/\xff\xfe\n " + b"n" * 200
    members = [M(os.fsdecode(odd), b"1", mtime=TIME), symlink("s", os.fsdecode(b"t" * 300 + b"\xfe"))]
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        seen = build_image(image([archive(members, form)]))[1]
        assert odd in seen
        assert seen[odd].mtime_ns == TIME * 10**9
        assert seen[b"s"].target == b"t" * 300 + b"\xfe"


def test_devices_and_fifos() -> None:
    seen = merged([
        M("null", kind=tarfile.CHRTYPE, dev=(1, 3), mode=0o666), M("disk", kind=tarfile.BLKTYPE, dev=(8, 1)),
        M("fifo", kind=tarfile.FIFOTYPE),
    ])  # fmt: skip
    assert (seen[b"null"].rdev, seen[b"disk"].rdev) == ((1, 3), (8, 1))
    assert stat.S_ISFIFO(seen[b"fifo"].mode)


def test_layers_without_anything() -> None:
    assert paths(merged([])) == []
    assert build_image(image([b""]))[1].keys() == {b""}
    assert build_image(image([bytes(1024)]))[1].keys() == {b""}
    assert build_image(image([]))[1].keys() == {b""}


def test_hot_files_come_first_in_their_order() -> None:
    bodies = {name: random.Random(name).randbytes(BLOCK_BYTES + 10) for name in "abcdef"}
    made = image(
        [archive([M(name, bodies[name]) for name in "abc"]), archive([M(name, bodies[name]) for name in "cdef"])]
    )
    tree, seen = build_image(made, hot_paths=[b"e", b"missing", b"c", b"a", b"c"])
    first = {name: tree.tree.runs[entry][0] // 32 for entry, name in enumerate(tree.tree.names) if name}
    assert sorted(first, key=first.__getitem__)[:3] == [b"e", b"c", b"a"]
    assert seen == build_image(made)[1]
    assert tree.statistics.unused_bytes == 0


def test_hot_files_of_layers_share_no_block_with_others() -> None:
    bodies = {name: random.Random(name).randbytes(3000) for name in "abcdef"}
    made = image(
        [archive([M(name, bodies[name]) for name in "abc"]), archive([M(name, bodies[name]) for name in "def"])]
    )
    tree, _ = build_image(made, hot_paths=[b"e", b"a"])
    blocks = {name: tree.tree.runs[entry][0] // 32 for entry, name in enumerate(tree.tree.names) if name}
    assert blocks == {b"a": 0, b"e": 0, b"b": 1, b"c": 1, b"d": 1, b"f": 1}


def test_hot_files_need_a_place_on_a_disk(monkeypatch) -> None:
    made = image([archive([M("a", b"x" * 300_000)])])
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
    with pytest.raises(StorageError, match="TMPDIR"):
        build_image(made, hot_paths=[b"a"])
    full = open("/dev/full", "r+b", buffering=0)  # noqa: SIM115
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: full)
    with pytest.raises(StorageError, match=r"a temporary file in /proc/nowhere: .*make room there"):
        build_image(made, hot_paths=[b"a"])
    assert full.closed


def test_progress_and_the_same_bytes_again() -> None:
    bodies = [random.Random(number).randbytes(number * 10_000) for number in range(30)]
    made = image([archive([M(f"f{number}", body) for number, body in enumerate(bodies)])])
    seen: list[tuple[int, int]] = []
    tree, _ = build_image(made, on_progress=lambda count, files: seen.append((count, files)))
    assert (sum(count for count, _ in seen), sum(files for _, files in seen)) == (sum(map(len, bodies)), 29)
    assert build_image(made, threads=5)[0].index_bytes == tree.index_bytes


# ---- sparse files ------------------------------------------------------------------------------------------


def sparse_header(name: str, ranges: Sequence[tuple[int, int]], size: int, stored: int) -> bytes:
    """A member in GNU's old format, as `tar --format=gnu --sparse` writes it."""
    info = tarfile.TarInfo(name)
    info.size, info.type, info.mtime = stored, tarfile.GNUTYPE_SPARSE, TIME
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    for place, (offset, length) in enumerate(ranges[:4]):
        block[386 + 24 * place : 410 + 24 * place] = b"%011o\0%011o\0" % (offset, length)
    block[482] = len(ranges) > 4
    block[483:495] = b"%011o\0" % size
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def test_old_gnu_sparse_file() -> None:
    ranges = [(0, 512), (300_000, 1000), (5 * MIB, 0)]
    data = b"a" * 512 + b"b" * 1000
    tar = sparse_header("x", ranges, 5 * MIB, len(data)) + data.ljust(2048, b"\0") + bytes(1024)
    tree, seen = build_image(image([tar]))
    whole = bytearray(5 * MIB)
    whole[:512], whole[300_000:301_000] = b"a" * 512, b"b" * 1000
    assert seen[b"x"].sha256 == sha256(bytes(whole))
    assert tree.statistics.hole_bytes == 5 * MIB - 2 * BLOCK_BYTES


def pax_sparse(name: str, ranges: Sequence[tuple[int, int]], size: int, data: bytes) -> bytes:
    """A member in pax format 1.0."""
    numbers = "".join(f"{number}\n" for number in (len(ranges), *(each for pair in ranges for each in pair)))
    table = numbers.encode().ljust(-(-len(numbers) // 512) * 512, b"\0")
    pax = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": name,
        "GNU.sparse.realsize": str(size),
    }
    return archive([M(f"GNUSparseFile.0/{name}", table + data, pax=pax)])


def test_pax_sparse_file() -> None:
    _, seen = build_image(image([pax_sparse("x", [(100, 3), (MIB, 4)], MIB + 4, b"abcdefg")]))
    assert seen[b"x"].sha256 == sha256(bytes(100) + b"abc" + bytes(MIB - 103) + b"defg")
    assert seen[b"x"].size == MIB + 4


@pytest.mark.parametrize(
    "ranges", [[(100, 3), (50, 3)], [(0, 10), (5, 10)], [(0, MIB + 5)], [(-5, 5)], [(0, -1), (10, 5)]]
)
def test_impossible_maps_of_holes(ranges: list[tuple[int, int]]) -> None:
    with pytest.raises(IntegrityError):
        build_image(image([pax_sparse("x", ranges, MIB, b"x" * 100)]))


def test_file_of_a_pebibyte_is_refused_at_once() -> None:
    with pytest.raises(BootseerError, match="bytes"):
        build_image(image([pax_sparse("x", [(1 << 49, 1)], (1 << 49) + 1, b"x")]))


# ---- damaged and hostile streams ---------------------------------------------------------------------------

SMALL = archive([M("a", b"some words " * 1000), folder("d"), M("d/b", random.Random(3).randbytes(20_000))])


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=False).compress(data)


@pytest.mark.parametrize("stored", [SMALL, gzip.compress(SMALL), zstd(SMALL)], ids=["tar", "gzip", "zstd"])
def test_compressed_layers(stored: bytes) -> None:
    assert build_image(image([SMALL], [stored]))[1] == build_image(image([SMALL]))[1]


def test_several_members_padding_and_skippable_frames() -> None:
    half = len(SMALL) // 2
    expected = build_image(image([SMALL]))[1]
    parts = [gzip.compress(SMALL[:half]), gzip.compress(b""), gzip.compress(SMALL[half:]), bytes(3 * MIB)]
    skippable = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello"
    for stored in (b"".join(parts), skippable + zstd(SMALL[:half]) + skippable + zstd(SMALL[half:]) + skippable):
        assert build_image(image([SMALL], [stored]))[1] == expected


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd], ids=["tar", "gzip", "zstd"])
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_no_damage_goes_unseen(pack, data) -> None:
    stored = bytearray(pack(SMALL))
    made = image([SMALL], [bytes(stored)])
    kind = data.draw(st.sampled_from(["flip", "cut", "longer"]))
    if kind == "flip":
        stored[data.draw(st.integers(0, len(stored) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del stored[data.draw(st.integers(0, len(stored) - 1)) :]
    else:
        stored += b"x"
    made.stored[0] = bytes(stored)
    with pytest.raises(IntegrityError, match="the image: layer 1 of 1"):
        build_image(made)


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd], ids=["tar", "gzip", "zstd"])
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_no_archive_brings_anything_but_a_tree_or_an_error(pack, data) -> None:
    """Bytes changed by chance, with digests that are right: whoever made them wanted that."""
    changed = bytearray(SMALL)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(changed) // 512 - 1)) * 512 if data.draw(st.booleans()) else 0
        changed[(place + data.draw(st.integers(0, 511))) % len(changed)] = data.draw(st.integers(0, 255))
    try:
        build_image(image([bytes(changed)], [pack(bytes(changed))]))
    except IntegrityError as error:
        assert "the image: " in str(error)


def test_content_that_the_configuration_does_not_name() -> None:
    other = archive([M("other")])
    made = image([SMALL], [gzip.compress(other)])
    with pytest.raises(DigestMismatch, match="configuration"):
        build_image(made)


def test_layer_that_ends_within_a_file() -> None:
    cut = SMALL[:2000]
    with pytest.raises(Truncated, match="ends within a file"):
        build_image(image([cut]))


def test_damaged_header_is_not_taken_for_the_end() -> None:
    """tarfile would end there without a word."""
    wrong = bytearray(archive([M("a"), M("b"), M("c")]))
    wrong[512 + 3] ^= 1
    with pytest.raises(IntegrityError, match="damaged header"):
        build_image(image([bytes(wrong)]))


def test_bombs_are_refused_with_little_memory() -> None:
    zeros = bytes(16 * MIB)
    pack = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = b"".join([*(pack.compress(zeros) for _ in range(8)), pack.flush()])
    frames = zstd(zeros) * 8
    for stored in (bomb, frames):
        layer = Descriptor(media_type=TAR, digest=digest_of(stored), size=len(stored))
        tracemalloc.start()
        try:
            with pytest.raises(IntegrityError, match="when decompressed"):
                for _ in read_layer(io.BytesIO(stored), layer, "sha256:", "bomb", max_bytes=120 * MIB):
                    pass
            assert tracemalloc.get_traced_memory()[1] < 16 * MIB
        finally:
            tracemalloc.stop()


def test_limit_of_a_layer() -> None:
    with pytest.raises(IntegrityError, match="more than 10000 bytes when decompressed"):
        build_image(image([SMALL], [gzip.compress(SMALL)]), max_bytes=10_000)


def header(size: int, kind: bytes) -> bytes:
    info = tarfile.TarInfo("x")
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize(
    "kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME], ids=["pax", "global", "name"]
)
def test_headers_are_bounded(kind: bytes) -> None:
    """One that says it has a tebibyte, and thousands of small ones before one file."""
    with pytest.raises(IntegrityError, match=f"header of more than {MAX_HEADER_BYTES} bytes"):
        list(TarStream(iter([header(1 << 40, kind), b"x" * MIB]), "here"))

    def many() -> Iterator[bytes]:
        for _ in range(20_000):
            yield header(0, kind)

    with pytest.raises(IntegrityError, match="here: "):
        list(TarStream(many(), "here"))


def test_map_of_holes_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr(tar_stream, "MAX_HEADER_BYTES", MIB)
    first = sparse_header("x", [(0, 1)] * 5, MIB, 512)
    block = bytearray(b"%011o\0%011o\0" % (1, 1) * 21)
    more = bytes(block) + b"\1" + bytes(7)
    with pytest.raises(IntegrityError, match="header of more than"):
        list(TarStream(iter([first, *[more] * 2100]), "here"))
    endless = archive(
        [M("x", b"9999999\n" + b"1\n" * MIB, pax={"GNU.sparse.major": "1", "GNU.sparse.minor": "0"})]
    )
    with pytest.raises(IntegrityError, match="header of more than"):
        list(TarStream(iter([endless]), "here"))


def test_negative_size_does_not_lead_back() -> None:
    block = bytearray(header(0, tarfile.REGTYPE))
    block[124:136] = b"\xff" * 11 + b"\x00"  # -256 in base 256
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    with pytest.raises(IntegrityError, match="here: "):
        list(TarStream(iter([bytes(block) * 4, bytes(1024)]), "here"))


# ---- layouts -----------------------------------------------------------------------------------------------


def test_layout_with_its_configuration(tmp_path) -> None:
    run = {
        "Env": ["PATH=/bin", "A=b=c"], "Entrypoint": ["/init"], "Cmd": None, "WorkingDir": "/w", "User": "7:8",
        "Labels": {"a": "b"},
    }  # fmt: skip
    for packer in ("gzip", "zstd", "none"):
        folder = tmp_path / packer
        write_layout(str(folder), [archive([M("x", b"1")]), archive([M("y")])], packer=packer, run=run)
        packs = MemoryPacks()
        tree = build(LayersSource(LayoutImage(str(folder), platform="linux/amd64"), name="oci:here"), packs.put)
        packs.index = tree.tree
        assert paths(listing(tree.tree, packs)) == ["x", "y"]
        assert tree.tree.source == "oci:here"
        assert tree.tree.config == Config(
            env=["PATH=/bin", "A=b=c"], entrypoint=["/init"], workdir="/w", user="7:8", architecture="amd64"
        )


def test_platform_and_name_are_chosen(tmp_path) -> None:
    (tmp_path / "blobs" / "sha256").mkdir(parents=True)
    heads = []
    for architecture in ("amd64", "arm64"):
        write_layout(str(tmp_path), [archive([M(architecture)])], architecture=architecture)
        index = json.loads((tmp_path / "index.json").read_text())
        heads += index["manifests"]
    attestation = {**heads[0], "platform": {"os": "unknown", "architecture": "unknown"}}
    nested = write_blob(
        str(tmp_path),
        json.dumps({"schemaVersion": 2, "manifests": [attestation, *heads]}).encode(),
        "application/vnd.oci.image.index.v1+json",
    )
    write_layout_index(str(tmp_path), [{**nested, "annotations": {"org.opencontainers.image.ref.name": "one"}}])
    for architecture in ("amd64", "arm64"):
        made = LayoutImage(str(tmp_path), platform=f"linux/{architecture}", reference="one")
        assert paths(build_image(made)[1]) == [architecture]  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no image for linux/riscv64; there is: linux/amd64, linux/arm64"):
        LayoutImage(str(tmp_path), platform="linux/riscv64")
    with pytest.raises(ConfigError, match="no image 'two' for linux/amd64; there is: no image"):
        LayoutImage(str(tmp_path), platform="linux/amd64", reference="two")
    write_layout_index(str(tmp_path), [heads[0], {**heads[0], "digest": "sha256:" + "0" * 64}])
    with pytest.raises(ConfigError, match="more than one image"):
        LayoutImage(str(tmp_path), platform="linux/amd64")
    with pytest.raises(ConfigError, match="not a platform"):
        LayoutImage(str(tmp_path), platform="amd64")


def test_layouts_that_are_none_or_damaged(tmp_path) -> None:
    with pytest.raises(ConfigError, match="not an OCI image layout"):
        LayoutImage(str(tmp_path))
    write_layout(str(tmp_path), [SMALL])
    head = json.loads((tmp_path / "index.json").read_text())["manifests"][0]
    path = tmp_path / "blobs" / "sha256" / head["digest"][7:]
    kept = path.read_bytes()
    for wrong in (kept[:-1] + b" ", kept[:-1], kept + b" "):
        path.write_bytes(wrong)
        with pytest.raises(IntegrityError, match=head["digest"][7:]):
            LayoutImage(str(tmp_path), platform="linux/amd64")
    path.write_bytes(kept)
    layer = json.loads(kept)["layers"][0]["digest"][7:]
    (tmp_path / "blobs" / "sha256" / layer).unlink()
    with pytest.raises(NotFound, match=layer):
        build_image(LayoutImage(str(tmp_path), platform="linux/amd64"))  # type: ignore[arg-type]
    write_layout_index(str(tmp_path), [{**head, "digest": "sha256:../../../../etc/passwd"}])
    with pytest.raises(IntegrityError, match="digest"):
        LayoutImage(str(tmp_path), platform="linux/amd64")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (b"{}", "no configuration of an image"),
        (b"no json", "no configuration of an image"),
        (b'{"rootfs": {"diff_ids": []}}', "names 0 layers, the manifest 1"),
        (b'{"rootfs": {"diff_ids": ["sha256:xyz"]}}', "not a digest"),
    ],
)
def test_configurations_that_are_none(config: bytes, says: str) -> None:
    with pytest.raises(IntegrityError, match=says):
        build_image(image([SMALL])._replace(config=config))


def test_encrypted_layer_is_named() -> None:
    made = image([SMALL])
    layer = Descriptor(media_type=f"{TAR}+gzip+encrypted", digest=made.layers[0].digest, size=len(SMALL))
    with pytest.raises(ConfigError, match="not a plain tar archive"):
        build_image(made._replace(layers=[layer]))


@pytest.mark.leaks
def test_reading_stops_when_building_does() -> None:
    """A layer that would go on for ever; whoever reads it is told."""
    first = archive([M("x", b"y")])[:1024] + b"rubbish" * 200

    class Endless(io.RawIOBase):
        is_cancelled = False

        def __init__(self) -> None:
            super().__init__()
            self.sent = 0

        def readable(self) -> bool:
            return True

        def read(self, size: int = -1) -> bytes:
            self.sent += 1
            return first if self.sent == 1 else b"r" * size

        def cancel(self) -> None:
            self.is_cancelled = True

    stream = Endless()
    made = image([SMALL])
    layer = Descriptor(media_type=TAR, digest=made.layers[0].digest, size=1 << 49)

    class Source(NamedTuple):
        layers: list[Descriptor]
        config: bytes

        def open(self, _: Descriptor) -> BinaryIO:
            return stream  # type: ignore[return-value]

    with pytest.raises(IntegrityError, match="damaged"):
        build(LayersSource(Source([layer], made.config)), lambda *_: None)
    assert stream.closed
    assert stream.is_cancelled
