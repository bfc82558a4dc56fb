"""Uploads of blobs to a registry: present blobs are not sent, and interrupted uploads resume.

In: a blob's digest and size, and a function to read it. Out: the blob in the repository, or one error. Small blobs
are sent in one piece, large ones in chunks. A registry without chunks gets large ones in one piece too, if memory
allows.
Source: github.com/opencontainers/distribution-spec, "Pushing blobs".
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import NamedTuple
from urllib.parse import urlencode, urlsplit

from bootseer import aio
from bootseer.errors import DigestMismatch, NotFound, StorageError, Unavailable
from bootseer.jitter import jitter
from bootseer.storage.http.client import HttpResponse, resolve_location
from bootseer.storage.http.headers import parse_length
from bootseer.storage.oci.auth import push_scope
from bootseer.storage.oci.client import RETRIES, RegistryClient
from bootseer.storage.oci.headers import parse_uploaded
from bootseer.storage.oci.http import RegistryCall
from bootseer.storage.oci.manifest import Descriptor
from bootseer.storage.oci.options import origin_of
from bootseer.storage.oci.reference import Reference

WHOLE_BYTES = 32 << 20  # up to this size in one request
CHUNK_BYTES = 32 << 20
MAX_CHUNK_BYTES = 256 << 20  # a registry may require larger ones than CHUNK_BYTES
MAX_WHOLE_BYTES = 512 << 20  # in one request if a registry accepts no chunks
_BYTES = {"Content-Type": "application/octet-stream"}
_NO_CHUNKS = (400, 404, 405, 411, 413, 415, 501)  # to a first chunk

Fill = Callable[[int, memoryview], Awaitable[None]]  # fills the memory with the blob's bytes from an offset on
Sent = Callable[[int], None]  # bytes of the blob that were sent or found since the last call


def from_memory(data: bytes) -> Fill:
    """Return a fill function for a blob in memory."""

    async def fill(offset: int, target: memoryview) -> None:
        target[:] = data[offset : offset + len(target)]

    return fill


class _Session(NamedTuple):
    """An upload that has begun."""

    url: str  # with secrets
    min_chunk_bytes: int


class _StartOverError(Exception):
    """The registry does not know the upload any more."""


class _WrongOffsetError(Exception):
    """The registry has more or less of the blob than expected."""


class _NoChunksError(Exception):
    """The registry accepts no chunks."""


class Uploads:
    """Pushes blobs to one repository. `mount_from`: another repository of the registry that may have them."""

    def __init__(self, client: RegistryClient, reference: Reference, *, mount_from: str = "") -> None:
        self._client = client
        self._place = origin_of(reference)
        self._mount_from = mount_from if mount_from != reference.repository else ""
        self._scope = push_scope(reference.repository, self._mount_from)
        self._where = reference.name
        self.sent_bytes = 0

    async def push(self, blob: Descriptor, fill: Fill, sent: Sent) -> None:
        """Push a blob. Raises: DigestMismatch if `fill` returns other bytes; StorageError."""
        if await self._client.ask(lambda call: self._is_there(blob, call)):
            sent(blob.size)
            return
        session = await self._client.ask(lambda call: self._begin(blob, call, is_mount=bool(self._mount_from)))
        if session is None:
            sent(blob.size)
            return
        if blob.size <= WHOLE_BYTES:
            await self._push_whole(blob, fill, session)
            sent(blob.size)
        else:
            await self._push_chunks(blob, fill, session, sent)
        self.sent_bytes += blob.size

    # ---- in one piece --------------------------------------------------------------------------------------

    async def _push_whole(self, blob: Descriptor, fill: Fill, session: _Session | None) -> None:
        data = memoryview(bytearray(blob.size))
        if blob.size:
            await fill(0, data)
        if f"sha256:{await aio.run_io(_hash, data)}" != blob.digest:
            raise self._damaged(blob)

        def put(call: RegistryCall, begun: _Session | None, attempt: int) -> None:
            if attempt and self._is_there(blob, call):
                return  # the answer was lost, not the blob
            begun = begun or self._begin(blob, call)
            assert begun is not None
            self._finish(begun.url, blob, data, call)

        async def once(attempt: int) -> None:
            begun = session if attempt == 0 else None
            await self._client.run(lambda call: put(call, begun, attempt))

        await aio.retry(RETRIES, once, on_retry=lambda: self._client.counts.add("retries"))

    def _finish(self, url: str, blob: Descriptor, data: memoryview | None, call: RegistryCall) -> None:
        mark = "&" if urlsplit(url).query else "?"
        url = f"{url}{mark}{urlencode({'digest': blob.digest})}"
        exchange = self._client.send(self._place, "PUT", url, _BYTES, call, self._scope, data)
        if exchange.status not in (201, 204):
            raise self._refusal(exchange, blob, call)
        exchange.finish()
        self._client.counts.add("written_bytes", len(data) if data is not None else 0)

    # ---- in chunks -----------------------------------------------------------------------------------------

    async def _push_chunks(self, blob: Descriptor, fill: Fill, session: _Session, sent: Sent) -> None:
        told = 0  # reported to `sent`

        def tell(done: int) -> None:
            nonlocal told
            if done > told:
                sent(done - told)
                told = done

        begun: _Session | None = session
        for attempt in range(RETRIES.tries):
            begun = begun or await self._client.ask(lambda call: self._begin(blob, call))
            assert begun is not None
            try:
                await self._push_session(blob, fill, begun, tell)
                return
            except _NoChunksError as error:
                if blob.size > MAX_WHOLE_BYTES:
                    raise StorageError(
                        f"{self._where}: {self._place.host} accepts no chunks, and {blob.digest} has {blob.size}"
                        " bytes"
                    ) from error
                await self._push_whole(blob, fill, None)
                tell(blob.size)
                return
            except _StartOverError as error:
                if attempt + 1 == RETRIES.tries:
                    raise Unavailable(
                        f"{self._where}: {self._place.host} lost the upload of {blob.digest}"
                    ) from error
                begun = None

    async def _push_session(self, blob: Descriptor, fill: Fill, session: _Session, tell: Sent) -> None:
        size = min(max(CHUNK_BYTES, session.min_chunk_bytes), MAX_CHUNK_BYTES, blob.size)
        memory = memoryview(bytearray(size))
        digest = hashlib.sha256()
        url, offset = session.url, 0
        while offset < blob.size:
            chunk = memory[: min(size, blob.size - offset)]
            await fill(offset, chunk)
            await aio.run_io(digest.update, chunk)
            end = offset + len(chunk)
            if end == blob.size and f"sha256:{digest.hexdigest()}" != blob.digest:
                raise self._damaged(blob)
            url = await self._push_chunk(blob, url, offset, chunk)
            offset = end
            tell(offset)

        def finish(call: RegistryCall) -> None:
            self._finish(url, blob, None, call)

        try:
            await self._client.run(finish)
        except StorageError as error:
            # Perhaps only the answer was lost.
            if not error.retryable or not await self._client.ask(lambda call: self._is_there(blob, call)):
                if isinstance(error, NotFound) or error.retryable:
                    raise _StartOverError from error
                raise

    async def _push_chunk(self, blob: Descriptor, url: str, offset: int, chunk: memoryview) -> str:
        """Send a chunk until all of it has arrived; return the URL for the next one."""
        have = 0
        failures = 0  # in a row without progress
        while True:
            rest, begin = chunk[have:], offset + have
            try:
                return await self._client.run(lambda call: self._patch(blob, url, begin, rest, call))  # noqa: B023
            except _WrongOffsetError as error:
                if failures:
                    raise _StartOverError from error  # its last answer was different
                failures, wait_s = 1, 0.0
            except Unavailable as error:
                failures += 1
                wait_s = max(error.retry_after_s, RETRIES.wait_s(failures + 1, jitter()))
                if failures >= RETRIES.tries or wait_s > RETRIES.budget_s:
                    raise
            self._client.counts.add("retries")
            await asyncio.sleep(wait_s)
            url, there = await self._client.ask(lambda call: self._query_offset(blob, url, call))  # noqa: B023
            if not offset <= there <= offset + len(chunk):
                raise _StartOverError
            if there > begin:
                failures = 1
            have = there - offset
            if have == len(chunk):
                return url

    def _patch(self, blob: Descriptor, url: str, offset: int, chunk: memoryview, call: RegistryCall) -> str:
        headers = {**_BYTES, "Content-Range": f"{offset}-{offset + len(chunk) - 1}"}
        exchange = self._client.send(self._place, "PATCH", url, headers, call, self._scope, chunk)
        if exchange.status == 202:
            exchange.finish()
            self._client.counts.add("written_bytes", len(chunk))
            return self._location(exchange, url)
        if exchange.status in _NO_CHUNKS and offset == 0:
            exchange.finish()
            raise _NoChunksError
        if exchange.status == 404:
            exchange.finish()
            raise _StartOverError
        if exchange.status == 416:
            exchange.finish()
            raise _WrongOffsetError
        raise self._refusal(exchange, blob, call)

    def _query_offset(self, blob: Descriptor, url: str, call: RegistryCall) -> tuple[str, int]:
        """Return the URL to resume the upload, and the number of bytes received."""
        exchange = self._client.get(self._place, url, {}, call, scope=self._scope)
        if exchange.status in (400, 404, 405, 416):  # docker-registry drops an upload that stopped within a chunk
            exchange.finish()
            raise _StartOverError
        if exchange.status not in (200, 202, 204):
            raise self._refusal(exchange, blob, call)
        exchange.finish()
        return self._location(exchange, url), parse_uploaded(exchange.headers.get("Range", ""))

    # ---- requests ------------------------------------------------------------------------------------------

    def _is_there(self, blob: Descriptor, call: RegistryCall) -> bool:
        exchange = self._client.get(
            self._place, f"blobs/{blob.digest}", {}, call, method="HEAD", scope=self._scope
        )
        exchange.finish()
        if exchange.status == 404:
            return False
        if exchange.status != 200:
            raise self._refusal(exchange, blob, call)
        size = parse_length(exchange.headers.get("Content-Length", ""))
        if size not in (None, blob.size):
            raise StorageError(f"{self._where}: {blob.digest} has {size} bytes there, not {blob.size}")
        return True

    def _begin(self, blob: Descriptor, call: RegistryCall, *, is_mount: bool = False) -> _Session | None:
        """Begin an upload; None if the registry has taken the blob from the other repository."""
        url = f"{self._client.base_url(self._place, call)}/blobs/uploads/"
        if is_mount:
            url += "?" + urlencode({"mount": blob.digest, "from": self._mount_from})
        exchange = self._client.send(self._place, "POST", url, {}, call, self._scope)
        if exchange.status == 201 and is_mount:
            exchange.finish()
            return None
        if exchange.status != 202:
            raise self._refusal(exchange, blob, call)
        exchange.finish()
        least = parse_length(exchange.headers.get("OCI-Chunk-Min-Length", "")) or 0
        return _Session(self._location(exchange, url), least)

    def _location(self, exchange: HttpResponse, url: str) -> str:
        location = exchange.headers.get("Location", "")
        if not location:
            raise StorageError(f"{exchange.shown}: the registry did not return the location of the upload")
        return resolve_location(url, location, exchange.shown, stays_encrypted=True)

    def _refusal(self, exchange: HttpResponse, blob: Descriptor, call: RegistryCall) -> StorageError:
        return self._client.refusal(exchange, self._place, f"{self._where}@{blob.digest}", call)

    def _damaged(self, blob: Descriptor) -> DigestMismatch:
        return DigestMismatch(f"{blob.digest}: the data to push has other bytes than its digest; nothing was sent")


def _hash(data: memoryview) -> str:
    return hashlib.sha256(data).hexdigest()
