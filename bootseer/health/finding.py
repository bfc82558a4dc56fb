"""What a check has found: one finding a line, for people and as JSON. Pure.

A finding names the check, how bad it is, where (device, mount, NIC, path), what was measured against which limit,
and the way out. Checks write theirs to us from other processes, and users write their own: `from_json` takes
nothing on trust.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

OK, WARN, FAIL, UNKNOWN, HUNG = "ok", "warn", "fail", "unknown", "hung"
LEVELS = (OK, UNKNOWN, WARN, FAIL, HUNG)  # from good to bad
BAD = (FAIL, HUNG)
MOST_TEXT_CHARACTERS = 500
MOST_FINDINGS = 256  # of one check


class Finding(NamedTuple):
    """One result. `measured` and `limit` are in `unit` ("" for a plain number); None where nothing is measured."""

    check: str
    level: str  # one of LEVELS
    what: str
    where: str = ""  # device, mount, NIC, path; "" for the node
    measured: float | None = None
    limit: float | None = None
    unit: str = ""
    way_out: str = ""

    def line(self) -> str:
        """As people read it."""
        text = f"{self.level:<7} {self.check}"
        text += f" {self.where}: {self.what}" if self.where else f": {self.what}"
        if self.measured is not None:
            text += f" ({format_value(self.measured, self.unit)}"
            text += ")" if self.limit is None else f", limit {format_value(self.limit, self.unit)})"
        return f"{text}; {self.way_out}" if self.way_out and self.level != OK else text


def format_value(value: float, unit: str) -> str:
    """A number with its unit: 1.5 GB, 12 %, 3 s, 17."""
    if unit == "bytes":
        for name in ("B", "kB", "MB", "GB"):
            if abs(value) < 999.5:
                return f"{value:.3g} {name}"
            value /= 1000
        return f"{value:.3g} TB"
    number = f"{value:.0f}" if float(value).is_integer() and abs(value) < 1e15 else f"{value:.3g}"
    return f"{number} {unit}".rstrip()


def worst(findings: Iterable[Finding]) -> str:
    """The worst level of all; ok for none."""
    return max((found.level for found in findings), key=LEVELS.index, default=OK)


def if_below(value: float, least: float, enough: float) -> tuple[str, float]:
    """Level and limit of something of which there can be too little: fail below `least`, warn below `enough`."""
    return (FAIL, least) if value < least else (WARN if value < enough else OK, enough)


def if_above(value: float, much: float, most: float = math.inf) -> tuple[str, float]:
    """The same of something of which there can be too much: warn above `much`, fail above `most`."""
    return (FAIL, most) if value > most else (WARN if value > much else OK, much)


def one_line(text: str) -> str:
    """What others wrote, without what would move a terminal's cursor or make a line of its own."""
    clean = "".join(char if char.isprintable() else " " for char in text[: 4 * MOST_TEXT_CHARACTERS])
    return " ".join(clean.split())[:MOST_TEXT_CHARACTERS]


def from_json(check: str, value: object) -> list[Finding]:
    """Findings from what a check wrote: an object, a list of objects, or {"findings": [...]}.

    Args: check: its name, which findings get. Raises: ValueError that says what is wrong with it.
    """
    if isinstance(value, Mapping) and isinstance(value.get("findings"), list):
        value = value["findings"]
    listed = value if isinstance(value, list) else [value]
    if len(listed) > MOST_FINDINGS:
        raise ValueError(f"{len(listed)} findings are more than {MOST_FINDINGS}")
    return [_one(check, each) for each in listed]


def _one(check: str, value: object) -> Finding:
    if not isinstance(value, Mapping):
        raise ValueError(f"a finding is an object, not {type(value).__name__}")
    level = value.get("level")
    if level not in LEVELS:
        raise ValueError(f'"level" is one of {", ".join(LEVELS)}, not {one_line(repr(level))[:60]}')
    texts = {name: _text(value, name) for name in ("what", "where", "unit", "way_out")}
    return Finding(
        check,
        str(level),
        texts["what"] or ("in order" if level == OK else "said no more"),
        texts["where"],
        _number(value, "measured"),
        _number(value, "limit"),
        texts["unit"],
        texts["way_out"],
    )


def _text(value: Mapping[Any, Any], name: str) -> str:
    text = value.get(name, "")
    if not isinstance(text, str):
        raise ValueError(f'"{name}" is a string')
    return one_line(text)


def _number(value: Mapping[Any, Any], name: str) -> float | None:
    number = value.get(name)
    if number is None:
        return None
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise ValueError(f'"{name}" is a number')
    try:
        found = float(number)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise ValueError(f'"{name}" is not finite')
    return found
