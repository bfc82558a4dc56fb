"""The cache of one tree: a sparse file of its blocks, their presence bitmap, and their checksums.

Several processes and mounts use it at once. Data is written before its checksums, checksums before the mark. So a
process that is killed leaves no partial marks, and two that write the same block write the same bytes. Nothing is
mapped into memory: a map of a file that shrinks, or of a full disk, kills its reader. Thread-safe but for `close`.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable
from types import TracebackType

from bootseer import crc
from bootseer.blocks.free_space import FULL_ERRNOS, FreeSpace, FreeSpaceCall
from bootseer.blocks.presence import ABSENT, HEADER_BYTES, PRESENT, encode_saved
from bootseer.blocks.spans import runs_of
from bootseer.blocks.tree_files import (
    BLOCK_CHECKSUMS,
    BLOCK_GRANULES,
    GRANULE_BYTES,
    GRANULE_SHIFT,
    SAVE_BYTE,
    SAVED,
    UNKNOWN,
    TreeFiles,
    as_checksum,
    checksum_block,
    write_at,
    write_whole,
)
from bootseer.linux import locks
from bootseer.logs import get_logger
from bootseer.tree.index import BLOCK_BYTES

_log = get_logger(__name__)

_GRANULE_MASK = GRANULE_BYTES - 1
_ZEROS = bytes(BLOCK_BYTES)
_SPARSE = 256  # marks are read one by one when fewer than one in so many is requested
_COUNTS = ("filled", "refused", "damaged", "saves")
_MARK = bytes([PRESENT])


class TreeCache:
    """Blocks of one tree. Made by `Cache.open_tree`; in use, and so never evicted, until it is closed.

    `size`: of the device that the blocks form, bytes. `full_reason`: why nothing is stored now; else empty.
    """

    def __init__(
        self,
        tree: str,
        block_count: int,
        folder: str,
        files: TreeFiles,
        make_room: FreeSpaceCall,
        *,
        full_reason: str = "",
        is_guest: bool = False,
    ) -> None:
        self.tree = tree
        self.block_count = block_count
        self.size = block_count * BLOCK_BYTES
        self._directory = folder
        self._is_guest = is_guest
        self._files = files
        self._data = files.data
        self._room = FreeSpace(folder, make_room, full_reason)
        self._crc32c = crc.load()
        self._known = VerifiedGranules(block_count)
        self._sums, self._suspects = self._known.sums, self._known.suspects
        self._change = threading.Condition()
        self._writers = 0
        self._is_closed = False
        self._counts = dict.fromkeys(_COUNTS, 0)

    @property
    def full_reason(self) -> str:
        """Return why nothing is stored now, as text for users; else empty."""
        return self._room.full_reason

    # ---- reading -------------------------------------------------------------------------------------------

    def try_read(self, offset: int, target: memoryview) -> bool:
        """Fill `target` (bytes, writable) from `offset` on; return False when a block is missing or damaged.

        The contents of `target` are then undefined. Each byte that it returns was verified in this call.
        """
        length = len(target)
        end = offset + length
        if end > self.size or offset < 0:
            return False
        sums = self._sums
        first, last = offset >> GRANULE_SHIFT, (end + _GRANULE_MASK) >> GRANULE_SHIFT
        if (
            first < last
            and not (sums[first] and sums[last - 1])
            and not self._known.learn(self._files, first, last)
        ):
            return False
        crc32c = self._crc32c
        try:
            if (offset | length) & _GRANULE_MASK:
                data = os.pread(self._data, (last - first) << GRANULE_SHIFT, first << GRANULE_SHIFT)
                view = memoryview(data)
                is_whole = len(data) == (last - first) << GRANULE_SHIFT
            else:
                view = target
                is_whole = os.preadv(self._data, (target,), offset) == length
        except OSError:
            is_whole = False
        if not is_whole:
            self._known.suspect(first, last)
            return False
        at = 0
        for granule in range(first, last):
            found = crc32c(view[at : at + GRANULE_BYTES])
            if (not found or found != sums[granule]) and not self._known.is_right(self._files, granule, found):
                return False
            at += GRANULE_BYTES
        if view is not target:
            begin = offset - (first << GRANULE_SHIFT)
            target[:] = view[begin : begin + length]
        return True

    def try_read_block(self, number: int, raw_bytes: int = BLOCK_BYTES) -> memoryview | None:
        """Return the first `raw_bytes` of a block; None when it is missing or damaged."""
        target = memoryview(bytearray(raw_bytes))
        return target if self.try_read(number * BLOCK_BYTES, target) else None

    def has(self, number: int) -> bool:
        """Return whether a block is there, as far as is known without reading it."""
        granule = number * BLOCK_GRANULES
        return self._sums[granule] != UNKNOWN or self._known.learn(self._files, granule, granule + 1)

    def missing(self, numbers: Iterable[int]) -> list[int]:
        """Return those that are not there, in the order given."""
        wanted = list(numbers)
        if not wanted:
            return []
        first, end = min(wanted), max(wanted) + 1
        if end - first > len(wanted) * _SPARSE:
            return [number for number in wanted if not self.has(number)]
        try:
            marks = os.pread(self._files.present, end - first, HEADER_BYTES + first)
        except OSError:
            marks = b""
        marks = marks.ljust(end - first, bytes([ABSENT]))
        return [number for number in wanted if marks[number - first] != PRESENT or number in self._suspects]

    # ---- filling -------------------------------------------------------------------------------------------

    def try_lock(self, number: int) -> bool:
        """Lock a block that this process will fetch; return False when another one does. The caller unlocks it."""
        return self._files.lock < 0 or locks.try_lock_if_any(self._files.lock, number)

    def unlock(self, number: int) -> None:
        if self._files.lock >= 0:
            locks.unlock_if_any(self._files.lock, number)

    def settle(self, number: int) -> bool:
        """Return whether a block that the caller has locked is there. A damaged one loses its mark."""
        if number not in self._suspects:
            return self.has(number)
        self._suspects.discard(number)
        self._known.forget(number)
        if self.has(number) and self.try_read_block(number) is not None:
            return True  # another process was faster
        with self._writing() as can_write:
            if can_write:
                self._count("damaged")
                try:
                    write_at(self._files.present, bytes([ABSENT]), HEADER_BYTES + number)
                except OSError:
                    pass  # its checksums still reveal it
        self._suspects.discard(number)
        self._known.forget(number)
        return False

    def fill(self, number: int, raw: bytes | memoryview) -> bool:
        """Store a block, `raw` of its verified bytes; return False when there is no space, or no cache.

        Blocks; several threads may call it for the same block: all have the same bytes.
        """
        length = len(raw)
        if not 0 < length <= BLOCK_BYTES or not 0 <= number < self.block_count:
            raise ValueError(f"block {number} of {length} bytes")
        if self._files.data < 0 or not self._room.is_there(length):
            self._count("refused")
            return False
        if length < BLOCK_BYTES:
            raw = bytes(raw) + _ZEROS[length:]  # also overwrites the rest of a damaged block
        sums = checksum_block(self._crc32c, raw)
        with self._writing() as can_write:
            if not can_write:
                return False
            if not self._write(number, raw, sums):
                self._count("refused")
                return False
            self._suspects.discard(number)
            self._known.note(number, sums)
            self._count("filled")
        return True

    def save(self) -> None:
        """Write the cache to disk, so that it survives a power cut. Blocks, for as long as the disk takes.

        Does nothing while another process saves. A failing disk costs only the save. `close` does not wait.
        """
        files = TreeFiles()
        try:
            with self._writing() as can_write:
                if can_write:
                    files = self._files.dup()
            if files.data >= 0 and locks.try_lock_if_any(files.lock, SAVE_BYTE):
                try:
                    self._save(files)
                finally:
                    locks.unlock_if_any(files.lock, SAVE_BYTE)
        except OSError as error:
            if error.errno not in FULL_ERRNOS:
                _log.info("%s: the cache does not survive a power cut: %s", self._directory, error.strerror)
        finally:
            files.close()

    def _save(self, files: TreeFiles) -> None:
        marks = os.pread(files.present, self.block_count, HEADER_BYTES)
        if len(marks) == self.block_count:
            os.fdatasync(files.data)  # of all marked blocks; later ones may or may not be included
            os.fdatasync(files.sums)
            write_whole(self._directory, SAVED, encode_saved(self.tree, marks))
            self._count("saves")

    def read_ahead(self, numbers: Iterable[int]) -> None:
        """Let the kernel read blocks from the disk, in this order; those that are not cached cost nothing."""
        try:
            for first, count in runs_of(numbers):
                os.posix_fadvise(self._data, first * BLOCK_BYTES, count * BLOCK_BYTES, os.POSIX_FADV_WILLNEED)
        except OSError:
            pass  # only advice

    def close(self, *, saves: bool = True) -> None:
        """End the use of the tree; wait for writers, not for readers: their calls return False from now on."""
        with self._change:
            if self._is_closed:
                return
        if saves and self._counts["filled"]:
            self.save()
        with self._change:
            self._is_closed = True
            while self._writers:
                self._change.wait()
        files, self._files, self._data = self._files, TreeFiles(), -1
        try:
            if files.lock >= 0 and not self._is_guest:
                os.utime(files.lock)  # records the time of last use
        except OSError:
            pass
        files.close()

    def __enter__(self) -> TreeCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def statistics(self) -> dict[str, int]:
        """Return blocks there now, and counts since it was opened: written, refused without space, damaged."""
        return {"present": self.block_count - len(self.missing(range(self.block_count))), **self._counts}

    # ---- writing -------------------------------------------------------------------------------------------

    def _write(self, number: int, raw: bytes | memoryview, sums: tuple[int, ...]) -> bool:
        files = self._files
        for is_again in (False, True):
            try:
                write_at(files.data, raw, number * BLOCK_BYTES)
                write_at(files.sums, BLOCK_CHECKSUMS.pack(*sums), number * BLOCK_CHECKSUMS.size)
                write_at(files.present, bytes([PRESENT]), HEADER_BYTES + number)
                return True
            except OSError as error:
                if not self._room.failed(error, is_again=is_again):
                    break
        return False

    def _writing(self) -> _Writing:
        return _Writing(self)

    def _count(self, name: str) -> None:
        with self._change:
            self._counts[name] += 1


class _Writing:
    """Keeps the files open for a `with` block, which receives whether there are any."""

    def __init__(self, cache: TreeCache) -> None:
        self._cache = cache
        self._is_in = False

    def __enter__(self) -> bool:
        cache = self._cache
        with cache._change:
            self._is_in = not cache._is_closed and cache._files.data >= 0
            cache._writers += self._is_in
        return self._is_in

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_in:
            with self._cache._change:
                self._cache._writers -= 1
                self._cache._change.notify_all()


class VerifiedGranules:
    """`sums`: checksum of each granule, UNKNOWN if not seen yet. `suspects`: damaged blocks, not to be read.

    Thread-safe: checksums of a block are set from the last to the first, and readers check the first.
    """

    def __init__(self, block_count: int) -> None:
        # Anonymous memory: pages that are never accessed cost nothing.
        size = max(1, block_count) * BLOCK_CHECKSUMS.size
        self.sums = memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)).cast("I")
        self.suspects: set[int] = set()

    def learn(self, files: TreeFiles, first: int, last: int) -> bool:
        """Read the stored checksums of granules `first` to before `last`; return whether all exist."""
        for number in range(first // BLOCK_GRANULES, (last - 1) // BLOCK_GRANULES + 1):
            if self.sums[number * BLOCK_GRANULES] != UNKNOWN:
                continue
            if number in self.suspects:
                return False
            try:
                if os.pread(files.present, 1, HEADER_BYTES + number) != _MARK:
                    return False
                stored = os.pread(files.sums, BLOCK_CHECKSUMS.size, number * BLOCK_CHECKSUMS.size)
            except OSError:
                return False
            if len(stored) != BLOCK_CHECKSUMS.size or UNKNOWN in (sums := BLOCK_CHECKSUMS.unpack(stored)):
                self.suspects.add(number)
                return False
            self.note(number, sums)
        return True

    def is_right(self, files: TreeFiles, granule: int, crc: int) -> bool:
        """Return whether a granule with this CRC32C is right: the slow path, after a first mismatch."""
        if self.sums[granule] == UNKNOWN and not self.learn(files, granule, granule + 1):
            return False
        if as_checksum(crc) == self.sums[granule]:
            return True
        self.suspect(granule, granule + 1)
        return False

    def suspect(self, first: int, last: int) -> None:
        """Record that these granules do not hold what was written."""
        for number in range(first // BLOCK_GRANULES, (last - 1) // BLOCK_GRANULES + 1):
            self.suspects.add(number)
            self.forget(number)

    def note(self, number: int, sums: tuple[int, ...]) -> None:
        """Record that a block is there, with these checksums."""
        begin = number * BLOCK_GRANULES
        for at in range(BLOCK_GRANULES - 1, -1, -1):
            self.sums[begin + at] = sums[at]

    def forget(self, number: int) -> None:
        begin = number * BLOCK_GRANULES
        for at in range(BLOCK_GRANULES):
            self.sums[begin + at] = UNKNOWN
