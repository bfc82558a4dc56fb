"""The cache of one user on one node: a directory for each tree, one size limit, least recently used evicted first.

A process that uses a tree holds a shared lock, which the kernel frees when that process ends. Eviction needs the
lock exclusively, and renames the directory before it removes a file. So no process opens a tree that is partly
removed.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from typing import NamedTuple

from bootseer import cache_folder as folders
from bootseer.blocks.free_space import FULL_ERRNOS
from bootseer.blocks.presence import read_boot_id
from bootseer.blocks.tree_cache import TreeCache
from bootseer.blocks.tree_files import INDEX, LOCK, USE_BYTE, TreeFiles, open_files, size_on_disk, write_whole
from bootseer.cache_folder import Limit
from bootseer.errors import StorageError
from bootseer.linux.locks import NO_LOCK_ERRNOS, is_at, try_lock, wait_lock
from bootseer.logs import get_logger
from bootseer.storage.os_errors import map_os_errors, to_storage_error
from bootseer.tree.index import MAX_INDEX_BYTES, digest_of

_log = get_logger(__name__)

TREES = folders.TREES
GONE = ".gone-"  # directories that were renamed in order to be removed
USE_TIMEOUT_S = 10.0
ROOM_BYTES = 1 << 30  # freed at once when the disk is full
_DIGEST = re.compile(r"[0-9a-f]{64}")
_OPEN = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class CachedTree(NamedTuple):
    digest: str
    size_bytes: int  # on disk
    used_s: float  # when it was opened or closed last, since the epoch


class CollectResult(NamedTuple):
    trees: int  # evicted
    freed_bytes: int
    left_bytes: int
    limit_bytes: int


def open_cache(environ: Mapping[str, str]) -> Cache:
    """Return the cache of this user; environment variables give its place and size.

    Raises: ConfigError; StorageError when its directory cannot be made.
    """
    limit = folders.Limit()
    if text := environ.get(folders.LIMIT_VARIABLE, ""):
        limit = folders.parse_limit(text)
    return Cache(folders.locate(environ, os.geteuid()), limit=limit)


class Cache:
    """All trees of one user. Calls block for as long as the disk takes. Thread-safe.

    `boot_id`: of the running kernel; tests pass another one to simulate a power cut.
    """

    def __init__(
        self,
        folder: str,
        *,
        limit: Limit = Limit(),  # noqa: B008  (a tuple)
        boot_id: str | None = None,
    ) -> None:
        self.folder = folders.prepare(folder)
        self.limit = limit
        self._trees = os.path.join(self.folder, TREES)
        self._boot_id = read_boot_id() if boot_id is None else boot_id
        self._evicted = self._evicted_bytes = 0

    def open_tree(self, digest: str, block_count: int, *, is_guest: bool = False) -> TreeCache:
        """Open the cache of one tree; create it if absent. Without space or locks it stores nothing and logs why.

        `is_guest`: it is opened on behalf of another tree; its time of use does not change.

        Raises: StorageError when its directory cannot be used.
        """
        path = self._path(digest)
        lock = -1
        try:
            lock = self._use(path, is_guest)
            files = open_files(path, digest, block_count, self._boot_id, lock)
        except OSError as error:
            if lock >= 0:
                os.close(lock)
            has_no_locks = error.errno in NO_LOCK_ERRNOS
            if error.errno not in FULL_ERRNOS and not has_no_locks and not isinstance(error, TimeoutError):
                raise to_storage_error(error, path) from error
            reason = f"{path}: {error.strerror or error}"
            if has_no_locks:
                reason += f" (its file system has no locks: name a cache on a local disk by {folders.VARIABLE})"
            _log.info("%s: blocks are fetched as they are read, and not cached", reason)
            return TreeCache(digest, block_count, path, TreeFiles(), self._free_space, full_reason=reason)
        except BaseException:
            if lock >= 0:
                os.close(lock)
            raise
        return TreeCache(digest, block_count, path, files, self._free_space, is_guest=is_guest)

    # ---- indexes -------------------------------------------------------------------------------------------

    def read_index(self, digest: str) -> bytes | None:
        """Return the index object with this digest, or None if absent or damaged. The caller decodes it."""
        path = os.path.join(self._path(digest), INDEX)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            with open(fd, "rb") as file:
                data = file.read(MAX_INDEX_BYTES + 1)
        except OSError:
            return None
        return data if digest_of(data) == digest else None

    def write_index(self, digest: str, data: bytes) -> None:
        """Store the index object of an open tree. Without space the next start fetches it again.

        Raises: ValueError for data of another digest.
        """
        if digest_of(data) != digest:
            raise ValueError("this is the index of another tree")
        try:
            write_whole(self._path(digest), INDEX, data)
        except OSError as error:
            _log.info("%s: the index is not kept: %s", self._path(digest), error.strerror)

    # ---- space ---------------------------------------------------------------------------------------------

    def trees(self) -> list[CachedTree]:
        """Return the cached trees, the most recently used first."""
        found = []
        for name in self._names():
            if _DIGEST.fullmatch(name):
                path = os.path.join(self._trees, name)
                try:
                    used_s = os.stat(os.path.join(path, LOCK)).st_mtime
                except OSError:
                    used_s = 0.0  # no process has used it yet
                found.append(CachedTree(name, size_on_disk(path), used_s))
        return sorted(found, key=lambda tree: (-tree.used_s, tree.digest))

    def limit_bytes(self) -> int:
        """Return how much the cache may hold at this moment."""
        return self.limit_of(sum(tree.size_bytes for tree in self.trees()))

    def collect(self, max_bytes: int | None = None) -> CollectResult:
        """Evict unused trees, the least recently used first, until the rest is within the limit.

        `max_bytes`: in place of the limit; 0 evicts all unused trees.
        """
        self._remove_gone()
        trees = self.trees()
        left = sum(tree.size_bytes for tree in trees)
        limit = self.limit_of(left) if max_bytes is None else max_bytes
        count = freed = 0
        for tree in reversed(trees):
            if left <= limit and tree.size_bytes:
                continue
            if self._evict(tree.digest):
                count, freed, left = count + 1, freed + tree.size_bytes, left - tree.size_bytes
        return CollectResult(count, freed, left, limit)

    def statistics(self) -> dict[str, int]:
        """Return trees and bytes now, the limit now, and what this process has evicted."""
        trees = self.trees()
        size = sum(tree.size_bytes for tree in trees)
        return {
            "trees": len(trees),
            "bytes": size,
            "limit_bytes": self.limit_of(size),
            "evicted": self._evicted,
            "evicted_bytes": self._evicted_bytes,
        }

    def _free_space(self, is_full: bool) -> bool:
        """Make space for a tree that is being filled; return whether there is space now."""
        try:
            if not is_full:
                done = self.collect()
                return done.left_bytes <= done.limit_bytes
            held = sum(tree.size_bytes for tree in self.trees())
            return self.collect(max(0, held - ROOM_BYTES)).freed_bytes > 0
        except (StorageError, OSError) as error:
            _log.info("no space can be freed in the cache: %s", error)
            return not is_full

    def limit_of(self, held_bytes: int) -> int:
        """Return the limit of a cache that holds `held_bytes` of this file system now. Raises: StorageError."""
        with map_os_errors(self.folder):
            system = os.statvfs(self.folder)
        limit = int((system.f_bavail * system.f_frsize + held_bytes) * self.limit.share)
        return limit if self.limit.max_bytes is None else min(limit, self.limit.max_bytes)

    # ---- directories of trees --------------------------------------------------------------------------------

    def _path(self, digest: str) -> str:
        if not _DIGEST.fullmatch(digest):
            raise ValueError(f"{digest[:80]!r} is no digest")
        return os.path.join(self._trees, digest)

    def _names(self) -> list[str]:
        try:
            return os.listdir(self._trees)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise to_storage_error(error, self._trees) from error

    def _use(self, path: str, is_guest: bool) -> int:
        """Open the tree's `lock` file and hold it for use. Raises: OSError."""
        while True:
            try:
                folders.make_private_dir(path)
                fd = os.open(os.path.join(path, LOCK), _OPEN, 0o600)
            except FileNotFoundError:
                continue  # evicted between the two calls
            except FileExistsError:
                if os.path.lexists(path) and not os.path.isdir(path):
                    raise
                continue  # evicted in the meantime
            try:
                if not wait_lock(fd, USE_BYTE, timeout_s=USE_TIMEOUT_S, is_shared=True):
                    raise TimeoutError(f"another process has been evicting it for {USE_TIMEOUT_S:g} s")
                if is_at(fd, os.path.join(path, LOCK)):
                    if not is_guest:
                        os.utime(fd)
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # it was evicted during the wait

    def _evict(self, digest: str) -> bool:
        """Evict a tree if it is unused."""
        path = self._path(digest)
        aside = os.path.join(self._trees, GONE + secrets.token_hex(8))
        try:
            size = size_on_disk(path)
            fd = os.open(os.path.join(path, LOCK), _OPEN, 0o600)
            try:
                if not try_lock(fd, USE_BYTE) or not is_at(fd, os.path.join(path, LOCK)):
                    return False
                os.rename(path, aside)
            finally:
                os.close(fd)  # a process that waits for it finds another directory at the path
            _remove(aside)
        except FileNotFoundError:
            return False  # another process was faster
        except OSError as error:
            _log.info("%s: cannot be evicted: %s", path, error.strerror)
            return False
        self._evicted += 1
        self._evicted_bytes += size
        return True

    def _remove_gone(self) -> None:
        """Remove the directories that a killed process had renamed."""
        for name in self._names():
            if name.startswith(GONE):
                try:
                    _remove(os.path.join(self._trees, name))
                except OSError as error:
                    _log.info("%s: cannot be removed: %s", os.path.join(self._trees, name), error.strerror)


def _remove(path: str) -> None:
    """Remove a directory of unused files; other processes may remove it at the same time. Raises: OSError."""
    try:
        with os.scandir(path) as entries:
            names = [entry.path for entry in entries]
        for name in names:
            try:
                os.unlink(name)
            except FileNotFoundError:
                pass
        os.rmdir(path)
    except FileNotFoundError:
        pass
