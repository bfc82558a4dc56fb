"""Location, permissions and size limit of this user's cache.

In: variables, the user, the file system. Out: a directory that belongs to this user alone, or one error with the
reason. The cache is trusted as far as its checksums reach, so no other user may write there or replace a parent
directory.
"""

from __future__ import annotations

import os
import re
import socket
import stat
from collections.abc import Mapping
from typing import NamedTuple

from bootseer.errors import ConfigError
from bootseer.linux.page_cache import is_remote
from bootseer.storage.os_errors import map_os_errors
from bootseer.trust.owned_files import NotOwnedError, check_owned_directory
from bootseer.trust.owned_files import trusted_uids as trusted_uids

VARIABLE = "BOOTSEER_CACHE"
LIMIT_VARIABLE = "BOOTSEER_CACHE_LIMIT"
SYSTEM_DIRECTORY = "/var/cache/bootseer"
TREES, UNPACKED = "trees", "unpacked"  # directories in it
_LIMIT = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*(%|[KMGT]i?B?|B?)", re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class Limit(NamedTuple):
    """The size limit of the cache; the smaller of both counts."""

    max_bytes: int | None = None
    share: float = 0.5  # of the cache's size plus the free space of its file system


def locate(environ: Mapping[str, str], user: int) -> str:
    """Return the cache directory of `user` (a number), which may not exist yet.

    Raises: ConfigError if there is no place for it.
    """
    named = environ.get(VARIABLE, "")
    if named:
        if not os.path.isabs(named):
            raise ConfigError(f"{VARIABLE}={named}: must be an absolute path")
        return os.path.normpath(named)
    if user == 0:
        return SYSTEM_DIRECTORY
    above = environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(above):
        home = environ.get("HOME", "")
        if not os.path.isabs(home):
            raise ConfigError(f"no home directory for the cache; set {VARIABLE} to a directory on a local disk")
        above = os.path.join(home, ".cache")
    return os.path.join(os.path.normpath(above), "bootseer")


def prepare(directory: str, *, node: str | None = None) -> str:
    """Create the cache directory, check its owner, and return the directory of this node.

    By default that is the directory itself. On a network file system it is one named after this machine: other
    nodes may share the cache, but not locks and boots.

    Raises: ConfigError if it, or a parent directory, belongs to another user or others may write there;
    StorageError if it cannot be created.
    """
    with map_os_errors(directory):
        make_private_dir(directory)
        _check(directory)
        if node is None and is_remote(directory):
            node = socket.gethostname()
        if node is not None:
            directory = os.path.join(directory, "node-" + re.sub(r"[^0-9A-Za-z._-]", "_", node))
            make_private_dir(directory)
            _check(directory)
        for name in (TREES, UNPACKED):
            try:
                _check_itself(os.path.join(directory, name))
            except FileNotFoundError:
                pass  # it is created when first used
    return directory


def make_private_dir(directory: str) -> None:
    """Create a directory and its missing parents for this user alone, with any umask.

    Raises: OSError.
    """
    try:
        os.mkdir(directory, 0o700)
    except FileExistsError:
        if not os.path.isdir(directory) and os.path.lexists(directory):
            raise
    except FileNotFoundError:
        above = os.path.dirname(directory)
        if above == directory:
            raise
        make_private_dir(above)
        try:
            os.mkdir(directory, 0o700)
        except FileExistsError:
            pass  # another process was faster


def _check(directory: str) -> None:
    """Check the directory itself before its parents, so that the error names the nearest reason."""
    _check_itself(directory)
    try:
        check_owned_directory(directory, uids=trusted_uids())
    except NotOwnedError as error:
        raise ConfigError(
            f"the cache {directory}: other users could replace it: {error}; or set {VARIABLE} to another directory"
        ) from error


def _check_itself(directory: str) -> None:
    found = os.stat(directory)
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{directory}: is not a directory; set {VARIABLE} to another one")
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"{directory}: belongs to user {found.st_uid}, not to the current user {os.geteuid()};"
            f" set {VARIABLE} to a cache of your own"
        )
    if found.st_mode & 0o022:
        raise ConfigError(
            f"{directory}: others may write to it (mode {stat.S_IMODE(found.st_mode):o}): chmod 700 {directory}"
        )


def parse_limit(text: str) -> Limit:
    """Parse a limit such as `50%`, `200GiB`, `1.5T`; units are powers of 1024, with or without `iB`.

    Raises: ConfigError.
    """
    found = _LIMIT.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"cache limit {text!r}: give a size such as 200GiB, or a share such as 50%")
    number, unit = float(found[1]), found[2].upper()
    if unit == "%":
        if number > 100:
            raise ConfigError(f"cache limit {text!r}: the maximum is 100%")
        return Limit(share=number / 100)
    return Limit(max_bytes=int(number * _UNITS[unit.rstrip("B").rstrip("I")]), share=1.0)
