"""PURE: numbers that a rule finds in what a rank prints, and whether they are what they must be."""

from __future__ import annotations

import math
from collections import deque

from launcher.rules.rule import Rule

JUMP_OF = 32  # the usual value: the median of so many
JUMP_LEAST = 8  # fewer tell nothing


def parse_number(text: str) -> float | None:
    """1.5, 1e-3, 1,024.5, nan, -inf, 85%; None for what is no number."""
    try:
        return float(text.strip("[](){};,%'\" ").rstrip(".").replace(",", ""))
    except ValueError:
        return None


class Judge:
    """Of one rule and one rank."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._usual: deque[float] = deque(maxlen=JUMP_OF)
        self._wrong = 0  # in a row

    def look(self, value: float) -> str:
        """Returns: what is wrong with the value, for people; "" for nothing, or not often enough yet."""
        why = self._find_wrong(value)
        # What is told of as a jump is compared with what was before it, until it has lasted.
        if math.isfinite(value) and (not why or self._wrong >= max(self._rule.times, JUMP_LEAST)):
            self._usual.append(abs(value))
        self._wrong = self._wrong + 1 if why else 0
        if self._wrong < self._rule.times:
            return ""
        return f"{why}, {self._wrong} times in a row" if self._wrong > 1 else why

    def _find_wrong(self, value: float) -> str:
        rule = self._rule
        shown = f"{rule.metric} is {value:g}"
        if rule.must_be_finite and not math.isfinite(value):
            return shown
        # Not a number is neither below nor above.
        if rule.must_be_below is not None and not value < rule.must_be_below:
            return f"{shown}, and must be below {rule.must_be_below:g}"
        if rule.must_be_above is not None and not value > rule.must_be_above:
            return f"{shown}, and must be above {rule.must_be_above:g}"
        if rule.must_not_jump is not None and len(self._usual) >= JUMP_LEAST:
            usual = sorted(self._usual)[len(self._usual) // 2]
            if usual > 0 and abs(value) > rule.must_not_jump * usual:
                return f"{shown}: more than {rule.must_not_jump:g} times its usual {usual:g}"
        return ""
