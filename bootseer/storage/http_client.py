"""HTTP/1.1 requests in the calling thread: kept connections, redirects, proxies, and a way to cut them off.

The standard library's client parses; it reads bodies straight into the caller's memory, which costs a fifth of the
CPU of collecting them. No status is an error here, except that redirects end somewhere.
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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import SplitResult, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from bootseer.errors import ConfigError, NotFound, StorageError, StorageTimeout, Unavailable
from bootseer.storage.counts import Counts
from bootseer.storage.landing import Landing
from bootseer.storage.os_errors import to_storage_error
from bootseer.storage.paths import redact

MAX_REDIRECTS = 5
MOST_IDLE = 64  # connections
STEP_BYTES = 256 << 10  # received at once; what the deadline counts for
IDLE_S = 55.0  # servers and gateways close theirs after 60 s and more
_DRAINED_BYTES = 64 << 10  # of a body that nobody wants: cheaper than a new connection
_REDIRECTS = (301, 302, 303, 307, 308)


class CutOff(Exception):  # noqa: N818
    """The request was given up; ends its thread."""


class Wire:
    """Reaches the connection of a request from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Not the connection: that forgets its socket while a response is still read from it.
        self._socket: socket.socket | None = None
        self._is_cut = False

    def hold(self, connected: socket.socket | None) -> None:
        """The request goes on with this one, or has ended. Raises: CutOff."""
        with self._lock:
            self._socket = connected
            if self._is_cut and connected is not None:
                raise CutOff

    def cut(self) -> None:
        """Whoever waits for the connection's next bytes gets none."""
        with self._lock:
            self._is_cut = True
            if self._socket is not None:
                try:
                    # Not SSLSocket's own, which forgets the encryption while the other thread reads.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
                except OSError:
                    pass  # not connected any more


