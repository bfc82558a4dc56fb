"""HTTP/1.1 requests in the calling thread: connection reuse, redirects, proxies, cancelling from another thread.

The standard library's client parses. It reads bodies straight into the caller's memory, at a fifth of the CPU cost
of collecting them. No status raises an error here, except for failed redirects.
"""

from __future__ import annotations

import base64
import http.client
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import SplitResult, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from bootseer.errors import ConfigError, NotFound, StorageError, StorageTimeout, Unavailable
from bootseer.storage.engine.cancelling import CancelHandle, RequestCancelled
from bootseer.storage.engine.counts import StoreCounters
from bootseer.storage.engine.revocable_buffer import RevocableBuffer
from bootseer.storage.os_errors import to_storage_error
from bootseer.storage.paths import redact

MAX_REDIRECTS = 5
MAX_IDLE = 64  # connections
STEP_BYTES = 256 << 10  # received at once; the deadline applies to each step
IDLE_S = 55.0  # servers and gateways close idle connections after 60 s or more
_DRAINED_BYTES = 64 << 10  # of an unwanted body: reading it is cheaper than a new connection
REDIRECTS = (301, 302, 303, 307, 308)


class HttpResponse:
    """A request whose response has begun. `finish` or `drop` ends it."""

    def __init__(
        self,
        client: HttpClient,
        key: Origin,
        connection: http.client.HTTPConnection,
        wire: CancelHandle,
        shown: str,
    ) -> None:
        self.shown = shown  # the URL, without secrets
        self._client = client
        self._key = key
        self._connection = connection
        self._wire = wire
        self.response = connection.getresponse()
        self.status = self.response.status
        self.headers = self.response.headers

    def finish(self) -> None:
        """Read the rest of the body if it is small, and keep the connection."""
        try:
            length = self.response.length
            if length is not None and length <= _DRAINED_BYTES:
                self.response.read()
        except (OSError, http.client.HTTPException):
            pass  # dropped below
        is_reusable = self.response.isclosed() and not self.response.will_close
        self._wire.hold(None)
        self.response.close()
        if is_reusable:
            self._client.keep(self._key, self._connection)
        else:
            self._connection.close()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Map errors of reading the body in the block; after one, drop the connection."""
        try:
            yield
        except BaseException as error:
            self.drop()
            ours = map_http_error(error, self.shown, self._client._timeout_s)
            if ours is error:
                raise
            raise ours from error

    def read_all(self, max_bytes: int, on_bytes: Callable[[int], None] = lambda _count: None) -> bytes:
        """Read the whole body, and finish the request.

        Raises: StorageError when it is larger; Unavailable, StorageTimeout.
        """
        data = bytearray()
        with self.reading():
            while piece := self.response.read(min(STEP_BYTES, max_bytes + 1 - len(data))):
                data += piece
                on_bytes(len(piece))
                if len(data) > max_bytes:
                    raise StorageError(f"{self.shown}: the answer is larger than {max_bytes} bytes")
            if self.response.length:
                raise Unavailable(f"{self.shown}: the connection ended before the end of the answer")
        self.finish()
        return bytes(data)

    def land(self, landing: RevocableBuffer, expected_bytes: int) -> None:
        """Receive the body until the landing has so many bytes. For a block of `reading`."""
        while landing.have < expected_bytes:
            step = min(STEP_BYTES, expected_bytes - landing.have)
            if landing.receive(self.response.readinto, step) == 0:
                raise Unavailable(
                    f"{self.shown}: the connection ended after {landing.have} of {expected_bytes} bytes"
                )

    def skip(self, count: int, on_bytes: Callable[[int], None] = lambda _count: None) -> None:
        """Receive unwanted bytes before the requested ones. For a block of `reading`."""
        rest = memoryview(bytearray(min(count, STEP_BYTES)))
        while count:
            came = self.response.readinto(rest[: min(count, len(rest))])
            if not came:
                raise Unavailable(f"{self.shown}: the connection ended before the requested bytes")
            count -= came
            on_bytes(came)

    def drop(self) -> None:
        """Close the connection after an error or for an unwanted body."""
        self._wire.hold(None)
        self.response.close()
        self._connection.close()


Origin = tuple[str, str, int]  # scheme, host, port of the server; the proxy follows from them


class HttpClient:
    """Connections to any number of servers. Thread-safe; a forked child begins with no connections."""

    def __init__(
        self,
        *,
        timeout_s: float,
        headers: Mapping[str, str],
        ca_file: str,
        counts: StoreCounters,
        connect_s: float = 0.0,
        max_idle: int = MAX_IDLE,
    ) -> None:
        """Args: timeout_s: of each step; connect_s: of connecting, 0 for the same; max_idle: kept of a server."""
        self._max_idle = max_idle
        self._timeout_s = timeout_s
        self._connect_s = connect_s or timeout_s
        self._headers = dict(headers)
        self._ca_file = ca_file
        self._counts = counts
        self._context: ssl.SSLContext | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._is_closed = False
        self._idle: list[tuple[Origin, http.client.HTTPConnection, float]] = []  # least recently used first
        self._proxies: dict[tuple[str, str], SplitResult | None] = {}  # by scheme and server, once found

    def begin(
        self, method: str, url: str, headers: Mapping[str, str], wire: CancelHandle, *, is_fresh: bool = False
    ) -> HttpResponse:
        """Send a request and follow redirects until a response has begun. `is_fresh`: on a new connection.

        Raises: Unavailable, StorageTimeout, StorageError; NotFound when redirected to a directory.
        """
        origin = origin_of(urlsplit(url))
        for _ in range(MAX_REDIRECTS + 1):
            parts = urlsplit(url)
            # Another server gets none of the caller's headers: they may contain a password.
            mine = {**self._headers, **_authorization(parts)} if origin_of(parts) == origin else {}
            exchange = self._send(method, parts, {**mine, **headers}, wire, is_fresh)
            location = exchange.headers.get("Location")
            if exchange.status not in REDIRECTS or not location:
                return exchange
            exchange.finish()
            url = resolve_location(url, location, exchange.shown)
            if urlsplit(url).path == parts.path + "/":
                raise NotFound(f"{exchange.shown}: is a directory, not a file")
        raise StorageError(f"{redact(url)}: more than {MAX_REDIRECTS} redirects")

    def keep(self, key: Origin, connection: http.client.HTTPConnection) -> None:
        """Keep a connection for later requests; close it if the client is closed."""
        dropped = [connection]
        with self._lock:
            if self._pid == os.getpid() and not self._is_closed:
                now_s = time.monotonic()
                self._idle.append((key, connection, now_s))
                young = [each for each in self._idle if now_s - each[2] < IDLE_S]
                surplus = [each for each in young if each[0] == key][: -self._max_idle]
                kept = [each for each in young if each not in surplus][-MAX_IDLE:]
                dropped = [each[1] for each in self._idle if each not in kept]
                self._idle = kept
        for each_dropped in dropped:
            each_dropped.close()

    def _proxy_for(self, parts: SplitResult) -> SplitResult | None:
        """Return the proxy from the environment at the time of the first request to the server."""
        key = (parts.scheme, parts.netloc)
        try:
            return self._proxies[key]
        except KeyError:
            return self._proxies.setdefault(key, _proxy_for(parts))

    def close(self) -> None:
        """Close idle connections. Later requests still work, but their connections are not kept."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for _, connection, _ in idle:
            connection.close()

    def __del__(self) -> None:
        # For users who drop a store without closing it.
        for _, connection, _ in getattr(self, "_idle", ()):
            connection.close()

    def _send(
        self,
        method: str,
        parts: SplitResult,
        headers: Mapping[str, str],
        wire: CancelHandle,
        is_fresh: bool,
        body: Iterator[bytes | memoryview] | None = None,
        shown: str = "",
    ) -> HttpResponse:
        """Send a request until its response begins.

        `headers` give the length of a body, which is sent once. A request over a kept connection, which the server
        may have closed, can be sent twice: not with `is_fresh`. `shown`: the object in messages, "" for the URL.
        """
        key, shown = origin_of(parts), shown or redact(parts.geturl())
        connection = None if is_fresh else self._take(key)
        proxy = self._proxy_for(parts)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        if proxy is not None and parts.scheme == "http":
            target = f"http://{parts.netloc.rpartition('@')[2]}{target}"
            headers = {**headers, **_proxy_authorization(proxy)}
        is_kept = connection is not None
        while True:
            if connection is None:
                connection = self._connect(parts, proxy, shown)
            try:
                wire.hold(connection.sock)
                self._counts.add("requests")
                try:
                    connection.request(method, target, body=body, headers=dict(headers))
                except (BrokenPipeError, ConnectionResetError) as error:
                    if body is None:
                        raise
                    # A server that refuses a body answers and closes, without waiting for the end of the body.
                    try:
                        return HttpResponse(self, key, connection, wire, shown)
                    except (OSError, http.client.HTTPException):
                        raise error from None
                return HttpResponse(self, key, connection, wire, shown)
            except BaseException as error:
                wire.hold(None)  # before its descriptor can be another's
                connection.close()
                connection = None
                if isinstance(error, RequestCancelled):
                    raise
                # A server may close a kept connection just when it is reused; this does not indicate a failure.
                if is_kept and body is None and isinstance(error, ConnectionError):
                    is_kept = False
                    self._counts.add("retries")
                    continue
                raise map_http_error(error, shown, self._timeout_s) from error

    def _take(self, key: Origin) -> http.client.HTTPConnection | None:
        """Return a kept connection that the server has not closed."""
        while True:
            with self._lock:
                if self._pid != os.getpid():
                    self._pid, self._idle = os.getpid(), []  # they belong to the parent
                found = None
                for place in range(len(self._idle) - 1, -1, -1):
                    if self._idle[place][0] == key:
                        found = self._idle.pop(place)
                        break
            if found is None:
                return None
            _, connection, since_s = found
            if time.monotonic() - since_s < IDLE_S and connection.sock is not None and not _has_input(connection):
                return connection
            connection.close()

    def _connect(self, parts: SplitResult, proxy: SplitResult | None, shown: str) -> http.client.HTTPConnection:
        _, host, port = origin_of(parts)
        _, at_host, at_port = origin_of(proxy or parts)
        connection: http.client.HTTPConnection | None = None
        try:
            if parts.scheme == "https" or (proxy is not None and proxy.scheme == "https"):
                connection = http.client.HTTPSConnection(
                    at_host, at_port, timeout=self._connect_s, context=self._get_context()
                )
            else:
                connection = http.client.HTTPConnection(at_host, at_port, timeout=self._connect_s)
            if proxy is not None and parts.scheme == "https":
                connection.set_tunnel(host, port, headers=_proxy_authorization(proxy))
            connection.connect()
            connection.sock.settimeout(self._timeout_s)
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            if connection is not None:
                connection.close()
            through = f" (through the proxy {redact(proxy.geturl())})" if proxy else ""
            raise map_http_error(error, shown + through, self._connect_s) from error
        return connection

    def _get_context(self) -> ssl.SSLContext:
        with self._lock:
            if self._context is None:
                try:
                    self._context = ssl.create_default_context(cafile=self._ca_file or None)
                except OSError as error:
                    raise ConfigError(f"ca_file {self._ca_file}: no certificates can be read from it") from error
            return self._context


