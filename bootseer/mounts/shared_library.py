"""PURE: the name by which programs ask for a shared library, read from its ELF file.

The loader's own tool (ldconfig) makes a link of that name beside the file; where a library comes by a bind, we do.
In: a function that reads bytes at an offset. Out: the name, "" for files that are no library.

Source: System V ABI, chapters 4 and 5; elf(5).
"""

from __future__ import annotations

import struct
from collections.abc import Callable

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_PROGRAM = struct.Struct("<IIQQQQQQ")
_DYNAMIC = struct.Struct("<qQ")
_ELF64_LITTLE = b"\x7fELF\x02\x01"
_LIBRARY = 3  # ET_DYN
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NULL, _DT_STRTAB, _DT_SONAME = 0, 5, 14
_MOST_PROGRAMS = 256
_MOST_DYNAMIC_BYTES = 64 << 10
_MOST_NAME_BYTES = 255

Read = Callable[[int, int], bytes]  # offset, size: as much as there is of it


def find_soname(read: Read) -> str:
    """DT_SONAME of a 64-bit little-endian library; "" where there is none, or it could not be a file's name."""
    try:
        name = _find(read)
    except struct.error:
        return ""
    text = name.decode("ascii", "replace")
    return text if text.isprintable() and text.isascii() and "/" not in text and text not in (".", "..") else ""


def _find(read: Read) -> bytes:
    header = _HEADER.unpack(read(0, _HEADER.size))
    if not header[0].startswith(_ELF64_LITTLE) or header[1] != _LIBRARY:
        return b""
    table, size, count = header[5], header[9], header[10]
    if size != _PROGRAM.size or not 0 < count <= _MOST_PROGRAMS:
        return b""
    programs = list(_PROGRAM.iter_unpack(read(table, size * count)))
    loads = [(address, length, offset) for kind, _, offset, address, _, length, *_ in programs if kind == _PT_LOAD]
    strings = name = -1
    for kind, _, offset, _, _, length, *_ in programs:
        if kind != _PT_DYNAMIC:
            continue
        data = read(offset, min(length, _MOST_DYNAMIC_BYTES))
        for tag, value in _DYNAMIC.iter_unpack(data[: len(data) // _DYNAMIC.size * _DYNAMIC.size]):
            if tag == _DT_NULL:
                break
            if tag == _DT_STRTAB:
                strings = value
            elif tag == _DT_SONAME:
                name = value
    for address, length, offset in loads:
        if name >= 0 and address <= strings < address + length:
            place = strings - address + offset + name
            text, end, _ = read(place, _MOST_NAME_BYTES + 1).partition(b"\0")
            return text if end else b""
    return b""
