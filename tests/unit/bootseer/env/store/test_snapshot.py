"""Snapshots: what is written is read again, everything else is refused with one line."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.env.store import snapshot as snapshots
from bootseer.env.store.snapshot import Snapshot, decode, encode, is_expired, listed, why_no_targets
from bootseer.env.store_layout import below, env_path, generation_of, is_key, lease_number_of, lease_path
from bootseer.errors import ConfigError, FormatVersion, IntegrityError
from tests.env_parts import make_snapshot

KEY, TREE = "a" * 64, "b" * 64

digests = st.text("0123456789abcdef", min_size=64, max_size=64)
# Such that nearly none has to be thrown away, which would take most of the time.
printable = st.characters(codec="utf-8", exclude_categories=("C", "Z"), include_characters=" ")
names = st.text(printable.filter(lambda letter: letter != "/"), min_size=1, max_size=20).filter(
    lambda name: name.isprintable() and name not in (".", "..")
)
texts = st.text(printable, min_size=1, max_size=50).filter(str.isprintable)
targets = st.lists(
    st.lists(names, min_size=1, max_size=4).map(lambda parts: "/" + "/".join(parts)), min_size=1, max_size=5
).filter(lambda paths: not why_no_targets(paths))


@st.composite
def made(draw: st.DrawFn) -> Snapshot:
    created_s = draw(st.floats(0, 1e10))
    return Snapshot(
        key=draw(digests),
        tree=draw(digests),
        index_bytes=draw(st.integers(1, 256 << 20)),
        targets=draw(targets),
        created_s=created_s,
        expires_s=draw(st.none() | st.floats(created_s + 1, 1e12)),
        setup_s=draw(st.floats(0, 1e7)),
        distributions=draw(st.just("") | digests),
        python=draw(st.sampled_from(["", "3.11.7", "3.13.0rc1"])),
        files=draw(st.integers(0, 1 << 24)),
        bytes=draw(st.integers(0, 1 << 60)),
        deleted=draw(st.integers(0, 1 << 24)),
        left_out=draw(st.lists(texts, max_size=5)),
        outside=draw(st.lists(texts, max_size=5)),
        relocatable=draw(st.booleans()),
    )


def refused(payload: bytes, *texts: str) -> str:
    with pytest.raises(IntegrityError) as caught:
        decode(payload, "here")
    text = str(caught.value)
    assert text.startswith("here: ")
    assert text.isprintable(), "one line, and nothing that a terminal acts on"
    assert len(text) < 600
    for each in texts:
        assert each in text
    return text


@given(made())
def test_round_trip(snapshot: Snapshot) -> None:
    payload = encode(snapshot)
    assert decode(payload, "here") == snapshot
    assert encode(decode(payload, "here")) == payload


@given(st.binary(max_size=300))
def test_rubbish_is_refused(data: bytes) -> None:
    refused(data)


@given(made(), st.data())
def test_damage_is_refused_or_still_within_bounds(snapshot: Snapshot, data: st.DataObject) -> None:
    payload = bytearray(encode(snapshot))
    payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode(bytes(payload), "here")
    except IntegrityError as error:
        assert str(error).isprintable()
    else:
        snapshots.check(found, "here")


@given(made(), st.sampled_from(msgspec.structs.fields(Snapshot)), st.data())
def test_fields_that_are_missing_foreign_or_of_another_type(
    snapshot: Snapshot, field: Any, data: st.DataObject
) -> None:
    fields = json.loads(encode(snapshot))
    refused(json.dumps({name: value for name, value in fields.items() if name != field.name}).encode())
    refused(
        json.dumps(fields | {data.draw(st.text(min_size=1).filter(lambda name: name not in fields)): 1}).encode()
    )
    wrong = data.draw(st.sampled_from([{}, [[]], {"a": 1}, [1], [None]]))
    refused(json.dumps(fields | {field.name: wrong}).encode())


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("key", "A" * 64, "is not a key"),
        ("key", "a" * 63, "is not a key"),
        ("key", "a" * 64 + "\n", "is not a key"),
        ("key", "../../../etc", "is not a key"),
        ("tree", "", "is not a SHA-256"),
        ("tree", "../" + "a" * 61, "is not a SHA-256"),
        ("index_bytes", 0, "an index of 0 bytes"),
        ("index_bytes", (256 << 20) + 1, "an index of"),
        ("targets", [], "has 0 targets"),
        ("targets", [f"/t{number}" for number in range(65)], "has 65 targets"),
        ("targets", ["opt/venv"], "is not absolute"),
        ("targets", [""], "is not absolute"),
        ("targets", ["/"], "is not a normalized path"),
        ("targets", ["/opt/venv/"], "is not a normalized path"),
        ("targets", ["/opt//venv"], "is not a normalized path"),
        ("targets", ["/opt/../etc"], "is not a normalized path"),
        ("targets", ["/opt/."], "is not a normalized path"),
        ("targets", ["/opt\n/venv"], "not printable"),
        ("targets", ["/opt\0"], "not printable"),
        ("targets", ["/" + "a" * 256], "name that is too long"),
        ("targets", ["/" + "a/" * 2100 + "a"], "too long"),
        ("targets", ["/opt/venv", "/opt/venv"], "equals, or is inside, another one"),
        ("targets", ["/opt/venv/lib", "/opt/venv-2", "/opt/venv"], "equals, or is inside, another one"),
        ("created_s", -1.0, "invalid creation time"),
        ("created_s", 2.0**41, "invalid creation time"),
        ("expires_s", 1_800_000_000.0, "has an invalid expiry time"),
        ("expires_s", 2.0**41, "has an invalid expiry time"),
        ("setup_s", -0.5, "invalid set-up duration"),
        ("setup_s", 1e8, "invalid set-up duration"),
        ("distributions", "numpy==1", "is not a SHA-256"),
        ("python", "3.11\x1b[31m", "is not a version"),
        ("python", "3" * 65, "is not a version"),
        ("files", -1, "has -1 files"),
        ("files", (1 << 24) + 1, "files"),
        ("bytes", 1 << 61, "bytes"),
        ("deleted", 1 << 25, "deleted names"),
        ("left_out", ["x"] * 1001, "lists 1001 paths"),
        ("left_out", ["a\nb"], "not a printable path"),
        ("left_out", [""], "not a printable path"),
        ("outside", ["x" * 1025], "not a printable path"),
        ("outside", ["\x1b]0;owned\x07"], "not a printable path"),
    ],
)
def test_bounds(field: str, value: object, text: str) -> None:
    snapshot = make_snapshot(KEY, TREE, 100, **{field: value})
    refused(msgspec.json.encode(snapshot), text)
    with pytest.raises(IntegrityError, match="this snapshot: "):
        encode(snapshot)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_are_not_written(value: float) -> None:
    for field in ("created_s", "expires_s", "setup_s"):
        with pytest.raises(IntegrityError):
            encode(make_snapshot(KEY, TREE, 100, **{field: value}))


def test_other_formats() -> None:
    payload = encode(make_snapshot(KEY, TREE, 100))
    for found, text in (
        (b"bootseer-env/2", "take a newer one"),
        (b"bootseer-tree/1", "has format"),
        (b"\\u001b[2J", "has format"),
    ):
        with pytest.raises(FormatVersion, match=text) as caught:
            decode(payload.replace(b"bootseer-env/1", found), "here")
        assert str(caught.value).isprintable()
    refused(b'{"format":"bootseer-env/1"}')
    refused(b"[" * 100_000)
    refused(b'"' + b"x" * (9 << 20) + b'"', "at most")


def test_targets_beside_each_other_are_fine() -> None:
    assert why_no_targets(["/opt/venv", "/opt/venv-2", "/opt/ven", "/usr/lib/a b", "/ä"]) == ""


@given(st.floats(0, 1e10), st.floats(0, 1e10))
def test_expiry(created_s: float, now_s: float) -> None:
    forever = make_snapshot(KEY, TREE, 1, created_s=created_s)
    assert not is_expired(forever, now_s)
    assert is_expired(make_snapshot(KEY, TREE, 1, expires_s=now_s), now_s)
    assert not is_expired(make_snapshot(KEY, TREE, 1, expires_s=math.nextafter(now_s, math.inf)), now_s)


@given(st.lists(st.text(st.characters(), max_size=60) | st.text(max_size=3000), max_size=1100))
def test_listed_fits(paths: list[str]) -> None:
    found = listed(paths)
    assert len(found) <= 1000
    encode(make_snapshot(KEY, TREE, 1, left_out=found, outside=found))
    assert listed(["lib/a.py", "ä b"]) == ["lib/a.py", "ä b"]


@given(st.integers(1, 999_999))
def test_names_of_numbers(number: int) -> None:
    name, lease = env_path(KEY, number).rpartition("/")[2], lease_path(KEY, number).rpartition("/")[2]
    assert (generation_of(name), lease_number_of(name)) == (number, 0)
    assert (generation_of(lease), lease_number_of(lease)) == (0, number)


@pytest.mark.parametrize(
    "name",
    ["", "env-1.json", "env-0000001.json", "env-00001x.json", "env-000001.json\n", "key.json", "env-١٢٣٤٥٦.json"],
)
def test_other_names_have_no_number(name: str) -> None:
    assert generation_of(name) == lease_number_of(name) == 0


def test_numbers_and_keys_have_bounds() -> None:
    for number in (0, -1, 1_000_000):
        with pytest.raises(ConfigError, match="1 to 999999"):
            env_path(KEY, number)
    for key in ("", "a" * 63, "A" * 64, "../" + "a" * 61, "a" * 64 + "/.."):
        assert not is_key(key)
        with pytest.raises(ConfigError, match="is not a key"):
            env_path(key, 1)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("/shared/envs/", "/shared/envs/trees/k"),
        ("hdfs://nn:8020/envs", "hdfs://nn:8020/envs/trees/k"),
        ("s3://bucket/a?b", "s3://bucket/a?b/trees/k"),
        ("https://host/envs/?sig=1", "https://host/envs/trees/k?sig=1"),
        ("dir://envs::s3://bucket/x", "dir://envs/trees/k::s3://bucket/x"),
    ],
)
def test_urls_below(url: str, expected: str) -> None:
    assert below(url, "trees/k") == expected
