"""Files of an fsspec file system: their metadata, and new ones. In the calling thread."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from bootseer.errors import NotFound, StorageError
from bootseer.storage.protocol import Stat

_ETAGS = ("ETag", "etag", "e_tag", "generation", "version_id")
_MARKS = ("mtime", "ino", "LastModified", "last_modified", "updated", "modification_time", "created", "size")
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "modification_time", "created")


class NewFile:
    """A file that is being written, under the name `aside` if given. Blocking: for a thread."""

    def __init__(self, fs: Any, full: str, aside: str) -> None:
        self._fs = fs
        self._full = full
        self._aside = aside
        self._is_given_up = False
        self._file = fs.open(aside, "wb") if aside else fs.open(full, "wb", autocommit=False)

    def write(self, data: memoryview) -> None:
        while data:
            if self._is_given_up:
                raise OSError(errno.ECANCELED, "the write was cancelled")
            count = self._file.write(data)
            data = data[len(data) if count is None else count :]

    def finish(self) -> None:
        self._file.close()
        if self._is_given_up:
            raise OSError(errno.ECANCELED, "the write was cancelled")
        if self._fs.exists(self._full):
            raise FileExistsError(self._full)
        if self._aside:
            self._fs.mv(self._aside, self._full)
        else:
            self._file.commit()

    def discard(self) -> None:
        self._is_given_up = True
        try:
            self._file.close()
        finally:
            if self._aside:
                try_remove(self._fs, self._aside)
            else:
                self._file.discard()


def to_stat(info: Mapping[str, Any], shown: str) -> Stat:
    if info.get("type") != "file":
        raise NotFound(f"{shown}: is a directory, not a file")
    size = info.get("size")
    if not isinstance(size, int):
        raise StorageError(f"{shown}: the file system does not report the file's size")
    for name in _ETAGS:
        if info.get(name):
            return Stat(size, str(info[name]))
    marks = [(name, str(info[name])) for name in _MARKS if info.get(name) is not None]
    if not [name for name, _ in marks if name != "size"]:
        return Stat(size, "")
    return Stat(size, hashlib.sha256(repr(marks).encode()).hexdigest()[:24])


def mtime_s(info: Mapping[str, Any]) -> float:
    for name in _TIMES:
        value = info.get(name)
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, datetime):
            return value.timestamp()
    return 0.0


def make_parent_directory(fs: Any, full: str) -> None:
    parent = parent_of(full).rstrip("/")
    if parent:
        try:
            fs.makedirs(parent, exist_ok=True)
        except NotImplementedError:
            pass  # a store without directories


def parent_of(full: str) -> str:
    directory, slash, _ = full.rpartition("/")
    return directory + slash


def try_remove(fs: Any, full: str) -> None:
    try:
        fs.rm_file(full)
    except Exception:
        pass  # the earlier error counts