def map_http_error(error: BaseException, shown: str, timeout_s: float) -> BaseException:
    """Map an error of the connection; return any other error unchanged."""
    if isinstance(error, TimeoutError):
        return StorageTimeout(f"{shown}: no answer within {timeout_s:g} s")
    if isinstance(error, ssl.SSLCertVerificationError):
        return StorageError(f"{shown}: its certificate is not trusted ({error.verify_message}): set ca_file?")
    if isinstance(error, socket.gaierror):
        return Unavailable(f"{shown}: the name of the server cannot be resolved ({error.strerror})")
    if isinstance(error, ssl.SSLError | http.client.HTTPException | ConnectionError):
        return Unavailable(f"{shown}: the connection failed ({type(error).__name__}: {error})")
    if isinstance(error, OSError):
        return to_storage_error(error, shown)
    if isinstance(error, UnicodeError):
        return StorageError(f"{shown}: invalid server name ({error})")
    return error


def resolve_location(url: str, location: str, shown: str, *, stays_encrypted: bool = False) -> str:
    """Return the URL of a Location header.

    `stays_encrypted`: treat http:// on the same host as https://, for registries behind a TLS proxy that they do
    not know.
    Raises: StorageError for a URL that is not HTTP, or no longer encrypted.
    """
    own = urlsplit(url)
    try:
        new = urljoin(url, location)
        parts = urlsplit(new)
        parts.port  # noqa: B018  (is a number)
    except ValueError as error:
        raise StorageError(f"{shown}: redirects to an invalid URL") from error
    if stays_encrypted and (own.scheme, parts.scheme, own.hostname) == ("https", "http", parts.hostname):
        parts = parts._replace(scheme="https", netloc=own.netloc)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise StorageError(f"{shown}: redirects to {redact(new)}, which is not HTTP")
    if own.scheme == "https" and parts.scheme == "http":
        raise StorageError(f"{shown}: redirects to {redact(new)}, which is not encrypted")
    return parts._replace(fragment="").geturl()


