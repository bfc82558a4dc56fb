"""A real HTTP server on the loopback that serves ranges, counts bytes, and fails as a test plans.

Its faults are those of real servers and proxies. A `HttpFault` describes the requests that it matches; the first
match takes effect. Connections are kept alive; each has a thread, and all end with `close`.
"""

from __future__ import annotations

import http.server
import os
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from enum import Enum
from fnmatch import fnmatchcase
from types import TracebackType
from typing import NamedTuple
from urllib.parse import quote, unquote, urlsplit

_SEND_BYTES = 256 * 1024
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


class HttpKind(Enum):
    """The fault of a request; a body is correct up to `keep_bytes`."""

    STATUS = "status"  # `status` instead of an answer, with Retry-After if `retry_after_s` is given
    SILENCE = "silence"  # no answer, the connection stays open
    STALL = "stall"  # the body stops, the connection stays open
    SHORT = "short"  # the connection is closed before the body's end
    RESET = "reset"  # the same, but by a reset
    DRIP = "drip"  # the body comes in pieces of `drip_bytes`, `delay_s` apart
    SLOW = "slow"  # the answer begins after `delay_s`
    HELD = "held"  # the answer begins when `let_go` is set
    FULL = "full"  # Range is ignored: 200 and the whole file
    OTHER_RANGE = "other_range"  # 206 with the bytes one further on, declared in Content-Range
    LESS = "less"  # 206 with `keep_bytes` only, declared in Content-Range and Content-Length
    LYING_RANGE = "lying_range"  # no Content-Range in a 206
    CHANGED = "changed"  # the file has a new ETag, from this request on
    WRONG = "wrong"  # the byte after the kept ones is wrong


# Faults whose bodies have the declared length.
_WHOLE = {
    HttpKind.SLOW,
    HttpKind.HELD,
    HttpKind.FULL,
    HttpKind.OTHER_RANGE,
    HttpKind.LESS,
    HttpKind.LYING_RANGE,
    HttpKind.CHANGED,
}


class HttpFault(NamedTuple):
    """One planned fault."""

    kind: HttpKind
    path: str = "*"  # a shell pattern, without the leading slash
    method: str = "GET"
    first: int = 0  # matches a request for one of these bytes
    last: int | None = None
    requests: Container[int] | None = None  # numbers of the otherwise matching ones, from 0; None: all
    keep_bytes: int = 0
    status: int = 503
    retry_after_s: int | None = None
    delay_s: float = 0.0
    drip_bytes: int = 1


class HttpRequest(NamedTuple):
    """One received request."""

    method: str
    path: str
    first: int | None  # of the range; None without one
    last: int | None
    headers: Mapping[str, str]  # names in lower case
    connection: int  # numbered from 0


