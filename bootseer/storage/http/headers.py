"""Headers of HTTP responses: lengths, ranges, waits. Pure.

All input comes from outside: invalid text gives None or 0, never an exception.
"""

from __future__ import annotations

import email.utils
import re
from typing import NamedTuple

MAX_RETRY_AFTER_S = 3600.0
RETRYABLE = (408, 425, 429, 500, 502, 503, 504)  # statuses that may pass

_CONTENT_RANGE = re.compile(r"bytes (?:(\d{1,18})-(\d{1,18})|\*)/(\d{1,18}|\*)")


class ContentRange(NamedTuple):
    """The range of a file that a response contains."""

    first: int
    last: int
    total: int | None  # None if the server does not know it


def parse_content_range(text: str) -> ContentRange | None:
    """Parse the header of a 206; None without a range."""
    found = _CONTENT_RANGE.fullmatch(text.strip())
    if found is None or found[1] is None or int(found[2]) < int(found[1]):
        return None
    return ContentRange(int(found[1]), int(found[2]), None if found[3] == "*" else int(found[3]))


def parse_total(text: str) -> int | None:
    """Return the size of the file, from Content-Range of a 206 or 416; None if unknown."""
    found = _CONTENT_RANGE.fullmatch(text.strip())
    return None if found is None or found[3] == "*" else int(found[3])


def parse_length(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\d{1,18}", text.strip()) else None


def parse_retry_after(text: str, now_s: float) -> float:
    """Return the seconds to wait, of a number or a date; `now_s` since the epoch. 0 for invalid text."""
    text = text.strip()
    if re.fullmatch(r"\d{1,9}", text):
        return min(float(text), MAX_RETRY_AFTER_S)
    try:
        wait_s = email.utils.parsedate_to_datetime(text).timestamp() - now_s
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return min(max(0.0, wait_s), MAX_RETRY_AFTER_S)
