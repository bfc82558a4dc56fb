"""EROFS metadata against what the tools of EROFS make of it; the kernel's view is in the integration tests."""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from bootseer.tree import erofs
from bootseer.tree.index import UNIT_BYTES
from tests.made_trees import (
    Made,
    content,
    everything,
    file,
    folder,
    in_directories,
    make,
    symlink,
    trees,
    whiteout,
)
from tests.support import needs_program

FSCK = shutil.which("fsck.erofs")
needs_fsck = needs_program("fsck.erofs")
BLOCKS = slice(1024 + 36, 1024 + 40)  # in the superblock: how many there are
ON_DISK = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)


def write(made: Made, top: Path) -> tuple[str, str]:
    """Paths of the metadata and the device."""
    data = erofs.metadata(made.index, made.digest)
    assert len(data) % UNIT_BYTES == 0
    (top / "metadata").write_bytes(data)
    (top / "device").write_bytes(made.device)
    return str(top / "metadata"), str(top / "device")


def fsck(metadata: str, device: str, *options: str) -> subprocess.CompletedProcess[str]:
    assert FSCK is not None
    return subprocess.run([FSCK, f"--device={device}", *options, metadata], capture_output=True, text=True)


@needs_fsck
def test_fsck_takes_everything(tmp_path: Path) -> None:
    done = fsck(*write(everything(), tmp_path))
    assert (done.returncode, done.stderr) == (0, "")


@needs_fsck
def test_fsck_finds_what_is_wrong(tmp_path: Path) -> None:
    """Or the tests around this one would say nothing."""
    metadata, device = write(make([file(b"a", b"a"), folder(b"b")]), tmp_path)
    whole = Path(metadata).read_bytes()
    names = whole.index(b"...ab")
    for wrong in (whole.replace(b"...ab", b"...aa", 1), whole[:names] + b"/" * 5 + whole[names + 5 :]):
        Path(metadata).write_bytes(wrong)
        assert fsck(metadata, device).returncode != 0


@needs_fsck
@ON_DISK
@given(made=trees())
def test_fsck_takes_any_tree(tmp_path: Path, made: Made) -> None:
    for index in (made.index, in_directories(made.index)):
        done = fsck(*write(made._replace(index=index), tmp_path))
        assert (done.returncode, done.stderr) == (0, "")


@needs_fsck
@pytest.mark.parametrize("folders", [erofs.MAX_FIRST, erofs.MAX_NEAR, erofs.MAX_NEAR + 1])
def test_fsck_takes_directories_with_much_in_them(tmp_path: Path, folders: int) -> None:
    entries = [folder(b"%04d" % number) for number in range(folders)]
    entries += [file(b"%04d/%d" % (number % folders, number), b"x" * number) for number in range(3000)]
    entries += [symlink(b"%04d/link" % number, b"t" * 3 * number) for number in range(1, folders)]
    done = fsck(*write(make(entries), tmp_path))
    assert (done.returncode, done.stderr) == (0, "")


@needs_fsck
def test_fsck_extracts_the_files(tmp_path: Path) -> None:
    """Without holes: fsck.erofs 1.5 leaves them out."""
    sizes = (0, 1, 4095, 4096, 4097, 131071, 131072, 131073, 500000)
    entries = [folder(b"d"), *(file(b"d/%d" % size, bytes([size % 251 + 1]) * size) for size in sizes)]
    made = make([*entries, file(b"link", link=b"d/500000"), symlink(b"symlink", b"t" * 3000)])
    out = tmp_path / "out"
    done = fsck(*write(made, tmp_path), f"--extract={out}", "--no-preserve")
    assert done.returncode == 0, done.stderr
    for size in sizes:
        assert (out / f"d/{size}").read_bytes() == bytes([size % 251 + 1]) * size
    assert (out / "link").read_bytes() == content(made, made.index.links[made.index.names.index(b"link")])
    assert os.readlink(out / "symlink") == "t" * 3000


