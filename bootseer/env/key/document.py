"""PURE: the key document of an environment: all facts that decide the result of set-up commands, and their key.

In: facts that keying.py collected. Out: canonical JSON, its SHA-256 (the key), and the differences of two
documents, entry by entry. The document is stored in plain text beside the snapshot, only for `explain`; readers do
not trust it.

It contains no secrets (redaction.py): each is the constant "(secret)". Documents that differ only in a secret are
equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from bootseer.errors import ConfigError, FormatVersion
from bootseer.formats import decode_json

FORMAT = "bootseer-env-key/2"
OLD_FORMAT = "bootseer-env-key/1"  # the same without `reads` and `seen`: stores still have some
MAX_DOCUMENT_BYTES = 1 << 20
ABSENT = "absent"  # an input that does not exist

_LISTS = ("commands", "targets")
_TABLES = ("inputs", "reads", "base", "variables")
MAX_READS = 4000  # listed one by one


class KeyDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The document. Text is UTF-8; other bytes in names are written as \\xNN (`to_utf8_text`)."""

    format: str = FORMAT
    commands: list[str]  # in order, without secrets
    targets: list[str]  # absolute, resolved
    # Path -> SHA-256 in hex, `folder SHA-256`, or ABSENT. Paths below the working directory are relative to it, so
    # that a job with the same files elsewhere has the same key.
    inputs: dict[str, str]
    base: dict[str, str]  # the state before set-up; `target:...`: facts in a target
    variables: dict[str, str]  # those that decide the result and are set
    salt: str
    cwd: str = ""  # the working directory, if the result depends on it (keying.py decides); else ""
    # Label -> state of the files that set-up reads (read_list.py, current_state.py), and how they are known: "":
    # not at all.
    reads: dict[str, str] = {}
    seen: str = ""
    guess: str = ""  # key of the document without these: the first guess, under which lists of reads are kept


class Change(NamedTuple):
    """One entry that differs between two documents; None where it is missing."""

    field: str  # such as `inputs:requirements.txt`, `base:dist:numpy`, `commands:1`, `salt`
    was: str | None
    now: str | None


def to_utf8_text(text: str) -> str:
    """Convert text from the operating system to text that JSON can represent."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def encode(document: KeyDocument) -> bytes:
    """Return canonical JSON: sorted names, no spaces, UTF-8. Raises: ConfigError if it is too large."""
    data = msgspec.json.encode(document, order="sorted")
    if len(data) > MAX_DOCUMENT_BYTES:
        sizes = {name: len(msgspec.json.encode(getattr(document, name))) for name in document.__struct_fields__}
        name = max(sizes, key=lambda name: sizes[name])
        raise ConfigError(
            f"the key of this environment has {len(data)} bytes, at most {MAX_DOCUMENT_BYTES}: "
            f"{sizes[name]} of them are {name}; use fewer, or a directory or a script in their place"
        )
    return data


def key_of(document: KeyDocument) -> str:
    """Return the key: the SHA-256 of the canonical JSON, in hex."""
    return hashlib.sha256(encode(document)).hexdigest()


def decode(data: bytes, where: str) -> KeyDocument:
    """Decode an untrusted document of a store. Raises: FormatVersion; IntegrityError for other faults."""
    what = "not a key document of an environment"
    try:
        return decode_json(data, KeyDocument, FORMAT, where, what=what, max_bytes=MAX_DOCUMENT_BYTES)
    except FormatVersion as error:
        try:
            return decode_json(data, KeyDocument, OLD_FORMAT, where, what=what, max_bytes=MAX_DOCUMENT_BYTES)
        except FormatVersion:
            raise error from None


def summarize_reads(reads: Mapping[str, str]) -> dict[str, str]:
    """Return the reads, or, if there are too many for a document, one digest for each directory."""
    if len(reads) <= MAX_READS:
        return dict(reads)
    directories: dict[str, list[str]] = {}
    for name, state in sorted(reads.items()):
        directories.setdefault(name.rpartition("/")[0], []).append(f"{name}\0{state}\n")
    depth = 32
    while len(directories) > MAX_READS:
        depth -= 1
        merged: dict[str, list[str]] = {}
        for directory, rows in directories.items():
            merged.setdefault("/".join(directory.split("/")[:depth]), []).extend(rows)
        directories = merged
    return {
        f"{directory or '.'}/ ({len(rows)} names)": hashlib.sha256("".join(rows).encode()).hexdigest()
        for directory, rows in directories.items()
    }


def differences(old: KeyDocument, new: KeyDocument) -> list[Change]:
    """Return the changes from `old` to `new`; empty for documents of one key."""
    changes: list[Change] = []
    for name in _LISTS:
        changes += _list_changes(name, getattr(old, name), getattr(new, name))
    for name in _TABLES:
        changes += _table_changes(name, getattr(old, name), getattr(new, name))
    for name in ("salt", "cwd", "seen"):
        was, now = getattr(old, name), getattr(new, name)
        if was != now:
            changes.append(Change(name, was, now))
    if not changes and old.guess != new.guess:
        changes.append(Change("guess", old.guess, new.guess))
    return changes


def _table_changes(name: str, old: dict[str, str], new: dict[str, str]) -> list[Change]:
    both = sorted(old.keys() | new.keys())
    return [Change(f"{name}:{key}", old.get(key), new.get(key)) for key in both if old.get(key) != new.get(key)]


def _list_changes(name: str, old: Sequence[str], new: Sequence[str]) -> list[Change]:
    if sorted(old) == sorted(new):
        if list(old) == list(new):
            return []
        return [Change(f"{name}:order", "; ".join(old), "; ".join(new))]
    changes: list[Change] = []
    from difflib import SequenceMatcher  # only where two documents are compared

    for tag, old_from, old_to, new_from, new_to in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag == "equal":
            continue
        was, now = old[old_from:old_to], new[new_from:new_to]
        for place in range(max(len(was), len(now))):
            number = (new_from if now else old_from) + place + 1
            changes.append(
                Change(
                    f"{name}:{number}",
                    was[place] if place < len(was) else None,
                    now[place] if place < len(now) else None,
                )
            )
    return changes
