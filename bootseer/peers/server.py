"""Serving of this node's spans to the nodes of its job, which authenticate with the job's key.

Each connection starts with a handshake, followed by any number of requests (wire.py, auth.py). Missing data are
fetched into the spool (filling.py) and sent on as they arrive. While the store is slow, a sign of life is sent
each second. Bodies go from the file to the socket inside the kernel. Connections, heads, time without progress and
bytes per second are bounded. For one event loop; all tasks end when `serve` is cancelled.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from contextlib import suppress
from functools import partial

from bootseer import aio
from bootseer.errors import BootseerError, NotFound, StorageError, Truncated
from bootseer.linux.page_cache import cached_share
from bootseer.logs import get_logger
from bootseer.peers import wire
from bootseer.peers.auth import NONCE_BYTES, Handshake, Session
from bootseer.peers.filling import Filler
from bootseer.peers.membership import JobPeers, Origin, PeersFile, may_share
from bootseer.peers.spans import SPAN_BYTES
from bootseer.peers.spool import Spool, SpooledSpan, SpoolFullError
from bootseer.storage import Store, open_store
from bootseer.storage.engine.rate_limit import RateLimiter
from bootseer.storage.paths import check_path
from bootseer.tuning import current

_log = get_logger(__name__)

MAX_UNAUTHENTICATED = 64  # unauthenticated connections
HANDSHAKE_S = 5.0  # for authentication
IDLE_S = 90.0  # between two requests; clients close idle ones sooner
STALL_S = 10.0  # a reader that receives nothing for this long is dropped
KEEPALIVE_S = 1.0  # between signs of life
REGISTER_S, REGISTER_POLL_S = (
    2.0,
    0.05,
)  # nodes register a store one after the other: a request that comes too early waits
MAX_AWAITED = 256  # directories of stores that this node has not registered
BURST_S = 0.05  # of the upload limit
SLICE_BYTES = 256 << 10  # sent at once; the unit of limit and deadline
ACCEPT_PAUSE_S = 0.1  # if no descriptors are left
COUNTS = ("answers", "upload_bytes", "local_bytes", "refused", "dropped", "failed", "no_room")
_RECEIVED_BYTES = 4096
_COPIED_BYTES = 256 << 10


class PeerServer:
    """A server at `listener` for the stores of `file`; the owner of the spool closes it.

    Args: upload_bytes_per_s: limit of uploads to other nodes; None: unlimited.
    """

    def __init__(
        self,
        listener: socket.socket,
        file: PeersFile,
        spool: Spool,
        *,
        upload_bytes_per_s: float | None = None,
    ) -> None:
        self._listener, self._file, self._spool = listener, file, spool
        self._uploads = RateLimiter(upload_bytes_per_s, BURST_S)
        self._stores: dict[str, tuple[Origin, Store]] = {}  # by id
        self._replaced: list[Store] = []
        self._known: tuple[JobPeers, dict[str, Origin]] | None = None  # last state of the file
        self._filler: Filler | None = None
        self._max_connections = current().peers.max_connections
        self._connections = self._unauthenticated = 0
        self._first_requests: dict[tuple[str, str], float] = {}  # directory of a store: time of its first request
        self._counts = dict.fromkeys(COUNTS, 0)
        self._sent_to: dict[str, int] = {}  # bytes, by id of the peer

    async def serve(self) -> None:
        """Serve until cancelled."""
        loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        try:
            async with asyncio.TaskGroup() as group:
                self._filler = Filler(self._spool, group)
                while True:
                    try:
                        sock, _ = await loop.sock_accept(self._listener)
                    except OSError:
                        await asyncio.sleep(ACCEPT_PAUSE_S)
                        continue
                    if self._connections >= self._max_connections or self._unauthenticated >= MAX_UNAUTHENTICATED:
                        self._counts["refused"] += 1
                        sock.close()
                    else:
                        self._connections += 1
                        self._unauthenticated += 1
                        connection = Connection(sock)
                        task = group.create_task(self._connected(connection))
                        # Not in the task, which may be cancelled before its first step.
                        task.add_done_callback(partial(self._ended, connection))
                    await asyncio.sleep(0)  # let connected clients run
        finally:
            for store in (*self._replaced, *(store for _, store in self._stores.values())):
                await store.aclose()

    def statistics(self) -> dict[str, object]:
        """Return counters since creation.

        `upload_bytes`: sent to other nodes. `local_bytes`: sent to this node. `sent_to`: by node. `refused`:
        connections and requests from outside the job. `dropped`: readers that received nothing. `failed`: reads
        that the store refused. `no_room`: in the spool. `store_...`: requests to the store.
        """
        filled = {} if self._filler is None else self._filler.statistics()
        return {
            **self._counts,
            **filled,
            "sent_to": dict(self._sent_to),
            "connections": self._connections,
            "spool": self._spool.statistics(),
        }

    # ---- one connection ------------------------------------------------------------------------------------

    async def _connected(self, connection: Connection) -> None:
        try:
            greeted = await self._handshake(connection)
            while greeted is not None:
                client, session, head = greeted
                if not await self._answer(connection, head, client, session):
                    break
                head = await connection.next_head()
                greeted = (client, session, head) if head else None
        except wire.WireError:
            self._counts["refused"] += 1
            await connection.try_send(wire.write_answer(400))
        except (TimeoutError, OSError):
            self._counts["dropped"] += 1
        except BootseerError:  # no thread for a read, for example
            self._counts["failed"] += 1
        except Exception as error:  # on any error other connections continue
            self._counts["failed"] += 1
            _log.info("internal error while answering another node: %s: %s", type(error).__name__, error)

    def _ended(self, connection: Connection, _task: asyncio.Task[None]) -> None:
        self._connections -= 1
        self._unauthenticated -= connection.is_unauthenticated
        connection.sock.close()

    async def _handshake(self, connection: Connection) -> tuple[str, Session, bytes] | None:
        """Return the client's name, the session and its first request, after a handshake; None if refused."""
        async with asyncio.timeout(HANDSHAKE_S):
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            head = await connection.read_head()
            if not head:
                return None
            hello = wire.read_request(head)
            if not isinstance(hello, wire.Hello):
                await self._refuse(connection, 403)
                return None
            peers = self._peers_with(hello.client)
            if peers is None:  # nodes learn of each other one after the other
                await self._refuse(connection, 503)
                return None
            if hello.server != peers.own:
                await self._refuse(connection, 403)
                return None
            nonce = os.urandom(NONCE_BYTES)
            greeting = Handshake(hello.client, hello.server, hello.nonce, nonce)
            key = peers.key_bytes()
            await connection.send(wire.write_hello_answer(nonce, greeting.server_proof(key)))
            head = await connection.read_head()
        return (hello.client, greeting.session(key), head) if head else None

    async def _refuse(self, connection: Connection, status: int) -> None:
        self._counts["refused"] += 1
        await connection.send(wire.write_answer(status))

    async def _answer(self, connection: Connection, head: bytes, client: str, session: Session) -> bool:
        """Answer one request. Return whether another may follow."""
        ask = wire.read_request(head)
        if not isinstance(ask, wire.RangeRequest) or not session.is_signed(
            ask.mac, ask.target, ask.asked, ask.etag
        ):
            await self._refuse(connection, 403)
            return False
        self._unauthenticated -= connection.is_unauthenticated
        connection.is_unauthenticated = False
        store = await self._named_store(connection, ask)
        span = ask.start // SPAN_BYTES
        if store is None or (ask.end - 1) // SPAN_BYTES != span:
            self._counts["refused"] += 1
            await connection.send(wire.write_answer(404 if store is None else 416))
            return True
        try:
            with self._spool.held((ask.name, span)) as kept:
                return await self._send_range(connection, kept, store, ask, client)
        except SpoolFullError:
            self._counts["no_room"] += 1
            await connection.send(wire.write_answer(503))
            return True

    async def _send_range(
        self, connection: Connection, kept: SpooledSpan, store: Store, ask: wire.RangeRequest, client: str
    ) -> bool:
        assert self._filler is not None
        base = ask.start // SPAN_BYTES * SPAN_BYTES
        start, end = ask.start - base, ask.end - base
        self._filler.want(kept, store, start, end)
        try:
            reached = await self._first(connection, kept, start, end)
        except BootseerError as error:
            self._counts["failed"] += 1
            await connection.send(wire.write_answer(_status_of(error)))
            return True
        self._counts["answers"] += 1
        await connection.send(wire.write_part(ask.start, ask.end))
        at = start
        while True:
            await self._send_slices(connection, kept, at, reached, client)
            at = reached
            if at == end:
                return True
            try:
                reached = await self._filler.reach(kept, at, end)
            except (BootseerError, SpoolFullError):
                self._counts["failed"] += 1
                return False  # the client detects the missing rest by the end of the connection

    async def _first(self, connection: Connection, kept: SpooledSpan, start: int, end: int) -> int:
        """Wait for the first bytes, and send signs of life meanwhile."""
        assert self._filler is not None
        if kept.extents.reach(start) > start:
            return await self._filler.reach(kept, start, end)
        while True:
            await connection.send(wire.write_answer(102))
            with suppress(TimeoutError):
                async with asyncio.timeout(KEEPALIVE_S):
                    return await self._filler.reach(kept, start, end)

    async def _send_slices(
        self, connection: Connection, kept: SpooledSpan, at: int, end: int, client: str
    ) -> None:
        is_upload = self._known is None or client != self._known[0].own
        while at < end:
            count = min(SLICE_BYTES, end - at)
            if is_upload and (wait_s := self._uploads.wait_s(count, time.monotonic())) > 0:
                await asyncio.sleep(wait_s)
            await self._send_slice(connection, kept, at, count)
            self._counts["upload_bytes" if is_upload else "local_bytes"] += count
            self._sent_to[client] = self._sent_to.get(client, 0) + count
            at += count

    async def _send_slice(self, connection: Connection, kept: SpooledSpan, at: int, count: int) -> None:
        offset = self._spool.offset(kept, at)
        if cached_share(self._spool.fd, offset, count) < 1.0:  # otherwise the disk would block all connections
            await aio.run_io(os.pread, self._spool.fd, count, offset)
        async with asyncio.timeout(STALL_S):
            await connection.send_file(self._spool, offset, count)

    # ---- permitted requests --------------------------------------------------------------------------------

    def _peers_with(self, client: str) -> JobPeers | None:
        """Return the job, if this node takes part in it."""
        for is_urgent in (False, True):
            peers = self._peers(is_urgent=is_urgent)
            if peers is not None and any(node.id == client for node in peers.nodes):
                return peers
        return None

    def _peers(self, *, is_urgent: bool = False) -> JobPeers | None:
        peers = self._file.current(is_urgent=is_urgent)
        if peers is None:
            self._known = None
        elif self._known is None or self._known[0] is not peers:
            self._known = peers, peers.origins_by_id()
        return peers

    async def _named_store(self, connection: Connection, ask: wire.RangeRequest) -> Store | None:
        """Return the store of a request; wait once per directory for its registration, as nodes start in turn."""
        store = self._store_of(ask)
        directory = ask.name.origin, os.path.dirname(ask.name.path)
        if store is not None or (
            directory not in self._first_requests and len(self._first_requests) >= MAX_AWAITED
        ):
            self._first_requests.pop(directory, None)
            return store
        end_s = self._first_requests.setdefault(directory, time.monotonic()) + REGISTER_S
        beat_s = 0.0
        while store is None and (now_s := time.monotonic()) < end_s:
            if now_s >= beat_s:
                await connection.send(wire.write_answer(102))
                beat_s = now_s + KEEPALIVE_S
            await asyncio.sleep(REGISTER_POLL_S)
            store = self._store_of(ask)
        return store

    def _store_of(self, ask: wire.RangeRequest) -> Store | None:
        """Return the store of an object that the job shares; None for any other."""
        origin = None
        for is_urgent in (False, True):  # the client may have learned of it just before this node
            if self._peers(is_urgent=is_urgent) is not None and self._known is not None:
                origin = self._known[1].get(ask.name.origin)
            if origin is not None:
                break
        if origin is None or not may_share(origin, ask.name.path):
            return None
        found = self._stores.get(ask.name.origin)
        try:
            check_path("peer", ask.name.path)
            if found is None or found[0] != origin:
                if found is not None:  # open until its reads end
                    self._replaced.append(found[1])
                self._stores[ask.name.origin] = origin, open_store(origin.url, options=origin.options)
        except StorageError:
            return None
        except BootseerError as error:
            _log.info("a store cannot be opened for other nodes: %s", error)
            return None
        return self._stores[ask.name.origin][1]


