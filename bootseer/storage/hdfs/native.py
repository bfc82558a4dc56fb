"""Adapter for hdfs-native, the HDFS client without a JVM: calls in threads that can be abandoned, mapped errors.

It uses the blocking client. The asynchronous one (0.14.7) can deadlock the process: its callbacks take locks while
they hold the interpreter's. Calls have no deadline, and a hanging one cannot be cancelled. A client does not
survive a fork; the child makes a new one.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

from bootseer import aio
from bootseer.errors import (
    AlreadyExists,
    BootseerError,
    ConfigError,
    NotFound,
    PermissionDenied,
    StorageError,
    StorageTimeout,
    Truncated,
    Unavailable,
)
from bootseer.storage.engine.revocable_buffer import BufferRevokedError, RevocableBuffer
from bootseer.storage.hdfs.webhdfs_client import FileStatus

T = TypeVar("T")

WRITE_STEP_BYTES = 4 << 20  # per call; the deadline applies to each
PROBE_S = 1.0
_MAX_WORDS = 300  # characters of an error; it may be a Java stack

# Classes of exceptions, as they appear in messages.
_KINDS: tuple[tuple[str, type[BootseerError]], ...] = (
    ("FileAlreadyExistsException", AlreadyExists),
    ("FileNotFoundException", NotFound),
    ("AccessControlException", PermissionDenied),
    ("AuthorizationException", PermissionDenied),
    ("SaslException", PermissionDenied),
    ("GSSAPI", PermissionDenied),
    ("No NameNode hosts", ConfigError),
    ("StandbyException", Unavailable),
    ("SafeModeException", Unavailable),
    ("RetriableException", Unavailable),
    ("RPCError", StorageError),
)


class NativeFile:
    """A file opened for reading, with the blocks that it had then."""

    def __init__(self, reader: Any, status: FileStatus) -> None:
        self.status = status
        self._reader = reader

    def read(self, offset: int, length: int, landing: RevocableBuffer) -> None:
        """Land a range by packets, in a thread. It must be inside the file: the client panics past its end."""
        if offset + length > self.status.size:
            raise Truncated(f"the file ends before byte {offset + length}")
        for packet in self._reader.read_range_stream(offset, length):
            landing.land(packet)


class NativeHdfs:
    """One HDFS by hdfs-native. `timeout_s`: the longest time that any call may take without progress."""

    def __init__(self, url: str, *, timeout_s: float, conf_folder: str = "") -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._conf_directory = conf_folder
        self._client: Any = None
        self._pid = 0
        self.requests = 0
        self.client()  # reports a wrong address now

    def client(self) -> Any:
        if self._pid != os.getpid():
            import hdfs_native

            if self._client is not None:
                # The parent's client, in a forked child: its destructor would wait for threads that do not exist.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._client))
            try:
                self._client = hdfs_native.Client(self._url, config_dir=self._conf_directory or None)
            except Exception as error:
                raise map_error(error, self._url) from error
            self._pid = os.getpid()
        return self._client

    async def status(self, path: str) -> FileStatus:
        return _to_status(await self._call(path, self.client().get_file_info, path), "")

    async def entries(self, path: str) -> list[FileStatus]:
        """List a directory; a file is listed as itself, without a name."""
        found = await self._call(path, lambda: list(self.client().list_status(path)))
        return [_to_status(status, _name_in(status.path, path)) for status in found]

    async def delete(self, path: str) -> None:
        """Delete a path with its contents; a missing path is no error."""
        await self._call(path, self.client().delete, path, True)

    async def rename(self, path: str, new: str, *, overwrite: bool) -> None:
        await self._call(path, self.client().rename, path, new, overwrite)

    async def open(self, path: str) -> NativeFile:
        """Open a file. Raises: Unavailable if the file is being replaced."""

        def open_file() -> NativeFile:
            before = _to_status(self.client().get_file_info(path), "")
            if before.is_folder:
                raise FileNotFoundError(path)
            reader = self.client().read(path)
            # The same version before and after: the blocks belong to it.
            status = _to_status(self.client().get_file_info(path), "")
            if status != before or len(reader) != status.size:
                raise Unavailable(f"{self._url}{path} is being replaced")
            return NativeFile(reader, status)

        return await self._call(path, open_file)

    async def read(
        self, file: NativeFile, path: str, offset: int, length: int, landing: RevocableBuffer, *, stall_s: float
    ) -> None:
        """Land a range. Raises: StorageTimeout if no data arrives for `stall_s`."""
        self.requests += 1
        with_errors = _Mapped(f"{self._url}{path}", file.read)
        try:
            await aio.run_abandonable(
                with_errors, offset, length, landing, timeout_s=stall_s, moved_s=landing.moved
            )
        except TimeoutError as error:
            raise StorageTimeout(f"{self._url}{path}: no DataNode sent data for {stall_s:g} s") from error

    async def create(self, path: str, *, replication: int, block_bytes: int) -> Any:
        """Make a writer of a new file, for `write` and `close`."""

        def create() -> Any:
            import hdfs_native

            options = hdfs_native.WriteOptions(
                replication=replication or None,
                block_size=block_bytes or None,
                overwrite=False,
                create_parent=True,
            )
            return self.client().create(path, options)

        return await self._call(path, create)

    async def write(self, writer: Any, path: str, data: memoryview | bytes | bytearray, stall_s: float) -> None:
        for start in range(0, len(data), WRITE_STEP_BYTES):
            await self._call(path, writer.write, data[start : start + WRITE_STEP_BYTES], timeout_s=stall_s)

    async def close(self, writer: Any, path: str, stall_s: float) -> None:
        await self._call(path, writer.close, timeout_s=stall_s)

    async def _call(self, path: str, func: Callable[..., T], *args: object, timeout_s: float | None = None) -> T:
        self.requests += 1
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            return await aio.run_abandonable(_Mapped(f"{self._url}{path}", func), *args, timeout_s=limit_s)
        except TimeoutError as error:
            why = ""
            if timeout_s is None:  # otherwise a DataNode stalls
                with suppress(BootseerError, TimeoutError):  # name resolution has no deadline
                    why = await aio.run_abandonable(why_unreachable, self._url, timeout_s=2 * PROBE_S)
            raise StorageTimeout(f"{self._url}{path}: no answer within {limit_s:g} s{why}") from error


def why_unreachable(url: str) -> str:
    """Return why a NameNode does not answer, in brackets; "" if a connection succeeds.

    The client retries on any error and does not report it.
    """
    where = urlsplit(url)
    if where.hostname is None or where.port is None:
        return ""  # the name of a nameservice
    try:
        socket.create_connection((where.hostname, where.port), PROBE_S).close()
    except socket.gaierror as error:
        return f" (the name of the server cannot be resolved: {error.strerror})"
    except OSError as error:
        return f" ({error.strerror or 'no answer to the connection attempt'})"
    return ""


class _Mapped:
    """A call whose errors are mapped to Bootseer's."""

    def __init__(self, what: str, func: Callable[..., Any]) -> None:
        self._what = what
        self._func = func

    def __call__(self, *args: object) -> Any:
        try:
            return self._func(*args)
        except (BootseerError, BufferRevokedError):
            raise
        except BaseException as error:  # a panic in Rust is not an Exception
            raise map_error(error, self._what) from error


