"""Unpacked trees of this user on this node, for where nothing can be mounted: unpacked once, used by many jobs.

    CACHE/unpacked/DIGEST/lock       shared while somebody uses it, exclusive while it is unpacked or taken away
                          index      of the tree, as it was stored
                          boot       of which boot of this machine its first files are
                          complete   is there when all files are
                          tree/      the files

CACHE is that of blocks (bootseer.blocks.open_cache). Blocks are not kept beside the files that they became.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from bootseer import aio
from bootseer.blocks import open_cache
from bootseer.blocks.present import read_boot_id
from bootseer.blocks.tree_files import write_whole
from bootseer.errors import StorageError
from bootseer.storage import Store, open_store
from bootseer.storage.os_errors import map_os_errors
from bootseer.tree.index import MOST_INDEX_BYTES
from bootseer.tree.materialise import materialise
from bootseer.tree.opening import OpenedTree, open_tree
from bootseer.tree.reading import StoreBlocks
from bootseer.trust import Trust

FOLDER = "unpacked"
SAY_EVERY_S = 10.0
RETRY_S = 0.05
_LOCK, _INDEX, _BOOT, _COMPLETE, _TREE = "lock", "index", "boot", "complete", "tree"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_OPEN = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class UnpackedTree:
    """All files of a tree in a folder, which stays until `close`."""

    def __init__(self, opened: OpenedTree, folder: str, lock: int, written_bytes: int) -> None:
        self.digest = opened.digest
        self.env = opened.index.config.env
        self.folder = folder
        self.written_bytes = written_bytes  # 0: it was there
        self._lock = lock

    def close(self) -> None:
        """From here on it may be taken away."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def unpack_tree(
    url: str,
    *,
    trust: Trust | None = None,
    name: str = "",
    environ: Mapping[str, str] | None = None,
    say: Callable[[str], object] = lambda _: None,
) -> UnpackedTree:
    """The tree at `url` (which may end in `@sha256:<tree digest>`) as files of this user.

    Args: name: as for `open_tree`; say: lines for people while it takes time.
    Raises: Untrusted, NotFound, IntegrityError, StorageError (also when the disk is full), ConfigError.
    """
    base = os.path.join(open_cache(os.environ if environ is None else environ).folder, FOLDER)
    believed = Trust.load() if trust is None else trust
    store = aio.run_sync(_open(url))
    try:
        opened = aio.run_sync(
            open_tree(
                store, url, believed, name=name, cached=lambda digest: _read(os.path.join(base, digest, _INDEX))
            )
        )
        place = os.path.join(base, opened.digest)
        lock = _use(place, say)
        try:
            written = 0
            if not os.path.exists(os.path.join(place, _COMPLETE)):
                written = _unpack(place, opened, store, say)
            with map_os_errors(place):
                fcntl.flock(lock, fcntl.LOCK_SH)
                os.utime(place)  # when it was used last
        except BaseException:
            os.close(lock)
            raise
    finally:
        aio.run_sync(store.aclose())
    return UnpackedTree(opened, os.path.join(place, _TREE), lock, written)


def list_unpacked(environ: Mapping[str, str] | None = None) -> list[tuple[str, float]]:
    """Digests of unpacked trees and when each was used last (since the epoch), the latest first."""
    base = os.path.join(open_cache(os.environ if environ is None else environ).folder, FOLDER)
    found = []
    with suppress(FileNotFoundError), os.scandir(base) as entries:
        for entry in entries:
            if _DIGEST.fullmatch(entry.name):
                found.append((entry.name, entry.stat(follow_symlinks=False).st_mtime))
    return sorted(found, key=lambda each: -each[1])


