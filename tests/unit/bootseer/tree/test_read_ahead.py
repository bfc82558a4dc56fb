"""An iterator in a thread: the same items, its errors in their place, no thread left."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.tree.builder.from_layers import read_ahead

pytestmark = pytest.mark.leaks


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers()), st.integers(1, 5))
def test_same_items_in_order(items: list[int], most: int) -> None:
    with read_ahead(iter(items), most) as ahead:
        assert list(ahead) == items


def test_error_comes_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise ValueError("third")

    taken = []
    with pytest.raises(ValueError, match="third"), read_ahead(items(), 5) as ahead:
        for item in ahead:
            taken.append(item)
    assert taken == [1, 2]


def test_only_so_many_are_made_ahead() -> None:
    made: list[int] = []
    is_closed = threading.Event()

    def items() -> Iterator[int]:
        try:
            for number in range(1000):
                made.append(number)
                yield number
        finally:
            is_closed.set()

    with read_ahead(items(), 3) as ahead:
        assert next(ahead) == 0
        assert next(ahead) == 1
        assert len(made) <= 2 + 3 + 1
    assert is_closed.is_set(), "the iterator is closed in its thread"
    assert len(made) <= 2 + 3 + 1
