"""The memory that a node's ranks share: one memfd a file, which nobody but its maker can write to.

The keeper maps each memfd, then seals it: no later mapping and no `write` can change it, not even through
/proc/PID/fd opened anew. A process that the keeper forks inherits the mapping and fills it. Units have states in a
memfd of their own, which ranks can read. Nothing of it has a name in /dev/shm; it goes with its last descriptor.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Mapping, Sequence

from bootseer.checkpoint.mapping import advise, map_range
from bootseer.checkpoint.source import SourceFile
from bootseer.errors import CheckpointError

UNIT_BYTES = 16 << 20  # of plain files; of striped ones their own
SHARD_UNIT_BYTES = 1 << 20  # of plain files of which nodes read parts: no more is read in vain at either end
EMPTY, TAKEN, READY, FAILED = 0, 1, 2, 3
FORGET = bytes(EMPTY if state in (TAKEN, FAILED) else state for state in range(256))
MOST_FILES = 16_384
F_SEAL_FUTURE_WRITE = 0x10
MFD_NOEXEC_SEAL = 8
MADV_POPULATE_WRITE = 23
PIECE_BYTES = 64 << 20  # of pre-faulting


class Held:
    """A memfd that the keeper has beside the arena, and its mapping once it was sealed."""

    def __init__(self, fd: int, view: memoryview | None) -> None:
        self.fd = fd
        self.view = view


class Arena:
    """Files of known sizes; made in the keeper, inherited by those it forks."""

    def __init__(
        self, files: Sequence[SourceFile], unit_bytes: Sequence[int], held: Mapping[str, Held] | None = None
    ) -> None:
        """`unit_bytes`: of each file, what is read and waited for at a time. `held`: files that have memory.

        Raises: CheckpointError where the system gives no memory or no descriptors for it.
        """
        if len(files) > MOST_FILES:
            raise CheckpointError(f"{len(files)} files; an arena has at most {MOST_FILES}")
        self.files = list(files)
        self.unit_bytes = list(unit_bytes)
        self.first_unit: list[int] = []  # of each file, its place among all units
        count = 0
        for file, length in zip(files, unit_bytes, strict=True):
            self.first_unit.append(count)
            count += -(-file.size // length)
        self.units = count
        self.fds: list[int] = []
        self._held_fds: set[int] = set()  # of memory that somebody else keeps as well
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
            raise CheckpointError(f"no memory or descriptors for an arena: {error.strerror}") from error

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def is_held(self) -> bool:
        """Whether somebody else keeps some of its memory as well."""
        return bool(self._held_fds)

    @property
    def taken_bytes(self) -> int:
        """What its memory really takes: pages that nobody has touched are not there."""
        return sum(os.fstat(fd).st_blocks for fd in self.fds) * 512

    @property
    def own_taken_bytes(self) -> int:
        """Of that, what is gone when it is closed."""
        return sum(os.fstat(fd).st_blocks for fd in self.fds if fd not in self._held_fds) * 512

    def view(self, file: int, start: int, end: int) -> memoryview:
        """Writable bytes of a file; only in the keeper and what it forks."""
        return self._maps[file][start:end]

    def populate(self, file: int, start: int, end: int) -> None:
        """Has the kernel make pages for a range now. Without that call they are made when they are written."""
        area = self._maps[file]
        if area.readonly:
            return  # it was taken over, full
        for at in range(start, end, PIECE_BYTES):
            if advise(area[at : min(at + PIECE_BYTES, end)], MADV_POPULATE_WRITE):
                return  # EINVAL: an older kernel; ENOMEM: the reads will say so

    def units_of(self, file: int) -> range:
        """The units of a file, counted within it."""
        return range(-(-self.files[file].size // self.unit_bytes[file]))

    def extent(self, file: int, unit: int) -> tuple[int, int]:
        """Where a unit begins and ends in its file, in bytes."""
        start = unit * self.unit_bytes[file]
        return start, min(start + self.unit_bytes[file], self.files[file].size)

    def state(self, file: int, unit: int) -> int:
        return self.states[self.first_unit[file] + unit]

    def set_state(self, file: int, unit: int, state: int) -> None:
        self.states[self.first_unit[file] + unit] = state

    def set_all_ready(self) -> None:
        """Of memory that was taken over, full."""
        self.states[: self.units] = bytes([READY]) * self.units

    def is_complete(self, file: int) -> bool:
        first = self.first_unit[file]
        count = len(self.units_of(file))
        return bytes(self.states[first : first + count]) == bytes([READY]) * count

    def forget_taken(self) -> None:
        """What somebody was filling who is gone, or could not fill, is to be filled again."""
        self.states[:] = bytes(self.states).translate(FORGET)

    def fits(self, files: Sequence[SourceFile], unit_bytes: Sequence[int]) -> bool:
        """Whether its memory can be filled with these files in place of its own."""
        sizes = [file.size for file in files]
        return sizes == [file.size for file in self.files] and list(unit_bytes) == self.unit_bytes

    def rename(self, files: Sequence[SourceFile]) -> None:
        """Other files of the same sizes: nothing of the old ones is ready any more."""
        self.files = list(files)
        self.states[:] = bytes(len(self.states))

    def close(self) -> None:
        """Gives up this process's part of it; ranks keep what they have mapped."""
        for fd in self.fds:
            os.close(fd)
        if self.states_fd >= 0:
            os.close(self.states_fd)
        self.fds, self._maps, self.states_fd = [], [], -1
        self._held_fds = set()


def new_memfd(name: str = "bootseer-arena") -> int:
    """An empty one, not sealed yet."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create(name, flags | MFD_NOEXEC_SEAL)
    except OSError:
        fd = os.memfd_create(name, flags)  # before Linux 6.3
    os.fchmod(fd, 0o400)  # for whoever opens it anew by its place in /proc
    return fd


def _seal(fd: int, size: int) -> memoryview:
    """The only writable mapping that there will ever be of it."""
    os.ftruncate(fd, size)
    area = map_range(fd, 0, size)
    if size:
        advise(area, mmap.MADV_HUGEPAGE)  # small pages where they are not allowed
    seals = F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
    return area