def map_error(error: BaseException, what: str) -> BootseerError:
    """Map an error of hdfs-native to one of Bootseer's."""
    words = str(error).replace("\\n", "\n").replace("\\t", " ").split("\n", 1)[0].strip()[:_MAX_WORDS]
    if isinstance(error, FileNotFoundError):
        return NotFound(f"{what}: no such file or directory")
    if isinstance(error, FileExistsError):
        return AlreadyExists(f"{what}: already exists")
    if isinstance(error, PermissionError):
        return PermissionDenied(f"{what}: {words}")
    text = str(error)
    if "All DataNodes failed" in text:
        return Unavailable(f"{what}: no replica of a block is readable: all are unreachable or damaged")
    for name, kind in _KINDS:
        if name in text:
            return kind(f"{what}: {words}")
    return Unavailable(f"{what}: {words or type(error).__name__}")


def _to_status(found: Any, name: str) -> FileStatus:
    return FileStatus(
        name=name,
        size=found.length,
        is_folder=found.isdir,
        mtime_ms=found.modification_time,
        file_id=0,  # not reported
        replication=found.replication or 0,
        block_bytes=found.blocksize or 0,
        owner=found.owner or "",
        mode=found.permission,
    )


def _name_in(path: str, directory: str) -> str:
    return "" if path.rstrip("/") == directory.rstrip("/") else path.rstrip("/").rpartition("/")[2]