class Exchange:
    """A request whose response has begun. Ends with `finish` or `drop`."""

    def __init__(
        self, client: HttpClient, key: _Key, connection: http.client.HTTPConnection, wire: Wire, shown: str
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
        """The body was read, or little of it is left: the connection is kept."""
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
        """The body is read in the block; after an error, which becomes one of ours, the connection is dropped."""
        try:
            yield
        except BaseException as error:
            self.drop()
            ours = to_ours(error, self.shown, self._client._timeout_s)
            if ours is error:
                raise
            raise ours from error

    def land(self, landing: Landing, expected_bytes: int) -> None:
        """Receives the body until the landing has so many bytes. For a block of `reading`."""
        while landing.have < expected_bytes:
            step = min(STEP_BYTES, expected_bytes - landing.have)
            if landing.receive(self.response.readinto, step) == 0:
                raise Unavailable(
                    f"{self.shown}: the connection ended after {landing.have} of {expected_bytes} bytes"
                )

    def drop(self) -> None:
        """Something is wrong, or the body is not wanted."""
        self._wire.hold(None)
        self.response.close()
        self._connection.close()


_Key = tuple[str, str, int]  # scheme, host, port of the server; the proxy follows from them


class HttpClient:
    """Connections to any number of servers. Thread-safe; a forked child begins with no connections."""

    def __init__(self, *, timeout_s: float, headers: Mapping[str, str], ca_file: str, counts: Counts) -> None:
        self._timeout_s = timeout_s
        self._headers = dict(headers)
        self._ca_file = ca_file
        self._counts = counts
        self._context: ssl.SSLContext | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._is_closed = False
        self._idle: list[tuple[_Key, http.client.HTTPConnection, float]] = []  # the one used last at the end
        self._proxies: dict[tuple[str, str], SplitResult | None] = {}  # by scheme and server, once looked up

    def begin(
        self, method: str, url: str, headers: Mapping[str, str], wire: Wire, *, is_fresh: bool = False
    ) -> Exchange:
        """Sends a request and follows redirects until a response has begun. `is_fresh`: on a new connection.

        Raises: Unavailable, StorageTimeout, StorageError; NotFound when redirected to a folder.
        """
        origin = _key_of(urlsplit(url))
        for _ in range(MAX_REDIRECTS + 1):
            parts = urlsplit(url)
            # Another server gets none of the caller's headers: they may hold a password.
            mine = {**self._headers, **_authorization(parts)} if _key_of(parts) == origin else {}
            exchange = self._send(method, parts, {**mine, **headers}, wire, is_fresh)
            location = exchange.headers.get("Location")
            if exchange.status not in _REDIRECTS or not location:
                return exchange
            exchange.finish()
            try:
                new = urljoin(url, location)
                new_parts = urlsplit(new)
                _key_of(new_parts)
            except (ValueError, ConfigError) as error:
                raise StorageError(f"{exchange.shown}: redirects to something that is no URL") from error
            if new_parts.scheme not in ("http", "https") or not new_parts.hostname:
                raise StorageError(f"{exchange.shown}: redirects to {redact(new)}, which is not HTTP")
            if parts.scheme == "https" and new_parts.scheme == "http":
                raise StorageError(f"{exchange.shown}: redirects to {redact(new)}, which is not encrypted")
            if new_parts.path == parts.path + "/":
                raise NotFound(f"{exchange.shown}: is a folder, not a file")
            url = new
        raise StorageError(f"{redact(url)}: more than {MAX_REDIRECTS} redirects")

    def keep(self, key: _Key, connection: http.client.HTTPConnection) -> None:
        """Takes a connection for later requests; one that comes after `close` is closed."""
        dropped: http.client.HTTPConnection | None = connection
        with self._lock:
            if self._pid == os.getpid() and not self._is_closed:
                self._idle.append((key, connection, time.monotonic()))
                dropped = self._idle.pop(0)[1] if len(self._idle) > MOST_IDLE else None
        if dropped is not None:
            dropped.close()

    def _proxy_for(self, parts: SplitResult) -> SplitResult | None:
        """As the environment said when the server was asked first."""
        key = (parts.scheme, parts.netloc)
        try:
            return self._proxies[key]
        except KeyError:
            return self._proxies.setdefault(key, _proxy_for(parts))

    def close(self) -> None:
        """Requests can still be made; their connections are not kept."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for _, connection, _ in idle:
            connection.close()

    def _send(
        self,
        method: str,
        parts: SplitResult,
        headers: Mapping[str, str],
        wire: Wire,
        is_fresh: bool,
        body: Iterator[bytes | memoryview] | None = None,
    ) -> Exchange:
        """Until the answer has begun. Of a body `headers` say how long it is; it is sent once."""
        key, shown = _key_of(parts), redact(parts.geturl())
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
                    # Servers that do not want it say why and close, without waiting for the end of the body.
                    try:
                        return Exchange(self, key, connection, wire, shown)
                    except (OSError, http.client.HTTPException):
                        raise error from None
                return Exchange(self, key, connection, wire, shown)
            except BaseException as error:
                connection.close()
                connection = None
                if isinstance(error, CutOff):
                    raise
                # A server may close a kept connection just when it is used again: that says nothing about it.
                if is_kept and body is None and isinstance(error, ConnectionError):
                    is_kept = False
                    self._counts.add("retries")
                    continue
                raise to_ours(error, shown, self._timeout_s) from error

    def _take(self, key: _Key) -> http.client.HTTPConnection | None:
        """A kept connection that the server has not closed."""
        while True:
            with self._lock:
                if self._pid != os.getpid():
                    self._pid, self._idle = os.getpid(), []  # the parent's: it goes on with them
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
        _, host, port = _key_of(parts)
        _, at_host, at_port = _key_of(proxy or parts)
        connection: http.client.HTTPConnection | None = None
        try:
            if parts.scheme == "https" or (proxy is not None and proxy.scheme == "https"):
                connection = http.client.HTTPSConnection(
                    at_host, at_port, timeout=self._timeout_s, context=self._get_context()
                )
            else:
                connection = http.client.HTTPConnection(at_host, at_port, timeout=self._timeout_s)
            if proxy is not None and parts.scheme == "https":
                connection.set_tunnel(host, port, headers=_proxy_authorization(proxy))
            connection.connect()
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            if connection is not None:
                connection.close()
            through = f" (through the proxy {redact(proxy.geturl())})" if proxy else ""
            raise to_ours(error, shown + through, self._timeout_s) from error
        return connection

    def _get_context(self) -> ssl.SSLContext:
        with self._lock:
            if self._context is None:
                try:
                    self._context = ssl.create_default_context(cafile=self._ca_file or None)
                except OSError as error:
                    raise ConfigError(f"ca_file {self._ca_file}: no certificates can be read from it") from error
            return self._context


def to_ours(error: BaseException, shown: str, timeout_s: float) -> BaseException:
    """What to raise for an error of the connection; anything else stays itself."""
    if isinstance(error, TimeoutError):
        return StorageTimeout(f"{shown}: no answer within {timeout_s:g} s")
    if isinstance(error, ssl.SSLCertVerificationError):
        return StorageError(f"{shown}: its certificate is not trusted ({error.verify_message}): name a ca_file?")
    if isinstance(error, socket.gaierror):
        return Unavailable(f"{shown}: the name of the server cannot be resolved ({error.strerror})")
    if isinstance(error, ssl.SSLError | http.client.HTTPException | ConnectionError):
        return Unavailable(f"{shown}: the connection failed ({type(error).__name__}: {error})")
    if isinstance(error, OSError):
        return to_storage_error(error, shown)
    if isinstance(error, UnicodeError):
        return StorageError(f"{shown}: no such server can exist ({error})")
    return error


def _key_of(parts: SplitResult) -> _Key:
    try:
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{redact(parts.geturl())}: its port is no number from 0 to 65535") from error
    return parts.scheme, parts.hostname or "", port or (443 if parts.scheme == "https" else 80)


def _has_input(connection: http.client.HTTPConnection) -> bool:
    """Something came that nobody asked for: as good as always the end of the connection."""
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))


def _proxy_for(parts: SplitResult) -> SplitResult | None:
    """What the environment says (http_proxy, https_proxy, no_proxy)."""
    proxy = getproxies().get(parts.scheme)
    if not proxy or proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    found = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    if found.scheme not in ("http", "https") or (found.scheme == "https" and parts.scheme == "https"):
        raise ConfigError(
            f"the proxy {redact(proxy)} for {parts.scheme} is of a kind that is not supported: http://"
        )
    return found


def _authorization(parts: SplitResult) -> dict[str, str]:
    return {"Authorization": _basic(parts)} if parts.username is not None else {}


def _proxy_authorization(proxy: SplitResult | None) -> dict[str, str]:
    return {"Proxy-Authorization": _basic(proxy)} if proxy is not None and proxy.username is not None else {}


def _basic(parts: SplitResult) -> str:
    text = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
    return "Basic " + base64.b64encode(text.encode()).decode("ascii")
