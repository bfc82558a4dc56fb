"""An image's files as its ranks get them: mounted, or unpacked for users who cannot mount."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.mounts.sandbox.source import MountedSource
from bootseer.mounts.tree_daemon.mount import mount_tree, unmount_tree
from bootseer.tree.builder.building import SourceContents, build
from bootseer.tree.builder.from_directory import DirectorySource
from bootseer.tree.index import Config
from tests.integration.mounted_trees import make_files, need_mounts
from tests.testing.faulty_http import FaultyHttpServer

ENV = ["PATH=/of/image", "KEPT=yes"]


class Image(DirectorySource):
    """A folder that says how it is to be run."""

    def read(self, *args: object) -> SourceContents:
        return super().read(*args)._replace(config=Config(env=ENV))  # type: ignore[arg-type]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyHttpServer]:
    for name in ("RUNTIME", "CACHE", "KEYS"):
        monkeypatch.setenv(f"BOOTSEER_{name}", f"{tmp_path}/{name.lower()}")
    files: dict[str, bytes] = {}
    source = make_files(tmp_path / "source", count=10)
    built = build(Image(str(source)), lambda digest, data: files.__setitem__(f"packs/{digest}", data), threads=1)
    files[f"index/{built.digest}"] = built.index_bytes
    with FaultyHttpServer(files) as server:
        yield server


@pytest.mark.system
def test_the_variables_of_a_mounted_image_are_those_of_its_daemon(
    server: FaultyHttpServer, tmp_path: Path
) -> None:
    """Whatever became of the cached index meanwhile, and of the store."""
    need_mounts()
    digest = next(name for name in server.files if name.startswith("index/"))[6:]
    tree = mount_tree(f"{server.url}@sha256:{digest}")
    try:
        os.rename(tmp_path / "cache", tmp_path / "gone")  # the daemon may be writing there at this moment
        server.files.clear()
        source = MountedSource(tree, 0.0)
        try:
            assert source.env == ENV
            assert os.listdir(source.folder) == os.listdir(tree.folder)
        finally:
            source.close()
    finally:
        unmount_tree(digest, force=True)
