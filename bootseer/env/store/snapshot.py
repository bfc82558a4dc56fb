"""The content of env-NNNNNN.json: the tree, targets and lifetime of the environment of a key. Pure.

In: the payload of a trusted envelope (bootseer.trust). Out: a Snapshot with bounded fields, or a one-line error.
docs/reference/formats.md specifies the format.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import msgspec

from bootseer.env.store_layout import is_key
from bootseer.errors import IntegrityError
from bootseer.formats import decode_json
from bootseer.tree.head import is_digest
from bootseer.tree.index import MAX_ENTRIES, MAX_INDEX_BYTES

FORMAT = "bootseer-env/1"
PAYLOAD_TYPE = "application/vnd.bootseer.env.v1+json"
MAX_ENVELOPE_BYTES = 8 << 20
MAX_TARGETS = 64
MAX_TARGET_BYTES = 4095
MAX_NAME_BYTES = 255  # of a name in a target's path
MAX_LISTED = 1000  # paths that were left out, or written outside the targets
MAX_LISTED_BYTES = 1024  # of such a path
MAX_VERSION_BYTES = 64
MAX_TIME_S = float(1 << 40)
MAX_SETUP_S = 1e7
MAX_BYTES = 1 << 60


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The environment of a key."""

    format: str = FORMAT
    key: str
    tree: str  # tree digest
    index_bytes: int  # of the index object
    targets: list[str]  # absolute directories; "0", "1", ... in the tree's root
    created_s: float  # since the epoch
    expires_s: float | None  # since the epoch; None: never
    setup_s: float  # duration of the set-up commands, with the compilation of what pip has installed
    distributions: str  # SHA-256 of the list of distributions after set-up, "" if unknown
    python: str  # version of the target's interpreter, "" if unknown
    files: int  # regular files in the tree
    bytes: int  # in these files
    deleted: int  # names that set-up deleted
    left_out: list[str]  # credentials and similar files: paths in the target
    outside: list[str]  # paths that set-up wrote outside the targets
    relocatable: bool


def encode(snapshot: Snapshot) -> bytes:
    """Encode the payload. Raises: IntegrityError if no reader would accept it."""
    check(snapshot, "this snapshot")
    return msgspec.json.encode(snapshot)


def decode(payload: bytes, where: str) -> Snapshot:
    """Decode a payload. Raises: FormatVersion for another format or version; IntegrityError for other faults."""
    snapshot = decode_json(payload, Snapshot, FORMAT, where, what="not a snapshot", max_bytes=MAX_ENVELOPE_BYTES)
    check(snapshot, where)
    return snapshot


def check(snapshot: Snapshot, where: str) -> None:
    """Raise IntegrityError unless all fields are within their bounds."""
    reason = _why_wrong(snapshot)
    if reason:
        raise IntegrityError(f"{where}: {reason}")


def is_expired(snapshot: Snapshot, now_s: float) -> bool:
    """Return whether it has expired at `now_s` (since the epoch)."""
    return snapshot.expires_s is not None and now_s >= snapshot.expires_s


def listed(paths: Iterable[str]) -> list[str]:
    """Return as many paths as `left_out` and `outside` may contain, in printable form."""
    found: list[str] = []
    for path in paths:
        if len(found) == MAX_LISTED:
            break
        shown = "".join(letter if letter.isprintable() else _escaped(letter) for letter in path)
        while len(shown.encode()) > MAX_LISTED_BYTES:
            shown = shown[: MAX_LISTED_BYTES // 4 - 3] + "..."
        if shown:
            found.append(shown)
    return found


def why_no_targets(targets: Sequence[str]) -> str:
    """Return why directories cannot be targets; "" if they can."""
    if not 1 <= len(targets) <= MAX_TARGETS:
        return f"has {len(targets)} targets; 1 to {MAX_TARGETS}"
    for target in targets:
        if reason := _why_no_target(target):
            return f"the target {_shown(target)} {reason}"
    ordered = sorted(f"{target}/" for target in targets)
    for above, under in itertools.pairwise(ordered):
        if under.startswith(above):
            return f"the target {_shown(under[:-1])} equals, or is inside, another one"
    return ""


def _why_wrong(snapshot: Snapshot) -> str:
    if snapshot.format != FORMAT:
        return f"has format {_shown(snapshot.format)}"
    if not is_key(snapshot.key):
        return f"{_shown(snapshot.key)} is not a key (64 hex digits)"
    if not is_digest(snapshot.tree):
        return f"{_shown(snapshot.tree)} is not a SHA-256 in lower case"
    if not 0 < snapshot.index_bytes <= MAX_INDEX_BYTES:
        return f"an index of {snapshot.index_bytes} bytes; 1 to {MAX_INDEX_BYTES}"
    if reason := why_no_targets(snapshot.targets):
        return reason
    if not _is_within(snapshot.created_s, 0.0, MAX_TIME_S):
        return "has an invalid creation time"
    expires_s = snapshot.expires_s
    if expires_s is not None and (not _is_within(expires_s, 0.0, MAX_TIME_S) or expires_s <= snapshot.created_s):
        return "has an invalid expiry time"
    if not _is_within(snapshot.setup_s, 0.0, MAX_SETUP_S):
        return "has an invalid set-up duration"
    if snapshot.distributions and not is_digest(snapshot.distributions):
        return f"{_shown(snapshot.distributions)} is not a SHA-256 in lower case"
    if snapshot.python and not _is_text(snapshot.python, MAX_VERSION_BYTES):
        return f"{_shown(snapshot.python)} is not a version"
    for name, count, most in (
        ("files", snapshot.files, MAX_ENTRIES),
        ("deleted names", snapshot.deleted, MAX_ENTRIES),
        ("bytes", snapshot.bytes, MAX_BYTES),
    ):
        if not 0 <= count <= most:
            return f"has {count} {name}; 0 to {most}"
    for paths in (snapshot.left_out, snapshot.outside):
        if len(paths) > MAX_LISTED:
            return f"lists {len(paths)} paths; at most {MAX_LISTED}"
        for path in paths:
            if not _is_text(path, MAX_LISTED_BYTES):
                return f"lists {_shown(path)}, which is not a printable path"
    return ""


def _why_no_target(target: str) -> str:
    if not target.startswith("/"):
        return "is not absolute"
    if not _is_text(target, MAX_TARGET_BYTES):
        return "is too long, or has characters that are not printable"
    names = target[1:].split("/")
    if any(name in ("", ".", "..") for name in names):
        return "is not a normalized path of a directory (no '.', '..' and empty names, not /)"
    if any(len(name.encode()) > MAX_NAME_BYTES for name in names):
        return "has a name that is too long"
    return ""


def _is_within(value: float, least: float, most: float) -> bool:
    return math.isfinite(value) and least <= value <= most


def _is_text(text: str, max_bytes: int) -> bool:
    """Return whether a text is printable, so encodable (surrogates are not printable), and short enough."""
    return bool(text) and text.isprintable() and len(text.encode()) <= max_bytes


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")


def _shown(text: str) -> str:
    return ascii(text[:80])
