"""Trust decisions: `Trust` returns payloads of envelopes that a trusted key, or the store's owner, vouches for.

In: an untrusted envelope, and its location. Out: its payload, or Untrusted with a hint in one line. An older
envelope of the same name is trusted too: to require one version, pin its digest.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from bootseer.errors import ConfigError, Untrusted
from bootseer.storage import Store
from bootseer.storage.small_files import read_small, url_of
from bootseer.trust.dsse import MAX_ENVELOPE_BYTES, Envelope, Signature, parse
from bootseer.trust.ed25519 import SigningKey, verify
from bootseer.trust.key_folder import MAX_FILE_BYTES, KeyDirectory
from bootseer.trust.keys import TrustedKey
from bootseer.trust.owned_files import NotOwnedError, read_owned
from bootseer.trust.owners import why_not_trusted_owner

_KEYID = re.compile(r"[0-9a-f]{64}")
MAKE = "`bootseer keys make` makes a key to publish with"
ADD = "if you know whose it is: `bootseer keys trust FILE.pub`"


class TrustedPayload(NamedTuple):
    payload: bytes
    because: str  # "signed by ada (1f2e...)", "unsigned, but only you can write there"


class Trust:
    """The trusted keys, and the key that signs.

    `load` reads those of this user. Without `folder` there is no key that signs.
    """

    def __init__(
        self,
        trusted: Iterable[TrustedKey] = (),
        *,
        folder: KeyDirectory | None = None,
        ignored: Iterable[str] = (),
    ) -> None:
        self.trusted = tuple(trusted)
        self.ignored = tuple(ignored)  # files that resemble keys, and why they are ignored
        self._by_keyid = {each.key.keyid: each for each in self.trusted}
        self._directory = folder

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None) -> Trust:
        """Load the keys of the directory from the environment, and root's."""
        directory = KeyDirectory.find(environ)
        found = directory.read_trusted()
        return cls(found.keys, folder=directory, ignored=found.ignored)

    def signing_key(self) -> SigningKey | None:
        """Return this user's private key; None if there is none. Raises: ConfigError for an unusable one."""
        return None if self._directory is None else self._directory.read_private()

    async def read(
        self, data: bytes, payload_type: str, store: Store, path: str, *, max_bytes: int = MAX_ENVELOPE_BYTES
    ) -> bytes:
        """Return the payload of the envelope `data`, which was read from `path` of the store.

        Raises: Untrusted; IntegrityError for data that is not an envelope of this type.
        """
        return (await self.judge(data, payload_type, store, path, max_bytes=max_bytes)).payload

    async def fetch(
        self, store: Store, path: str, payload_type: str, *, max_bytes: int = MAX_ENVELOPE_BYTES
    ) -> TrustedPayload:
        """Read the envelope as well. Raises also NotFound and StorageError."""
        data = await read_small(store, path, max_bytes)
        return await self.judge(data, payload_type, store, path, max_bytes=max_bytes)

    async def judge(
        self, data: bytes, payload_type: str, store: Store, path: str, *, max_bytes: int = MAX_ENVELOPE_BYTES
    ) -> TrustedPayload:
        """Do the same as `read`, and return the reason for the trust."""
        where = url_of(store, path)
        envelope = parse(data, payload_type, where, max_bytes=max_bytes)
        signer = self.find_signer(envelope, where)
        if signer is not None:
            return TrustedPayload(envelope.payload, f"signed by {signer.shown}")
        reason = await why_not_trusted_owner(store, path, data)
        if not reason:
            return TrustedPayload(envelope.payload, "unsigned, but only you can write there")
        if not envelope.signatures:
            raise Untrusted(f"{where}: is not signed, and {reason}; {MAKE}")
        ids = ", ".join(_shown(each) for each in envelope.signatures[:4])
        ignored = f"; not used: {self.ignored[0]}" if self.ignored else ""
        raise Untrusted(f"{where}: is signed by no trusted key ({ids}), and {reason}; {ADD}; else {MAKE}{ignored}")

    def find_signer(self, envelope: Envelope, where: str) -> TrustedKey | None:
        """Return the trusted key that signed it; None if there is none.

        Raises: Untrusted when a signature claims a trusted key but is invalid: the data is damaged, or an attack.
        """
        signed = envelope.signed
        found: TrustedKey | None = None
        for signature in envelope.signatures:
            named = self._by_keyid.get(signature.keyid)
            if named is not None:
                if not verify(named.key.raw, signature.sig, signed):
                    raise Untrusted(f"{where}: was changed after {named.shown} signed it: publish it anew")
                found = found or named
            elif found is None and _KEYID.fullmatch(signature.keyid) is None:
                # Other tools use other key IDs, or none.
                found = next((each for each in self.trusted if verify(each.key.raw, signature.sig, signed)), None)
        return found


def _shown(signature: Signature) -> str:
    """Return a keyid for messages; it is untrusted."""
    return signature.keyid[:16] if _KEYID.fullmatch(signature.keyid) else "unknown"


class Signing(NamedTuple):
    """The user's choice."""

    key_path: str = ""  # of a private key; "": this user's own, if there is one
    is_unsigned: bool = False

    def key(self, trust: Trust) -> SigningKey | None:
        """Return the key. Raises: ConfigError for an unusable one."""
        if self.is_unsigned:
            return None
        if not self.key_path:
            return trust.signing_key()
        path = os.path.abspath(self.key_path)
        try:
            data, _ = read_owned(path, max_bytes=MAX_FILE_BYTES, is_secret=True)
        except FileNotFoundError as error:
            raise ConfigError(f"{path}: there is no such key; `bootseer keys make` makes one") from error
        except NotOwnedError as error:
            raise ConfigError(f"the private key is not used: {error}") from error
        return SigningKey.from_pem(data, path)
