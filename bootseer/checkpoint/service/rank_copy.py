"""A version as plain files on this node's disk, for one attempt's ranks: `RankCopy` is the service's side.

This is the last method to provide files by name, if neither links into memory nor a mount is possible. A process
that the service forks writes them into a directory that is removed with the service; the next service removes
those of a killed one.

    out     alive bytes of_bytes ... then copied | failed kind
"""

from __future__ import annotations

import asyncio
import os
import selectors
import shutil
import socket
import tempfile
from collections.abc import Callable
from typing import Any

from bootseer import aio, cache_folder
from bootseer.checkpoint.convert import unstripe_version
from bootseer.checkpoint.io.capacity import RESERVE, format_bytes
from bootseer.checkpoint.opening import store_at
from bootseer.checkpoint.service.disk_copy import is_free
from bootseer.checkpoint.service.filler import REFUSED, kind_of, open_store_for
from bootseer.checkpoint.service.process import WRITER_DIED, Child, Fork, end_child, make_directory, run_child
from bootseer.checkpoint.versions.resolve import pin
from bootseer.errors import BootseerError, CheckpointError
from bootseer.ipc.framing import encode
from bootseer.linux.cgroups import read_memory
from bootseer.linux.page_cache import is_in_memory
from bootseer.storage.local.store import LocalStore

ALIVE_S = 1.0
TRIES = 3  # of all of it; the store retries by itself, too
Then = Callable[[str, str, str], object]  # directory ("": none), why, kind (filler.py)


class RankCopy:
    """Starts and ends the copy; runs on the service's loop."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        fork: Fork,
        own_directory: str,
        then: Then,
        progress: Callable[[int, int], object],
    ) -> None:
        """Args: own_folder: the service's directory; then: called once."""
        self._selector = selector
        self._fork = fork
        self._own_directory = own_directory
        self._then: Then | None = then
        self._progress = progress
        self._child: Child | None = None
        self._directory = ""
        self._lock_fd = -1  # of a directory outside the service's

    def start(self, url: str, version: str, digest: str, size: int, peers: str) -> None:
        """Start the copy. Raises: OSError; CheckpointError if there is no room."""
        place = choose_place(self._own_directory, size)
        if place == self._own_directory:
            self._directory = tempfile.mkdtemp(prefix="copy-", dir=place)
        else:
            self._directory, self._lock_fd = make_directory(place)
        directory = self._directory
        self._child = self._fork(lambda connection: run_copy(connection, url, version, digest, directory, peers))
        self._selector.register(self._child.lines.fd, selectors.EVENT_READ, self._hear)

    def end(self) -> None:
        """Remove the files, which no rank uses any more."""
        self._then = None
        self._end_child()
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = ""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            end_child(child, self._selector, may_leave=True)

    def _hear(self) -> None:
        assert self._child is not None
        lines = self._child.lines.receive_ready()
        if lines is None:
            lines = [{"failed": WRITER_DIED, "kind": REFUSED}]
        for news in lines:
            if "bytes" in news:
                self._progress(int(news["bytes"]), int(news["of_bytes"]))
                continue
            self._end_child()
            then, self._then = self._then, None
            if "copied" not in news:
                self.end()
            if then is not None:
                then(self._directory, str(news.get("failed") or ""), str(news.get("kind") or REFUSED))
            return


def choose_place(own_directory: str, size: int) -> str:
    """Return a directory with room for `size` bytes: the service's own, otherwise this user's cache.

    Raises: CheckpointError.
    """
    tried = []
    for place in (own_directory, _cache()):
        if place and _has_room(place, size):
            return place
        tried += [os.path.dirname(place) if place == own_directory else place] if place else []
    raise CheckpointError(
        f"no disk of this node has room for its {format_bytes(size)} ({', '.join(tried)}); set TMPDIR or"
        f" {cache_folder.VARIABLE} to another directory"
    )


def _cache() -> str:
    try:
        return cache_folder.prepare(cache_folder.locate(os.environ, os.geteuid()))
    except BootseerError:
        return ""


def _has_room(place: str, size: int) -> bool:
    try:
        if not is_free(place, size):
            return False
    except OSError:
        return False
    free = read_memory().free_bytes
    return not is_in_memory(place) or size <= free - free // RESERVE


# ---- the process ---------------------------------------------------------------------------------------------


def run_copy(connection: socket.socket, url: str, version: str, digest: str, directory: str, peers: str) -> None:
    """Write the files below `directory`, report the outcome, and end the process."""
    done = size = 0

    def note(count: int) -> None:
        nonlocal done
        done += count

    async def write(_attempt: int) -> None:
        nonlocal done, size
        store, path = store_at(url)
        try:
            pinned = await pin(store, path, version, digest)
        finally:
            await store.aclose()
        done, size = 0, pinned.size
        source = open_store_for(url, pinned, peers)
        try:
            await unstripe_version(source, pinned, LocalStore(directory), "", progress=note)
        finally:
            await source.aclose()

    async def give_signs() -> None:
        while True:
            await asyncio.sleep(ALIVE_S)
            connection.sendall(encode({"bytes": done, "of_bytes": size}))

    async def work() -> dict[str, Any]:
        signs = asyncio.create_task(give_signs())
        try:
            await aio.retry(aio.RetryPolicy(tries=TRIES, base_s=1.0), write)
        except BootseerError as error:
            return {"failed": str(error), "kind": kind_of(error)}
        finally:
            signs.cancel()
        return {"copied": True}

    run_child(connection, work)
