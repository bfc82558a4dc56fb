"""Operations of `bootseer image` on a node with a tree: prefetch, unpack, mount, unmount."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, NamedTuple

from bootseer import aio
from bootseer.blocks.cache import Cache
from bootseer.blocks.local import open_local
from bootseer.errors import BootseerError, ConfigError, NotFound, StorageError
from bootseer.image.commands.common import (
    Progress,
    find_digest,
    node_cache,
    opened,
    opened_store,
    shown,
    tree_url,
)
from bootseer.image.commands.traces import add_sources, hot_blocks, known_traces
from bootseer.linux import mount as kernel
from bootseer.linux import namespaces
from bootseer.logs import get_logger
from bootseer.storage.os_errors import map_os_errors
from bootseer.storage.paths import is_web
from bootseer.tree.head import split_pin
from bootseer.tree.opening import OpenedTree
from bootseer.tree.reading import BlockSource, StoreBlocks
from bootseer.tree.status_folder import NAME as STATUS_FOLDER
from bootseer.tree.status_folder import is_marked
from bootseer.tree.unpack.tree import Materialised
from bootseer.trust import Trust

if TYPE_CHECKING:
    from bootseer.mounts.tree_daemon.mount import MountedTree as ServedTree

_log = get_logger(__name__)

SAVE_S = 5.0  # how long a process that serves a tree may save its data before it counts as still saving
MATERIALISE = "`bootseer image materialise` needs no mount"
NOT_RECORDED = "has no access trace; record one with `bootseer image record`, or fetch everything with --all"
_SHORT = re.compile(r"[0-9a-f]{8,63}")  # a short digest, as commands print it
NOT_LISTED = (
    "has no known access trace, and a web server does not list them; name one with --workload, merge them on the"
    " server (`bootseer image hot merge`), or fetch everything with --all"
)


# ---- prefetch ----------------------------------------------------------------------------------------------


class PrefetchResult(NamedTuple):
    """The cached blocks."""

    digest: str
    blocks: int  # requested
    fetched_blocks: int  # the others were present
    size: int  # stored bytes of the requested blocks
    fetched_bytes: int


def prefetch(url: str, *, name: str, workload: str, is_whole: bool, progress: Progress) -> PrefetchResult:
    """Fetch the hot blocks of a tree, or all, into this node's cache.

    Raises: ConfigError if the hot blocks are unknown; StorageError if blocks cannot be fetched or kept.
    """
    url, trust = tree_url(url), Trust.load()
    digest = find_digest(url, trust, name=name)
    node_cache()  # an unusable one is reported first
    return aio.run_sync(_prefetch(url, digest, trust, workload, is_whole, progress))


async def _prefetch(
    url: str, digest: str, trust: Trust, workload: str, is_whole: bool, progress: Progress
) -> PrefetchResult:
    from bootseer.mounts.tree_daemon.fill import fill_cache
    from bootseer.mounts.tree_daemon.settings import Settings

    async def choose(block_count: int) -> list[int] | None:
        if is_whole:
            return None
        found = await aio.run_abandonable(_find_hot, url, digest, block_count, trust, workload, timeout_s=600.0)
        if not found:
            raise ConfigError(f"{shown(url)}: {NOT_LISTED if is_web(url) else NOT_RECORDED}")
        return found

    settings = Settings(url=split_pin(url)[0], keys=[each.key.line for each in trust.trusted])
    return PrefetchResult(digest, *await fill_cache(settings, digest, choose, progress))


def _find_hot(url: str, digest: str, block_count: int, trust: Trust, workload: str) -> list[int]:
    """Find the hot blocks, in a thread."""
    with opened_store(url) as store:
        return hot_blocks(known_traces(store, digest, block_count, trust, workload=workload), workload)


# ---- materialise -------------------------------------------------------------------------------------------


class MaterialiseOptions(NamedTuple):
    """How a tree is unpacked."""

    name: str = ""
    workload: str = ""
    owners: Literal["as stored", "mine"] = "as stored"
    resume: bool = False
    ready_path: str = ""  # a file that is created when all hot files are unpacked


class UnpackResult(NamedTuple):
    digest: str
    done: Materialised
    hot_s: float  # until the hot files were unpacked


def materialise(url: str, directory: str, options: MaterialiseOptions, progress: Progress) -> UnpackResult:
    """Unpack a tree into a new or empty directory, hot files first; needs no privilege.

    Raises: as bootseer.tree.unpack.tree, and as `open_tree`.
    """
    from bootseer.tree.unpack.tree import materialise as unpack

    url, trust = tree_url(url), Trust.load()
    directory = os.path.abspath(directory)
    began_s = time.monotonic()
    with opened(url, name=options.name, trust=trust) as tree:
        known = known_traces(tree.store, tree.digest, tree.index.block_count, trust, workload=options.workload)
        hot = add_sources(tree.index, hot_blocks(known, options.workload))
        with map_os_errors(directory):
            os.makedirs(directory, mode=0o755, exist_ok=True)
        total = sum(size for size, link in zip(tree.index.sizes, tree.index.links, strict=True) if link == -1)
        done_bytes, hot_s = 0, 0.0

        def count(written: int, _files: int) -> None:
            nonlocal done_bytes
            done_bytes += written
            progress(done_bytes, total)

        def on_hot_done() -> None:
            nonlocal hot_s
            hot_s = time.monotonic() - began_s
            if hot:
                _log.info("hot files unpacked after %.1f s: programs can start", hot_s)
            if options.ready_path:
                with map_os_errors(options.ready_path):
                    os.close(os.open(options.ready_path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))

        with _blocks(tree) as blocks:
            done = unpack(
                tree.index,
                directory,
                blocks,
                hot=hot,
                on_hot_done=on_hot_done,
                owners=options.owners,
                resume=options.resume,
                on_progress=count,
            )
    if done.skipped:
        what = ", ".join(f"{number} {kind}" for kind, number in sorted(done.skipped.items()))
        _log.warning("skipped, because this user or file system does not support them: %s", what)
    return UnpackResult(tree.digest, done, hot_s)


@contextmanager
def _blocks(tree: OpenedTree) -> Iterator[BlockSource]:
    """Yield the source of blocks; those in this node's cache are not fetched."""
    fetched = StoreBlocks(tree.store, tree.index)
    cache: Cache | None = None
    try:
        cache = node_cache()
    except BootseerError as error:
        _log.warning("block cache disabled: %s", error)
    if cache is None:
        yield fetched
        return

    with open_local(cache, tree.digest, tree.index, fetched) as blocks:
        yield blocks


