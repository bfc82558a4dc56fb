"""Which Source serves a URL: this node's arena, plain local files, or a store.

In: a URL or path from the user, or none for the checkpoint of the job (`--load-checkpoint`). Out: an open Source
and the requested path in it, "" for the whole checkpoint. Everything heavier than a local file is imported only
when it is needed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Coroutine, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from bootseer.checkpoint.io.local_source import LocalFile, LocalSource, digest_of, open_local
from bootseer.checkpoint.io.source import Source
from bootseer.errors import BootseerError, CheckpointError, ConfigError, NotFound, PermissionDenied, StorageError
from bootseer.storage.local.reading import stat_file
from bootseer.storage.open import local_path as local_path_of
from bootseer.storage.paths import is_chained, redact, scheme_of
from bootseer.storage.protocol import Stat, Store

if TYPE_CHECKING:
    from bootseer.checkpoint.versions.resolve import Pinned

CALLS = 16  # at once
INDEX_SUFFIX = ".safetensors.index.json"
LEVELS_UP = 4  # directories above a file that are searched for its checkpoint
VERIFYING_SCHEMES = ("hdfs", "viewfs")  # stores that verify the data they deliver


class Job(NamedTuple):
    """The launcher's variables for the job's checkpoint; all "" without one."""

    path: str = ""  # where ranks find it: a path in the arena, or the URL
    url: str = ""  # as the user named it
    version: str = ""
    digest: str = ""
    arena: str = ""  # address of this node's arena


class OpenedSource:
    """A Source and the requested path in it."""

    def __init__(self, source: Source, path: str) -> None:
        self.source = source
        self.path = path

    def inside(self, name: str) -> str:
        """Return a name below the requested path."""
        return f"{self.path}/{name}" if self.path else name

    def close(self) -> None:
        self.source.close()

    def __enter__(self) -> OpenedSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_job(environ: Mapping[str, str]) -> Job:
    return Job(
        environ.get("BOOTSEER_CHECKPOINT", ""),
        environ.get("BOOTSEER_CHECKPOINT_URL", ""),
        environ.get("BOOTSEER_CHECKPOINT_VERSION", ""),
        environ.get("BOOTSEER_CHECKPOINT_DIGEST", ""),
        environ.get("BOOTSEER_ARENA", ""),
    )


def is_checkpoint_url(url: str) -> bool:
    """Return whether it can name a checkpoint at all: a path, or a URL with a scheme."""
    return bool(url) and "\0" not in url and not url.startswith("://")


def open_source(
    url: str | os.PathLike[str] | None = None, *, verify: str | None = None, version: str | None = None
) -> OpenedSource:
    """Open the present meaning of `url`, pinned to its version.

    Args:
        verify: one of bootseer.checkpoint.io.direct.POLICIES instead of the default.
        version: a version of a striped checkpoint, instead of the newest complete one.
    Raises: NotFound; CheckpointError; IntegrityError.
    """
    job = read_job(os.environ)
    if url is None:
        if not job.url and not job.path:
            raise ConfigError(
                "no checkpoint is named; pass a path or URL, or start the job with bootrun --load-checkpoint URL"
            )
        if not job.path:
            raise NotFound(f"{redact(job.url)}: there is no complete checkpoint yet")
        url = job.path
    name = os.fspath(url)
    if not is_checkpoint_url(name):
        raise ConfigError(f"{name[:200]!r} is neither a path nor a URL")
    inner = None if version else inside_job(job, name)
    if inner is not None:
        source = open_job(job, verify)
        return OpenedSource(source, inner or single_file(job.url, source.version, source.files))
    if name.endswith(INDEX_SUFFIX) and not version:
        try:
            return _open_index(name, verify)
        except NotFound:
            pass  # it may be in a striped checkpoint
    path = local_path(name)
    if path is not None and not version and os.path.isfile(path):
        return OpenedSource(open_local(path), os.path.basename(path))
    return _open_stored(name, verify, version)


def inside_job(job: Job, name: str) -> str | None:
    """Return the path of `name` within the job's checkpoint, "" for all of it; None if it is outside."""
    if not job.digest:
        return None
    for root in (job.path, job.url):
        bare = root.rstrip("/")
        if bare and name.rstrip("/") == bare:
            return ""
        if bare and name.startswith(f"{bare}/"):
            return name[len(bare) + 1 :].strip("/")
    return None


def local_path(url: str) -> str | None:
    """Return the path of a plain path or a file:// URL; None for everything else."""
    if scheme_of(url) in ("", "file", "local") and not is_chained(url):
        return local_path_of(url)
    return None


def store_at(url: str) -> tuple[Store, str]:
    """Return the store of the parent directory and the name in it; at the top of a store, its root and ""."""
    from bootseer.storage import open_at, open_store

    try:
        return open_at(url)
    except ConfigError:
        return open_store(url), ""


def store_url_of(url: str) -> str:
    """Return the URL of the store that `store_at` opens."""
    from bootseer.storage.open import split_url

    try:
        return split_url(url)[0]
    except ConfigError:
        return url


def parent_of(url: str) -> tuple[str, str] | None:
    """Return the parent directory and the last name; None at the top."""
    if "?" in url or "::" in url:
        return None
    head, _, tail = url.rstrip("/").rpartition("/")
    if not tail or not head or head.endswith(("/", ":")):
        return None
    return head, tail


