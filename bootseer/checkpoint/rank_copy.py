"""A version as plain files on this node's disk, for one attempt's ranks: `RankCopy` is the keeper's side.

The last way to files that open, where neither links into memory nor a mount can be. A process that the keeper
forks writes them into a folder that goes with the keeper; what a killed one leaves the next one takes away.

    out     alive bytes of_bytes ... then copied | failed kind
"""

from __future__ import annotations

import asyncio
import json
import os
import selectors
import shutil
import socket
import tempfile
from collections.abc import Callable
from typing import Any

from bootseer import aio, cache_folder
from bootseer.checkpoint.capacity import RESERVE, format_bytes
from bootseer.checkpoint.convert import unstripe_version
from bootseer.checkpoint.disk_copy import is_free
from bootseer.checkpoint.filler import REFUSED, kind_of, open_store_for
from bootseer.checkpoint.keeper_process import Child, end_child, make_folder, run_child
from bootseer.checkpoint.opening import store_at
from bootseer.checkpoint.versions import pin
from bootseer.errors import BootseerError, CheckpointError
from bootseer.storage.local import LocalStore
from bootseer.storage.memory_limits import read_memory
from bootseer.storage.page_cache import is_in_memory

ALIVE_S = 1.0
TRIES = 3  # of all of it; the store tries again by itself, too
Fork = Callable[[Callable[[socket.socket], None]], Child]
Then = Callable[[str, str, str], object]  # folder ("": there is none), why, kind (filler.py)


class RankCopy:
    """Runs on the keeper's loop."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        fork: Fork,
        own_folder: str,
        then: Then,
        progress: Callable[[int, int], object],
    ) -> None:
        """Args: own_folder: the keeper's; then: is called once."""
        self._selector = selector
        self._fork = fork
        self._own_folder = own_folder
        self._then: Then | None = then
        self._progress = progress
        self._child: Child | None = None
        self._folder = ""
        self._lock_fd = -1  # of a folder outside the keeper's

    def start(self, url: str, version: str, digest: str, size: int, peers: str) -> None:
        """Raises: OSError; CheckpointError for no room."""
        place = choose_place(self._own_folder, size)
        if place == self._own_folder:
            self._folder = tempfile.mkdtemp(prefix="copy-", dir=place)
        else:
            self._folder, self._lock_fd = make_folder(place)
        folder = self._folder
        self._child = self._fork(lambda connection: run_copy(connection, url, version, digest, folder, peers))
        self._selector.register(self._child.lines.fd, selectors.EVENT_READ, self._hear)

    def close_inherited(self) -> None:
        """In a forked child: the connection is the keeper's."""
        if self._child is not None:
            self._child.lines.close()

    def end(self) -> None:
        """Nobody uses the files any more."""
        self._then = None
        self._end_child()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = ""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            end_child(child, self._selector)

    def _hear(self) -> None:
        assert self._child is not None
        lines = self._child.lines.receive()
        if lines is None:
            lines = [{"failed": "the process that writes it to this node's disk has died", "kind": REFUSED}]
        for news in lines:
            if "bytes" in news:
                self._progress(int(news["bytes"]), int(news["of_bytes"]))
                continue
            self._end_child()
            then, self._then = self._then, None
            if "copied" not in news:
                self.end()
            if then is not None:
                then(self._folder, str(news.get("failed") or ""), str(news.get("kind") or REFUSED))
            return


def choose_place(own_folder: str, size: int) -> str:
    """Where there is room for so much: the keeper's own folder, else the cache of this user.

    Raises: CheckpointError.
    """
    tried = []
    for place in (own_folder, _cache()):
        if place and _has_room(place, size):
            return place
        tried += [os.path.dirname(place) if place == own_folder else place] if place else []
    raise CheckpointError(
        f"no disk of this node has room for its {format_bytes(size)} ({', '.join(tried)}): TMPDIR and"
        f" {cache_folder.VARIABLE} name others"
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


def run_copy(connection: socket.socket, url: str, version: str, digest: str, folder: str, peers: str) -> None:
    """Writes the files below `folder`, tells what came of it, and ends the process."""
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
            await unstripe_version(source, pinned, LocalStore(folder), "", progress=note)
        finally:
            await source.aclose()

    async def give_signs() -> None:
        while True:
            await asyncio.sleep(ALIVE_S)
            connection.sendall(json.dumps({"bytes": done, "of_bytes": size}).encode() + b"\n")

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
