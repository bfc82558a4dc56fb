"""Hands portions of a tree out to processes of unpack_helper.py, and hears what becomes of these.

They begin before the tree is opened, so that they are ready when it is (unpack_processes.py). What goes wrong with
them costs only time: HelperFailedError says that the environment is to be unpacked without them. Who makes no
progress is given up; how long all takes does not matter.
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
from bootseer.env.env_tree import EnvTree, StoredTree
from bootseer.env.unpack_helper import Begin, Blocks, Given, Order, Said
from bootseer.env.unpack_processes import HelperProcess, Started, cores, end_spare, memory_errors, take_spare
from bootseer.errors import BootseerError
from bootseer.tree.index import Index
from bootseer.tree.materialise_helpers import HelperFailedError, Owners
from bootseer.tree.materialise_portions import Portion

if TYPE_CHECKING:
    from bootseer.env.snapshot import Snapshot

WORTH_FILES = 3000  # less is unpacked before another process has begun
WORTH_BYTES = 128 << 20
PATIENCE_S = 120.0  # without a word of one that is at work; reads of a store give up before
_POLL_S = 0.5
_AHEAD = 2  # portions that a process has at once, so that it never waits for one


class UnpackHelpers:
    """So many processes for one tree. Implements materialise.Helpers."""

    def __init__(self, started: Started) -> None:
        self.skipped: Counter[str] = Counter()
        self._started = started
        self._helpers = [_Helper(process) for process in started.processes]
        self._used_bytes = 0
        self._given: Iterator[tuple[Given, Portion]] = iter(())

    @property
    def count(self) -> int:
        return len(self._helpers)

    def order(self, order: Order) -> None:
        """Once: which tree. Raises: HelperFailedError."""
        for helper in self._helpers:
            helper.tell(order)

    def begin(self, index: Index, folder: str, root_fd: int, owners: Owners, given: Iterator[Portion]) -> None:
        """As Helpers says."""
        offset, length = self._put(Blocks(packs=index.packs, blocks=index.blocks))
        found = os.fstat(root_fd)
        begin = Begin(
            offset=offset, length=length, folder=folder, device=found.st_dev, inode=found.st_ino, owners=owners
        )
        for helper in self._helpers:
            helper.tell(begin)
        self._given = self._numbered(given)
        for _ in range(_AHEAD):
            for helper in self._helpers:
                self._give(helper)

    def wait(self) -> Generator[tuple[int, int], None, None]:
        """As Helpers says."""
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
                    else:  # a machine that was asleep, or we, say nothing about them
                        helper.was_silent(min(_POLL_S, now_s - before_s))
                if not ready:
                    yield 0, 0
        for helper in self._helpers:
            helper.kill()  # it has nothing to do any more, and its end takes longer than it seems

    def close(self) -> None:
        """Ends them all, in the middle of whatever they do."""
        self._started.close()
        self._helpers.clear()

    def _numbered(self, given: Iterator[Portion]) -> Iterator[tuple[Given, Portion]]:
        for number, portion in enumerate(given):
            offset, length = self._put(portion.tree)
            yield Given(number=number, offset=offset, length=length), portion

    def _give(self, helper: _Helper) -> None:
        """The next portion, if there is one."""
        found = next(self._given, None)
        if found is not None:
            given, portion = found
            helper.todo.append(_Doing(given.number, portion.files, portion.written_bytes))
            with suppress(HelperFailedError):  # it has ended: `wait` hears first what it has said last
                helper.tell(given)

    def _hear(self, helper: _Helper) -> tuple[int, int]:
        """Bytes and files that it has written."""
        written = files = 0
        for said in helper.read():
            if said.error:
                raise _to_error(said)
            if not helper.todo or helper.todo[0].take(said):
                raise HelperFailedError("a process that unpacks says what cannot be")
            written, files = written + said.bytes, files + said.files
            if said.is_done:
                helper.todo.popleft()
                self.skipped.update(said.skipped)
                self._give(helper)
        return written, files

    def _put(self, what: msgspec.Struct) -> tuple[int, int]:
        """Into the memory: offset and length."""
        data, offset = memoryview(msgspec.msgpack.encode(what)), self._used_bytes
        with memory_errors():
            while data:
                count = os.pwrite(self._started.memory_fd, data, self._used_bytes)
                data, self._used_bytes = data[count:], self._used_bytes + count
        return offset, self._used_bytes - offset


class _Doing:
    """What is to come of a portion."""

    def __init__(self, number: int, files: int, written_bytes: int) -> None:
        self._number, self._files, self._bytes = number, files, written_bytes

    def take(self, said: Said) -> bool:
        """Whether it cannot be."""
        self._files -= said.files
        self._bytes -= said.bytes
        is_less = min(said.files, said.bytes, self._files, self._bytes) < 0
        return said.number != self._number or is_less or (said.is_done and (self._files or self._bytes) != 0)


class _Helper:
    """One process, and what it has to do."""

    def __init__(self, process: HelperProcess) -> None:
        self.todo: deque[_Doing] = deque()
        self.said_fd = process.said_fd
        self._process = process
        self._silent_s = 0.0

    def tell(self, what: Order | Begin | Given) -> None:
        self._process.tell(msgspec.json.encode(what))

    def read(self) -> Iterator[Said]:
        """What has come. Raises: HelperFailedError."""
        lines = self._process.read()
        self._silent_s = 0.0
        for line in lines:
            try:
                yield msgspec.json.decode(line, type=Said)
            except msgspec.MsgspecError as error:
                raise HelperFailedError("a process that unpacks says what nobody understands") from error

    def was_silent(self, seconds: float) -> None:
        """Raises: HelperFailedError when that is too much for one that has something to do."""
        self._silent_s = self._silent_s + seconds if self.todo else 0.0
        if self._silent_s > PATIENCE_S:
            raise HelperFailedError(f"a process that unpacks has written nothing for {PATIENCE_S:g} s")

    def kill(self) -> None:
        self._process.kill()


@contextmanager
def unpack_helpers(
    tree: EnvTree, snapshot: Snapshot, environ: Mapping[str, str], *, is_wanted: bool
) -> Iterator[UnpackHelpers | None]:
    """One for each core; None where that is not worth it, or not possible."""
    helpers = None
    is_large = snapshot.files >= WORTH_FILES or snapshot.bytes >= WORTH_BYTES
    # Of stores that are far, one process keeps the connections: their links are slower than its core.
    if is_wanted and is_large and cores() > 1 and isinstance(tree, StoredTree) and tree.is_in_files:
        order = Order(url=tree.url, digest=tree.digest)
        try:
            helpers = _take(environ, order)
        except HelperFailedError:
            pass  # then by one process
    else:
        end_spare()
    try:
        yield helpers
    finally:
        if helpers is not None:
            helpers.close()


def _take(environ: Mapping[str, str], order: Order) -> UnpackHelpers:
    """The spare ones, if they are as good as new ones. Raises: HelperFailedError."""
    spare = take_spare(environ)
    if spare is not None:
        try:
            return _ordered(spare, order)
        except HelperFailedError:
            pass  # they have died meanwhile
    return _ordered(Started(environ, cores()), order)


def _ordered(started: Started, order: Order) -> UnpackHelpers:
    """Raises: HelperFailedError; then they have ended."""
    helpers = UnpackHelpers(started)
    try:
        helpers.order(order)
    except BaseException:
        helpers.close()
        raise
    return helpers


def _to_error(said: Said) -> BootseerError:
    """What one process would raise as well, or why none of them is used any more."""
    kind = getattr(errors, said.kind, None)
    if isinstance(kind, type) and issubclass(kind, BootseerError) and not kind.retryable:
        return kind(said.error)
    return HelperFailedError(said.error)
