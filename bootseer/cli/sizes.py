"""Sizes in command lines."""

from __future__ import annotations

import re

from bootseer.errors import UsageError


def parse_size(text: str, flag: str) -> int:
    """Return bytes from 4096, 512MiB, 1.5GiB, 200GB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kKMGT]?)(i?)B?", text)
    if found is None:
        raise UsageError(f"{flag} {text!r}: give bytes, or a number with a unit, as in 512MiB or 200GB")
    power = " KMGT".index((found[2] or " ").upper())
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power)
