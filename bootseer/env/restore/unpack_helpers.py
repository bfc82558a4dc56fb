"""Distribution of portions of a tree to unpack processes (unpack_helper.py), and collection of their reports.

They start before the tree is opened, and are ready together with it (unpack_processes.py). A failure costs only
time: after HelperFailedError the environment is unpacked without them. A process without progress is abandoned;
the total time is not limited.
"""

from __future__ import annotations

import os
import selectors
import time
from collections import Counter, deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import msgspec

from bootseer import errors
from bootseer.env.restore.unpack_helper import Blocks, PortionPlace, PortionReport, UnpackStart, UnpackTree
from bootseer.env.restore.unpack_processes import (
    UnpackProcess,
    UnpackProcesses,
    cores,
    end_spare,
    memory_errors,
    take_spare,
)
from bootseer.env.store.env_tree import EnvTree, StoredTree
from bootseer.errors import BootseerError
from bootseer.tree.index import Index
from bootseer.tree.unpack.helpers import HelperFailedError, Owners
from bootseer.tree.unpack.portions import Portion

if TYPE_CHECKING:
    from bootseer.env.store.snapshot import Snapshot

WORTH_FILES = 3000  # fewer are unpacked before another process has started
WORTH_BYTES = 128 << 20
PATIENCE_S = 120.0  # without a report of a busy process; reads of a store fail earlier
_POLL_S = 0.5
_AHEAD = 2  # portions queued per process, so that it never waits for one


class UnpackWorkers:
    """A set of processes for one tree. Implements materialise.Helpers."""

    def __init__(self, started: UnpackProcesses) -> None:
        self.skipped: Counter[str] = Counter()
        self._started = started
        self._helpers = [_Helper(process) for process in started.processes]
        self._used_bytes = 0
        self._given: Iterator[tuple[PortionPlace, Portion]] = iter(())

    @property
    def count(self) -> int:
        return len(self._helpers)

    def order(self, order: UnpackTree) -> None:
        """Send the tree to unpack, once. Raises: HelperFailedError."""
        for helper in self._helpers:
            helper.tell(order)

    def begin(self, index: Index, directory: str, root_fd: int, owners: Owners, given: Iterator[Portion]) -> None:
        offset, length = self._put(Blocks(packs=index.packs, blocks=index.blocks))
        found = os.fstat(root_fd)
        begin = UnpackStart(
            offset=offset, length=length, folder=directory, device=found.st_dev, inode=found.st_ino, owners=owners
        )
        for helper in self._helpers:
            helper.tell(begin)
        self._given = self._numbered(given)
        for _ in range(_AHEAD):
            for helper in self._helpers:
                self._give(helper)

    def wait(self) -> Generator[tuple[int, int], None, None]:
        with selectors.DefaultSelector() as selector:
            for helper in self._helpers:
                selector.register(helper.said_fd, selectors.EVENT_READ, helper)
            now_s = time.monotonic()
            while any(helper.todo for helper in self._helpers):
                ready = {key.data for key, _ in selector.select(_POLL_S)}
                before_s, now_s = now_s, time.monotonic()
                for helper in self._helpers:
                    if helper in ready:
                        yield self._hear(helper)
                    else:  # a suspended machine, or a delay here, is not their silence
                        helper.was_silent(min(_POLL_S, now_s - before_s))
                if not ready:
                    yield 0, 0
        for helper in self._helpers:
            helper.kill()  # it has no work left, and a normal exit takes longer than it seems

    def close(self) -> None:
        """End all processes, even during work."""
        self._started.close()
        self._helpers.clear()

    def _numbered(self, given: Iterator[Portion]) -> Iterator[tuple[PortionPlace, Portion]]:
        for number, portion in enumerate(given):
            offset, length = self._put(portion.tree)
            yield PortionPlace(number=number, offset=offset, length=length), portion

    def _give(self, helper: _Helper) -> None:
        """Send the next portion, if there is one."""
        found = next(self._given, None)
        if found is not None:
            given, portion = found
            helper.todo.append(_PendingPortion(given.number, portion.files, portion.written_bytes))
            with suppress(HelperFailedError):  # it has ended: `wait` reads its last reports first
                helper.tell(given)

    def _hear(self, helper: _Helper) -> tuple[int, int]:
        """Process reports. Return written bytes and files."""
        written = files = 0
        for said in helper.read():
            if said.error:
                raise _to_error(said)
            if not helper.todo or helper.todo[0].take(said):
                raise HelperFailedError("an unpack process sent an impossible report")
            written, files = written + said.bytes, files + said.files
            if said.is_done:
                helper.todo.popleft()
                self.skipped.update(said.skipped)
                self._give(helper)
        return written, files

    def _put(self, what: msgspec.Struct) -> tuple[int, int]:
        """Write a message into the shared memory. Return its offset and length."""
        data, offset = memoryview(msgspec.msgpack.encode(what)), self._used_bytes
        with memory_errors():
            while data:
                count = os.pwrite(self._started.memory_fd, data, self._used_bytes)
                data, self._used_bytes = data[count:], self._used_bytes + count
        return offset, self._used_bytes - offset


class _PendingPortion:
    """The remaining work of a portion."""

    def __init__(self, number: int, files: int, written_bytes: int) -> None:
        self._number, self._files, self._bytes = number, files, written_bytes

    def take(self, said: PortionReport) -> bool:
        """Subtract a report. Return whether it is impossible."""
        self._files -= said.files
        self._bytes -= said.bytes
        is_less = min(said.files, said.bytes, self._files, self._bytes) < 0
        return said.number != self._number or is_less or (said.is_done and (self._files or self._bytes) != 0)


class _Helper:
    """An unpack process and its queue."""

    def __init__(self, process: UnpackProcess) -> None:
        self.todo: deque[_PendingPortion] = deque()
        self.said_fd = process.said_fd
        self._process = process
        self._silent_s = 0.0

    def tell(self, what: UnpackTree | UnpackStart | PortionPlace) -> None:
        self._process.tell(msgspec.json.encode(what))

    def read(self) -> Iterator[PortionReport]:
        """Yield received reports. Raises: HelperFailedError."""
        lines = self._process.read()
        self._silent_s = 0.0
        for line in lines:
            try:
                yield msgspec.json.decode(line, type=PortionReport)
            except msgspec.MsgspecError as error:
                raise HelperFailedError("an unpack process sent an unreadable report") from error

    def was_silent(self, seconds: float) -> None:
        """Count silence of a busy process. Raises: HelperFailedError if it lasts too long."""
        self._silent_s = self._silent_s + seconds if self.todo else 0.0
        if self._silent_s > PATIENCE_S:
            raise HelperFailedError(f"an unpack process has written nothing for {PATIENCE_S:g} s")

    def kill(self) -> None:
        self._process.kill()


@contextmanager
def unpack_helpers(
    tree: EnvTree, snapshot: Snapshot, environ: Mapping[str, str], *, is_wanted: bool
) -> Iterator[UnpackWorkers | None]:
    """Yield helpers, one per core; None if they are not worthwhile or not possible."""
    helpers = None
    is_large = snapshot.files >= WORTH_FILES or snapshot.bytes >= WORTH_BYTES
    # For remote stores one process keeps the connections, as the link is slower than a core.
    if is_wanted and is_large and cores() > 1 and isinstance(tree, StoredTree) and tree.is_in_files:
        order = UnpackTree(url=tree.url, digest=tree.digest)
        try:
            helpers = _take(environ, order)
        except HelperFailedError:
            pass  # unpack with a single process
    else:
        end_spare()
    try:
        yield helpers
    finally:
        if helpers is not None:
            helpers.close()


def _take(environ: Mapping[str, str], order: UnpackTree) -> UnpackWorkers:
    """Return the spare processes if they are valid, else new ones. Raises: HelperFailedError."""
    spare = take_spare(environ)
    if spare is not None:
        try:
            return _ordered(spare, order)
        except HelperFailedError:
            pass  # they have ended meanwhile
    return _ordered(UnpackProcesses(environ, cores()), order)


def _ordered(started: UnpackProcesses, order: UnpackTree) -> UnpackWorkers:
    """Send the order. Raises: HelperFailedError, after ending the processes."""
    helpers = UnpackWorkers(started)
    try:
        helpers.order(order)
    except BaseException:
        helpers.close()
        raise
    return helpers


def _to_error(said: PortionReport) -> BootseerError:
    """Return the error that a single process would raise as well, or one that disables helpers."""
    kind = getattr(errors, said.kind, None)
    if isinstance(kind, type) and issubclass(kind, BootseerError) and not kind.retryable:
        return kind(said.error)
    return HelperFailedError(said.error)
