"""HTTP to registries: certificates by host, bodies to send, redirects that take no password along. In threads.

Stands on http_client, which keeps connections and knows proxies; that one has one set of certificates for all
hosts, and follows redirects for those who only read.
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple
from urllib.parse import SplitResult, urljoin, urlsplit

from bootseer.errors import ConfigError, StorageError, Unavailable
from bootseer.storage import http_client
from bootseer.storage.counts import Counts
from bootseer.storage.http_client import Exchange, HttpClient, Wire
from bootseer.storage.oci_options import RegistryOptions
from bootseer.storage.paths import redact

SEND_BYTES = 256 << 10  # given to a connection at once: what its deadline counts for
MOST_REDIRECTS = 5
MOST_HOSTS = 64  # whose connections are kept; redirects come from outside
_REDIRECTS = (301, 302, 303, 307, 308)
_HEADERS = {"User-Agent": "bootseer", "Accept-Encoding": "identity"}


class Call(Wire):
    """One call of somebody, of as many requests as it takes: it can be cut off, and shows when it moved."""

    def __init__(self) -> None:
        super().__init__()
        self.moved_s = time.monotonic()
        self.where = "a registry"  # the URL that was asked last, without secrets

    def touch(self) -> None:
        """Something came or went."""
        self.moved_s = time.monotonic()

    def moved(self) -> float:
        """For `run_apart`."""
        return self.moved_s

    def hold(self, connected: socket.socket | None) -> None:
        super().hold(connected)
        self.touch()


class Reply(NamedTuple):
    """An answer, and where it came from."""

    exchange: Exchange
    url: str  # that gave it, with secrets: not to be shown
    is_elsewhere: bool  # another server than the one that was asked


class RegistryHttp:
    """Connections to registries and to where they redirect. Thread-safe."""

    def __init__(self, options: RegistryOptions, *, timeout_s: float, counts: Counts) -> None:
        self._options = options
        self._timeout_s = timeout_s
        self._counts = counts
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._clients: dict[str, _HostClient] = {}  # by host, the one used last at the end

    def get(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        call: Call,
        *,
        private: Mapping[str, str],
        is_fresh: bool = False,
    ) -> Reply:
        """GET or HEAD; follows redirects. `private` headers go to the server of `url` and to no other.

        Raises: Unavailable, StorageTimeout, StorageError.
        """
        origin = _origin(urlsplit(url))
        for _ in range(MOST_REDIRECTS + 1):
            parts = urlsplit(url)
            call.where = redact(url)
            is_elsewhere = _origin(parts) != origin
            mine = {} if is_elsewhere else private
            exchange = self._client(parts).exchange(method, parts, {**mine, **headers}, call, is_fresh=is_fresh)
            location = exchange.headers.get("Location")
            if exchange.status not in _REDIRECTS or not location:
                return Reply(exchange, url, is_elsewhere)
            exchange.finish()
            url = resolve_location(url, location, exchange.shown)
        raise StorageError(f"{redact(url)}: more than {MOST_REDIRECTS} redirects")

    def send(
        self, method: str, url: str, headers: Mapping[str, str], call: Call, body: memoryview | bytes | None
    ) -> Exchange:
        """A request with a body; redirects are not followed.

        Raises: Unavailable, StorageTimeout, StorageError.
        """
        parts = urlsplit(url)
        call.where = redact(url)
        return self._client(parts).exchange(method, parts, headers, call, body=body)

    def read(self, exchange: Exchange, most_bytes: int, call: Call) -> bytes:
        """All of an answer's body; the exchange is finished.

        Raises: StorageError when it is larger; Unavailable, StorageTimeout.
        """
        data = bytearray()
        with exchange.reading():
            while piece := exchange.response.read(min(SEND_BYTES, most_bytes + 1 - len(data))):
                data += piece
                call.touch()
                if len(data) > most_bytes:
                    raise StorageError(f"{exchange.shown}: the answer is larger than {most_bytes} bytes")
            if exchange.response.length:
                raise Unavailable(f"{exchange.shown}: the connection ended within the answer")
        exchange.finish()
        return bytes(data)

    def close(self) -> None:
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.close()

    def _client(self, parts: SplitResult) -> _HostClient:
        host = parts.netloc.rpartition("@")[2].lower()
        oldest = None
        with self._lock:
            if self._pid != os.getpid():  # in a forked child the connections are the parent's
                self._pid, self._clients = os.getpid(), {}
            client = self._clients.pop(host, None)
            if client is None:
                client = _HostClient(host, self._options, timeout_s=self._timeout_s, counts=self._counts)
                if len(self._clients) >= MOST_HOSTS:
                    oldest = self._clients.pop(next(iter(self._clients)))
            self._clients[host] = client
        if oldest is not None:
            oldest.close()
        return client


class _HostClient(HttpClient):
    """Connections to one host."""

    def __init__(self, host: str, options: RegistryOptions, *, timeout_s: float, counts: Counts) -> None:
        super().__init__(timeout_s=timeout_s, headers={}, ca_file=options.ca_file, counts=counts)
        self._host = host
        self._certs_folders = options.certs_folders

    def exchange(
        self,
        method: str,
        parts: SplitResult,
        headers: Mapping[str, str],
        call: Call,
        *,
        body: memoryview | bytes | None = None,
        is_fresh: bool = False,
    ) -> Exchange:
        """Until the answer has begun."""
        headers = {**_HEADERS, **headers}
        if not body:
            return self._send(method, parts, headers, call, is_fresh)  # without one POST and PUT say so themselves
        headers["Content-Length"] = str(len(body))
        return self._send(method, parts, headers, call, is_fresh, _pieces(body, call))

    def _get_context(self) -> ssl.SSLContext:
        """The system's certificates, the one named by an option, and what certs.d has for this host."""
        with self._lock:
            if self._context is None:
                context = ssl.create_default_context()
                if self._ca_file:
                    _load(context, self._ca_file)
                for folder in self._certs_folders:
                    _load_folder(context, os.path.join(folder, self._host))
                self._context = context
            return self._context


