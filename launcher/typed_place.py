"""PURE: a place that a flag names, a path or a URL, as ranks and helpers can use it, or the mistake in it.

Separate, as several flags name places, and nothing here may load what opens them.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from bootseer.errors import UsageError

_ONE_SLASH = re.compile(r"(s3a?|gs|az|azure|abfss?|hdfs|viewfs|s?webhdfs|https?|file):/(?!/)")


def typed_place(text: str, flag: str, example: str, absolute: Callable[[str], str]) -> str:
    """A path is made absolute: ranks and helpers may run in other folders. Raises: UsageError."""
    if not text or "\0" in text or "\n" in text:
        raise UsageError(f"{flag} {text!r}: give a path or a URL, as in {example}")
    if (found := _ONE_SLASH.match(text)) is not None:
        raise UsageError(f"{flag} {text}: a URL has two slashes: write {found[1]}://")
    return text if "://" in text or "::" in text else absolute(text)
