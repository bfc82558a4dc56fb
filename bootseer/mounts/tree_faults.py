"""What of a mounted tree could not be read, for its daemon: told to bootrun, remembered, and looked at again.

In: reads that failed. Out: a line in the mount's journal (faults.py), before the reader has its error; the numbers
of the blocks, kept with the tree in the cache. Whoever mounts the tree again, also another day, is told which of
them still cannot be had, before a program needs them.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence

from bootseer.blocks import BlockFetcher
from bootseer.blocks.tree_files import write_whole
from bootseer.errors import BootseerError, IntegrityError, NotFound
from bootseer.mounts.faults import Journal

NAME = "unreadable"  # in the folder of the tree in the cache
MOST_REMEMBERED = 64  # blocks
MOST_FILE_BYTES = 256 << 10
RECHECK_S = 3.0  # for all of them


def is_damage(error: BaseException) -> bool:
    """PURE: whether what a store has of a tree is not what it should be, or is gone."""
    return isinstance(error, IntegrityError | NotFound)


class TreeFaults:
    """Of one daemon; for its event loop."""

    def __init__(
        self, journal_path: str, folder: str, block_count: int, url: str, log: Callable[[str], None]
    ) -> None:
        """Args: folder: of the tree in the cache; there may be none; url: of its store, for people."""
        self.journal = Journal(journal_path)
        self._folder, self._block_count, self._url, self._log = folder, block_count, url, log
        self._unreadable: dict[int, tuple[str, bool]] = {}  # block: why, and whether it is damage

    def load(self) -> None:
        """What earlier daemons could not read."""
        try:
            with open(os.path.join(self._folder, NAME), encoding="utf-8") as file:
                found = json.loads(file.read(MOST_FILE_BYTES))
            for number, (why, is_damaged) in list(found.items())[:MOST_REMEMBERED]:
                if 0 <= int(number) < self._block_count:
                    self._unreadable[int(number)] = str(why), bool(is_damaged)
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            return  # there is none, or nobody knows what is in it

    def failed(self, numbers: Sequence[int], error: BootseerError) -> None:
        """A read of these blocks, of which somebody is about to get an error."""
        why, is_damaged = " ".join(str(error).split()), is_damage(error)
        if "block " not in why:
            why = f"block {numbers[0]}: {why}"
        self.journal.note(why, is_damage=is_damaged, blocks=numbers)
        news = [number for number in numbers if number not in self._unreadable]
        if news and len(self._unreadable) < MOST_REMEMBERED:
            self._unreadable.update(dict.fromkeys(news[:MOST_REMEMBERED], (why, is_damaged)))
            self._keep()

    def waits(self, numbers: Sequence[int], waited_s: float) -> None:
        """A reader of these blocks has waited for so long, and waits."""
        self.journal.note(
            f"{self._url}: block {numbers[0]} has not come for {waited_s:g} s: is the store slow, or away?",
            is_wait=True,
        )

    def failed_again(self, numbers: Sequence[int]) -> None:
        """A read of blocks that failed a moment ago: who reads gets an error once more. From any thread."""
        found = next((known for number in numbers if (known := self._unreadable.get(number))), None)
        if found is not None:
            self.journal.note(found[0], is_damage=found[1], blocks=numbers)

    @property
    def lines(self) -> list[str]:
        """Why blocks could not be read when they were asked for last; none: all can be."""
        return list(dict.fromkeys(why for why, _ in self._unreadable.values()))

    @property
    def is_damaged(self) -> bool:
        """Whether some of them are not what they should be, or gone."""
        return any(is_damaged for _, is_damaged in self._unreadable.values())

    async def recheck(self, fetcher: BlockFetcher) -> None:
        """Asks for them once more, for a moment."""
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
                continue  # as it was
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
                write_whole(self._folder, NAME, data)
            else:
                os.unlink(os.path.join(self._folder, NAME))
        except OSError as error:
            self._log(f"{self._folder}: which blocks cannot be read is not remembered: {error.strerror}")
