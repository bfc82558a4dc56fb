"""Failed reads of a mounted tree, for its daemon: reported to bootrun, remembered, and tried again.

In: reads that failed. Out: a line in the mount's journal (faults.py), before the reader gets its error; the
numbers of the blocks, stored with the tree in the cache. A later mount of the tree, also on another day, reports
which of them still cannot be read, before a program needs them.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence

from bootseer.blocks.fetch import BlockFetcher
from bootseer.blocks.tree_files import write_whole
from bootseer.errors import BootseerError, IntegrityError, NotFound
from bootseer.logs import get_logger
from bootseer.mounts.faults import Journal

_log = get_logger(__name__)

NAME = "unreadable"  # in the directory of the tree in the cache
MAX_REMEMBERED = 64  # blocks
MAX_FILE_BYTES = 256 << 10
RECHECK_S = 3.0  # for all of them


def is_damage(error: BaseException) -> bool:
    """PURE: return whether a store's data of a tree is wrong or missing."""
    return isinstance(error, IntegrityError | NotFound)


class TreeFaults:
    """Failed reads of one daemon; for its event loop."""

    def __init__(self, journal_path: str, folder: str, block_count: int, url: str) -> None:
        """Args: folder: of the tree in the cache; there may be none; url: of its store, for users."""
        self.journal = Journal(journal_path)
        self._directory, self._block_count, self._url = folder, block_count, url
        self._unreadable: dict[int, tuple[str, bool]] = {}  # block: why, and whether it is damage

    def load(self) -> None:
        """Load the blocks that earlier daemons could not read."""
        try:
            with open(os.path.join(self._directory, NAME), encoding="utf-8") as file:
                found = json.loads(file.read(MAX_FILE_BYTES))
            for number, (why, is_damaged) in list(found.items())[:MAX_REMEMBERED]:
                if 0 <= int(number) < self._block_count:
                    self._unreadable[int(number)] = str(why), bool(is_damaged)
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            return  # there is no such file, or it is invalid

    def failed(self, numbers: Sequence[int], error: BootseerError) -> None:
        """Record a read of these blocks that is about to fail."""
        why, is_damaged = " ".join(str(error).split()), is_damage(error)
        if "block " not in why:
            why = f"block {numbers[0]}: {why}"
        self.journal.note(why, is_damage=is_damaged, blocks=numbers)
        news = [number for number in numbers if number not in self._unreadable]
        if news and len(self._unreadable) < MAX_REMEMBERED:
            self._unreadable.update(dict.fromkeys(news[:MAX_REMEMBERED], (why, is_damaged)))
            self._keep()

    def waits(self, numbers: Sequence[int], waited_s: float) -> None:
        """Record that a reader of these blocks has waited for so long, and still waits."""
        self.journal.note(
            f"{self._url}: block {numbers[0]} has not come for {waited_s:g} s: is the store slow, or down?",
            is_wait=True,
        )

    def failed_again(self, numbers: Sequence[int]) -> None:
        """Record a read of blocks that failed a moment ago and fails again. From any thread."""
        found = next((known for number in numbers if (known := self._unreadable.get(number))), None)
        if found is not None:
            self.journal.note(found[0], is_damage=found[1], blocks=numbers)

    @property
    def lines(self) -> list[str]:
        """Return why blocks could not be read at the last request; none: all can be."""
        return list(dict.fromkeys(why for why, _ in self._unreadable.values()))

    def missing_lines(self, has: Callable[[int], bool]) -> list[str]:
        """Return `lines` without those of blocks that are cached by now. Args: has: whether a block is."""
        unreadable = list(self._unreadable.items())
        return list(dict.fromkeys(why for number, (why, _) in unreadable if not has(number)))

    @property
    def is_damaged(self) -> bool:
        """Return whether some of them are wrong or missing."""
        return any(is_damaged for _, is_damaged in self._unreadable.values())

    async def recheck(self, fetcher: BlockFetcher) -> None:
        """Request them once more, for at most RECHECK_S."""
        if not self._unreadable:
            return
        loop = asyncio.get_running_loop()
        end_s = loop.time() + RECHECK_S
        before = dict(self._unreadable)
        for number in before:
            try:
                async with asyncio.timeout(max(0.0, end_s - loop.time())):
                    await fetcher.ensure([number], is_demand=True)
            except TimeoutError:
                continue  # unchanged
            except BootseerError as error:
                self._unreadable[number] = " ".join(str(error).split()), is_damage(error)
            else:
                del self._unreadable[number]
        if self._unreadable != before:
            self._keep()

    def _keep(self) -> None:
        data = json.dumps(self._unreadable).encode("ascii")
        try:
            if self._unreadable:
                write_whole(self._directory, NAME, data)
            else:
                os.unlink(os.path.join(self._directory, NAME))
        except OSError as error:
            _log.info("%s: the list of unreadable blocks is not saved: %s", self._directory, error.strerror)
