"""PURE: explains why there is no environment of this key, by the differences from the nearest stored one.

In: the document of this start, and untrusted documents of the store. Out: lines for the user and rows for
programs. Texts from a document are shortened and have no control characters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from bootseer.env.key.document import ABSENT, Change, KeyDocument, differences

MAX_LINES = 10
MAX_IN_TARGETS = 3  # names in a line
MAX_TEXT = 60  # letters of a value
MAX_ROW_TEXT = 1000
_IN_TARGET = "base:target:"
_WORDS = {
    "inputs": "{name}",
    "base": "the base's {name}",
    "variables": "the variable {name}",
    "commands": "set-up command {name}",
    "targets": "set-up target {name}",
    "salt": "--env-key",
    "cwd": "the working directory",
    "reads": "{name}",
    "seen": "the method to observe the reads of set-up",
    "guess": "the files that the commands name",
}


class Explanation(NamedTuple):
    """The nearest stored environment and all differences; `key` "" if nothing is stored."""

    key: str
    changes: tuple[Change, ...]


def explain(
    document: KeyDocument, stored: Iterable[tuple[str, KeyDocument]], otherwise: Sequence[KeyDocument] = ()
) -> Explanation:
    """Find the nearest environment: that with the fewest changes outside targets, then in them.

    Args: stored: keys with their documents, the newest first. otherwise: documents of this start for other lists
        of reads.

    The reads of set-up are not compared while this start does not know them.

    Changes in targets count last: after set-up, all installed packages differ. So an environment of the same
    requirements that was made on top of another one is nearer than that one.
    """
    nearest, least = Explanation("", ()), (math.inf, math.inf)
    for key, other in stored:
        for start in (document, *otherwise):
            changes = tuple(differences(other if start.seen else _without_reads(other), start))
            in_targets = sum(_is_in_target(change) for change in changes)
            distance = (len(changes) - in_targets, in_targets)
            if distance < least:
                nearest, least = Explanation(key, changes), distance
    return nearest


def _without_reads(document: KeyDocument) -> KeyDocument:
    return msgspec.structs.replace(document, reads={}, seen="", guess="")


def explain_lines(found: Explanation, most: int = MAX_LINES) -> list[str]:
    """Return lines for the user, at most `most` of them (1 or more)."""
    if not found.key:
        return ["missed because the store has no environment yet"]
    if not found.changes:
        return [f"missed although {shown(found.key[:12])} has this key: it has expired, or is not trusted"]
    in_targets = [change for change in found.changes if _is_in_target(change)]
    others = [change for change in found.changes if len(in_targets) < 2 or not _is_in_target(change)]
    sentences = [_sentence(change) for change in others]
    if len(in_targets) > 1:
        sentences.append(_of_targets(in_targets))
    few = sentences if len(sentences) <= most else sentences[: most - 1]
    text = [f"missed because {sentence}" for sentence in few]
    if len(few) < len(sentences):
        more = len(sentences) - len(few)
        text.append(
            f"missed because {more} {'more things' if few else 'things'} changed since {shown(found.key[:12])}"
        )
    if len(in_targets) == len(found.changes) and len(text) < most:
        text.append(
            f"{shown(found.key[:12])} has the same commands and inputs, but was made in targets with other"
            " content: only such targets get it"
        )
    return text


def explain_rows(found: Explanation) -> list[dict[str, str | None]]:
    """Return rows for JSON: `field`, `was`, `now`; None for a missing value."""
    return [
        {"field": shown(change.field, MAX_ROW_TEXT), "was": _row(change.was), "now": _row(change.now)}
        for change in found.changes
    ]


def shown(text: str, most: int = MAX_TEXT) -> str:
    """Return untrusted text in a form that is safe for a terminal."""
    clean = "".join(letter if letter.isprintable() else "?" for letter in text[: most + 1])
    return clean if len(clean) <= most else clean[: most - 3] + "..."


def _is_in_target(change: Change) -> bool:
    return change.field.startswith(_IN_TARGET)


def _of_targets(changes: list[Change]) -> str:
    """Summarize the changes in targets, by set-up itself or later: there may be very many."""
    names = [shown(change.field.removeprefix(_IN_TARGET).removeprefix("dist:")) for change in changes]
    more = len(names) - MAX_IN_TARGETS
    listed = ", ".join(names[:MAX_IN_TARGETS]) + (f" and {more} more" if more > 0 else "")
    return f"the set-up targets differ from the state before set-up: {listed}"


def _sentence(change: Change) -> str:
    table, _, name = change.field.partition(":")
    if change.field.endswith(":order") and table in ("commands", "targets"):
        return f"the order of set-up {table} changed"
    what = _WORDS.get(table, "{name}").format(name=shown(name, 120))
    if table in ("commands", "targets") and change.was is not None and change.now is not None:
        return f"{what} changed (was {shown(change.was)}, is {shown(change.now)})"
    if change.was is None:
        return f"{what} is new ({_value(change.now or '')})"
    if change.now is None:
        return f"{what} is gone (was {_value(change.was)})"
    if change.was == ABSENT:
        return f"{what} exists now ({_value(change.now)})"
    if change.now == ABSENT:
        return f"{what} is missing (was {_value(change.was)})"
    return f"{what} changed (was {_value(change.was)}, is {_value(change.now)})"


def _value(text: str) -> str:
    """Return a value with shortened digests."""
    words = [_short(word) for word in text.split(" ")]
    return shown(" ".join(words)) or "empty"


def _short(word: str) -> str:
    is_sum = len(word) == 64 and all(letter in "0123456789abcdef" for letter in word)
    return word[:8] + ".." if is_sum else word


def _row(text: str | None) -> str | None:
    return None if text is None else shown(text, MAX_ROW_TEXT)
