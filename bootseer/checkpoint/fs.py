"""The fsspec protocol `stripe`: striped checkpoints, and plain files, for pandas, torch, datasets and others.

`stripe::hdfs://nn/ckpt/model.pt` (chained), `stripe:///data/ckpt/model.pt` and `stripe://hdfs://nn/ckpt/model.pt`
name a file in the newest complete version of the checkpoint `.../ckpt`. Ranges are read in parallel, sequential
files are read ahead, and written files become a new version. Threads and forked children may share instances.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from fsspec.implementations.chained import ChainedFileSystem

from bootseer.checkpoint.fs_file import CheckpointFile
from bootseer.checkpoint.fs_write import VersionFile, write_files
from bootseer.checkpoint.io.inputs import FileInput, MemoryInput
from bootseer.checkpoint.io.source import Request, Source
from bootseer.checkpoint.opening import open_source
from bootseer.errors import ConfigError, NotFound, PermissionDenied, StorageTimeout

PROTOCOL = "stripe"
FRESH_S = 10.0  # how long a found version counts as the newest
MAX_OPEN = 32  # sources kept
WHOLE_URL = ("http", "https")  # protocols whose paths, in fsspec, are URLs


class _OpenedRoot:
    """A source that serves everything below `root`; closed when it is dropped and has no users."""

    def __init__(self, root: str, source: Source, since_s: float) -> None:
        self.root = root
        self.source = source
        self.since_s = since_s
        self.users = 0
        self.is_dropped = False


class StripeFileSystem(ChainedFileSystem):  # type: ignore[misc]  # fsspec is not typed
    """Args:
    target_protocol, target_options: of the chain; of the options only host and port are used.
    version: a version of a striped checkpoint, instead of the newest complete one.
    verify: "units", "sampled", "full" or "none" instead of the store's default.
    stripes: of written files, instead of the store's default.
    """

    protocol = PROTOCOL
    root_marker = ""

    def __init__(
        self,
        fo: str = "",
        target_protocol: str | None = None,
        target_options: Mapping[str, Any] | None = None,
        version: str | None = None,
        verify: str | None = None,
        stripes: int | None = None,
        **storage_options: Any,
    ) -> None:
        super().__init__(**storage_options)
        del fo  # each call names its own path
        self._target = target_protocol
        self._options = dict(target_options or {})
        self._version = version
        self._verify = verify
        self._stripes = stripes
        foreign = sorted(set(self._options) - {"host", "port", "target_protocol", "fo", "auto_mkdir"})
        if foreign:
            raise ConfigError(
                f"stripe:: does not pass {', '.join(foreign)} to {target_protocol}; set them where its own "
                "configuration is read from (environment, configuration files)"
            )
        self._lock = threading.Lock()
        self._pid_of_lock = os.getpid()
        self._found: list[_OpenedRoot] = []  # the oldest first

    # ---- paths ----------------------------------------------------------------------------------------------

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        path = os.fspath(path)
        for start in (f"{PROTOCOL}://", f"{PROTOCOL}::"):
            if path.startswith(start):
                path = path[len(start) :]
        return path.rstrip("/") if len(path.strip("/")) else path

    def url_of(self, path: str) -> str:
        """Return the URL that a path of this instance means."""
        path = self._strip_protocol(path)
        protocol = self._target
        if protocol is None or "://" in path or protocol in WHOLE_URL:
            return str(path)
        if protocol in ("file", "local"):
            return str(path)
        host, port = self._options.get("host"), self._options.get("port")
        server = f"{host}:{port}" if host and port else host or ""
        if server:
            return f"{protocol}://{server}/{path.lstrip('/')}"
        return f"{protocol}://{path}"

    # ---- reading --------------------------------------------------------------------------------------------

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        del kwargs
        name = self._strip_protocol(path)
        with self._use(name) as (source, inner):
            file = source.files.get(inner)
            if file is not None:
                return {"name": name, "size": file.size, "type": "file", "version": source.version}
            return {"name": name, "size": 0, "type": "directory", "version": source.version}

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        del kwargs
        name = self._strip_protocol(path)
        with self._use(name) as (source, inner):
            files = source.files
        if inner in files:
            entries = [{"name": name, "size": files[inner].size, "type": "file"}]
        else:
            prefix = f"{inner}/" if inner else ""
            children: dict[str, dict[str, Any]] = {}
            for file in files.values():
                if not file.path.startswith(prefix):
                    continue
                child, slash, _ = file.path[len(prefix) :].partition("/")
                full = f"{name}/{child}"
                is_folder = bool(slash)
                children[child] = {
                    "name": full,
                    "size": 0 if is_folder else file.size,
                    "type": "directory" if is_folder else "file",
                }
            entries = [children[child] for child in sorted(children)]
        return entries if detail else [entry["name"] for entry in entries]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        del kwargs
        with self._use(path, is_file=True) as (source, inner):
            first, last = _clip(start, end, source.files[inner].size)
            data = bytearray(last - first)
            source.read([Request(inner, first, memoryview(data))])
        return bytes(data)

    def cat_ranges(
        self,
        paths: Sequence[str],
        starts: int | Sequence[int | None] | None,
        ends: int | Sequence[int | None] | None,
        max_gap: int | None = None,
        on_error: str = "return",
        **kwargs: Any,
    ) -> list[Any]:
        """Read all ranges at once. Neighbours in a file, at most `max_gap` bytes apart, are read together."""
        del kwargs
        if not isinstance(paths, list):
            raise TypeError("paths must be a list")
        firsts = list(starts) if isinstance(starts, Sequence) else [starts] * len(paths)
        lasts = list(ends) if isinstance(ends, Sequence) else [ends] * len(paths)
        if len(firsts) != len(paths) or len(lasts) != len(paths):
            raise ValueError("starts and ends must have as many items as paths")
        results: list[Any] = [None] * len(paths)
        wanted: dict[int, tuple[Source, list[_Range]]] = {}
        with ExitStack() as using:
            for index, (path, start, end) in enumerate(zip(paths, firsts, lasts, strict=True)):
                try:
                    source, inner = using.enter_context(self._use(path, is_file=True))
                    first, last = _clip(start, end, source.files[inner].size)
                except Exception as error:
                    if on_error != "return":
                        raise
                    results[index] = error
                    continue
                wanted.setdefault(id(source), (source, []))[1].append(_Range(index, inner, first, last))
            for source, ranges in wanted.values():
                self._cat_some(source, ranges, max_gap or 0, on_error, results)
        return results

    def _cat_some(
        self, source: Source, ranges: list[_Range], max_gap: int, on_error: str, results: list[Any]
    ) -> None:
        groups = _merge(ranges, max_gap)
        areas = [bytearray(max(each.end for each in group) - group[0].start) for group in groups]
        try:
            source.read(
                [
                    Request(group[0].path, group[0].start, memoryview(area))
                    for group, area in zip(groups, areas, strict=True)
                ]
            )
        except Exception as error:
            if on_error != "return":
                raise
            if len(ranges) == 1:
                results[ranges[0].number] = error
                return
            for each in ranges:  # find the one that failed
                self._cat_some(source, [each], 0, on_error, results)
            return
        for group, area in zip(groups, areas, strict=True):
            view = memoryview(area)
            for each in group:
                results[each.number] = bytes(view[each.start - group[0].start : each.end - group[0].start])

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        del kwargs
        if mode == "rb":
            using = ExitStack()
            source, inner = using.enter_context(self._use(path, is_file=True))
            return CheckpointFile(source, inner, using.close)
        if mode in ("wb", "xb"):
            directory, name = self._split(path)
            return VersionFile(directory, name, self._stripes)
        raise NotImplementedError(f"mode {mode}: a version is written once, from start to end")

    # ---- writing --------------------------------------------------------------------------------------------

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        del mode, kwargs  # nothing is ever overwritten: each write makes a new version
        self.pipe({path: value})

    def pipe(self, path: str | Mapping[str, bytes], value: bytes | None = None, **kwargs: Any) -> None:
        """Write files; those of one directory become one version together."""
        del kwargs
        values = path if isinstance(path, Mapping) else {path: value or b""}
        directories: dict[str, list[tuple[str, Any]]] = {}
        for each, data in values.items():
            directory, name = self._split(each)
            directories.setdefault(directory, []).append((name, MemoryInput([data])))
        for directory, sources in directories.items():
            write_files(directory, sources, self._stripes)
        self.invalidate_cache()

    def put_file(
        self, lpath: str, rpath: str, callback: Any = None, mode: str = "overwrite", **kwargs: Any
    ) -> None:
        del callback, mode, kwargs
        directory, name = self._split(rpath)
        write_files(directory, [(name, FileInput(os.fspath(lpath)))], self._stripes)
        self.invalidate_cache()

    def put(self, lpath: Any, rpath: Any, recursive: bool = False, **kwargs: Any) -> None:
        """Write a local directory as one version of the checkpoint `rpath`; a file like `put_file`."""
        if isinstance(lpath, str | os.PathLike) and os.path.isdir(lpath):
            if not recursive:
                raise IsADirectoryError(f"{lpath}: is a directory; use put(..., recursive=True)")
            top = os.fspath(lpath)
            sources = [
                (os.path.relpath(os.path.join(directory, name), top), FileInput(os.path.join(directory, name)))
                for directory, _, names in os.walk(top)
                for name in names
            ]
            write_files(self.url_of(rpath), sources, self._stripes)
            self.invalidate_cache()
            return
        if isinstance(lpath, str | os.PathLike) and isinstance(rpath, str | os.PathLike):
            self.put_file(os.fspath(lpath), os.fspath(rpath))
            return
        super().put(lpath, rpath, recursive=recursive, **kwargs)

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        """Do nothing: directories are created with their files."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing: directories are created with their files."""

    # ---- sources --------------------------------------------------------------------------------------------

    def invalidate_cache(self, path: str | None = None) -> None:
        """Query the store at the next lookup. Open files keep their version."""
        del path
        with self._supervisor():
            dropped = list(self._found)
            self._found.clear()
        for found in dropped:
            self._drop(found)

    def close(self) -> None:
        """Close connections, except those of open files."""
        self.invalidate_cache()

    @contextmanager
    def _use(self, path: str, is_file: bool = False) -> Iterator[tuple[Source, str]]:
        """Yield the source that serves a path, and the path in it; it stays open meanwhile."""
        name = self._strip_protocol(path)
        with _as_os_errors():
            found, inner = self._find(self.url_of(name))
            try:
                if is_file and inner not in found.source.files:
                    raise IsADirectoryError(f"{name}: is a directory")
                yield found.source, inner
            finally:
                with self._supervisor():
                    found.users -= 1
                    is_last = found.is_dropped and not found.users
                if is_last:
                    found.source.close()

    def _find(self, url: str) -> tuple[_OpenedRoot, str]:
        """Find or open the source, and count the caller as a user."""
        now_s = time.monotonic()
        stale: list[_OpenedRoot] = []
        with self._supervisor():
            for found in self._found:
                inner = _below(found.root, url)
                if inner is not None and now_s - found.since_s < FRESH_S and _has(found.source, inner):
                    found.users += 1
                    return found, inner
        opened = open_source(url, verify=self._verify, version=self._version)
        root = url[: -len(opened.path)].rstrip("/") if opened.path and url.endswith(opened.path) else url
        made = _OpenedRoot(root, opened.source, now_s)
        made.users = 1
        with self._supervisor():
            stale = [each for each in self._found if each.root == root]
            self._found = [each for each in self._found if each.root != root] + [made]
            while len(self._found) > MAX_OPEN:
                stale.append(self._found.pop(0))
        for each in stale:
            self._drop(each)
        return made, opened.path

    def _drop(self, found: _OpenedRoot) -> None:
        with self._supervisor():
            is_last = not found.users and not found.is_dropped
            found.is_dropped = True
        if is_last:
            found.source.close()

    def _split(self, path: str) -> tuple[str, str]:
        """Return the URL of the checkpoint's directory, and the file's name in it."""
        directory, slash, name = self.url_of(path).rpartition("/")
        if not slash or not directory or not name:
            raise ConfigError(f"{path}: not a file in a directory; name one: the directory becomes the checkpoint")
        return directory, name

    def _supervisor(self) -> threading.Lock:
        if self._pid_of_lock != os.getpid():  # a fork may have happened while another thread held it
            self._lock, self._pid_of_lock = threading.Lock(), os.getpid()
        return self._lock


