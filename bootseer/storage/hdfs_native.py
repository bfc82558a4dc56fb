"""The door to hdfs-native, the HDFS client without a JVM: calls in threads that can be given up, errors of ours.

The blocking client is used on purpose: the asynchronous one (0.14.7) can stop the whole process, as its callbacks
take locks while they hold the interpreter's. No call has a deadline of its own, and one that hangs cannot be
cancelled. A client does not survive a fork; here the child makes a new one.
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
from bootseer.storage.landing import GivenUpError, Landing
from bootseer.storage.webhdfs_client import FileStatus

T = TypeVar("T")

WRITE_STEP_BYTES = 4 << 20  # one call; what the deadline counts for
LOOK_S = 1.0
_MOST_WORDS = 300  # of an error; it may be a stack of Java

# Classes of exceptions, as they stand in messages.
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
    """A file opened for reading; its blocks are those it had then."""

    def __init__(self, reader: Any, status: FileStatus) -> None:
        self.status = status
        self._reader = reader

    def read(self, offset: int, length: int, landing: Landing) -> None:
        """In a thread. Lands the range packet by packet; it must be inside the file: past its end lies a panic."""
        if offset + length > self.status.size:
            raise Truncated(f"the file ends before byte {offset + length}")
        for packet in self._reader.read_range_stream(offset, length):
            landing.land(packet)


class NativeHdfs:
    """One HDFS by hdfs-native. `timeout_s`: the longest that any call may take without progress."""

    def __init__(self, url: str, *, timeout_s: float, conf_folder: str = "") -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._conf_folder = conf_folder
        self._client: Any = None
        self._pid = 0
        self.requests = 0
        self.client()  # a wrong address shows now

    def client(self) -> Any:
        if self._pid != os.getpid():
            import hdfs_native

            if self._client is not None:
                # The parent's, in the child of a fork: its end would wait for threads that are not there.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._client))
            try:
                self._client = hdfs_native.Client(self._url, config_dir=self._conf_folder or None)
            except Exception as error:
                raise map_error(error, self._url) from error
            self._pid = os.getpid()
        return self._client

    async def status(self, path: str) -> FileStatus:
        return _to_status(await self._call(path, self.client().get_file_info, path), "")

    async def entries(self, path: str) -> list[FileStatus]:
        """Of a folder; a file is listed as itself, without a name."""
        found = await self._call(path, lambda: list(self.client().list_status(path)))
        return [_to_status(status, _name_in(status.path, path)) for status in found]

    async def delete(self, path: str) -> None:
        """With all that is in it; what is missing is no error."""
        await self._call(path, self.client().delete, path, True)

    async def rename(self, path: str, new: str, *, overwrite: bool) -> None:
        await self._call(path, self.client().rename, path, new, overwrite)

    async def open(self, path: str) -> NativeFile:
        """Raises: Unavailable if the file is being replaced at this moment."""

        def open_file() -> NativeFile:
            before = _to_status(self.client().get_file_info(path), "")
            if before.is_folder:
                raise FileNotFoundError(path)
            reader = self.client().read(path)
            # The blocks are of the version that was there both before and after.
            status = _to_status(self.client().get_file_info(path), "")
            if status != before or len(reader) != status.size:
                raise Unavailable(f"{self._url}{path} is being replaced")
            return NativeFile(reader, status)

        return await self._call(path, open_file)

    async def read(
        self, file: NativeFile, path: str, offset: int, length: int, landing: Landing, *, stall_s: float
    ) -> None:
        """Lands a range; StorageTimeout when nothing came for `stall_s`."""
        self.requests += 1
        with_errors = _Mapped(f"{self._url}{path}", file.read)
        try:
            await aio.run_apart(with_errors, offset, length, landing, timeout_s=stall_s, moved_s=landing.moved)
        except TimeoutError as error:
            raise StorageTimeout(f"{self._url}{path}: no DataNode sent anything for {stall_s:g} s") from error

    async def create(self, path: str, *, replication: int, block_bytes: int) -> Any:
        """A writer of a new file, for `write` and `close`."""

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
            return await aio.run_apart(_Mapped(f"{self._url}{path}", func), *args, timeout_s=limit_s)
        except TimeoutError as error:
            why = ""
            if timeout_s is None:  # else it is a DataNode that stalls
                with suppress(BootseerError, TimeoutError):  # names may take as long as they like
                    why = await aio.run_apart(why_silent, self._url, timeout_s=2 * LOOK_S)
            raise StorageTimeout(f"{self._url}{path}: no answer within {limit_s:g} s{why}") from error


def why_silent(url: str) -> str:
    """What keeps a NameNode from being heard, in brackets; "" if a connection does not tell.

    The client asks again whatever the error is, and says nothing of it.
    """
    where = urlsplit(url)
    if where.hostname is None or where.port is None:
        return ""  # the name of several NameNodes
    try:
        socket.create_connection((where.hostname, where.port), LOOK_S).close()
    except socket.gaierror as error:
        return f" (the name of the server cannot be resolved: {error.strerror})"
    except OSError as error:
        return f" ({error.strerror or 'the connection is not answered'})"
    return ""


class _Mapped:
    """A call whose errors are ours."""

    def __init__(self, what: str, func: Callable[..., Any]) -> None:
        self._what = what
        self._func = func

    def __call__(self, *args: object) -> Any:
        try:
            return self._func(*args)
        except (BootseerError, GivenUpError):
            raise
        except BaseException as error:  # a panic in Rust is no Exception
            raise map_error(error, self._what) from error


def map_error(error: BaseException, what: str) -> BootseerError:
    """The error of ours that one of hdfs-native's means."""
    words = str(error).replace("\\n", "\n").replace("\\t", " ").split("\n", 1)[0].strip()[:_MOST_WORDS]
    if isinstance(error, FileNotFoundError):
        return NotFound(f"{what}: there is no such file or folder")
    if isinstance(error, FileExistsError):
        return AlreadyExists(f"{what}: it exists")
    if isinstance(error, PermissionError):
        return PermissionDenied(f"{what}: {words}")
    text = str(error)
    if "All DataNodes failed" in text:
        return Unavailable(f"{what}: no replica of a block can be read: all are unreachable or damaged")
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
        file_id=0,  # it does not tell
        replication=found.replication or 0,
        block_bytes=found.blocksize or 0,
        owner=found.owner or "",
        mode=found.permission,
    )


def _name_in(path: str, folder: str) -> str:
    return "" if path.rstrip("/") == folder.rstrip("/") else path.rstrip("/").rpartition("/")[2]
