"""Sizes and ages in command lines."""

from __future__ import annotations

import re

from bootseer.errors import UsageError

_UNITS_S = {"": 86_400.0, "d": 86_400.0, "h": 3600.0, "min": 60.0, "s": 1.0}


def parse_size(text: str, flag: str) -> int:
    """Return bytes from 4096, 512MiB, 1.5GiB, 200GB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kKMGT]?)(i?)B?", text)
    if found is None:
        raise UsageError(f"{flag} {text!r}: give bytes, or a number with a unit, as in 512MiB or 200GB")
    power = " KMGT".index((found[2] or " ").upper())
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power)


def parse_age(text: str | None, flag: str) -> float | None:
    """Return seconds from 30 (days), 30d, 12h, 90min, 45s; None without the flag."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,9}(?:\.\d*)?|\.\d+) ?(d|h|min|s|)", text)
    if found is None:
        raise UsageError(f"{flag} {text[:80]!r}: give days, or a number with a unit, as in 30, 12h or 90min")
    return float(found[1]) * _UNITS_S[found[2]]
