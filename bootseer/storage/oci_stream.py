"""A blob of a registry as a file that is read from start to end, for layers that are unpacked as they come.

Blocking: for a thread of whoever unpacks. A broken connection goes on from the last byte; the number of bytes is
what the manifest says. The digest is the reader's business, who has all the bytes in his hands anyway.
"""

from __future__ import annotations

import io
import random
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from bootseer.errors import StorageError, Unavailable
from bootseer.storage.http_client import CutOff, Exchange, to_ours
from bootseer.storage.oci_client import RETRIES, RegistryClient
from bootseer.storage.oci_headers import parse_content_range, parse_length
from bootseer.storage.oci_http import Call
from bootseer.storage.oci_manifest import Descriptor
from bootseer.storage.oci_reference import Reference

SKIP_BYTES = 256 << 10  # received at once

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class BlobStream(io.RawIOBase):
    """The bytes of `blob`; `read` raises StorageError. For one thread; any other may `cancel`."""

    def __init__(
        self,
        client: RegistryClient,
        reference: Reference,
        blob: Descriptor,
        *,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        super().__init__()
        self._client = client
        self._reference = reference
        self._blob = blob
        self._jitter = jitter
        self._call = Call()
        self._exchange: Exchange | None = None
        self._have = 0
        self._failures = 0  # in a row
        self._cancelled = threading.Event()

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._have

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        if not view or self._have == self._blob.size:
            return 0
        while True:
            try:
                count = self._try_read(view)
            except StorageError as error:
                self._wait(error)
            except CutOff as error:
                raise self._was_cancelled() from error
            else:
                self._have += count
                self._failures = 0
                return count

    def cancel(self) -> None:
        """Ends a read that waits, and all to come, by an error."""
        self._cancelled.set()
        self._call.cut()

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.drop()
            self._exchange = None
        super().close()

    def __enter__(self) -> BlobStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _try_read(self, view: memoryview) -> int:
        if self._exchange is None:
            self._exchange = self._begin()
        exchange = self._exchange
        try:
            count = exchange.response.readinto(view[: self._blob.size - self._have])
            if not count:
                raise Unavailable(
                    f"{exchange.shown}: the connection ended after {self._have} of {self._blob.size} bytes"
                )
        except BaseException as error:
            self._exchange = None
            raise self._dropped(exchange, error) from error
        self._client.counts.add("read_bytes", count)
        if self._have + count == self._blob.size:
            exchange.finish()
            self._exchange = None
        return count

    def _begin(self) -> Exchange:
        headers = {"Range": f"bytes={self._have}-"} if self._have else {}
        exchange = self._client.begin_blob(
            self._reference, self._blob.digest, headers, self._call, attempt=self._failures
        )
        try:
            self._check(exchange)
        except BaseException as error:
            raise self._dropped(exchange, error) from error
        return exchange

    def _check(self, exchange: Exchange) -> None:
        size = self._blob.size
        sent = parse_length(exchange.headers.get("Content-Length", ""))
        if exchange.status == 200 and sent in (None, size):
            left = self._have  # to be skipped: it does not know ranges
            rest = memoryview(bytearray(min(left, SKIP_BYTES)))
            while left:
                came = exchange.response.readinto(rest[: min(left, len(rest))])
                if not came:
                    raise Unavailable(
                        f"{exchange.shown}: the connection ended before the bytes that were asked for"
                    )
                left -= came
            return
        found = parse_content_range(exchange.headers.get("Content-Range", ""))
        if exchange.status != 206 or found is None or found[:2] != (self._have, size - 1):
            raise Unavailable(
                f"{exchange.shown}: asked for bytes from {self._have} of {size}, the registry sent"
                f" {exchange.status} with {sent} bytes (Content-Range: {exchange.headers.get('Content-Range')!r})"
            )

    def _dropped(self, exchange: Exchange, error: BaseException) -> BaseException:
        """What to raise for an error of an exchange, which has ended."""
        exchange.drop()
        if self._cancelled.is_set():
            return self._was_cancelled()
        return to_ours(error, exchange.shown, self._client.timeout_s)

    def _was_cancelled(self) -> StorageError:
        return StorageError(f"{self._reference.name}@{self._blob.digest}: reading was cancelled")

    def _wait(self, error: StorageError) -> None:
        """Before the next try, or raises the error if there is none."""
        self._failures += 1
        if not error.retryable or self._failures >= RETRIES.tries:
            raise error
        self._client.counts.add("retries")
        wait_s = self._jitter() * min(RETRIES.most_s, RETRIES.base_s * 2.0 ** (self._failures - 1))
        if self._cancelled.wait(min(max(error.retry_after_s, wait_s), RETRIES.budget_s)):
            raise self._was_cancelled()
