"""Which pages cost less."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bootseer.checkpoint.io.parallel_read import HUGE_WORTH, TRY_EVERY, PageChoice

MIB = 1 << 20


def choose(pieces: int, huge_s: float, small_s: float) -> list[bool]:
    """What is taken of pieces of one MiB each with these costs."""
    choice = PageChoice()
    taken = []
    for _ in range(pieces):
        taken.append(choice.take())
        choice.took(taken[-1], MIB, huge_s if taken[-1] else small_s)
    return taken


def test_both_kinds_are_tried_first() -> None:
    assert choose(2, 1.0, 1.0) == [True, False]


@given(st.floats(1e-6, 1.0), st.floats(1e-6, 1.0))
def test_the_cheaper_kind_is_taken_and_the_other_one_tried_now_and_then(huge_s: float, small_s: float) -> None:
    taken = choose(10 * TRY_EVERY, huge_s, small_s)[2:]
    is_huge = huge_s <= HUGE_WORTH * small_s
    assert taken.count(not is_huge) == 9


def test_it_follows_a_change() -> None:
    choice = PageChoice()
    for number in range(20 * TRY_EVERY):
        is_huge = choice.take()
        cheap = is_huge == (number < 10 * TRY_EVERY)
        choice.took(is_huge, MIB, 0.001 if cheap else 0.01)
    later = [choice.take() for _ in range(TRY_EVERY)]
    assert later.count(True) <= 1


def test_no_measure_yet_or_none_at_all() -> None:
    choice = PageChoice()
    taken = [choice.take() for _ in range(4)]
    assert taken == [True, False, True, True]
    choice.took(True, 0, 0.0)
    assert choice.take()
