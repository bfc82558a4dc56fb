"""Settings that are read though nobody named them: only where nobody else could have put them.

They name commands that are run. In a folder that others can write to (/tmp, a shared scratch) they may be a
stranger's, so there a file has to be named by its user.
"""

from __future__ import annotations

import os

from bootseer.errors import ConfigError
from bootseer.trust.owned_files import NotOwnedError, own_uids, read_owned, trusted_uids


def read_unnamed(path: str, shown: str, *, most_bytes: int) -> bytes | None:
    """The whole file; None if there is none.

    Args: path: absolute. shown: how people call it.
    Raises: ConfigError when it, its folder or one above it belongs to others or can be written to by them.
    """
    try:
        data, status = read_owned(path, most_bytes=most_bytes, uids=trusted_uids())
    except FileNotFoundError:
        return None
    except NotOwnedError as error:
        raise _refused(shown, str(error)) from None
    if status.st_uid not in own_uids():  # of somebody who has no number here, as root has none in a container
        raise _refused(shown, f"it belongs to user {status.st_uid}, not to {os.geteuid()}")
    return data


def _refused(shown: str, why: str) -> ConfigError:
    return ConfigError(
        f"{shown} is not read, as it may be somebody else's: {why}; if it is what you want, name it:"
        f" --config {shown}, else --config /dev/null"
    )
