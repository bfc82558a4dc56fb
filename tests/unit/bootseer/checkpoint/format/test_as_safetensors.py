"""Headers as safetensors itself reads them: what it takes is taken, what it refuses is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, deserialize
from safetensors import safe_open as their_open

from bootseer.checkpoint.format.tensor_index import parse_header
from bootseer.checkpoint.safetensors import safe_open
from bootseer.errors import BootseerError, CheckpointError, IntegrityError

T = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'


def one(dtype: str, shape: str, end: int, more: str = "") -> str:
    return f'{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[0,{end}]{more}}}}}'


# name, header, bytes of the tensors
CASES: list[tuple[str, str | bytes, int]] = [
    ("plain", f'{{"a":{T}}}', 4),
    ("spaces", f' \n{{"a":{T}}}\t ', 4),
    ("further field", one("F32", "[1]", 4, ',"more":1'), 4),
    ("further nested", one("F32", "[1]", 4, ',"more":{"x":[1,null,true,-0,1.5]}'), 4),
    ("further twice", one("F32", "[1]", 4, ',"m":1,"m":2'), 4),
    ("further deep", one("F32", "[1]", 4, f',"m":{"[" * 200}{"]" * 200}'), 4),
    ("further not so deep", one("F32", "[1]", 4, f',"m":{"[" * 100}{"]" * 100}'), 4),
    ("further huge", one("F32", "[1]", 4, ',"m":1e999'), 4),
    ("further huge whole", one("F32", "[1]", 4, f',"m":{"9" * 400}'), 4),
    ("further NaN", one("F32", "[1]", 4, ',"m":NaN'), 4),
    ("further surrogate", one("F32", "[1]", 4, r',"m":["\ud800"]'), 4),
    ("65 dimensions", one("F32", json.dumps([1] * 65), 4), 4),
    ("1000 dimensions", one("F32", json.dumps([1] * 1000), 4), 4),
    ("huge and 0", one("F32", "[0,18446744073709551615]", 0), 0),
    ("too huge and 0", one("F32", "[0,18446744073709551616]", 0), 0),
    ("product too large before 0", one("F32", "[9223372036854775807,9,0]", 0), 0),
    ("bits too many before 0", one("F32", "[4611686018427387904]", 0), 0),
    ("minus 0", one("F32", "[-0]", 0), 0),
    ("1.0", one("F32", "[1.0]", 4), 4),
    ("true", one("F32", "[true]", 4), 4),
    ("BOM", b"\xef\xbb\xbf" + f'{{"a":{T}}}'.encode(), 4),
    ("UTF-16", f'{{"a":{T}}}'.encode("utf-16"), 4),
    ("UTF-16 LE", f'{{"a":{T}}}'.encode("utf-16-le"), 4),
    ("UTF-32", f'{{"a":{T}}}'.encode("utf-32-le"), 4),
    ("lone surrogate", rf'{{"\ud800":{T}}}', 4),
    ("lone trailing surrogate", rf'{{"__metadata__":{{"k":"\uDC00"}},"a":{T}}}', 4),
    ("surrogate in bytes", b'{"\xed\xa0\x80":' + T.encode() + b"}", 4),
    ("surrogate pair", rf'{{"\ud83d\ude00":{T}}}', 4),
    ("backslash and ud800", rf'{{"\\ud800":{T}}}', 4),
    ("no metadata", '{"__metadata__":{}}', 0),
    ("metadata null", f'{{"__metadata__":null,"a":{T}}}', 4),
    ("metadata list", f'{{"__metadata__":[],"a":{T}}}', 4),
    ("metadata false", f'{{"__metadata__":false,"a":{T}}}', 4),
    ("metadata number", f'{{"__metadata__":{{"k":1}},"a":{T}}}', 4),
    ("metadata twice", f'{{"__metadata__":{{}},"__metadata__":{{}},"a":{T}}}', 4),
    ("metadata key twice", f'{{"__metadata__":{{"k":"1","k":"2"}},"a":{T}}}', 4),
    ("name twice", f'{{"a":{{"dtype":"I32","shape":[1],"data_offsets":[0,4]}},"a":{T}}}', 4),
    ("field twice", '{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}', 4),
    ("fields in a list", '{"a":["F32",[1],[0,4]]}', 4),
    ("too many in a list", '{"a":["F32",[1],[0,4],5]}', 4),
    ("type as an object", '{"a":{"dtype":{"F32":null},"shape":[1],"data_offsets":[0,4]}}', 4),
    ("F4 odd", one("F4", "[3]", 2), 2),
    ("F4 odd, cut", one("F4", "[3]", 1), 1),
    ("F4 odd rows", one("F4", "[2,3]", 3), 3),
    ("F4 even", one("F4", "[3,2]", 3), 3),
    ("F6", one("F6_E2M3", "[4]", 3), 3),
    ("F6 odd", one("F6_E2M3", "[3]", 3), 3),
    ("trailing bytes", f'{{"a":{T}}}', 5),
    ("NUL behind", f'{{"a":{T}}}\0', 4),
    ("control character", b'{"a\x01":' + T.encode() + b"}", 4),
]


def file_of(header: str | bytes, size: int) -> bytes:
    raw = header if isinstance(header, bytes) else header.encode()
    return len(raw).to_bytes(8, "little") + raw + bytes(range(size))


@pytest.mark.parametrize(("header", "size"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_headers(header: str | bytes, size: int) -> None:
    data = file_of(header, size)
    try:
        theirs = {name: (each["dtype"], list(each["shape"])) for name, each in deserialize(data)}
    except SafetensorError:
        with pytest.raises(IntegrityError):
            parse_header(data, len(data), "f")
        return
    found = parse_header(data, len(data), "f").tensors
    assert {name: (each.dtype, list(each.shape)) for name, each in found.items()} == theirs


@pytest.mark.parametrize(
    "metadata", ["", '"__metadata__":{},', '"__metadata__":null,', '"__metadata__":{"k":"v"},']
)
def test_metadata(metadata: str, tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    path.write_bytes(file_of(f'{{{metadata}"a":{T}}}', 4))
    with their_open(path, "pt") as theirs, safe_open(path) as ours:
        assert ours.metadata() == theirs.metadata()


@pytest.mark.parametrize("shape", ["[2,3]", "[3,2]", "[2,1,3]", "[0,3]", "[0,2]"])
def test_halves_of_bytes(shape: str, tmp_path: Path) -> None:
    count = json.loads(shape)
    path = tmp_path / "f.safetensors"
    size = torch.Size(count).numel() // 2
    path.write_bytes(file_of(one("F4", shape, size), size))
    with their_open(path, "pt") as theirs, safe_open(path) as ours:
        assert ours.get_slice("a").get_shape() == count
        try:
            wanted = theirs.get_tensor("a")
        except SafetensorError:
            with pytest.raises(CheckpointError, match="last dimension"):
                ours.get_tensor("a")
            return
        found = ours.get_tensor("a")
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


def test_errors_are_ours() -> None:
    """None that a caller would not catch."""
    for _, header, size in CASES:
        data = file_of(header, size)
        try:
            parse_header(data, len(data), "f")
        except BootseerError:
            pass
