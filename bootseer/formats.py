"""Versioned JSON documents of a store: the format is checked before anything else is read.

Every version of a format has the field `format`: a family and a number, such as `bootseer-tree/1`.
"""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from bootseer.errors import FormatVersion, IntegrityError

MAX_SHOWN = 80  # characters of a foreign name in an error
MAX_QUOTED = 300  # of a foreign message

T = TypeVar("T")


class _Family(msgspec.Struct):
    format: str


def other_format(found: str, expected: str, where: str) -> FormatVersion:
    """Return the error for an unexpected format; it names another version of the same family as such."""
    family = expected.rpartition("/")[0]
    if re.fullmatch(rf"{re.escape(family)}/[0-9]{{1,6}}", found) is None:
        return FormatVersion(f"{where}: has format {found[:MAX_SHOWN]!r}, not {expected}")
    return FormatVersion(f"{where}: has format {found}; this Bootseer reads {expected}: take a newer one")


def one_line(text: str, max_characters: int = MAX_QUOTED) -> str:
    """Return a message that may quote untrusted text as one bounded line."""
    return "".join(letter if letter.isprintable() else " " for letter in text)[:max_characters]


def decode_json(data: bytes, kind: type[T], expected: str, where: str, *, what: str, max_bytes: int) -> T:
    """Decode untrusted data as a struct. The caller has to check its values.

    Args: what: completes "is ..." for other data, such as "no head of a tree".
    Raises: FormatVersion for another format or version; IntegrityError for all other faults.
    """
    if len(data) > max_bytes:
        raise IntegrityError(f"{where}: {len(data)} bytes; at most {max_bytes}")
    try:
        found = msgspec.json.decode(data, type=_Family).format
        if found != expected:
            raise other_format(found, expected, where)
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise IntegrityError(f"{where}: is {what}, or damaged: {one_line(str(error))}") from error
