"""The memory that a node's ranks share: one memfd per file, writable only by the process that created it.

The checkpoint service maps each memfd, then seals it. After that, no new mapping and no `write` can change it, not
even through /proc/PID/fd. A child that the service forks inherits the mapping and fills it. A separate memfd holds
the states of units and is readable by ranks. Nothing has a name in /dev/shm; it ends with its last descriptor.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Mapping, Sequence

from bootseer.checkpoint.format.mapping import advise, map_range
from bootseer.checkpoint.io.source import SourceFile
from bootseer.errors import CheckpointError

UNIT_BYTES = 16 << 20  # of plain files; striped files have their own unit size
SHARD_UNIT_BYTES = 1 << 20  # of plain files that nodes read in parts: smaller units waste less at both ends
EMPTY, TAKEN, READY, FAILED = 0, 1, 2, 3
FORGET = bytes(EMPTY if state in (TAKEN, FAILED) else state for state in range(256))
MAX_FILES = 16_384
F_SEAL_FUTURE_WRITE = 0x10
MFD_NOEXEC_SEAL = 8
MADV_POPULATE_WRITE = 23
PIECE_BYTES = 64 << 20  # pre-faulted at a time
Unit = tuple[int, int]  # number of the file, number of the unit in it


class HeldMemory:
    """A memfd that the service keeps beside the arena, and its mapping once it is sealed."""

    def __init__(self, fd: int, view: memoryview | None) -> None:
        self.fd = fd
        self.view = view


class Arena:
    """Files of known sizes; created in the service, inherited by its children."""

    def __init__(
        self, files: Sequence[SourceFile], unit_bytes: Sequence[int], held: Mapping[str, HeldMemory] | None = None
    ) -> None:
        """`unit_bytes`: for each file, the unit of reads and waits. `held`: files that have memory already.

        Raises: CheckpointError if the system has no memory or no descriptors for it.
        """
        if len(files) > MAX_FILES:
            raise CheckpointError(f"{len(files)} files: too many for an arena, which has at most {MAX_FILES}")
        self.files = list(files)
        self.unit_bytes = list(unit_bytes)
        self.first_unit: list[int] = []  # of each file, its index among all units
        count = 0
        for file, length in zip(files, unit_bytes, strict=True):
            self.first_unit.append(count)
            count += -(-file.size // length)
        self.units = count
        self.fds: list[int] = []
        self._held_fds: set[int] = set()  # of memory that another owner keeps as well
        self._maps: list[memoryview] = []
        self.states_fd = -1
        try:
            for file in files:
                own = (held or {}).get(file.path)
                if own is None:
                    fd = new_memfd()
                    self.fds.append(fd)
                    self._maps.append(_seal(fd, file.size))
                else:
                    self.fds.append(os.dup(own.fd))
                    self._held_fds.add(self.fds[-1])
                    if own.view is None:
                        own.view = _seal(own.fd, file.size)
                    self._maps.append(own.view)
            self.states_fd = new_memfd("bootseer-units")
            self.states = _seal(self.states_fd, max(1, count))
        except OSError as error:
            self.close()
            raise CheckpointError(f"the arena: cannot allocate memory or descriptors: {error.strerror}") from error

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def is_held(self) -> bool:
        """Whether another owner keeps some of its memory as well."""
        return bool(self._held_fds)

    @property
    def taken_bytes(self) -> int:
        """Bytes of memory in use; untouched pages take none."""
        return sum(os.fstat(fd).st_blocks for fd in self.fds) * 512

    @property
    def own_taken_bytes(self) -> int:
        """Bytes of memory that closing it frees."""
        return sum(os.fstat(fd).st_blocks for fd in self.fds if fd not in self._held_fds) * 512

    def view(self, file: int, start: int, end: int) -> memoryview:
        """Return writable bytes of a file; only in the service and its children."""
        return self._maps[file][start:end]

    def populate(self, file: int, start: int, end: int) -> None:
        """Make the kernel allocate pages for a range now, instead of at the first write."""
        area = self._maps[file]
        if area.readonly:
            return  # it was taken over when it was full
        for at in range(start, end, PIECE_BYTES):
            if advise(area[at : min(at + PIECE_BYTES, end)], MADV_POPULATE_WRITE):
                return  # EINVAL: an older kernel; ENOMEM: the reads will report it

    def units_of(self, file: int) -> range:
        """Return the units of a file, numbered within the file."""
        return range(-(-self.files[file].size // self.unit_bytes[file]))

    def extent(self, file: int, unit: int) -> tuple[int, int]:
        """Return the start and end of a unit in its file, in bytes."""
        start = unit * self.unit_bytes[file]
        return start, min(start + self.unit_bytes[file], self.files[file].size)

    def state(self, file: int, unit: int) -> int:
        return self.states[self.first_unit[file] + unit]

    def set_state(self, file: int, unit: int, state: int) -> None:
        self.states[self.first_unit[file] + unit] = state

    def set_all_ready(self) -> None:
        """Mark all units ready, for full memory that was taken over."""
        self.states[: self.units] = bytes([READY]) * self.units

    def is_complete(self, file: int) -> bool:
        first = self.first_unit[file]
        count = len(self.units_of(file))
        return bytes(self.states[first : first + count]) == bytes([READY]) * count

    def reset_unfinished(self) -> None:
        """Mark units empty that failed, or whose reader has died, so that they are filled again."""
        self.states[:] = bytes(self.states).translate(FORGET)

    def fits(self, files: Sequence[SourceFile], unit_bytes: Sequence[int]) -> bool:
        """Return whether these files can take the place of its own in its memory."""
        sizes = [file.size for file in files]
        return sizes == [file.size for file in self.files] and list(unit_bytes) == self.unit_bytes

    def rename(self, files: Sequence[SourceFile]) -> None:
        """Replace its files by others of the same sizes; no unit is ready any more."""
        self.files = list(files)
        self.states[:] = bytes(len(self.states))

    def close(self) -> None:
        """Release this process's part of it; ranks keep their mappings."""
        for fd in self.fds:
            os.close(fd)
        if self.states_fd >= 0:
            os.close(self.states_fd)
        self.fds, self._maps, self.states_fd = [], [], -1
        self._held_fds = set()


def new_memfd(name: str = "bootseer-arena") -> int:
    """Return a new empty memfd, not sealed yet."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create(name, flags | MFD_NOEXEC_SEAL)
    except OSError:
        fd = os.memfd_create(name, flags)  # before Linux 6.3
    os.fchmod(fd, 0o400)  # for processes that reopen it through /proc
    return fd


def _seal(fd: int, size: int) -> memoryview:
    """Return the only writable mapping that it will ever have."""
    os.ftruncate(fd, size)
    area = map_range(fd, 0, size)
    if size:
        advise(area, mmap.MADV_HUGEPAGE)  # small pages where huge pages are not allowed
    seals = F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
    return area
