"""What accelerators do, and whether that is waiting for each other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.monitor.collectives.accelerators import (
    MAX_DEVICES,
    MAX_SHOWN,
    DeviceUse,
    describe_uses,
    find_awaited_ranks,
    pack_uses,
    unpack_uses,
    used_by_ranks,
)

# As measured on an H100: busy, memory, watts.
HUNG, PRODUCT, SUM, NOTHING = (100, 0, 123.0), (99, 33, 700.0), (98, 100, 510.0), (0, 0, 72.0)


def use(number: int, seen: tuple[int, int, float], *ranks: int) -> DeviceUse:
    return DeviceUse(number, *seen, ranks)


@pytest.mark.parametrize(
    ("seen", "ranks"),
    [
        ((HUNG, HUNG), ()),
        ((HUNG, NOTHING), (1,)),
        ((NOTHING, HUNG, NOTHING), (0, 2)),
        ((NOTHING, NOTHING), None),
        ((HUNG, PRODUCT), None),
        ((HUNG, SUM), None),
        ((HUNG, (50, 0, 100.0)), None),
        ((HUNG, (0, 9, 100.0)), None),
        ((), None),
    ],
)
def test_for_whom_they_wait(seen: tuple[tuple[int, int, float], ...], ranks: tuple[int, ...] | None) -> None:
    assert find_awaited_ranks(use(rank, each, rank) for rank, each in enumerate(seen)) == ranks


def test_whose_device_is_idle_need_not_be_known() -> None:
    assert find_awaited_ranks([use(0, HUNG), use(1, NOTHING)]) == ()


def test_devices_of_others_do_not_count_where_it_is_known_whose_they_are() -> None:
    own, other = use(0, HUNG, 3), use(1, PRODUCT)
    assert used_by_ranks([own, other]) == [own]
    assert used_by_ranks([other]) == [other]


def test_lines_for_people_are_cut() -> None:
    lines = describe_uses([use(number, HUNG, number) for number in range(MAX_SHOWN + 2)])
    assert lines[3] == "accelerator 3 (rank 3): busy 100 %, its memory 0 %, 123 W"
    assert lines[-1] == "... and 2 more" and len(lines) == MAX_SHOWN + 1
    assert describe_uses([]) == []


uses = st.builds(
    DeviceUse,
    st.integers(0, 99),
    st.integers(0, 100),
    st.integers(0, 100),
    st.floats(0, 2000),
    st.lists(st.integers(0, 9), max_size=3, unique=True).map(tuple),
)


@given(st.lists(uses, max_size=MAX_DEVICES))
def test_what_is_sent_arrives(given: list[DeviceUse]) -> None:
    assert unpack_uses(pack_uses(given), range(10)) == given


def test_of_ranks_of_other_nodes_nothing_is_taken() -> None:
    assert unpack_uses(pack_uses([use(0, HUNG, 1, 7)]), [1]) == [use(0, HUNG, 1)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "{}",
        "[1]",
        "[[1,2]]",
        '[[0,"a",0,1.0,[]]]',
        "[[0,1e999,0,1.0,[]]]",
        "[[0,0,0,NaN,[]]]",
        "[" * 9999,
    ],
)
def test_what_is_none_is_nothing(text: str) -> None:
    assert unpack_uses(text, [0]) == []
