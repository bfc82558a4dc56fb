"""Who is believed: `Trust` gives the payload of an envelope that a trusted key, or its store's owner, stands for.

In: an envelope, which anybody may have written, and where it was read. Out: its payload, or Untrusted with a line
that says what to do. An older envelope of the same name is believed too: who needs one version pins its digest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from bootseer.errors import Untrusted
from bootseer.storage import Store
from bootseer.trust.dsse import MOST_ENVELOPE_BYTES, Envelope, Signature, parse
from bootseer.trust.ed25519 import SigningKey, verify
from bootseer.trust.key_folder import KeyFolder
from bootseer.trust.keys import TrustedKey
from bootseer.trust.owners import why_not_owned
from bootseer.trust.reading import place_of, read_whole

_KEYID = re.compile(r"[0-9a-f]{64}")
MAKE = "`bootseer keys make` makes a key to publish with"
ADD = "if you know whose it is: `bootseer keys trust FILE.pub`"


class Believed(NamedTuple):
    """A payload, and why."""

    payload: bytes
    because: str  # "signed by ada (1f2e...)", "in a place of this user's own"


class Trust:
    """The keys that are believed, and the one that signs.

    `load` reads those of this user. Made by hand, `folder` None has no key that signs.
    """

    def __init__(
        self, trusted: Iterable[TrustedKey] = (), *, folder: KeyFolder | None = None, ignored: Iterable[str] = ()
    ) -> None:
        self.trusted = tuple(trusted)
        self.ignored = tuple(ignored)  # files that look like keys, and why they are none
        self._by_keyid = {each.key.keyid: each for each in self.trusted}
        self._folder = folder

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None) -> Trust:
        """With the keys of the folder that the environment means, and root's."""
        folder = KeyFolder.find(environ)
        found = folder.read_trusted()
        return cls(found.keys, folder=folder, ignored=found.ignored)

    def signing_key(self) -> SigningKey | None:
        """This user's private key; None if there is none. Raises: ConfigError for one that cannot be used."""
        return None if self._folder is None else self._folder.read_private()

    async def read(
        self, data: bytes, payload_type: str, store: Store, path: str, *, most_bytes: int = MOST_ENVELOPE_BYTES
    ) -> bytes:
        """The payload of the envelope `data`, which was read from `path` of the store.

        Raises: Untrusted; IntegrityError for what is no envelope of this type.
        """
        return (await self.judge(data, payload_type, store, path, most_bytes=most_bytes)).payload

    async def fetch(
        self, store: Store, path: str, payload_type: str, *, most_bytes: int = MOST_ENVELOPE_BYTES
    ) -> Believed:
        """Reads the envelope as well. Raises also NotFound and StorageError."""
        data = await read_whole(store, path, most_bytes)
        return await self.judge(data, payload_type, store, path, most_bytes=most_bytes)

    async def judge(
        self, data: bytes, payload_type: str, store: Store, path: str, *, most_bytes: int = MOST_ENVELOPE_BYTES
    ) -> Believed:
        """As `read`, and why it is believed."""
        where = place_of(store, path)
        envelope = parse(data, payload_type, where, most_bytes=most_bytes)
        signer = self.find_signer(envelope, where)
        if signer is not None:
            return Believed(envelope.payload, f"signed by {signer.shown}")
        reason = await why_not_owned(store, path, data)
        if not reason:
            return Believed(envelope.payload, "in a place of this user's own")
        if not envelope.signatures:
            raise Untrusted(f"{where}: is not signed, and {reason}; {MAKE}")
        ids = ", ".join(_shown(each) for each in envelope.signatures[:4])
        ignored = f"; not used: {self.ignored[0]}" if self.ignored else ""
        raise Untrusted(f"{where}: is signed by no trusted key ({ids}), and {reason}; {ADD}; else {MAKE}{ignored}")

    def find_signer(self, envelope: Envelope, where: str) -> TrustedKey | None:
        """The trusted key that signed it; None if none did.

        Raises: Untrusted when a signature says that it is a trusted key's, and is not: what was signed is damaged,
        or somebody tries.
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
                # Other tools name keys otherwise, or not at all.
                found = next((each for each in self.trusted if verify(each.key.raw, signature.sig, signed)), None)
        return found


def _shown(signature: Signature) -> str:
    """A keyid, which anybody may have written."""
    return signature.keyid[:16] if _KEYID.fullmatch(signature.keyid) else "unknown"
