"""Sizes and ages in command lines."""

from __future__ import annotations

import pytest

from bootseer.cli.sizes import parse_age
from bootseer.errors import UsageError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        ("30", 30 * 86_400.0),
        ("30d", 30 * 86_400.0),
        ("0.5", 43_200.0),
        (".5 d", 43_200.0),
        ("12h", 43_200.0),
        ("90min", 5_400.0),
        ("45s", 45.0),
    ],
)
def test_ages(text: str, seconds: float) -> None:
    assert parse_age(text, "--older") == seconds


@pytest.mark.parametrize("text", ["", "many", "-1", "1w", "nan", "inf", "1e9", "3 0", "30 days", "9" * 400])
def test_what_is_no_age(text: str) -> None:
    with pytest.raises(UsageError, match="give days, or a number with a unit, as in 30, 12h or 90min"):
        parse_age(text, "--older")


def test_no_flag() -> None:
    assert parse_age(None, "--older") is None
