"""Which Source serves a URL: this node's arena, plain local files, or a store.

In: a URL or path that a user names, or none for the checkpoint of the job (`--load-checkpoint`). Out: an open
Source and the path within it that was meant, "" for the whole checkpoint. Everything heavier than a local file is
imported only once it is needed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Coroutine, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from bootseer.checkpoint.local_source import LocalFile, LocalSource, digest_of, open_local
from bootseer.checkpoint.source import Source
from bootseer.errors import BootseerError, CheckpointError, ConfigError, NotFound, PermissionDenied, StorageError
from bootseer.storage.local_reading import stat_file
from bootseer.storage.open import local_path as local_path_of
from bootseer.storage.paths import is_chained, redact, scheme_of
from bootseer.storage.protocol import Stat, Store

if TYPE_CHECKING:
    from bootseer.checkpoint.versions import Pinned

CALLS = 16  # at once
INDEX_SUFFIX = ".safetensors.index.json"
LEVELS_UP = 4  # a file below a checkpoint is looked for in so many folders above it
SUMS_OF_ITS_OWN = ("hdfs", "viewfs")  # stores that check what they deliver


class Job(NamedTuple):
    """What the launcher says of the job's checkpoint; all "" without one."""

    path: str = ""  # where ranks find it: a path in the arena, or the URL
    url: str = ""  # as the user named it
    version: str = ""
    digest: str = ""
    arena: str = ""  # address of this node's arena


class Opened:
    """A Source and the path in it that was asked for."""

    def __init__(self, source: Source, path: str) -> None:
        self.source = source
        self.path = path

    def inside(self, name: str) -> str:
        """A name below the path that was asked for."""
        return f"{self.path}/{name}" if self.path else name

    def close(self) -> None:
        self.source.close()

    def __enter__(self) -> Opened:
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
    """Whether it can name a checkpoint at all: a path, or a URL with a scheme."""
    return bool(url) and "\0" not in url and not url.startswith("://")


