"""`bench env_key`: enough cases, each named once in its layout, and what is rebuilt is one of the changes."""

from __future__ import annotations

from collections import Counter

from bench.env_key import CHANGED, STAYED, Case, add_cases, all_layouts
from bench.env_key_tools import TOOLS
from bench.record import Figures


def test_there_are_enough_cases_and_each_has_a_name_of_its_own() -> None:
    layouts = all_layouts()
    assert not [name for name, count in Counter(each.name for each in layouts).items() if count > 1]
    for layout in layouts:
        names = [change.name for change in (*layout.changed, *layout.stayed)]
        assert len(names) == len(set(names)), layout.name
        assert {each.change for each in layout.rebuilt} <= {change.name for change in layout.changed}
        assert layout.tool in TOOLS
    assert {each.tool for each in layouts} == set(TOOLS)
    assert sum(len(each.changed) for each in layouts) >= 120
    assert sum(len(each.stayed) for each in layouts) >= 40


def test_a_wrong_case_is_counted_and_named() -> None:
    figures = Figures()
    add_cases(
        figures,
        [
            Case("one", "a", CHANGED, "", 0.1),
            Case("one", "b", CHANGED, "the same", 0.1),
            Case("one", "c", STAYED, "", 0.1),
        ],
    )
    values = {name: made.value for name, made in figures}
    assert values["env_key.changed"] == 1 and values["env_key.changed_share"] == 0.5
    assert values["env_key.stayed_share"] == 1
    assert figures.facts["wrong"] == [["one", "b", "the same"]]