def remove_unpacked(digest: str, environ: Mapping[str, str] | None = None) -> bool:
    """Takes an unpacked tree away; False while somebody uses it, or if there is none. Raises: StorageError."""
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"{digest[:80]!r} is no digest")
    place = os.path.join(open_cache(os.environ if environ is None else environ).folder, FOLDER, digest)
    if not os.path.isdir(place):
        return False
    with map_os_errors(place):
        lock = os.open(os.path.join(place, _LOCK), _OPEN, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(place, _COMPLETE))
            _remove_files(os.path.join(place, _TREE))
            for name in sorted(os.listdir(place), key=lambda name: name == _LOCK):
                os.unlink(os.path.join(place, name))
            os.rmdir(place)
        finally:
            os.close(lock)
    return True


async def _open(url: str) -> Store:
    from bootseer.tree.head import split_pin

    return open_store(split_pin(url)[0])


def _read(path: str) -> bytes | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with open(fd, "rb") as file:
            return file.read(MOST_INDEX_BYTES + 1)
    except OSError:
        return None


def _use(place: str, say: Callable[[str], object]) -> int:
    """The lock of a place, held by us alone if it is not complete, else shared. Waits for who unpacks there."""
    said_s = time.monotonic()
    with map_os_errors(place):
        while True:
            os.makedirs(place, mode=0o700, exist_ok=True)
            try:
                lock = os.open(os.path.join(place, _LOCK), _OPEN, 0o600)
            except FileNotFoundError:
                continue  # it was taken away between the two
            is_complete = os.path.exists(os.path.join(place, _COMPLETE))
            try:
                fcntl.flock(lock, (fcntl.LOCK_SH if is_complete else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
            else:
                if _is_here(lock, place) and (not is_complete or os.path.exists(os.path.join(place, _COMPLETE))):
                    return lock
                os.close(lock)
                continue
            if time.monotonic() - said_s > SAY_EVERY_S:
                said_s = time.monotonic()
                say(f"waiting for another process that is busy in {place}")
            time.sleep(RETRY_S)


def _is_here(lock: int, place: str) -> bool:
    try:
        return os.path.samestat(os.fstat(lock), os.lstat(os.path.join(place, _LOCK)))
    except FileNotFoundError:
        return False


def _unpack(place: str, opened: OpenedTree, store: Store, say: Callable[[str], object]) -> int:
    """Goes on where an earlier run was interrupted. Returns bytes."""
    folder = os.path.join(place, _TREE)
    boot = read_boot_id().encode()
    with map_os_errors(place):
        if _read(os.path.join(place, _BOOT)) != boot:
            _remove_files(folder)  # after a power cut a file may have its name and not its bytes
            write_whole(place, _BOOT, boot)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        write_whole(place, _INDEX, opened.index_bytes)
    whole_bytes = sum(opened.index.sizes)
    done_bytes, said_s = 0, time.monotonic()

    def progress(count: int, _files: int) -> None:
        nonlocal done_bytes, said_s
        done_bytes += count
        if time.monotonic() - said_s > SAY_EVERY_S:
            said_s = time.monotonic()
            say(f"unpacking the image: {done_bytes / 1e9:.1f} of {whole_bytes / 1e9:.1f} GB")

    done = materialise(
        opened.index,
        folder,
        StoreBlocks(store, opened.index),
        resume=bool(os.listdir(folder)),
        on_progress=progress,
    )
    if done.skipped:
        what = ", ".join(f"{count} {name}" for name, count in sorted(done.skipped.items()))
        say(f"left out of the image, as this user cannot have them: {what}")
    with map_os_errors(place):
        fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _sync_file_system(fd)
            write_whole(place, _COMPLETE, b"")
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


def _remove_files(folder: str) -> None:
    if os.path.lexists(folder):
        shutil.rmtree(folder, onerror=_open_and_retry)


def _open_and_retry(function: Callable[..., Any], path: str, _info: object) -> None:
    """Folders of an image that this user may not write to are still this user's."""
    parent = os.path.dirname(path)
    os.chmod(parent, stat.S_IRWXU)
    with suppress(FileNotFoundError):
        if os.path.isdir(path) and not os.path.islink(path):
            os.chmod(path, stat.S_IRWXU)
            if function is not os.rmdir:
                shutil.rmtree(path, onerror=_open_and_retry)
                return
        function(path)
