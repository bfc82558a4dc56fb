"""Reads the hot files of a mounted tree into the kernel's page cache, in the order in which a start needs them.

A program that starts reads one small file after the other, and waits each time for the daemon to be woken up.
Here many reads are on their way at once, ahead of the program. Never in the daemon, which must not read from what
it has mounted: in the process that brings hot blocks (tree_bringer.py), by a thread, as reads of a mount can wait.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

from bootseer.mounts.read_ahead_plan import HotPieces, Piece
from bootseer.storage.memory_limits import Memory
from bootseer.tree.index import BLOCK_BYTES

BATCH_BLOCKS = 8  # read at once; a program's own read waits behind so many
POLL_S = 0.005  # between looks whether blocks have come
FREE_SHARE = 2  # hot files take at most one part in so many of the free memory


def has_room(blocks: int, memory: Memory) -> bool:
    """Whether what is read ahead drives nobody out. Pure."""
    return blocks * BLOCK_BYTES <= memory.free_bytes // FREE_SHARE


class ReadAhead:
    """One run, of one tree. `files`: how many pieces were asked for."""

    def __init__(
        self,
        root: str,
        find: Callable[[], HotPieces],
        hot: Sequence[int],
        missing: Callable[[Sequence[int]], Sequence[int]],
    ) -> None:
        """Args: find: where the hot blocks lie; missing: those of some blocks that are not in the cache yet."""
        self.files = 0
        self._root, self._find, self._hot, self._missing = root, find, hot, missing
        self._pieces: HotPieces
        self._is_all = threading.Event()

    def note_all(self) -> None:
        """No more blocks come: what is missing now is left to whoever reads it."""
        self._is_all.set()

    def prepare(self) -> None:
        """Before `run`; the tree need not be there yet. Raises: what `find` does."""
        self._pieces = self._find()

    def run(self) -> None:
        """In a thread. Raises: OSError when the tree is not there."""
        root = os.open(self._root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for at in range(0, len(self._hot), BATCH_BLOCKS):
                batch = self._hot[at : at + BATCH_BLOCKS]
                missing = self._missing(batch)
                while missing and not self._is_all.wait(POLL_S):
                    missing = self._missing(batch)
                left_out = set(missing)
                self._read(root, self._pieces.of([number for number in batch if number not in left_out]))
        finally:
            os.close(root)

    def _read(self, root: int, pieces: Sequence[Piece]) -> None:
        """Waits for the last one: so many are on their way at most."""
        fds: dict[bytes, int] = {}
        try:
            for path, offset, length in pieces:
                fd = fds.get(path)
                if fd is None:
                    fd = fds[path] = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root)
                os.posix_fadvise(fd, offset, length, os.POSIX_FADV_WILLNEED)
            self.files += len(pieces)
            if pieces:
                last = pieces[-1]
                os.pread(fds[last.path], 1, last.offset + last.length - 1)
        finally:
            for fd in fds.values():
                os.close(fd)
