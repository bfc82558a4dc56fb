"""What is special to web servers: wrong answers, silence, kept connections, redirects, proxies, secrets."""

from __future__ import annotations

import asyncio
import datetime
import http.client
import http.server
import ipaddress
import select
import socket
import ssl
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from bootseer import aio
from bootseer.errors import (
    BootseerError,
    ConfigError,
    IntegrityError,
    NotFound,
    PermissionDenied,
    SourceChanged,
    StorageError,
    StorageTimeout,
    Unavailable,
)
from bootseer.storage import open_at, open_store
from bootseer.storage.http.store import HttpStore
from tests.contract.servers import RangeHandler, serve
from tests.support import find_free_port, wait_until
from tests.testing.faulty_http import FaultyHttpServer, HttpFault, HttpKind
from tests.testing.store_suite import pattern, read, runs

SIZE = 3 << 20
DATA = pattern(SIZE)
NAME = "folder/file.bin"
KEPT = 1_000_000


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def server() -> Iterator[FaultyHttpServer]:
    with FaultyHttpServer({NAME: DATA, "empty.bin": b"", "small.bin": b"abc"}) as server:
        yield server


def fault(kind: HttpKind, **options: Any) -> HttpFault:
    return HttpFault(kind, keep_bytes=KEPT, **options)


# ---- wrong answers


@pytest.mark.parametrize(
    ("kind", "error", "kept"),
    [
        (HttpKind.SHORT, Unavailable, KEPT),
        (HttpKind.RESET, Unavailable, KEPT),
        (HttpKind.STALL, StorageTimeout, KEPT),
        (HttpKind.SILENCE, StorageTimeout, 0),
        (HttpKind.LESS, Unavailable, KEPT),
        (HttpKind.OTHER_RANGE, Unavailable, 0),
        (HttpKind.LYING_RANGE, Unavailable, 0),
        (HttpKind.FULL, StorageError, 0),
        (HttpKind.CHANGED, SourceChanged, 0),
    ],
)
@runs(limit_s=30.0)
async def test_wrong_answers(
    server: FaultyHttpServer, kind: HttpKind, error: type[BootseerError], kept: int
) -> None:
    store = HttpStore(server.url, timeout_s=0.4)
    etag = (await store.stat(NAME)).etag
    server.plan.append(fault(kind))
    memory = memoryview(bytearray(SIZE - 10))
    started_s = time.monotonic()
    with pytest.raises(BootseerError) as caught:
        await store.read_into(NAME, 10, memory, etag=etag)
    assert type(caught.value) is error, caught.value
    assert "file.bin" in str(caught.value) or isinstance(caught.value, StorageTimeout)
    assert time.monotonic() - started_s < 10.0
    if isinstance(caught.value, StorageError):
        # A broken connection may take with it what was on its way.
        assert kept - (1 << 20) < caught.value.read_bytes <= kept
        assert memory[: caught.value.read_bytes] == DATA[10 : 10 + caught.value.read_bytes]
    server.plan.clear()
    now = (await store.stat(NAME)).etag
    assert await read(store, NAME, 10, SIZE - 10, etag=now) == DATA[10:], "and on it goes"
    await store.aclose()


@pytest.mark.parametrize(
    ("status", "error", "wait_s"),
    [
        (403, PermissionDenied, 0),
        (401, PermissionDenied, 0),
        (404, NotFound, 0),
        (410, NotFound, 0),
        (429, Unavailable, 7),
        (500, Unavailable, 0),
        (503, Unavailable, 3),
        (400, StorageError, 0),
        (451, StorageError, 0),
    ],
)
@runs()
async def test_statuses(server: FaultyHttpServer, status: int, error: type[StorageError], wait_s: int) -> None:
    store = HttpStore(server.url)
    server.plan.append(HttpFault(HttpKind.STATUS, status=status, retry_after_s=wait_s or None))
    with pytest.raises(StorageError) as caught:
        await read(store, NAME, 0, 10)
    assert type(caught.value) is error
    assert str(status) in str(caught.value)
    assert caught.value.retry_after_s == wait_s
    await store.aclose()


@runs()
async def test_a_whole_file_is_taken_only_if_it_was_asked_for(server: FaultyHttpServer) -> None:
    store = HttpStore(server.url)
    server.plan.append(HttpFault(HttpKind.FULL))
    assert await read(store, "small.bin", 0, 3) == b"abc"
    for offset, length in ((0, 2), (1, 2), (1, 1)):
        with pytest.raises(StorageError, match="ranges"):
            await read(store, "small.bin", offset, length)
    await store.aclose()


