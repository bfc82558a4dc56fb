"""Heads between peers: what is written is read, also by the standard library; everything else is refused."""

from __future__ import annotations

import http.client
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.peers import wire
from bootseer.peers.spans import ObjectName

ORIGIN = "0123456789abcdef" * 2
names = st.builds(ObjectName, st.just(ORIGIN), st.text(min_size=1, max_size=40).filter(str.isprintable), st.text())
ASK = wire.write_ask(f"/1/{ORIGIN}/a", "bytes=0-9", "", "00")


def cut(head: bytes) -> bytes:
    assert head.endswith(wire.END)
    return head.removesuffix(wire.END)


@given(names.filter(lambda name: name.etag.isprintable()), st.integers(0, 10**17), st.integers(1, 1 << 22))
def test_requests_are_read_as_they_were_written(name: ObjectName, start: int, length: int) -> None:
    target, etag, asked = wire.target_of(name), wire.etag_of(name), wire.range_of(start, start + length)
    found = wire.read_request(cut(wire.write_ask(target, asked, etag, "ab")))
    assert found == wire.RangeRequest(name, start, start + length, target, asked, etag, "ab")


def test_greetings_are_read_as_they_were_written() -> None:
    hello = wire.Hello("node1", "node2", bytes(range(32)))
    assert wire.read_request(cut(wire.write_hello(hello))) == hello
    answer = wire.read_answer(cut(wire.write_hello_answer(bytes(range(32)), "proof")))
    assert (answer.status, answer.length) == (200, 0)
    assert wire.read_nonce(answer.headers) == bytes(range(32))


def test_answers_are_those_of_http() -> None:
    class Socket:
        def makefile(self, *_: object) -> io.BytesIO:
            return io.BytesIO(wire.write_part(5, 9) + b"abcd")

    response = http.client.HTTPResponse(Socket())  # type: ignore[arg-type]
    response.begin()
    assert (response.status, response.read()) == (206, b"abcd")
    wire.check_part(wire.read_answer(cut(wire.write_part(5, 9))), 5, 9)


@pytest.mark.parametrize(("start", "end"), [(5, 8), (4, 8), (5, 10)])
def test_other_bytes_are_not_taken_for_those_asked_for(start: int, end: int) -> None:
    with pytest.raises(wire.WireError):
        wire.check_part(wire.read_answer(cut(wire.write_part(5, 9))), start, end)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET",
        b"POST /1/x HTTP/1.1",
        b"GET /1/hello HTTP/1.0",
        b"GET /1/hello HTTP/1.1",
        b"GET  /1/hello HTTP/1.1",
        b"GET /2/hello HTTP/1.1",
        cut(ASK) + b"\r\nRange: bytes=1-2",
        cut(ASK) + b"\r\nContent-Length: 5",
        cut(ASK) + b"\r\nTransfer-Encoding: chunked",
        cut(ASK) + b"\r\nExpect: 100-continue",
        cut(ASK) + b"\r\n continued",
        cut(ASK) + b"\r\nbad\nheader: x",
        cut(ASK) + b"\r\nno colon",
        cut(ASK) + b"\r\nX: \xff",
        cut(ASK) + b"\r\nX: \x00",
        cut(ASK) + b"\r\nX : y",
        cut(ASK) + b"".join(b"\r\nX-%d: y" % number for number in range(30)),
        cut(ASK) + b"\r\nX: " + b"y" * 20_000,
        cut(ASK).replace(b"bytes=0-9", b"bytes=9-0"),
        cut(ASK).replace(b"bytes=0-9", b"bytes=0-"),
        cut(ASK).replace(b"bytes=0-9", b"bytes=0-1,3-4"),
        cut(ASK).replace(b"bytes=0-9", b"bytes=0-" + b"9" * 30),
        cut(ASK).replace(ORIGIN.encode(), b"xyz"),
        cut(wire.write_hello(wire.Hello("a", "b", b"1" * 32))).replace(b"31", b"zz"),
        cut(wire.write_hello(wire.Hello("a", "b", b"1" * 32))).replace(b"From: a", b"From: a b"),
    ],
)
def test_what_is_no_request_is_refused(data: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.read_request(data)


@given(st.binary(max_size=400))
def test_anything_may_come(data: bytes) -> None:
    for read in (wire.read_request, wire.read_answer):
        try:
            read(data)
        except wire.WireError:
            continue


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HTTP/1.1 abc",
        b"HTTP/1.0 200 OK",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked",
        b"HTTP/1.1 600 x",
    ],
)
def test_what_is_no_answer_is_refused(data: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.read_answer(data)
    with pytest.raises(wire.WireError):
        _ = wire.read_answer(b"HTTP/1.1 200 OK\r\nContent-Length: -1").length
