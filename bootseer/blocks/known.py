"""What one handle knows of a tree's cache: sums of the blocks it has seen there, and which turned out damaged.

Sums never change, as blocks do not; so what was read once from the shared files is good for as long as the handle
lives, and a read of the cache costs no look at them. They are copied, not mapped: a map of a file that shrinks, or
of a full disk, kills its reader.
"""

from __future__ import annotations

import mmap
import os

from bootseer.blocks.present import HEADER_BYTES, PRESENT
from bootseer.blocks.sums import BLOCK_GRANULES, BLOCK_SUMS, UNKNOWN, as_sum
from bootseer.blocks.tree_files import TreeFiles

_MARK = bytes([PRESENT])


class Known:
    """`sums`: of each granule, UNKNOWN for those not seen yet. `suspects`: damaged blocks, not to be read again.

    Thread-safe: sums of a block are set from its last one to its first, which is the one that is looked at.
    """

    def __init__(self, block_count: int) -> None:
        # Anonymous memory: what is never touched of a large tree costs nothing.
        size = max(1, block_count) * BLOCK_SUMS.size
        self.sums = memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)).cast("I")
        self.suspects: set[int] = set()

    def learn(self, files: TreeFiles, first: int, last: int) -> bool:
        """Takes in what others have filled of granules `first` to before `last`; whether all of it is there."""
        for number in range(first // BLOCK_GRANULES, (last - 1) // BLOCK_GRANULES + 1):
            if self.sums[number * BLOCK_GRANULES] != UNKNOWN:
                continue
            if number in self.suspects:
                return False
            try:
                if os.pread(files.present, 1, HEADER_BYTES + number) != _MARK:
                    return False
                stored = os.pread(files.sums, BLOCK_SUMS.size, number * BLOCK_SUMS.size)
            except OSError:
                return False
            if len(stored) != BLOCK_SUMS.size or UNKNOWN in (sums := BLOCK_SUMS.unpack(stored)):
                self.suspects.add(number)
                return False
            self.note(number, sums)
        return True

    def is_right(self, files: TreeFiles, granule: int, crc: int) -> bool:
        """Whether a granule with this CRC32C is right: the slow way, for what did not fit at first sight."""
        if self.sums[granule] == UNKNOWN and not self.learn(files, granule, granule + 1):
            return False
        if as_sum(crc) == self.sums[granule]:
            return True
        self.suspect(granule, granule + 1)
        return False

    def suspect(self, first: int, last: int) -> None:
        """What is in these granules is not what was written."""
        for number in range(first // BLOCK_GRANULES, (last - 1) // BLOCK_GRANULES + 1):
            self.suspects.add(number)
            self.forget(number)

    def note(self, number: int, sums: tuple[int, ...]) -> None:
        """A block is there, with these sums."""
        begin = number * BLOCK_GRANULES
        for at in range(BLOCK_GRANULES - 1, -1, -1):
            self.sums[begin + at] = sums[at]

    def forget(self, number: int) -> None:
        begin = number * BLOCK_GRANULES
        for at in range(BLOCK_GRANULES):
            self.sums[begin + at] = UNKNOWN
