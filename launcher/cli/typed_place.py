"""PURE: turns a path or URL of a flag into a form that ranks and helpers can use, or reports its mistake.

Separate because several flags name such places, and this module must not import the stores.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from bootseer.errors import UsageError

_ONE_SLASH = re.compile(r"(s3a?|gs|az|azure|abfss?|hdfs|viewfs|s?webhdfs|https?|file):/(?!/)")


def parse_location(text: str, flag: str, example: str, absolute: Callable[[str], str]) -> str:
    """Return a URL as it is, a path made absolute: ranks may run in other directories. Raises: UsageError."""
    if not text or "\0" in text or "\n" in text:
        raise UsageError(f"{flag} {text!r}: give a path or a URL, as in {example}")
    if (found := _ONE_SLASH.match(text)) is not None:
        raise UsageError(f"{flag} {text}: a URL has two slashes: write {found[1]}://")
    return text if "://" in text or "::" in text else absolute(text)
