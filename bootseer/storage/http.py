"""Files of a web server, read by ranges into the caller's memory. Reading only.

The server must know ranges: an answer that is not exactly the bytes asked for is never taken for them. Versions
are told apart by ETag, else by Last-Modified and size; the server is asked to refuse any other (If-Match).
"""

from __future__ import annotations

import email.utils
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
from bootseer.storage.counts import Counts
from bootseer.storage.http_client import Exchange, HttpClient, Wire
from bootseer.storage.landing import Landing
from bootseer.storage.paths import check_offset, check_path, redact
from bootseer.storage.protocol import Entry, Features, Stat
from bootseer.storage.read_only import ReadOnly

RETRIES = aio.RetryPolicy(tries=3, base_s=0.1, most_s=1.0, budget_s=10.0)  # of `stat`; ranges have their own
MAX_RETRY_AFTER_S = 3600.0

_CONTENT_RANGE = re.compile(r"bytes (?:(\d{1,18})-(\d{1,18})|\*)/(\d{1,18}|\*)")
_PASSING = (408, 425, 429, 500, 502, 503, 504)
_NO_HEAD = (400, 403, 405, 501)  # servers, and signatures that hold for GET only

T = TypeVar("T")


class HttpStore(ReadOnly):
    """Implements `Store`; what writes or lists raises StorageError.

    Args:
        url: of the folder; its query (a signature) is sent with every request.
        headers: sent with every request to this server, but to no other that it redirects to.
        ca_file: certificates to trust instead of the system's.
    """

    why_read_only = ": a web server is only read, write to where its files are"

    features = Features(creates_if_absent=False, concatenates=False, has_replicas=False)

    def __init__(
        self, url: str, *, timeout_s: float = 30.0, headers: Mapping[str, str] | None = None, ca_file: str = ""
    ) -> None:
        try:
            parts = urlsplit(url)
            parts.port  # noqa: B018  (is a number)
        except ValueError as error:
            raise ConfigError(f"{redact(url)}: is no URL ({error})") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{redact(url)}: is no http:// or https:// URL with a server")
        folder = quote(parts.path.rstrip("/"), safe="/%:@!$&'()*+,;=~")
        self._parts = parts._replace(path=folder, fragment="")
        self.url = redact(urlunsplit(self._parts))
        self._timeout_s = timeout_s
        self._counts = Counts()
        all_headers = {"User-Agent": "bootseer", **(headers or {})}
        for name, value in all_headers.items():
            if not re.fullmatch(r"[!-9;-~]+", name) or not re.fullmatch(r"[ -~\t]*", value):
                raise ConfigError(f"{self.url}: header {name!r} has characters that HTTP does not allow")
        self._client = HttpClient(timeout_s=timeout_s, headers=all_headers, ca_file=ca_file, counts=self._counts)

    async def stat(self, path: str) -> Stat:
        url = self._url_of(path)
        return await aio.retry(
            RETRIES,
            lambda attempt: self._run(lambda wire: self._stat(url, wire, attempt > 0), Landing(memoryview(b""))),
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
        landing = Landing(target)
        try:
            await self._run(
                lambda wire: self._read(url, offset, len(target), landing, etag, wire, attempt > 0), landing
            )
        finally:
            self._counts.add("read_bytes", landing.have)

    async def list(self, folder: str) -> list[Entry]:
        raise StorageError(
            f"{self.url}: {folder!r} cannot be listed: a web server lists no folders, name the file"
        )

    async def aclose(self) -> None:
        self._client.close()

    def statistics(self) -> dict[str, int]:
        return self._counts.to_dict()

    # ---- one call ------------------------------------------------------------------------------------------

    async def _run(self, func: Callable[[Wire], T], landing: Landing) -> T:
        """In a thread that can be given up: names are looked up without a deadline."""
        wire = Wire()
        failure: StorageError
        try:
            return await aio.run_apart(func, wire, timeout_s=self._timeout_s, moved_s=landing.moved)
        except TimeoutError as error:
            failure = StorageTimeout(f"{self.url}: no bytes within {self._timeout_s:g} s")
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

    def _stat(self, url: str, wire: Wire, is_fresh: bool) -> Stat:
        exchange = self._client.begin("HEAD", url, {}, wire, is_fresh=is_fresh)
        exchange.finish()
        if exchange.status in _NO_HEAD or (exchange.status == 200 and "Content-Length" not in exchange.headers):
            exchange = self._client.begin("GET", url, {"Range": "bytes=0-0"}, wire)
            if exchange.status == 200:
                exchange.drop()  # the whole file would follow
            else:
                exchange.finish()
        if exchange.status == 206:
            size = _parse_content_range(exchange)[2]
        elif exchange.status == 416 and _content_range(exchange) == (0, -1, 0):
            size = 0
        elif exchange.status == 200:
            size = _content_length(exchange)
        else:
            raise _refused(exchange)
        _check_plain(exchange)
        if size is None:
            raise StorageError(f"{exchange.shown}: the server does not say how large it is")
        return Stat(size, _version(exchange, size))

    def _read(
        self, url: str, offset: int, length: int, landing: Landing, etag: str, wire: Wire, is_fresh: bool
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


def _check_answer(exchange: Exchange, offset: int, length: int, etag: str) -> int:
    """How many of the bytes asked for follow, in order from the first. Raises for all other answers."""
    if exchange.status == 412:
        raise _changed(exchange.shown)
    if exchange.status == 416:
        size = _content_range(exchange)[2]
        of = f"a file of {size}" if size is not None else "it"
        raise Truncated(f"{exchange.shown}: bytes {offset} to {offset + length} of {of}")
    if exchange.status not in (200, 206):
        raise _refused(exchange)
    _check_plain(exchange)
    sent = _content_length(exchange)
    if exchange.status == 200:
        if sent is not None and offset + length > sent:  # as some answer for empty files
            raise Truncated(f"{exchange.shown}: bytes {offset} to {offset + length} of a file of {sent}")
        if offset != 0 or sent != length:
            raise StorageError(
                f"{exchange.shown}: the server sends whole files only, not ranges: use one that knows ranges"
            )
        total: int | None = length
        expected = length
    else:
        first, last, total = _parse_content_range(exchange)
        if first != offset or last < first or last >= offset + length or sent not in (None, last - first + 1):
            raise Unavailable(
                f"{exchange.shown}: asked for bytes {offset}-{offset + length - 1}, the server sent {first}-{last}"
                f" in {sent} bytes"
            )
        expected = last - first + 1
    if etag and _version(exchange, total) != etag:
        raise _changed(exchange.shown)
    if total is not None and offset + length > total:
        raise Truncated(f"{exchange.shown}: bytes {offset} to {offset + length} of a file of {total}")
    return expected


def _parse_content_range(exchange: Exchange) -> tuple[int, int, int | None]:
    first, last, total = _content_range(exchange)
    if last < 0:
        raise Unavailable(
            f"{exchange.shown}: the server does not say which bytes it sent"
            f" (Content-Range: {exchange.headers.get('Content-Range')})"
        )
    return first, last, total


def _content_range(exchange: Exchange) -> tuple[int, int, int | None]:
    """First and last byte, 0 and -1 without, and the size of the file, if known."""
    found = _CONTENT_RANGE.fullmatch((exchange.headers.get("Content-Range") or "").strip())
    if found is None:
        return 0, -1, None
    total = None if found[3] == "*" else int(found[3])
    return (0, -1, total) if found[1] is None else (int(found[1]), int(found[2]), total)


def _content_length(exchange: Exchange) -> int | None:
    text = exchange.headers.get("Content-Length")
    return int(text) if text and re.fullmatch(r"\d{1,18}", text.strip()) else None


def _check_plain(exchange: Exchange) -> None:
    """The bytes must be the file's."""
    encoding = exchange.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise StorageError(f"{exchange.shown}: the server sends it as {encoding}, of which no range can be used")


def _version(exchange: Exchange, size: int | None) -> str:
    etag: str = exchange.headers.get("ETag", "").strip()
    if etag:
        return etag
    modified = exchange.headers.get("Last-Modified", "").strip()
    return f"{modified}; {size} bytes" if modified and size is not None else ""


def _changed(shown: str) -> SourceChanged:
    return SourceChanged(f"{shown}: is another version than the one that is being read; start again with it")


def _refused(exchange: Exchange) -> StorageError:
    """What a status that is no success means."""
    said = f"{exchange.shown}: the server says {exchange.status} {exchange.response.reason}".rstrip()
    if exchange.status in (404, 410):
        return NotFound(said)
    if exchange.status in (401, 403, 407):
        return PermissionDenied(f"{said}: are the password, token or signature right?")
    if exchange.status in _PASSING:
        return Unavailable(said, retry_after_s=_retry_after_s(exchange))
    return StorageError(said)


def _retry_after_s(exchange: Exchange) -> float:
    text = exchange.headers.get("Retry-After", "").strip()
    if re.fullmatch(r"\d{1,9}", text):
        return min(float(text), MAX_RETRY_AFTER_S)
    try:
        wait_s = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
    except (ValueError, TypeError):
        return 0.0
    return min(max(0.0, wait_s), MAX_RETRY_AFTER_S)
