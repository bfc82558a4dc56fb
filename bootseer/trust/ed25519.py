"""The only user of `cryptography`: ed25519 keys that sign, and verification. It is imported on first use."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from bootseer.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PUBLIC_BYTES = 32
SIGNATURE_BYTES = 64
_MISSING = "signatures need cryptography: pip install 'bootseer[image]'"


class SigningKey:
    """A private key. No text form shows it."""

    def __init__(self, private: Ed25519PrivateKey, *, name: str = "") -> None:
        self._private = private
        self.public: bytes = private.public_key().public_bytes_raw()
        self.name = name  # of the public key beside it; for messages

    @classmethod
    def make(cls, *, name: str = "") -> SigningKey:
        try:
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        except ModuleNotFoundError as error:
            raise ConfigError(_MISSING) from error
        return cls(Ed25519PrivateKey.generate(), name=name)

    @classmethod
    def from_pem(cls, data: bytes, where: str, *, name: str = "") -> SigningKey:
        """Read a PKCS8 PEM without a password.

        Raises: ConfigError for anything else.
        """
        try:
            from cryptography.exceptions import UnsupportedAlgorithm
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
            from cryptography.hazmat.primitives.serialization import load_pem_private_key
        except ModuleNotFoundError as error:
            raise ConfigError(_MISSING) from error
        wanted = "an ed25519 key as PKCS8 PEM without a password is required, as `bootseer keys make` makes one"
        try:
            private = load_pem_private_key(data, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ConfigError(f"{where}: is not a usable private key: {wanted}") from error
        if not isinstance(private, Ed25519PrivateKey):
            raise ConfigError(f"{where}: is a key of another kind: {wanted}")
        return cls(private, name=name)

    def to_pem(self) -> bytes:
        """Return unencrypted PKCS8, for a file that only its owner may read."""
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

        return self._private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    @property
    def keyid(self) -> str:
        return keyid_of(self.public)

    def sign(self, data: bytes) -> bytes:
        """Return the signature: 64 bytes, the same each time."""
        return self._private.sign(data)

    def __repr__(self) -> str:
        return f"SigningKey({self.keyid[:16]})"


def keyid_of(public: bytes) -> str:
    """Return the SHA-256 of the raw public key, in hex."""
    return hashlib.sha256(public).hexdigest()


def verify(public: bytes, signature: bytes, data: bytes) -> bool:
    """Return whether the signature is this key's signature of `data`."""
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ModuleNotFoundError as error:
        raise ConfigError(_MISSING) from error
    if len(public) != PUBLIC_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True