@runs(limit_s=30.0)
async def test_a_slow_server_is_waited_for_as_long_as_bytes_come(server: FaultyHttpServer) -> None:
    store = HttpStore(server.url, timeout_s=0.5)
    server.rate = 2_000_000  # bytes a second: the whole takes three times as long as the deadline
    assert await read(store, NAME, 0, SIZE) == DATA
    await store.aclose()


@runs(limit_s=20.0)
async def test_stat_is_tried_again(server: FaultyHttpServer) -> None:
    store = HttpStore(server.url)
    server.plan.append(HttpFault(HttpKind.STATUS, method="HEAD", status=503, requests=range(2)))
    assert (await store.stat(NAME)).size == SIZE
    assert store.statistics()["retries"] == 2
    await store.aclose()


@runs(limit_s=20.0)
async def test_a_cancel_waits_for_bytes_that_are_just_being_received(
    server: FaultyHttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, is_in = threading.Event(), threading.Event()
    real = http.client.HTTPResponse.readinto

    def readinto(self: http.client.HTTPResponse, view: Any) -> int:
        is_in.set()
        go.wait(10.0)
        return real(self, view)

    monkeypatch.setattr(http.client.HTTPResponse, "readinto", readinto)
    store = HttpStore(server.url)
    memory = memoryview(bytearray(SIZE))
    task = asyncio.create_task(store.read_into(NAME, 0, memory))
    await asyncio.to_thread(is_in.wait, 10.0)
    task.cancel()
    await asyncio.sleep(0.05)
    assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await store.aclose()


@pytest.mark.parametrize("kind", [HttpKind.STALL, HttpKind.SILENCE])
@runs(limit_s=20.0)
async def test_a_cancel_is_quick_and_final(server: FaultyHttpServer, kind: HttpKind) -> None:
    store = HttpStore(server.url, timeout_s=30.0)
    server.plan.append(fault(kind))
    memory = memoryview(bytearray(SIZE))
    task = asyncio.create_task(store.read_into(NAME, 0, memory))
    await asyncio.to_thread(wait_until, lambda: server.count() == 1, 10.0)
    if kind is HttpKind.STALL:
        await asyncio.to_thread(wait_until, lambda: memory[500_000] == DATA[500_000], 10.0)
    started_s = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - started_s < 2.0
    memory[:] = b"\xee" * SIZE
    await asyncio.to_thread(wait_until, lambda: aio.statistics()["abandoned"] == 0, 10.0)
    assert memory == b"\xee" * SIZE
    await store.aclose()


# ---- other servers' ways


class Odd(RangeHandler):
    """A server that leaves out what it may, or adds what it should not."""

    etag, modified, encoding, refuses_head, seen = "", "", "", False, []  # type: ignore[var-annotated]

    def send_header(self, keyword: str, value: str) -> None:
        if keyword == "ETag":
            for name, instead in (("ETag", self.etag), ("Last-Modified", self.modified)):
                if instead:
                    super().send_header(name, instead)
            if self.encoding:
                super().send_header("Content-Encoding", self.encoding)
            return
        super().send_header(keyword, value)

    def do_HEAD(self) -> None:
        if not self.refuses_head:
            return super().do_HEAD()
        self.send_response(405)
        self.send_header("Content-Length", "0")
        self.end_headers()
        return None

    def do_GET(self) -> None:
        self.seen.append(dict(self.headers))
        super().do_GET()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "file.bin").write_bytes(DATA)
    (tmp_path / "empty.bin").write_bytes(b"")
    return tmp_path


def odd(folder: Path, **options: Any) -> type[Odd]:
    return type("Handler", (Odd,), {"folder": folder, "seen": [], **options})


@runs()
async def test_versions_by_weak_etag_or_by_time(folder: Path) -> None:
    for options, etag in (
        ({"etag": 'W/"abc"'}, 'W/"abc"'),
        ({"modified": "Sat, 21 Nov 2026 10:00:00 GMT"}, f"Sat, 21 Nov 2026 10:00:00 GMT; {SIZE} bytes"),
        ({}, ""),
    ):
        handler = odd(folder, **options)
        with serve(handler) as url:
            store = HttpStore(url)
            assert await store.stat("file.bin") == (SIZE, etag)
            assert await read(store, "file.bin", 5, 100, etag=etag) == DATA[5:105]
            assert "If-Match" not in handler.seen[-1], "the server could not tell"
            with pytest.raises(SourceChanged):
                await read(store, "file.bin", 5, 100, etag='W/"other"')
            await store.aclose()


@runs()
async def test_a_server_without_head(folder: Path) -> None:
    with serve(odd(folder, etag='"abc"', refuses_head=True)) as url:
        store = HttpStore(url)
        assert await store.stat("file.bin") == (SIZE, '"abc"')
        assert (await store.stat("empty.bin")).size == 0
        with pytest.raises(NotFound):
            await store.stat("missing.bin")
        await store.aclose()


@runs()
async def test_compressed_answers_are_refused(folder: Path) -> None:
    with serve(odd(folder, encoding="gzip")) as url:
        store = HttpStore(url)
        with pytest.raises(StorageError, match="gzip"):
            await store.stat("file.bin")
        with pytest.raises(StorageError, match="gzip"):
            await read(store, "file.bin", 0, 10)
        await store.aclose()


@runs()
async def test_the_server_is_asked_for_one_version(server: FaultyHttpServer) -> None:
    store = HttpStore(server.url)
    found = await store.stat(NAME)
    await read(store, NAME, 0, 10, etag=found.etag)
    assert server.requests[-1].headers["if-match"] == found.etag
    server.change(NAME)
    with pytest.raises(SourceChanged):
        await read(store, NAME, 0, SIZE, etag=found.etag)
    assert server.served_bytes[NAME] < 1000, "it did not even begin to send"
    await store.aclose()


# ---- connections


@runs()
async def test_connections_are_kept(server: FaultyHttpServer) -> None:
    store = HttpStore(server.url)
    for _ in range(5):
        await read(store, NAME, 0, 1000)
        with pytest.raises(NotFound):
            await store.stat("missing.bin")
        with pytest.raises(IntegrityError):
            await read(store, "small.bin", 2, 5)
    assert server.connections == 1
    await read(store, NAME, 0, 1000, attempt=1)
    assert server.connections == 2, "another way is another connection"
    server.drop_connections()
    await read(store, NAME, 0, 1000)
    assert server.connections == 3
    assert store.statistics()["retries"] == 0, "it was seen before it was used"
    await store.aclose()
    await read(store, NAME, 0, 1000)
    assert server.connections == 4, "a closed store keeps none"
    await store.aclose()


class Hasty(RangeHandler):
    """Ends a connection without an answer when it is used a second time."""

    def handle_one_request(self) -> None:
        if getattr(self, "was_used", False):
            self.rfile.readline()
            self.close_connection = True
            return
        self.was_used = True
        super().handle_one_request()


@runs()
async def test_a_kept_connection_that_ends_in_use_is_replaced(folder: Path) -> None:
    with serve(type("Handler", (Hasty,), {"folder": folder})) as url:
        store = HttpStore(url)
        for _ in range(3):
            assert await read(store, "file.bin", 1, 1000) == DATA[1:1001]
        assert store.statistics()["retries"] == 2
        assert store.statistics()["requests"] == 5
        await store.aclose()


@runs()
async def test_no_server() -> None:
    store = HttpStore(f"http://127.0.0.1:{find_free_port()}", timeout_s=5.0)
    with pytest.raises(Unavailable, match="refused"):
        await read(store, "file.bin", 0, 1)
    named = HttpStore("http://no-such-server.invalid", timeout_s=5.0)
    with pytest.raises(Unavailable):
        await read(named, "file.bin", 0, 1)


def test_a_forked_child_has_connections_of_its_own(folder: Path) -> None:
    script = """
        import asyncio, os, sys, warnings
        warnings.simplefilter("ignore")
        from bootseer.storage.http.store import HttpStore
        store = HttpStore(sys.argv[1])
        def get(offset):
            target = bytearray(1000)
            asyncio.run(store.read_into("file.bin", offset, memoryview(target)))
            return bytes(target)
        data = open(sys.argv[2], "rb").read()
        assert get(0) == data[:1000]
        pid = os.fork()
        for turn in range(30):  # both at once
            assert get(turn) == data[turn : turn + 1000]
        if pid == 0:
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        asyncio.run(store.aclose())
        print("both")
    """
    with serve(type("Handler", (RangeHandler,), {"folder": folder})) as url:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script), url, folder / "file.bin"],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, "both\n", "")


# ---- redirects


class Redirecting(http.server.BaseHTTPRequestHandler):
    """Answers every request by a redirect."""

    protocol_version = "HTTP/1.1"
    to = ""
    seen: ClassVar[list[dict[str, str]]] = []

    def do_GET(self) -> None:
        self.seen.append(dict(self.headers))
        self.send_response(302)
        self.send_header("Location", self.to.replace("PATH", self.path))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *args: object) -> None:
        """Tests are quiet."""


@runs()
async def test_redirects_are_followed_without_secrets(folder: Path) -> None:
    handler = odd(folder)
    with serve(handler) as target:
        first = type("First", (Redirecting,), {"to": f"{target}PATH", "seen": []})
        with serve(first) as url:
            store = HttpStore(url.replace("//", "//user:pass@"), headers={"X-Token": "secret"})
            assert (await store.stat("file.bin")).size == SIZE
            assert await read(store, "file.bin", 3, 1000) == DATA[3:1003]
            assert first.seen[-1]["Authorization"] == "Basic dXNlcjpwYXNz"
            assert first.seen[-1]["X-Token"] == "secret"
            assert "Authorization" not in handler.seen[-1]
            assert "X-Token" not in handler.seen[-1]
            await store.aclose()


@pytest.mark.parametrize(
    ("to", "error", "match"),
    [
        ("PATH", StorageError, "redirects"),  # to itself
        ("file:///etc/passwd", StorageError, "not HTTP"),
        ("ftp://127.0.0.1/file.bin", StorageError, "not HTTP"),
        ("http://[::1/file.bin", StorageError, "invalid URL"),
        ("http://127.0.0.1:99999/", StorageError, "invalid URL"),
        ("PATH/", NotFound, "directory"),
    ],
)
@runs()
async def test_redirects_that_are_not_followed(to: str, error: type[StorageError], match: str) -> None:
    with serve(type("Handler", (Redirecting,), {"to": to, "seen": []})) as url:
        store = HttpStore(url)
        with pytest.raises(error, match=match):
            await read(store, "file.bin", 0, 10)
        await store.aclose()


# ---- secrets and proxies


@runs()
async def test_secrets_are_sent_but_not_shown(folder: Path) -> None:
    handler = odd(folder, etag='"abc"')
    with serve(handler) as url:
        signed = f"{url.replace('//', '//me:word@')}/file.bin?X-Sig=s%2Be+cret&expires=1"
        store, name = open_at(signed)
        assert name == "file.bin"
        paths: list[str] = []
        original = handler.do_GET
        handler.do_GET = lambda self: (paths.append(self.path), original(self))[1]  # type: ignore[method-assign]
        assert await read(store, name, 0, 10) == DATA[:10]
        assert paths == ["/file.bin?X-Sig=s%2Be+cret&expires=1"]
        assert handler.seen[-1]["Authorization"] == "Basic bWU6d29yZA=="
        with pytest.raises(NotFound) as caught:
            await store.stat("missing.bin")
        for text in (str(caught.value), store.url):
            assert "word" not in text
            assert "cret" not in text
        assert "missing.bin" in str(caught.value)
        await store.aclose()


class Proxy(RangeHandler):
    """Serves what it is asked to fetch, and tunnels."""

    targets: ClassVar[list[str]] = []
    credentials: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        self.targets.append(self.path)
        self.credentials.append(self.headers.get("Proxy-Authorization"))
        super().do_GET()

    def do_CONNECT(self) -> None:
        self.targets.append(self.path)
        self.credentials.append(self.headers.get("Proxy-Authorization"))
        host, _, port = self.path.partition(":")
        with socket.create_connection((host, int(port))) as other:
            self.send_response(200)
            self.end_headers()
            ends = {self.connection: other, other: self.connection}
            while True:
                ready, _, _ = select.select(list(ends), [], [], 10)
                for end in ready:
                    data = end.recv(65536)
                    if not data:
                        self.close_connection = True
                        return
                    ends[end].sendall(data)


@runs()
async def test_proxies_of_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handler = type("Handler", (Proxy,), {"folder": folder, "targets": [], "credentials": []})
    with serve(handler) as proxy:
        monkeypatch.setenv("http_proxy", proxy.replace("//", "//p:q@"))
        store = HttpStore("http://files.example:81/")
        assert await read(store, "file.bin", 9, 1000) == DATA[9:1009]
        assert handler.targets == ["http://files.example:81/file.bin"]
        assert handler.credentials == ["Basic cDpx"]
        monkeypatch.setenv("no_proxy", "files.example")
        with pytest.raises(Unavailable):
            await HttpStore("http://files.example:81/", timeout_s=5.0).stat("file.bin")
        assert len(handler.targets) == 1
        monkeypatch.setenv("http_proxy", "socks5://127.0.0.1:1")
        with pytest.raises(ConfigError, match="proxy"):
            await HttpStore("http://other.example:81/").stat("file.bin")
        await store.aclose()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Key and certificate for 127.0.0.1."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        + made.public_bytes(serialization.Encoding.PEM)
    )
    return path


@pytest.fixture
def tls(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


@runs()
async def test_tls(folder: Path, tls: ssl.SSLContext, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handler = type("Handler", (Proxy,), {"folder": folder, "targets": [], "credentials": []})
    with serve(odd(folder, etag='"abc"'), tls) as url, serve(handler) as proxy:
        assert url.startswith("https://")
        store = open_store(url, options={"ca_file": str(certificate)})
        assert await read(store, "file.bin", 1, SIZE - 1) == DATA[1:]
        untrusting = HttpStore(url)
        with pytest.raises(StorageError, match="certificate"):
            await read(untrusting, "file.bin", 1, 10)
        monkeypatch.setenv("https_proxy", proxy.replace("//", "//p:q@"))
        tunnelled = HttpStore(url, ca_file=str(certificate))
        assert await read(tunnelled, "file.bin", 1, SIZE - 1) == DATA[1:]
        assert handler.targets == [url.removeprefix("https://")]
        assert handler.credentials == ["Basic cDpx"]
        plain = type("Plain", (Redirecting,), {"to": "http://127.0.0.1/file.bin", "seen": []})
        monkeypatch.delenv("https_proxy")
        with serve(plain, tls) as down:
            downgraded = HttpStore(down, ca_file=str(certificate))
            with pytest.raises(StorageError, match="not encrypted"):
                await read(downgraded, "file.bin", 0, 1)
        for each in (store, tunnelled, untrusting, downgraded):
            await each.aclose()


@runs(limit_s=20.0)
async def test_a_cancel_in_the_middle_of_tls(folder: Path, tls: ssl.SSLContext, certificate: Path) -> None:
    class Stalling(RangeHandler):
        def do_GET(self) -> None:
            self.send_response(206)
            self.send_header("Content-Range", f"bytes 0-{SIZE - 1}/{SIZE}")
            self.send_header("Content-Length", str(SIZE))
            self.end_headers()
            self.wfile.write(DATA[:KEPT])
            self.connection.recv(1)  # until the client is gone

    with warnings.catch_warnings(), serve(Stalling, tls) as url:
        warnings.simplefilter("ignore", ResourceWarning)
        store = HttpStore(url, ca_file=str(certificate), timeout_s=30.0)
        memory = memoryview(bytearray(SIZE))
        task = asyncio.create_task(store.read_into("file.bin", 0, memory))
        await asyncio.to_thread(wait_until, lambda: memory[500_000] == DATA[500_000], 10.0)
        started_s = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - started_s < 2.0
        memory[:] = b"\xee" * SIZE
        await asyncio.to_thread(wait_until, lambda: aio.statistics()["abandoned"] == 0, 10.0)
        assert memory == b"\xee" * SIZE
        await store.aclose()


# ---- what cannot be


def test_urls_and_options_that_cannot_be(tmp_path: Path) -> None:
    for url in ("http://", "http:///file", "http://host:port/", "http://host:99999/", "http://[::1/"):
        with pytest.raises(ConfigError):
            open_store(url)
    for options in (
        {"headers": {"X": "a\r\nY: b"}},
        {"headers": {"X Y": "a"}},
        {"headers": "X: a"},
        {"ca_file": 5},
        {"nonsense": 1},
    ):
        with pytest.raises(ConfigError):
            open_store("http://127.0.0.1/", options=options)
    store = HttpStore("http://127.0.0.1:1/", ca_file=str(tmp_path / "missing"))
    tls_store = HttpStore("https://127.0.0.1:1/", ca_file=str(tmp_path / "missing"))
    with pytest.raises(Unavailable):
        asyncio.run(store.stat("x"))
    with pytest.raises(ConfigError, match="ca_file"):
        asyncio.run(tls_store.stat("x"))
