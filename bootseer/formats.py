"""Versioned JSON of a store: what it is told from before anything else of it is read.

Every version of a format has the field `format`: a family and a number, as `bootseer-tree/1`.
"""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from bootseer.errors import FormatVersion, IntegrityError

MOST_SHOWN = 80  # characters of a foreign name in an error
MOST_QUOTED = 300  # of a foreign message

T = TypeVar("T")


class _Family(msgspec.Struct):
    format: str


def other_format(found: str, expected: str, where: str) -> FormatVersion:
    """The error for another format than the one expected; another number of its family is told as that."""
    family = expected.rpartition("/")[0]
    if re.fullmatch(rf"{re.escape(family)}/[0-9]{{1,6}}", found) is None:
        return FormatVersion(f"{where}: has format {found[:MOST_SHOWN]!r}, not {expected}")
    return FormatVersion(f"{where}: has format {found}; this Bootseer reads {expected}: take a newer one")


def one_line(text: str) -> str:
    """Of a message that may quote what came from outside."""
    return "".join(letter if letter.isprintable() else " " for letter in text)[:MOST_QUOTED]


def decode_json(data: bytes, kind: type[T], expected: str, where: str, *, what: str, most_bytes: int) -> T:
    """A struct of data from outside. Its values are the caller's to check.

    Args: what: completes "is ..." for data that are none, as "no head of a tree".
    Raises: FormatVersion for another format or version; IntegrityError for everything else.
    """
    if len(data) > most_bytes:
        raise IntegrityError(f"{where}: {len(data)} bytes; at most {most_bytes}")
    try:
        found = msgspec.json.decode(data, type=_Family).format
        if found != expected:
            raise other_format(found, expected, where)
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise IntegrityError(f"{where}: is {what}, or damaged: {one_line(str(error))}") from error
