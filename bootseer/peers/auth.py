"""PURE: mutual authentication of nodes by the job's key, which is never sent.

On each connection both sides send a nonce, and the server proves that it has the key. Key, nonces and names give a
session key for this connection only. Each request carries an HMAC-SHA256 over its number, target, range and etag.
So it cannot be changed, replayed, or sent on another connection or to another node. Clocks are not used. Bodies of
answers have no MAC, as readers verify their digests.
"""

from __future__ import annotations

import hmac
from hashlib import sha256

NONCE_BYTES = 32
MIN_KEY_BYTES = 32
MIN_SECRET_BYTES = 16
_SERVER, _SESSION, _JOB = b"bootseer peers 1: server", b"bootseer peers 1: session", b"bootseer peers 1: job"


def derive_key(secret: bytes, job: str) -> bytes:
    """Return the key for peers of a job (its run id), which does not reveal the secret.

    Raises: ValueError for a secret that is too short.
    """
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(f"a secret of {len(secret)} bytes; at least {MIN_SECRET_BYTES} are needed")
    return _mac(secret, _JOB, job.encode("utf-8", "surrogateescape"))


def origin_id(key: bytes, url: str) -> str:
    """Return the id of a store between nodes: 32 hex digits that do not reveal the URL."""
    return _mac(key, b"bootseer peers 1: origin", url.encode("utf-8", "surrogateescape")).hex()[:32]


class Handshake:
    """The handshake data of both sides of a connection."""

    def __init__(self, client: str, server: str, client_nonce: bytes, server_nonce: bytes) -> None:
        self._said = (client.encode(), server.encode(), client_nonce, server_nonce)

    def server_proof(self, key: bytes) -> str:
        return _mac(key, _SERVER, *self._said).hex()

    def is_server(self, key: bytes, proof: str) -> bool:
        return hmac.compare_digest(self.server_proof(key).encode(), proof.encode())

    def session(self, key: bytes) -> Session:
        return Session(_mac(key, _SESSION, *self._said))


class Session:
    """The request counter and key of one side of a connection."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def sign(self, target: str, asked: str, etag: str) -> str:
        """Return the MAC of the next request. Args: asked: its range."""
        self._count += 1
        return _mac(self._key, b"%d" % self._count, target.encode(), asked.encode(), etag.encode()).hex()

    def is_signed(self, mac: str, target: str, asked: str, etag: str) -> bool:
        """Return whether the next request, as received, is from the other side."""
        return hmac.compare_digest(self.sign(target, asked, etag).encode(), mac.encode())


def _mac(key: bytes, *parts: bytes) -> bytes:
    text = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.new(key, text, sha256).digest()
