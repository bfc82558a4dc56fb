"""Unpacked trees of this user on this node, for where nothing can be mounted: unpacked once, used by many jobs.

    CACHE/unpacked/DIGEST/lock       shared while somebody uses it, exclusive while it is unpacked or taken away
                          index      of the tree, as it was stored
                          boot       of which boot of this machine its first files are
                          complete   is there when all files are
                          tree/      the files

CACHE is that of blocks (bootseer.blocks.open_cache). Blocks are not kept beside the files that they became; those
that it has already are not fetched. Which trees stay is decided in unpacked_places.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

from bootseer import aio
from bootseer.blocks import Cache, open_cache
from bootseer.blocks.cache import TREES
from bootseer.blocks.local import open_local
from bootseer.blocks.present import read_boot_id
from bootseer.blocks.trace import ANY_WORKLOAD
from bootseer.blocks.tree_files import write_whole
from bootseer.cache_folder import VARIABLE as CACHE_VARIABLE
from bootseer.cache_folder import make_private
from bootseer.errors import StorageError, StorageTimeout
from bootseer.mounts.tree_traces import Traces
from bootseer.mounts.unpacked_locks import SILENT_S, PlaceLock, open_lock
from bootseer.mounts.unpacked_places import (
    BOOT,
    COMPLETE,
    INDEX,
    TREE,
    base_of,
    make_room,
    remove_files,
    size_when_unpacked,
)
from bootseer.storage import Store, open_store
from bootseer.storage.os_errors import map_os_errors
from bootseer.tree.index import MOST_INDEX_BYTES
from bootseer.tree.materialise import materialise
from bootseer.tree.opening import OpenedTree, open_tree
from bootseer.tree.reading import StoreBlocks
from bootseer.trust import Trust

SAY_EVERY_S = 10.0
RETRY_S = 0.05


class UnpackedTree:
    """All files of a tree in a folder, which stays until `close`."""

    def __init__(self, opened: OpenedTree, folder: str, lock: PlaceLock, written_bytes: int) -> None:
        self.digest = opened.digest
        self.env = opened.index.config.env
        self.folder = folder
        self.written_bytes = written_bytes  # 0: it was there
        self.lock_path = lock.held_path  # as long as somebody has it locked (shared), the files stay
        self._lock = lock

    def close(self) -> None:
        """From here on it may be taken away."""
        self._lock.close()


def unpack_tree(
    url: str,
    *,
    trust: Trust | None = None,
    name: str = "",
    digest: str = "",
    workload: str = ANY_WORKLOAD,
    environ: Mapping[str, str] | None = None,
    say: Callable[[str], object] = lambda _: None,
    silent_s: float = SILENT_S,
    peers: str = "",
) -> UnpackedTree:
    """The tree at `url` (which may end in `@sha256:<tree digest>`) as files of this user.

    Args:
        name, digest: as for `open_tree`.
        workload: `bootseer.blocks.trace.workload_key`: files that its recorded starts have touched come first.
        say: lines for people while it takes time.
        silent_s: another process that unpacks the tree and gives no sign for so long is not waited for.
        peers: path of the file of the job's peers (bootseer.peers), who are asked before the store; "" for none.
    Raises: Untrusted, NotFound, IntegrityError, StorageError (also when the disk is full), ConfigError.
    """
    cache = open_cache(os.environ if environ is None else environ)
    base = base_of(cache)
    believed = Trust.load() if trust is None else trust
    store = aio.run_sync(_open(url, peers, say))
    try:

        def read_index(tree: str) -> bytes | None:
            return _read(os.path.join(base, tree, INDEX)) or cache.read_index(tree)

        opened = aio.run_sync(open_tree(store, url, believed, name=name, digest=digest, cached=read_index))
        place = os.path.join(base, opened.digest)
        written, is_ours = 0, False
        while not is_ours:
            lock = _use(place, say, silent_s)
            try:
                if not os.path.exists(os.path.join(place, COMPLETE)):
                    with lock.beating():
                        make_room(cache, size_when_unpacked(opened.index), opened.digest, say)
                        hot = _find_hot(cache, opened, store, believed, workload, say)
                        written = _unpack(place, cache, opened, store, hot, say)
                with map_os_errors(place):
                    # Between alone and shared it is free for a moment: somebody may have taken the place away.
                    is_ours = lock.try_hold(is_shared=True) and lock.is_there()
                    if is_ours:
                        os.utime(place)  # when it was used last
            finally:
                if not is_ours:
                    lock.close()
    finally:
        aio.run_sync(store.aclose())
    return UnpackedTree(opened, os.path.join(place, TREE), lock, written)


async def _open(url: str, peers: str, say: Callable[[str], object]) -> Store:
    from bootseer.tree.head import split_pin

    bare = split_pin(url)[0]
    if not peers:
        return open_store(bare)
    from bootseer.peers import open_peer_store

    return open_peer_store(bare, peers, log=say)


def _read(path: str) -> bytes | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with open(fd, "rb") as file:
            return file.read(MOST_INDEX_BYTES + 1)
    except OSError:
        return None


def _use(place: str, say: Callable[[str], object], silent_s: float) -> PlaceLock:
    """The lock of a place, held by us alone if it is not complete, else shared. Waits for who unpacks there.

    Raises: StorageTimeout when that one gives no sign for so long; StorageError.
    """
    said_s = beat_s = time.monotonic()
    last_beat_ns = -1
    with map_os_errors(place):
        while True:
            make_private(place)
            try:
                lock = open_lock(place)
            except FileNotFoundError:
                continue  # it was taken away between the two
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
            if now_s - said_s > SAY_EVERY_S:
                said_s = now_s
                say(f"waiting for another process that is busy in {place}")
            time.sleep(RETRY_S)


def _find_hot(
    cache: Cache, opened: OpenedTree, store: Store, trust: Trust, workload: str, say: Callable[[str], object]
) -> list[int]:
    """Blocks that starts have touched, in order, if this node or the store has a recording."""

    def log(line: str) -> None:
        say(line)

    folder = os.path.join(cache.folder, TREES, opened.digest)
    traces = Traces(folder, opened.digest, opened.index.block_count, store, trust, log)
    found = aio.run_sync(traces.find(workload))
    return [] if found is None else found.trace.hot()


def _unpack(
    place: str, cache: Cache, opened: OpenedTree, store: Store, hot: list[int], say: Callable[[str], object]
) -> int:
    """Goes on where an earlier run was interrupted. Returns bytes."""
    folder = os.path.join(place, TREE)
    boot = read_boot_id().encode()
    with map_os_errors(place):
        if _read(os.path.join(place, BOOT)) != boot:
            remove_files(folder)  # after a power cut a file may have its name and not its bytes
            write_whole(place, BOOT, boot)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        write_whole(place, INDEX, opened.index_bytes)
    whole_bytes = sum(opened.index.sizes)
    done_bytes, said_s = 0, time.monotonic()

    def progress(count: int, _files: int) -> None:
        nonlocal done_bytes, said_s
        done_bytes += count
        if time.monotonic() - said_s > SAY_EVERY_S:
            said_s = time.monotonic()
            say(f"unpacking the image: {done_bytes / 1e9:.1f} of {whole_bytes / 1e9:.1f} GB")

    def log(line: str) -> None:
        say(line)

    fetched = StoreBlocks(store, opened.index)
    with open_local(cache, opened.digest, opened.index, fetched, log) as blocks:
        done = materialise(
            opened.index, folder, blocks, hot=hot, resume=bool(os.listdir(folder)), on_progress=progress
        )
    if done.skipped:
        what = ", ".join(f"{count} {name}" for name, count in sorted(done.skipped.items()))
        say(f"warning: left out of the image, as this user cannot have them: {what}")
    with map_os_errors(place):
        fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _sync_file_system(fd)
            write_whole(place, COMPLETE, b"")
        finally:
            os.close(fd)
    return done.written_bytes


def _sync_file_system(fd: int) -> None:
    """Files first, then the mark that says they are all there: a power cut must not leave it alone."""
    import ctypes

    if ctypes.CDLL(None, use_errno=True).syncfs(fd):
        raise StorageError(
            f"the unpacked image could not be written to its disk: {os.strerror(ctypes.get_errno())}"
        )
