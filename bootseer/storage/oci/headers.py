"""Headers and errors of registries: challenges, links. Pure.

All input comes from outside: invalid text gives None or an empty value, never an exception.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

MAX_HEADER_BYTES = 16 << 10
MAX_ERROR_TEXT = 200  # characters of a registry's error text that are shown

_WORD = r"[A-Za-z0-9!#$%&'*+.^_`|~-]+"
_PARAM = re.compile(rf'\s*({_WORD})\s*=\s*(?:"((?:[^"\\]|\\.)*)"|({_WORD}))\s*(?:,|$)')
_SCHEME = re.compile(rf"\s*,?\s*({_WORD})(?:\s+|$|(?=,))")
_UPLOADED = re.compile(r"(?:bytes=)?0-(\d{1,18})")
_LINK = re.compile(r"<([^<>]{1,4096})>\s*((?:;\s*[^,;]+)*)")


class Challenge(NamedTuple):
    """A request of a server for authentication."""

    scheme: str  # in lower case: basic, bearer
    params: dict[str, str]  # names in lower case


def parse_challenges(text: str) -> list[Challenge]:
    """Parse all challenges of WWW-Authenticate headers, joined by commas (RFC 9110, 11.6.1)."""
    text = text[:MAX_HEADER_BYTES]
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


def parse_uploaded(text: str) -> int:
    """Return how many bytes of an upload have arrived, by its Range header. Some registries send 0-0 for none."""
    found = _UPLOADED.fullmatch(text.strip())
    if found is None or found[1] == "0":
        return 0
    return int(found[1]) + 1


def next_page(text: str) -> str:
    """Return the next page that a Link header names; "" if there is none."""
    for found in _LINK.finditer(text[:MAX_HEADER_BYTES]):
        if re.search(r';\s*rel\s*=\s*"?next"?\s*(?:;|$)', found[2], re.IGNORECASE):
            return found[1]
    return ""


def error_text(body: bytes) -> str:
    """Return a registry's error text in one line; "" if there is none."""
    try:
        errors = json.loads(body)["errors"]
        texts = [_one_error(each) for each in errors[:3]]
    except (ValueError, TypeError, KeyError, RecursionError, LookupError):
        return ""
    # Control characters could move a terminal's cursor.
    said = "".join(letter if letter.isprintable() else " " for letter in "; ".join(filter(None, texts)))
    return said if len(said) <= MAX_ERROR_TEXT else said[:MAX_ERROR_TEXT] + "..."


def _one_error(error: Any) -> str:
    if not isinstance(error, dict):
        return ""
    code, message = error.get("code", ""), error.get("message", "")
    return f"{message} ({code})" if message and code else str(message or code)
