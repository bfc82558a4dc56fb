"""What env-NNNNNN.json says: which tree is the environment of a key, for which targets, how long. Pure.

In: the payload of an envelope that is believed (bootseer.trust). Out: a Snapshot whose fields are bounded, or one
error in one line. docs/formats.md is the format.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import msgspec

from bootseer.env.layout import is_key
from bootseer.errors import IntegrityError
from bootseer.formats import decode_json
from bootseer.tree.head import is_digest
from bootseer.tree.index import MOST_ENTRIES, MOST_INDEX_BYTES

FORMAT = "bootseer-env/1"
PAYLOAD_TYPE = "application/vnd.bootseer.env.v1+json"
MOST_ENVELOPE_BYTES = 8 << 20
MOST_TARGETS = 64
MOST_TARGET_BYTES = 4095
MOST_NAME_BYTES = 255  # of a name in a target's path
MOST_LISTED = 1000  # paths that were left out, or written outside
MOST_LISTED_BYTES = 1024  # of such a path
MOST_VERSION_BYTES = 64
MOST_TIME_S = float(1 << 40)
MOST_SETUP_S = 1e7
MOST_BYTES = 1 << 60


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The environment of a key."""

    format: str = FORMAT
    key: str
    tree: str  # tree digest
    index_bytes: int  # of the index object
    targets: list[str]  # absolute folders; "0", "1", ... of the tree's root
    created_s: float  # since the epoch
    expires_s: float | None  # since the epoch; None: never
    setup_s: float  # how long the set-up commands took
    distributions: str  # SHA-256 of the list of distributions after set-up, "" if not known
    python: str  # version of the target's interpreter, "" if not known
    files: int  # regular ones in the tree
    bytes: int  # of them
    deleted: int  # names that set-up took away
    left_out: list[str]  # credentials and the like: paths in the target
    outside: list[str]  # what set-up wrote outside the targets
    relocatable: bool


def encode(snapshot: Snapshot) -> bytes:
    """The payload; raises IntegrityError for what no reader would take."""
    check(snapshot, "this snapshot")
    return msgspec.json.encode(snapshot)


def decode(payload: bytes, where: str) -> Snapshot:
    """Raises: FormatVersion for another format or a newer version of it; IntegrityError for everything else."""
    snapshot = decode_json(payload, Snapshot, FORMAT, where, what="no snapshot", most_bytes=MOST_ENVELOPE_BYTES)
    check(snapshot, where)
    return snapshot


def check(snapshot: Snapshot, where: str) -> None:
    """Raises IntegrityError unless all fields are within their bounds."""
    reason = _why_wrong(snapshot)
    if reason:
        raise IntegrityError(f"{where}: {reason}")


def is_expired(snapshot: Snapshot, now_s: float) -> bool:
    """Whether a start at `now_s` (since the epoch) may not use it any more."""
    return snapshot.expires_s is not None and now_s >= snapshot.expires_s


def listed(paths: Iterable[str]) -> list[str]:
    """As many as `left_out` and `outside` may hold, in a form that a terminal can show."""
    found: list[str] = []
    for path in paths:
        if len(found) == MOST_LISTED:
            break
        shown = "".join(letter if letter.isprintable() else _escaped(letter) for letter in path)
        while len(shown.encode()) > MOST_LISTED_BYTES:
            shown = shown[: MOST_LISTED_BYTES // 4 - 3] + "..."
        if shown:
            found.append(shown)
    return found


def why_no_targets(targets: Sequence[str]) -> str:
    """What is wrong with folders that are to be targets; "" if nothing is."""
    if not 1 <= len(targets) <= MOST_TARGETS:
        return f"has {len(targets)} targets; 1 to {MOST_TARGETS}"
    for target in targets:
        if reason := _why_no_target(target):
            return f"the target {_shown(target)} {reason}"
    ordered = sorted(f"{target}/" for target in targets)
    for above, under in itertools.pairwise(ordered):
        if under.startswith(above):
            return f"the target {_shown(under[:-1])} is in, or is, another one"
    return ""


def _why_wrong(snapshot: Snapshot) -> str:
    if snapshot.format != FORMAT:
        return f"has format {_shown(snapshot.format)}"
    if not is_key(snapshot.key):
        return f"{_shown(snapshot.key)} is no key: 64 hex digits"
    if not is_digest(snapshot.tree):
        return f"{_shown(snapshot.tree)} is no SHA-256 in small letters"
    if not 0 < snapshot.index_bytes <= MOST_INDEX_BYTES:
        return f"an index of {snapshot.index_bytes} bytes; 1 to {MOST_INDEX_BYTES}"
    if reason := why_no_targets(snapshot.targets):
        return reason
    if not _is_within(snapshot.created_s, 0.0, MOST_TIME_S):
        return "was made at an impossible time"
    expires_s = snapshot.expires_s
    if expires_s is not None and (not _is_within(expires_s, 0.0, MOST_TIME_S) or expires_s <= snapshot.created_s):
        return "expires at an impossible time"
    if not _is_within(snapshot.setup_s, 0.0, MOST_SETUP_S):
        return "has an impossible set-up time"
    if snapshot.distributions and not is_digest(snapshot.distributions):
        return f"{_shown(snapshot.distributions)} is no SHA-256 in small letters"
    if snapshot.python and not _is_text(snapshot.python, MOST_VERSION_BYTES):
        return f"{_shown(snapshot.python)} is no version"
    for name, count, most in (
        ("files", snapshot.files, MOST_ENTRIES),
        ("deleted names", snapshot.deleted, MOST_ENTRIES),
        ("bytes", snapshot.bytes, MOST_BYTES),
    ):
        if not 0 <= count <= most:
            return f"has {count} {name}; 0 to {most}"
    for paths in (snapshot.left_out, snapshot.outside):
        if len(paths) > MOST_LISTED:
            return f"lists {len(paths)} paths; at most {MOST_LISTED}"
        for path in paths:
            if not _is_text(path, MOST_LISTED_BYTES):
                return f"lists {_shown(path)}, which is no path that can be shown"
    return ""


def _why_no_target(target: str) -> str:
    if not target.startswith("/"):
        return "is not absolute"
    if not _is_text(target, MOST_TARGET_BYTES):
        return "is too long, or has letters that cannot be shown"
    names = target[1:].split("/")
    if any(name in ("", ".", "..") for name in names):
        return "is no plain path of a folder: no '.', '..' and empty names, and not /"
    if any(len(name.encode()) > MOST_NAME_BYTES for name in names):
        return "has a name that is too long"
    return ""


def _is_within(value: float, least: float, most: float) -> bool:
    return math.isfinite(value) and least <= value <= most


def _is_text(text: str, most_bytes: int) -> bool:
    """Surrogates are not printable, so what is can be encoded."""
    return bool(text) and text.isprintable() and len(text.encode()) <= most_bytes


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")


def _shown(text: str) -> str:
    return ascii(text[:80])
