"""Public keys in the format of OpenSSH: `ssh-ed25519 AAAA... name`. Pure.

So keys of ssh-keygen can be trusted too, and Bootseer's keys can be kept with ssh keys.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import struct
from typing import NamedTuple

from bootseer.errors import ConfigError
from bootseer.trust.ed25519 import PUBLIC_BYTES, keyid_of

KIND = "ssh-ed25519"
MAX_NAME = 200  # characters
_BLOB = struct.Struct(f">I{len(KIND)}sI{PUBLIC_BYTES}s")


class PublicKey(NamedTuple):
    """An ed25519 key for verification."""

    raw: bytes  # 32 bytes
    name: str = ""  # the comment of its line, unverified

    @property
    def keyid(self) -> str:
        """The ID in envelopes: SHA-256 of the raw key, in hex."""
        return keyid_of(self.raw)

    @property
    def line(self) -> str:
        """The line of a .pub file, without the line feed."""
        return " ".join(filter(None, (KIND, base64.b64encode(self._blob()).decode("ascii"), self.name)))

    @property
    def fingerprint(self) -> str:
        """The fingerprint as `ssh-keygen -l` shows it."""
        digest = hashlib.sha256(self._blob()).digest()
        return "SHA256:" + base64.b64encode(digest).decode("ascii").rstrip("=")

    def _blob(self) -> bytes:
        return _BLOB.pack(len(KIND), KIND.encode(), len(self.raw), self.raw)


class TrustedKey(NamedTuple):
    """A public key, and the file that makes it trusted."""

    key: PublicKey
    path: str

    @property
    def shown(self) -> str:
        """The name for messages."""
        return f"{self.key.name or 'key'} ({self.key.keyid[:16]})"


def parse_public(text: str, where: str) -> PublicKey:
    """Parse the key in one line.

    Raises: ConfigError for private keys, other kinds, and invalid keys.
    """
    if "PRIVATE KEY" in text:
        raise ConfigError(f"{where}: is a private key: give the public one beside it (.pub)")
    kind, _, rest = text.strip().partition(" ")
    encoded, _, name = rest.strip().partition(" ")
    if kind.startswith(("ssh-", "ecdsa-", "sk-")) and kind != KIND:
        raise ConfigError(f"{where}: is a key of kind {kind[:40]}; supported is {KIND}: ssh-keygen -t ed25519")
    try:
        blob = base64.b64decode(encoded.encode("ascii"), validate=True)
        length, inner, size, raw = _BLOB.unpack(blob)
    except (UnicodeError, binascii.Error, struct.error):
        length = size = 0
        inner = raw = b""
    if kind != KIND or (length, inner, size) != (len(KIND), KIND.encode(), PUBLIC_BYTES):
        raise ConfigError(f"{where}: is not a public key: a line '{KIND} AAAA... name' is required")
    return PublicKey(raw, clean_name(name))


def parse_publics(text: str, where: str) -> list[PublicKey]:
    """Parse all keys of a file, one per line; skip empty lines and those that begin with '#'."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if "PRIVATE KEY" in text:
        lines = [text]  # one error for all lines
    return [parse_public(line, where) for line in lines]


def clean_name(name: str) -> str:
    """Return a name on one line, without control characters."""
    shown = "".join(char if char.isprintable() else " " if char.isspace() else "" for char in name)
    return " ".join(shown.split())[:MAX_NAME].strip()
