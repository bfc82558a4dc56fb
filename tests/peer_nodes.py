"""Nodes of a job that help each other: real servers at ports of the loopback, in a thread of this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from bootseer.peers import JobPeers, Node, Origin, PeerStore, open_peer_store, write_peers
from bootseer.peers.auth import derive_key, origin_id
from bootseer.peers.membership import PeersFile
from bootseer.peers.serve import listen
from bootseer.peers.spans import ObjectName, owners
from bootseer.peers.spool import Spool
from tests.testing.faulty_peer import FaultyPeer, PeerFault

KEY = derive_key(b"the secret of this job", "run-1")
SPOOL_BYTES = 256 << 20
LOOK_S = 0.02
END_S = 10.0


class PeerNode:
    """One node: its server, and where its readers find the file of the job's peers."""

    def __init__(self, folder: Path, name: str, spool_bytes: int, upload_bytes_per_s: float | None) -> None:
        self.id = name
        here = folder / name
        here.mkdir(mode=0o700, parents=True)
        self.path = str(here / "peers.json")
        self.listener = listen("127.0.0.1", 0)
        self.port: int = self.listener.getsockname()[1]
        self.spool = Spool(str(here / "spool"), spool_bytes)
        self.server = FaultyPeer(
            self.listener,
            PeersFile(self.path, look_s=LOOK_S),
            self.spool,
            upload_bytes_per_s=upload_bytes_per_s,
        )
        self.task: asyncio.Task[None] | None = None

    @property
    def node(self) -> Node:
        return Node(self.id, "127.0.0.1", self.port)


class PeerNodes:
    """A job of `count` nodes whose readers read `url`. `with PeerNodes(...) as nodes:`"""

    def __init__(
        self,
        folder: Path,
        url: str,
        count: int = 3,
        *,
        key: bytes = KEY,
        below: Sequence[str] = (),
        spool_bytes: int = SPOOL_BYTES,
        upload_bytes_per_s: float | None = None,
        job: str = "run-1",
    ) -> None:
        self.url, self.key, self._below, self._job = url, key, list(below), job
        self.all = [
            PeerNode(folder / job, f"node{number}", spool_bytes, upload_bytes_per_s) for number in range(count)
        ]
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name=f"peers of {job}")

    def __enter__(self) -> PeerNodes:
        self.write()
        self._thread.start()
        assert self._ready.wait(END_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._is_over.set)
        self._thread.join(END_S)
        assert not self._thread.is_alive()
        for each in self.all:
            each.listener.close()
            each.spool.close()

    def __getitem__(self, number: int) -> PeerNode:
        return self.all[number]

    @property
    def origin(self) -> str:
        """The id of the store."""
        return origin_id(self.key, self.url)

    def peers(self, own: str, members: Sequence[PeerNode] | None = None, **other: Any) -> JobPeers:
        values: dict[str, Any] = {
            "job": self._job,
            "own": own,
            "key": self.key.hex(),
            "nodes": [each.node for each in members or self.all],
            "origins": [Origin(url=self.url, below=self._below)],
            **other,
        }
        return JobPeers(**values)

    def write(self, members: Sequence[PeerNode] | None = None) -> None:
        """Tells all of these (by default all) of each other."""
        for each in members or self.all:
            write_peers(each.path, self.peers(each.id, members))

    def store(self, number: int, **options: Any) -> PeerStore:
        """As a reader on that node opens it."""
        store = open_peer_store(self.url, self.all[number].path, **options)
        assert isinstance(store, PeerStore)
        return store

    def owner(self, path: str, span: int = 0, place: int = 0) -> PeerNode:
        """Who brings a span of a file."""
        ids = owners([each.id for each in self.all], ObjectName(self.origin, path), span, place + 1)
        return next(each for each in self.all if each.id == ids[place])

    def set_fault(self, number: int, fault: PeerFault) -> None:
        self.all[number].server.fault = fault

    def stop(self, each: PeerNode) -> None:
        """Its server ends; connections to it are refused."""
        ended = threading.Event()

        def stop() -> None:
            assert each.task is not None
            each.task.add_done_callback(lambda _: ended.set())
            each.task.cancel()

        self._loop.call_soon_threadsafe(stop)
        assert ended.wait(END_S)
        each.listener.close()

    def held(self) -> int:
        """Spans that somebody serves or fills now, and connections."""
        return sum(kept.sandboxes for each in self.all for kept in list(each.spool._kept.values()))

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for each in self.all:
                each.task = group.create_task(each.server.serve())
            self._ready.set()
            await self._is_over.wait()
            for each in self.all:
                assert each.task is not None
                each.task.cancel()
