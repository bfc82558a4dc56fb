"""What the errors of hdfs-native and of WebHDFS servers mean, and servers that are none of HDFS."""

from __future__ import annotations

import http.server
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bootseer.errors import (
    AlreadyExists,
    BootseerError,
    ConfigError,
    NotFound,
    PermissionDenied,
    StorageError,
    StorageTimeout,
    Truncated,
    Unavailable,
)
from bootseer.storage.engine.cancelling import CancelHandle
from bootseer.storage.engine.revocable_buffer import RevocableBuffer
from bootseer.storage.hdfs.arrow import why_not
from bootseer.storage.hdfs.native import map_error
from bootseer.storage.hdfs.store import HdfsStore
from bootseer.storage.hdfs.webhdfs_client import WebHdfsClient


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (FileNotFoundError("/x\\n\\tat org.apache"), NotFound, "no such file"),
        (FileExistsError("/x"), AlreadyExists, "already exists"),
        (PermissionError("no"), PermissionDenied, "no"),
        (
            RuntimeError('RPCError("o.a.h.security.AccessControlException", "Permission denied")'),
            PermissionDenied,
            "denied",
        ),
        (RuntimeError('RPCError("org.apache.hadoop.ipc.StandbyException", "x")'), Unavailable, "Standby"),
        (RuntimeError('RPCError("o.a.h.hdfs.server.namenode.SafeModeException", "x")'), Unavailable, "SafeMode"),
        (RuntimeError('RPCError("java.lang.Whatever", "bad")'), StorageError, "Whatever"),
        (RuntimeError('InvalidArgument("No NameNode hosts found")'), ConfigError, "No NameNode"),
        (RuntimeError('DataTransferError("All DataNodes failed: [Data")'), Unavailable, "unreachable or damaged"),
        (OSError("Connection refused"), Unavailable, "refused"),
        (BaseException("panicked"), Unavailable, "panicked"),
        (BaseException(), Unavailable, "BaseException"),
    ],
)
def test_errors_of_hdfs_native(error: BaseException, kind: type[BootseerError], words: str) -> None:
    found = map_error(error, "hdfs://nn/x")
    assert type(found) is kind
    assert words in str(found)
    assert str(found).startswith("hdfs://nn/x: ")
    assert "\n" not in str(found)


