"""Object stores: `s3://`, `gs://` and `az://`, by obstore (an extra of this package).

A range arrives as a stream that is copied into the target. Versions differ in ETag. Small files are put with a
condition, large ones in parts that appear as one file at the end. S3 keeps the parts of a killed writer until a
bucket rule removes them. Credentials come from the usual places or from `options`.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

from bootseer.errors import (
    AlreadyExists,
    BootseerError,
    ConfigError,
    NoSuchLocation,
    NotFound,
    PermissionDenied,
    SourceChanged,
    StorageError,
    StorageTimeout,
    Truncated,
    Unavailable,
    first_line,
)
from bootseer.storage.engine.counts import StoreCounters
from bootseer.storage.engine.revocable_buffer import copy_bytes
from bootseer.storage.joining import concat_by_copy
from bootseer.storage.paths import check_offset, check_path, redact
from bootseer.storage.protocol import Entry, Features, Stat
from bootseer.tuning import current

MAX_PARTS = 9000  # S3 takes 10,000
UPLOADS = 8  # parts at once
CHUNK_BYTES = 1 << 20  # of a stream
WRITE_STEP_BYTES = 4 << 20
DELETE_AT_ONCE = 1000
_CLOUDS = ("AWS", "AZURE", "GOOGLE")  # prefixes of obstore's variables

T = TypeVar("T")

_SECRETS = re.compile(r"\?[^\s\"')]*")


class ObjectStore:
    """A `Store` by obstore.

    Args:
        options: `config` (obstore's names, such as `endpoint` or `access_key_id`), `client_options`,
            `retry_config`, `credential_provider`: passed on to obstore.
    """

    features = Features(creates_if_absent=True, concatenates=False, has_replicas=False)

    def __init__(self, url: str, *, timeout_s: float = 30.0, options: Mapping[str, object] | None = None) -> None:
        try:
            import obstore
        except ImportError as error:
            raise ConfigError(
                f"{redact(url)}: object stores need obstore: pip install 'bootseer[objects]'"
            ) from error
        self.url = redact(url.rstrip("/"))
        self._obstore: Any = obstore
        self._timeout_s = timeout_s
        self._counts = StoreCounters()
        if urlsplit(url).query:
            raise ConfigError(f"{self.url}: an object store takes no options in the URL")
        self._store: Any = self._make(url, dict(options or {}))

    async def stat(self, path: str) -> Stat:
        meta = await self._call(path, self._obstore.head_async, check_path(self.url, path))
        return _to_stat(meta)

    async def read_into(
        self, path: str, offset: int, target: memoryview, *, etag: str = "", attempt: int = 0
    ) -> None:
        del attempt  # obstore manages the connections
        check_path(self.url, path)
        check_offset(self.url, path, offset)
        if not target:
            await self._check_empty(path, offset, etag)
            return
        options: dict[str, object] = {"range": (offset, offset + len(target))}
        if etag:
            options["if_match"] = etag
        done = 0
        try:
            result = await self._call(path, self._obstore.get_async, path, options=options)
            if etag and result.meta["e_tag"] != etag:
                raise self._changed(path)
            if result.meta["size"] < offset + len(target):
                raise self._truncated(path, offset, len(target), result.meta["size"])
            if tuple(result.range) != (offset, offset + len(target)):
                raise Unavailable(f"{self._shown(path)}: the server sent other bytes than requested")
            stream = result.stream(min_chunk_size=CHUNK_BYTES)
            while done < len(target):
                try:
                    with self._errors(path):
                        async with asyncio.timeout(self._timeout_s):
                            data = await anext(stream)
                except StopAsyncIteration:
                    raise Unavailable(f"{self._shown(path)}: ended after {done} of {len(target)} bytes") from None
                view = memoryview(data)
                if done + len(view) > len(target):
                    raise Unavailable(f"{self._shown(path)}: the server sent more bytes than requested")
                copy_bytes(target[done : done + len(view)], view)
                done += len(view)
        except StorageError as error:
            error.read_bytes = done
            raise
        finally:
            self._counts.add("read_bytes", done)

    async def list(self, directory: str) -> list[Entry]:
        prefix = check_path(self.url, directory, is_folder=True)
        try:
            found = await self._call(directory, self._obstore.list_with_delimiter_async, prefix or None)
        except NotFound as error:
            raise self._no_bucket() from error
        skip = len(prefix) + 1 if prefix else 0
        entries = [Entry(path[skip:].rstrip("/"), 0, True, 0.0) for path in found["common_prefixes"]]
        for meta in found["objects"]:
            name = meta["path"][skip:]
            if name and "/" not in name:
                entries.append(Entry(name, meta["size"], False, meta["last_modified"].timestamp()))
        return sorted(entries)

    async def publish(self, path: str, data: bytes, *, if_absent: bool = False) -> Stat:
        check_path(self.url, path)
        mode = "create" if if_absent else "overwrite"
        result = await self._call(path, self._obstore.put_async, path, bytes(data), mode=mode, use_multipart=False)
        self._counts.add("written_bytes", len(data))
        return Stat(len(data), result["e_tag"] or "")

    @asynccontextmanager
    async def create(
        self, path: str, *, size: int | None = None, placement: int | None = None
    ) -> AsyncIterator[_Writer]:
        del placement
        await self.check_new(path)
        part_bytes = max(current().storage.upload_part_bytes, -(-(size or 0) // MAX_PARTS))
        writer = _Writer(self, path, part_bytes)
        try:
            yield writer
            await writer.finish()
        except BaseException:
            await writer.abort()
            raise

    async def concat(self, path: str, parts: Sequence[str]) -> None:
        await concat_by_copy(self, path, parts)

    async def delete(self, path: str) -> None:
        check_path(self.url, path)
        below = await self._call(path, self._names_below, path)
        gone = [path, *below]
        for start in range(0, len(gone), DELETE_AT_ONCE):
            try:
                await self._call(path, self._obstore.delete_async, gone[start : start + DELETE_AT_ONCE])
            except NotFound:
                for name in gone[start : start + DELETE_AT_ONCE]:  # one was missing, and may have stopped the rest
                    try:
                        await self._call(name, self._obstore.delete_async, name)
                    except NotFound:
                        pass

    async def aclose(self) -> None:
        """Do nothing: obstore closes its connections when the store is freed."""

    def statistics(self) -> dict[str, int]:
        """Return counts. `retries` stays 0: obstore does not count its own."""
        return self._counts.to_dict()

    # ---- one call ------------------------------------------------------------------------------------------

    def _make(self, url: str, options: dict[str, object]) -> Any:
        from obstore.store import from_url

        unknown = set(options) - {"config", "client_options", "retry_config", "credential_provider"}
        if unknown:
            raise ConfigError(f"{self.url}: unknown options {', '.join(sorted(unknown))}")
        wait = timedelta(seconds=self._timeout_s)
        # This limits a whole request, also a slow one that progresses; `read_into` checks progress itself.
        client: dict[str, object] = {"timeout": timedelta(hours=6), "connect_timeout": wait, "read_timeout": wait}
        # With options for its client, obstore ignores the environment.
        if any(os.environ.get(f"{cloud}_ALLOW_HTTP", "").lower() in ("1", "true") for cloud in _CLOUDS):
            client["allow_http"] = True
        retries = {"max_retries": 2, "retry_timeout": wait, "backoff": {"max_backoff": timedelta(seconds=1)}}
        options["client_options"] = {**client, **_mapping(options.get("client_options"))}
        options["retry_config"] = {**retries, **_mapping(options.get("retry_config"))}
        scheme, colon, rest = url.partition(":")
        try:
            return from_url(scheme.lower() + colon + rest.rstrip("/"), **options)
        except Exception as error:  # of the URL or the options: no request was sent
            raise ConfigError(f"{self.url}: {_first_line(error)}") from error

    async def _call(self, path: str, func: Callable[..., Awaitable[T]], *args: object, **options: object) -> T:
        """Make one request, or a few that obstore derives from it."""
        self._counts.add("requests")
        with self._errors(path):
            async with asyncio.timeout(self._timeout_s):
                return await func(self._store, *args, **options)

    async def _names_below(self, store: Any, path: str) -> tuple[str, ...]:
        return tuple([meta["path"] async for metas in self._obstore.list(store, path) for meta in metas])

    def open_upload(self, path: str, part_bytes: int) -> Any:
        return self._obstore.open_writer_async(self._store, path, buffer_size=part_bytes, max_concurrency=UPLOADS)

    async def run_upload(self, path: str, func: Callable[..., Awaitable[object]], *args: object) -> None:
        """Run one step of an upload, for the writer."""
        with self._errors(path):
            async with asyncio.timeout(self._timeout_s):
                await func(*args)

    def count_written(self, count: int) -> None:
        """Count bytes of the writer."""
        self._counts.add("written_bytes", count)
        self._counts.add("requests")

    async def check_new(self, path: str) -> None:
        """Check that the name is free. Raises: AlreadyExists."""
        try:
            await self.stat(path)
        except NotFound:
            return
        raise AlreadyExists(f"{self._shown(path)}: already exists")

    async def _check_empty(self, path: str, offset: int, etag: str) -> None:
        found = await self.stat(path)
        if etag and found.etag != etag:
            raise self._changed(path)
        if offset > found.size:
            raise self._truncated(path, offset, 0, found.size)

    @contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        """Map the exceptions of obstore."""
        try:
            yield
        except (BootseerError, StopAsyncIteration):
            raise
        except TimeoutError as error:
            raise StorageTimeout(f"{self._shown(path)}: no progress within {self._timeout_s:g} s") from error
        except FileNotFoundError as error:
            raise NotFound(f"{self._shown(path)}: there is no such object") from error
        except (self._obstore.exceptions.BaseError, OSError, ValueError) as error:
            raise self._map_error(error, path) from error
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            raise StorageError(
                f"{self._shown(path)}: obstore failed ({_first_line(error)}): was this process forked?"
            ) from error

    def _map_error(self, error: Exception, path: str) -> BootseerError:
        kind, text = type(error).__name__, str(error)
        shown, said = self._shown(path), _first_line(error)
        if kind == "AlreadyExistsError":
            return AlreadyExists(f"{shown}: already exists")
        if kind in ("PreconditionError", "NotModifiedError"):
            return self._changed(path)
        if kind in ("PermissionDeniedError", "UnauthenticatedError"):
            return PermissionDenied(f"{shown}: the store denies access: check the credentials ({said})")
        if kind in ("InvalidPathError", "NotSupportedError", "ValueError"):
            return StorageError(f"{shown}: {said}")
        found = re.search(r"status:? (?:code:? )?(4\d\d)", said)  # not any number: ports and names contain some
        status = found[1] if found else ""
        if "InvalidGetRange" in text or status == "416" or "Requested range not satisfiable" in text:
            return Truncated(f"{shown}: the range lies past its end")
        if status == "404" and "token request" not in text:  # a missing object raises FileNotFoundError
            return self._no_bucket()
        if status and status not in ("408", "425", "429"):
            return StorageError(f"{shown}: {said}")
        if "TimedOut" in text or "timed out" in text:
            return StorageTimeout(f"{shown}: {said}")
        return Unavailable(f"{shown}: {said}")

    def _shown(self, path: str) -> str:
        return f"{self.url}/{path}" if path else self.url

    def _no_bucket(self) -> NoSuchLocation:
        bucket = "/".join(self.url.split("/")[:3])
        return NoSuchLocation(f"{bucket}: there is no such bucket: create it, or correct the URL")

    def _changed(self, path: str) -> SourceChanged:
        return SourceChanged(f"{self._shown(path)}: the object has changed since the read began")

    def _truncated(self, path: str, offset: int, length: int, size: int) -> Truncated:
        return Truncated(f"{self._shown(path)}: bytes {offset} to {offset + length} of an object of {size}")


class _Writer:
    """A `StoreWriter`: one conditional put, or parts if there is more than one."""

    def __init__(self, store: ObjectStore, path: str, part_bytes: int) -> None:
        self._store = store
        self._path = path
        self._part_bytes = part_bytes
        self._pending = bytearray()
        self._upload: Any = None

    async def write(self, data: memoryview | bytes) -> None:
        view = memoryview(data).cast("B")
        if self._upload is None and len(self._pending) + len(view) <= self._part_bytes:
            self._pending += view
            return
        if self._upload is None:
            self._upload = self._store.open_upload(self._path, self._part_bytes)
            pending, self._pending = bytes(self._pending), bytearray()
            await self._send(memoryview(pending))
        await self._send(view)

    async def finish(self) -> None:
        """Give the file its name."""
        if self._upload is None:
            await self._store.publish(self._path, bytes(self._pending), if_absent=True)
            return
        await self._store.check_new(self._path)
        await self._store.run_upload(self._path, self._upload.close)
        self._upload = None

    async def abort(self) -> None:
        """Drop the parts; those of an unreachable upload stay in the store."""
        upload, self._upload = self._upload, None
        self._pending.clear()
        if upload is not None:
            try:
                await self._store.run_upload(self._path, upload.__aexit__, GeneratorExit, None, None)
            except BootseerError:
                pass  # the error that ended the writing is raised

    async def _send(self, view: memoryview) -> None:
        for start in range(0, len(view), WRITE_STEP_BYTES):
            step = bytes(view[start : start + WRITE_STEP_BYTES])  # a copy: obstore may keep it longer
            await self._store.run_upload(self._path, self._upload.write, step)
            self._store.count_written(len(step))


def _to_stat(meta: Mapping[str, Any]) -> Stat:
    return Stat(meta["size"], meta["e_tag"] or "")


def _mapping(value: object) -> Mapping[str, object]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"client_options and retry_config are mappings, not {type(value).__name__}")
    return value


def _first_line(error: BaseException) -> str:
    """Return the first line of an error, without signatures of requests."""
    return _SECRETS.sub("?***", first_line(error, 300))
