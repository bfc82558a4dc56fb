"""A plugin: how many examples Hypothesis tries of each property.

Profile "ci": a quarter of what a test, or Hypothesis, asks for, and always the same ones.
Profile "campaign": three times as many, at random.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import settings

from tests.campaign import IS_FULL

SHARE = Fraction(3) if IS_FULL else Fraction(1, 4)
LEAST = 10
ATTRIBUTE = "_hypothesis_internal_use_settings"  # where Hypothesis, and its own plugin, find those of a function

# A busy machine is no fault of a test: no deadline.
settings.register_profile("ci", deadline=None, derandomize=True, database=None)
settings.register_profile("campaign", deadline=None, derandomize=False)
settings.load_profile("campaign" if IS_FULL else "ci")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    scale(items, SHARE)


def scale(items: Iterable[pytest.Item], share: Fraction) -> None:
    """Set the number of examples of each property, once, however many cases it has."""
    done: set[int] = set()
    for item in items:
        # Those of a state machine are at its class, those of a function at what is below a method.
        for place, name in ((getattr(item, "cls", None), "settings"), (_function_of(item), ATTRIBUTE)):
            found = getattr(place, name, None)
            if isinstance(found, settings) and id(place) not in done:
                done.add(id(place))
                setattr(place, name, settings(found, max_examples=scaled(found.max_examples, share)))


def scaled(number: int, share: Fraction) -> int:
    """So many examples in place of `number`; what is small already stays."""
    return max(int(number * share), min(number, LEAST))


def _function_of(item: pytest.Item) -> Any:
    made = getattr(item, "obj", None)
    return getattr(made, "__func__", made)
