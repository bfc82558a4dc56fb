"""A rank's side of the node's arena: a Source whose bytes are in memory already, or are waited for.

In: the address and digest that bootrun put into the environment. Out: `ArenaSource`, whose maps are private and
copy-on-write: changes that a rank makes are invisible to other ranks and to its own next mapping. If the
checkpoint service ends, bytes in memory stay usable, and the rest is read from the store.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from bootseer.checkpoint.format.mapping import map_range
from bootseer.checkpoint.io.arena import READY
from bootseer.checkpoint.io.source import Request, Source, SourceFile
from bootseer.errors import BootseerError, CheckpointError, NotFound, StorageError, Truncated
from bootseer.ipc.framing import decode, encode
from bootseer.ipc.unix_sockets import is_own

CONNECT_LIMIT_S = 30.0
SILENCE_LIMIT_S = 30.0  # the service sends a keepalive every few seconds
MAX_HEADER_BYTES = 64 << 20
SEND_AFTER = 64  # small spans that are batched before they are sent to the service
SEND_AT_ONCE_BYTES = 1 << 20
BATCH_BYTES = 64 << 20  # copied out while the rest is still being fetched

Span = tuple[int, int, int]  # number of the file, start, end


def connect(address: str, digest: str, fallback: Callable[[], Source] | None = None) -> ArenaSource | None:
    """Connect to the arena of a service; return None if it holds another version.

    Args: fallback: opens the same version from the store, once the service is gone.

    Raises: CheckpointError if no service of this user answers.
    """
    try:
        service = ArenaConnection(address, digest)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"the arena at {address} does not answer: {error}") from error
    if service.header["why"]:
        service.close()
        return None
    return ArenaSource(address, service, fallback)


class ArenaSource:
    """See the module's docstring. Implements Source."""

    def __init__(self, address: str, service: ArenaConnection, fallback: Callable[[], Source] | None) -> None:
        header = service.header
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
        self._states = map_range(service.states_fd, 0, max(1, count), is_writable=False)
        service.forget_states()
        self._fds: dict[int, int] = {}
        self._address = address
        self._idle = [service]  # connections; each is used by one thread at a time
        self._is_gone = False
        self._has_let_go = False
        self._is_closed = False
        self._open_fallback = fallback
        self._fallback: Source | None = None
        self._unsent: list[Span] = []
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
        """Return a new private mapping at each call.

        Raises: StorageError or IntegrityError if the bytes cannot be read at all.
        """
        span = self._check(path, offset, length)
        if not length:
            return memoryview(bytearray())
        self._wait([span])
        if self._is_missing(span):
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
            untold, self._unsent = self._unsent, []
            idle, self._idle = self._idle, []
            fds, self._fds = self._fds, {}
        for service in idle[:1]:
            try:
                service.tell({"do": "asked", "spans": untold})
                service.tell({"do": "done"})
            except OSError:
                pass  # the service is gone
        for service in idle:
            service.close()
        for fd in fds.values():
            os.close(fd)
        if self._fallback is not None:
            self._fallback.close()

    def let_go(self) -> None:
        """Release the arena's memory once no other thread reads from it; the rest comes from the store."""
        self._check_process()
        with self._lock:
            self._is_gone = self._has_let_go = True
            idle, self._idle = self._idle, []
            unused = self._take_unused()
        for service in idle:
            service.close()
        for fd in unused:
            os.close(fd)

    def statistics(self) -> dict[str, int]:
        with self._lock:
            counts = dict(self._counts)
        if self._fallback is not None:
            counts["read_bytes"] += self._fallback.statistics()["read_bytes"]
        return counts

    # ---- presence ---------------------------------------------------------------------------------------

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

    def _is_missing(self, span: Span) -> bool:
        return next(self._unready(span), None) is not None

    def _announce(self, spans: Sequence[Span]) -> None:
        """Request all units that will be waited for."""
        units = self._all_unready(spans)
        with self._lease() as service:
            if units and service is not None:
                try:
                    service.ask(units)
                except OSError:
                    service.close()  # the next call notices that the service is gone

    def _wait(self, spans: Sequence[Span]) -> None:
        """Wait until spans are ready or have failed. Raises StorageError if no other source has them."""
        units = self._all_unready(spans)
        if not units:
            return
        with self._lease() as service:
            if service is None:
                return
            try:
                answer = service.want(units)
                why = str(answer["why"])
            except (OSError, ValueError, KeyError, TypeError):
                service.close()
                self._is_gone = True
                return
        if why and self._open_fallback is None:
            raise StorageError(why)

    def _all_unready(self, spans: Sequence[Span]) -> list[tuple[int, int, int]]:
        return _joined((span[0], unit) for span in spans for unit in self._unready(span))

    def _fill(self, request: Request, span: Span) -> bool:
        if self._is_missing(span):
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
        """Yield the file's descriptor, open inside the block; None if the service cannot send it."""
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
        """Return the descriptors to close; requires the lock."""
        if not self._has_let_go or self._readers:
            return []
        fds, self._fds = self._fds, {}
        return list(fds.values())

    def _open(self, number: int) -> int | None:
        fd = self._fds.get(number)
        if fd is not None:
            return fd
        with self._lease() as service:
            if service is None:
                return None
            try:
                fd = service.open(number)
            except (OSError, ValueError, KeyError, TypeError):
                service.close()
                self._is_gone = True
                return None
        with self._lock:
            known = self._fds.setdefault(number, fd)
        if known != fd:
            os.close(fd)
        return known

    def _note(self, span: Span) -> None:
        """Record a span for the next load's prefetch."""
        with self._lock:
            self._counts["requests"] += 1
            self._counts["arena_bytes"] += span[2] - span[1]
            if span[1] < span[2]:
                self._unsent.append(span)
            if span[2] - span[1] < SEND_AT_ONCE_BYTES and len(self._unsent) < SEND_AFTER:
                return
            untold, self._unsent = self._unsent, []
        with self._lease() as service:
            if service is not None:
                try:
                    service.tell({"do": "asked", "spans": untold})
                except OSError:
                    pass  # the service is gone

    # ---- the service -----------------------------------------------------------------------------------------

    @contextmanager
    def _lease(self) -> Iterator[ArenaConnection | None]:
        """Yield a connection for this thread alone; None if the service is gone."""
        self._check_process()
        service = None
        with self._lock:
            if self._idle:
                service = self._idle.pop()
        if service is None and not self._is_gone and not self._is_closed:
            try:
                service = ArenaConnection(self._address, self.digest)
                service.forget_states()
                if service.header["why"]:
                    raise OSError(service.header["why"])
            except (OSError, ValueError, KeyError, TypeError):
                if service is not None:
                    service.close()
                    service = None
                self._is_gone = True
        try:
            yield service
        finally:
            if service is not None and not service.is_closed:
                with self._lock:
                    if self._is_closed or self._has_let_go:
                        service.close()
                    else:
                        self._idle.append(service)

    def _check_process(self) -> None:
        """Open new connections in a forked child: the inherited ones are the parent's."""
        if self._pid != os.getpid():
            for service in self._idle:
                service.close()  # the inherited copy of the descriptor
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
                    raise StorageError("this node's arena is gone; the rest of the checkpoint cannot be loaded")
                try:
                    self._fallback = self._open_fallback()
                except BootseerError as error:
                    raise StorageError(
                        f"this node's arena is gone, and the store cannot be read: {error}"
                    ) from error
            return self._fallback


