"""A server in front of a real registry that counts, limits, falsifies and fails, as proxies and load balancers do.

It forwards requests to the registry, unless a `FrontFault` matches; the first match takes effect. It can support
the referrers API, which docker-registry does not, redirect blobs to another server, and expire tokens early.
"""

from __future__ import annotations

import hashlib
import http.client
import http.server
import json
import os
import re
import socket
import ssl
import struct
import threading
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from enum import Enum
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlencode, urlsplit

from tests.testing.registry import RegistryServer

_PASSED = ("accept", "authorization", "content-length", "content-range", "content-type", "host", "range")
_INDEX = "application/vnd.oci.image.index.v1+json"


class FrontKind(Enum):
    """The fault of a request."""

    STATUS = "status"  # `status` and `body` instead of an answer; Retry-After if `retry_after_s` is given
    REDIRECT = "redirect"  # 307 to `location`, with the request's path appended
    CUT = "cut"  # `keep_bytes` of its body reach the registry, then the connection is reset
    LOST = "lost"  # the registry executes it, the answer is lost
    REPLACED = "replaced"  # 200 with `body` and the registry's headers
    SHORT = "short"  # the connection is closed after `keep_bytes` of the answer's body
    WHOLE = "whole"  # Range is removed
    OTHER_RANGE = "other_range"  # the bytes one further on, declared as such
    LYING_RANGE = "lying_range"  # the bytes one further on, declared as the requested ones


class FrontFault(NamedTuple):
    """One planned fault."""

    kind: FrontKind
    method: str = "*"  # a shell pattern
    path: str = "*"  # the same, without the query
    requests: Container[int] | None = None  # numbers of the otherwise matching ones, from 0; None: all
    status: int = 503
    retry_after_s: int | None = None
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    location: str = ""
    keep_bytes: int = 0


