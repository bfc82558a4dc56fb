"""A store that is read through two peers passes the suite of all stores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.errors import NotFound, SourceChanged
from bootseer.storage import SecondHand, Store
from tests.contract import servers
from tests.peer_nodes import PeerNodes
from tests.testing.store_suite import MakeStore, ReadingSuite, ReadOnlySuite, pattern, read, runs


class TestPeerStore(ReadingSuite, ReadOnlySuite):
    @pytest.fixture
    def make_store(self, tmp_path: Path) -> Iterator[MakeStore]:
        self.written = tmp_path / "root"
        self.written.mkdir()
        with servers.serve_directory(self.written) as url, PeerNodes(tmp_path, url, 2) as nodes:
            self.nodes = nodes
            yield lambda: nodes.store(0)

    async def put(self, store: Store, path: str, data: bytes) -> None:
        servers.write_file(self.written, path, data)

    @runs()
    async def test_a_version_is_never_taken_for_another(self, store: Store) -> None:
        """The one difference: peers may still have a version that is gone from the store."""
        first, second = pattern(200_000, seed=1), pattern(200_000, seed=2)
        await self.put(store, "file.bin", first)
        before = (await store.stat("file.bin")).etag
        assert await read(store, "file.bin", 10, 100_000, etag=before) == first[10:100_010]
        await self.put(store, "file.bin", second)
        assert await read(store, "file.bin", 10, 100_000, etag=before) == first[10:100_010]
        for offset, length in ((150_000, 10), (0, 200_000)):  # of which peers have not got all
            with pytest.raises(SourceChanged):
                await read(store, "file.bin", offset, length, etag=before)
        now = (await store.stat("file.bin")).etag
        assert await read(store, "file.bin", 0, 200_000, etag=now) == second

    @runs()
    async def test_peers_were_asked(self, store: Store) -> None:
        """Else the suite would say nothing of them."""
        data = pattern(9 << 20)
        await self.put(store, "file.bin", data)
        assert await read(store, "file.bin", 1, len(data) - 1) == data[1:]
        found = store.statistics()
        assert (found["peer_bytes"], found["store_bytes"]) == (len(data) - 1, 0)
        assert isinstance(store, SecondHand)
        with pytest.raises(NotFound):
            await read(store, "missing", 0, 1)
        assert await read(store, "file.bin", 1, 10, attempt=1) == data[1:11]
        assert store.statistics()["store_bytes"] == 10
