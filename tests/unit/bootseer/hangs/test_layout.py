"""Layouts: what the job says, the way to the coordinator, groups and stages."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import bootseer
from bootseer.hangs.calls import Group
from bootseer.hangs.layout import (
    MAX_LINE,
    STAGE,
    Layout,
    format_layout,
    format_runs,
    groups_of,
    groups_of_calls,
    make_layout,
    parse_layout,
    parse_runs,
)

SIZES = st.dictionaries(st.sampled_from(("pp", "dp", "tp", "cp")), st.integers(1, 4), min_size=1)


@given(SIZES, st.randoms(use_true_random=False))
def test_groups_of_a_dimension_are_all_ranks_once(sizes: dict[str, int], random: object) -> None:
    layout = make_layout(sizes)
    shuffled = [*layout.ranks]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    layout = layout._replace(ranks=tuple(shuffled))
    assert parse_layout(format_layout(layout)) == layout
    groups = groups_of(layout)
    assert {*groups} - {STAGE} == {name for name, size in sizes.items() if size > 1}
    for name, listed in groups.items():
        assert sorted(rank for group in listed for rank in group) == sorted(layout.ranks)
        if name == STAGE:
            assert len(listed) == sizes["pp"]
            assert all(len({*stage} & {*pipe}) == 1 for stage in listed for pipe in groups["pp"])
        else:
            assert {len(group) for group in listed} == {sizes[name]}


def test_ranks_count_up_along_the_last_dimension() -> None:
    groups = groups_of(make_layout({"pp": 2, "dp": 2, "tp": 2}))
    assert groups["tp"] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert groups["dp"] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert groups["pp"] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert groups[STAGE] == [(0, 1, 2, 3), (4, 5, 6, 7)]


@given(st.lists(st.integers(0, 2**20), max_size=40))
def test_runs_are_read_as_they_were_written(ranks: list[int]) -> None:
    assert parse_runs(format_runs(ranks), len(ranks)) == tuple(ranks)
    if ranks:
        with pytest.raises(ValueError):
            parse_runs(format_runs(ranks), len(ranks) - 1)


@given(st.text(max_size=60))
def test_what_is_no_layout_is_none(text: str) -> None:
    found = parse_layout(text)
    assert found is None or parse_layout(format_layout(found)) == found


@pytest.mark.parametrize(
    "line", ["dp;2;0:3:1", "dp;2;0:2:0", "dp;0;", "dp,dp;2,2;0:4:1", "d p;2;0:2:1", "dp;99999999999;0:2:1", "dp;2"]
)
def test_what_is_no_layout_either_is_none(line: str) -> None:
    assert parse_layout(line) is None


def test_a_large_irregular_one_is_not_sent() -> None:
    ranks = [number * number for number in range(5000)]
    assert format_layout(Layout(("dp",), (5000,), tuple(ranks))) == ""
    assert len(format_layout(make_layout({"dp": 1 << 19, "tp": 2}))) < MAX_LINE


def test_named_process_groups_make_one_too() -> None:
    world = Group("0", "default_pg", 1, (0, 1, 2, 3))
    named = [
        Group("1", "mesh_dp", 1, (2, 3)),
        Group("2", "mesh_dp", 1, (0, 1)),
        Group("3", "undefined", 1, (0, 2)),
        Group("4", "alone", 1, (0, 3)),
    ]
    assert groups_of_calls([world, *named]) == {"dp": [(0, 1), (2, 3)]}


def test_a_script_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bootseer.layout(dp=2)  # outside of a job
    kept: list[str] = []
    rank = ModuleType("_bootseer_rank")
    rank.keep_layout = kept.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "_bootseer_rank", rank)
    bootseer.layout(pp=2, tp=2)
    grid = SimpleNamespace(shape=(2, 2), flatten=lambda: SimpleNamespace(tolist=lambda: [0, 2, 1, 3]))
    bootseer.layout(SimpleNamespace(mesh_dim_names=("dp", "tp"), mesh=grid))
    assert kept == ["pp,tp;2,2;0:4:1", "dp,tp;2,2;0:2:2,1:2:2"]
    for wrong in ({"dp": 0}, {}, {"dp": 2.5}):
        with pytest.raises(ValueError):
            bootseer.layout(**wrong)
    with pytest.raises(ValueError, match="mesh_dim_names"):
        bootseer.layout(SimpleNamespace(mesh_dim_names=None, mesh=grid))
