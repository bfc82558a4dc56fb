"""Writes portions of an environment: `python -P -m bootseer.env.unpack_helper FD`, started by unpack_helpers.py.

One interpreter uses one core; so several do this. In, by stdin, are lines of JSON: an Order when it is known which
tree, a Begin when that was opened, then the places of portions in the memory FD, which both see. Out, by stdout:
what became of each, and every now and then how far it is. Stdin ends with whoever started it, and so does this;
if it is busy then, at the next batch.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING

import msgspec

from bootseer.env.env_tree import StoredTree
from bootseer.errors import BootseerError, IntegrityError
from bootseer.storage.os_errors import map_os_errors
from bootseer.tree.index import Index
from bootseer.tree.materialise import Progress, write_portion
from bootseer.tree.materialise_helpers import Owners
from bootseer.tree.safe_folders import FOLDER

if TYPE_CHECKING:
    from bootseer.tree.reading import BlockSource

MOST_LINE_BYTES = 1 << 20
_SAY_S = 0.1  # often enough for a progress bar; each line wakes somebody who then takes the core
_LATE = (
    *("bootseer.blocks.cache", "bootseer.blocks.local", "bootseer.storage.open", "bootseer.storage.page_cache"),
    *("bootseer.tree.head", "bootseer.tree.materialise_reading", "lz4.frame", "blake3"),
)


class Order(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Which tree."""

    url: str  # of its folder
    digest: str


class Begin(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """It was opened and checked."""

    offset: int  # of its Blocks in the memory
    length: int  # bytes
    folder: str  # where files are written
    device: int  # which folder that is, whoever else may give one the same name
    inode: int
    owners: Owners


class Blocks(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What reading blocks takes of an index."""

    packs: list[tuple[bytes, int]]
    blocks: bytes


class Given(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A portion, as the index of just its files."""

    number: int
    offset: int  # in the memory
    length: int  # bytes


class Said(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What became of a portion since the last time."""

    number: int
    bytes: int = 0
    files: int = 0
    is_done: bool = False
    skipped: Mapping[str, int] = {}  # when it is done
    error: str = ""  # then nothing more comes
    kind: str = ""  # name of the error's class


def main() -> None:
    """Ends when stdin does."""
    memory_fd, source = int(sys.argv[1]), sys.stdin.buffer
    said_fd = os.dup(1)
    os.dup2(2, 1)  # for whatever a library may print
    number = -1

    def say(said: Said) -> None:
        os.write(said_fd, msgspec.json.encode(said) + b"\n")  # one call: lines are short

    _warm()
    try:
        line = source.readline(MOST_LINE_BYTES)
        if not line:
            return  # it is not needed
        order = msgspec.json.decode(line, type=Order)
        tree = StoredTree(order.url, order.digest)
        line = source.readline(MOST_LINE_BYTES)
        if not line:
            return  # it is not needed
        begin = msgspec.json.decode(line, type=Begin)
        root_fd = _open_root(begin)
        with tree.open_blocks(_read_index(memory_fd, begin)) as blocks:
            while line := source.readline(MOST_LINE_BYTES):
                given = msgspec.json.decode(line, type=Given)
                number = given.number
                progress = _Progress(number, say)
                skipped = _write(memory_fd, given, begin, root_fd, blocks, progress.count)
                progress.end(skipped)
    except BootseerError as error:
        say(Said(number=number, error=str(error), kind=type(error).__name__))


class _Progress:
    """Of a portion."""

    def __init__(self, number: int, say: Callable[[Said], None]) -> None:
        self._number, self._say = number, say
        self._bytes = self._files = 0
        self._said_s = time.monotonic()

    def count(self, written_bytes: int, files: int) -> None:
        self._bytes += written_bytes
        self._files += files
        now_s = time.monotonic()
        if now_s - self._said_s >= _SAY_S:
            self._said_s = now_s
            self._say(Said(number=self._number, bytes=self._bytes, files=self._files))
            self._bytes = self._files = 0

    def end(self, skipped: Mapping[str, int]) -> None:
        self._say(Said(number=self._number, bytes=self._bytes, files=self._files, is_done=True, skipped=skipped))


def _warm() -> None:
    """What is imported late, where it is first used; what is not installed is missed there."""
    for name in _LATE:
        try:
            import_module(name)
        except ImportError:
            pass


def _read_index(memory_fd: int, begin: Begin) -> Index:
    """One that only says where blocks are."""
    found = msgspec.msgpack.decode(os.pread(memory_fd, begin.length, begin.offset), type=Blocks)
    return Index(
        tool="", packs=found.packs, blocks=found.blocks, parents=[], names=[], modes=[], uids=[], gids=[],
        mtimes_ns=[], sizes=[], runs=[], targets=[], links=[],
    )  # fmt: skip


def _open_root(begin: Begin) -> int:
    with map_os_errors(begin.folder):
        fd = os.open(begin.folder, FOLDER)
        found = os.fstat(fd)
    if (found.st_dev, found.st_ino) != (begin.device, begin.inode):
        raise IntegrityError(f"{begin.folder}: somebody else changes folders where the environment is unpacked")
    return fd


def _write(
    memory_fd: int, given: Given, begin: Begin, root_fd: int, blocks: BlockSource, on_progress: Progress
) -> Mapping[str, int]:
    index = msgspec.msgpack.decode(os.pread(memory_fd, given.length, given.offset), type=Index)
    return write_portion(
        index,
        begin.folder,
        root_fd,
        blocks,
        owners=begin.owners,
        on_progress=on_progress,
    )


if __name__ == "__main__":
    import gc

    gc.disable()  # an index is many objects, none of them garbage
    try:
        main()
    except (BrokenPipeError, KeyboardInterrupt):
        pass  # whoever started it is gone
    os._exit(0)  # nothing has to be put in order
