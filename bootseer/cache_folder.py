"""Where the cache of this user is, who may have access to it, and how large it may become.

In: variables, the user, what file system it is on. Out: a folder that belongs to this user alone, or one error
that says what is wrong with it. What is in the cache is believed as far as its sums go, so nobody else may write
there, nor exchange one of the folders above it.
"""

from __future__ import annotations

import os
import re
import socket
import stat
from collections.abc import Mapping
from typing import NamedTuple

from bootseer.errors import ConfigError
from bootseer.storage.os_errors import map_os_errors
from bootseer.storage.page_cache import is_remote
from bootseer.trust.owned_files import NotOwnedError, check_owned_folder
from bootseer.trust.owned_files import trusted_uids as trusted_uids

VARIABLE = "BOOTSEER_CACHE"
LIMIT_VARIABLE = "BOOTSEER_CACHE_LIMIT"
SYSTEM_FOLDER = "/var/cache/bootseer"
TREES, UNPACKED = "trees", "unpacked"  # folders in it
_LIMIT = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*(%|[KMGT]i?B?|B?)", re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class Limit(NamedTuple):
    """How much the cache may hold; the smaller of both counts."""

    most_bytes: int | None = None
    share: float = 0.5  # of what the cache holds and what is free on its file system


def locate(environ: Mapping[str, str], user: int) -> str:
    """The folder of the cache of `user` (a number), made or not.

    Raises: ConfigError when there is no place for it.
    """
    named = environ.get(VARIABLE, "")
    if named:
        if not os.path.isabs(named):
            raise ConfigError(f"{VARIABLE}={named}: must be an absolute path")
        return os.path.normpath(named)
    if user == 0:
        return SYSTEM_FOLDER
    above = environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(above):
        home = environ.get("HOME", "")
        if not os.path.isabs(home):
            raise ConfigError(f"there is no home folder for the cache: set {VARIABLE} to a folder of a local disk")
        above = os.path.join(home, ".cache")
    return os.path.join(os.path.normpath(above), "bootseer")


def prepare(folder: str, *, node: str | None = None) -> str:
    """Makes the folder, checks whose it is, and gives the one in it that is the node's own.

    By default that is the folder itself, but on a network file system one by the name of this machine: other nodes
    may share it, and their locks and boots are not ours.

    Raises: ConfigError when it, or a folder above it, is another user's or others may write there; StorageError
    when it cannot be made.
    """
    with map_os_errors(folder):
        make_private(folder)
        _check(folder)
        if node is None and is_remote(folder):
            node = socket.gethostname()
        if node is not None:
            folder = os.path.join(folder, "node-" + re.sub(r"[^0-9A-Za-z._-]", "_", node))
            make_private(folder)
            _check(folder)
        for name in (TREES, UNPACKED):
            try:
                _check_itself(os.path.join(folder, name))
            except FileNotFoundError:
                pass  # it is made when something comes into it
    return folder


def make_private(folder: str) -> None:
    """Makes a folder, and those above it that are missing, for this user alone, whatever the umask.

    Raises: OSError.
    """
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        if not os.path.isdir(folder) and os.path.lexists(folder):
            raise
    except FileNotFoundError:
        above = os.path.dirname(folder)
        if above == folder:
            raise
        make_private(above)
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            pass  # another process was faster


def _check(folder: str) -> None:
    """The folder itself before what is above it, so that the reason is the nearest one."""
    _check_itself(folder)
    try:
        check_owned_folder(folder, uids=trusted_uids())
    except NotOwnedError as error:
        raise ConfigError(
            f"the cache {folder} could be exchanged by others: {error}; or name one elsewhere by {VARIABLE}"
        ) from error


def _check_itself(folder: str) -> None:
    found = os.stat(folder)
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{folder}: is no folder; name another one by {VARIABLE}")
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"{folder}: belongs to user {found.st_uid}, not to {os.geteuid()}, who runs this;"
            f" name a cache of your own by {VARIABLE}"
        )
    if found.st_mode & 0o022:
        raise ConfigError(
            f"{folder}: others may write to it (mode {stat.S_IMODE(found.st_mode):o}): chmod 700 {folder}"
        )


def parse_limit(text: str) -> Limit:
    """`50%`, `200GiB`, `1.5T`: units are powers of 1024, with or without `iB`.

    Raises: ConfigError.
    """
    found = _LIMIT.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"a cache of {text!r}: say a size such as 200GiB, or a share such as 50%")
    number, unit = float(found[1]), found[2].upper()
    if unit == "%":
        if number > 100:
            raise ConfigError(f"a cache of {text!r}: at most 100%")
        return Limit(share=number / 100)
    return Limit(most_bytes=int(number * _UNITS[unit.rstrip("B").rstrip("I")]), share=1.0)
