"""Requests to registries for manifests and blob ranges: mirrors first, credentials on demand.

Methods that take a Call run in the calling thread; `run` and `ask` call them from asyncio. The client limits the
size of answers and verifies their digests. The exception is blobs, which arrive in pieces: the caller verifies
them. Source: github.com/opencontainers/distribution-spec.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

from bootseer import aio
from bootseer.errors import (
    BootseerError,
    ConfigError,
    IntegrityError,
    NotFound,
    PermissionDenied,
    StorageError,
    StorageTimeout,
    Unavailable,
)
from bootseer.logs import get_logger
from bootseer.storage.engine.counts import StoreCounters
from bootseer.storage.engine.revocable_buffer import RevocableBuffer
from bootseer.storage.http.client import HttpResponse, is_same_server
from bootseer.storage.http.headers import RETRYABLE, parse_retry_after
from bootseer.storage.oci.auth import AuthAnswer, RegistryAuth, Scope, pull_scope
from bootseer.storage.oci.headers import error_text
from bootseer.storage.oci.http import RegistryCall, RegistryHttp
from bootseer.storage.oci.manifest import (
    INDEXES,
    MANIFESTS,
    MAX_MANIFEST_BYTES,
    Descriptor,
    Document,
    check_digest,
    check_document,
    to_document,
)
from bootseer.storage.oci.options import RegistryOptions, RegistryPlace, is_loopback, places_of
from bootseer.storage.oci.reference import Reference, is_digest

RETRIES = aio.RetryPolicy(tries=5, base_s=0.2, max_s=5.0, budget_s=120.0)
MIRROR_REST_S = 30.0  # pause before a failed mirror is used again
LOCATION_S = 60.0  # how long a redirect is reused; signed URLs are valid for minutes
MAX_LOCATIONS = 10_000
MAX_ERROR_BYTES = 64 << 10
_ACCEPT = ", ".join((*MANIFESTS, *INDEXES))

T = TypeVar("T")
_log = get_logger(__name__, prints=True)


class _Location(NamedTuple):
    url: str  # with secrets
    until_s: float  # time.monotonic()


class RegistryClient:
    """A client of registries. Thread-safe; belongs to no event loop."""

    def __init__(self, options: RegistryOptions, *, timeout_s: float = 30.0) -> None:
        self.options = options
        self.timeout_s = timeout_s
        self.counts = StoreCounters("skipped_bytes")
        self.http = RegistryHttp(options, timeout_s=timeout_s, counts=self.counts)
        self.auth = RegistryAuth(self.http, options, timeout_s=timeout_s)
        self._lock = threading.Lock()
        self._schemes: dict[str, str] = {}  # of hosts that may do without TLS
        self._resting: dict[str, float] = {}  # mirror's place -> end of its pause
        self._reported: set[str] = set()  # mirrors that are unusable in this configuration
        self._locations: dict[tuple[str, str], _Location] = {}  # (place, digest) -> where to fetch its bytes
        self.without_referrers: set[str] = set()  # hosts without that part of the API

    # ---- from asyncio --------------------------------------------------------------------------------------

    async def run(self, func: Callable[[RegistryCall], T], landing: RevocableBuffer | None = None) -> T:
        """Run `func` in a thread that can be abandoned; it ends after the timeout without progress.

        Cancelling shuts its connection; with a landing, the memory belongs to the caller again afterwards.
        Raises: what `func` raises; StorageError with `read_bytes` by the landing.
        """
        call = RegistryCall()
        moved = call.moved if landing is None else lambda: max(call.moved_s, landing.moved_s)
        failure: StorageError
        try:
            return await aio.run_abandonable(func, call, timeout_s=self.timeout_s, moved_s=moved)
        except TimeoutError as error:
            failure = StorageTimeout(f"{call.where}: no bytes received within {self.timeout_s:g} s")
            failure.__cause__ = error
        except StorageError as error:
            failure = error
        finally:
            call.cut()
            if landing is not None:
                landing.give_up()
                await landing.close()
        if landing is not None:
            failure.read_bytes = landing.have
        try:
            raise failure
        finally:
            del failure  # it holds this frame

    async def ask(self, func: Callable[[RegistryCall], T]) -> T:
        """Do the same with retries, respecting the registry's Retry-After."""
        return await aio.retry(
            RETRIES, lambda _attempt: self.run(func), on_retry=lambda: self.counts.add("retries")
        )

    def close(self) -> None:
        self.http.close()

    # ---- manifests -----------------------------------------------------------------------------------------

    def read_document(self, reference: Reference, call: RegistryCall) -> Document:
        """Read the manifest or index of the reference.

        Raises: NotFound, PermissionDenied; DigestMismatch, IntegrityError when no place has the right document.
        """
        return self.from_any(reference, lambda place: self.read_at(place, reference.version, call))

    def read_at(self, place: RegistryPlace, version: str, call: RegistryCall) -> Document:
        exchange = self.get(place, f"manifests/{version}", {"Accept": _ACCEPT}, call)
        where = f"{place.name}{'@' if is_digest(version) else ':'}{version}"
        if exchange.status != 200:
            raise self.refusal(exchange, place, where, call)
        data = self.http.read(exchange, MAX_MANIFEST_BYTES, call)
        if is_digest(version):
            check_digest(data, version, where)
        said = exchange.headers.get("Docker-Content-Digest", "").strip()
        if is_digest(said):
            check_digest(data, said, where)
        document = to_document(data, exchange.headers.get("Content-Type", ""), where)
        check_document(document, where)  # here, where another place can be tried instead
        return document

    # ---- blobs ---------------------------------------------------------------------------------------------

    def read_blob(
        self, reference: Reference, descriptor: Descriptor, call: RegistryCall, *, attempt: int = 0
    ) -> bytes:
        """Read a small blob and verify it. Raises: DigestMismatch, and the errors of `begin_blob`."""
        if descriptor.size == 0:
            check_digest(b"", descriptor.digest, reference.name)
            return b""

        def read(place: RegistryPlace) -> bytes:
            exchange = self._begin_blob(place, descriptor.digest, {}, call, is_fresh=attempt > 0)
            where = f"{place.name}@{descriptor.digest}"
            if exchange.status != 200:
                raise self.refusal(exchange, place, where, call)
            data = self.http.read(exchange, descriptor.size, call)
            check_digest(data, descriptor.digest, where)
            self.counts.add("read_bytes", len(data))
            return data

        return self.from_any(reference, read, attempt)

    def begin_blob(
        self,
        reference: Reference,
        digest: str,
        headers: Mapping[str, str],
        call: RegistryCall,
        *,
        attempt: int = 0,
    ) -> HttpResponse:
        """Begin a GET of a blob: 200, 206 or 416, for the caller to check.

        `attempt` > 0: on a new connection, and from another place where there is one.
        Raises: NotFound, PermissionDenied, Unavailable, StorageError.
        """

        def begin(place: RegistryPlace) -> HttpResponse:
            exchange = self._begin_blob(place, digest, headers, call, is_fresh=attempt > 0)
            if exchange.status not in (200, 206, 416):
                raise self.refusal(exchange, place, f"{place.name}@{digest}", call)
            return exchange

        return self.from_any(reference, begin, attempt)

    def _begin_blob(
        self, place: RegistryPlace, digest: str, headers: Mapping[str, str], call: RegistryCall, *, is_fresh: bool
    ) -> HttpResponse:
        """Send the request straight to the last redirect target, which saves half of the round trips."""
        key = (place.name, digest)
        location = self._locations.get(key)
        if location is not None and not is_fresh and time.monotonic() < location.until_s:
            try:
                exchange = self.http.get("GET", location.url, headers, call, private={}).exchange
            except Unavailable:
                exchange = None
            if exchange is not None and exchange.status in (200, 206, 416):
                return exchange
            if exchange is not None:
                exchange.finish()  # most likely expired
        self._locations.pop(key, None)
        return self.get(place, f"blobs/{digest}", headers, call, is_fresh=is_fresh, note=key)

    # ---- one place -----------------------------------------------------------------------------------------

    def get(
        self,
        place: RegistryPlace,
        where: str,
        headers: Mapping[str, str],
        call: RegistryCall,
        *,
        method: str = "GET",
        scope: Scope | None = None,
        is_fresh: bool = False,
        note: tuple[str, str] | None = None,
    ) -> HttpResponse:
        """Send a GET or HEAD.

        Args: where: a path of the repository, or a URL of the registry, whose own server alone gets the password;
        note: the key under which a redirect is stored.
        """
        base = self.base_url(place, call)
        url = where if "://" in where else f"{base}/{where}"
        is_own = is_same_server(url, base)

        def get(private: Mapping[str, str]) -> tuple[HttpResponse, bool]:
            mine = private if is_own else {}
            reply = self.http.get(method, url, headers, call, private=mine, is_fresh=is_fresh)
            if note is not None and reply.is_elsewhere and reply.exchange.status in (200, 206):
                with self._lock:
                    while len(self._locations) >= MAX_LOCATIONS:
                        del self._locations[next(iter(self._locations))]
                    self._locations[note] = _Location(reply.url, time.monotonic() + LOCATION_S)
            return reply.exchange, reply.is_elsewhere or not is_own

        return self._authorized(place, scope or pull_scope(place.repository), call, get)

    def send(
        self,
        place: RegistryPlace,
        method: str,
        url: str,
        headers: Mapping[str, str],
        call: RegistryCall,
        scope: Scope,
        body: memoryview | bytes | None = None,
    ) -> HttpResponse:
        """Send a POST, PUT, PATCH or DELETE; see `get`."""
        is_own = is_same_server(url, self.base_url(place, call))

        def send(private: Mapping[str, str]) -> tuple[HttpResponse, bool]:
            mine = private if is_own else {}
            return self.http.send(method, url, {**headers, **mine}, call, body), not is_own

        return self._authorized(place, scope, call, send)

    def _authorized(
        self,
        place: RegistryPlace,
        scope: Scope,
        call: RegistryCall,
        send: Callable[[Mapping[str, str]], tuple[HttpResponse, bool]],
    ) -> HttpResponse:
        answer = AuthAnswer(self.auth.header(place, scope, call))
        while True:
            exchange, is_elsewhere = send({"Authorization": answer.header} if answer.header else {})
            if exchange.status != 401 or is_elsewhere:
                return exchange
            text = ", ".join(exchange.headers.get_all("WWW-Authenticate") or [])
            exchange.finish()
            answer = self.auth.answer(place, scope, text, answer, call)

    def refusal(
        self, exchange: HttpResponse, place: RegistryPlace, where: str, call: RegistryCall
    ) -> StorageError:
        """Return the error for an unsuccessful status, with the registry's error text."""
        try:
            said = self.auth.hide(error_text(self.http.read(exchange, MAX_ERROR_BYTES, call)))
        except StorageError:
            said = ""
        status = exchange.status
        text = f"{where}: {place.host} answered {status} {exchange.response.reason}".rstrip() + (
            f": {said}" if said else ""
        )
        if status in (404, 410):
            return NotFound(text)
        if status in (401, 403, 407):
            return PermissionDenied(f"{text}: {self.auth.denied(place)}")
        if status in RETRYABLE:
            wait_s = parse_retry_after(exchange.headers.get("Retry-After", ""), time.time())
            return Unavailable(text, retry_after_s=wait_s)
        return StorageError(text)

    def base_url(self, place: RegistryPlace, call: RegistryCall) -> str:
        return f"{self._scheme_of(place.host, call)}://{place.host}/v2/{place.repository}"

    def _scheme_of(self, host: str, call: RegistryCall) -> str:
        if host in self.options.plain_http:
            return "http"
        if not is_loopback(host):
            return "https"
        with self._lock:
            found = self._schemes.get(host)
        if found is None:
            found = self._try_plain(host, call)
            with self._lock:
                self._schemes[host] = found
        return found

    def _try_plain(self, host: str, call: RegistryCall) -> str:
        """Return the scheme of a local registry; most have no certificate. Sends no password."""
        try:
            exchange, url, _ = self.http.get("GET", f"http://{host}/v2/", {}, call, private={})
        except Unavailable as error:
            if isinstance(error, StorageTimeout) or isinstance(error.__cause__, ConnectionRefusedError):
                raise
            return "https"
        except StorageError as error:
            return "https" if isinstance(error.__cause__, ssl.SSLError) else "http"
        exchange.drop()
        return "https" if exchange.status == 400 or url.startswith("https:") else "http"

    # ---- places --------------------------------------------------------------------------------------------

    def places(self, reference: Reference) -> list[RegistryPlace]:
        """Return all places, mirrors first."""
        return places_of(reference, self.options)

    def from_any(
        self,
        reference: Reference,
        func: Callable[[RegistryPlace], T],
        attempt: int = 0,
        *,
        is_origin_first: bool = False,
    ) -> T:
        """Return `func` of the first place that has the content; else raise the registry's own error.

        Wrong passwords or certificates of a mirror disable that mirror only.
        """
        places = self.places(reference)
        if len(places) > 1:
            if is_origin_first:
                places = [places[-1], *places[:-1]]
            elif attempt > 0:
                places = places[attempt % len(places) :] + places[: attempt % len(places)]
            else:
                now_s = time.monotonic()
                places = [each for each in places if self._resting.get(each.name, 0.0) <= now_s]
        failure: BootseerError | None = None
        for place in places:
            try:
                return func(place)
            except (StorageError, IntegrityError, ConfigError) as error:
                if isinstance(error, ConfigError):
                    if not place.is_mirror:
                        raise
                    self._warn_of(place, error)
                if place.is_mirror:
                    self._resting[place.name] = time.monotonic() + MIRROR_REST_S
                if failure is None or not place.is_mirror:
                    failure = error
        assert failure is not None
        try:
            raise failure
        finally:
            del failure  # it holds this frame

    def _warn_of(self, place: RegistryPlace, error: ConfigError) -> None:
        with self._lock:
            if place.name in self._reported:
                return
            self._reported.add(place.name)
        _log.warning("the mirror %s is not used: %s", place.name, error)
