"""Object stores: uploads that are dropped, conditions, and servers that fail."""

from __future__ import annotations

import asyncio
import http.server
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from bootseer.errors import (
    BootseerError,
    ConfigError,
    PermissionDenied,
    StorageError,
    StorageTimeout,
    Truncated,
    Unavailable,
)
from bootseer.storage import open_store
from bootseer.storage.fsspec.objects import ObjectStore
from bootseer.tuning import DEFAULTS
from tests.contract import servers
from tests.support import find_free_port, wait_until
from tests.testing.store_suite import pattern, read, runs

KEYS = {"access_key_id": "test", "secret_access_key": "hunter2", "region": "us-east-1"}


def options(endpoint: str) -> dict[str, object]:
    return {"config": {**KEYS, "endpoint": endpoint}, "client_options": {"allow_http": True}}


@pytest.fixture(scope="module")
def client() -> Iterator[tuple[Any, str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import boto3

        with servers.serve_s3() as endpoint:
            client = boto3.client(
                "s3",
                endpoint_url=endpoint,
                aws_access_key_id="x",
                aws_secret_access_key="x",
                region_name="us-east-1",
            )
            client.create_bucket(Bucket="bucket")
            yield client, endpoint


@runs()
async def test_a_dropped_upload_leaves_no_parts(client: tuple[Any, str]) -> None:
    boto, endpoint = client
    store = open_store("s3://bucket/uploads", options=options(endpoint))
    with pytest.raises(ZeroDivisionError):
        async with store.create("file.bin") as writer:
            await writer.write(bytes(2 * DEFAULTS.storage.upload_part_bytes))
            await writer.write(bytes(DEFAULTS.storage.upload_part_bytes))
            await asyncio.to_thread(
                wait_until, lambda: boto.list_multipart_uploads(Bucket="bucket").get("Uploads"), 10.0
            )
            raise ZeroDivisionError
    assert "Uploads" not in boto.list_multipart_uploads(Bucket="bucket")
    assert boto.list_objects_v2(Bucket="bucket", Prefix="uploads/").get("KeyCount") == 0


@runs()
async def test_keys_are_the_paths(client: tuple[Any, str]) -> None:
    boto, endpoint = client
    store = open_store("s3://bucket/a%20prefix/", options=options(endpoint))
    await store.publish("100% ü/a b.bin", b"abc")
    keys = [found["Key"] for found in boto.list_objects_v2(Bucket="bucket", Prefix="a prefix/")["Contents"]]
    assert keys == ["a prefix/100% ü/a b.bin"]
    boto.put_object(Bucket="bucket", Key="a prefix/marked/", Body=b"")  # as consoles make folders
    boto.put_object(Bucket="bucket", Key="a prefix/marked/file.bin", Body=b"abcd")
    assert [(entry.name, entry.size) for entry in await store.list("marked")] == [("file.bin", 4)]


class Failing(http.server.BaseHTTPRequestHandler):
    """Answers everything by one status, or not at all."""

    protocol_version = "HTTP/1.1"
    status = 500
    code = "InternalError"

    def do_GET(self) -> None:
        if self.status == 0:
            self.connection.recv(1)  # until the client is gone
            self.close_connection = True
            return
        body = b"" if self.command == "HEAD" else f"<Error><Code>{self.code}</Code></Error>".encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.do_GET()

    def log_message(self, *args: object) -> None:
        """Tests are quiet."""


def test_a_port_is_no_status() -> None:
    """416 in an address was once taken for a range past the end."""
    store = ObjectStore("s3://bucket/x", options=options("http://127.0.0.1:41634"))
    text = "Generic S3 error: Error performing GET http://127.0.0.1:41634/bucket/x/f in 1ms - Server returned {}"
    found = [
        type(store._map_error(store._obstore.exceptions.GenericError(text.format(said)), "file.bin"))
        for said in ("non-2xx status code: 400 Bad Request", "non-2xx status code: 416 Range Not Satisfiable", "?")
    ]
    assert found == [StorageError, Truncated, Unavailable]


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (403, "AccessDenied", PermissionDenied),
        (401, "Unauthorized", PermissionDenied),
        (400, "InvalidRequest", StorageError),
        (500, "InternalError", Unavailable),
        (503, "SlowDown", Unavailable),
        (0, "", StorageTimeout),
    ],
)
@runs(limit_s=40.0)
async def test_servers_that_fail(status: int, code: str, error: type[BootseerError]) -> None:
    with servers.serve(type("Handler", (Failing,), {"status": status, "code": code})) as endpoint:
        store = ObjectStore("s3://bucket/x", timeout_s=1.0, options=options(endpoint))
        started_s = time.monotonic()
        for call in (
            store.stat("file.bin"),
            read(store, "file.bin", 0, 10),
            store.publish("file.bin", b"x"),
            store.publish("file.bin", b"x", if_absent=True),
        ):
            with pytest.raises(BootseerError) as caught:
                await call
            assert type(caught.value) is error, caught.value
            assert "file.bin" in str(caught.value)
            assert "hunter2" not in str(caught.value)
            assert "\n" not in str(caught.value)
        assert time.monotonic() - started_s < 20.0


@runs(limit_s=40.0)
async def test_no_server() -> None:
    store = ObjectStore("s3://bucket/x", timeout_s=2.0, options=options(f"http://127.0.0.1:{find_free_port()}"))
    with pytest.raises(Unavailable):
        await read(store, "file.bin", 0, 10)


def test_a_stream_that_breaks_off() -> None:
    data = pattern(3 << 20)

    class Breaking(Failing):
        def do_GET(self) -> None:
            self.send_response(206)
            self.send_header("ETag", '"abc"')
            self.send_header("Last-Modified", "Sat, 21 Nov 2026 10:00:00 GMT")
            self.send_header("Content-Range", f"bytes 0-{len(data) - 1}/{len(data)}")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: 2 << 20])
            self.wfile.flush()
            self.connection.recv(1)
            self.close_connection = True

    async def main(endpoint: str) -> None:
        store = ObjectStore("s3://bucket/x", timeout_s=1.0, options=options(endpoint))
        target = memoryview(bytearray(len(data)))
        with pytest.raises(Unavailable) as caught:
            await store.read_into("file.bin", 0, target)
        assert caught.value.read_bytes > 0
        assert target[: caught.value.read_bytes] == data[: caught.value.read_bytes]

    with servers.serve(Breaking) as endpoint:
        asyncio.run(main(endpoint))


def test_what_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ({"nonsense": 1}, {"config": {"nonsense": 1}}, {"client_options": 5}):
        with pytest.raises(ConfigError):
            ObjectStore("s3://bucket/x", options=wrong)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match="pip install"):
        ObjectStore("s3://bucket/x")
