"""A rank's side of the node's arena: a Source whose bytes are in memory already, or are waited for.

In: the address and digest that bootrun put into the environment. Out: `ArenaSource`, whose maps are private copies
on write: what one rank does to its tensors neither another rank nor its own next look sees. When the keeper is
gone, what is there stays usable, and the rest is read from the store.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from bootseer.checkpoint.arena import READY
from bootseer.checkpoint.mapping import map_range
from bootseer.checkpoint.peers import is_own
from bootseer.checkpoint.source import Request, Source, SourceFile
from bootseer.errors import BootseerError, CheckpointError, NotFound, StorageError, Truncated

CONNECT_LIMIT_S = 30.0
SILENCE_LIMIT_S = 30.0  # the keeper gives a sign of life every few seconds
MOST_HEADER_BYTES = 64 << 20
TELL_AFTER = 64  # small spans that are kept before the keeper is told
TELL_AT_ONCE_BYTES = 1 << 20
BATCH_BYTES = 64 << 20  # copied out while the rest is still on its way

Span = tuple[int, int, int]  # number of the file, start, end


def connect(address: str, digest: str, fallback: Callable[[], Source] | None = None) -> ArenaSource | None:
    """The arena at a keeper's address, None if it holds another version.

    Args: fallback: opens the same version from the store, once the keeper is gone.

    Raises: CheckpointError when nobody of ours answers there.
    """
    try:
        keeper = KeeperConnection(address, digest)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"the arena at {address} does not answer: {error}") from error
    if keeper.header["why"]:
        keeper.close()
        return None
    return ArenaSource(address, keeper, fallback)


class ArenaSource:
    """See the module's docstring. Implements Source."""

    def __init__(self, address: str, keeper: KeeperConnection, fallback: Callable[[], Source] | None) -> None:
        header = keeper.header
        self.url = "arena:"
        self.version = str(header["version"])
        self.digest = str(header["digest"])
        self.files: Mapping[str, SourceFile] = {path: SourceFile(path, size) for path, size, _ in header["files"]}
        self._numbers = {path: number for number, path in enumerate(self.files)}
        self._unit_bytes = [int(length) for _, _, length in header["files"]]
        self._first_unit: list[int] = []
        count = 0
        for (_, size, _), length in zip(header["files"], self._unit_bytes, strict=True):
            self._first_unit.append(count)
            count += -(-size // length)
        self._states = map_range(keeper.states_fd, 0, max(1, count), is_writable=False)
        keeper.forget_states()
        self._fds: dict[int, int] = {}
        self._address = address
        self._idle = [keeper]  # connections; each is used by one thread at a time
        self._is_gone = False
        self._has_let_go = False
        self._is_closed = False
        self._open_fallback = fallback
        self._fallback: Source | None = None
        self._untold: list[Span] = []
        self._counts = {"requests": 0, "read_bytes": 0, "arena_bytes": 0}
        self._begin_process()

    def read(self, requests: Sequence[Request]) -> None:
        parts = [part for request in requests for part in _cut(request)]
        spans = [self._check(*part[:2], len(part.target)) for part in parts]
        batches = list(_batches(spans))
        if len(batches) > 1:
            self._announce(spans)
        missing: list[Request] = []
        for batch in batches:
            self._wait([spans[at] for at in batch])
            missing += [parts[at] for at in batch if not self._fill(parts[at], spans[at])]
        if missing:
            self._get_fallback().read(missing)

    def map(self, path: str, offset: int, length: int) -> memoryview | None:
        """A mapping of its own at each call: nobody has written to it yet.

        Raises: StorageError or IntegrityError if the bytes cannot be had at all.
        """
        span = self._check(path, offset, length)
        if not length:
            return memoryview(bytearray())
        self._wait([span])
        if self._lacks(span):
            return None
        with self._opened(span[0]) as fd:
            if fd is None:
                return None
            try:
                view = map_range(fd, offset, length, is_private=True)
            except OSError:
                return None  # too many mappings: copies need none
        self._note(span)
        return view

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._check_process()
            untold, self._untold = self._untold, []
            idle, self._idle = self._idle, []
            fds, self._fds = self._fds, {}
        for keeper in idle[:1]:
            try:
                keeper.tell({"do": "asked", "spans": untold})
                keeper.tell({"do": "done"})
            except OSError:
                pass  # nobody is there who would want to know
        for keeper in idle:
            keeper.close()
        for fd in fds.values():
            os.close(fd)
        if self._fallback is not None:
            self._fallback.close()

    def let_go(self) -> None:
        """Gives up the arena's memory, as soon as no other thread reads from it: the rest comes from the store."""
        self._check_process()
        with self._lock:
            self._is_gone = self._has_let_go = True
            idle, self._idle = self._idle, []
            unused = self._take_unused()
        for keeper in idle:
            keeper.close()
        for fd in unused:
            os.close(fd)

    def statistics(self) -> dict[str, int]:
        with self._lock:
            counts = dict(self._counts)
        if self._fallback is not None:
            counts["read_bytes"] += self._fallback.statistics()["read_bytes"]
        return counts

    # ---- what is there ---------------------------------------------------------------------------------------

    def _check(self, path: str, offset: int, length: int) -> Span:
        file = self.files.get(path)
        if file is None:
            raise NotFound(f"this node's arena: has no file {path}")
        if offset < 0 or length < 0 or offset + length > file.size:
            raise Truncated(f"{path}: bytes {offset} to {offset + length} of a file of {file.size}")
        return self._numbers[path], offset, offset + length

    def _unready(self, span: Span) -> Iterator[int]:
        number, start, end = span
        if start == end:
            return
        length, first = self._unit_bytes[number], self._first_unit[number]
        for unit in range(start // length, -(-end // length)):
            if self._states[first + unit] != READY:
                yield unit

    def _lacks(self, span: Span) -> bool:
        return next(self._unready(span), None) is not None

    def _announce(self, spans: Sequence[Span]) -> None:
        """Has all that will be waited for on its way."""
        units = self._all_unready(spans)
        with self._lease() as keeper:
            if units and keeper is not None:
                try:
                    keeper.ask(units)
                except OSError:
                    keeper.close()  # the next call finds out what has become of it

    def _wait(self, spans: Sequence[Span]) -> None:
        """Until spans are there, or are known not to come. Raises StorageError if nobody else has them."""
        units = self._all_unready(spans)
        if not units:
            return
        with self._lease() as keeper:
            if keeper is None:
                return
            try:
                answer = keeper.want(units)
                why = str(answer["why"])
            except (OSError, ValueError, KeyError, TypeError):
                keeper.close()
                self._is_gone = True
                return
        if why and self._open_fallback is None:
            raise StorageError(why)

    def _all_unready(self, spans: Sequence[Span]) -> list[tuple[int, int, int]]:
        return _joined((span[0], unit) for span in spans for unit in self._unready(span))

    def _fill(self, request: Request, span: Span) -> bool:
        if self._lacks(span):
            return False
        with self._opened(span[0]) as fd:
            if fd is None:
                return False
            done = 0
            while done < len(request.target):
                done += os.preadv(fd, [request.target[done:]], request.offset + done)
        self._note(span)
        return True

    @contextmanager
    def _opened(self, number: int) -> Iterator[int | None]:
        """The file's descriptor, which stays open for that long; None if nobody is there to give it."""
        self._check_process()
        with self._lock:
            self._readers += 1
        try:
            yield self._open(number)
        finally:
            with self._lock:
                self._readers -= 1
                unused = self._take_unused()
            for fd in unused:
                os.close(fd)

    def _take_unused(self) -> list[int]:
        """Descriptors to close; with the lock."""
        if not self._has_let_go or self._readers:
            return []
        fds, self._fds = self._fds, {}
        return list(fds.values())

    def _open(self, number: int) -> int | None:
        fd = self._fds.get(number)
        if fd is not None:
            return fd
        with self._lease() as keeper:
            if keeper is None:
                return None
            try:
                fd = keeper.open(number)
            except (OSError, ValueError, KeyError, TypeError):
                keeper.close()
                self._is_gone = True
                return None
        with self._lock:
            known = self._fds.setdefault(number, fd)
        if known != fd:
            os.close(fd)
        return known

    def _note(self, span: Span) -> None:
        """For the next load's prefetch."""
        with self._lock:
            self._counts["requests"] += 1
            self._counts["arena_bytes"] += span[2] - span[1]
            if span[1] < span[2]:
                self._untold.append(span)
            if span[2] - span[1] < TELL_AT_ONCE_BYTES and len(self._untold) < TELL_AFTER:
                return
            untold, self._untold = self._untold, []
        with self._lease() as keeper:
            if keeper is not None:
                try:
                    keeper.tell({"do": "asked", "spans": untold})
                except OSError:
                    pass  # the keeper is gone: nobody keeps it

    # ---- the keeper ------------------------------------------------------------------------------------------

    @contextmanager
    def _lease(self) -> Iterator[KeeperConnection | None]:
        """A connection for this thread alone; None if the keeper is gone."""
        self._check_process()
        keeper = None
        with self._lock:
            if self._idle:
                keeper = self._idle.pop()
        if keeper is None and not self._is_gone and not self._is_closed:
            try:
                keeper = KeeperConnection(self._address, self.digest)
                keeper.forget_states()
                if keeper.header["why"]:
                    raise OSError(keeper.header["why"])
            except (OSError, ValueError, KeyError, TypeError):
                if keeper is not None:
                    keeper.close()
                    keeper = None
                self._is_gone = True
        try:
            yield keeper
        finally:
            if keeper is not None and not keeper.is_closed:
                with self._lock:
                    if self._is_closed or self._has_let_go:
                        keeper.close()
                    else:
                        self._idle.append(keeper)

    def _check_process(self) -> None:
        """In a forked child connections are the parent's: it gets its own."""
        if self._pid != os.getpid():
            for keeper in self._idle:
                keeper.close()  # our copy of the descriptor
            self._idle = []
            self._begin_process()

    def _begin_process(self) -> None:
        self._lock = threading.Lock()
        self._readers = 0  # threads that use descriptors
        self._pid = os.getpid()

    def _get_fallback(self) -> Source:
        with self._lock:
            if self._fallback is None:
                if self._open_fallback is None:
                    raise StorageError("this node's arena is gone, and with it what was not loaded yet")
                try:
                    self._fallback = self._open_fallback()
                except BootseerError as error:
                    raise StorageError(
                        f"this node's arena is gone, and the store does not help: {error}"
                    ) from error
            return self._fallback


class KeeperConnection:
    """To a keeper's arena; used by one thread at a time."""

    def __init__(self, address: str, digest: str, *, limit_s: float = CONNECT_LIMIT_S) -> None:
        """Raises OSError, ValueError, KeyError or TypeError when it is not ours that answers; with `why` in the
        header it holds another version."""
        self.is_closed = False
        self.states_fd = -1
        self._questions = 0
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._connection.settimeout(limit_s)
            self._connection.connect(address)
            if not is_own(self._connection):
                raise OSError("it is another user's")
            self.tell({"do": "attach", "digest": digest, "rank": int(os.environ.get("LOCAL_RANK") or -1)})
            self.header: dict[str, Any] = self._hear()
            if not self.header["why"]:
                self.states_fd = self._take_fd()
        except BaseException:
            self.close()
            raise
        self._connection.settimeout(min(limit_s, SILENCE_LIMIT_S))

    def tell(self, record: dict[str, Any]) -> None:
        self._connection.sendall(json.dumps(record).encode() + b"\n")

    def want(self, units: list[tuple[int, int, int]]) -> dict[str, Any]:
        """Waits until units are ready or have failed."""
        number = self.ask(units)
        while (answer := self._hear())["id"] != number:
            pass  # a sign of life, or what an earlier question came to
        return answer

    def open(self, number: int) -> int:
        self.tell({"do": "file", "file": number})
        while "id" in self._hear():
            pass
        return self._take_fd()

    def forget_states(self) -> None:
        if self.states_fd >= 0:
            os.close(self.states_fd)
            self.states_fd = -1

    def close(self) -> None:
        self.is_closed = True
        self.forget_states()
        self._connection.close()

    def ask(self, units: list[tuple[int, int, int]]) -> int:
        """Without waiting for the answer."""
        self._questions += 1
        self.tell({"do": "want", "id": self._questions, "units": units})
        return self._questions

    def _hear(self) -> dict[str, Any]:
        """A line, byte for byte what belongs to it: a descriptor may follow."""
        parts = bytearray()
        while not parts.endswith(b"\n"):
            chunk = self._connection.recv(1 << 16, socket.MSG_PEEK)
            if not chunk or len(parts) > MOST_HEADER_BYTES:
                raise OSError("the connection was closed")
            end = chunk.find(b"\n")
            parts += self._connection.recv(len(chunk) if end < 0 else end + 1)
        found = json.loads(parts)
        if not isinstance(found, dict):
            raise TypeError("an answer is no object")
        return found

    def _take_fd(self) -> int:
        data, fds, _, _ = socket.recv_fds(self._connection, 1, 1)
        if not data or not fds:
            raise OSError("the connection was closed, or this process has no descriptor left")
        os.set_inheritable(fds[0], False)
        return fds[0]


def _cut(request: Request) -> Iterator[Request]:
    path, offset, target = request
    for at in range(0, len(target), BATCH_BYTES):
        yield Request(path, offset + at, target[at : at + BATCH_BYTES])
    if not target:
        yield request  # to be checked


def _batches(spans: Sequence[Span]) -> Iterator[range]:
    """Places of spans in groups of at most about BATCH_BYTES."""
    start = size = 0
    for at, (_, begin, end) in enumerate(spans):
        if size and size + end - begin > BATCH_BYTES:
            yield range(start, at)
            start, size = at, 0
        size += end - begin
    if start < len(spans):
        yield range(start, len(spans))


def _joined(units: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(file, first, end) for units in order."""
    found: list[tuple[int, int, int]] = []
    for file, unit in sorted(set(units)):
        if found and found[-1][0] == file and found[-1][2] == unit:
            found[-1] = (file, found[-1][1], unit + 1)
        else:
            found.append((file, unit, unit + 1))
    return found
