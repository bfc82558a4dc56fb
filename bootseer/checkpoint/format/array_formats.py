"""PURE: sizes that the headers of single-array and GGUF files promise, and the ends of Zstandard frames.

Sources: numpy/lib/format.py; github.com/ggml-org/ggml, docs/gguf.md; RFC 8878, 3.1.1.
"""

from __future__ import annotations

import ast
import math
import re

from bootseer.checkpoint.format.file_parts import IncompleteFile, Parts, number

# elements and bytes of one block, by type number
_GGML_BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 36),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292),
    24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 30: (1, 2),
}  # fmt: skip
_GGUF_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_GGUF_TEXT, _GGUF_ARRAY = 8, 9
_MAX_ITEMS = 1 << 20  # of a GGUF header


def check_npy(parts: Parts) -> None:
    """Check that a file of numpy.save is complete. Raises: Torn."""
    if parts.get(0, min(6, parts.size)) != b"\x93NUMPY":
        raise IncompleteFile("is not a numpy.save file")
    width = 2 if parts.get(6, 1) == b"\1" else 4
    start = 8 + width
    length = number(parts, 8, width)
    try:
        header = ast.literal_eval(parts.get(start, length).decode("latin-1"))
        shape, kind = header["shape"], str(header["descr"])
        count = math.prod(int(each) for each in shape)
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError) as error:
        raise IncompleteFile("has an unreadable numpy.save header") from error
    found = re.fullmatch(r"[<>|=]?[a-zA-Z](\d+)", kind)
    if found is None or "O" in kind:
        return  # records or pickles
    size = count * int(found[1]) * (4 if "U" in kind else 1)
    if start + length + size > parts.size:
        raise IncompleteFile(f"ends at byte {parts.size}, its array at {start + length + size}")


def check_gguf(parts: Parts) -> None:
    """Check that a GGUF file is complete. Raises: Torn."""
    if parts.get(0, min(4, parts.size)) != b"GGUF":
        raise IncompleteFile("is not a GGUF file")
    tensors, pairs, at = number(parts, 8, 8), number(parts, 16, 8), 24
    if max(tensors, pairs) > _MAX_ITEMS:
        raise IncompleteFile("has an impossible GGUF header")
    alignment = 32
    for _ in range(pairs):
        length = number(parts, at, 8)
        key = parts.get(at + 8, length) if length < 1 << 16 else b""
        kind, at = number(parts, at + 8 + length, 4), at + 12 + length
        if key == b"general.alignment" and _GGUF_SIZES.get(kind) == 4:
            alignment = max(1, number(parts, at, 4))
        at = _skip_gguf(parts, at, kind)
    end = 0
    for _ in range(tensors):
        at += 8 + number(parts, at, 8)
        dimensions = number(parts, at, 4)
        if dimensions > 8:
            raise IncompleteFile("has an impossible GGUF header")
        count = math.prod(number(parts, at + 4 + 8 * each, 8) for each in range(dimensions))
        at += 4 + 8 * dimensions
        elements, size = _GGML_BLOCKS.get(number(parts, at, 4), (1, 0))
        end = max(end, number(parts, at + 4, 8) + count // elements * size)
        at += 12
    start = -(-at // alignment) * alignment
    if tensors and start + end > parts.size:
        raise IncompleteFile(f"ends at byte {parts.size}, its tensors at {start + end}")


def _skip_gguf(parts: Parts, at: int, kind: int) -> int:
    if kind == _GGUF_TEXT:
        return at + 8 + number(parts, at, 8)
    if kind != _GGUF_ARRAY:
        if kind not in _GGUF_SIZES:
            raise IncompleteFile("has an unreadable GGUF header")
        return at + _GGUF_SIZES[kind]
    inner, count, at = number(parts, at, 4), number(parts, at + 4, 8), at + 12
    if inner in _GGUF_SIZES:
        return at + count * _GGUF_SIZES[inner]
    for _ in range(min(count, parts.size)):
        at = _skip_gguf(parts, at, inner)
    return at


def zstd_end(parts: Parts, at: int = 0) -> int:
    """Return the end of a Zstandard frame, without unpacking it. Raises: Torn."""
    if number(parts, at, 4) != 0xFD2FB528:
        raise IncompleteFile("is not a Zstandard frame")
    flags = number(parts, at + 4, 1)
    size_flag, is_single, has_sum, dictionary = flags >> 6, flags >> 5 & 1, flags >> 2 & 1, flags & 3
    at += 5 + (not is_single) + (0, 1, 2, 4)[dictionary] + ((1 if is_single else 0), 2, 4, 8)[size_flag]
    while True:
        block = number(parts, at, 3)
        kind, length = block >> 1 & 3, block >> 3
        at += 3 + (1 if kind == 1 else length)
        if block & 1:
            return at + 4 * has_sum