class Connection:
    """A socket, and the received part of the next head."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.is_unauthenticated = True  # unauthenticated
        self._waiting = bytearray()

    async def read_head(self) -> bytes:
        """Return a head without its end; b"" if the client has closed. Raises: WireError, OSError."""
        loop = asyncio.get_running_loop()
        while (place := self._waiting.find(wire.END)) < 0:
            if len(self._waiting) > wire.MAX_HEAD_BYTES:
                raise wire.WireError("a head that is too long")
            data = await loop.sock_recv(self.sock, _RECEIVED_BYTES)
            if not data:
                return b""
            self._waiting += data
        head = bytes(self._waiting[:place])
        del self._waiting[: place + len(wire.END)]
        return head

    async def next_head(self) -> bytes:
        """Return the next head of an idle connection; b"" also after a timeout."""
        try:
            async with asyncio.timeout(IDLE_S):
                return await self.read_head()
        except TimeoutError:
            return b""

    async def send(self, data: bytes) -> None:
        """Send data. Raises: TimeoutError, OSError."""
        async with asyncio.timeout(STALL_S):
            await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def try_send(self, data: bytes) -> None:
        """Send a final answer, as much as fits."""
        with suppress(OSError):
            self.sock.send(data)

    async def send_file(self, spool: Spool, offset: int, count: int) -> None:
        """Send a part of the spool. Raises: OSError."""
        end = offset + count
        while offset < end:
            try:
                if spool.is_lent:
                    sent = os.sendfile(self.sock.fileno(), spool.fd, offset, end - offset)
                else:
                    sent = self.sock.send(os.pread(spool.fd, min(_COPIED_BYTES, end - offset), offset))
            except BlockingIOError:
                await self._wait_writable()
                continue
            if not sent:
                raise OSError("the spool file was truncated")
            offset += sent

    async def _wait_writable(self) -> None:
        loop = asyncio.get_running_loop()
        is_free = loop.create_future()
        loop.add_writer(self.sock, lambda: None if is_free.done() else is_free.set_result(None))
        try:
            await is_free
        finally:
            loop.remove_writer(self.sock)


def _status_of(error: BootseerError) -> int:
    if isinstance(error, NotFound):
        return 404
    return 416 if isinstance(error, Truncated) else 502
