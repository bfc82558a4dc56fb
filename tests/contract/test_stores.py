"""All stores pass one suite: tests.testing.store_suite. HDFS has its own file, with a cluster."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.storage import Store, open_store
from bootseer.storage.local.store import LocalStore
from tests.contract import servers
from tests.testing.store_suite import MakeStore, ReadingSuite, ReadOnlySuite, StoreSuite

numbers = itertools.count()


class TestLocal(StoreSuite):
    @pytest.fixture
    def make_store(self, tmp_path: Path) -> MakeStore:
        return lambda: open_store(str(tmp_path))


class TestLocalThatMayHang(StoreSuite):
    """The way of network file systems, on a disk."""

    @pytest.fixture
    def make_store(self, tmp_path: Path) -> MakeStore:
        return lambda: LocalStore(str(tmp_path), may_hang=True)


class TestMemory(StoreSuite):
    has_directories = False

    @pytest.fixture
    def make_store(self) -> MakeStore:
        name = f"memory://test{next(numbers)}/root"
        return lambda: open_store(name)


class WebSuite(ReadingSuite, ReadOnlySuite):
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        self.written = tmp_path / "root"
        self.written.mkdir()
        return self.written

    async def put(self, store: Store, path: str, data: bytes) -> None:
        servers.write_file(self.written, path, data)


class TestSmallWebServer(WebSuite):
    @pytest.fixture
    def make_store(self, folder: Path) -> Iterator[MakeStore]:
        with servers.serve_directory(folder) as url:
            yield lambda: open_store(url)


@pytest.mark.skipif(servers.NGINX is None, reason="nginx is not installed")
class TestNginx(WebSuite):
    @pytest.fixture
    def make_store(self, folder: Path, tmp_path: Path) -> Iterator[MakeStore]:
        with servers.serve_nginx(folder, tmp_path / "nginx") as url:
            yield lambda: open_store(url)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of moto's own dependencies, while they are imported
        with servers.serve_s3() as url:
            yield url


class TestS3(StoreSuite):
    has_directories = False

    @pytest.fixture
    def make_store(self, endpoint: str) -> MakeStore:
        import boto3

        config = {
            "access_key_id": "test",
            "secret_access_key": "test",
            "region": "us-east-1",
            "endpoint": endpoint,
        }
        bucket = f"bucket{next(numbers)}"
        boto3.client(
            "s3", endpoint_url=endpoint, aws_access_key_id="x", aws_secret_access_key="x", region_name="us-east-1"
        ).create_bucket(Bucket=bucket)
        options = {"config": config, "client_options": {"allow_http": True}}
        return lambda: open_store(f"s3://{bucket}/some/root", options=options)


class TestFsspec(StoreSuite):
    """A file system without a loop of its own, whose files appear by a rename."""

    @pytest.fixture
    def make_store(self, tmp_path: Path) -> MakeStore:
        from bootseer.storage.fsspec.store import FsspecStore

        return lambda: FsspecStore(f"file://{tmp_path}")


class TestAsyncFsspec(StoreSuite):
    """One with a loop of its own, whose files appear in one step."""

    @pytest.fixture
    def make_store(self, tmp_path: Path) -> MakeStore:
        import fsspec

        from bootseer.storage.fsspec.store import FsspecStore
        from tests.contract.async_files import AsyncFiles

        fsspec.register_implementation("asyncfiles", AsyncFiles, clobber=True)
        return lambda: FsspecStore(f"asyncfiles://{tmp_path}")
