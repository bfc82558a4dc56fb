"""What this user's node was warmed with, so that the next start can say that it was: one small file in the cache.

Written after each stage, read once by a start, when its ranks run. It decides nothing: what cannot be read or
written is as if nothing had been warmed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from bootseer.cache_folder import locate, prepare
from bootseer.errors import BootseerError
from bootseer.trust.owned_files import NotOwnedError, read_owned
from launcher.warm.results import CACHED, HELD, SEEDED, THERE, UNPACKED, Warmed, from_record, to_record

NAME = "warmed.json"
VERSION = 1
MOST_ENTRIES = 200
MOST_BYTES = 1 << 20
_KEPT = (CACHED, UNPACKED, THERE, SEEDED, HELD)


def note(found: Sequence[Warmed], environ: Mapping[str, str], now_s: float | None = None) -> None:
    """Adds what is at hand now; newer entries of the same thing replace older ones."""
    now_s = time.time() if now_s is None else now_s
    kept = {(each.stage, each.what): {**to_record(each), "at_s": now_s} for each in found if each.how in _KEPT}
    if not kept:
        return
    with suppress(BootseerError, OSError):
        folder = prepare(locate(environ, os.geteuid()))
        older = [each for each in _read(folder) if (each["stage"], each["what"]) not in kept]
        entries = [*older, *kept.values()][-MOST_ENTRIES:]
        path = os.path.join(folder, NAME)
        temporary = f"{path}.{os.getpid()}"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "w", encoding="ascii") as file:
            json.dump({"v": VERSION, "entries": entries}, file)
        os.replace(temporary, path)


def find(what: Sequence[tuple[str, str]], environ: Mapping[str, str]) -> list[tuple[Warmed, float]]:
    """Of things (stage, digest) those that were warmed, and when, in seconds since the epoch."""
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


def _read(folder: str) -> list[dict[str, Any]]:
    try:
        data, _ = read_owned(os.path.join(folder, NAME), most_bytes=MOST_BYTES)
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
