"""A tree in an object store without TLS, as MinIO in a cluster is."""

from __future__ import annotations

import os
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract import servers
from tests.integration.mounted_trees import make_files
from tests.integration.test_image_commands import Commands


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Commands]:
    made = Commands(tmp_path)
    made.make_key()
    yield made
    made.close()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of moto's own dependencies, while they are imported
        with servers.serve_s3() as url:
            yield url


def test_an_object_store_without_tls(endpoint: str, image: Commands, tmp_path: Path) -> None:
    """obstore's own variables say where it is, and that plain HTTP will do."""
    image.environ |= {
        "AWS_ENDPOINT": endpoint, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
    }  # fmt: skip
    bucket = f"bucket-{os.urandom(6).hex()}"
    request = urllib.request.Request(f"{endpoint}/{bucket}", headers={"Authorization": "AWS x:x"}, method="PUT")
    urllib.request.urlopen(request, timeout=10).close()
    source = make_files(tmp_path / "source", count=5)
    built = image.ask("build", source, f"s3://{bucket}/tree")
    assert image.ask("inspect", f"s3://{bucket}/tree")["digest"] == built["digest"]
