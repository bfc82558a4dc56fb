"""Keys, signatures, and stores that are trusted without them: `Trust` decides, `seal` signs.

Names are loaded when first used, so that importing this costs nothing. `cryptography` is loaded for the first key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bootseer.lazy import loader

if TYPE_CHECKING:
    from bootseer.trust.dsse import parse as parse
    from bootseer.trust.dsse import seal as seal
    from bootseer.trust.ed25519 import SigningKey as SigningKey
    from bootseer.trust.key_folder import KeyDirectory as KeyDirectory
    from bootseer.trust.keys import PublicKey as PublicKey
    from bootseer.trust.keys import TrustedKey as TrustedKey
    from bootseer.trust.trust import Trust as Trust

_HOMES = {
    "KeyDirectory": "key_folder",
    "PublicKey": "keys",
    "SigningKey": "ed25519",
    "Trust": "trust",
    "TrustedKey": "keys",
    "parse": "dsse",
    "seal": "dsse",
}
__all__ = list(_HOMES)
__getattr__ = loader(__name__, _HOMES)