def is_same_server(url: str, other: str) -> bool:
    """Return whether a header for one URL may be sent to the other."""
    return origin_of(urlsplit(url)) == origin_of(urlsplit(other))


def origin_of(parts: SplitResult) -> Origin:
    """Return the server of a URL. Raises: ConfigError for an invalid port."""
    try:
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{redact(parts.geturl())}: the port is not a number from 0 to 65535") from error
    return parts.scheme, parts.hostname or "", port or (443 if parts.scheme == "https" else 80)


def _has_input(connection: http.client.HTTPConnection) -> bool:
    """Return whether unrequested data arrived: nearly always the end of the connection."""
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))


def _proxy_for(parts: SplitResult) -> SplitResult | None:
    """Return the proxy from the environment (http_proxy, https_proxy, no_proxy)."""
    proxy = getproxies().get(parts.scheme)
    if not proxy or proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    found = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    if found.scheme not in ("http", "https") or (found.scheme == "https" and parts.scheme == "https"):
        raise ConfigError(f"the proxy {redact(proxy)} for {parts.scheme}: unsupported scheme; use http://")
    return found


def _authorization(parts: SplitResult) -> dict[str, str]:
    return {"Authorization": _basic(parts)} if parts.username is not None else {}


def _proxy_authorization(proxy: SplitResult | None) -> dict[str, str]:
    return {"Proxy-Authorization": _basic(proxy)} if proxy is not None and proxy.username is not None else {}


def _basic(parts: SplitResult) -> str:
    text = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
    return "Basic " + base64.b64encode(text.encode()).decode("ascii")