# ---- mount -------------------------------------------------------------------------------------------------


class MountOptions(NamedTuple):
    """How a tree is mounted."""

    name: str = ""
    workload: str = ""
    records: bool = True
    prefetches: bool = True
    cold_bytes_per_s: float | None = None
    idle_s: float = 60.0
    deadline_s: float = 30.0
    status_folder: bool = False


class MountedTree(NamedTuple):
    folder: str
    digest: str
    log: str  # path, of the process that serves it
    status_folder: str = ""  # "" for none


def mount(url: str, directory: str, options: MountOptions) -> MountedTree:
    """Mount a tree in an empty directory, read-only, until `umount`.

    Raises: ConfigError without the privileges, with the fix, and for a directory that is in use; as `open_tree`.
    """
    from bootseer.mounts.tree_daemon.mount import TreeOptions, mount_tree, probe_mount
    from bootseer.mounts.tree_daemon.places import TreeDirectory

    directory = os.path.realpath(directory)
    _check_mount_point(directory)
    serving = TreeOptions(
        idle_s=options.idle_s,
        deadline_s=options.deadline_s,
        records=options.records,
        prefetches=options.prefetches,
        cold_bytes_per_s=options.cold_bytes_per_s,
        status_folder=options.status_folder,
    )
    status = ""
    try:
        tree = mount_tree(tree_url(url), name=options.name, workload=options.workload, options=serving)
        with tree.hold():
            kernel.mount(tree.folder, directory, "", kernel.BIND)
            if options.status_folder:
                status = _show_status(tree, directory)
    except NotFound:
        raise
    except (ConfigError, StorageError) as error:
        why = probe_mount()
        if why:
            raise ConfigError(f"{directory}: trees cannot be mounted here: {why}; {MATERIALISE}") from error
        raise
    log = TreeDirectory.of_directory(os.path.dirname(tree.control)).log_path
    return MountedTree(directory, tree.digest, log, status)


def _show_status(tree: ServedTree, directory: str) -> str:
    """Mount the status folder of a tree that is mounted at `directory`; return its path, "" with a warning."""
    place = os.path.join(directory, STATUS_FOLDER)
    try:
        try:
            is_ours = is_marked(os.lstat(place))
        except FileNotFoundError:
            raise ConfigError(
                f"this node serves the tree without it; unmount the tree everywhere (bootseer image umount "
                f"{tree.digest[:12]}), then mount it again"
            ) from None
        if not is_ours:
            raise ConfigError(f"the tree has a {STATUS_FOLDER} of its own")
        kernel.mount(tree.status_folder(), place, "", kernel.BIND)
    except (BootseerError, OSError) as error:
        _log.warning("status folder disabled: %s", error)
        return ""
    return place


