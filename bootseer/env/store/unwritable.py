"""Explains why an environment store cannot be written, and names the fix: the store decides, not a file in it.

In: the URL of a store, maybe the error of a write. Out: one line that begins with --env-store. A directory is also
examined without a write.
"""

from __future__ import annotations

import errno
import os

from bootseer import aio
from bootseer.errors import BootseerError, PermissionDenied
from bootseer.storage.local_stores import directory_of
from bootseer.storage.paths import redact

EXAMINE_S = 30.0  # a file system may not answer
_OTHER = "name a store that you can write"


def why_unwritable(url: str, *, checks_space: bool = False, needs_parent: bool = False) -> str:
    """Return why a store cannot be written, without a write; "" if it can be, or if that is not known.

    Args: checks_space: examine also the free space, which some file systems do not report. needs_parent: whether
        the directory above the store has to exist; `bootseer env snapshot` makes it.
    """
    directory = directory_of(url)
    if not directory:
        return ""
    try:
        why, above = aio.run_sync(aio.run_abandonable(_examine, url, directory, checks_space, timeout_s=EXAMINE_S))
    except (BootseerError, OSError):
        return ""  # later users of the store report it
    return why or (above if needs_parent else "")


def explain_failure(error: BootseerError, url: str) -> str:
    """Return why a write into a store has failed."""
    directory, cause = directory_of(url), error.__cause__
    number = cause.errno if isinstance(cause, OSError) else None
    reason = _reasons(url).get(number or 0, "")
    if number in (errno.ENOENT, errno.ENOTDIR) and directory:
        reason = why_unwritable(url, needs_parent=True)
    elif not reason and isinstance(error, PermissionDenied):
        reason = f"--env-store {redact(url)}: this user may not write there: {error}; {_OTHER}"
    return reason or f"--env-store {redact(url)}: {error}"


def _reasons(url: str) -> dict[int, str]:
    """PURE: return the reason for each error number."""
    name = f"--env-store {redact(url)}"
    read_only = f"{name} is read-only: {_OTHER}, or mount it for writing"
    refused = f"{name}: this user may not write there: {_OTHER}, or change its permissions"
    full = f"{name} is full: delete environments (`bootseer env gc`), or name another store"
    return {
        errno.EROFS: read_only,
        errno.EACCES: refused,
        errno.EPERM: refused,
        errno.ENOSPC: full,
        errno.EDQUOT: full,
    }


def _examine(url: str, directory: str, checks_space: bool) -> tuple[str, str]:
    """Return why a directory cannot be written, and why the one above it is none; "" each if not so."""
    there = directory
    while not os.path.lexists(there) and there != "/":
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        above = "" if there == directory else f": {there}"
        if os.path.islink(there):
            return f"--env-store {redact(url)}{above} is a link to nothing: mount or make {os.readlink(there)}", ""
        return f"--env-store {redact(url)}{above} is a file: name a directory", ""
    parent, missing = os.path.dirname(directory), ""
    if there not in (directory, parent):
        name = f"--env-store {redact(url)}"
        missing = f"{name}: its parent directory {parent} does not exist: make it, or correct the path"
    facts, reasons = os.statvfs(there), _reasons(url)
    if facts.f_flag & os.ST_RDONLY:
        return reasons[errno.EROFS], missing
    if not os.access(there, os.W_OK | os.X_OK, effective_ids=True):
        return reasons[errno.EACCES], missing
    if checks_space and facts.f_blocks and not facts.f_bavail:
        return reasons[errno.ENOSPC], missing
    return "", missing
