"""HTTP to registries: certificates by host, bodies to send, redirects without passwords. In threads.

Builds on http_client, which reuses connections and supports proxies. That module has one set of certificates for
all hosts, and follows redirects only for readers.
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

from bootseer.errors import ConfigError, StorageError
from bootseer.storage.engine.cancelling import CancelHandle
from bootseer.storage.engine.counts import StoreCounters
from bootseer.storage.http.client import (
    MAX_REDIRECTS,
    REDIRECTS,
    HttpClient,
    HttpResponse,
    origin_of,
    resolve_location,
)
from bootseer.storage.oci.options import RegistryOptions
from bootseer.storage.paths import redact

SEND_BYTES = 256 << 10  # given to a connection at once; the deadline applies to each step

MAX_HOSTS = 64  # whose connections are kept; redirects may name any host
_HEADERS = {"User-Agent": "bootseer", "Accept-Encoding": "identity"}


class RegistryCall(CancelHandle):
    """One operation of one or more requests. It can be cancelled and records its last progress."""

    def __init__(self) -> None:
        super().__init__()
        self.moved_s = time.monotonic()
        self.where = "a registry"  # the URL of the last request, without secrets

    def touch(self) -> None:
        """Record progress."""
        self.moved_s = time.monotonic()

    def moved(self) -> float:
        """Return the time of the last progress, for `run_apart`."""
        return self.moved_s

    def hold(self, connected: socket.socket | None) -> None:
        super().hold(connected)
        self.touch()


class RegistryReply(NamedTuple):
    """A response, and its source."""

    exchange: HttpResponse
    url: str  # its source, with secrets: not to be shown
    is_elsewhere: bool  # from another server than the one requested


class RegistryHttp:
    """Connections to registries and to their redirect targets. Thread-safe."""

    def __init__(self, options: RegistryOptions, *, timeout_s: float, counts: StoreCounters) -> None:
        self._options = options
        self._timeout_s = timeout_s
        self._counts = counts
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._clients: dict[str, _HostClient] = {}  # by host, least recently used first

    def get(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        call: RegistryCall,
        *,
        private: Mapping[str, str],
        is_fresh: bool = False,
    ) -> RegistryReply:
        """Send a GET or HEAD; follow redirects. `private` headers go only to the server of `url`.

        Raises: Unavailable, StorageTimeout, StorageError.
        """
        origin = origin_of(urlsplit(url))
        for _ in range(MAX_REDIRECTS + 1):
            parts = urlsplit(url)
            call.where = redact(url)
            is_elsewhere = origin_of(parts) != origin
            mine = {} if is_elsewhere else private
            exchange = self._client(parts).exchange(method, parts, {**mine, **headers}, call, is_fresh=is_fresh)
            location = exchange.headers.get("Location")
            if exchange.status not in REDIRECTS or not location:
                return RegistryReply(exchange, url, is_elsewhere)
            exchange.finish()
            url = resolve_location(url, location, exchange.shown)
        raise StorageError(f"{redact(url)}: more than {MAX_REDIRECTS} redirects")

    def send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        call: RegistryCall,
        body: memoryview | bytes | None,
    ) -> HttpResponse:
        """Send a request with a body; do not follow redirects.

        Raises: Unavailable, StorageTimeout, StorageError.
        """
        parts = urlsplit(url)
        call.where = redact(url)
        return self._client(parts).exchange(method, parts, headers, call, body=body)

    def read(self, exchange: HttpResponse, max_bytes: int, call: RegistryCall) -> bytes:
        """Read the whole body of a response, and finish the exchange.

        Raises: StorageError when it is larger; Unavailable, StorageTimeout.
        """
        return exchange.read_all(max_bytes, lambda _count: call.touch())

    def close(self) -> None:
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.close()

    def _client(self, parts: SplitResult) -> _HostClient:
        host = parts.netloc.rpartition("@")[2].lower()
        oldest = None
        with self._lock:
            if self._pid != os.getpid():  # a forked child must not use the parent's connections
                self._pid, self._clients = os.getpid(), {}
            client = self._clients.pop(host, None)
            if client is None:
                client = _HostClient(host, self._options, timeout_s=self._timeout_s, counts=self._counts)
                if len(self._clients) >= MAX_HOSTS:
                    oldest = self._clients.pop(next(iter(self._clients)))
            self._clients[host] = client
        if oldest is not None:
            oldest.close()
        return client


class _HostClient(HttpClient):
    def __init__(self, host: str, options: RegistryOptions, *, timeout_s: float, counts: StoreCounters) -> None:
        super().__init__(timeout_s=timeout_s, headers={}, ca_file=options.ca_file, counts=counts)
        self._host = host
        self._certs_directories = options.certs_folders

    def exchange(
        self,
        method: str,
        parts: SplitResult,
        headers: Mapping[str, str],
        call: RegistryCall,
        *,
        body: memoryview | bytes | None = None,
        is_fresh: bool = False,
    ) -> HttpResponse:
        """Send a request until its response begins."""
        headers = {**_HEADERS, **headers}
        if not body:
            return self._send(method, parts, headers, call, is_fresh)  # http.client adds length 0 for POST and PUT
        headers["Content-Length"] = str(len(body))
        return self._send(method, parts, headers, call, is_fresh, _pieces(body, call))

    def _get_context(self) -> ssl.SSLContext:
        """Return the system's certificates, those of the option, and those in certs.d for this host."""
        with self._lock:
            if self._context is None:
                context = ssl.create_default_context()
                if self._ca_file:
                    _load(context, self._ca_file)
                for directory in self._certs_directories:
                    _load_directory(context, os.path.join(directory, self._host))
                self._context = context
            return self._context


def _pieces(body: memoryview | bytes, call: RegistryCall) -> Iterator[memoryview]:
    view = memoryview(body)
    for start in range(0, len(view), SEND_BYTES):
        yield view[start : start + SEND_BYTES]
        call.touch()


def _load(context: ssl.SSLContext, path: str) -> None:
    try:
        context.load_verify_locations(cafile=path)
    except OSError as error:
        raise ConfigError(f"{path}: no certificates can be read from it ({error.strerror or error})") from error


def _load_directory(context: ssl.SSLContext, directory: str) -> None:
    """Trust *.crt; present NAME.cert with NAME.key as the client certificate (containers-certs.d(5))."""
    try:
        names = sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise ConfigError(f"{directory}: certificates cannot be read ({error.strerror})") from error
    for name in names:
        path = os.path.join(directory, name)
        if name.endswith(".crt"):
            _load(context, path)
        elif name.endswith(".cert"):
            try:
                context.load_cert_chain(path, path.removesuffix(".cert") + ".key")
            except OSError as error:
                raise ConfigError(f"{path}: is not a certificate with a .key beside it ({error})") from error
