"""Headers of safetensors files: what the library writes is read; whatever does not add up is refused."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.checkpoint.format.tensor_index import (
    DTYPE_BITS,
    MAX_HEADER_BYTES,
    header_bytes,
    parse_header,
    parse_weight_map,
)
from bootseer.errors import IntegrityError, Truncated


def pack(header: Any, data_bytes: int) -> tuple[bytes, int]:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    head = len(raw).to_bytes(8, "little") + raw
    return head, len(head) + data_bytes


def tensor(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


shapes = st.lists(st.integers(0, 9), max_size=4)


@given(st.lists(st.tuples(st.sampled_from(sorted(DTYPE_BITS)), shapes), max_size=8), st.randoms())
def test_reads_what_adds_up(kinds: list[tuple[str, list[int]]], order: Any) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    entries = []
    end = 0
    for number, (dtype, shape) in enumerate(kinds):
        bits = DTYPE_BITS[dtype]
        for count in shape:
            bits *= count
        if bits % 8:
            continue
        entries.append((f"t{number}", tensor(dtype, shape, end, end + bits // 8)))
        end += bits // 8
    order.shuffle(entries)
    header.update(entries)
    head, size = pack(header, end)
    found = parse_header(head, size, "f")
    assert found.metadata == {"format": "pt"}
    assert set(found.tensors) == {name for name, _ in entries}
    for name, item in entries:
        entry = found.tensors[name]
        assert (entry.dtype, list(entry.shape)) == (item["dtype"], item["shape"])
        assert entry.offset == len(head) + item["data_offsets"][0]
        assert entry.size == item["data_offsets"][1] - item["data_offsets"][0]


@pytest.mark.parametrize(
    ("header", "data_bytes"),
    [
        (b"{", 0),
        (b"[]", 0),
        (b"\xff\xfe", 0),
        (b"[" * 100_000, 0),
        ({"a": 5}, 0),
        ({"a": {"dtype": "F32", "shape": [1]}}, 4),
        ({"a": tensor("F33", [1], 0, 4)}, 4),
        ({"a": tensor(["F32"], [1], 0, 4)}, 4),  # type: ignore[arg-type]
        ({"a": tensor("F32", [2], 0, 4)}, 4),
        ({"a": tensor("F32", [-1], 0, 4)}, 4),
        ({"a": tensor("F32", [True], 0, 4)}, 4),
        ({"a": tensor("F32", [1.0], 0, 4)}, 4),  # type: ignore[list-item]
        ({"a": tensor("F32", [1 << 62, 1 << 62, 4], 0, 0)}, 0),
        ({"a": tensor("F4", [3], 0, 1)}, 1),
        ({"a": tensor("F32", [1], 4, 0)}, 4),
        ({"a": tensor("F32", [1], -4, 0)}, 4),
        ({"a": tensor("F32", [1], 0, 4), "b": tensor("F32", [1], 2, 6)}, 6),  # overlap
        ({"a": tensor("F32", [1], 0, 4), "b": tensor("F32", [1], 0, 4)}, 4),  # the same bytes
        ({"a": tensor("F32", [1], 0, 4), "b": tensor("F32", [1], 8, 12)}, 12),  # hole
        ({"a": tensor("F32", [1], 4, 8)}, 8),
        ({"a": tensor("F32", [1], 0, 4)}, 5),  # bytes behind
        ({"__metadata__": {"a": 1}}, 0),
        ({"__metadata__": [1]}, 0),
        (b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}', 4),
        (b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}', 4),
    ],
)  # fmt: skip
def test_refuses(header: Any, data_bytes: int) -> None:
    head, size = pack(header, data_bytes)
    with pytest.raises(IntegrityError, match=r"^f: "):
        parse_header(head, size, "f")


def test_says_what_is_cut_off() -> None:
    head, size = pack({"a": tensor("F32", [4], 0, 16)}, 16)
    with pytest.raises(Truncated, match="its tensors at"):
        parse_header(head, size - 1, "f")
    with pytest.raises(Truncated, match="within its header"):
        header_bytes(head, 20, "f")
    with pytest.raises(Truncated, match="too few"):
        header_bytes(b"\1\2", 2, "f")
    with pytest.raises(IntegrityError, match="not a safetensors file"):
        header_bytes((MAX_HEADER_BYTES + 1).to_bytes(8, "little"), 1 << 40, "f")


@given(st.binary(max_size=300))
def test_survives_anything(data: bytes) -> None:
    head, size = pack(data, 0)
    with contextlib.suppress(IntegrityError):
        parse_header(head, size, "f")


@given(st.data())
def test_one_changed_byte_is_refused_or_harmless(data: st.DataObject) -> None:
    """Whatever is read of a damaged header lies within the file and does not overlap."""
    head, size = pack({"a": tensor("F32", [2, 2], 0, 16), "b": tensor("BF16", [3], 16, 22)}, 22)
    at = data.draw(st.integers(0, len(head) - 1))
    changed = bytearray(head)
    changed[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        if header_bytes(changed, size, "f") > len(changed):
            return
        found = parse_header(changed, size, "f")
    except IntegrityError:
        return
    end = found.data_offset
    for entry in found.tensors.values():
        assert entry.offset == end
        end += entry.size
    assert end == size


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "a\\b", "a\0b", "", "a//b", "./a"])
def test_index_cannot_leave_the_directory(path: str) -> None:
    with pytest.raises(IntegrityError, match="leaves the directory"):
        parse_weight_map(json.dumps({"weight_map": {"t": path}}).encode(), "i")


def test_index() -> None:
    assert parse_weight_map(b'{"weight_map": {"t": "a/b.safetensors"}}', "i") == {"t": "a/b.safetensors"}
    for bad in (b"{}", b"[]", b"{", b'{"weight_map": 5}', b'{"weight_map": {"t": 5}}'):
        with pytest.raises(IntegrityError):
            parse_weight_map(bad, "i")
