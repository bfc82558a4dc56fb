"""Trees in registries read as any other store: the suite's files are blobs of a tree artefact, by other names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from bootseer.storage import Store
from bootseer.storage.oci.manifest import MANIFEST, TREE, TREE_INDEX, TREE_PACK, Descriptor, Manifest
from bootseer.storage.oci.store import OciStore
from bootseer.storage.protocol import Stat
from tests.testing.store_suite import MakeStore, ReadingSuite, ReadOnlySuite, pattern, read, runs
from tests.unit.bootseer.image.small_registry import SmallRegistry

REPOSITORY = "team/app"


class Files:
    """What the suite calls its files, and the registry that has them."""

    def __init__(self, small: SmallRegistry) -> None:
        self.small = small
        self.packs: dict[str, str] = {}  # name -> path in the tree
        self._head = self._blob(b"head", TREE)
        self._index = self._blob(b"index", TREE_INDEX)
        self._layers = [self._index]
        self._tag()

    def put(self, name: str, data: bytes) -> None:
        blob = self._blob(data, TREE_PACK)
        self.packs[name] = f"packs/{blob.digest.removeprefix('sha256:')}"
        self._layers.append(blob)
        self._tag()

    def _blob(self, data: bytes, media_type: str) -> Descriptor:
        return Descriptor(media_type=media_type, digest=self.small.add_blob(data), size=len(data))

    def _tag(self) -> None:
        manifest = Manifest(schema_version=2, media_type=MANIFEST, config=self._head, layers=self._layers)
        self.small.add_document(REPOSITORY, msgspec.json.encode(manifest), "v1")


class Renamed(OciStore):
    """The store, with the suite's names for what they stand for; other names as they are."""

    files: Files

    async def stat(self, path: str) -> Stat:
        return await super().stat(self.files.packs.get(path, path))

    async def read_into(
        self, path: str, offset: int, target: memoryview, *, etag: str = "", attempt: int = 0
    ) -> None:
        try:
            path_there = self.files.packs.get(path, path)
            await super().read_into(path_there, offset, target, etag=etag, attempt=attempt)
        except Exception as error:
            error.args = (f"{error} ({path})",)
            raise


class TestOci(ReadingSuite, ReadOnlySuite):
    @pytest.fixture
    def small(self) -> Iterator[SmallRegistry]:
        registry = SmallRegistry(auth="bearer")
        with registry.serve():
            yield registry

    @pytest.fixture
    def make_store(self, small: SmallRegistry, tmp_path: Path) -> MakeStore:
        files = Files(small)

        def make() -> Store:
            options: dict[str, object] = {"auth_file": str(tmp_path / "none"), "certs_folders": []}
            store = Renamed(f"oci://{small.host}/{REPOSITORY}:v1", options=options)
            store.files = files
            return store

        return make

    async def put(self, store: Store, path: str, data: bytes) -> None:
        assert isinstance(store, Renamed)
        store.files.put(path, data)
        await store.stat("tree.json")  # it looks at the tag again

    @runs()
    async def test_statistics(self, store: Store) -> None:
        """Sizes are in the manifest: asking for one costs nothing."""
        await self.put(store, "file.bin", pattern(50_000))
        before = store.statistics()
        await store.stat("file.bin")
        await read(store, "file.bin", 0, 50_000)
        await read(store, "file.bin", 100, 1000)
        after = store.statistics()
        assert after["requests"] == before["requests"] + 2
        assert after["read_bytes"] == before["read_bytes"] + 51_000
        assert after["retries"] == before["retries"]