class _Range(NamedTuple):
    number: int  # in the result
    path: str
    start: int
    end: int


def _merge(ranges: Iterable[_Range], max_gap: int) -> list[list[_Range]]:
    groups: list[list[_Range]] = []
    reached = 0
    for each in sorted(ranges, key=lambda each: (each.path, each.start, each.end)):
        if groups and max_gap and each.path == groups[-1][0].path and each.start <= reached + max_gap:
            groups[-1].append(each)
            reached = max(reached, each.end)
        else:
            groups.append([each])
            reached = each.end
    return groups


def _clip(start: int | None, end: int | None, size: int) -> tuple[int, int]:
    """Clip a range like a slice."""
    first, last, _ = slice(start, end).indices(size)
    return first, max(first, last)


def _below(root: str, url: str) -> str | None:
    if url == root:
        return ""
    return url[len(root) + 1 :] if url.startswith(f"{root}/") else None


def _has(source: Source, inner: str) -> bool:
    if not inner:
        return True
    return inner in source.files or any(name.startswith(f"{inner}/") for name in source.files)


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """Translate errors to those that fsspec's callers expect; data errors stay Bootseer's."""
    try:
        yield
    except NotFound as error:
        raise FileNotFoundError(str(error)) from error
    except PermissionDenied as error:
        raise PermissionError(str(error)) from error
    except StorageTimeout as error:
        raise TimeoutError(str(error)) from error