def open_source(
    url: str | os.PathLike[str] | None = None, *, verify: str | None = None, version: str | None = None
) -> Opened:
    """Opens what `url` means now, pinned to its version.

    Args:
        verify: one of bootseer.checkpoint.direct.POLICIES instead of the default.
        version: of a striped checkpoint, instead of the newest complete one.
    Raises: NotFound; CheckpointError; IntegrityError.
    """
    job = read_job(os.environ)
    if url is None:
        if not job.url and not job.path:
            raise ConfigError(
                "no checkpoint was named: give a path or URL, or start the job with bootrun --load-checkpoint URL"
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
        return Opened(source, inner or only_file(job.url, source.version, source.files))
    if name.endswith(INDEX_SUFFIX) and not version:
        try:
            return _open_index(name, verify)
        except NotFound:
            pass  # it may be in a striped checkpoint
    path = local_path(name)
    if path is not None and not version and os.path.isfile(path):
        return Opened(open_local(path), os.path.basename(path))
    return _open_stored(name, verify, version)


def inside_job(job: Job, name: str) -> str | None:
    """The path within the job's checkpoint that `name` means, "" for all of it; None if it is none of it."""
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
    """The path that a plain path or a file:// URL means; None for everything else."""
    if scheme_of(url) in ("", "file", "local") and not is_chained(url):
        return local_path_of(url)
    return None


def store_at(url: str) -> tuple[Store, str]:
    """The store of the folder above and the name in it; at the top of a store, its root and ""."""
    from bootseer.storage import open_at, open_store

    try:
        return open_at(url)
    except ConfigError:
        return open_store(url), ""


def store_url_of(url: str) -> str:
    """The URL of the store that `store_at` gives."""
    from bootseer.storage.open import split_url

    try:
        return split_url(url)[0]
    except ConfigError:
        return url


def parent_of(url: str) -> tuple[str, str] | None:
    """The folder above and the last name; None at the top."""
    if "?" in url or "::" in url:
        return None
    head, _, tail = url.rstrip("/").rpartition("/")
    if not tail or not head or head.endswith(("/", ":")):
        return None
    return head, tail


def open_job(job: Job, verify: str | None) -> Source:
    """From the arena; where that cannot be, from the store, the very same version."""

    def open_directly(why: str = "it has been given back, or the process that keeps it has ended") -> Source:
        line = f"bootseer: reading {redact(job.url)} directly, not from this node's arena: {why}"
        print(line, file=sys.stderr, flush=True)
        return _open_pinned(job.url or job.path, verify, job.version, job.digest)

    if not job.arena:
        return _open_pinned(job.url or job.path, verify, job.version, job.digest)
    try:
        from bootseer.checkpoint.arena_client import connect

        found = connect(job.arena, job.digest, open_directly)
    except BootseerError as error:
        return open_directly(str(error))
    return open_directly("it does not hold this version") if found is None else found


def _open_pinned(url: str, verify: str | None, version: str, digest: str) -> Source:
    from bootseer import aio
    from bootseer.checkpoint.versions import pin

    store, path = store_at(url)
    return _to_source(url, store, aio.run_sync(_or_close(store, pin(store, path, version, digest))), verify)


def _open_index(url: str, verify: str | None) -> Opened:
    """The index of a sharded model and the files that it names, also where folders cannot be listed."""
    from bootseer import aio
    from bootseer.checkpoint.direct import plain_file
    from bootseer.checkpoint.tensor_index import MAX_INDEX_BYTES, parse_weight_map
    from bootseer.checkpoint.versions import PLAIN, Pinned, read_small

    store, index = store_at(url)

    async def find() -> Pinned:
        data = await read_small(store, index, MAX_INDEX_BYTES)
        names = sorted({index, *parse_weight_map(data, redact(url)).values()})
        stats = dict(zip(names, await aio.map_bounded(store.stat, names, width=CALLS), strict=True))
        files = tuple(plain_file(name, stat.size, stat.etag, name) for name, stat in stats.items())
        return Pinned(PLAIN, "", "", digest_of(stats.items()), files)

    return Opened(_to_source(url, store, aio.run_sync(_or_close(store, find())), verify), index)


def _open_stored(url: str, verify: str | None, version: str | None) -> Opened:
    """The URL itself, or a file or folder in a striped checkpoint above."""
    try:
        source = _resolve(url, verify, version)
        return Opened(source, only_file(url, source.version, source.files))
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
            return Opened(source, inner)
        source.close()
        raise NotFound(f"{redact(at)}: version {source.version} has no file {inner}") from missing
    if isinstance(missing, NotFound):
        raise missing
    raise NotFound(f"{redact(url)}: there is no such file, and it is no folder that can be listed") from missing


def only_file(url: str, version: str, names: Collection[str]) -> str:
    """The file's name where the URL means a plain file and no folder, else "". `names`: the version's files."""
    if version or len(names) != 1:
        return ""
    [name] = names
    last = url.partition("?")[0].rstrip("/").rpartition("/")[2]
    return name if name in (last, unquote(last)) and not _is_folder(url) else ""


def _is_folder(url: str) -> bool:
    path = local_path(url)
    return path is not None and os.path.isdir(path)


def _resolve(url: str, verify: str | None, version: str | None, is_striped: bool = False) -> Source:
    from bootseer import aio
    from bootseer.checkpoint.manifest import folder_of, is_version
    from bootseer.checkpoint.versions import resolve

    if version is not None and not is_version(version):
        raise ConfigError(f"version={version[:80]!r} is none: bootseer ckpt ls shows them")
    store, path = store_at(f"{url.rstrip('/')}/{folder_of(version)}" if version else url)
    finding = resolve(store, path, is_striped=is_striped)
    return _to_source(url, store, aio.run_sync(_or_close(store, finding)), verify)


def _to_source(url: str, store: Store, pinned: Pinned, verify: str | None) -> Source:
    from bootseer import aio
    from bootseer.checkpoint.direct import SAMPLED, UNITS, DirectSource
    from bootseer.checkpoint.versions import STRIPED

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
        verify=verify or (SAMPLED if scheme_of(url) in SUMS_OF_ITS_OWN else UNITS),
    )


def _map_local(path: str, pinned: Pinned) -> LocalSource:
    """The files that lie in one piece."""
    from bootseer.checkpoint.versions import STRIPED

    root = os.path.dirname(path)
    found: dict[str, LocalFile] = {}
    for file in pinned.files:
        full = os.path.join(root, file.stripes[0])
        if len(file.stripes) == 1:
            try:  # of stripes the manifest says the size, and it is not believed
                found[file.path] = LocalFile(
                    full, stat_file(full) if file.sums else Stat(file.layout.size, file.etag)
                )
            except StorageError:
                continue  # reading it tells why
    # Units of stripes are checked where they are; `DirectSource` reads what is not mapped.
    return LocalSource(path, found, pinned.digest, is_alone=False if pinned.kind == STRIPED else None)


async def _or_close(store: Store, finding: Coroutine[Any, Any, Pinned]) -> Pinned:
    try:
        return await finding
    except BaseException:
        await store.aclose()
        raise
