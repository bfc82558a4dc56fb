"""Unpacked trees of this user on this node, where mounts are not possible: unpacked once, used by many jobs.

    CACHE/unpacked/DIGEST/lock       shared while a process uses it, exclusive while it is unpacked or removed
                          index      of the tree, as it was stored
                          boot       of which boot of this machine its first files are
                          complete   exists when all files do
                          tree/      the files

CACHE is that of blocks (`open_cache`). Blocks of unpacked files are not cached; blocks that are cached already are
not fetched. places.py decides which trees stay.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from bootseer import aio
from bootseer.blocks.cache import TREES, Cache, open_cache
from bootseer.blocks.local import open_local
from bootseer.blocks.presence import read_boot_id
from bootseer.blocks.trace import ANY_WORKLOAD
from bootseer.blocks.tree_files import write_whole
from bootseer.cache_folder import VARIABLE as CACHE_VARIABLE
from bootseer.cache_folder import make_private_dir
from bootseer.errors import StorageError, StorageTimeout
from bootseer.linux.syscalls import call
from bootseer.logs import get_logger
from bootseer.mounts.tree_daemon.traces import Traces
from bootseer.mounts.unpacked.locks import HEARTBEAT_TIMEOUT_S, PlaceLock, open_lock
from bootseer.mounts.unpacked.places import (
    BOOT,
    COMPLETE,
    INDEX,
    TREE,
    base_of,
    free_space,
    remove_files,
    size_when_unpacked,
)
from bootseer.storage import Store, open_store
from bootseer.storage.os_errors import map_os_errors
from bootseer.tree.index import MAX_INDEX_BYTES
from bootseer.tree.opening import OpenedTree, open_tree
from bootseer.tree.reading import StoreBlocks
from bootseer.tree.unpack.tree import materialise
from bootseer.trust import Trust

_log = get_logger(__name__)

PROGRESS_S = 10.0
RETRY_S = 0.05


class UnpackedTree:
    """All files of a tree in a directory, which stays until `close`."""

    def __init__(self, opened: OpenedTree, folder: str, lock: PlaceLock, written_bytes: int) -> None:
        self.digest = opened.digest
        self.env = opened.index.config.env
        self.folder = folder
        self.written_bytes = written_bytes  # 0: it was there
        self.lock_path = lock.held_path  # while a process has it locked (shared), the files stay
        self._lock = lock

    def close(self) -> None:
        """Release it; it may be evicted from now on."""
        self._lock.close()


def unpack_tree(
    url: str,
    *,
    trust: Trust | None = None,
    name: str = "",
    digest: str = "",
    workload: str = ANY_WORKLOAD,
    environ: Mapping[str, str] | None = None,
    silent_s: float = HEARTBEAT_TIMEOUT_S,
    peers: str = "",
) -> UnpackedTree:
    """Unpack the tree at `url` (which may end in `@sha256:<tree digest>`) to files of this user.

    Args:
        name, digest: as for `open_tree`.
        workload: `bootseer.blocks.trace.workload_key`: files in its access trace are unpacked first.
        silent_s: the limit for another process that unpacks the tree without a sign of life.
        peers: path of the file of the job's peers (bootseer.peers), which are read before the store; "" for none.
    Raises: Untrusted, NotFound, IntegrityError, StorageError (also when the disk is full), ConfigError.
    """
    cache = open_cache(os.environ if environ is None else environ)
    base = base_of(cache)
    trusted = Trust.load() if trust is None else trust
    store = aio.run_sync(_open(url, peers))
    try:

        def read_index(tree: str) -> bytes | None:
            return _read(os.path.join(base, tree, INDEX)) or cache.read_index(tree)

        opened = aio.run_sync(open_tree(store, url, trusted, name=name, digest=digest, cached=read_index))
        place = os.path.join(base, opened.digest)
        written, is_ours = 0, False
        while not is_ours:
            lock = _use(place, silent_s)
            try:
                if not os.path.exists(os.path.join(place, COMPLETE)):
                    with lock.sending_heartbeats():
                        free_space(cache, size_when_unpacked(opened.index), opened.digest)
                        hot = _find_hot(cache, opened, store, trusted, workload)
                        written = _unpack(place, cache, opened, store, hot)
                with map_os_errors(place):
                    # Between exclusive and shared it is free for a moment: another process may have evicted it.
                    is_ours = lock.try_hold(is_shared=True) and lock.is_there()
                    if is_ours:
                        os.utime(place)  # records the time of last use
            finally:
                if not is_ours:
                    lock.close()
    finally:
        aio.run_sync(store.aclose())
    return UnpackedTree(opened, os.path.join(place, TREE), lock, written)


async def _open(url: str, peers: str) -> Store:
    from bootseer.tree.head import split_pin

    bare = split_pin(url)[0]
    if not peers:
        return open_store(bare)
    from bootseer.peers import open_peer_store

    return open_peer_store(bare, peers)


def _read(path: str) -> bytes | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with open(fd, "rb") as file:
            return file.read(MAX_INDEX_BYTES + 1)
    except OSError:
        return None


def _use(place: str, silent_s: float) -> PlaceLock:
    """Open the lock of a place, exclusive if incomplete, else shared. Wait for a process that unpacks there.

    Raises: StorageTimeout when that process gives no sign of life for so long; StorageError.
    """
    said_s = beat_s = time.monotonic()
    last_beat_ns = -1
    with map_os_errors(place):
        while True:
            make_private_dir(place)
            try:
                lock = open_lock(place)
            except FileNotFoundError:
                continue  # it was evicted between the two calls
            try:
                is_complete = os.path.exists(os.path.join(place, COMPLETE))
                is_held = lock.try_hold(is_shared=is_complete)
                if is_held and lock.is_there() and is_complete == os.path.exists(os.path.join(place, COMPLETE)):
                    return lock
                beat_ns = lock.beat_ns()
            except BaseException:
                lock.close()
                raise
            lock.close()
            if is_held:
                continue  # it has become another one, or complete
            now_s = time.monotonic()
            if beat_ns != last_beat_ns:
                last_beat_ns, beat_s = beat_ns, now_s
            if now_s - beat_s > silent_s:
                raise StorageTimeout(
                    f"{place}: the process that unpacks the image there has given no sign for {silent_s:g} s:"
                    f" end it (fuser {lock.held_path}), or name another cache by {CACHE_VARIABLE}"
                )
            if now_s - said_s > PROGRESS_S:
                said_s = now_s
                _log.info("waiting for another process that is busy in %s", place)
            time.sleep(RETRY_S)


def _find_hot(cache: Cache, opened: OpenedTree, store: Store, trust: Trust, workload: str) -> list[int]:
    """Return the blocks of the access trace, in order, if this node or the store has one."""

    directory = os.path.join(cache.folder, TREES, opened.digest)
    traces = Traces(directory, opened.digest, opened.index.block_count, store, trust)
    found = aio.run_sync(traces.find(workload))
    return [] if found is None else found.trace.hot()


def _unpack(place: str, cache: Cache, opened: OpenedTree, store: Store, hot: list[int]) -> int:
    """Unpack; continue an interrupted run. Returns bytes."""
    directory = os.path.join(place, TREE)
    boot = read_boot_id().encode()
    with map_os_errors(place):
        if _read(os.path.join(place, BOOT)) != boot:
            remove_files(directory)  # after a power cut a file may have its name without its bytes
            write_whole(place, BOOT, boot)
        os.makedirs(directory, mode=0o700, exist_ok=True)
        write_whole(place, INDEX, opened.index_bytes)
    whole_bytes = sum(opened.index.sizes)
    done_bytes, said_s = 0, time.monotonic()

    def progress(count: int, _files: int) -> None:
        nonlocal done_bytes, said_s
        done_bytes += count
        if time.monotonic() - said_s > PROGRESS_S:
            said_s = time.monotonic()
            _log.info("unpacking the image: %.1f of %.1f GB", done_bytes / 1e9, whole_bytes / 1e9)

    fetched = StoreBlocks(store, opened.index)
    with open_local(cache, opened.digest, opened.index, fetched) as blocks:
        done = materialise(
            opened.index, directory, blocks, hot=hot, resume=bool(os.listdir(directory)), on_progress=progress
        )
    if done.skipped:
        what = ", ".join(f"{count} {name}" for name, count in sorted(done.skipped.items()))
        _log.warning("left out of the image, as this user cannot create them: %s", what)
    with map_os_errors(place):
        fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _sync_file_system(fd)
            write_whole(place, COMPLETE, b"")
        finally:
            os.close(fd)
    return done.written_bytes


def _sync_file_system(fd: int) -> None:
    """Sync all files before the mark `complete`: a power cut must not leave only the mark."""
    number = call("syncfs", fd)
    if number:
        raise StorageError(f"the unpacked image could not be written to its disk: {os.strerror(number)}")