class FrontRequest(NamedTuple):
    """One received request."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]  # names in lower case


class RegistryFront:
    """A front server of `registry`, with its certificate.

    Args:
        has_referrers: support the referrers API for pushed manifests, `page_size` referrers a page.
        token_uses: requests with one token after which the registry's challenge is sent again.
    """

    def __init__(
        self,
        registry: RegistryServer,
        plan: Sequence[FrontFault] = (),
        *,
        has_referrers: bool = False,
        page_size: int = 100,
        token_uses: int | None = None,
    ) -> None:
        self.registry = registry
        self.plan = list(plan)
        self.has_referrers = has_referrers
        self.page_size = page_size
        self.token_uses = token_uses
        self.requests: list[FrontRequest] = []
        self.referrers: dict[tuple[str, str], list[dict[str, Any]]] = {}  # repository and subject
        self._uses: Counter[str] = Counter()
        self._hits: dict[int, tuple[FrontFault, int]] = {}  # by identity: the same fault may be planned twice
        self._lock = threading.Lock()
        self._server = _Server(self, ("127.0.0.1", 0))
        if registry.certificates is not None:
            context = registry.certificates.server_context()
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._server.server_address[1]}"

    def count(self, method: str = "*", path: str = "*") -> int:
        """Return the number of received requests."""
        with self._lock:
            return sum(fnmatchcase(each.method, method) and fnmatchcase(each.path, path) for each in self.requests)

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> RegistryFront:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- for the threads of connections ----------------------------------------------------------------------

    def find(self, request: FrontRequest) -> FrontFault | None:
        """Record the request and return the fault that matches it."""
        with self._lock:
            self.requests.append(request)
            for fault in self.plan:
                if not (fnmatchcase(request.method, fault.method) and fnmatchcase(request.path, fault.path)):
                    continue
                _, number = self._hits.get(id(fault), (fault, 0))
                self._hits[id(fault)] = (fault, number + 1)
                if fault.requests is None or number in fault.requests:
                    return fault
        return None

    def is_used_up(self, request: FrontRequest) -> bool:
        """Return whether its token has expired."""
        token = request.headers.get("authorization", "")
        if self.token_uses is None or not token.startswith("Bearer "):
            return False
        with self._lock:
            self._uses[token] += 1
            return self._uses[token] > self.token_uses

    def connect(self) -> http.client.HTTPConnection:
        """Return a connection to the registry."""
        if self.registry.certificates is None:
            return http.client.HTTPConnection(self.registry.host, timeout=30.0)
        context = ssl.create_default_context(cafile=self.registry.certificates.ca)
        return http.client.HTTPSConnection(self.registry.host, timeout=30.0, context=context)

    def note_manifest(self, repository: str, data: bytes, media_type: str) -> str:
        """Record and return the digest of a manifest's subject; "" if it has none."""
        manifest = json.loads(data)
        subject = (manifest.get("subject") or {}).get("digest", "")
        if subject:
            listed = {
                "mediaType": media_type,
                "digest": f"sha256:{hashlib.sha256(data).hexdigest()}",
                "size": len(data),
                "artifactType": manifest.get("artifactType") or manifest["config"]["mediaType"],
                "annotations": manifest.get("annotations"),
            }
            with self._lock:
                known = self.referrers.setdefault((repository, subject), [])
                if listed not in known:
                    known.append(listed)
        return str(subject)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = False  # so that closing waits for them
    request_queue_size = 128

    def __init__(self, owner: RegistryFront, address: tuple[str, int]) -> None:
        self.owner = owner
        super().__init__(address, _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that have disconnected."""


class _Handler(http.server.BaseHTTPRequestHandler):
    """HTTP/1.0: each connection has one request, so closing does not wait for clients."""

    server: _Server

    def setup(self) -> None:
        self.request.settimeout(30.0)
        if isinstance(self.request, ssl.SSLSocket):
            self.request.do_handshake()  # here, not in the accept loop
        super().setup()
        self.owner = self.server.owner

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def answer(self) -> None:
        parts = urlsplit(self.path)
        headers = {key.lower(): value for key, value in self.headers.items()}
        request = FrontRequest(self.command, parts.path, parts.query, headers)
        fault = self.owner.find(request)
        body = b"" if fault is not None and fault.kind is FrontKind.CUT else self._read_body()
        if body is None:
            self.close_connection = True  # the client has disconnected
        elif fault is not None and fault.kind is FrontKind.STATUS:
            wait = [] if fault.retry_after_s is None else [("Retry-After", str(fault.retry_after_s))]
            self._send(fault.status, [*fault.headers, *wait], fault.body)
        elif fault is not None and fault.kind is FrontKind.REDIRECT:
            self._send(307, [("Location", f"{fault.location}{parts.path}")], b"")
        elif fault is not None and fault.kind is FrontKind.CUT:
            self._cut(fault.keep_bytes)
        elif self.owner.is_used_up(request):
            self._challenge()
        elif self.owner.has_referrers and (found := re.fullmatch(r"/v2/(.+)/referrers/(.+)", parts.path)):
            self._list_referrers(found[1], found[2], parse_qs(parts.query))
        else:
            self._pass_on(request, body, fault)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = answer  # noqa: N815

    def _read_body(self) -> bytes | None:
        """Return the body; None if it is incomplete."""
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        return body if len(body) == length else None

    def _pass_on(self, request: FrontRequest, body: bytes, fault: FrontFault | None) -> None:
        kind = None if fault is None else fault.kind
        headers = {name: request.headers[name] for name in _PASSED if name in request.headers}
        asked = headers.get("range", "")
        if kind is FrontKind.WHOLE:
            headers.pop("range", None)
        if kind in (FrontKind.OTHER_RANGE, FrontKind.LYING_RANGE):
            headers["range"] = re.sub(r"\d+", lambda number: str(int(number[0]) + 1), asked)
        status, sent, data = self._ask(self.command, self.path, headers, body)
        if kind is FrontKind.LYING_RANGE:
            span = asked.removeprefix("bytes=")
            sent = [
                (k, f"bytes {span}/{v.rpartition('/')[2]}" if k.lower() == "content-range" else v) for k, v in sent
            ]
        if self.owner.has_referrers and self.command == "PUT" and status == 201 and "/manifests/" in request.path:
            repository = request.path.removeprefix("/v2/").rpartition("/manifests/")[0]
            subject = self.owner.note_manifest(repository, body, request.headers.get("content-type", ""))
            sent += [("OCI-Subject", subject)] if subject else []
        if kind is FrontKind.LOST:
            self._reset()
        elif kind is FrontKind.REPLACED and fault is not None:
            self._send(200, [*fault.headers, *(each for each in sent if each[0] != "Content-Length")], fault.body)
        elif kind is FrontKind.SHORT and fault is not None:
            self._send(status, sent, data[: fault.keep_bytes], length=len(data))
        else:
            self._send(status, sent, data)

    def _ask(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = self.owner.connect()
        try:
            connection.request(method, path, body=body or None, headers=dict(headers))
            answer = connection.getresponse()
            kept = [(k, v) for k, v in answer.getheaders() if k.lower() not in ("connection", "transfer-encoding")]
            return answer.status, kept, answer.read()
        finally:
            connection.close()

    def _cut(self, keep_bytes: int) -> None:
        """Send part of the body: a registry keeps the received part of a chunk."""
        part = self.rfile.read(min(keep_bytes, int(self.headers.get("Content-Length") or 0)))
        if part:
            headers = {name: value for name in _PASSED if (value := self.headers.get(name)) is not None}
            first = int(re.split(r"\D+", headers.get("content-range", "0"))[0])
            headers |= {"content-length": str(len(part)), "content-range": f"{first}-{first + len(part) - 1}"}
            self._ask(self.command, self.path, headers, part)
        self._reset()

    def _challenge(self) -> None:
        """Send the registry's own challenge, as for a client without a token."""
        headers = {name: value for name in ("accept", "host") if (value := self.headers.get(name)) is not None}
        status, sent, data = self._ask("GET", self.path, headers, b"")
        assert status == 401, status
        self._send(status, sent, data)

    def _list_referrers(self, repository: str, digest: str, query: Mapping[str, list[str]]) -> None:
        found = self.owner.referrers.get((repository, digest), [])
        wanted = query.get("artifactType")
        if wanted:
            found = [each for each in found if each["artifactType"] in wanted]
        first = int(query.get("from", ["0"])[0])
        page = found[first : first + self.owner.page_size]
        headers = [("Content-Type", _INDEX)]
        if wanted:
            headers.append(("OCI-Filters-Applied", "artifactType"))
        if first + len(page) < len(found):
            more = urlencode(
                {"from": first + len(page), **({"artifactType": wanted} if wanted else {})}, doseq=True
            )
            headers.append(("Link", f'</v2/{repository}/referrers/{digest}?{more}>; rel="next"'))
        body = {"schemaVersion": 2, "mediaType": _INDEX, "manifests": page or None}
        self._send(200, headers, json.dumps(body).encode())

    def _send(
        self, status: int, headers: Sequence[tuple[str, str]], body: bytes, *, length: int | None = None
    ) -> None:
        self.send_response(status)
        is_head = self.command == "HEAD"
        for name, value in headers:
            if name.lower() != "content-length" or is_head:
                self.send_header(name, value)
        if not is_head:
            self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if not is_head:
            self.wfile.write(body)

    def _reset(self) -> None:
        self.close_connection = True
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(self.request.detach())
