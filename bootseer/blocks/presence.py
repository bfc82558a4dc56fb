"""Presence bitmap of a tree: which blocks are cached, in a map to write to and in a copy that survives power cuts.

`present`: a header that names the boot in which it was written, then one byte a block. A byte that was set after
its data was handed to the kernel is right for as long as the kernel runs. After another boot only `saved` counts:
the bytes of blocks whose data was on disk when it was written. A file that does not match counts as an empty map.
"""

from __future__ import annotations

import hashlib
import struct

HEADER = struct.Struct("<16s40sI4x")  # mark, boot, blocks
HEADER_BYTES = HEADER.size
ABSENT, PRESENT = 0, 1  # any other byte: absent
_MARK = b"bootseer-map/1\n\0"
_SAVED = struct.Struct("<16s32sI4x")  # mark, tree, blocks; then a byte a block; then the SHA-256 of it all
_SAVED_MARK = b"bootseer-saved/1"
_DIGEST_BYTES = 32
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def read_boot_id() -> str:
    """Return the id of this boot of the kernel; empty where it has none: then no map is trusted."""
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return file.read(40).strip()
    except (OSError, UnicodeDecodeError):
        return ""


def make_header(boot_id: str, block_count: int) -> bytes:
    return HEADER.pack(_MARK, boot_id.encode("ascii", "replace")[:40], block_count)


def is_of_boot(header: bytes, boot_id: str, block_count: int) -> bool:
    """Return whether a map with this header can be trusted."""
    return bool(boot_id) and header == make_header(boot_id, block_count)


def encode_saved(tree: str, marks: bytes) -> bytes:
    """Return the contents of the file `saved`; `marks` has a byte for each block."""
    body = _SAVED.pack(_SAVED_MARK, bytes.fromhex(tree), len(marks)) + marks
    return body + hashlib.sha256(body).digest()


def decode_saved(data: bytes, tree: str, block_count: int) -> bytes | None:
    """Return the marks in a file `saved` of this tree; None for anything else."""
    head = _SAVED.pack(_SAVED_MARK, bytes.fromhex(tree), block_count)
    body = data[:-_DIGEST_BYTES]
    if len(data) != len(head) + block_count + _DIGEST_BYTES or not body.startswith(head):
        return None
    return body[len(head) :] if hashlib.sha256(body).digest() == data[-_DIGEST_BYTES:] else None