def resolve_location(url: str, location: str, shown: str, *, stays_encrypted: bool = False) -> str:
    """Where a Location header leads.

    `stays_encrypted`: http:// on the same host means https://, as it does where a registry does not know of the
    proxy with the certificate in front of it.
    Raises: StorageError for what is not HTTP, or not encrypted any more.
    """
    own = urlsplit(url)
    try:
        new = urljoin(url, location)
        parts = urlsplit(new)
        parts.port  # noqa: B018  (is a number)
    except ValueError as error:
        raise StorageError(f"{shown}: redirects to something that is no URL") from error
    if stays_encrypted and (own.scheme, parts.scheme, own.hostname) == ("https", "http", parts.hostname):
        parts = parts._replace(scheme="https", netloc=own.netloc)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise StorageError(f"{shown}: redirects to {redact(new)}, which is not HTTP")
    if own.scheme == "https" and parts.scheme == "http":
        raise StorageError(f"{shown}: redirects to {redact(new)}, which is not encrypted")
    return parts._replace(fragment="").geturl()


def is_same_server(url: str, other: str) -> bool:
    """Whether what is meant for one may be sent to the other."""
    return _origin(urlsplit(url)) == _origin(urlsplit(other))


def _origin(parts: SplitResult) -> tuple[str, str, int]:
    return http_client._key_of(parts)


def _pieces(body: memoryview | bytes, call: Call) -> Iterator[memoryview]:
    view = memoryview(body)
    for start in range(0, len(view), SEND_BYTES):
        yield view[start : start + SEND_BYTES]
        call.touch()


def _load(context: ssl.SSLContext, path: str) -> None:
    try:
        context.load_verify_locations(cafile=path)
    except OSError as error:
        raise ConfigError(f"{path}: no certificates can be read from it ({error.strerror or error})") from error


def _load_folder(context: ssl.SSLContext, folder: str) -> None:
    """*.crt are to be believed, NAME.cert with NAME.key is who we are (containers-certs.d(5))."""
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise ConfigError(f"{folder}: certificates cannot be read ({error.strerror})") from error
    for name in names:
        path = os.path.join(folder, name)
        if name.endswith(".crt"):
            _load(context, path)
        elif name.endswith(".cert"):
            try:
                context.load_cert_chain(path, path.removesuffix(".cert") + ".key")
            except OSError as error:
                raise ConfigError(f"{path}: is no certificate with a .key beside it ({error})") from error
