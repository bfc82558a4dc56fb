"""Files of a web server, read by ranges into the caller's memory. Read-only.

The server must support ranges; the store rejects any other bytes than those requested. Versions differ in ETag,
else in Last-Modified and size. The store sends If-Match, so that the server refuses other versions.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from typing import TypeVar
from urllib.parse import quote, urlsplit, urlunsplit

from bootseer import aio
from bootseer.errors import (
    ConfigError,
    NotFound,
    PermissionDenied,
    SourceChanged,
    StorageError,
    StorageTimeout,
    Truncated,
    Unavailable,
)
from bootseer.storage.engine.cancelling import CancelHandle
from bootseer.storage.engine.counts import StoreCounters
from bootseer.storage.engine.revocable_buffer import RevocableBuffer
from bootseer.storage.http.client import HttpClient, HttpResponse
from bootseer.storage.http.headers import (
    RETRYABLE,
    ContentRange,
    parse_content_range,
    parse_length,
    parse_retry_after,
    parse_total,
)
from bootseer.storage.paths import check_offset, check_path, redact
from bootseer.storage.protocol import Entry, Features, Stat
from bootseer.storage.read_only import ReadOnlyStore

RETRIES = aio.RetryPolicy(tries=3, base_s=0.1, max_s=1.0, budget_s=10.0)  # of `stat`; ranges have their own

_NO_HEAD = (400, 403, 405, 501)  # of servers without HEAD, and of signatures for GET only

T = TypeVar("T")


class HttpStore(ReadOnlyStore):
    """A `Store` whose writes and listings raise StorageError.

    Args:
        url: of the directory; its query (a signature) is sent with every request.
        headers: sent with every request to this server, but not after a redirect to another.
        ca_file: certificates to trust in place of the system's.
    """

    why_read_only = ": a web server is read-only; write to the place of its files"

    features = Features(creates_if_absent=False, concatenates=False, has_replicas=False)

    def __init__(
        self, url: str, *, timeout_s: float = 30.0, headers: Mapping[str, str] | None = None, ca_file: str = ""
    ) -> None:
        try:
            parts = urlsplit(url)
            parts.port  # noqa: B018  (is a number)
        except ValueError as error:
            raise ConfigError(f"{redact(url)}: is not a URL ({error})") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{redact(url)}: is not an http:// or https:// URL with a server")
        directory = quote(parts.path.rstrip("/"), safe="/%:@!$&'()*+,;=~")
        self._parts = parts._replace(path=directory, fragment="")
        self.url = redact(urlunsplit(self._parts))
        self._timeout_s = timeout_s
        self._counts = StoreCounters()
        all_headers = {"User-Agent": "bootseer", **(headers or {})}
        for name, value in all_headers.items():
            if not re.fullmatch(r"[!-9;-~]+", name) or not re.fullmatch(r"[ -~\t]*", value):
                raise ConfigError(f"{self.url}: header {name!r} contains characters that HTTP does not allow")
        self._client = HttpClient(timeout_s=timeout_s, headers=all_headers, ca_file=ca_file, counts=self._counts)

    async def stat(self, path: str) -> Stat:
        url = self._url_of(path)
        return await aio.retry(
            RETRIES,
            lambda attempt: self._run(
                lambda wire: self._stat(url, wire, attempt > 0), RevocableBuffer(memoryview(b""))
            ),
            on_retry=lambda: self._counts.add("retries"),
        )

    async def read_into(
        self, path: str, offset: int, target: memoryview, *, etag: str = "", attempt: int = 0
    ) -> None:
        url = self._url_of(path)
        check_offset(self.url, path, offset)
        if not target:
            found = await self.stat(path)
            if etag and found.etag != etag:
                raise _changed(redact(url))
            if offset > found.size:
                raise Truncated(f"{redact(url)}: byte {offset} of a file of {found.size}")
            return
        landing = RevocableBuffer(target)
        try:
            await self._run(
                lambda wire: self._read(url, offset, len(target), landing, etag, wire, attempt > 0), landing
            )
        finally:
            self._counts.add("read_bytes", landing.have)

    async def list(self, directory: str) -> list[Entry]:
        raise StorageError(
            f"{self.url}: {directory!r} cannot be listed: a web server lists no directories; name the file"
        )

    async def aclose(self) -> None:
        self._client.close()

    def statistics(self) -> dict[str, int]:
        return self._counts.to_dict()

    # ---- one call ------------------------------------------------------------------------------------------

    async def _run(self, func: Callable[[CancelHandle], T], landing: RevocableBuffer) -> T:
        """Call `func` in a thread that can be abandoned: name resolution has no deadline."""
        wire = CancelHandle()
        failure: StorageError
        try:
            return await aio.run_abandonable(func, wire, timeout_s=self._timeout_s, moved_s=landing.moved)
        except TimeoutError as error:
            failure = StorageTimeout(f"{self.url}: no bytes received within {self._timeout_s:g} s")
            failure.__cause__ = error
        except StorageError as error:
            failure = error
        finally:
            landing.give_up()
            wire.cut()
            await landing.close()
        failure.read_bytes = landing.have
        try:
            raise failure
        finally:
            del failure  # it holds this frame

    def _stat(self, url: str, wire: CancelHandle, is_fresh: bool) -> Stat:
        exchange = self._client.begin("HEAD", url, {}, wire, is_fresh=is_fresh)
        exchange.finish()
        if exchange.status in _NO_HEAD or (exchange.status == 200 and "Content-Length" not in exchange.headers):
            exchange = self._client.begin("GET", url, {"Range": "bytes=0-0"}, wire)
            if exchange.status == 200:
                exchange.drop()  # the whole file would follow
            else:
                exchange.finish()
        if exchange.status == 206:
            size = _parse_content_range(exchange).total
        elif exchange.status == 416 and parse_total(exchange.headers.get("Content-Range", "")) == 0:
            size = 0
        elif exchange.status == 200:
            size = parse_length(exchange.headers.get("Content-Length", ""))
        else:
            raise _refused(exchange)
        _check_plain(exchange)
        if size is None:
            raise StorageError(f"{exchange.shown}: the server does not report the file's size")
        return Stat(size, _version(exchange, size))

    def _read(
        self,
        url: str,
        offset: int,
        length: int,
        landing: RevocableBuffer,
        etag: str,
        wire: CancelHandle,
        is_fresh: bool,
    ) -> None:
        headers = {"Range": f"bytes={offset}-{offset + length - 1}"}
        if etag.startswith('"'):
            headers["If-Match"] = etag
        exchange = self._client.begin("GET", url, headers, wire, is_fresh=is_fresh)
        try:
            expected = _check_answer(exchange, offset, length, etag)
        except BaseException:
            exchange.finish()
            raise
        with exchange.reading():
            exchange.land(landing, expected)
        exchange.finish()
        if expected < length:
            raise Unavailable(f"{exchange.shown}: the server sent {expected} of {length} bytes")

    def _url_of(self, path: str) -> str:
        check_path(self.url, path)
        return urlunsplit(self._parts._replace(path=f"{self._parts.path}/{quote(os.fsencode(path), safe='/~')}"))


def _check_answer(exchange: HttpResponse, offset: int, length: int, etag: str) -> int:
    """Return how many of the requested bytes follow, in order from the first. Raises for all other answers."""
    if exchange.status == 412:
        raise _changed(exchange.shown)
    if exchange.status == 416:
        size = parse_total(exchange.headers.get("Content-Range", ""))
        of = f"a file of {size}" if size is not None else "it"
        raise Truncated(f"{exchange.shown}: bytes {offset} to {offset + length} of {of}")
    if exchange.status not in (200, 206):
        raise _refused(exchange)
    _check_plain(exchange)
    sent = parse_length(exchange.headers.get("Content-Length", ""))
    if exchange.status == 200:
        if sent is not None and offset + length > sent:  # some servers answer so for empty files
            raise Truncated(f"{exchange.shown}: bytes {offset} to {offset + length} of a file of {sent}")
        if offset != 0 or sent != length:
            raise StorageError(
                f"{exchange.shown}: the server sends whole files only, not ranges; use one that supports them"
            )
        total: int | None = length
        expected = length
    else:
        first, last, total = _parse_content_range(exchange)
        if first != offset or last < first or last >= offset + length or sent not in (None, last - first + 1):
            raise Unavailable(
                f"{exchange.shown}: requested bytes {offset}-{offset + length - 1}, the server sent {first}-{last}"
                f" in {sent} bytes"
            )
        expected = last - first + 1
    if etag and _version(exchange, total) != etag:
        raise _changed(exchange.shown)
    if total is not None and offset + length > total:
        raise Truncated(f"{exchange.shown}: bytes {offset} to {offset + length} of a file of {total}")
    return expected


def _parse_content_range(exchange: HttpResponse) -> ContentRange:
    found = parse_content_range(exchange.headers.get("Content-Range", ""))
    if found is None:
        raise Unavailable(
            f"{exchange.shown}: the server does not report which bytes it sent"
            f" (Content-Range: {exchange.headers.get('Content-Range')})"
        )
    return found


def _check_plain(exchange: HttpResponse) -> None:
    """Check that the body is not encoded."""
    encoding = exchange.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise StorageError(f"{exchange.shown}: the server sends it as {encoding}, which allows no ranges")


def _version(exchange: HttpResponse, size: int | None) -> str:
    etag: str = exchange.headers.get("ETag", "").strip()
    if etag:
        return etag
    modified = exchange.headers.get("Last-Modified", "").strip()
    return f"{modified}; {size} bytes" if modified and size is not None else ""


def _changed(shown: str) -> SourceChanged:
    return SourceChanged(f"{shown}: the file has changed since the read began; start the read again")


def _refused(exchange: HttpResponse) -> StorageError:
    """Map an unsuccessful status to an error."""
    said = f"{exchange.shown}: the server answered {exchange.status} {exchange.response.reason}".rstrip()
    if exchange.status in (404, 410):
        return NotFound(said)
    if exchange.status in (401, 403, 407):
        return PermissionDenied(f"{said}: check the password, token or signature")
    if exchange.status in RETRYABLE:
        return Unavailable(
            said, retry_after_s=parse_retry_after(exchange.headers.get("Retry-After", ""), time.time())
        )
    return StorageError(said)
