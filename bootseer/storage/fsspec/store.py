"""Any other file system that fsspec supports, through the common `cat_file` with a range.

Reads are split into pieces of at most 8 MiB. Each piece is a call in a thread with its own file system object, as
fsspec promises no thread safety; or a call on the file system's own loop, if it has one. Publishing is a put where
that is one step, else a rename. The store detects short, long and changed answers.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, TypeVar

from bootseer import aio
from bootseer.errors import (
    AlreadyExists,
    BootseerError,
    ConfigError,
    NoSuchLocation,
    NotFound,
    SourceChanged,
    StorageError,
    StorageTimeout,
    Truncated,
    Unavailable,
    first_line,
)
from bootseer.storage.engine.counts import StoreCounters
from bootseer.storage.engine.revocable_buffer import copy_bytes
from bootseer.storage.fsspec.files import (
    NewFile,
    make_parent_directory,
    mtime_s,
    parent_of,
    to_stat,
    try_remove,
)
from bootseer.storage.joining import concat_by_copy
from bootseer.storage.os_errors import to_storage_error
from bootseer.storage.paths import (
    check_offset,
    check_path,
    is_chained,
    join,
    redact,
    scheme_of,
    unknown_scheme_error,
)
from bootseer.storage.protocol import Entry, Features, Stat

PIECE_BYTES = 8 << 20
INSTANCES = 16  # of a file system, and so concurrent calls
TEMPORARY = ".bootseer-tmp-"
# Bugs of the client library, which a retry only repeats.
_MISTAKES = (TypeError, AttributeError, NameError, LookupError, AssertionError)

T = TypeVar("T")


class FsspecStore:
    """A `Store` that passes `options` on to the file system.

    `creates_if_absent` is False: the store checks the name beforehand; the file system does not decide.
    """

    features = Features(creates_if_absent=False, concatenates=False, has_replicas=False)

    def __init__(self, url: str, *, timeout_s: float = 30.0, options: Mapping[str, object] | None = None) -> None:
        try:
            import fsspec
        except ImportError as error:
            raise ConfigError(
                f"{redact(url)}: {scheme_of(url)}:// needs fsspec: pip install 'bootseer[fsspec]'"
            ) from error
        self.url = redact(url.rstrip("/"))
        self._raw_url = url
        self._options = dict(options or {})
        self._url_to_fs: Callable[..., tuple[Any, str]] = fsspec.core.url_to_fs
        self._abstract: type = fsspec.AbstractFileSystem
        self._timeout_s = timeout_s
        self._counts = StoreCounters()
        self._idle: list[tuple[Any, str]] = []  # file systems with the path of the root in them
        self._pid = os.getpid()
        self._shared: tuple[Any, str] | None = None  # one for all calls, where it has its own loop
        self._is_known = False  # whether the kind is known
        self._first = asyncio.Lock()
        self._places = asyncio.Semaphore(INSTANCES)

    async def stat(self, path: str) -> Stat:
        check_path(self.url, path)
        return to_stat(await self._info(path), self._shown(path))

    async def read_into(
        self, path: str, offset: int, target: memoryview, *, etag: str = "", attempt: int = 0
    ) -> None:
        del attempt
        check_path(self.url, path)
        check_offset(self.url, path, offset)
        done = 0
        try:
            while done < len(target):
                start = offset + done
                count = min(PIECE_BYTES, len(target) - done)
                data = await self._call(path, "cat_file", start=start, end=start + count)
                if len(data) > count:
                    raise StorageError(f"{self._shown(path)}: the file system ignores ranges ({len(data)} bytes)")
                copy_bytes(target[done : done + len(data)], memoryview(data).cast("B"))
                self._counts.add("read_bytes", len(data))
                if len(data) < count:
                    await self._check(path, offset, len(target), etag)
                    done += len(data)
                    raise Unavailable(f"{self._shown(path)}: {len(data)} of {count} bytes received from {start}")
                done += len(data)
            # Afterwards, so that it detects a change during the read, and invented bytes.
            await self._check(path, offset, len(target), etag)
        except StorageError as error:
            error.read_bytes = done
            raise

    async def list(self, directory: str) -> list[Entry]:
        check_path(self.url, directory, is_folder=True)

        def ls(fs: Any, full: str) -> Any:
            fs.invalidate_cache()
            return fs.ls(full, detail=True)

        found = await self._run(directory, ls)
        if len(found) == 1 and found[0]["type"] != "directory":
            # Some file systems list a file as if it were a directory that contains it.
            info = await self._info(directory) if directory else {"type": "directory"}
            if info["type"] != "directory":
                raise NotFound(f"{self._shown(directory)}: is a file, not a directory")
        entries = []
        for info in found:
            name = info["name"].rstrip("/").rpartition("/")[2]
            is_folder = info["type"] == "directory"
            if name and not name.startswith(TEMPORARY):
                entries.append(Entry(name, 0 if is_folder else info["size"] or 0, is_folder, mtime_s(info)))
        return sorted(entries)

    async def publish(self, path: str, data: bytes, *, if_absent: bool = False) -> Stat:
        check_path(self.url, path)
        temporary = self._temporary(path)

        def publish(fs: Any, full: str) -> None:
            fs.invalidate_cache()
            if if_absent and fs.exists(full):
                raise FileExistsError(full)
            make_parent_directory(fs, full)
            if not self._renames(fs):
                fs.pipe_file(full, data)
                return
            aside = f"{parent_of(full)}{temporary}"
            try:
                fs.pipe_file(aside, data)
                fs.mv(aside, full)
            except BaseException:
                try_remove(fs, aside)
                raise

        await self._run(path, publish)
        self._counts.add("written_bytes", len(data))
        return await self.stat(path)

    @asynccontextmanager
    async def create(
        self, path: str, *, size: int | None = None, placement: int | None = None
    ) -> AsyncIterator[_Writer]:
        del size, placement
        check_path(self.url, path)
        temporary = self._temporary(path)

        def begin(fs: Any, full: str) -> NewFile:
            fs.invalidate_cache()
            if fs.exists(full):
                raise FileExistsError(full)
            make_parent_directory(fs, full)
            return NewFile(fs, full, f"{parent_of(full)}{temporary}" if self._renames(fs) else "")

        async with self._lease() as lease:
            file = await self._run_leased(path, lease, begin, lease.fs, join(lease.root, path))
            try:
                yield _Writer(self, path, lease, file)
                await self._run_leased(path, lease, file.finish)
            except BaseException:
                try:
                    await self._run_leased(path, lease, file.discard)
                except BootseerError:
                    pass  # the error that ended the writing is raised
                raise

    async def concat(self, path: str, parts: Sequence[str]) -> None:
        await concat_by_copy(self, path, parts)

    async def delete(self, path: str) -> None:
        check_path(self.url, path)

        def delete(fs: Any, full: str) -> None:
            fs.invalidate_cache()
            if fs.exists(full):
                fs.rm(full, recursive=True)

        try:
            await self._run(path, delete)
        except NotFound:
            pass

    async def aclose(self) -> None:
        """Forget the file systems: fsspec has no common call to close them, so they end with their last user."""
        self._idle.clear()
        self._shared, self._is_known = None, False

    def statistics(self) -> dict[str, int]:
        return self._counts.to_dict()

    async def write_piece(self, path: str, lease: _Lease, file: NewFile, data: memoryview) -> None:
        """Write data of `_Writer`."""
        await self._run_leased(path, lease, file.write, data)
        self._counts.add("written_bytes", len(data))

    # ---- one call ------------------------------------------------------------------------------------------

    async def _info(self, path: str) -> dict[str, Any]:
        fs_and_root = await self._get_shared()
        if fs_and_root is not None:
            fs_and_root[0].invalidate_cache()
            found: dict[str, Any] = await self._call(path, "info")
            return found

        def info(fs: Any, full: str) -> dict[str, Any]:
            fs.invalidate_cache()
            found: dict[str, Any] = fs.info(full)
            return found

        return await self._run(path, info)

    async def _check(self, path: str, offset: int, length: int, etag: str) -> None:
        now = await self.stat(path)
        if etag and now.etag != etag:
            raise SourceChanged(f"{self._shown(path)}: the file has changed since the read began")
        if offset + length > now.size:
            raise Truncated(f"{self._shown(path)}: bytes {offset} to {offset + length} of a file of {now.size}")

    async def _call(self, path: str, name: str, **arguments: object) -> Any:
        """Call a method that exists in both kinds; on the file system's loop if it has one."""
        shared = await self._get_shared()
        if shared is None:
            return await self._run(path, lambda fs, full: getattr(fs, name)(full, **arguments))
        fs, root = shared
        self._counts.add("requests")
        with self._errors(path):
            coroutine = getattr(fs, f"_{name}")(join(root, path), **arguments)
            future = asyncio.run_coroutine_threadsafe(coroutine, fs.loop)
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.wrap_future(future)

    async def _run(self, path: str, func: Callable[[Any, str], T]) -> T:
        """Call `func` with one file system, in a thread."""
        async with self._lease() as lease:
            return await self._run_leased(path, lease, func, lease.fs, join(lease.root, path))

    async def _run_leased(self, path: str, lease: _Lease, func: Callable[..., T], *args: object) -> T:
        self._counts.add("requests")
        with self._errors(path):
            lease.is_usable = False  # while it is in use: a cancelled call continues with it
            call: Callable[[], T] = partial(func, *args)
            result: T = await aio.run_abandonable(_supervisor, call, timeout_s=self._timeout_s)
            lease.is_usable = True
            return result

    @asynccontextmanager
    async def _lease(self) -> AsyncIterator[_Lease]:
        shared = await self._get_shared()
        if shared is not None:
            yield _Lease(*shared)
            return
        async with self._places:
            lease = _Lease(*(self._idle.pop() if self._idle else await self._make()))
            try:
                yield lease
            finally:
                if lease.is_usable:
                    self._idle.append((lease.fs, lease.root))

    async def _get_shared(self) -> tuple[Any, str] | None:
        if self._pid != os.getpid():
            self._pid, self._idle = os.getpid(), []  # their threads exist only in the parent
            self._shared, self._is_known = None, False
        async with self._first:
            if not self._is_known:
                made = await self._make()
                if made[0].async_impl:
                    self._shared = made
                else:
                    self._idle.append(made)
                self._is_known = True
        return self._shared

    async def _make(self) -> tuple[Any, str]:
        def make() -> tuple[Any, str]:
            try:
                fs, root = self._url_to_fs(self._raw_url, skip_instance_cache=True, **self._options)
            except (ImportError, ValueError, TypeError, KeyError) as error:
                if "Protocol not known" in str(error) and not is_chained(self._raw_url):
                    raise NoSuchLocation(unknown_scheme_error(self._raw_url)) from error
                raise ConfigError(f"{self.url}: fsspec cannot open it: {first_line(error, 300)}") from error
            return fs, root.rstrip("/")

        with self._errors(""):
            return await aio.run_abandonable(make, timeout_s=self._timeout_s)

    def _renames(self, fs: Any) -> bool:
        """Return whether files appear by a rename; else writing is one step, as in object stores."""
        return not fs.async_impl and type(fs).mv is not self._abstract.mv  # type: ignore[attr-defined]

    def _temporary(self, path: str) -> str:
        digest = hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()[:8]
        return f"{TEMPORARY}{digest}-{secrets.token_hex(8)}"

    def _shown(self, path: str) -> str:
        return join(self.url, path) if path else self.url

    @contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        """Map all exceptions that file systems may raise."""
        shown = self._shown(path)
        try:
            yield
        except BootseerError:
            raise
        except _TheirTimeoutError as error:
            raise Unavailable(f"{shown}: the file system timed out: {error}") from error
        except TimeoutError as error:
            raise StorageTimeout(f"{shown}: no answer within {self._timeout_s:g} s") from error
        except FileExistsError as error:
            raise AlreadyExists(f"{shown}: already exists") from error
        except IsADirectoryError as error:
            raise NotFound(f"{shown}: is a directory, not a file") from error
        except OSError as error:
            raise to_storage_error(error, shown) from error
        except NotImplementedError as error:
            raise StorageError(f"{shown}: this file system does not support the operation") from error
        except Exception as error:  # of an unknown client library
            kind = StorageError if isinstance(error, _MISTAKES) else Unavailable
            raise kind(f"{shown}: {type(error).__name__}: {first_line(error, 300)}") from error


class _Lease:
    """A file system for one exclusive call, or one that calls share."""

    def __init__(self, fs: Any, root: str) -> None:
        self.fs = fs
        self.root = root
        self.is_usable = True


class _Writer:
    """A `StoreWriter`."""

    def __init__(self, store: FsspecStore, path: str, lease: _Lease, file: NewFile) -> None:
        self._store = store
        self._path = path
        self._lease = lease
        self._file = file

    async def write(self, data: memoryview | bytes) -> None:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), PIECE_BYTES):
            await self._store.write_piece(self._path, self._lease, self._file, view[start : start + PIECE_BYTES])


def _supervisor(call: Callable[[], T]) -> T:
    """Call `call` in the thread, and distinguish the file system's own timeout from the store's."""
    try:
        return call()
    except TimeoutError as error:
        raise _TheirTimeoutError(str(error)) from error


class _TheirTimeoutError(Exception):
    """A deadline of the file system itself."""
