"""The compile-cache service of a job: `python -P -m bootseer.env.compile_cache.service`. One per job and node.

bootrun starts it where ranks run (in their mounted environment, if any). It sends orders on the standard input and
receives answers on the standard output, as JSON lines. Orders are processed in turn. The service ends after the
last order when its input is closed, so that the last capture is completed after the job.

    open     python store dirs salt peers inside (an `ExecPlace` of exec_place.py, or null) is_silent (the store
    did not
             answer a moment ago: it is not queried before ranks start)
                                        -> origin url folders: of the store, that nodes may share
                                        -> opened folder variables line files bytes is_cold took_s notes, or
                                           failed why
    seed                                -> seeded (the same fields); no rank of the job runs
    capture                             -> captured line files bytes took_s generation notes
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

from bootseer.env.compile_cache.key import make_key, read_node_type
from bootseer.env.connection import MAX_LINE_BYTES, end_at_once
from bootseer.env.exec_place import inside_of
from bootseer.errors import BootseerError, NoSuchLocation
from bootseer.ipc.channel import Channel
from bootseer.mounts.sandbox.shared import of_node

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from bootseer.env.compile_cache.caches import FirstStepCaches

_CACHES = "bootseer.env.compile_cache.caches"  # with the modules of stores: half of what this process imports


class CompileCacheService:
    """The compile-cache service; see the module's docstring."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._caches: FirstStepCaches | None = None
        self._variables: dict[str, str] = {}
        self._reported = 0  # count of reported notes of `_caches`

    @cached_property
    def _idle(self) -> ThreadPoolExecutor:
        """A thread for captures: its priority cannot be raised again, and ranks wait for the main thread."""
        from concurrent.futures import ThreadPoolExecutor

        from bootseer.linux import priority

        return ThreadPoolExecutor(1, "capture", priority.lower)

    def run(self) -> None:
        """Process orders until the connection is closed and all are done."""
        try:
            while (order := self._channel.receive()) is not None:
                self._process(order)
        finally:
            if self._caches is not None:
                self._caches.close()

    def _process(self, order: dict[str, Any]) -> None:
        match order["do"]:
            case "open":
                try:
                    self._open(order)
                    self._seed("opened", is_silent=order["is_silent"], store=order["store"])
                except NoSuchLocation as error:
                    self._tell("failed", why=f"--env-store {error}", ends_job=True)
                except (BootseerError, OSError) as error:
                    self._tell("failed", why=str(error))
            case "seed":
                try:
                    self._seed("seeded")
                except NoSuchLocation as error:  # removed meanwhile
                    self._tell("failed", why=str(error))
            case "capture" if self._caches is not None:
                done = self._idle.submit(self._caches.capture).result()
                self._tell(
                    "captured",
                    line=done.line,
                    files=done.files,
                    bytes=done.size,
                    took_s=done.took_s,
                    generation=done.generation,
                    has_failed=done.has_failed,
                    notes=self._notes(),
                )

    def _open(self, order: dict[str, Any]) -> None:
        inside = inside_of(order.get("inside"))
        environ = of_node(inside.environ(os.environ))
        python = order["python"]
        if "/" not in python and not inside.prefix:
            python = shutil.which(python) or python
        importing = threading.Thread(target=import_module, args=[_CACHES])
        importing.start()  # while programs report their versions
        try:
            keyed = make_key(os.path.abspath(python), environ, order["salt"], inside)
        finally:
            importing.join()
        from bootseer.env.compile_cache.caches import FirstStepCaches

        url, peers = order["store"], order.get("peers", "")
        self._caches = FirstStepCaches(
            keyed.key, environ, url=url, own=order["dirs"], node_type=read_node_type(), peers=peers
        )
        if url and peers:
            self._tell_origin(url, keyed.key)

    def _tell_origin(self, url: str, key: str) -> None:
        from bootseer.env.compile_cache.store import caches_url
        from bootseer.storage.local_stores import local_disk_directory_of
        from bootseer.tree.index import PACKS

        if not local_disk_directory_of(url):
            self._tell("origin", url=caches_url(url, key), folders=[PACKS])

    def _seed(self, did: str, *, is_silent: bool = False, store: str = "") -> None:
        """Seed the caches. Raises: NoSuchLocation for a store that cannot exist."""
        assert self._caches is not None, "open comes first"
        found = self._caches.seed(is_silent=is_silent)
        if store and found.is_cold and not found.is_lost:
            from bootseer import aio
            from bootseer.storage.places import check_url

            aio.run_sync(check_url(store))
        self._variables = self._caches.variables
        self._tell(
            did,
            folder=self._caches.path,
            variables=self._variables,
            line=found.line,
            files=found.files,
            bytes=found.size,
            is_cold=found.is_cold,
            is_lost=found.is_lost,
            took_s=found.took_s,
            notes=self._notes(),
        )

    def _notes(self) -> list[str]:
        assert self._caches is not None
        notes = self._caches.notes[self._reported :]
        self._reported = len(self._caches.notes)
        return notes

    def _tell(self, did: str, **fields: object) -> None:
        self._channel.send({"did": did, **fields})  # if bootrun has ended, what is begun is finished


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # bootrun decides when a job ends
    CompileCacheService(Channel.of_standard_input(max_bytes=MAX_LINE_BYTES)).run()


if __name__ == "__main__":
    main()
    sys.stderr.flush()
    end_at_once()  # without waiting for threads of libraries
