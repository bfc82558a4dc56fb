"""Which store a URL gets, and what is its folder and name."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.errors import ConfigError
from bootseer.storage import open_at, open_store
from bootseer.storage.open import split_url


@pytest.mark.parametrize(
    ("url", "kind", "shown"),
    [
        ("/data/ckpt/", "LocalStore", "file:///data/ckpt"),
        ("/data/a%20b", "LocalStore", "file:///data/a%2520b"),
        ("file:///data/a%20b", "LocalStore", "file:///data/a%20b"),
        ("file://localhost/data", "LocalStore", "file:///data"),
        ("FILE:///data", "LocalStore", "file:///data"),
        ("/data/a::b", "LocalStore", "file:///data/a%3A%3Ab"),
        ("/", "LocalStore", "file:///"),
        ("memory://test-open/a%20b/c", "MemoryStore", "memory://test-open/a%20b/c"),
        ("http://host/a/b/?sig=x", "HttpStore", "http://host/a/b?sig=***"),
        ("https://user:word@host", "HttpStore", "https://user:***@host"),
        ("http://[::1]:8080/a", "HttpStore", "http://[::1]:8080/a"),
        ("ftp://user:word@host/a", "FsspecStore", "ftp://user:***@host/a"),
        ("zip://in::file:///a.zip", "FsspecStore", "zip://in::file:///a.zip"),
    ],
)
def test_stores(url: str, kind: str, shown: str) -> None:
    store = open_store(url)
    assert type(store).__name__ == kind
    assert store.url == shown
    asyncio.run(store.aclose())


@pytest.mark.parametrize(
    ("url", "folder", "name"),
    [
        ("/data/model.bin", "/data", "model.bin"),
        ("/data/a%20b.bin", "/data", "a%20b.bin"),
        ("/data/folder/", "/data", "folder"),
        ("model.bin", os.getcwd(), "model.bin"),
        ("/model.bin", "/", "model.bin"),
        ("file:///data/a%20b.bin", "file:///data", "a b.bin"),
        ("file:///model.bin", "file:///", "model.bin"),
        ("memory://place/model.bin", "memory://place", "model.bin"),
        ("http://host/a/b%20c.bin?sig=x%2F#part", "http://host/a?sig=x%2F", "b c.bin"),
        ("http://host/model.bin", "http://host", "model.bin"),
        ("s3://bucket/a/b.bin", "s3://bucket/a", "b.bin"),
        ("s3://bucket/b%20c", "s3://bucket", "b c"),
        ("hdfs://name:9000/user/a%20b", "hdfs://name:9000/user", "a%20b"),
        ("hdfs://name:9000/top", "hdfs://name:9000", "top"),
        ("sftp://host/a/b%20c", "sftp://host/a", "b%20c"),
        ("zip://in/a.bin::file:///x.zip", "zip://in::file:///x.zip", "a.bin"),
    ],
)
def test_directories_and_names(url: str, folder: str, name: str) -> None:
    assert split_url(url) == (folder, name)


@pytest.mark.parametrize(
    "url",
    [
        *(
            "http://host",
            "http://host/",
            "http://host/?sig=x",
            "s3://bucket",
            "s3://bucket/",
            "memory://place",
            "/",
        ),
        *("file:///", "hdfs://name:9000", "hdfs://name:9000/", "simplecache::s3://bucket/x"),
    ],
)
def test_roots_have_no_directory(url: str) -> None:
    with pytest.raises(ConfigError):
        split_url(url)


def test_open_at(tmp_path: Path) -> None:
    (tmp_path / "a b%20.bin").write_bytes(b"abc")
    for url in (str(tmp_path / "a b%20.bin"), f"file://{tmp_path}/a%20b%2520.bin"):
        store, name = open_at(url)
        assert asyncio.run(store.stat(name)).size == 3


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("", {}),
        ("a\0b", {}),
        ("file://other-host/data", {}),
        ("/data", {"nonsense": 1}),
        ("memory://place", {"nonsense": 1}),
        ("http://host/", {"nonsense": 1}),
        ("s3://bucket/", {"nonsense": 1}),
        ("s3://bucket/a?b=c", {}),
    ],
)
def test_what_cannot_be(url: str, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        open_store(url, options=options)


def test_timeouts_are_more_than_zero(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="timeout"):
        open_store(str(tmp_path), timeout_s=0)


def test_importing_costs_nothing() -> None:
    script = """
import sys
before = set(sys.modules)
import bootseer.storage
bootseer.storage.open_store
new = set(sys.modules) - before
bad = {"asyncio", "fsspec", "obstore", "http.client", "ssl", "ctypes", "torch", "numpy", "threading"} & new
assert not bad, bad
bootseer.storage.open_store("/tmp")
assert not {"fsspec", "obstore", "http.client", "torch", "numpy"} & set(sys.modules)
try:
    bootseer.storage.nonsense
except AttributeError:
    print("good")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("good\n", "")
