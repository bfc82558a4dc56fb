"""A generation of first-step caches, as it is stored: which files, of which tree, and when they were of use. Pure.

In: the payload of an envelope that is believed. Out: a Generation whose fields are bounded, or one error.
"""

from __future__ import annotations

import re

import msgspec

from bootseer.env.caches_kinds import is_path
from bootseer.errors import IntegrityError, Untrusted
from bootseer.formats import decode_json
from bootseer.tree.head import is_digest
from bootseer.tree.index import MOST_INDEX_BYTES

FORMAT = "bootseer-caches/1"
PAYLOAD_TYPE = "application/vnd.bootseer.caches.v1+json"
MOST_FILES = 1 << 16
MOST_BYTES = 1 << 40  # of all files
MOST_ENVELOPE_BYTES = 64 << 20
MOST_NUMBER = 999_999
_NAME = re.compile(r"cache-([0-9]{6})\.json")
_MOST_TIME = 1 << 62


class Fact(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A file. `path` begins with the kind; what is bound to a path has a folder for it: `extensions/<16 hex>/`."""

    path: str
    size: int  # bytes
    mtime_ns: int
    sha256: str
    since: int  # the generation that had it first
    used_in: int  # the last generation that was made by a start which read it
    used_s: int  # when that was, since the epoch


class Generation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What cache-N.json says."""

    format: str = FORMAT
    key: str
    number: int
    tree: str  # tree digest
    index_bytes: int
    made_s: int  # since the epoch
    files: list[Fact]  # sorted by path

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(fact.size for fact in self.files)


def name_of(number: int) -> str:
    """Of the file of a generation."""
    return f"cache-{number:06d}.json"


def number_of(name: str) -> int | None:
    """The generation that a file is named for."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def encode(generation: Generation) -> bytes:
    """The payload; raises IntegrityError for what no reader would take."""
    check(generation, "these caches")
    return msgspec.json.encode(generation)


def decode(payload: bytes, where: str, key: str, number: int) -> Generation:
    """The generation that was asked for.

    Raises: Untrusted when it is that of another key or number, which somebody has put there; FormatVersion;
    IntegrityError.
    """
    generation = decode_json(
        payload, Generation, FORMAT, where, what="no list of first-step caches", most_bytes=MOST_ENVELOPE_BYTES
    )
    check(generation, where)
    if generation.key != key:
        raise Untrusted(f"{where}: holds the caches of another key ({generation.key[:16]}): not loaded; delete it")
    if generation.number != number:
        raise Untrusted(f"{where}: is generation {generation.number} under another name: not loaded; delete it")
    return generation


def check(generation: Generation, where: str) -> None:
    """Raises IntegrityError unless all fields are within their bounds."""

    def refuse(what: str) -> IntegrityError:
        return IntegrityError(f"{where}: {what}")

    if not is_digest(generation.key) or not is_digest(generation.tree):
        raise refuse("its key or its tree is no SHA-256 in small letters")
    if not 0 < generation.number <= MOST_NUMBER:
        raise refuse(f"generation {generation.number}; 1 to {MOST_NUMBER}")
    if not 0 < generation.index_bytes <= MOST_INDEX_BYTES:
        raise refuse(f"an index of {generation.index_bytes} bytes; 1 to {MOST_INDEX_BYTES}")
    if len(generation.files) > MOST_FILES:
        raise refuse(f"{len(generation.files)} files; at most {MOST_FILES}")
    last = ""
    for fact in generation.files:
        if "/" not in fact.path or not is_path(fact.path):
            raise refuse(f"{fact.path[:80]!r} is no path of a cached file")
        if fact.path <= last:
            raise refuse(f"{fact.path[:80]!r} stands twice, or in the wrong place")
        last = fact.path
        if not is_digest(fact.sha256):
            raise refuse(f"{fact.path}: {fact.sha256[:80]!r} is no SHA-256 in small letters")
        if not (0 <= fact.size <= MOST_BYTES and abs(fact.mtime_ns) <= _MOST_TIME):
            raise refuse(f"{fact.path}: {fact.size} bytes, changed at {fact.mtime_ns} ns")
        is_number = 0 < fact.since <= generation.number and fact.since <= fact.used_in <= generation.number
        if not is_number or not 0 <= fact.used_s <= _MOST_TIME:
            raise refuse(f"{fact.path}: since {fact.since}, used in {fact.used_in} at {fact.used_s}")
    if generation.size > MOST_BYTES:
        raise refuse(f"{generation.size} bytes of files; at most {MOST_BYTES}")
