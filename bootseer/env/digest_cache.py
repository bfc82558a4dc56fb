"""Digests of large files on this node, kept from start to start as long as a file does not change.

    CACHE/env/digests.json    by path: device, inode, size, mtime and ctime in ns, SHA-256

A file counts as unchanged by all of these. One that was changed just before it was hashed is not kept: a further
change could have the same times.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

import msgspec

from bootseer import cache_folder
from bootseer.blocks.tree_files import write_whole
from bootseer.errors import BootseerError

LEAST_BYTES = 4 << 20  # below that a file is hashed faster than it is looked up
MOST_KEPT = 5_000
MOST_FILE_BYTES = 8 << 20
SETTLED_S = 2.0  # since its last change
NAME = "digests.json"

_Row = tuple[int, int, int, int, int, str]


class DigestCache:
    """Without a folder of the cache nothing is kept."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._rows: dict[str, _Row] | None = None
        self._new: dict[str, _Row] = {}

    def find(self, path: str, info: os.stat_result) -> str:
        """The digest of a file that was looked at just now; "" if it is not known."""
        if info.st_size < LEAST_BYTES:
            return ""
        row = self._read().get(path)
        return row[5] if row is not None and row[:5] == _stamp(info) else ""

    def add(self, path: str, info: os.stat_result, digest: str) -> None:
        """Args: info: of before it was hashed."""
        if info.st_size >= LEAST_BYTES and info.st_ctime < time.time() - SETTLED_S:
            self._new[path] = (*_stamp(info), digest)

    def keep(self) -> None:
        """Writes what is new; if that fails it is hashed again."""
        if not self._new:
            return
        rows = {**self._read(), **self._new}
        self._new = {}
        self._rows = dict(list(rows.items())[-MOST_KEPT:])
        try:
            folder = self._folder()
            cache_folder.make_private(folder)
            write_whole(folder, NAME, msgspec.json.encode(self._rows))
        except (BootseerError, OSError):
            pass

    def _folder(self) -> str:
        return os.path.join(cache_folder.prepare(cache_folder.locate(self._environ, os.geteuid())), "env")

    def _read(self) -> dict[str, _Row]:
        if self._rows is None:
            self._rows = {}
            try:
                with open(os.path.join(self._folder(), NAME), "rb") as file:
                    data = file.read(MOST_FILE_BYTES + 1)
                if len(data) <= MOST_FILE_BYTES:
                    self._rows = msgspec.json.decode(data, type=dict[str, _Row])
            except (BootseerError, OSError, msgspec.MsgspecError):
                pass
        return self._rows


def _stamp(info: os.stat_result) -> tuple[int, int, int, int, int]:
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns
