"""The keeper of a job's first-step caches: `python -P -m bootseer.env.setup_keeper_caches`. One a job and node.

bootrun starts it where ranks run (in their mounted environment, if there is one), gives orders on its standard
input and hears answers on its standard output, JSON lines. Orders are carried out one after the other; it ends
when there are no more and its input has ended, so that the last capture is finished after the job.

    open     python store dirs salt peers inside (an `Inside` of inside.py, or null) is_silent (the store did not
             answer a moment ago: it is not asked before ranks start)
                                        -> origin url folders: of the store, what nodes may give each other
                                        -> opened folder variables line files bytes is_cold took_s notes, or
                                           failed why
    seed                                -> seeded (the same fields); no rank of the job runs
    capture                             -> captured line files bytes took_s generation notes
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bootseer import aio, priority
from bootseer.env.caches import FirstStepCaches, Seeded
from bootseer.env.caches_key import make_key, read_node_type
from bootseer.env.caches_store import url_of
from bootseer.env.inside import inside_of
from bootseer.env.setup_keeper import MOST_LINE_BYTES, end_at_once, open_connection
from bootseer.errors import BootseerError, NoSuchPlace
from bootseer.mounts.image_shared import of_node
from bootseer.storage.near import near_folder_of
from bootseer.storage.places import check_place
from bootseer.tree.index import PACKS


class CachesKeeper:
    """See the module's docstring."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._caches: FirstStepCaches | None = None
        self._variables: dict[str, str] = {}
        self._told = 0  # notes of `_caches`
        # Its priority cannot be raised again, and ranks wait for what the other thread does.
        self._idle = ThreadPoolExecutor(1, "capture", priority.lower)

    def run(self) -> None:
        """Until the other end is closed and all is done."""
        received = b""
        try:
            while len(received) <= MOST_LINE_BYTES:
                *lines, received = received.split(b"\n")
                for line in lines:
                    self._obey(json.loads(line))
                data = self._connection.recv(1 << 16)
                if not data:
                    break
                received += data
        except ConnectionError:
            pass  # bootrun was killed
        finally:
            if self._caches is not None:
                self._caches.close()

    def _obey(self, order: dict[str, Any]) -> None:
        match order["do"]:
            case "open":
                try:
                    self._open(order)
                    self._seed("opened", is_silent=order["is_silent"], store=order["store"])
                except NoSuchPlace as error:
                    self._tell("failed", why=f"--env-store {error}", ends_job=True)
                except (BootseerError, OSError) as error:
                    self._tell("failed", why=str(error))
            case "seed":
                try:
                    self._seed("seeded")
                except NoSuchPlace as error:  # it has gone meanwhile
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
                    notes=self._notes(),
                )

    def _open(self, order: dict[str, Any]) -> None:
        inside = inside_of(order.get("inside"))
        environ = of_node(inside.environ(os.environ))
        python = order["python"]
        if "/" not in python and not inside.prefix:
            python = shutil.which(python) or python
        keyed = make_key(os.path.abspath(python), environ, order["salt"], inside)
        url, peers = order["store"], order.get("peers", "")
        self._caches = FirstStepCaches(
            keyed.key, environ, url=url, own=order["dirs"], node_type=read_node_type(), peers=peers
        )
        if url and peers and not near_folder_of(url):
            self._tell("origin", url=url_of(url, keyed.key), folders=[PACKS])

    def _seed(self, did: str, *, is_silent: bool = False, store: str = "") -> None:
        """Raises: NoSuchPlace for a store that can be nowhere."""
        assert self._caches is not None, "it is opened first"
        found: Seeded = self._caches.seed(is_silent=is_silent)
        if store and found.is_cold and not found.is_lost:
            aio.run_sync(check_place(store))
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
        """New ones."""
        assert self._caches is not None
        notes = self._caches.notes[self._told :]
        self._told = len(self._caches.notes)
        return notes

    def _tell(self, did: str, **fields: object) -> None:
        try:
            self._connection.sendall(json.dumps({"did": did, **fields}).encode("ascii") + b"\n")
        except OSError:
            pass  # bootrun has gone; what is begun is finished


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # bootrun decides when a job ends
    CachesKeeper(open_connection()).run()


if __name__ == "__main__":
    main()
    sys.stderr.flush()
    end_at_once()  # threads of libraries are not waited for
