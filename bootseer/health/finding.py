"""Findings of checks, as lines of text and as JSON. Pure.

A finding has a check, a level, a place (device, mount, NIC, path), a measured value, its limit, and a fix
(`way_out`). Checks in other processes and users' own checks write findings, so `from_json` trusts nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from bootseer.counted import format_bytes

OK, WARN, FAIL, UNKNOWN, HUNG = "ok", "warn", "fail", "unknown", "hung"
LEVELS = (OK, UNKNOWN, WARN, FAIL, HUNG)  # from good to bad
BAD = (FAIL, HUNG)
MAX_TEXT_CHARACTERS = 500
MAX_FINDINGS = 256  # of one check


class Finding(NamedTuple):
    """One result. `measured` and `limit` are in `unit` ("" for a plain number); None if nothing is measured."""

    check: str
    level: str  # one of LEVELS
    what: str
    where: str = ""  # device, mount, NIC, path; "" for the node
    measured: float | None = None
    limit: float | None = None
    unit: str = ""
    way_out: str = ""

    def line(self) -> str:
        text = f"{self.level:<7} {self.check}"
        text += f" {self.where}: {self.what}" if self.where else f": {self.what}"
        if self.measured is not None:
            text += f" ({format_value(self.measured, self.unit)}"
            text += ")" if self.limit is None else f", limit {format_value(self.limit, self.unit)})"
        return f"{text}; {self.way_out}" if self.way_out and self.level != OK else text


def format_value(value: float, unit: str) -> str:
    """Format a number with its unit: 1.5 GB, 12 %, 3 s, 17."""
    if unit == "bytes":
        return format_bytes(value)
    number = f"{value:.0f}" if float(value).is_integer() and abs(value) < 1e15 else f"{value:.3g}"
    return f"{number} {unit}".rstrip()


def worst(findings: Iterable[Finding]) -> str:
    """Return the worst level of all; ok without findings."""
    return max((found.level for found in findings), key=LEVELS.index, default=OK)


def if_below(value: float, least: float, enough: float) -> tuple[str, float]:
    """Return level and limit of a value that can be too small: fail below `least`, warn below `enough`."""
    return (FAIL, least) if value < least else (WARN if value < enough else OK, enough)


def if_above(value: float, much: float, most: float = math.inf) -> tuple[str, float]:
    """Return level and limit of a value that can be too large: warn above `much`, fail above `most`."""
    return (FAIL, most) if value > most else (WARN if value > much else OK, much)


def one_line(text: str) -> str:
    """Return untrusted text as one line without terminal control characters."""
    clean = "".join(char if char.isprintable() else " " for char in text[: 4 * MAX_TEXT_CHARACTERS])
    return " ".join(clean.split())[:MAX_TEXT_CHARACTERS]


def from_json(check: str, value: object) -> list[Finding]:
    """Return findings from a check's output: an object, a list of objects, or {"findings": [...]}.

    Args: check: its name, for the findings. Raises: ValueError with the fault.
    """
    if isinstance(value, Mapping) and isinstance(value.get("findings"), list):
        value = value["findings"]
    listed = value if isinstance(value, list) else [value]
    if len(listed) > MAX_FINDINGS:
        raise ValueError(f"{len(listed)} findings are more than {MAX_FINDINGS}")
    return [_one(check, each) for each in listed]


def from_answer(answer: Mapping[str, Any]) -> Finding:
    """Return the finding of an answer of a process that runs checks. Raises: ValueError with the fault."""
    return _one(one_line(str(answer.get("check")))[:64], answer)


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
        texts["what"] or ("in order" if level == OK else "gave no details"),
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
