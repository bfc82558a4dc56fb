"""DSSE envelopes: a payload, its type, and signatures over both. Pure.

In: untrusted bytes from a store. Out: an Envelope of bounded size, or one error. bootseer.trust.trust decides
which signatures are trusted. Source: github.com/secure-systems-lab/dsse, protocol.md 1.0.2.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from bootseer.errors import IntegrityError

MAX_ENVELOPE_BYTES = 64 << 10  # as stored; the default limit
MAX_SIGNATURES = 16
MAX_KEYID_BYTES = 256
MAX_SIGNATURE_BYTES = 1024  # other tools' keys may sign as well

_URL_SAFE = str.maketrans("-_", "+/")


class Signature(NamedTuple):
    """A signature with the claimed key."""

    keyid: str  # a hint, not covered by any signature; "" where it was left out
    sig: bytes


class Envelope(NamedTuple):
    """A parsed envelope, not verified yet."""

    payload: bytes
    payload_type: str
    signatures: tuple[Signature, ...]

    @property
    def signed(self) -> bytes:
        """The bytes that signatures cover."""
        return pae(self.payload_type, self.payload)


class Signer(Protocol):
    """A private key."""

    @property
    def keyid(self) -> str: ...
    def sign(self, data: bytes) -> bytes: ...


class _WireSignature(msgspec.Struct, omit_defaults=True):
    sig: str
    keyid: str = ""


class _Wire(msgspec.Struct, rename={"payload_type": "payloadType"}):
    """The stored fields. Unknown fields are ignored, as specified: no signature covers them."""

    payload: str
    payload_type: str
    signatures: list[_WireSignature]


def pae(payload_type: str, payload: bytes) -> bytes:
    """Return the pre-authentication encoding, which is signed, so that no type can be mistaken for another."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def seal(payload: bytes, payload_type: str, key: Signer | None, *more: Signer) -> bytes:
    """Make an envelope as stored, signed by the keys; with None it has no signature."""
    keys: Sequence[Signer] = () if key is None else (key, *more)
    data = pae(payload_type, payload)
    signatures = [_WireSignature(sig=_encode(each.sign(data)), keyid=each.keyid) for each in keys]
    return msgspec.json.encode(_Wire(payload=_encode(payload), payload_type=payload_type, signatures=signatures))


def parse(data: bytes, payload_type: str, where: str, *, max_bytes: int = MAX_ENVELOPE_BYTES) -> Envelope:
    """Parse the envelope in `data`.

    Args: where: names it in errors.

    Raises: IntegrityError for data that is too large, is not an envelope, or has another type than `payload_type`.
    """
    if len(data) > max_bytes:
        raise IntegrityError(f"{where}: {len(data)} bytes; at most {max_bytes}")
    try:
        wire = msgspec.json.decode(data, type=_Wire)
        if wire.payload_type != payload_type:
            raise IntegrityError(f"{where}: holds {wire.payload_type[:80]!r} instead of {payload_type}")
        if len(wire.signatures) > MAX_SIGNATURES:
            raise IntegrityError(f"{where}: has {len(wire.signatures)} signatures; at most {MAX_SIGNATURES}")
        signatures = []
        for each in wire.signatures:
            if len(each.keyid) > MAX_KEYID_BYTES or len(each.sig) > 2 * MAX_SIGNATURE_BYTES:
                raise IntegrityError(f"{where}: has a signature that is too long")
            signatures.append(Signature(each.keyid, _decode(each.sig)))
        return Envelope(_decode(wire.payload), payload_type, tuple(signatures))
    except (msgspec.MsgspecError, UnicodeError, binascii.Error, RecursionError) as error:
        raise IntegrityError(f"{where}: is not a DSSE envelope, or is damaged: {error}") from error


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _decode(text: str) -> bytes:
    """Decode either alphabet, and nothing else."""
    return base64.b64decode(text.translate(_URL_SAFE).encode("ascii"), validate=True)
