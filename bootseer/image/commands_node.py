"""What `bootseer image` does on a node with a tree: prefetch, materialise, mount, umount."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

from bootseer import aio
from bootseer.blocks import Cache
from bootseer.blocks.local import open_local
from bootseer.errors import BootseerError, ConfigError, NotFound, StorageError
from bootseer.image.commands import Progress, Say, find_digest, node_cache, opened, opened_store, shown, tree_url
from bootseer.image.commands_traces import hot_blocks, is_web, known_traces, with_sources
from bootseer.mounts import kernel
from bootseer.storage.os_errors import map_os_errors
from bootseer.tree.head import split_pin
from bootseer.tree.materialise import Materialised
from bootseer.tree.opening import OpenedTree
from bootseer.tree.reading import BlockSource, StoreBlocks
from bootseer.trust import Trust

SAVE_S = 5.0  # a process that serves a tree has so long to save what it has, before it is said to be still at it
MATERIALISE = "`bootseer image materialise` needs no mount"
NOT_RECORDED = "no start of it was recorded (`bootseer image record` records one): --all fetches everything"
_SHORT = re.compile(r"[0-9a-f]{8,63}")  # of a digest, as commands print it
NOT_LISTED = (
    "no recording of it is known, and a web server does not say which it has: name one by --workload, or put them"
    " together where they are (`bootseer image hot merge`); --all fetches everything"
)


# ---- prefetch ----------------------------------------------------------------------------------------------


class Prefetched(NamedTuple):
    """What is cached now."""

    digest: str
    blocks: int  # that were asked for
    fetched_blocks: int  # the others were there
    size: int  # stored bytes of those asked for
    fetched_bytes: int


def prefetch(url: str, *, name: str, workload: str, is_whole: bool, progress: Progress, say: Say) -> Prefetched:
    """Brings the hot blocks of a tree, or all, into this node's cache.

    Raises: ConfigError when nobody knows what is hot; StorageError when it cannot be brought or kept.
    """
    url, trust = tree_url(url), Trust.load()
    digest = find_digest(url, trust, name=name)
    node_cache(say)  # one that cannot be used is the first thing to be told
    return aio.run_sync(_prefetch(url, digest, trust, workload, is_whole, progress, say))


async def _prefetch(
    url: str, digest: str, trust: Trust, workload: str, is_whole: bool, progress: Progress, say: Say
) -> Prefetched:
    from bootseer.mounts.tree_fill import fill_cache
    from bootseer.mounts.tree_settings import Settings

    async def choose(block_count: int) -> list[int] | None:
        if is_whole:
            return None
        found = await aio.run_apart(_find_hot, url, digest, block_count, trust, workload, say, timeout_s=600.0)
        if not found:
            raise ConfigError(f"{shown(url)}: {NOT_LISTED if is_web(url) else NOT_RECORDED}")
        return found

    settings = Settings(url=split_pin(url)[0], keys=[each.key.line for each in trust.trusted])
    return Prefetched(digest, *await fill_cache(settings, digest, choose, progress))


def _find_hot(url: str, digest: str, block_count: int, trust: Trust, workload: str, say: Say) -> list[int]:
    """In a thread."""
    with opened_store(url) as store:
        return hot_blocks(known_traces(store, digest, block_count, trust, say, workload=workload), workload)


# ---- materialise -------------------------------------------------------------------------------------------


class MaterialiseOptions(NamedTuple):
    """How a tree is unpacked."""

    name: str = ""
    workload: str = ""
    owners: Literal["as stored", "mine"] = "as stored"
    resume: bool = False
    ready_path: str = ""  # a file that is made when all hot files are there


class Unpacked(NamedTuple):
    """What was unpacked."""

    digest: str
    done: Materialised
    hot_s: float  # until the hot files were there


def materialise(url: str, folder: str, options: MaterialiseOptions, progress: Progress, say: Say) -> Unpacked:
    """Unpacks a tree into a new or empty folder, hot files first; needs no privilege.

    Raises: as bootseer.tree.materialise, and as `open_tree`.
    """
    from bootseer.tree.materialise import materialise as unpack

    url, trust = tree_url(url), Trust.load()
    folder = os.path.abspath(folder)
    began_s = time.monotonic()
    with opened(url, name=options.name, trust=trust) as tree:
        known = known_traces(
            tree.store, tree.digest, tree.index.block_count, trust, say, workload=options.workload
        )
        hot = with_sources(tree.index, hot_blocks(known, options.workload))
        with map_os_errors(folder):
            os.makedirs(folder, mode=0o755, exist_ok=True)
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
                say(f"all hot files are there after {hot_s:.1f} s: programs can start")
            if options.ready_path:
                with map_os_errors(options.ready_path):
                    os.close(os.open(options.ready_path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))

        with _blocks(tree, say) as blocks:
            done = unpack(
                tree.index,
                folder,
                blocks,
                hot=hot,
                on_hot_done=on_hot_done,
                owners=options.owners,
                resume=options.resume,
                on_progress=count,
            )
    if done.skipped:
        what = ", ".join(f"{number} {kind}" for kind, number in sorted(done.skipped.items()))
        say(f"warning: left out, as this user or file system cannot have them: {what}")
    return Unpacked(tree.digest, done, hot_s)


@contextmanager
def _blocks(tree: OpenedTree, say: Say) -> Iterator[BlockSource]:
    """Those that this node's cache has are not fetched."""
    fetched = StoreBlocks(tree.store, tree.index)
    cache: Cache | None = None
    try:
        cache = node_cache(say)
    except BootseerError as error:
        say(f"warning: cached blocks are not used: {error}")
    if cache is None:
        yield fetched
        return

    def log(line: str) -> None:
        say(line)

    with open_local(cache, tree.digest, tree.index, fetched, log) as blocks:
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


