"""PURE: heads of requests and answers between peers: a strict part of HTTP/1.1.

    GET /1/hello                       Bootseer-From, Bootseer-To, Bootseer-Nonce
                                       -> 200 with Bootseer-Nonce, Bootseer-Proof
    GET /1/<origin id>/<path>          Range: bytes=a-b, Bootseer-Etag, Bootseer-Mac
                                       -> 206 with Content-Range and Content-Length; before it any number of 102,
                                       each a sign of life while the owner waits for the store
                                       -> 404, 416, 503, ...: Content-Length 0

Requests have no bodies. All other input is refused, so that nothing is ambiguous. Bodies do not pass through a
parser: they go from the spool to the socket, and from the socket into the reader's memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import quote, unquote_to_bytes

from bootseer.peers.auth import NONCE_BYTES
from bootseer.peers.spans import ObjectName

MAX_HEAD_BYTES = 16 << 10
MAX_HEADERS = 24
MAX_NAME = 128  # characters of a node's id
HELLO = "/1/hello"
END = b"\r\n\r\n"
REASONS = {
    102: "Processing",
    200: "OK",
    206: "Partial Content",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    416: "Range Not Satisfiable",
    502: "Bad Gateway",
    503: "Service Unavailable",
}

_HEADER = re.compile(r"([A-Za-z][A-Za-z0-9-]{0,63}): ?([ -~]*)")
_REQUEST = re.compile(r"GET ([!-~]{1,13000}) HTTP/1\.1")
_ANSWER = re.compile(r"HTTP/1\.1 ([1-5]\d\d)(?: [ -~]*)?")
_TARGET = re.compile(r"/1/([0-9a-f]{32})/([!-~]+)")
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})")
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(?:\*|\d{1,18})")
_NODE = re.compile(rf"[!-~]{{1,{MAX_NAME}}}")
_REFUSED = ("content-length", "transfer-encoding", "expect", "upgrade")  # each would allow more data than a head


class WireError(Exception):
    """The input violates the protocol."""


class Hello(NamedTuple):
    """The client that connects, and the server that it expects."""

    client: str
    server: str
    nonce: bytes


class RangeRequest(NamedTuple):
    """A requested range; `target`, `asked` and `etag` as they were signed."""

    name: ObjectName
    start: int
    end: int
    target: str
    asked: str
    etag: str
    mac: str


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]  # names in lower case

    @property
    def length(self) -> int:
        """Length of the body. Raises: WireError."""
        text = self.headers.get("content-length", "")
        if not re.fullmatch(r"\d{1,18}", text):
            raise WireError("an answer without a length")
        return int(text)


# ---- requests ------------------------------------------------------------------------------------------------


def is_node(text: str) -> bool:
    """Return whether it can be the id of a node."""
    return _NODE.fullmatch(text) is not None


def write_hello(hello: Hello) -> bytes:
    return _head(
        f"GET {HELLO} HTTP/1.1",
        {
            "Host": "peer",
            "Bootseer-From": hello.client,
            "Bootseer-To": hello.server,
            "Bootseer-Nonce": hello.nonce.hex(),
        },
    )


def target_of(name: ObjectName) -> str:
    """Return origin and path for a request."""
    return f"/1/{name.origin}/{quote(name.path.encode('utf-8', 'surrogateescape'), safe='/~')}"


def etag_of(name: ObjectName) -> str:
    """Return the version for a request."""
    return quote(name.etag.encode("utf-8", "surrogateescape"), safe="~")


def range_of(start: int, end: int) -> str:
    return f"bytes={start}-{end - 1}"


def write_ask(target: str, asked: str, etag: str, mac: str) -> bytes:
    headers = {"Host": "peer", "Range": asked, "Bootseer-Mac": mac}
    return _head(f"GET {target} HTTP/1.1", {**headers, "Bootseer-Etag": etag} if etag else headers)


def read_request(data: bytes) -> Hello | RangeRequest:
    """Parse a request's head, given without its end (END). Raises: WireError."""
    first, headers = _split(data)
    found = _REQUEST.fullmatch(first)
    if found is None:
        raise WireError("not a GET request of HTTP/1.1")
    for name in _REFUSED:
        if name in headers:
            raise WireError(f"a request with {name}")
    target = found[1]
    if target == HELLO:
        client, server = headers.get("bootseer-from", ""), headers.get("bootseer-to", "")
        if not is_node(client) or not is_node(server):
            raise WireError("a handshake without names")
        return Hello(client, server, read_nonce(headers))
    wanted = _TARGET.fullmatch(target)
    asked = headers.get("range", "")
    numbers = _RANGE.fullmatch(asked)
    if wanted is None or numbers is None or int(numbers[2]) < int(numbers[1]):
        raise WireError("not a range of an object")
    etag = headers.get("bootseer-etag", "")
    named = ObjectName(wanted[1], _unquote(wanted[2]), _unquote(etag))
    start, end = int(numbers[1]), int(numbers[2]) + 1
    return RangeRequest(named, start, end, target, asked, etag, headers.get("bootseer-mac", ""))