class ArenaConnection:
    """A connection to a service's arena; used by one thread at a time."""

    def __init__(self, address: str, digest: str, *, limit_s: float = CONNECT_LIMIT_S) -> None:
        """Raises OSError, ValueError, KeyError or TypeError if the peer is not this user's service; `why` in the
        header means that it holds another version."""
        self.is_closed = False
        self.states_fd = -1
        self._questions = 0
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._connection.settimeout(limit_s)
            self._connection.connect(address)
            if not is_own(self._connection):
                raise OSError("the socket belongs to another user")
            self.tell({"do": "attach", "digest": digest, "rank": int(os.environ.get("LOCAL_RANK") or -1)})
            self.header: dict[str, Any] = self._hear()
            if not self.header["why"]:
                self.states_fd = self._take_fd()
        except BaseException:
            self.close()
            raise
        self._connection.settimeout(min(limit_s, SILENCE_LIMIT_S))

    def tell(self, record: dict[str, Any]) -> None:
        self._connection.sendall(encode(record))

    def want(self, units: list[tuple[int, int, int]]) -> dict[str, Any]:
        """Wait until units are ready or have failed."""
        number = self.ask(units)
        while (answer := self._hear())["id"] != number:
            pass  # a keepalive, or the answer to an earlier request
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
        """Send a request without waiting for the answer."""
        self._questions += 1
        self.tell({"do": "want", "id": self._questions, "units": units})
        return self._questions

    def _hear(self) -> dict[str, Any]:
        """Receive exactly one line: a descriptor may follow it."""
        parts = bytearray()
        while not parts.endswith(b"\n"):
            chunk = self._connection.recv(1 << 16, socket.MSG_PEEK)
            if not chunk or len(parts) > MAX_HEADER_BYTES:
                raise OSError("the connection was closed")
            end = chunk.find(b"\n")
            parts += self._connection.recv(len(chunk) if end < 0 else end + 1)
        return decode(bytes(parts))

    def _take_fd(self) -> int:
        data, fds, _, _ = socket.recv_fds(self._connection, 1, 1)
        if not data or not fds:
            raise OSError("the connection was closed, or this process is out of descriptors")
        os.set_inheritable(fds[0], False)
        return fds[0]


def _cut(request: Request) -> Iterator[Request]:
    path, offset, target = request
    for at in range(0, len(target), BATCH_BYTES):
        yield Request(path, offset + at, target[at : at + BATCH_BYTES])
    if not target:
        yield request  # its path is still checked


def _batches(spans: Sequence[Span]) -> Iterator[range]:
    """Yield ranges of spans in groups of about BATCH_BYTES at most."""
    start = size = 0
    for at, (_, begin, end) in enumerate(spans):
        if size and size + end - begin > BATCH_BYTES:
            yield range(start, at)
            start, size = at, 0
        size += end - begin
    if start < len(spans):
        yield range(start, len(spans))


def _joined(units: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return runs (file, first, end) of consecutive units, in order."""
    found: list[tuple[int, int, int]] = []
    for file, unit in sorted(set(units)):
        if found and found[-1][0] == file and found[-1][2] == unit:
            found[-1] = (file, found[-1][1], unit + 1)
        else:
            found.append((file, unit, unit + 1))
    return found
