"""PURE: how nodes of a job prove to each other that they know its key, without sending it.

On each connection both sides give a nonce, and the server proves itself; from key, nonces and names follows a key
of this connection alone. Each request on it carries an HMAC-SHA256 over its number, its target, its range and
etag: none can be changed, replayed, moved to another connection or to another node. No clocks are compared. The
bodies of answers carry no MAC: whoever reads them knows their digests.
"""

from __future__ import annotations

import hmac
from hashlib import sha256

NONCE_BYTES = 32
LEAST_KEY_BYTES = 32
LEAST_SECRET_BYTES = 16
_SERVER, _SESSION, _JOB = b"bootseer peers 1: server", b"bootseer peers 1: session", b"bootseer peers 1: job"


def derive_key(secret: bytes, job: str) -> bytes:
    """The key for peers of a job (its run id). From it nobody learns the secret.

    Raises: ValueError for a secret that can be guessed.
    """
    if len(secret) < LEAST_SECRET_BYTES:
        raise ValueError(f"a secret of {len(secret)} bytes; at least {LEAST_SECRET_BYTES}")
    return _mac(secret, _JOB, job.encode("utf-8", "surrogateescape"))


def origin_id(key: bytes, url: str) -> str:
    """How a store is named between nodes: 32 hex digits that tell others nothing of the URL."""
    return _mac(key, b"bootseer peers 1: origin", url.encode("utf-8", "surrogateescape")).hex()[:32]


class Greeting:
    """What both sides of a connection have said at its beginning."""

    def __init__(self, client: str, server: str, client_nonce: bytes, server_nonce: bytes) -> None:
        self._said = (client.encode(), server.encode(), client_nonce, server_nonce)

    def server_proof(self, key: bytes) -> str:
        return _mac(key, _SERVER, *self._said).hex()

    def is_server(self, key: bytes, proof: str) -> bool:
        """Whether the server knows the key."""
        return hmac.compare_digest(self.server_proof(key).encode(), proof.encode())

    def session(self, key: bytes) -> Session:
        return Session(_mac(key, _SESSION, *self._said))


class Session:
    """One side of a connection; both count its requests."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def sign(self, target: str, asked: str, etag: str) -> str:
        """The MAC of the next request. `asked`: its range."""
        self._count += 1
        return _mac(self._key, b"%d" % self._count, target.encode(), asked.encode(), etag.encode()).hex()

    def is_signed(self, mac: str, target: str, asked: str, etag: str) -> bool:
        """Whether the next request, as it came, is from the other side."""
        return hmac.compare_digest(self.sign(target, asked, etag).encode(), mac.encode())


def _mac(key: bytes, *parts: bytes) -> bytes:
    text = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.new(key, text, sha256).digest()
