"""The head of a tree, and the names that trees have."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import ConfigError, FormatVersion, IntegrityError
from bootseer.tree.head import Head, canonical_name, decode, encode, is_digest, make_head, split_pin
from bootseer.tree.index import MAX_INDEX_BYTES, digest_of

GOOD = make_head(b"index", "image", "/tree")
HEX = "0123456789abcdef" * 4


def test_what_is_written_is_read_again() -> None:
    assert decode(encode(GOOD), "it") == GOOD
    assert json.loads(encode(GOOD)) == {
        "format": "bootseer-tree/1",
        "name": "file:///tree",
        "digest": digest_of(b"index"),
        "index_bytes": 5,
        "kind": "image",
    }


def test_names_of_heads() -> None:
    assert make_head(b"i", "env", "https://ada:secret@HOST/a/?sig=1").name == "https://host/a"
    assert make_head(b"i", "env", "/a", "torch 2.13").name == "torch 2.13", "a given name"
    assert make_head(b"i", "env", "/a", "https://HOST/b/").name == "https://host/b", "may be another URL"
    assert make_head(b"i", "env", "/a", "/b/").name == "file:///b"
    assert make_head(b"i", "env", f"/a@sha256:{HEX}").name == "file:///a"
    assert make_head(b"i", "env", "/a", "ü" * 512)


def bad_fields() -> list[tuple[dict[str, Any], str]]:
    return [
        ({"name": ""}, "is not a name of a tree"),
        ({"name": "x" * 1025}, "is not a name of a tree"),
        ({"name": "ü" * 513}, "is not a name of a tree"),
        ({"name": "a\nb"}, "is not a name of a tree"),
        ({"name": "a\x1b[2J"}, "is not a name of a tree"),
        ({"name": "a\0"}, "is not a name of a tree"),
        ({"digest": HEX[:-1]}, "is not a SHA-256"),
        ({"digest": HEX.upper()}, "is not a SHA-256"),
        ({"digest": HEX + "\n"}, "is not a SHA-256"),
        ({"digest": "../" + HEX[3:]}, "is not a SHA-256"),
        ({"index_bytes": 0}, "an index of 0 bytes"),
        ({"index_bytes": -1}, "an index of -1 bytes"),
        ({"index_bytes": MAX_INDEX_BYTES + 1}, "an index of 268435457 bytes"),
        ({"kind": "other"}, "a tree of kind 'other'"),
        ({"kind": ""}, "a tree of kind ''"),
    ]


@pytest.mark.parametrize(("fields", "text"), bad_fields())
def test_bounds(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(IntegrityError, match=f"^this tree: .*{re.escape(text)}"):
        encode(msgspec.structs.replace(GOOD, **fields))
    data = json.dumps(json.loads(encode(GOOD)) | fields).encode()
    with pytest.raises(IntegrityError, match=f"^it: .*{re.escape(text)}"):
        decode(data, "it")


def test_every_field_is_there_and_no_other() -> None:
    fields = json.loads(encode(GOOD))
    for name in fields:
        less = {key: value for key, value in fields.items() if key != name}
        with pytest.raises(IntegrityError, match="is no head of a tree"):
            decode(json.dumps(less).encode(), "it")
        for value in (None, [], {}, 1.5, True):
            with pytest.raises(IntegrityError):
                decode(json.dumps(fields | {name: value}).encode(), "it")
    with pytest.raises(IntegrityError, match="unknown field"):
        decode(json.dumps(fields | {"more": 1}).encode(), "it")
    with pytest.raises(IntegrityError):
        encode(msgspec.structs.replace(GOOD, format="bootseer-tree/2"))


def test_other_formats_are_named() -> None:
    newer = {"format": "bootseer-tree/2", "other": [1]}
    with pytest.raises(FormatVersion, match="it: has format bootseer-tree/2; this Bootseer reads bootseer-tree/1"):
        decode(json.dumps(newer).encode(), "it")
    with pytest.raises(FormatVersion, match="not bootseer-tree/1"):
        decode(b'{"format": "bootseer-trace/1"}', "it")


@given(st.binary(max_size=100))
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError, match=r"^it: "):
        decode(data, "it")


def test_large_and_deep_ones_are_refused() -> None:
    for data in (b"[" * 60_000, b"{" + b" " * (64 << 10) + b"}", encode(GOOD)[:-1], encode(GOOD) + b"x"):
        with pytest.raises(IntegrityError, match=r"^it: "):
            decode(data, "it")


# ---- names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("/a/b", "file:///a/b"),
        ("/a/b///", "file:///a/b"),
        ("/a/./c/../b", "file:///a/b"),
        ("/a b/ü%", "file:///a%20b/%C3%BC%25"),
        ("file:///a/b/", "file:///a/b"),
        ("file:///a%20b", "file:///a%20b"),
        ("file://localhost/a", "file:///a"),
        ("FILE:///a", "file:///a"),
        ("local:///a", "file:///a"),
        ("/", "file:///"),
        ("http://host/a", "http://host/a"),
        ("HTTP://Host:80/A/", "http://host:80/A"),
        ("https://ada:secret@host/a", "https://host/a"),
        ("https://ada@host:8443/a/b/?sig=1&x=@y#part", "https://host:8443/a/b"),
        ("https://host/a@b", "https://host/a@b"),
        ("https://host?x=/y/", "https://host"),
        ("https://host/", "https://host"),
        ("s3://bucket/some/tree/", "s3://bucket/some/tree"),
        ("s3://bucket", "s3://bucket"),
        ("hdfs://ada@nn:8020/user/ada", "hdfs://nn:8020/user/ada"),
        ("hdfs:///user/ada/", "hdfs:///user/ada"),
        ("memory://name/a", "memory://name/a"),
        ("oci://Registry/repo:tag", "oci://registry/repo:tag"),
        (f"oci://registry/repo:tag@sha256:{HEX}", "oci://registry/repo:tag"),
        (f"oci://ada@registry/repo@sha256:{HEX}", "oci://registry/repo"),
        ("zip://member::https://ada:secret@host/a.zip?sig=1", "zip://member::https://host/a.zip"),
        ("simplecache::s3://bucket/a/", "simplecache::s3://bucket/a"),
    ],
)
def test_canonical_names(url: str, name: str) -> None:
    assert canonical_name(url) == name
    assert canonical_name(name) == name, "once is enough"


def test_paths_are_absolute(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert canonical_name("tree") == canonical_name("./tree/") == f"file://{tmp_path}/tree"
    assert canonical_name("/\udcff") == "file:///%FF"
    with pytest.raises(ConfigError, match="is on another machine"):
        canonical_name("file://host/a")


URLS = ["/a/b", "file:///a", "http://host/a", "https://u:p@host/a?q=1", "s3://bucket/a", "hdfs://nn:8020/a"]


@given(st.sampled_from(URLS), st.text(max_size=20))
def test_names_hold_no_secret_and_are_steady(url: str, more: str) -> None:
    try:
        name = canonical_name(f"{url}/{more}")
    except (ConfigError, UnicodeEncodeError):
        return  # no path: surrogates that stand for no byte
    assert canonical_name(name) == name
    assert "u:p" not in name.partition("/a")[0]


@pytest.mark.parametrize("url", [*URLS, "/a@b", "/a@sha256:dir/tree", "https://sha256:x@host/a"])
def test_pins(url: str) -> None:
    assert split_pin(url) == (url, "")
    assert split_pin(f"{url}@sha256:{HEX}") == (url, HEX)
    assert split_pin(f"{url}@sha256:{HEX.upper()}") == (url, HEX)
    for wrong in ("", HEX[:-1], HEX + "0", "x" * 64, HEX + "\n", "é" * 64):
        with pytest.raises(ConfigError, match="must be 64 hex digits"):
            split_pin(f"{url}@sha256:{wrong}")


def test_pins_of_registries_are_their_own() -> None:
    for url in (f"oci://registry/repo@sha256:{HEX}", f"docker://python:3.11@sha256:{HEX}"):
        assert split_pin(url) == (url, "")


def test_errors_of_pins_show_no_secret() -> None:
    with pytest.raises(ConfigError) as caught:
        split_pin("https://ada:secret@host/a?sig=secret@sha256:12")
    assert "secret" not in str(caught.value)


def test_digests() -> None:
    assert is_digest(HEX) and is_digest(digest_of(b""))
    assert not any(map(is_digest, ("", HEX[1:], HEX + "0", HEX.upper(), "g" * 64, HEX + "\n", "٠" * 64)))
    assert isinstance(GOOD, Head)
