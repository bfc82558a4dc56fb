"""A blob of a registry as a sequential file, for layers that are unpacked while they arrive.

Blocking: for a thread of the reader. After a broken connection it continues from the last byte. The number of
bytes is that of the manifest. The reader verifies the digest.
"""

from __future__ import annotations

import io
import threading
from types import TracebackType
from typing import TYPE_CHECKING

from bootseer.errors import StorageError, Unavailable
from bootseer.jitter import jitter
from bootseer.storage.engine.cancelling import RequestCancelled
from bootseer.storage.http.client import HttpResponse, map_http_error
from bootseer.storage.http.headers import parse_content_range, parse_length
from bootseer.storage.oci.client import RETRIES, RegistryClient
from bootseer.storage.oci.http import RegistryCall
from bootseer.storage.oci.manifest import Descriptor
from bootseer.storage.oci.reference import Reference

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class BlobStream(io.RawIOBase):
    """The bytes of `blob`; `read` raises StorageError. For one thread; any other thread may `cancel`."""

    def __init__(self, client: RegistryClient, reference: Reference, blob: Descriptor) -> None:
        super().__init__()
        self._client = client
        self._reference = reference
        self._blob = blob
        self._call = RegistryCall()
        self._exchange: HttpResponse | None = None
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
            except RequestCancelled as error:
                raise self._was_cancelled() from error
            else:
                self._have += count
                self._failures = 0
                return count

    def cancel(self) -> None:
        """End a waiting read, and all later ones, with an error."""
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

    def _begin(self) -> HttpResponse:
        headers = {"Range": f"bytes={self._have}-"} if self._have else {}
        exchange = self._client.begin_blob(
            self._reference, self._blob.digest, headers, self._call, attempt=self._failures
        )
        try:
            self._check(exchange)
        except BaseException as error:
            raise self._dropped(exchange, error) from error
        return exchange

    def _check(self, exchange: HttpResponse) -> None:
        size = self._blob.size
        sent = parse_length(exchange.headers.get("Content-Length", ""))
        if exchange.status == 200 and sent in (None, size):
            exchange.skip(self._have)  # the registry does not support ranges
            return
        found = parse_content_range(exchange.headers.get("Content-Range", ""))
        if exchange.status != 206 or found is None or found[:2] != (self._have, size - 1):
            raise Unavailable(
                f"{exchange.shown}: requested bytes from {self._have} of {size}, the registry sent"
                f" {exchange.status} with {sent} bytes (Content-Range: {exchange.headers.get('Content-Range')!r})"
            )

    def _dropped(self, exchange: HttpResponse, error: BaseException) -> BaseException:
        """Drop a failed exchange, and return the error to raise."""
        exchange.drop()
        if self._cancelled.is_set():
            return self._was_cancelled()
        return map_http_error(error, exchange.shown, self._client.timeout_s)

    def _was_cancelled(self) -> StorageError:
        return StorageError(f"{self._reference.name}@{self._blob.digest}: reading was cancelled")

    def _wait(self, error: StorageError) -> None:
        """Wait before the next try, or raise the error if there is none."""
        self._failures += 1
        if not error.retryable or self._failures >= RETRIES.tries:
            raise error
        self._client.counts.add("retries")
        wait_s = max(error.retry_after_s, RETRIES.wait_s(self._failures, jitter()))
        if self._cancelled.wait(min(wait_s, RETRIES.budget_s)):
            raise self._was_cancelled()
