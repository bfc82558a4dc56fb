"""Manifests: what is written is read back, and nothing else is believed."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.checkpoint.format.manifest import (
    FORMAT,
    Manifest,
    StripedFile,
    decode,
    digest,
    directory_of,
    encode,
    is_file_path,
    is_version,
    version_of,
)
from bootseer.errors import FormatVersion, IntegrityError

VERSION = "01763722800123456789-9f2c41d07a3e"


def good() -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "created_ns": 1763722800123456789,
        "step": 20,
        "writer": "bootseer 0.1.0",
        "files": [
            {"path": "a/model.safetensors", "size": 10000, "unit_bytes": 4096, "stripes": ["0.s0", "0.s1"],
             "sums": [1, 2, 3]},
            {"path": "empty", "size": 0, "unit_bytes": 4096, "stripes": ["1.s0"], "sums": []},
        ],
    }  # fmt: skip


def read(record: object) -> Manifest:
    body = json.dumps(record).encode()
    sum_line = json.dumps({"sha256": hashlib.sha256(body).hexdigest()}, separators=(",", ":"))
    return decode(body + b"\n" + sum_line.encode() + b"\n", "store/CKPT/manifest.json")


def test_a_manifest_is_read_back() -> None:
    manifest = read(good())
    assert manifest.size == 10000
    assert manifest.files[0].layout.units == 3
    assert decode(encode(manifest), "again") == manifest
    assert len(digest(encode(manifest))) == 64


BAD: list[tuple[str, Any, str]] = [
    ("version", "7", "version '7' is invalid"),
    ("version", VERSION.upper(), "is invalid"),
    ("created_ns", 5, "created_ns 5 is not that of version"),
    ("step", -1, "step -1 is invalid"),
    ("writer", "x" * 201, "writer is too long"),
    ("files", 7, "is damaged"),
    ("files.0.path", "/etc/passwd", "is not allowed"),
    ("files.0.path", "a/../../b", "is not allowed"),
    ("files.0.path", "a\\b", "is not allowed"),
    ("files.0.path", "a\0b", "is not allowed"),
    ("files.0.path", "a//b", "is not allowed"),
    ("files.0.path", "x" * 1025, "is not allowed"),
    ("files.0.path", "empty", "occurs twice"),
    ("files.0.path", "empty/below", "is below a file"),
    ("files.0.size", -1, "size -1 of"),
    ("files.0.size", 1 << 60, "is invalid"),
    ("files.0.size", 1.5, "is damaged"),
    ("files.0.size", 10000 + 4096, "has 4 units and 3 checksums"),
    ("files.0.unit_bytes", 0, "unit_bytes 0"),
    ("files.0.unit_bytes", 4097, "unit_bytes 4097"),
    ("files.0.stripes", [], "has 0 stripes"),
    ("files.0.stripes", ["../x"], "stripe name"),
    ("files.0.stripes", ["manifest.json"], "stripe name"),
    ("files.0.stripes", ["0.s0", "0.s0"], "belongs to two files"),
    ("files.0.stripes", ["1.s0", "0.s0"], "belongs to two files"),
    ("files.0.sums", [1, 2], "has 3 units and 2 checksums"),
    ("files.0.sums", [1, 2, 1 << 32], "not a CRC32C"),
    ("files.0.surprise", 1, "is damaged"),
    ("surprise", 1, "is damaged"),
]


@pytest.mark.parametrize(("where", "value", "says"), BAD)
def test_what_does_not_add_up_is_refused(where: str, value: Any, says: str) -> None:
    record = good()
    place: Any = record
    *path, last = where.split(".")
    for name in path:
        place = place[int(name) if name.isdigit() else name]
    place[last] = value
    with pytest.raises(IntegrityError, match=r"^store/CKPT/manifest\.json: ") as caught:
        read(record)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "says"), [("bootseer-stripe/2", "take a newer one"), ("zarr", "has format 'zarr'")]
)
def test_other_formats_are_named(name: str, says: str) -> None:
    with pytest.raises(FormatVersion, match=says):
        read({**good(), "format": name, "new_field": 1})


@given(st.binary(max_size=300))
def test_garbage_is_an_error_of_ours(data: bytes) -> None:
    with pytest.raises(IntegrityError):
        decode(data, "x")


@given(st.data())
def test_a_flipped_bit_is_found(data: st.DataObject) -> None:
    stored = encode(read(good()))
    place = data.draw(st.integers(0, len(stored) - 1))
    flipped = bytearray(stored)
    flipped[place] ^= 1 << data.draw(st.integers(0, 7))
    assert digest(bytes(flipped)) != digest(stored)
    with pytest.raises(IntegrityError):
        decode(bytes(flipped), "x")


def test_writers_cannot_write_what_readers_refuse() -> None:
    manifest = read(good())
    file = StripedFile(path="../x", size=0, unit_bytes=4096, stripes=["a"], sums=[])
    with pytest.raises(IntegrityError):
        encode(
            Manifest(
                format=FORMAT, version=VERSION, created_ns=manifest.created_ns, step=None, writer="", files=[file]
            )
        )


def test_names_of_versions() -> None:
    assert version_of(directory_of(VERSION)) == VERSION
    assert version_of(VERSION) == version_of("v-7") == version_of("v-" + VERSION + "x") == ""
    assert is_version(VERSION) and not is_version(VERSION[1:])


@given(st.text(max_size=40))
def test_paths_stay_inside(path: str) -> None:
    if is_file_path(path):
        names = path.split("/")
        assert not path.startswith("/") and ".." not in names and "" not in names
        path.encode()  # and can be stored
