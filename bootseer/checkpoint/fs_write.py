"""Writing through the fsspec protocol: files become a new striped version of their directory.

No part of a version is visible before all its files and its manifest are written. A file object that is left by an
error creates no version.
"""

from __future__ import annotations

import io
import queue
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

from bootseer import aio
from bootseer.checkpoint.io.inputs import Input, Stream
from bootseer.checkpoint.writing.writer import default_geometry, write_version
from bootseer.errors import CheckpointError
from bootseer.storage import open_store

CHUNK_BYTES = 4 << 20
CHUNKS = 4  # between the writer and the store
POLL_S = 0.2  # between checks whether the other side still runs


def write_files(directory: str, sources: Sequence[tuple[str, Input | Stream]], stripes: int | None = None) -> None:
    """Write all files as one new version of the checkpoint `directory`."""

    async def write() -> None:
        store = open_store(directory)
        try:
            await write_version(store, "", sources, geometry=default_geometry(store, stripes=stripes))
        finally:
            await store.aclose()

    aio.run_sync(write())


class VersionFile(io.RawIOBase):
    """One file being written; closing it creates a version."""

    def __init__(self, folder: str, name: str, stripes: int | None = None) -> None:
        super().__init__()
        self.name = name
        self.mode = "wb"
        self._where = f"{folder}/{name}"
        self._at = 0
        self._waiting = bytearray()
        self._feed = _Feed(self._where)
        # The thread does not refer to this object: without a close, it is discarded when it is dropped.
        self._thread = threading.Thread(
            target=_write, args=(self._feed, folder, name, stripes), name="checkpoint-write", daemon=True
        )
        self._thread.start()

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def tell(self) -> int:
        return self._at

    def write(self, data: Any) -> int:
        if self.closed:
            raise ValueError(f"{self._where}: the file is closed")
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            part = view[done : done + CHUNK_BYTES - len(self._waiting)]
            self._waiting += part
            done += len(part)
            if len(self._waiting) == CHUNK_BYTES:
                self._feed.put(bytes(self._waiting))
                self._waiting.clear()
        self._at += done
        return done

    def close(self) -> None:
        """Finish the version. Raises the error of the write, if any; there is no version then."""
        if self.closed:
            return
        try:
            if self._waiting:
                self._feed.put(bytes(self._waiting))
            self._feed.put(None)
            self._thread.join()
        finally:
            super().close()
        if self._feed.failure is not None:
            raise self._feed.failure

    def discard(self) -> None:
        """End without a version."""
        if not self.closed:
            self._feed.is_abandoned = True
            self._thread.join()
            super().close()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def __del__(self) -> None:
        if not self.closed:  # never closed: the data may be incomplete
            self.discard()


class _Feed:
    """The state that a file and the thread that writes it share."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._chunks: queue.Queue[bytes | None] = queue.Queue(CHUNKS)
        self.failure: BaseException | None = None
        self.is_abandoned = False

    def put(self, chunk: bytes | None) -> None:
        """Pass on a chunk; None is the end. Raises the error of the write, if any."""
        while self.failure is None:
            try:
                self._chunks.put(chunk, timeout=POLL_S)
                return
            except queue.Full:
                continue
        if chunk is not None:
            raise self.failure

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield chunks until the end. Raises CheckpointError if the file was abandoned."""
        while True:
            try:
                chunk = await aio.run_io(self._chunks.get, True, POLL_S)
            except queue.Empty:
                if self.is_abandoned or not threading.main_thread().is_alive():
                    raise CheckpointError(f"{self._where}: was abandoned before it was closed") from None
                continue
            if chunk is None:
                return
            yield chunk


def _write(feed: _Feed, directory: str, name: str, stripes: int | None) -> None:
    try:
        write_files(directory, [(name, Stream(feed.chunks()))], stripes)
    except BaseException as error:  # raised again by `put` or `close`
        feed.failure = error
