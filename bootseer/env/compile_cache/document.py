"""A stored generation of compile caches: its files, its tree, and the last use of each file. Pure.

In: the payload of a trusted envelope. Out: a Generation whose fields are bounded, or one error.
"""

from __future__ import annotations

import re

import msgspec

from bootseer.env.compile_cache.kinds import is_path
from bootseer.errors import IntegrityError, Untrusted
from bootseer.formats import decode_json
from bootseer.tree.head import is_digest
from bootseer.tree.index import MAX_INDEX_BYTES

FORMAT = "bootseer-caches/1"
PAYLOAD_TYPE = "application/vnd.bootseer.caches.v1+json"
MAX_FILES = 1 << 16
MAX_BYTES = 1 << 40  # of all files
MAX_ENVELOPE_BYTES = 64 << 20
MAX_NUMBER = 999_999
_NAME = re.compile(r"cache-([0-9]{6})\.json")
_MAX_TIME = 1 << 62


class CachedFile(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A file. `path` begins with the kind; a bound kind has a directory for each path: `extensions/<16 hex>/`."""

    path: str
    size: int  # bytes
    mtime_ns: int
    sha256: str
    since: int  # the first generation with it
    used_in: int  # the last generation whose maker has read it
    used_s: int  # time of that use, since the epoch


class CacheGeneration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of cache-N.json."""

    format: str = FORMAT
    key: str
    number: int
    tree: str  # tree digest
    index_bytes: int
    made_s: int  # since the epoch
    files: list[CachedFile]  # sorted by path

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(fact.size for fact in self.files)


def name_of(number: int) -> str:
    """Return the file name of a generation."""
    return f"cache-{number:06d}.json"


def number_of(name: str) -> int | None:
    """Return the generation number in a file name, None for other files."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def encode(generation: CacheGeneration) -> bytes:
    """Return the payload; raises IntegrityError for fields that no reader would accept."""
    check(generation, "these caches")
    return msgspec.json.encode(generation)


def decode(payload: bytes, where: str, key: str, number: int) -> CacheGeneration:
    """Return the requested generation.

    Raises: Untrusted if it has another key or number, so it was put there on purpose; FormatVersion;
    IntegrityError.
    """
    generation = decode_json(
        payload,
        CacheGeneration,
        FORMAT,
        where,
        what="not a list of compile caches",
        max_bytes=MAX_ENVELOPE_BYTES,
    )
    check(generation, where)
    if generation.key != key:
        raise Untrusted(f"{where}: holds the caches of another key ({generation.key[:16]}): not loaded; delete it")
    if generation.number != number:
        raise Untrusted(f"{where}: is generation {generation.number} under another name: not loaded; delete it")
    return generation


def check(generation: CacheGeneration, where: str) -> None:
    """Raise IntegrityError unless all fields are within their bounds."""

    def refuse(what: str) -> IntegrityError:
        return IntegrityError(f"{where}: {what}")

    if not is_digest(generation.key) or not is_digest(generation.tree):
        raise refuse("its key or its tree is not a lower-case SHA-256")
    if not 0 < generation.number <= MAX_NUMBER:
        raise refuse(f"generation {generation.number}; 1 to {MAX_NUMBER}")
    if not 0 < generation.index_bytes <= MAX_INDEX_BYTES:
        raise refuse(f"an index of {generation.index_bytes} bytes; 1 to {MAX_INDEX_BYTES}")
    if len(generation.files) > MAX_FILES:
        raise refuse(f"{len(generation.files)} files; at most {MAX_FILES}")
    last = ""
    for fact in generation.files:
        if "/" not in fact.path or not is_path(fact.path):
            raise refuse(f"{fact.path[:80]!r} is not a path of a cached file")
        if fact.path <= last:
            raise refuse(f"{fact.path[:80]!r} is listed twice, or not in order")
        last = fact.path
        if not is_digest(fact.sha256):
            raise refuse(f"{fact.path}: {fact.sha256[:80]!r} is not a lower-case SHA-256")
        if not (0 <= fact.size <= MAX_BYTES and abs(fact.mtime_ns) <= _MAX_TIME):
            raise refuse(f"{fact.path}: {fact.size} bytes, changed at {fact.mtime_ns} ns")
        is_number = 0 < fact.since <= generation.number and fact.since <= fact.used_in <= generation.number
        if not is_number or not 0 <= fact.used_s <= _MAX_TIME:
            raise refuse(f"{fact.path}: since {fact.since}, used in {fact.used_in} at {fact.used_s}")
    if generation.size > MAX_BYTES:
        raise refuse(f"{generation.size} bytes of files; at most {MAX_BYTES}")