def open_job(job: Job, verify: str | None) -> Source:
    """Open the job's version from the arena; if that fails, the same version from the store."""
    from bootseer.checkpoint.io.direct import FULL

    def open_directly(why: str = "its memory was released, or the checkpoint service has ended") -> Source:
        line = f"bootseer: reading {redact(job.url)} directly, not from this node's arena: {why}"
        print(line, file=sys.stderr, flush=True)
        # In full: the arena may have refused just these bytes, and a part of a chunk would not be verified.
        return _open_pinned(job.url or job.path, verify or FULL, job.version, job.digest)

    if not job.arena:
        return _open_pinned(job.url or job.path, verify, job.version, job.digest)
    try:
        from bootseer.checkpoint.io.arena_source import connect

        found = connect(job.arena, job.digest, open_directly)
    except BootseerError as error:
        return open_directly(str(error))
    return open_directly("it does not hold this version") if found is None else found


def _open_pinned(url: str, verify: str | None, version: str, digest: str) -> Source:
    from bootseer import aio
    from bootseer.checkpoint.versions.resolve import pin

    store, path = store_at(url)
    return _to_source(url, store, aio.run_sync(_or_close(store, pin(store, path, version, digest))), verify)


def _open_index(url: str, verify: str | None) -> OpenedSource:
    """Open the index of a sharded model and its files, also in stores that cannot list directories."""
    from bootseer import aio
    from bootseer.checkpoint.format.tensor_index import MAX_INDEX_BYTES, parse_weight_map
    from bootseer.checkpoint.io.direct import plain_file
    from bootseer.checkpoint.versions.resolve import PLAIN, Pinned, read_small

    store, index = store_at(url)

    async def find() -> Pinned:
        data = await read_small(store, index, MAX_INDEX_BYTES)
        names = sorted({index, *parse_weight_map(data, redact(url)).values()})
        stats = dict(zip(names, await aio.map_bounded(store.stat, names, width=CALLS), strict=True))
        files = tuple(plain_file(name, stat.size, stat.etag, name) for name, stat in stats.items())
        return Pinned(PLAIN, "", "", digest_of(stats.items()), files)

    return OpenedSource(_to_source(url, store, aio.run_sync(_or_close(store, find())), verify), index)


def _open_stored(url: str, verify: str | None, version: str | None) -> OpenedSource:
    """Open the URL itself, or a file or directory in a striped checkpoint above."""
    try:
        source = _resolve(url, verify, version)
        return OpenedSource(source, single_file(url, source.version, source.files))
    except PermissionDenied:
        raise
    except StorageError as error:
        if error.retryable:
            raise
        missing = error
    at, inner = url, ""
    for _ in range(LEVELS_UP):
        above = parent_of(at)
        if above is None:
            break
        at, tail = above
        inner = f"{tail}/{inner}" if inner else tail
        try:
            source = _resolve(at, verify, version, is_striped=True)
        except (StorageError, CheckpointError):
            continue
        if inner in source.files or any(name.startswith(f"{inner}/") for name in source.files):
            return OpenedSource(source, inner)
        source.close()
        raise NotFound(f"{redact(at)}: version {source.version} has no file {inner}") from missing
    if isinstance(missing, NotFound):
        raise missing
    raise NotFound(f"{redact(url)}: no such file, and it is not a directory that can be listed") from missing


def single_file(url: str, version: str, names: Collection[str]) -> str:
    """Return the file's name if the URL means a plain file, otherwise "". `names`: the version's files."""
    if version or len(names) != 1:
        return ""
    [name] = names
    last = url.partition("?")[0].rstrip("/").rpartition("/")[2]
    return name if name in (last, unquote(last)) and not _is_directory(url) else ""


def _is_directory(url: str) -> bool:
    path = local_path(url)
    return path is not None and os.path.isdir(path)


def _resolve(url: str, verify: str | None, version: str | None, is_striped: bool = False) -> Source:
    from bootseer import aio
    from bootseer.checkpoint.format.manifest import directory_of, is_version
    from bootseer.checkpoint.versions.resolve import resolve

    if version is not None and not is_version(version):
        raise ConfigError(f"version={version[:80]!r} is not a version; list them with bootseer ckpt ls")
    store, path = store_at(f"{url.rstrip('/')}/{directory_of(version)}" if version else url)
    finding = resolve(store, path, is_striped=is_striped)
    return _to_source(url, store, aio.run_sync(_or_close(store, finding)), verify)


def _to_source(url: str, store: Store, pinned: Pinned, verify: str | None) -> Source:
    from bootseer import aio
    from bootseer.checkpoint.io.direct import SAMPLED, UNITS, DirectSource
    from bootseer.checkpoint.versions.resolve import STRIPED

    path = local_path(url)
    local = None if path is None else _map_local(path, pinned)
    if local is not None and pinned.kind != STRIPED:
        aio.run_sync(store.aclose())
        return local
    return DirectSource(
        redact(url),
        {file.path: file for file in pinned.files},
        lambda: store_at(url)[0],
        store=store,
        local=local,
        version=pinned.striped_version,
        digest=pinned.digest,
        verify=verify or (SAMPLED if scheme_of(url) in VERIFYING_SCHEMES else UNITS),
    )


def _map_local(path: str, pinned: Pinned) -> LocalSource:
    """Return the files that are in one piece."""
    from bootseer.checkpoint.versions.resolve import STRIPED

    root = os.path.dirname(path)
    found: dict[str, LocalFile] = {}
    for file in pinned.files:
        full = os.path.join(root, file.stripes[0])
        if len(file.stripes) == 1:
            try:  # for stripes, the size in the manifest is not trusted
                found[file.path] = LocalFile(
                    full, stat_file(full) if file.sums else Stat(file.layout.size, file.etag)
                )
            except StorageError:
                continue  # a read reports the error
    # Units of stripes are verified in place; `DirectSource` reads unmapped files.
    return LocalSource(path, found, pinned.digest, is_alone=False if pinned.kind == STRIPED else None)


async def _or_close(store: Store, finding: Coroutine[Any, Any, Pinned]) -> Pinned:
    try:
        return await finding
    except BaseException:
        await store.aclose()
        raise
