"""PURE: the names that set-up has read: their states on a node make the key of an environment.

In: names and kinds, or the payload of a trusted envelope. Out: `Reads` with bounded fields, or a one-line error.
docs/reference/formats.md specifies the format.

Names are relative below the working directory, `~/...` below the user's home, else absolute. Those of kind ABOVE
stand for files in any directory above the working directory.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping

import msgspec

from bootseer.env.store_layout import is_key
from bootseer.errors import IntegrityError
from bootseer.formats import decode_json

FORMAT = "bootseer-env-reads/1"
PAYLOAD_TYPE = "application/vnd.bootseer.env-reads.v1+json"
MAX_ENVELOPE_BYTES = 8 << 20
MAX_READS = 20_000
MAX_MADE = 50_000
MAX_NAME_BYTES = 4096
MAX_STATE_BYTES = 4096

OBSERVED, GUESSED = "observed", "guessed"

# What was read of a name, and its suffix in labels.
FILE, THERE, NAMES, MODULES, LINK, ABOVE, SETTINGS, GIT, REFS = (
    *("file", "there", "names", "modules", "link", "above", "settings", "git", "refs"),
)
_SUFFIXES = {
    FILE: "",
    THERE: " (whether it is there)",
    NAMES: " (names in it)",
    MODULES: " (modules of Python's names)",
    LINK: " (where it leads)",
    ABOVE: " (in a folder above)",
    SETTINGS: " (settings)",
    GIT: " (state of git)",
    REFS: " (branches and tags of git)",
}


class Reads(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The names that make the key, besides the first guess."""

    format: str = FORMAT
    guess: str  # key of the first guess
    how: str  # OBSERVED, or GUESSED: the files that commands name
    is_whole: bool = False  # guessed: with all of the working directory
    is_placed: bool = False  # the path of the working directory is part of the key as well
    reads: list[tuple[str, str]] = []  # name and kind, sorted
    made: dict[str, list[str]] = {}  # by name of a listed directory: names in it that set-up itself makes
    # By label, for files that set-up reads and then changes: states before and after. Both count as the one
    # before.
    left: dict[str, tuple[str, str]] = {}


def label(name: str, kind: str) -> str:
    """Return the label of a name in key documents."""
    return name + _SUFFIXES[kind]


def states_for_key(reads: Reads, now: Mapping[str, str]) -> dict[str, str]:
    """Return the states that go into the key, by label, for the present states."""
    found = {}
    for name, state in sorted(now.items()):
        pair = reads.left.get(name)
        found[name] = pair[0] if pair is not None and state == pair[1] else state
    return found


def encode(reads: Reads) -> bytes:
    """Encode the payload, the same for the same reads. Raises: IntegrityError if no reader would accept it."""
    _check(reads, "list of reads")
    return msgspec.json.encode(reads, order="sorted")


def decode(payload: bytes, where: str) -> Reads:
    """Decode a payload. Raises: FormatVersion for another format or version; IntegrityError for other faults."""
    found = decode_json(payload, Reads, FORMAT, where, what="not a list of reads", max_bytes=MAX_ENVELOPE_BYTES)
    _check(found, where)
    return found


def _check(reads: Reads, where: str) -> None:
    reason = _why_wrong(reads)
    if reason:
        raise IntegrityError(f"{where}: {reason}")


def _why_wrong(reads: Reads) -> str:
    if not is_key(reads.guess):
        return f"{reads.guess[:80]!a} is not a key (64 hex digits)"
    if reads.how not in (OBSERVED, GUESSED):
        return f"{reads.how[:80]!a} is not a method to find what set-up reads"
    if len(reads.reads) > MAX_READS:
        return f"lists {len(reads.reads)} names; at most {MAX_READS}"
    if list(reads.reads) != sorted(set(reads.reads)):
        return "its names are not sorted, or one is listed twice"
    for name, kind in reads.reads:
        if kind not in _SUFFIXES:
            return f"{kind[:80]!a} is not a kind of read"
        if reason := _why_no_name(name, kind):
            return f"{name[:80]!a} {reason}"
    if sum(map(len, reads.made.values())) > MAX_MADE:
        return f"lists more than {MAX_MADE} names that set-up makes"
    for name, names in reads.made.items():
        if (name, NAMES) not in set(reads.reads):
            return f"{name[:80]!a} was not listed"
        if any(not each or "/" in each.rstrip("/") or len(each.encode()) > MAX_NAME_BYTES for each in names):
            return f"{name[:80]!a} lists an invalid name"
    labels = {label(name, kind) for name, kind in reads.reads}
    for name, pair in reads.left.items():
        if name not in labels:
            return f"{name[:80]!a} was not read"
        if any(len(state.encode()) > MAX_STATE_BYTES for state in pair):
            return f"{name[:80]!a} has a state that is too long"
    return ""


def _why_no_name(name: str, kind: str) -> str:
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return "is not UTF-8"
    if not 0 < size <= MAX_NAME_BYTES or "\0" in name:
        return "is empty, too long, or has a NUL"
    if kind == ABOVE:
        return "" if "/" not in name and name not in (".", "..") else "is not a single name"
    path = name[2:] if name.startswith("~/") else name
    if posixpath.normpath(path) != path or path.split("/")[0] == "..":
        return "is not a normalized path"
    return ""
