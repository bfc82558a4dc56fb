"""Choice of the key that signs published data: this user's, another one, or none."""

from __future__ import annotations

import os
from typing import NamedTuple

from bootseer.errors import ConfigError
from bootseer.trust.ed25519 import SigningKey
from bootseer.trust.key_folder import MAX_FILE_BYTES
from bootseer.trust.owned_files import NotOwnedError, read_owned
from bootseer.trust.trust import Trust


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
