"""Digests of large files on this node, kept between starts as long as a file does not change.

    CACHE/env/digests.json    by path: device, inode, size, mtime and ctime in ns, SHA-256

A file is unchanged if all of these are. The digest of a recently changed file is not kept: a later change could
have the same times.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

import msgspec

from bootseer import cache_folder
from bootseer.blocks.tree_files import write_whole
from bootseer.errors import BootseerError

MIN_BYTES = 4 << 20  # hashing a smaller file is faster than a search
MAX_KEPT = 5_000
MAX_FILE_BYTES = 8 << 20
SETTLED_S = 2.0  # since its last change
NAME = "digests.json"

_Row = tuple[int, int, int, int, int, str]


class DigestCache:
    """The digests; without a cache directory none are kept."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._rows: dict[str, _Row] | None = None
        self._new: dict[str, _Row] = {}

    def find(self, path: str, info: os.stat_result) -> str:
        """Return the digest of a file with a fresh stat result; "" if it is not known."""
        if info.st_size < MIN_BYTES:
            return ""
        row = self._read().get(path)
        return row[5] if row is not None and row[:5] == _stamp(info) else ""

    def add(self, path: str, info: os.stat_result, digest: str) -> None:
        """Record a digest. Args: info: from before the file was hashed."""
        if info.st_size >= MIN_BYTES and info.st_ctime < time.time() - SETTLED_S:
            self._new[path] = (*_stamp(info), digest)

    def keep(self) -> None:
        """Write the new digests; if that fails, the files are hashed again at the next start."""
        if not self._new:
            return
        rows = {**self._read(), **self._new}
        self._new = {}
        self._rows = dict(list(rows.items())[-MAX_KEPT:])
        try:
            directory = self._directory()
            cache_folder.make_private_dir(directory)
            write_whole(directory, NAME, msgspec.json.encode(self._rows))
        except (BootseerError, OSError):
            pass

    def _directory(self) -> str:
        return os.path.join(cache_folder.prepare(cache_folder.locate(self._environ, os.geteuid())), "env")

    def _read(self) -> dict[str, _Row]:
        if self._rows is None:
            self._rows = {}
            try:
                with open(os.path.join(self._directory(), NAME), "rb") as file:
                    data = file.read(MAX_FILE_BYTES + 1)
                if len(data) <= MAX_FILE_BYTES:
                    self._rows = msgspec.json.decode(data, type=dict[str, _Row])
            except (BootseerError, OSError, msgspec.MsgspecError):
                pass
        return self._rows


def _stamp(info: os.stat_result) -> tuple[int, int, int, int, int]:
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns
