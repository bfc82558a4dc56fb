"""Connections of the HTTP client: kept while it is open, closed with it."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator

import pytest

from bootseer.errors import Unavailable
from bootseer.storage.engine.cancelling import CancelHandle
from bootseer.storage.engine.counts import StoreCounters
from bootseer.storage.http.client import HttpClient, HttpResponse
from tests.testing.faulty_http import FaultyHttpServer


@pytest.fixture
def server() -> Iterator[FaultyHttpServer]:
    with FaultyHttpServer({"file": b"x" * 1000}) as server:
        yield server


def make_client() -> HttpClient:
    return HttpClient(timeout_s=10.0, headers={}, ca_file="", counts=StoreCounters())


def ask(client: HttpClient, server: FaultyHttpServer) -> tuple[HttpResponse, http.client.HTTPConnection]:
    exchange = client.begin("GET", server.url_of("file"), {}, CancelHandle())
    return exchange, exchange._connection


def test_a_connection_is_kept(server: FaultyHttpServer) -> None:
    client = make_client()
    for _ in range(3):
        exchange, connection = ask(client, server)
        exchange.response.read()
        exchange.finish()
        assert connection.sock is not None
    assert server.connections == 1
    client.close()
    assert connection.sock is None


def test_what_is_given_back_after_the_end_is_closed(server: FaultyHttpServer) -> None:
    """Else its socket would stay open for as long as somebody has the client."""
    client = make_client()
    exchange, connection = ask(client, server)
    client.close()
    assert exchange.response.read() == b"x" * 1000
    exchange.finish()
    assert connection.sock is None
    client.close()


# ---- requests with a body --------------------------------------------------------------------------------------


class Listener:
    """Takes one connection after the other: reads `takes` bytes of it, answers, and closes it if told so."""

    def __init__(self, *, takes: int, answer: bytes, closes: bool = True) -> None:
        self.received = b""
        self.connections = 0
        self._takes, self._answer, self._closes = takes, answer, closes
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}/upload"

    def _run(self) -> None:
        kept = []
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                break
            self.connections += 1
            kept.append(connection)
            data = b""
            while len(data) < self._takes:
                data += connection.recv(65536)
            self.received = data
            connection.sendall(self._answer)
            if self._closes:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\5\0\0\0")
                connection.shutdown(socket.SHUT_WR)
        for connection in kept:
            connection.close()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


def send(client: HttpClient, url: str, pieces: list[bytes]) -> HttpResponse:
    from urllib.parse import urlsplit

    headers = {"Content-Length": str(sum(map(len, pieces)))}
    return client._send("PUT", urlsplit(url), headers, CancelHandle(), is_fresh=False, body=iter(pieces))


def test_a_body_is_sent_in_pieces() -> None:
    pieces = [b"one ", b"two ", b"three"]
    listener = Listener(takes=1, answer=b"HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n", closes=False)
    client = make_client()
    try:
        exchange = send(client, listener.url, pieces)
        assert exchange.status == 201
        exchange.finish()
        head, _, _ = listener.received.partition(b"\r\n\r\n")
        assert head.startswith(b"PUT /upload HTTP/1.1\r\n")
        assert head.count(b"Content-Length: 13") == 1 and b"Transfer-Encoding" not in head
    finally:
        client.close()
        listener.close()


def test_a_server_that_wants_no_body_is_received() -> None:
    """It says why and closes, without waiting for the end of what is sent."""
    answer = b"HTTP/1.1 413 Too large\r\nContent-Length: 5\r\nConnection: close\r\n\r\nquota"
    listener = Listener(takes=100, answer=answer)
    client = make_client()
    try:
        exchange = send(client, listener.url, [b"x" * 1000] * 10)
        assert (exchange.status, exchange.response.read()) == (413, b"quota")
        exchange.finish()
    finally:
        client.close()
        listener.close()


def test_a_body_is_not_sent_twice() -> None:
    """It was taken from an iterator, and the server may have acted on it."""
    listener = Listener(takes=1, answer=b"")
    client = make_client()
    try:
        with pytest.raises(Unavailable, match="connection failed"):
            send(client, listener.url, [b"body"])
        assert listener.connections == 1
    finally:
        client.close()
        listener.close()
