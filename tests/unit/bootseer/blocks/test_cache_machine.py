"""The cache under everything at once: several handles, damage, eviction, kills, power cuts. Never a wrong byte.

What was filled and not damaged since has to be there; after a power cut, what was saved. What else is there is
luck, but it has to be right.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from bootseer.blocks.cache import Cache
from bootseer.blocks.presence import HEADER_BYTES
from bootseer.blocks.tree_cache import TreeCache
from bootseer.blocks.tree_files import BLOCK_CHECKSUMS
from bootseer.tree.index import BLOCK_BYTES
from tests.unit.bootseer.blocks.trees import make_tree, open_root

TREE = make_tree(7)
DEVICE = TREE.device()
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
NUMBERS = st.integers(0, TREE.count - 1)
# Of a file that has so many bytes for each block, behind a header.
SIZES = {"data": (0, BLOCK_BYTES), "sums": (0, BLOCK_CHECKSUMS.size), "present": (HEADER_BYTES, 1)}


class CacheMachine(RuleBasedStateMachine):
    handles = Bundle("handles")

    def __init__(self) -> None:
        super().__init__()
        # In memory where that can be: every other step waits for the disk.
        self.folder = tempfile.mkdtemp(prefix="bootseer-machine-", dir=MEMORY)
        self.boot = 0
        self.open: list[TreeCache] = []
        self.there: set[int] = set()
        self.saved: set[int] = set()
        self.has_bad_header = self.has_bad_size = False  # until a handle is opened

    @property
    def root(self) -> Cache:
        return open_root(self.folder, boot_id=f"boot-{self.boot}")

    @property
    def path(self) -> Path:
        return Path(self.folder) / "cache" / "trees" / TREE.digest

    @initialize(target=handles)
    def begin(self) -> TreeCache:
        return self.open_one()

    @rule(target=handles)
    def open_one(self) -> TreeCache:
        if self.has_bad_size:
            self._lose(set(range(TREE.count)))
        if self.has_bad_header:
            self.there &= self.saved
        self.has_bad_header = self.has_bad_size = False
        cache = self.root.open_tree(TREE.digest, TREE.count)
        self.open.append(cache)
        return cache

    @rule(cache=handles, number=NUMBERS)
    def fill(self, cache: TreeCache, number: int) -> None:
        if cache in self.open:
            assert cache.try_lock(number)
            cache.settle(number)
            assert cache.fill(number, TREE.raws[number])
            cache.unlock(number)
            assert cache.has(number)
            self.there.add(number)
        else:
            assert not cache.fill(number, TREE.raws[number])

    @rule(cache=handles, offset=st.integers(0, len(DEVICE) - 1), length=st.integers(1, 2 * BLOCK_BYTES))
    def read(self, cache: TreeCache, offset: int, length: int) -> None:
        length = min(length, len(DEVICE) - offset)
        target = memoryview(bytearray(length))
        is_read = cache.try_read(offset, target)
        if is_read:
            assert target == DEVICE[offset : offset + length]
            assert cache in self.open
        elif cache in self.open:
            numbers = range(offset // BLOCK_BYTES, (offset + length - 1) // BLOCK_BYTES + 1)
            assert not self.there.issuperset(numbers), "it is there"

    @rule(cache=handles, number=NUMBERS)
    def settle(self, cache: TreeCache, number: int) -> None:
        if cache in self.open and cache.try_lock(number):
            is_there = cache.settle(number)
            cache.unlock(number)
            assert is_there or number not in self.there

    @rule(cache=handles)
    def save(self, cache: TreeCache) -> None:
        cache.save()
        if cache in self.open:
            self.saved = set(self.there)

    @rule(cache=consumes(handles), saves=st.booleans())
    def close(self, cache: TreeCache, saves: bool) -> None:
        """Without saving it is what a kill does."""
        has_filled = cache.statistics()["filled"] > 0
        cache.close(saves=saves)
        if cache in self.open:
            self.open.remove(cache)
            if saves and has_filled:
                self.saved = set(self.there)

    @rule(
        name=st.sampled_from(sorted(SIZES)),
        number=NUMBERS,
        at=st.floats(0, 1, exclude_max=True),
        bit=st.integers(0, 7),
    )
    def flip(self, name: str, number: int, at: float, bit: int) -> None:
        header, size = SIZES[name]
        if (self.path / name).exists():
            _flip(self.path / name, header + number * size + int(at * size), 1 << bit)
            self._lose({number})

    @rule(at=st.integers(0, HEADER_BYTES - 1), bit=st.integers(0, 7))
    def flip_header(self, at: int, bit: int) -> None:
        """Whoever opens the tree next begins with what was saved."""
        if (self.path / "present").exists():
            _flip(self.path / "present", at, 1 << bit)
            self.has_bad_header = True

    @rule(at=st.integers(0, 200))
    def flip_saved(self, at: int) -> None:
        path = self.path / "saved"
        if path.exists() and path.stat().st_size > at:
            _flip(path, at, 4)
            self._lose(set(range(TREE.count)))

    @rule(name=st.sampled_from(["data", "sums", "present", "saved"]), kept=st.floats(0, 1))
    def cut(self, name: str, kept: float) -> None:
        path = self.path / name
        if path.exists():
            os.truncate(path, int(path.stat().st_size * kept))
            self.has_bad_size = True
            self._lose(set(range(TREE.count)))

    @rule()
    def evict(self) -> None:
        is_cached = self.path.exists()
        done = self.root.collect(0)
        assert self.path.exists() == (is_cached and bool(self.open))
        if done.trees:
            self._lose(set(range(TREE.count)))

    @rule(lost=st.sets(NUMBERS), kept=st.booleans())
    def power_cut(self, lost: set[int], kept: bool) -> None:
        """What was not saved may be on disk in parts."""
        for cache in self.open:
            cache.close(saves=False)
        self.open = []
        for number in lost - self.saved:
            for name, (header, size) in SIZES.items():
                if (self.path / name).exists() and (name == "data" or kept):
                    with open(self.path / name, "r+b") as file:
                        file.seek(header + number * size)
                        file.write(bytes(size))
        self.there = set(self.saved)
        self.boot += 1

    @invariant()
    def what_is_there_can_be_read(self) -> None:
        for cache in self.open[-1:]:
            for number in self.there:
                assert cache.try_read_block(number, len(TREE.raws[number])) == TREE.raws[number]

    def _lose(self, numbers: set[int]) -> None:
        self.there -= numbers
        self.saved -= numbers

    def teardown(self) -> None:
        for cache in self.open:
            cache.close()
        shutil.rmtree(self.folder)


def _flip(path: Path, at: int, mask: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        if byte:
            file.seek(at)
            file.write(bytes([byte[0] ^ mask]))


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
