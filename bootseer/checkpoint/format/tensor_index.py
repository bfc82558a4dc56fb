"""The header of a safetensors file, verified as untrusted bytes.

In: the first bytes of a file and its size. Out: the position of each tensor, as records, without torch. A file is
8 bytes (length of the header, little-endian), the header (JSON), then the tensors' bytes without holes.
Source: github.com/huggingface/safetensors, README, "Format". Open points follow its library 0.8
(tests/unit/bootseer/checkpoint/format/test_as_safetensors.py): it accepts further fields and any number of
dimensions.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from bootseer.errors import IntegrityError, Truncated

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DEPTH = 127  # of nesting in a header
MAX_COUNT = 1 << 64  # sizes, offsets and products of them are below it
FIELDS = ("dtype", "shape", "data_offsets")
MAX_INDEX_BYTES = 256 << 20  # of the index of a sharded model

# bits of one element
DTYPE_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}


class TensorEntry(NamedTuple):
    name: str
    dtype: str  # a key of DTYPE_BITS
    shape: tuple[int, ...]
    offset: int  # bytes, from the start of the file
    size: int  # bytes


class Header(NamedTuple):
    """The contents of a safetensors file's header."""

    tensors: Mapping[str, TensorEntry]  # in the order of their bytes
    metadata: Mapping[str, str] | None  # None: the header has none
    data_offset: int  # bytes: where the first tensor begins


def header_bytes(start: bytes | memoryview, file_size: int, path: str) -> int:
    """Return the length of the part before the tensors, from a file's first 8 bytes."""
    if file_size < 8 or len(start) < 8:
        raise Truncated(f"{path}: {file_size} bytes are too few for a safetensors file")
    length = int.from_bytes(start[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise IntegrityError(f"{path}: not a safetensors file, or damaged: its header would have {length} bytes")
    if 8 + length > file_size:
        raise Truncated(f"{path}: the file ends at byte {file_size}, within its header of {length}")
    return 8 + length


def parse_header(start: bytes | memoryview, file_size: int, path: str) -> Header:
    """Parse and verify the header; `start` is at least `header_bytes` long.

    Raises: IntegrityError unless each tensor is within the file, has as many bytes as its shape and type need, and
        neither overlaps another tensor nor leaves a hole.
    """
    data_offset = header_bytes(start, file_size, path)
    try:
        raw = _decode(bytes(start[8:data_offset]))
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{path}: the safetensors header cannot be read: {_short(error)}") from error
    if not isinstance(raw, _Object):
        raise IntegrityError(f"{path}: the safetensors header is not a JSON object")
    if "__metadata__" in raw.twice:
        raise IntegrityError(f"{path}: the safetensors header has __metadata__ twice")
    metadata = raw.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise IntegrityError(f"{path}: __metadata__ of the safetensors header is not an object of strings")
    entries = [_entry(name, item, data_offset, path) for name, item in raw.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.size))
    end = data_offset
    for entry in entries:
        if entry.offset != end:
            what = "overlaps the tensor before it" if entry.offset < end else "leaves a hole before it"
            raise IntegrityError(f"{path}: tensor {_quoted(entry.name)} {what}")
        end += entry.size
    if end > file_size:
        raise Truncated(f"{path}: the file ends at byte {file_size}, its tensors at {end}")
    if end < file_size:
        raise IntegrityError(f"{path}: {file_size - end} bytes after the last tensor belong to no tensor")
    return Header({entry.name: entry for entry in entries}, metadata, data_offset)


def parse_weight_map(data: bytes | memoryview, path: str) -> dict[str, str]:
    """Return the file of each tensor, from the `*.safetensors.index.json` of a sharded model."""
    try:
        raw = json.loads(bytes(data), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{path}: cannot be read: {_short(error)}") from error
    found = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise IntegrityError(f"{path}: has no weight_map of tensor names to files")
    for file in found.values():
        if not is_relative(file):
            raise IntegrityError(f"{path}: {_quoted(file)} leaves the directory")
    return found


def is_relative(path: str) -> bool:
    """Return whether an untrusted path stays below the directory that it is joined to."""
    return bool(path) and not any(
        part in ("", ".", "..") or "\0" in part or "\\" in part for part in path.split("/")
    )


def _entry(name: str, item: Any, data_offset: int, path: str) -> TensorEntry:
    if isinstance(item, list) and len(item) == len(FIELDS):
        item = _Object(zip(FIELDS, item, strict=True))
    if not isinstance(item, _Object) or not item.keys() >= set(FIELDS) or not item.twice.isdisjoint(FIELDS):
        raise _wrong(path, name, "expected dtype, shape and data_offsets, each once")
    dtype, shape, offsets = (item[field] for field in FIELDS)
    if isinstance(dtype, dict) and list(dtype.values()) == [None]:
        [dtype] = dtype
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _wrong(path, name, f"type {_quoted(dtype)} is unknown")
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        raise _wrong(path, name, "its shape is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise _wrong(path, name, "its data_offsets are not two offsets")
    if len(item) > len(FIELDS) and _depth(item) > MAX_DEPTH - 1:
        raise _wrong(path, name, "its further fields are nested too deeply")
    elements = 1
    for count in shape:
        elements *= count
        if elements >= MAX_COUNT:
            break
    bits = DTYPE_BITS[dtype] * elements
    if bits >= MAX_COUNT:
        raise _wrong(path, name, f"shape {shape[:8]} is larger than a file can be")
    begin, end = offsets
    if bits % 8 or end - begin != bits // 8:
        raise _wrong(path, name, f"{end - begin} bytes, but {dtype} of shape {shape[:8]} needs {bits / 8:g}")
    return TensorEntry(name, dtype, tuple(shape), data_offset + begin, end - begin)


def _wrong(path: str, name: str, what: str) -> IntegrityError:
    return IntegrityError(f"{path}: tensor {_quoted(name)}: {what}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_COUNT


class _Object(dict[str, Any]):
    """A JSON object; of names that occur twice the last counts."""

    def __init__(self, pairs: Iterable[tuple[str, Any]]) -> None:
        found = list(pairs)
        super().__init__(found)
        self.twice: set[str] = set()
        if len(self) != len(found):
            names = [name for name, _ in found]
            self.twice = {name for name in self if names.count(name) > 1}


def _decode(data: bytes) -> Any:
    """Decode JSON in UTF-8, strictly. Raises: ValueError, RecursionError."""
    found = json.loads(
        data.decode("utf-8"),
        object_pairs_hook=_Object,
        parse_constant=_refuse_constant,
        parse_int=_to_number,
        parse_float=_to_float,
    )
    if _HALF_ESCAPE.search(data) is not None:
        json.dumps(found, ensure_ascii=False).encode("utf-8")  # a lone half of a surrogate pair is an error
    return found


_HALF_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


def _to_number(text: str) -> int | float:
    """Convert a JSON integer; one that is too large for a size becomes a float, as in the library."""
    return int(text) if text != "-0" and len(text) <= 20 else _to_float(text)


def _to_float(text: str) -> float:
    found = float(text)
    if math.isinf(found):
        raise ValueError(f"{text[:20]}... is out of range")
    return found


def _depth(value: Any) -> int:
    """Return the depth of nesting, which json.loads itself bounds."""
    if isinstance(value, dict | list):
        return 1 + max(map(_depth, value.values() if isinstance(value, dict) else value), default=0)
    return 0


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _quoted(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _short(error: BaseException) -> str:
    return str(error).split("\n", 1)[0][:120]
