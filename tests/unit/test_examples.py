"""Hypothesis tries as many examples as the profile says."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.campaign import IS_FULL
from tests.examples import LEAST, SHARE, scale, scaled

WANTED = {"none": scaled(100, SHARE), "own": scaled(80, SHARE)}
tried: dict[str, int] = {}


@pytest.fixture(scope="module", autouse=True)
def so_many_are_tried() -> Iterator[None]:
    """Of each property that has run, whichever were chosen and in whichever order."""
    yield
    assert tried == {name: WANTED[name] for name in tried}


def test_a_share_of_what_is_asked_for() -> None:
    quarter = Fraction(1, 4)
    assert [scaled(number, quarter) for number in (400, 100, 20, 4)] == [100, 25, LEAST, 4]
    assert scaled(100, Fraction(3)) == 300


@given(st.integers())
def test_without_a_number(_value: int) -> None:
    tried["none"] = tried.get("none", 0) + 1


class TestMethods:
    @settings(max_examples=80)
    @given(st.integers())
    def test_with_a_number(self, _value: int) -> None:
        tried["own"] = tried.get("own", 0) + 1


def test_it_is_done_once(request: pytest.FixtureRequest) -> None:
    """Or cases of one function would have ever fewer."""
    (item,) = [item for item in request.session.items if item.name == "test_without_a_number"][:1] or [None]
    if item is None:
        pytest.skip("the test above was not collected")
    function = item.obj  # type: ignore[attr-defined]
    before = function._hypothesis_internal_use_settings
    try:
        scale([item, item], Fraction(1, 2))
        assert function._hypothesis_internal_use_settings.max_examples == before.max_examples // 2
        assert before.derandomize is not IS_FULL
    finally:
        function._hypothesis_internal_use_settings = before