class FaultyHttpServer:
    """A server of `files` (name to content) at `url`/name: GET with ranges and If-Match, and HEAD.

    `served_bytes` counts body bytes passed to the network, by name. `rate` limits each answer's bytes/s.
    """

    def __init__(
        self,
        files: Mapping[str, bytes | memoryview],
        plan: Sequence[HttpFault] = (),
        *,
        rate: float | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self.files: dict[str, memoryview] = {name: memoryview(content) for name, content in files.items()}
        self.plan = list(plan)
        self.rate = rate
        self.requests: list[HttpRequest] = []
        self.served_bytes: Counter[str] = Counter()
        self.connections = 0  # in total
        self.closing = threading.Event()
        self.let_go = threading.Event()
        self._lock = threading.Lock()
        self._hits: dict[int, tuple[HttpFault, int]] = {}  # by identity: the same fault may be planned twice
        self._versions: Counter[str] = Counter()
        self._sockets: set[socket.socket] = set()
        self._server = _Server(self, (host, 0))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def url_of(self, name: str) -> str:
        return f"{self.url}/{quote(name)}"

    def etag_of(self, name: str) -> str:
        """Return the current strong ETag of a file; `change` changes it."""
        return f'"{len(self.files[name])}-{self._versions[name]}"'

    def count(self, method: str = "GET", path: str = "*") -> int:
        """Return the number of received requests."""
        with self._lock:
            return sum(each.method == method and fnmatchcase(each.path, path) for each in self.requests)

    def drop_connections(self) -> None:
        """Close all connections, as at a server's restart."""
        with self._lock:
            sockets = list(self._sockets)
        for each in sockets:
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the client has closed it already

    def close(self) -> None:
        """End all connections, including stalled answers; call it once."""
        if self.closing.is_set():
            return
        self.closing.set()
        self.let_go.set()
        self._server.shutdown()
        self._thread.join()
        self.drop_connections()
        self._server.server_close()  # joins the threads of connections

    def __enter__(self) -> FaultyHttpServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- for the threads of connections ----------------------------------------------------------------------

    def connect(self, connection: socket.socket) -> int:
        with self._lock:
            self._sockets.add(connection)
            self.connections += 1
            return self.connections - 1

    def disconnect(self, connection: socket.socket) -> None:
        with self._lock:
            self._sockets.discard(connection)

    def find(self, request: HttpRequest) -> HttpFault | None:
        """Record the request and return the fault that matches it."""
        with self._lock:
            self.requests.append(request)
            for fault in self.plan:
                if not _fits(fault, request):
                    continue
                _, number = self._hits.get(id(fault), (fault, 0))
                self._hits[id(fault)] = (fault, number + 1)
                if fault.requests is None or number in fault.requests:
                    return fault
            return None

    def change(self, name: str) -> None:
        """Change the ETag of a file."""
        with self._lock:
            self._versions[name] += 1

    def add_served(self, name: str, count: int) -> None:
        with self._lock:
            self.served_bytes[name] += count


def _fits(fault: HttpFault, request: HttpRequest) -> bool:
    if fault.method != request.method or not fnmatchcase(request.path, fault.path):
        return False
    if request.last is not None and request.last < fault.first:
        return False
    return fault.last is None or (request.first or 0) <= fault.last


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = False  # so that closing waits for them
    block_on_close = True
    request_queue_size = 128

    def __init__(self, owner: FaultyHttpServer, address: tuple[str, int]) -> None:
        self.owner = owner
        super().__init__(address, _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that have disconnected."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.owner = self.server.owner
        self.number = self.owner.connect(self.connection)
        if self.owner.closing.is_set():
            self.connection.shutdown(socket.SHUT_RDWR)  # it arrived during `close`

    def finish(self) -> None:
        self.owner.disconnect(self.connection)
        try:
            super().finish()
        except OSError:
            pass  # the connection was reset

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def do_HEAD(self) -> None:
        self._answer(is_head=True)

    def do_GET(self) -> None:
        self._answer(is_head=False)

    def _answer(self, *, is_head: bool) -> None:
        name = unquote(urlsplit(self.path).path).lstrip("/")
        size = len(self.owner.files.get(name, b""))
        span = self._parse_range(size)
        first, last = span if span is not None else (None, None)
        headers = {key.lower(): value for key, value in self.headers.items()}
        request = HttpRequest("HEAD" if is_head else "GET", name, first, last, headers, self.number)
        fault = self.owner.find(request)
        kind = None if fault is None else fault.kind
        if fault is not None:
            if kind is HttpKind.STATUS:
                asked = fault.retry_after_s
                self._refuse(fault.status, {} if asked is None else {"Retry-After": str(asked)})
                return
            if kind is HttpKind.SILENCE:
                self._hang()
                return
            if kind is HttpKind.SLOW:
                self.owner.closing.wait(fault.delay_s)
            if kind is HttpKind.HELD:
                self.owner.let_go.wait()
            if kind is HttpKind.CHANGED:
                self.owner.change(name)
        if name not in self.owner.files:
            self._refuse(404)
            return
        etag = self.owner.etag_of(name)
        wanted = headers.get("if-match")
        if wanted not in (None, "*", etag):
            self._refuse(412)
            return
        if span is None or kind is HttpKind.FULL:
            self._send(200, name, 0, size, size, etag, fault, is_head)
        elif span[0] >= size or span[0] > span[1]:
            self._refuse(416, {"Content-Range": f"bytes */{size}"})
        else:
            shift = int(kind is HttpKind.OTHER_RANGE)
            end = min(span[1] + 1 + shift, size)
            begin = min(span[0] + shift, end)
            if kind is HttpKind.LESS and fault is not None:
                end = min(end, begin + max(1, fault.keep_bytes))
            self._send(206, name, begin, end, size, etag, fault, is_head)

    def _parse_range(self, size: int) -> tuple[int, int] | None:
        found = _RANGE.fullmatch(self.headers.get("Range", ""))
        if found is None or not (found[1] or found[2]):
            return None
        if not found[1]:
            return max(0, size - int(found[2])), size - 1
        return int(found[1]), min(int(found[2]), size - 1) if found[2] else size - 1

    def _refuse(self, status: int, headers: Mapping[str, str] | None = None) -> None:
        body = f"{status} by plan or request\n".encode()
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send(
        self,
        status: int,
        name: str,
        begin: int,
        end: int,
        size: int,
        etag: str,
        fault: HttpFault | None,
        is_head: bool,
    ) -> None:
        self.send_response(status)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", etag)
        self.send_header("Content-Length", str(end - begin))
        if status == 206 and not (fault is not None and fault.kind is HttpKind.LYING_RANGE):
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
        self.end_headers()
        if not is_head:
            self._send_body(name, self.owner.files[name][begin:end], fault)

    def _send_body(self, name: str, body: memoryview, fault: HttpFault | None) -> None:
        kind = None if fault is None else fault.kind
        kept = 0 if fault is None else min(fault.keep_bytes, len(body))
        if fault is None or kind in _WHOLE:
            self._write(name, body)
        elif kind is HttpKind.WRONG:
            self._write(name, body[:kept])
            self._write(name, bytes(byte ^ 0xFF for byte in body[kept : kept + 1]))
            self._write(name, body[kept + 1 :])
        elif kind is HttpKind.DRIP:
            self._write(name, body[:kept])
            for place in range(kept, len(body), fault.drip_bytes):
                if self.owner.closing.wait(fault.delay_s):
                    self.close_connection = True
                    return
                self._write(name, body[place : place + fault.drip_bytes])
        else:
            self._write(name, body[:kept])
            self.close_connection = True
            if kind is HttpKind.STALL:
                self._hang()
            elif kind is HttpKind.RESET:
                self._reset()

    def _write(self, name: str, body: memoryview | bytes) -> None:
        rate = self.owner.rate
        for place in range(0, len(body), _SEND_BYTES):
            part = body[place : place + _SEND_BYTES]
            if rate is not None and self.owner.closing.wait(len(part) / rate):
                raise ConnectionAbortedError("the server is closing")
            self.owner.add_served(name, len(part))  # before the client can receive it
            self.connection.sendall(part)

    def _hang(self) -> None:
        """Wait until the client or the server ends the connection."""
        self.close_connection = True
        self.connection.settimeout(0.05)
        while not self.owner.closing.is_set():
            try:
                if not self.connection.recv(4096):
                    return
            except TimeoutError:
                pass
            except OSError:
                return

    def _reset(self) -> None:
        # Closing with a linger time of 0 sends a reset; the file objects hold the socket open until then.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(self.connection.detach())
