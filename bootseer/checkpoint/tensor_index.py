"""The header of a safetensors file, checked as bytes that anyone may have written.

In: the first bytes of a file and its size. Out: where each tensor lies, as records, nothing of torch. A file is
8 bytes (length of the header, little-endian), the header (JSON), then the tensors' bytes without holes.
Source: github.com/huggingface/safetensors, README, "Format".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from bootseer.errors import IntegrityError, Truncated

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMENSIONS = 64
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
    """One tensor of a file."""

    name: str
    dtype: str  # a key of DTYPE_BITS
    shape: tuple[int, ...]
    offset: int  # bytes, from the start of the file
    size: int  # bytes


class Header(NamedTuple):
    """What a safetensors file says of itself."""

    tensors: Mapping[str, TensorEntry]  # in the order of their bytes
    metadata: Mapping[str, str]
    data_offset: int  # bytes: where the first tensor begins


def header_bytes(start: bytes | memoryview, file_size: int, path: str) -> int:
    """How long the part before the tensors is, from a file's first 8 bytes."""
    if file_size < 8 or len(start) < 8:
        raise Truncated(f"{path}: {file_size} bytes are too few for a safetensors file")
    length = int.from_bytes(start[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise IntegrityError(f"{path}: no safetensors file, or damaged: its header would be {length} bytes long")
    if 8 + length > file_size:
        raise Truncated(f"{path}: the file ends at {file_size} bytes, within its header of {length}")
    return 8 + length


def parse_header(start: bytes | memoryview, file_size: int, path: str) -> Header:
    """Parses and checks the header; `start` is at least `header_bytes` long.

    Raises: IntegrityError for whatever does not add up: each tensor lies within the file, has as many bytes as its
        shape and type need, and none overlaps another or leaves a hole.
    """
    data_offset = header_bytes(start, file_size, path)
    try:
        # the loads of other readers differ on names that come twice: refuse them
        raw = json.loads(bytes(start[8:data_offset]), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{path}: the safetensors header cannot be read: {_short(error)}") from error
    if not isinstance(raw, dict):
        raise IntegrityError(f"{path}: the safetensors header is no JSON object")
    metadata = raw.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise IntegrityError(f"{path}: __metadata__ of the safetensors header is not text by name")
    entries = [_entry(name, item, data_offset, path) for name, item in raw.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.size))
    end = data_offset
    for entry in entries:
        if entry.offset != end:
            what = "overlaps the tensor before it" if entry.offset < end else "leaves a hole before it"
            raise IntegrityError(f"{path}: tensor {_quoted(entry.name)} {what}")
        end += entry.size
    if end > file_size:
        raise Truncated(f"{path}: the file ends at {file_size} bytes, its tensors at {end}")
    if end < file_size:
        raise IntegrityError(f"{path}: {file_size - end} bytes behind the last tensor belong to none")
    return Header({entry.name: entry for entry in entries}, metadata, data_offset)


def parse_weight_map(data: bytes | memoryview, path: str) -> dict[str, str]:
    """Which file holds which tensor, from a `*.safetensors.index.json` as sharded models have it."""
    try:
        raw = json.loads(bytes(data), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{path}: cannot be read: {_short(error)}") from error
    found = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise IntegrityError(f"{path}: has no weight_map of tensor names to files")
    for file in found.values():
        if not is_relative(file):
            raise IntegrityError(f"{path}: {_quoted(file)} leaves the folder")
    return found


def is_relative(path: str) -> bool:
    """Whether a path from outside stays below the folder that it is joined to."""
    return bool(path) and not any(
        part in ("", ".", "..") or "\0" in part or "\\" in part for part in path.split("/")
    )


def _entry(name: str, item: Any, data_offset: int, path: str) -> TensorEntry:
    if not isinstance(item, dict) or set(item) != {"dtype", "shape", "data_offsets"}:
        raise _wrong(path, name, "expected dtype, shape and data_offsets")
    dtype, shape, offsets = item["dtype"], item["shape"], item["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _wrong(path, name, f"type {_quoted(dtype)} is not known")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(map(_is_count, shape)):
        raise _wrong(path, name, "its shape is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise _wrong(path, name, "its data_offsets are not two offsets")
    bits = DTYPE_BITS[dtype]
    for count in shape:  # no product larger than a file can be, whatever the numbers are
        bits *= count
        if bits > 1 << 66:
            raise _wrong(path, name, f"shape {shape[:8]} is larger than a file can be")
    begin, end = offsets
    if bits % 8 or end - begin != bits // 8:
        raise _wrong(path, name, f"{end - begin} bytes, but {dtype} of shape {shape[:8]} needs {bits / 8:g}")
    return TensorEntry(name, dtype, tuple(shape), data_offset + begin, end - begin)


def _wrong(path: str, name: str, what: str) -> IntegrityError:
    return IntegrityError(f"{path}: tensor {_quoted(name)}: {what}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _quoted(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _short(error: BaseException) -> str:
    return str(error).split("\n", 1)[0][:120]