@contextmanager
def server(status: int, body: bytes, **headers: str) -> Iterator[WebHdfsClient]:
    """A client of a web server that always answers the same."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_PUT(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        host, port = made.server_address[:2]
        yield WebHdfsClient([f"{host!s}:{port}"], user="ada", timeout_s=5.0)
        made.shutdown()
        thread.join()


def remote(exception: str, message: str) -> bytes:
    return json.dumps({"RemoteException": {"exception": exception, "message": message}}).encode()


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (404, remote("FileNotFoundException", "File /x does not exist"), NotFound, "does not exist"),
        (403, remote("AccessControlException", "Permission denied: user=ada\n\tat"), PermissionDenied, "user=ada"),
        (403, remote("StandbyException", "not here"), Unavailable, "not here"),
        (403, remote("FileAlreadyExistsException", "/x"), AlreadyExists, "/x"),
        (403, remote("IOException", "Failed on local exception: reset"), Unavailable, "local exception"),
        (403, remote("RemoteException", "Name node is in safe mode."), Unavailable, "safe mode"),
        (403, remote("IOException", "no such thing"), StorageError, "no such thing"),
        (400, remote("IllegalArgumentException", "bad"), StorageError, "bad"),
        (500, b"<html>", Unavailable, "HTTP status 500"),
        (401, b"", PermissionDenied, "Kerberos"),
        (404, b"[]", StorageError, "HTTP status 404"),
        (200, b"<html>", StorageError, "is it a NameNode"),
        (200, b"[1]", StorageError, "is it a NameNode"),
        (200, b"{}", StorageError, "is it a NameNode"),
        (200, b'{"FileStatus": {"length": "x"}}', StorageError, "is it a NameNode"),
    ],
)
def test_answers_of_web_servers(status: int, body: bytes, kind: type[StorageError], words: str) -> None:
    with server(status, body) as client, pytest.raises(StorageError) as caught:
        client.status("/x")
    assert type(caught.value) is kind
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("where", ["ftp://host/webhdfs/v1/x", "http://host/other", "", "http:///webhdfs/v1/x"])
def test_a_redirect_to_something_else_is_not_followed(where: str) -> None:
    with server(307, b"", Location=where) as client, pytest.raises(StorageError, match="not WebHDFS"):
        client.read("/x", 0, 1, RevocableBuffer(memoryview(bytearray(1))), CancelHandle(), node="", stall_s=1.0)


def test_a_short_answer_is_an_error_and_what_came_is_kept() -> None:
    target = bytearray(8)
    with server(200, b"12345") as client:
        client._rpc = "nn:8020"
        landing = RevocableBuffer(memoryview(target))
        with pytest.raises(Truncated):
            client.read("/x", 0, 8, landing, CancelHandle(), node=client._namenodes[0], stall_s=1.0)
        assert landing.have == 0
        client.read("/x", 0, 5, landing, CancelHandle(), node=client._namenodes[0], stall_s=1.0)
    assert target == b"12345\0\0\0"


def test_the_other_namenode_is_asked_when_the_first_is_not_there(free_port: int) -> None:
    status = {"pathSuffix": "", "length": 7, "type": "FILE", "modificationTime": 1}
    with server(200, json.dumps({"FileStatus": status}).encode()) as client:
        client._namenodes.insert(0, f"127.0.0.1:{free_port}")
        assert client.status("/x").size == 7
        before = client.requests
        assert client.status("/x").size == 7
        assert client.requests == before + 1, "the active one is remembered"


def test_nobody_there(free_port: int) -> None:
    client = WebHdfsClient([f"127.0.0.1:{free_port}"], user="ada", timeout_s=1.0)
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:\d+: the connection failed .*refused"):
        client.status("/x")
    assert not client.answers(f"127.0.0.1:{free_port}", 0.5)


@pytest.mark.parametrize("node", ["nowhere", "host:port", ":1", ""])
def test_addresses_that_are_none(node: str) -> None:
    client = WebHdfsClient([node], user="ada", timeout_s=1.0)
    with pytest.raises(StorageError, match="not host:port"):
        client.status("/x")


def test_options_that_are_none() -> None:
    with pytest.raises(ConfigError, match="no option 'wep'"):
        HdfsStore.open("hdfs://127.0.0.1:1/x", options={"wep": "x"})
    with pytest.raises(ConfigError, match="replication: must be a number"):
        HdfsStore.open("webhdfs://127.0.0.1:1/x", options={"replication": "two"})


def test_without_hdfs_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hdfs_native", None)
    monkeypatch.delenv("HADOOP_HOME", raising=False)
    monkeypatch.delenv("HADOOP_CONF_DIR", raising=False)
    monkeypatch.delenv("ARROW_LIBHDFS_DIR", raising=False)
    with pytest.raises(ConfigError, match="pip install hdfs-native"):
        HdfsStore.open("hdfs://127.0.0.1:1/x")
    place = HdfsStore.open("hdfs://127.0.0.1:1/x", options={"web": "127.0.0.1:2"})
    assert place.features.concatenates


def test_why_libhdfs_is_not_used(tmp_path: object) -> None:
    assert "libhdfs.so" in why_not({"HADOOP_HOME": str(tmp_path)}) or "pyarrow" in why_not({})


def test_a_timeout_is_one(free_port: int) -> None:
    """A server that takes the connection and says nothing."""
    import socket

    with socket.create_server(("127.0.0.1", free_port)):
        client = WebHdfsClient([f"127.0.0.1:{free_port}"], user="ada", timeout_s=0.2)
        with pytest.raises(StorageTimeout, match=r"no answer within 0\.2 s"):
            client.status("/x")
        assert not client.answers(f"127.0.0.1:{free_port}", 0.2)