class Shown(NamedTuple):
    """A tree that is seen in a folder."""

    folder: str
    digest: str
    log: str  # path, of the process that serves it


def mount(url: str, folder: str, options: MountOptions) -> Shown:
    """Shows a tree in an empty folder, read-only, until `umount`.

    Raises: ConfigError without the privileges, with the way out, and for a folder that is in use; as `open_tree`.
    """
    from bootseer.mounts.tree_mount import TreeOptions, mount_tree, probe_mount
    from bootseer.mounts.tree_places import Place

    folder = os.path.realpath(folder)
    _check_mount_point(folder)
    serving = TreeOptions(
        idle_s=options.idle_s,
        deadline_s=options.deadline_s,
        records=options.records,
        prefetches=options.prefetches,
        cold_bytes_per_s=options.cold_bytes_per_s,
    )
    try:
        tree = mount_tree(tree_url(url), name=options.name, workload=options.workload, options=serving)
        with tree.hold():
            kernel.mount(tree.folder, folder, "", kernel.BIND)
    except NotFound:
        raise
    except (ConfigError, StorageError) as error:
        why = probe_mount()
        if why:
            raise ConfigError(f"{folder}: trees cannot be mounted here: {why}; {MATERIALISE}") from error
        raise
    return Shown(folder, tree.digest, Place.of_folder(os.path.dirname(tree.control)).log_path)


def _check_mount_point(folder: str) -> None:
    taken = [each for each in kernel.mounts() if each.target == folder]
    if taken:
        raise ConfigError(
            f"{folder}: {taken[-1].fstype} is mounted there already: name another folder, or end it by:"
            f" bootseer image umount {folder}"
        )
    with map_os_errors(folder):
        if os.listdir(folder):
            raise ConfigError(
                f"{folder}: is not empty, and a mount would hide what is there: name an empty folder"
            )


class Ended(NamedTuple):
    """What an unmount has done."""

    folder: str  # "" when the tree was named by its digest
    digest: str
    is_served: bool  # its process goes on: others use the tree, or it waits for a new user
    is_saving: bool = False  # its process ends, and is not done yet with what it keeps for the next time


def umount(target: str, *, force: bool = False) -> Ended:
    """Ends what `mount` has made in a folder; of a digest, or its begin, all that this user has of that tree.

    The process that serves the tree ends by itself some time after its last use, as others may use it too; of a
    digest it ends now, and is waited for, for SAVE_S at most.
    Args: force: also while programs use it; what they read there then fails (digest), or they go on (folder).
    Raises: ConfigError when nothing is mounted there; StorageError while it is in use.
    """
    from bootseer.mounts.tree_ending import list_trees
    from bootseer.tree.head import is_digest

    if _SHORT.fullmatch(target) and not os.path.lexists(target):
        found = [each.digest for each in list_trees() if each.digest.startswith(target)]
        if len(found) > 1:
            raise ConfigError(f"{target}: begins the digests of {len(found)} trees; give more of it")
        target = found[0] if found else target
    if is_digest(target):
        return _end_server(target, "", target, force)
    above, last = os.path.split(os.path.abspath(target))
    folder = os.path.join(os.path.realpath(above), last)
    if os.path.islink(folder):
        folder = os.path.realpath(folder)
    mounted = kernel.mounts()
    here = [each for each in mounted if each.target == folder]
    states = {each.folder: each.digest for each in list_trees()}
    if folder in states:
        return _end_server(folder, folder, states[folder], force)
    if not here:
        raise ConfigError(f"{folder}: nothing is mounted there; `bootseer image mounts` shows what is")
    if here[-1].fstype != "erofs":
        raise ConfigError(f"{folder}: is a mount of {here[-1].fstype}, no tree: umount {folder}")
    device = (here[-1].major, here[-1].minor)
    digest = next(
        (states[each.target] for each in mounted if each.target in states and (each.major, each.minor) == device),
        "",
    )
    kernel.unmount(folder, kernel.DETACH if force else 0)
    return Ended(folder, digest, bool(digest))


def _end_server(tree: str, folder: str, digest: str, force: bool) -> Ended:
    from bootseer.mounts.tree_ending import Servers, find_place, unmount

    place = find_place(tree)
    if place is None:
        raise ConfigError(f"{tree}: this user has no such tree mounted")
    with Servers(place) as servers:
        if not unmount(place, force=force):
            raise ConfigError(f"{tree}: this user has no such tree mounted")
        return Ended(folder, digest, False, not servers.wait_end(SAVE_S))


class MountedHere(NamedTuple):
    """A tree of this user's that is mounted."""

    digest: str
    state: str
    url: str
    folders: list[str]  # where it is seen
    leases: int
    blocked_s: float
    read_bytes: int


def list_mounts() -> list[MountedHere]:
    """All trees that this user has mounted on this node."""
    from bootseer.mounts.tree_ending import list_trees

    found = []
    states = list_trees()
    mounted = kernel.mounts()
    for each in states:
        devices = {
            (one.major, one.minor) for one in mounted if one.target == each.folder and one.fstype == "erofs"
        }
        folders = [one.target for one in mounted if (one.major, one.minor) in devices]
        blocks = each.status.get("blocks") or {}
        found.append(
            MountedHere(
                each.digest,
                each.state,
                str(each.status.get("url", "")),
                folders,
                len(each.status.get("leases") or ()),
                float(blocks.get("blocked_s", 0.0)),
                int(blocks.get("read_bytes", 0)),
            )
        )
    return found
