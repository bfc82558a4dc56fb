"""What registries say in headers and errors: challenges, links, ranges, waits. Pure.

Everything here comes from outside: what cannot be understood is None or empty, never an exception.
"""

from __future__ import annotations

import email.utils
import json
import re
from typing import Any, NamedTuple

MOST_HEADER_BYTES = 16 << 10
MOST_SAID = 200  # characters of a registry's own words that are shown
MOST_RETRY_AFTER_S = 3600.0

_WORD = r"[A-Za-z0-9!#$%&'*+.^_`|~-]+"
_PARAM = re.compile(rf'\s*({_WORD})\s*=\s*(?:"((?:[^"\\]|\\.)*)"|({_WORD}))\s*(?:,|$)')
_SCHEME = re.compile(rf"\s*,?\s*({_WORD})(?:\s+|$|(?=,))")
_CONTENT_RANGE = re.compile(r"bytes (?:(\d{1,18})-(\d{1,18})|\*)/(\d{1,18}|\*)")
_UPLOADED = re.compile(r"(?:bytes=)?0-(\d{1,18})")
_LINK = re.compile(r"<([^<>]{1,4096})>\s*((?:;\s*[^,;]+)*)")


class Challenge(NamedTuple):
    """How a server wants to be told who asks."""

    scheme: str  # in small letters: basic, bearer
    params: dict[str, str]  # names in small letters


class ContentRange(NamedTuple):
    """Which bytes of a file follow."""

    first: int
    last: int
    total: int | None  # None where the server does not know


def parse_challenges(text: str) -> list[Challenge]:
    """All challenges of WWW-Authenticate headers, joined by commas (RFC 9110, 11.6.1)."""
    text = text[:MOST_HEADER_BYTES]
    found: list[Challenge] = []
    place = 0
    while place < len(text):
        scheme = _SCHEME.match(text, place)
        if scheme is None:
            return found
        place = scheme.end()
        params: dict[str, str] = {}
        while (param := _PARAM.match(text, place)) is not None:
            quoted = param[2]
            value = re.sub(r"\\(.)", r"\1", quoted) if quoted is not None else param[3]
            params.setdefault(param[1].lower(), value)
            place = param.end()
        found.append(Challenge(scheme[1].lower(), params))
    return found


def parse_content_range(text: str) -> ContentRange | None:
    """Of a 206; None when it does not say which bytes they are."""
    found = _CONTENT_RANGE.fullmatch(text.strip())
    if found is None or found[1] is None or int(found[2]) < int(found[1]):
        return None
    return ContentRange(int(found[1]), int(found[2]), None if found[3] == "*" else int(found[3]))


def parse_length(text: str) -> int | None:
    """Content-Length."""
    return int(text) if re.fullmatch(r"\d{1,18}", text.strip()) else None


def parse_uploaded(text: str) -> int:
    """How many bytes of an upload are there, by its Range header. Some registries say 0-0 for none."""
    found = _UPLOADED.fullmatch(text.strip())
    if found is None or found[1] == "0":
        return 0
    return int(found[1]) + 1


def parse_retry_after(text: str, now_s: float) -> float:
    """Seconds to wait, of a number or a date; `now_s` since the epoch. 0 for what says nothing."""
    text = text.strip()
    if re.fullmatch(r"\d{1,9}", text):
        return min(float(text), MOST_RETRY_AFTER_S)
    try:
        wait_s = email.utils.parsedate_to_datetime(text).timestamp() - now_s
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return min(max(0.0, wait_s), MOST_RETRY_AFTER_S)


def next_page(text: str) -> str:
    """What a Link header names as the next page; "" if there is none."""
    for found in _LINK.finditer(text[:MOST_HEADER_BYTES]):
        if re.search(r';\s*rel\s*=\s*"?next"?\s*(?:;|$)', found[2], re.IGNORECASE):
            return found[1]
    return ""


def error_text(body: bytes) -> str:
    """A registry's own words about what is wrong, in one line; "" when it has none."""
    try:
        errors = json.loads(body)["errors"]
        texts = [_one_error(each) for each in errors[:3]]
    except (ValueError, TypeError, KeyError, RecursionError, LookupError):
        return ""
    # Nothing of it may move a terminal's cursor.
    said = "".join(letter if letter.isprintable() else " " for letter in "; ".join(filter(None, texts)))
    return said if len(said) <= MOST_SAID else said[:MOST_SAID] + "..."


def _one_error(error: Any) -> str:
    if not isinstance(error, dict):
        return ""
    code, message = error.get("code", ""), error.get("message", "")
    return f"{message} ({code})" if message and code else str(message or code)