def _check_mount_point(directory: str) -> None:
    taken = [each for each in kernel.mounts() if each.target == directory]
    if taken:
        raise ConfigError(
            f"{directory}: {taken[-1].fstype} is mounted there already; name another directory, or unmount it"
            f" with: bootseer image umount {directory}"
        )
    with map_os_errors(directory):
        if os.listdir(directory):
            raise ConfigError(
                f"{directory}: is not empty, and a mount would hide its content; name an empty directory"
            )


class UnmountResult(NamedTuple):
    folder: str  # "" if the tree was named by its digest
    digest: str
    is_served: bool  # its process continues: the tree is in use, or it waits for a new user
    is_saving: bool = False  # its process ends, and is still saving data for the next time


def umount(target: str, *, force: bool = False) -> UnmountResult:
    """Unmount a directory of `mount`; for a digest, or its first digits, all mounts of that tree by this user.

    The process that serves the tree ends some time after its last use, as other processes may use the tree too.
    For a digest it ends now, and is waited for, at most SAVE_S.
    Args: force: also while programs use it; their reads then fail (digest), or they continue (directory).
    Raises: ConfigError if nothing is mounted there; StorageError while it is in use.
    """
    from bootseer.mounts.tree_daemon.ending import list_trees
    from bootseer.tree.head import is_digest

    if _SHORT.fullmatch(target) and not os.path.lexists(target):
        found = [each.digest for each in list_trees() if each.digest.startswith(target)]
        if len(found) > 1:
            raise ConfigError(f"{target}: matches the digests of {len(found)} trees; give more digits")
        target = found[0] if found else target
    if is_digest(target):
        return _end_server(target, "", target, force)
    above, last = os.path.split(os.path.abspath(target))
    directory = os.path.join(os.path.realpath(above), last)
    if os.path.islink(directory):
        directory = os.path.realpath(directory)
    mounted = kernel.mounts()
    here = [each for each in mounted if each.target == directory]
    states = {each.folder: each.digest for each in list_trees()}
    if directory in states:
        return _end_server(directory, directory, states[directory], force)
    if not here:
        raise ConfigError(f"{directory}: nothing is mounted there; list mounts with `bootseer image mounts`")
    if here[-1].fstype != "erofs":
        raise ConfigError(f"{directory}: is a mount of {here[-1].fstype}, not a tree; use umount {directory}")
    device = (here[-1].major, here[-1].minor)
    digest = next(
        (states[each.target] for each in mounted if each.target in states and (each.major, each.minor) == device),
        "",
    )
    _unmount(directory, mounted, force)
    return UnmountResult(directory, digest, bool(digest))


def _unmount(directory: str, mounted: Sequence[kernel.Mount], force: bool) -> None:
    """Unmount a directory. Its status folder does not keep it, nor do readers of that. Raises: StorageError."""
    place = os.path.join(directory, STATUS_FOLDER)
    status = [each for each in mounted if each.target == place and kernel.is_fuse(each)]
    fd = namespaces.copy_mount(place) if status and not force else -1
    try:
        for _ in status:
            kernel.unmount(place, kernel.DETACH)
        try:
            kernel.unmount(directory, kernel.DETACH if force else 0)
        except StorageError:
            if fd >= 0:
                namespaces.attach(fd, place)
            raise
    finally:
        if fd >= 0:
            os.close(fd)


def _end_server(tree: str, directory: str, digest: str, force: bool) -> UnmountResult:
    from bootseer.mounts.tree_daemon.ending import Servers, find_place, unmount

    place = find_place(tree)
    if place is None:
        raise ConfigError(f"{tree}: this user has no such tree mounted")
    with Servers(place) as servers:
        if not unmount(place, force=force):
            raise ConfigError(f"{tree}: this user has no such tree mounted")
        return UnmountResult(directory, digest, False, not servers.wait_end(SAVE_S))


class MountInfo(NamedTuple):
    """A mounted tree of this user."""

    digest: str
    state: str
    url: str
    folders: list[str]  # its mount points
    leases: int
    blocked_s: float
    read_bytes: int


def list_mounts() -> list[MountInfo]:
    """Return all trees that this user has mounted on this node."""
    from bootseer.mounts.tree_daemon.ending import list_trees

    found = []
    states = list_trees()
    mounted = kernel.mounts()
    for each in states:
        devices = {
            (one.major, one.minor) for one in mounted if one.target == each.folder and one.fstype == "erofs"
        }
        directories = [one.target for one in mounted if (one.major, one.minor) in devices]
        blocks = each.status.get("blocks") or {}
        found.append(
            MountInfo(
                each.digest,
                each.state,
                str(each.status.get("url", "")),
                directories,
                len(each.status.get("leases") or ()),
                float(blocks.get("blocked_s", 0.0)),
                int(blocks.get("read_bytes", 0)),
            )
        )
    return found