def test_the_same_index_gives_the_same_bytes() -> None:
    """Across versions too: whoever changes them changes erofs.VERSION, as they are kept on disks by it."""
    entries = [
        folder(b"", mtime_ns=-1),
        folder(b"d", is_opaque=True, xattrs=((b"user.a", b"1"), (b"trusted.b", b"2"))),
        *(file(b"d/%03d" % number, b"%d" % number, uid=number) for number in range(300)),
        file(b"e", b"e" * 300000, 1 << 20, b"f"),
        file(b"f", link=b"e"),
        symlink(b"g", b"g" * 4000),
        whiteout(b"h"),
    ]
    data = erofs.metadata(make(entries).index, "ab" * 32)
    assert data == erofs.metadata(make(reversed(entries)).index, "ab" * 32)
    assert data != erofs.metadata(make(entries).index, "cd" * 32), "the digest is in it"
    known = {4: "4e410c440c743963451b0bc34d375ded27cd6cd7049c1fa78178c95e975c7ed0"}
    assert known[erofs.VERSION] == hashlib.sha256(data).hexdigest()


@ON_DISK
@given(made=trees())
def test_what_comes_first_stays_as_it_is(made: Made) -> None:
    for index in (made.index, in_directories(made.index)):
        making = erofs.MetadataImage(index, made.digest)
        data = bytearray(making.max_bytes)
        making.write_first(data)
        assert 0 < making.first_bytes <= making.max_bytes and making.first_bytes % UNIT_BYTES == 0
        first = data[: making.first_bytes]
        size = making.write_rest(data)
        assert making.first_bytes <= size <= making.max_bytes and size % UNIT_BYTES == 0
        first[BLOCKS] = data[BLOCKS]
        assert data[: making.first_bytes] == first
        assert data[:size] == erofs.metadata(index, made.digest)
        assert not any(data[size:])


def test_a_root_with_much_in_it_has_nothing_that_comes_first() -> None:
    few, many = (
        erofs.MetadataImage(make([folder(b"%04d" % number) for number in range(count)]).index, "ab" * 32)
        for count in (erofs.MAX_FIRST, erofs.MAX_FIRST + 1)
    )
    assert few.first_bytes > many.first_bytes


def test_superblock() -> None:
    made = make([file(b"a", b"a"), file(b"b", link=b"a"), folder(b"c")])
    data = erofs.metadata(made.index, made.digest)
    magic, _, compatible, block_bits, slots, root, inodes = struct.unpack_from("<IIIBBHQ", data, 1024)
    assert (magic, compatible, block_bits, slots, inodes) == (0xE0F5E1E2, 2, 12, 0, 3)
    assert root * 32 < UNIT_BYTES, "its number has 16 bits"
    assert data[1024 + 48 : 1024 + 64] == bytes.fromhex(made.digest)[:16]
    incompatible, _, devices, slot = struct.unpack_from("<IHHH", data, 1024 + 80)
    assert (incompatible, devices) == (0xC, 1)
    assert struct.unpack_from("<64xI", data, slot * 128)[0] == made.index.device_bytes // UNIT_BYTES
    assert struct.unpack_from("<I", data, 1024 + 36)[0] == len(data) // UNIT_BYTES


def test_the_root_is_near_the_beginning_whatever_its_size() -> None:
    made = make([folder(b"", xattrs=((b"trusted.x", b"v" * 60000),)), *(file(b"%06d" % n) for n in range(9000))])
    assert len(erofs.metadata(made.index, made.digest)) > 9000 * 64


def test_an_empty_tree(tmp_path: Path) -> None:
    metadata, device = write(make([]), tmp_path)
    assert os.path.getsize(metadata) == UNIT_BYTES
    if FSCK:
        assert fsck(metadata, device).returncode == 0


def test_fifty_thousand_entries_take_no_time() -> None:
    """It is part of each first start. Measured: 0.05 s; the bound is for machines that do much else."""
    entries = [folder(b"%04d" % number) for number in range(3000)]
    entries += [file(b"%04d/module_%02d.py" % (number % 3000, number // 3000), b"x") for number in range(47000)]
    made = make(entries)
    began_s = time.process_time()
    data = erofs.metadata(made.index, made.digest)
    assert time.process_time() - began_s < 1.5
    assert len(data) < 200 * 50_000
