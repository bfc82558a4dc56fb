"""PURE: the name by which programs load a shared library (soname), and its search paths, from its ELF file.

The loader's own tool (ldconfig) makes a link of that name beside the file; for a bound library Bootseer does.
In: a function that reads bytes at an offset. Out: the name, "" for files that are no library; or the paths where
the loader searches for other libraries.

Source: System V ABI, chapters 4 and 5; elf(5).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_PROGRAM = struct.Struct("<IIQQQQQQ")
_DYNAMIC = struct.Struct("<qQ")
_ELF64_LITTLE = b"\x7fELF\x02\x01"
_PROGRAM_TYPE, _LIBRARY = 2, 3  # ET_EXEC, ET_DYN
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NULL, _DT_STRTAB, _DT_SONAME, _DT_RPATH, _DT_RUNPATH = 0, 5, 14, 15, 29
_MAX_PROGRAMS = 256
_MAX_DYNAMIC_BYTES = 64 << 10
_MAX_NAME_BYTES = 255
_MAX_PATHS_BYTES = 64 << 10

Read = Callable[[int, int], bytes]  # offset, size: as much of it as exists


def find_soname(read: Read) -> str:
    """Return DT_SONAME of a 64-bit little-endian library; "" if absent or not a valid file name."""
    try:
        names = _find(read, (_DT_SONAME,), (_LIBRARY,), _MAX_NAME_BYTES)
    except struct.error:
        return ""
    text = names[0].decode("ascii", "replace") if names else ""
    return text if text.isprintable() and text.isascii() and "/" not in text and text not in (".", "..") else ""


def find_run_paths(read: Read) -> list[bytes]:
    """Return the search paths of a 64-bit little-endian program or library (DT_RPATH, DT_RUNPATH)."""
    try:
        found = _find(read, (_DT_RPATH, _DT_RUNPATH), (_PROGRAM_TYPE, _LIBRARY), _MAX_PATHS_BYTES)
    except struct.error:
        return []
    return [path for each in found for path in each.split(b":") if path]


def _find(read: Read, wanted: Sequence[int], types: Sequence[int], max_bytes: int) -> list[bytes]:
    """Return the strings that these entries of the dynamic section name."""
    header = _HEADER.unpack(read(0, _HEADER.size))
    if not header[0].startswith(_ELF64_LITTLE) or header[1] not in types:
        return []
    table, size, count = header[5], header[9], header[10]
    if size != _PROGRAM.size or not 0 < count <= _MAX_PROGRAMS:
        return []
    programs = list(_PROGRAM.iter_unpack(read(table, size * count)))
    loads = [(address, length, offset) for kind, _, offset, address, _, length, *_ in programs if kind == _PT_LOAD]
    strings = -1
    names = []
    for kind, _, offset, _, _, length, *_ in programs:
        if kind != _PT_DYNAMIC:
            continue
        data = read(offset, min(length, _MAX_DYNAMIC_BYTES))
        for tag, value in _DYNAMIC.iter_unpack(data[: len(data) // _DYNAMIC.size * _DYNAMIC.size]):
            if tag == _DT_NULL:
                break
            if tag == _DT_STRTAB:
                strings = value
            elif tag in wanted:
                names.append(value)
    for address, length, offset in loads:
        if address <= strings < address + length:
            texts = [read(strings - address + offset + name, max_bytes + 1).partition(b"\0") for name in names]
            return [text for text, end, _ in texts if end]
    return []
