"""A record of what was warmed on this user's node, for events of the next start: one small file in the cache.

Written after each stage, read once by a start, when its ranks run. It decides nothing: if it cannot be read or
written, nothing counts as warmed. Several daemons may write it at once.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from bootseer.cache_folder import locate, prepare
from bootseer.errors import BootseerError
from bootseer.linux.files import replace_file
from bootseer.linux.locks import wait_lock
from bootseer.trust.owned_files import NotOwnedError, read_owned
from launcher.warm.results import CACHED, HELD, IN_PLACE, SEEDED, UNPACKED, Warmed, from_record, to_record

NAME = "warmed.json"
LOCK_NAME = "warmed.lock"
LOCK_S = 5.0  # to wait for other writers, each of which needs milliseconds
VERSION = 1
MAX_ENTRIES = 200
MAX_BYTES = 1 << 20
_KEPT = (CACHED, UNPACKED, IN_PLACE, SEEDED, HELD)


def write(found: Sequence[Warmed], environ: Mapping[str, str], now_s: float | None = None) -> None:
    """Add results that are available now; newer entries of the same data replace older ones."""
    now_s = time.time() if now_s is None else now_s
    kept = {(each.stage, each.what): {**to_record(each), "at_s": now_s} for each in found if each.how in _KEPT}
    if not kept:
        return
    with suppress(BootseerError, OSError):
        directory = prepare(locate(environ, os.geteuid()))
        with _locked(directory):
            older = [each for each in _read(directory) if (each["stage"], each["what"]) not in kept]
            entries = [*older, *kept.values()][-MAX_ENTRIES:]
            replace_file(os.path.join(directory, NAME), json.dumps({"v": VERSION, "entries": entries}).encode())


def find(what: Sequence[tuple[str, str]], environ: Mapping[str, str]) -> list[tuple[Warmed, float]]:
    """Return which of `what` (stage, digest) were warmed, and when, in seconds since the epoch."""
    try:
        entries = _read(prepare(locate(environ, os.geteuid())))
    except (BootseerError, OSError):
        return []
    found = []
    for each in entries:
        warmed = from_record(each)
        if warmed is not None and (warmed.stage, warmed.what) in what:
            found.append((warmed, float(each["at_s"])))
    return found


@contextmanager
def _locked(directory: str) -> Iterator[None]:
    """Keep out other writers, unless one hangs or the file system has no locks. Raises: OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(os.path.join(directory, LOCK_NAME), flags, 0o600)
    try:
        with suppress(OSError):
            wait_lock(fd, 0, timeout_s=LOCK_S)
        yield
    finally:
        os.close(fd)


def _read(directory: str) -> list[dict[str, Any]]:
    try:
        data, _ = read_owned(os.path.join(directory, NAME), max_bytes=MAX_BYTES)
        record = json.loads(data)
        entries = record["entries"] if record["v"] == VERSION else []
        return [each for each in entries if _is_entry(each)]
    except (OSError, NotOwnedError, ValueError, KeyError, TypeError, RecursionError):
        return []


def _is_entry(each: object) -> bool:
    if not isinstance(each, dict) or from_record(each) is None:
        return False
    at_s = each.get("at_s")
    return isinstance(at_s, int | float) and not isinstance(at_s, bool)
