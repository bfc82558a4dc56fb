"""A server that issues tokens for a registry, like those of Docker Hub, GHCR and many others.

`with TokenServer(certificates, passwords) as tokens: RegistryServer(folder, tokens=tokens.tokens)`. Tokens are
JSON Web Tokens, signed by the server's own certificate. Source: distribution.github.io/distribution/spec/auth.
"""

from __future__ import annotations

import base64
import http.server
import json
import secrets
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tests.testing.registry import Certificates, TokenIssuer

_ISSUER = "tests' issuer"


class TokenServer:
    """A server that issues tokens to users with a password, or an identity token.

    Args:
        passwords: user -> password; without any, every client gets a token.
        identity_tokens: those that may be exchanged for others.
        lasts_s: declared lifetime; the registry accepts them for a minute longer.
        service: the name of the registry.
    """

    def __init__(
        self,
        certificates: Certificates,
        passwords: Mapping[str, str],
        *,
        identity_tokens: frozenset[str] = frozenset(),
        lasts_s: int = 300,
        service: str = "tests' registry",
    ) -> None:
        self.certificates = certificates
        self.passwords = dict(passwords)
        self.identity_tokens = identity_tokens
        self.lasts_s = lasts_s
        self.service = service
        self.given: list[list[str]] = []  # the scopes of each token
        self.refused = 0
        self._server = _Server(self, ("127.0.0.1", 0))
        self._server.socket = certificates.server_context().wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._server.server_address[1]}"

    @property
    def tokens(self) -> TokenIssuer:
        """Return the settings for the registry."""
        return TokenIssuer(f"https://{self.host}/token", self.service, _ISSUER, self.certificates.certificate)

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> TokenServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def give(self, user: str, scopes: list[str]) -> str:
        """Return a token for these scopes, `repository:NAME:ACTIONS`."""
        access = []
        for scope in scopes:
            kind, _, rest = scope.partition(":")
            name, _, actions = rest.rpartition(":")
            access.append({"type": kind, "name": name, "actions": actions.split(",")})
        now_s = int(time.time())
        claims = {
            "iss": _ISSUER,
            "sub": user,
            "aud": self.service,
            "exp": now_s + self.lasts_s,
            "nbf": now_s - 60,
            "iat": now_s,
            "jti": secrets.token_hex(8),
            "access": access,
        }
        self.given.append(scopes)
        return self._sign(claims)

    def _sign(self, claims: Mapping[str, Any]) -> str:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

        with open(self.certificates.certificate, "rb") as file:
            certificate = x509.load_pem_x509_certificate(file.read())
        with open(self.certificates.key, "rb") as file:
            key = serialization.load_pem_private_key(file.read(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        chain = base64.b64encode(certificate.public_bytes(serialization.Encoding.DER)).decode()
        parts = [
            _packed(json.dumps(each).encode()) for each in ({"typ": "JWT", "alg": "ES256", "x5c": [chain]}, claims)
        ]
        signature = key.sign(".".join(parts).encode(), ec.ECDSA(hashes.SHA256()))
        numbers = b"".join(number.to_bytes(32, "big") for number in decode_dss_signature(signature))
        return ".".join([*parts, _packed(numbers)])


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, owner: TokenServer, address: tuple[str, int]) -> None:
        self.owner = owner
        super().__init__(address, _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that have disconnected."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def do_GET(self) -> None:
        """Issue a token for the password, or to every client if there are no passwords."""
        owner = self.server.owner
        user, _, password = (
            base64.b64decode(self.headers.get("Authorization", "").removeprefix("Basic ")).decode().partition(":")
        )
        scopes = [value for name, value in parse_qsl(urlsplit(self.path).query) if name == "scope"]
        self._answer(user, scopes, not owner.passwords or (bool(user) and owner.passwords.get(user) == password))

    def do_POST(self) -> None:
        """Exchange an identity token for a token."""
        form = dict(parse_qsl(self.rfile.read(int(self.headers["Content-Length"])).decode()))
        is_right = (
            form.get("grant_type") == "refresh_token"
            and form.get("refresh_token") in self.server.owner.identity_tokens
        )
        self._answer("somebody", form.get("scope", "").split(), is_right)

    def _answer(self, user: str, scopes: list[str], is_right: bool) -> None:
        owner = self.server.owner
        if is_right:
            body = json.dumps({"access_token": owner.give(user, scopes), "expires_in": owner.lasts_s}).encode()
        else:
            owner.refused += 1
            body = b'{"details": "incorrect username or password"}'
        self.send_response(200 if is_right else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _packed(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