# ---- answers -------------------------------------------------------------------------------------------------


def write_answer(status: int, headers: Mapping[str, str] | None = None) -> bytes:
    """Return the head of an answer; it has a body only if `headers` give its length."""
    if status < 200:
        return _head(f"HTTP/1.1 {status} {REASONS[status]}", {})
    return _head(f"HTTP/1.1 {status} {REASONS[status]}", {"Content-Length": "0", **(headers or {})})


def write_hello_answer(nonce: bytes, proof: str) -> bytes:
    return write_answer(200, {"Bootseer-Nonce": nonce.hex(), "Bootseer-Proof": proof})


def write_part(start: int, end: int) -> bytes:
    """Return the head of an answer with data."""
    return write_answer(
        206,
        {
            "Content-Length": str(end - start),
            "Content-Range": f"bytes {start}-{end - 1}/*",
            "Content-Type": "application/octet-stream",
        },
    )


def read_answer(data: bytes) -> Answer:
    """Parse an answer's head, given without its end. Raises: WireError."""
    first, headers = _split(data)
    found = _ANSWER.fullmatch(first)
    if found is None or "transfer-encoding" in headers:
        raise WireError("not an answer of a peer")
    return Answer(int(found[1]), headers)


def read_nonce(headers: Mapping[str, str]) -> bytes:
    """Return the nonce of a handshake. Raises: WireError."""
    text = headers.get("bootseer-nonce", "")
    if not re.fullmatch(rf"[0-9a-f]{{{2 * NONCE_BYTES}}}", text):
        raise WireError("a handshake without a nonce")
    return bytes.fromhex(text)


def check_part(answer: Answer, start: int, end: int) -> None:
    """Verify that exactly these bytes follow. Raises: WireError."""
    found = _CONTENT_RANGE.fullmatch(answer.headers.get("content-range", ""))
    if found is None or (int(found[1]), int(found[2]) + 1) != (start, end) or answer.length != end - start:
        raise WireError("other bytes than requested")


# ---- heads ---------------------------------------------------------------------------------------------------


def _head(first: str, headers: Mapping[str, str]) -> bytes:
    lines = [first, *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode("ascii") + END


def _split(data: bytes) -> tuple[str, dict[str, str]]:
    if len(data) > MAX_HEAD_BYTES:
        raise WireError("a head that is too long")
    try:
        first, *lines = data.decode("ascii").split("\r\n")
    except UnicodeDecodeError:
        raise WireError("a head that is not ASCII") from None
    if len(lines) > MAX_HEADERS:
        raise WireError("too many headers")
    headers: dict[str, str] = {}
    for line in lines:
        found = _HEADER.fullmatch(line)
        if found is None:
            raise WireError("a line that is not a header")
        name = found[1].lower()
        if name in headers:
            raise WireError(f"{name} twice")
        headers[name] = found[2].strip(" ")
    return first, headers


def _unquote(text: str) -> str:
    return unquote_to_bytes(text).decode("utf-8", "surrogateescape")
