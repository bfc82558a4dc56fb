"""The fault server does what it says: checked with the plainest client there is."""

from __future__ import annotations

import http.client
import os
import time
from collections.abc import Iterator

import pytest

from tests.testing.faulty_http import FaultyHttpServer, HttpFault, HttpKind

DATA = os.urandom(300_000)
NAME = "a b/c.bin"


@pytest.fixture
def server() -> Iterator[FaultyHttpServer]:
    with FaultyHttpServer({NAME: DATA}) as server:
        yield server


class Answer:
    """One GET on a connection of its own."""

    def __init__(
        self, server: FaultyHttpServer, span: str | None = "bytes=100-199", timeout_s: float = 0.3, **headers: str
    ) -> None:
        if span is not None:
            headers["Range"] = span
        self.error: Exception | None = None
        self.body = b""
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=timeout_s)
        try:
            connection.request("GET", "/" + server.url_of(NAME).split("/", 3)[3], headers=headers)
            response = connection.getresponse()
            self.status, self.headers = response.status, response.headers
            while part := response.read1(1000):
                self.body += part
            if response.length:
                raise http.client.IncompleteRead(self.body)
        except (OSError, http.client.HTTPException) as error:
            self.error = error
        finally:
            connection.close()


def test_ranges(server: FaultyHttpServer) -> None:
    whole = Answer(server, None)
    assert (whole.status, whole.body, whole.headers["ETag"]) == (200, DATA, server.etag_of(NAME))
    part = Answer(server)
    assert (part.status, part.body) == (206, DATA[100:200])
    assert part.headers["Content-Range"] == "bytes 100-199/300000"
    assert Answer(server, "bytes=-10").body == DATA[-10:]
    assert Answer(server, "bytes=299990-").body == DATA[-10:]
    past = Answer(server, "bytes=300000-300001")
    assert (past.status, past.headers["Content-Range"]) == (416, "bytes */300000")
    assert Answer(server, **{"If-Match": server.etag_of(NAME)}).status == 206
    assert Answer(server, **{"If-Match": '"other"'}).status == 412
    assert server.served_bytes[NAME] == 300_000 + 100 + 10 + 10 + 100
    assert server.count() == server.count(path="a*") == 7


def test_connections_are_kept(server: FaultyHttpServer) -> None:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
    for _ in range(3):
        connection.request("HEAD", "/a%20b/c.bin")
        response = connection.getresponse()
        response.read()
        assert (response.status, response.headers["Content-Length"]) == (200, "300000")
    assert server.connections == 1
    connection.close()


@pytest.mark.parametrize(
    ("fault", "status", "body"),
    [
        (HttpFault(HttpKind.STATUS, status=429, retry_after_s=7), 429, b"429 by plan or request\n"),
        (HttpFault(HttpKind.FULL), 200, DATA),
        (HttpFault(HttpKind.OTHER_RANGE), 206, DATA[101:201]),
        (HttpFault(HttpKind.LESS, keep_bytes=30), 206, DATA[100:130]),
        (HttpFault(HttpKind.LYING_RANGE), 206, DATA[100:200]),
        (HttpFault(HttpKind.DRIP, keep_bytes=90, delay_s=0.01), 206, DATA[100:200]),
        (HttpFault(HttpKind.SLOW, delay_s=0.1), 206, DATA[100:200]),
        (HttpFault(HttpKind.WRONG, keep_bytes=99), 206, DATA[100:199] + bytes([DATA[199] ^ 0xFF])),
    ],
    ids=["status", "full", "other", "less", "lying", "drip", "slow", "wrong"],
)
def test_answers(server: FaultyHttpServer, fault: HttpFault, status: int, body: bytes) -> None:
    server.plan = [fault]
    answer = Answer(server)
    assert (answer.status, answer.body, answer.error) == (status, body, None)
    if fault.retry_after_s:
        assert answer.headers["Retry-After"] == "7"
    assert (answer.headers["Content-Range"] is None) == (status != 206 or fault.kind is HttpKind.LYING_RANGE)


@pytest.mark.parametrize(
    ("kind", "error", "count"),
    [
        (HttpKind.SILENCE, TimeoutError, 0),
        (HttpKind.STALL, TimeoutError, 30),
        (HttpKind.SHORT, http.client.IncompleteRead, 30),
        (HttpKind.RESET, ConnectionResetError, 30),
    ],
)
def test_broken_answers(server: FaultyHttpServer, kind: HttpKind, error: type[Exception], count: int) -> None:
    server.plan = [HttpFault(kind, keep_bytes=30)]
    answer = Answer(server)
    assert isinstance(answer.error, error)
    assert DATA[100:130].startswith(answer.body)
    assert server.served_bytes[NAME] == count


def test_changed_file_has_another_etag(server: FaultyHttpServer) -> None:
    before = server.etag_of(NAME)
    server.plan = [HttpFault(HttpKind.CHANGED, requests={1})]
    assert Answer(server, **{"If-Match": before}).status == 206
    assert Answer(server, **{"If-Match": before}).status == 412
    assert Answer(server, **{"If-Match": server.etag_of(NAME)}).status == 206


def test_faults_hit_the_bytes_and_numbers_that_they_name(server: FaultyHttpServer) -> None:
    server.plan = [HttpFault(HttpKind.STATUS, first=150, last=160, requests={1})]
    spans = ["bytes=100-149", "bytes=160-170", "bytes=161-170", "bytes=100-150", "bytes=100-150"]
    assert [Answer(server, span).status for span in spans] == [206, 206, 206, 503, 206]


def test_rate(server: FaultyHttpServer) -> None:
    server.rate = 1e6
    begin_s = time.monotonic()
    assert Answer(server, None, timeout_s=10.0).body == DATA
    assert time.monotonic() - begin_s >= 0.29


def test_closing_ends_answers_that_stall() -> None:
    with FaultyHttpServer({NAME: DATA}, [HttpFault(HttpKind.STALL)]) as server:
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=10.0)
        connection.request("GET", "/a%20b/c.bin")
        response = connection.getresponse()
        server.close()
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            response.read()
        connection.close()
