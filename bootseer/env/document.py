"""PURE: the key document of an environment: all that decides what set-up commands make, and the key of it.

In: facts that keying.py collected. Out: canonical JSON, its SHA-256 (the key), and the differences of two
documents, entry by entry. The document is stored in clear beside the snapshot, for `explain` only; whoever reads
one from a store does not trust it.

Secrets never enter (redaction.py): each is the constant "(secret)", so two that differ only in a secret are one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import NamedTuple

import msgspec

from bootseer.errors import ConfigError, FormatVersion
from bootseer.formats import decode_json

FORMAT = "bootseer-env-key/2"
OLD_FORMAT = "bootseer-env-key/1"  # the same without `reads` and `seen`: stores still have some
MOST_DOCUMENT_BYTES = 1 << 20
ABSENT = "absent"  # an input that is not there

_LISTS = ("commands", "targets")
_TABLES = ("inputs", "reads", "base", "variables")
MOST_READS = 4000  # that are named one by one


class KeyDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Text is UTF-8; bytes of names that are none stand as \\xNN (`plain`)."""

    format: str = FORMAT
    commands: list[str]  # in order, without secrets
    targets: list[str]  # absolute, resolved
    # Path -> SHA-256 in hex, `folder SHA-256`, or ABSENT. Paths below the working folder are relative to it, so
    # that a job that runs elsewhere with the same files has the same key.
    inputs: dict[str, str]
    base: dict[str, str]  # what set-up starts from; `target:...` are those that lie in a target
    variables: dict[str, str]  # those that decide the result and are set
    salt: str
    cwd: str = ""  # the working folder, where the result depends on it (keying.py says when); else ""
    # Label -> state of what set-up reads (reads.py, reads_now.py), and how that is known: "": it is not in here.
    reads: dict[str, str] = {}
    seen: str = ""
    guess: str = ""  # key of the same without all that: the first guess, under which lists of reads are kept


class Change(NamedTuple):
    """One entry that two documents do not share; None where it is not there."""

    field: str  # as `inputs:requirements.txt`, `base:dist:numpy`, `commands:1`, `salt`
    was: str | None
    now: str | None


def plain(text: str) -> str:
    """Text from the operating system as JSON can hold it."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def encode(document: KeyDocument) -> bytes:
    """Canonical JSON: sorted names, no spaces, UTF-8. Raises: ConfigError when it is too large."""
    data = msgspec.json.encode(document, order="sorted")
    if len(data) > MOST_DOCUMENT_BYTES:
        sizes = {name: len(msgspec.json.encode(getattr(document, name))) for name in document.__struct_fields__}
        name = max(sizes, key=lambda name: sizes[name])
        raise ConfigError(
            f"the key of this environment has {len(data)} bytes, at most {MOST_DOCUMENT_BYTES}: "
            f"{sizes[name]} of them are {name}: use fewer, or a folder or a script in their place"
        )
    return data


def key_of(document: KeyDocument) -> str:
    """The key: SHA-256 of the canonical JSON, in hex."""
    return hashlib.sha256(encode(document)).hexdigest()


def decode(data: bytes, where: str) -> KeyDocument:
    """Of a store, so untrusted. Raises: FormatVersion for another format; IntegrityError for everything else."""
    what = "no key of an environment"
    try:
        return decode_json(data, KeyDocument, FORMAT, where, what=what, most_bytes=MOST_DOCUMENT_BYTES)
    except FormatVersion as error:
        try:
            return decode_json(data, KeyDocument, OLD_FORMAT, where, what=what, most_bytes=MOST_DOCUMENT_BYTES)
        except FormatVersion:
            raise error from None


def few(reads: Mapping[str, str]) -> dict[str, str]:
    """Of so many that a document cannot have them all: those of each folder together."""
    if len(reads) <= MOST_READS:
        return dict(reads)
    folders: dict[str, list[str]] = {}
    for name, state in sorted(reads.items()):
        folders.setdefault(name.rpartition("/")[0], []).append(f"{name}\0{state}\n")
    depth = 32
    while len(folders) > MOST_READS:
        depth -= 1
        merged: dict[str, list[str]] = {}
        for folder, rows in folders.items():
            merged.setdefault("/".join(folder.split("/")[:depth]), []).extend(rows)
        folders = merged
    return {
        f"{folder or '.'}/ ({len(rows)} names)": hashlib.sha256("".join(rows).encode()).hexdigest()
        for folder, rows in folders.items()
    }


def differences(old: KeyDocument, new: KeyDocument) -> list[Change]:
    """What would have to change to make `new` of `old`; empty for documents of one key."""
    changes: list[Change] = []
    for name in _LISTS:
        changes += _list_changes(name, getattr(old, name), getattr(new, name))
    for name in _TABLES:
        changes += _table_changes(name, getattr(old, name), getattr(new, name))
    for name in ("salt", "cwd", "seen"):
        was, now = getattr(old, name), getattr(new, name)
        if was != now:
            changes.append(Change(name, was, now))
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
