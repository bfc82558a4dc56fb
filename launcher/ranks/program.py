"""Which file a rank's interpreter runs: inside.py, or the compiled form of it.

Compiling inside.py takes 3-5 ms in each rank, loading the compiled file 0.1 ms. Only for the launcher's own
interpreter; another one (PYTHON_EXEC) gets the source, as its format of compiled files is not known.
"""

from __future__ import annotations

import _frozen_importlib_external as external  # importlib's own half that is loaded anyway
import os
import sys

from launcher.ranks.command import INSIDE

UNCHECKED = 1  # flags of a compiled file that is not compared with its source (reproducible builds)


def inside_path(python: str) -> str:
    """The path of the rank-side file for this interpreter; compiles it when that was not done before."""
    if python != sys.executable:
        return INSIDE
    try:
        compiled = external.cache_from_source(INSIDE)
        if not _is_fresh(compiled):
            external.SourceFileLoader("inside", INSIDE).get_code("inside")
            if not _is_fresh(compiled):
                return INSIDE  # the folder cannot be written
    except (OSError, ImportError, NotImplementedError):
        return INSIDE
    return compiled


def _is_fresh(compiled: str) -> bool:
    try:
        with open(compiled, "rb", 0) as file:
            header = file.read(16)
    except FileNotFoundError:
        return False
    magic, flags = header[:4], int.from_bytes(header[4:8], "little")
    if magic != external.MAGIC_NUMBER or flags & ~UNCHECKED or len(header) < 16:
        return False
    source = os.stat(INSIDE)
    stamp = int(source.st_mtime) & 0xFFFFFFFF, source.st_size & 0xFFFFFFFF
    return bool(flags) or stamp == (int.from_bytes(header[8:12], "little"), int.from_bytes(header[12:], "little"))
