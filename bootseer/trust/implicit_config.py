"""Settings files that no option names: read only if no other user could have put them there.

They name commands to run. In a directory that others can write to (/tmp, a shared scratch) they may be another
user's, so there the user has to name the file.
"""

from __future__ import annotations

import os

from bootseer.errors import ConfigError
from bootseer.trust.owned_files import NotOwnedError, own_uids, read_owned, trusted_uids


def read_implicit_config(path: str, shown: str, *, max_bytes: int) -> bytes | None:
    """Return the whole file; None if there is none.

    Args: path: absolute. shown: its name for messages.
    Raises: ConfigError if it, its directory or one above belongs to others or is writable by them.
    """
    try:
        data, status = read_owned(path, max_bytes=max_bytes, uids=trusted_uids())
    except FileNotFoundError:
        return None
    except NotOwnedError as error:
        raise _refused(shown, str(error)) from None
    if status.st_uid not in own_uids():  # of an unmapped user, such as root in a container
        raise _refused(shown, f"it belongs to user {status.st_uid}, not to {os.geteuid()}")
    return data


def _refused(shown: str, why: str) -> ConfigError:
    return ConfigError(
        f"{shown} is not read, as another user may have written it: {why}; if it is what you want, name it:"
        f" --config {shown}, else --config /dev/null"
    )
