"""A small registry in this process: passwords and tokens, redirects, uploads, and what a test does to them.

For what a real registry cannot be made to do, or takes seconds to; the real one is in tests/integration.
"""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import os
import re
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import parse_qs, parse_qsl, urlsplit

from bootseer.storage.oci.manifest import MANIFEST


class Seen(NamedTuple):
    """One request that came."""

    method: str
    path: str
    query: dict[str, list[str]]
    authorization: str
    headers: dict[str, str]  # names in lower case


class SmallRegistry:
    """`auth`: "", "basic" or "bearer". Users are in `passwords`; tokens are numbered."""

    def __init__(self, *, auth: str = "") -> None:
        self.auth = auth
        self.passwords = {"me": "pass/word"}
        self.identity_tokens: set[str] = set()
        self.blobs: dict[str, bytes] = {}
        self.documents: dict[str, tuple[bytes, str]] = {}  # by repository/manifests/version
        self.referrers: dict[str, list[Any]] | None = (
            None  # by digest: pages of the API; None: it knows no such thing
        )
        self.tokens: dict[str, set[str]] = {}  # those that are good, and their scopes
        self.given = 0
        self.expires_in: object = 300
        self.realm = ""  # instead of its own
        self.statuses: list[tuple[int, dict[str, str], bytes]] = []  # for the next requests to the registry
        self.token_answers: list[tuple[int, dict[str, str], bytes]] = []  # the same of tokens
        self.redirect_to = ""  # where blobs are
        self.ignores_ranges = False
        self.uploads: dict[str, bytearray] = {}  # by number
        self.upload_url = ""  # where they go on, instead of here
        self.min_chunk_bytes = 0
        self.cuts: list[
            int | None
        ] = []  # of the next chunks so many bytes are taken, then the connection is reset
        self.forgets = False  # uploads that were cut
        self.seen: list[Seen] = []
        self.url = ""
        self.lock = threading.Lock()

    @property
    def host(self) -> str:
        return self.url.partition("://")[2]

    def add_blob(self, data: bytes) -> str:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        self.blobs[digest] = data
        return digest

    def add_document(self, repository: str, data: bytes, *tags: str, media_type: str = MANIFEST) -> str:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        for version in (digest, *tags):
            self.documents[f"{repository}/manifests/{version}"] = (data, media_type)
        return digest

    def count(self, pattern: str) -> int:
        """Requests whose method and path match."""
        return sum(re.fullmatch(pattern, f"{each.method} {each.path}") is not None for each in self.seen)

    def revoke(self) -> None:
        """All tokens have expired."""
        with self.lock:
            self.tokens.clear()

    @contextmanager
    def serve(self, context: ssl.SSLContext | None = None) -> Iterator[SmallRegistry]:
        handler = type("Handler", (_Handler,), {"registry": self})
        server = _Server(("127.0.0.1", 0), handler)
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        self.url = f"{'http' if context is None else 'https'}://127.0.0.1:{server.server_address[1]}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away are what is tested."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    registry: SmallRegistry

    def setup(self) -> None:
        if isinstance(self.request, ssl.SSLSocket):
            self.request.settimeout(10.0)
            self.request.do_handshake()
        super().setup()

    def log_message(self, *args: object) -> None:
        """Tests are quiet."""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        headers = {key.lower(): value for key, value in self.headers.items()}
        query = parse_qs(parts.query)
        with self.registry.lock:
            self.registry.seen.append(
                Seen(self.command, parts.path, query, headers.get("authorization", ""), headers)
            )
        if parts.path == "/token":
            self.give_token(parse_qsl(parts.query), {})
        elif parts.path == "/v2/":
            self.send(200, {}, b"{}")
        elif self.registry.statuses:
            self.send(*self.registry.statuses.pop(0))
        elif self.is_allowed(parts.path):
            self.answer(parts.path, query)
        else:
            self.challenge(parts.path)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        if "/uploads/" in self.path:
            self.upload()
            return
        form = dict(parse_qsl(self.rfile.read(int(self.headers["Content-Length"])).decode()))
        with self.registry.lock:
            self.registry.seen.append(Seen("POST", self.path, {}, self.headers.get("Authorization", ""), form))
        self.give_token([("scope", word) for word in form.get("scope", "").split()], form)

    def do_PUT(self) -> None:
        self.upload()

    def do_PATCH(self) -> None:
        self.upload()

    # ---- uploads, which know no passwords

    def upload(self) -> None:
        registry = self.registry
        parts = urlsplit(self.path)
        headers = {key.lower(): value for key, value in self.headers.items()}
        length = int(headers.get("content-length", "0"))
        with registry.lock:
            registry.seen.append(
                Seen(self.command, parts.path, parse_qs(parts.query), headers.get("authorization", ""), headers)
            )
            cut = registry.cuts.pop(0) if registry.cuts and self.command == "PATCH" else None
        body = self.rfile.read(length if cut is None else cut)
        number = parts.path.rpartition("/")[2] or str(len(registry.uploads) + 1)
        if self.command == "POST":
            registry.uploads[number] = bytearray()
        if number not in registry.uploads:
            self.send(404, {}, b"")
            return
        data = registry.uploads[number]
        if self.command == "PATCH" and int(headers["content-range"].partition("-")[0]) != len(data):
            self.send(416, self.upload_headers(parts.path, number), b"")
            return
        data += body
        if cut is not None:
            if registry.forgets:
                del registry.uploads[number]
            self.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(self.request.detach())
            self.close_connection = True
        elif self.command == "PUT":
            digest = registry.add_blob(bytes(data))
            is_right = parse_qs(parts.query)["digest"] == [digest]
            self.send(201 if is_right else 400, {"Location": f"/blobs/{digest}"}, b"")
        else:
            self.send(202, self.upload_headers(parts.path, number), b"")

    def upload_headers(self, path: str, number: str) -> dict[str, str]:
        registry = self.registry
        url = f"{registry.upload_url}{path.rpartition('/')[0]}/{number}?state=se+cret"
        have = len(registry.uploads[number])
        headers = {"Location": url, "Range": f"0-{max(0, have - 1)}"}
        if registry.min_chunk_bytes:
            headers["OCI-Chunk-Min-Length"] = str(registry.min_chunk_bytes)
        return headers

    # ---- who asks

    def is_allowed(self, path: str) -> bool:
        registry = self.registry
        given = self.headers.get("Authorization", "")
        if registry.auth == "basic":
            return self.user_of(given) != ""
        if registry.auth == "bearer":
            repository = path.removeprefix("/v2/").rpartition("/")[0].rpartition("/")[0]
            with registry.lock:
                scopes = registry.tokens.get(given.removeprefix("Bearer "), set())
            return f"repository:{repository}:pull" in scopes
        return True

    def user_of(self, authorization: str) -> str:
        text = base64.b64decode(authorization.removeprefix("Basic ")).decode()
        user, _, password = text.partition(":")
        return user if user and self.registry.passwords.get(user) == password else ""

    def challenge(self, path: str) -> None:
        registry = self.registry
        text = 'Basic realm="tests"'
        if registry.auth == "bearer":
            repository = path.removeprefix("/v2/").rpartition("/")[0].rpartition("/")[0]
            realm = registry.realm or f"{registry.url}/token"
            text = f'Bearer realm="{realm}",service="tests",scope="repository:{repository}:pull"'
        self.send(401, {"WWW-Authenticate": text}, b'{"errors": [{"code": "UNAUTHORIZED", "message": "who?"}]}')

    def give_token(self, fields: list[tuple[str, str]], form: dict[str, str]) -> None:
        registry = self.registry
        if registry.token_answers:
            self.send(*registry.token_answers.pop(0))
            return
        authorization = self.headers.get("Authorization", "")
        is_right = not authorization or self.user_of(authorization) != ""
        if form:
            is_right = form.get("refresh_token") in registry.identity_tokens
        if not is_right:
            self.send(401, {}, b'{"details": "no"}')
            return
        with registry.lock:
            registry.given += 1
            token = f"token-{registry.given}"
            registry.tokens[token] = {value for name, value in fields if name == "scope"}
        self.send(200, {}, json.dumps({"token": token, "expires_in": registry.expires_in}).encode())

    # ---- what there is

    def answer(self, path: str, query: dict[str, list[str]]) -> None:
        registry = self.registry
        name = path.removeprefix("/v2/")
        if "/uploads/" in name:
            number = name.rpartition("/")[2]
            self.send(
                *((204, self.upload_headers(path, number)) if number in registry.uploads else (404, {})), b""
            )
        elif name in registry.documents:
            data, media_type = registry.documents[name]
            self.send(200, {"Content-Type": media_type}, data)
        elif "/referrers/" in name and registry.referrers is not None:
            self.send(*self.page(name.rpartition("/")[2], query))
        elif "/blobs/" in name and (data := registry.blobs.get(name.rpartition("/")[2], b"")):
            if registry.redirect_to:
                self.send(307, {"Location": f"{registry.redirect_to}{path}?sig=se+cret"}, b"")
            else:
                self.blob(data)
        else:
            self.send(404, {}, b'{"errors": [{"code": "NOT_FOUND", "message": "nowhere"}]}')

    def page(self, digest: str, query: dict[str, list[str]]) -> tuple[int, dict[str, str], bytes]:
        pages = (self.registry.referrers or {}).get(digest, [[]])
        number = int(query.get("page", ["0"])[0])
        body = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": pages[number],
        }
        headers = {"Content-Type": str(body["mediaType"])}
        if number + 1 < len(pages):
            headers["Link"] = f'<?page={number + 1}>; rel="next"'
        return 200, headers, json.dumps(body).encode()

    def blob(self, data: bytes) -> None:
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if found is None or self.registry.ignores_ranges:
            self.send(200, {}, data)
            return
        first, last = int(found[1]), min(int(found[2] or len(data)), len(data) - 1)
        self.send(206, {"Content-Range": f"bytes {first}-{last}/{len(data)}"}, data[first : last + 1])

    def send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
