"""Unpack process, which writes portions of an environment: `python -P -m bootseer.env.restore.unpack_helper FD`.

Started by unpack_helpers.py. Several run, as one interpreter uses one core. It reads lines of JSON from stdin: an
Order, then a Begin once the tree is opened, then the places of portions in the shared memory FD. It writes to
stdout the results of portions and periodic progress. It ends when stdin is closed; if busy, at the next batch.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING

import msgspec

from bootseer.env.store.env_tree import StoredTree
from bootseer.errors import BootseerError, IntegrityError
from bootseer.storage.os_errors import map_os_errors
from bootseer.tree.index import Index
from bootseer.tree.unpack.helpers import Owners
from bootseer.tree.unpack.safe_directories import DIRECTORY
from bootseer.tree.unpack.tree import Progress, unpack_portion

if TYPE_CHECKING:
    from bootseer.tree.reading import BlockSource

MAX_LINE_BYTES = 1 << 20
_REPORT_S = 0.1  # often enough for a progress bar; each line wakes a process that then takes the core
_LATE = (
    *("bootseer.blocks.cache", "bootseer.blocks.local", "bootseer.storage.open", "bootseer.linux.page_cache"),
    *("bootseer.tree.head", "bootseer.tree.unpack.reading", "lz4.frame", "blake3"),
)


class UnpackTree(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    url: str  # of its directory
    digest: str


class UnpackStart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Start of unpacking; the tree was opened and validated."""

    offset: int  # of its Blocks in the shared memory
    length: int  # bytes
    folder: str  # directory for the files
    device: int  # device number of the directory, which protects against a replaced path
    inode: int
    owners: Owners


class Blocks(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The part of an index that reading blocks needs."""

    packs: list[tuple[bytes, int]]
    blocks: bytes


class PortionPlace(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A portion, as the index of only its files."""

    number: int
    offset: int  # in the shared memory
    length: int  # bytes


class PortionReport(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Progress of a portion since the last report."""

    number: int
    bytes: int = 0
    files: int = 0
    is_done: bool = False
    skipped: Mapping[str, int] = {}  # set at the end
    error: str = ""  # the last report then
    kind: str = ""  # name of the error's class


def main() -> None:
    """Process portions until stdin is closed."""
    memory_fd, source = int(sys.argv[1]), sys.stdin.buffer
    said_fd = os.dup(1)
    os.dup2(2, 1)  # for output of libraries
    number = -1

    def say(said: PortionReport) -> None:
        os.write(said_fd, msgspec.json.encode(said) + b"\n")  # one call, as lines are short

    _warm()
    try:
        line = source.readline(MAX_LINE_BYTES)
        if not line:
            return  # this process is not needed
        order = msgspec.json.decode(line, type=UnpackTree)
        tree = StoredTree(order.url, order.digest)
        line = source.readline(MAX_LINE_BYTES)
        if not line:
            return  # this process is not needed
        begin = msgspec.json.decode(line, type=UnpackStart)
        root_fd = _open_root(begin)
        with tree.open_blocks(_read_index(memory_fd, begin)) as blocks:
            while line := source.readline(MAX_LINE_BYTES):
                given = msgspec.json.decode(line, type=PortionPlace)
                number = given.number
                progress = _Progress(number, say)
                skipped = _write(memory_fd, given, begin, root_fd, blocks, progress.count)
                progress.end(skipped)
    except BootseerError as error:
        say(PortionReport(number=number, error=str(error), kind=type(error).__name__))


class _Progress:
    def __init__(self, number: int, say: Callable[[PortionReport], None]) -> None:
        self._number, self._say = number, say
        self._bytes = self._files = 0
        self._said_s = time.monotonic()

    def count(self, written_bytes: int, files: int) -> None:
        self._bytes += written_bytes
        self._files += files
        now_s = time.monotonic()
        if now_s - self._said_s >= _REPORT_S:
            self._said_s = now_s
            self._say(PortionReport(number=self._number, bytes=self._bytes, files=self._files))
            self._bytes = self._files = 0

    def end(self, skipped: Mapping[str, int]) -> None:
        self._say(
            PortionReport(number=self._number, bytes=self._bytes, files=self._files, is_done=True, skipped=skipped)
        )


def _warm() -> None:
    """Import modules early that are otherwise imported on first use; missing ones fail there."""
    for name in _LATE:
        try:
            import_module(name)
        except ImportError:
            pass


def _read_index(memory_fd: int, begin: UnpackStart) -> Index:
    """Return an index that contains only the places of blocks."""
    found = msgspec.msgpack.decode(os.pread(memory_fd, begin.length, begin.offset), type=Blocks)
    return Index(
        tool="", packs=found.packs, blocks=found.blocks, parents=[], names=[], modes=[], uids=[], gids=[],
        mtimes_ns=[], sizes=[], runs=[], targets=[], links=[],
    )  # fmt: skip


def _open_root(begin: UnpackStart) -> int:
    with map_os_errors(begin.folder):
        fd = os.open(begin.folder, DIRECTORY)
        found = os.fstat(fd)
    if (found.st_dev, found.st_ino) != (begin.device, begin.inode):
        raise IntegrityError(f"{begin.folder}: another process changes directories during unpacking")
    return fd


def _write(
    memory_fd: int,
    given: PortionPlace,
    begin: UnpackStart,
    root_fd: int,
    blocks: BlockSource,
    on_progress: Progress,
) -> Mapping[str, int]:
    index = msgspec.msgpack.decode(os.pread(memory_fd, given.length, given.offset), type=Index)
    return unpack_portion(
        index,
        begin.folder,
        root_fd,
        blocks,
        owners=begin.owners,
        on_progress=on_progress,
    )


if __name__ == "__main__":
    import gc

    gc.disable()  # an index has many objects, none of them garbage
    try:
        main()
    except (BrokenPipeError, KeyboardInterrupt):
        pass  # the parent has ended
    os._exit(0)  # no cleanup is needed
