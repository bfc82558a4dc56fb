"""Servers that several files of these tests share; started when the first test asks for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration import hdfs_cluster
from tests.testing.minihdfs import MiniHdfs


@pytest.fixture(scope="session")
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MiniHdfs]:
    """A real HDFS of three DataNodes. A test leaves all servers running, as it found them."""
    directory = tmp_path_factory.mktemp("hdfs")
    with hdfs_cluster.start(directory, block_bytes=4 << 20, permissions=True) as made:
        yield made
