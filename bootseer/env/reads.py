"""PURE: what set-up has read, as names: with what lies under them on a node these give the key of an environment.

In: names and kinds, or the payload of an envelope that is believed. Out: `Reads` whose fields are bounded, or one
error in one line. docs/formats.md is the format.

Names are relative below the working folder, `~/...` below the user's home, else absolute; of kind ABOVE alone, in
any folder above the working one.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping

import msgspec

from bootseer.env.layout import is_key
from bootseer.errors import IntegrityError
from bootseer.formats import decode_json

FORMAT = "bootseer-env-reads/1"
PAYLOAD_TYPE = "application/vnd.bootseer.env-reads.v1+json"
MOST_ENVELOPE_BYTES = 8 << 20
MOST_READS = 20_000
MOST_MADE = 50_000
MOST_NAME_BYTES = 4096
MOST_STATE_BYTES = 4096

OBSERVED, GUESSED = "observed", "guessed"

# What was read of a name, and how a label says so.
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
    """What decides beside the first guess."""

    format: str = FORMAT
    guess: str  # key of the first guess
    how: str  # OBSERVED, or GUESSED: the files that commands name
    is_whole: bool = False  # guessed: with all of the working folder
    is_placed: bool = False  # where the working folder lies decides as well
    reads: list[tuple[str, str]] = []  # name and kind, sorted
    made: dict[str, list[str]] = {}  # by name of a folder that was listed: names in it that set-up makes itself
    # By label, of what set-up reads and then changes itself: what it was, and is then. Both count as the first.
    left: dict[str, tuple[str, str]] = {}


def label(name: str, kind: str) -> str:
    """As key documents have it."""
    return name + _SUFFIXES[kind]


def states_for_key(reads: Reads, now: Mapping[str, str]) -> dict[str, str]:
    """Of what is there now, by label, what the key has of it."""
    found = {}
    for name, state in sorted(now.items()):
        pair = reads.left.get(name)
        found[name] = pair[0] if pair is not None and state == pair[1] else state
    return found


def encode(reads: Reads) -> bytes:
    """The payload, the same for the same reads; raises IntegrityError for what no reader would take."""
    _check(reads, "what set-up reads")
    return msgspec.json.encode(reads, order="sorted")


def decode(payload: bytes, where: str) -> Reads:
    """Raises: FormatVersion for another format or a newer version of it; IntegrityError for everything else."""
    found = decode_json(payload, Reads, FORMAT, where, what="no list of reads", most_bytes=MOST_ENVELOPE_BYTES)
    _check(found, where)
    return found


def _check(reads: Reads, where: str) -> None:
    reason = _why_wrong(reads)
    if reason:
        raise IntegrityError(f"{where}: {reason}")


def _why_wrong(reads: Reads) -> str:
    if not is_key(reads.guess):
        return f"{reads.guess[:80]!a} is no key: 64 hex digits"
    if reads.how not in (OBSERVED, GUESSED):
        return f"{reads.how[:80]!a} is no way to know what set-up reads"
    if len(reads.reads) > MOST_READS:
        return f"lists {len(reads.reads)} names; at most {MOST_READS}"
    if list(reads.reads) != sorted(set(reads.reads)):
        return "its names are not sorted, or one stands there twice"
    for name, kind in reads.reads:
        if kind not in _SUFFIXES:
            return f"{kind[:80]!a} is nothing that can be read of a name"
        if reason := _why_no_name(name, kind):
            return f"{name[:80]!a} {reason}"
    if sum(map(len, reads.made.values())) > MOST_MADE:
        return f"lists more than {MOST_MADE} names that set-up makes"
    for name, names in reads.made.items():
        if (name, NAMES) not in set(reads.reads):
            return f"{name[:80]!a} was not listed"
        if any(not each or "/" in each.rstrip("/") or len(each.encode()) > MOST_NAME_BYTES for each in names):
            return f"{name[:80]!a} has a name in it that is none"
    labels = {label(name, kind) for name, kind in reads.reads}
    for name, pair in reads.left.items():
        if name not in labels:
            return f"{name[:80]!a} was not read"
        if any(len(state.encode()) > MOST_STATE_BYTES for state in pair):
            return f"{name[:80]!a} has a state that is too long"
    return ""


def _why_no_name(name: str, kind: str) -> str:
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return "is not UTF-8"
    if not 0 < size <= MOST_NAME_BYTES or "\0" in name:
        return "is empty, or too long, or has a NUL"
    if kind == ABOVE:
        return "" if "/" not in name and name not in (".", "..") else "is more than a name"
    path = name[2:] if name.startswith("~/") else name
    if posixpath.normpath(path) != path or path.split("/")[0] == "..":
        return "is no plain path"
    return ""
