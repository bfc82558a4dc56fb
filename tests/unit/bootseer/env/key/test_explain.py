"""Why a key was missed: the nearest document, its differences as lines and rows, and nothing untrusted raw."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.env.key.document import ABSENT, KeyDocument
from bootseer.env.key.explain import MAX_ROW_TEXT, MAX_TEXT, explain, explain_lines, explain_rows, shown

ONE = KeyDocument(
    commands=["pip install -r requirements.txt"],
    targets=["/opt/venv"],
    inputs={"requirements.txt": "3f2a" * 16},
    base={"kind": "python", "dist:numpy": "1.0 " + "aa" * 32, "version": "3.11.7"},
    variables={"CC": "gcc-12"},
    salt="",
)
KEY = "ab" * 32


def changed(**fields: object) -> KeyDocument:
    return msgspec.structs.replace(ONE, **fields)


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (
            {"inputs": {"requirements.txt": "9c1b" * 16}},
            "requirements.txt changed (was 3f2a3f2a.., is 9c1b9c1b..)",
        ),
        ({"inputs": {}}, "requirements.txt is gone (was 3f2a3f2a..)"),
        ({"inputs": {"requirements.txt": ABSENT}}, "requirements.txt is missing (was 3f2a3f2a..)"),
        (
            {"base": {**ONE.base, "dist:numpy": "2.0 " + "bb" * 32}},
            "the base's dist:numpy changed (was 1.0 aaaaaaaa.., is 2.0 bbbbbbbb..)",
        ),
        ({"base": {**ONE.base, "version": "3.12.1"}}, "the base's version changed (was 3.11.7, is 3.12.1)"),
        ({"variables": {"CC": "clang"}}, "the variable CC changed (was gcc-12, is clang)"),
        ({"variables": {"CC": "gcc-12", "CXX": ""}}, "the variable CXX is new (empty)"),
        ({"salt": "2"}, "--env-key changed (was empty, is 2)"),
        ({"commands": ["a"]}, "set-up command 1 changed (was pip install -r requirements.txt, is a)"),
        ({"commands": [*ONE.commands, "b"]}, "set-up command 2 is new (b)"),
        ({"targets": ["/opt/other"]}, "set-up target 1 changed (was /opt/venv, is /opt/other)"),
        ({"cwd": "/job"}, "the working directory changed (was empty, is /job)"),
    ],
)
def test_a_line_for_each_change(now: dict[str, object], expected: str) -> None:
    assert explain_lines(explain(changed(**now), [(KEY, ONE)])) == [f"missed because {expected}"]


def test_order_of_commands() -> None:
    one, other = changed(commands=["a", "b"]), changed(commands=["b", "a"])
    assert explain_lines(explain(other, [(KEY, one)])) == ["missed because the order of set-up commands changed"]


def test_the_nearest_is_that_with_the_fewest_changes_then_the_first() -> None:
    far = changed(salt="1", commands=["x"])
    near, near_too = changed(salt="2"), changed(salt="3")
    found = explain(ONE, [("1" * 64, far), ("2" * 64, near), ("3" * 64, near_too)])
    assert found.key == "2" * 64
    assert len(found.changes) == 1


def test_nothing_stored_and_nothing_different() -> None:
    assert explain_lines(explain(ONE, [])) == ["missed because the store has no environment yet"]
    (line,) = explain_lines(explain(ONE, [(KEY, ONE)]))
    assert line.startswith("missed although abababababab")


@given(st.integers(1, 12), st.integers(1, 12))
def test_at_most_so_many_lines(count: int, most: int) -> None:
    other = changed(variables={f"V{number}": "" for number in range(count)}, salt=ONE.salt)
    found = explain(other, [(KEY, changed(variables={}))])
    text = explain_lines(found, most)
    assert len(text) == min(count, most)
    told = sum("the variable" in line for line in text)
    if count > most:
        assert f"{count - told} " in text[-1], "the last line says how many more"


def installed(*names: str) -> dict[str, str]:
    """A base whose target has been set up."""
    return {**ONE.base, **{f"target:dist:{name}": "1.0 " + "aa" * 32 for name in names}}


def test_what_set_up_itself_has_installed_is_one_line() -> None:
    """The rest of what changed is not lost below it."""
    base = installed("a", "b", "c", "d", "e")
    found = explain(changed(base=base, salt="2"), [(KEY, ONE)])
    assert explain_lines(found) == [
        "missed because --env-key changed (was empty, is 2)",
        "missed because the set-up targets differ from the state before set-up: a, b, c and 2 more",
    ]
    assert len(explain_rows(found)) == 6, "for machines all are there"
    line, _ = explain_lines(explain(changed(base=installed("a")), [(KEY, ONE)]))
    assert "target:dist:a is new (1.0 aaaaaaaa..)" in line


def test_what_was_installed_does_not_decide_which_is_nearest() -> None:
    now = changed(base=installed("a", "b", "c", "d"), inputs={})
    other = changed(base=now.base, salt="x", commands=["y"])
    found = explain(now, [("1" * 64, other), ("2" * 64, ONE)])
    assert found.key == "2" * 64
    found = explain(now, [("1" * 64, ONE), ("2" * 64, changed(base=installed("a")))])
    assert found.key == "2" * 64, "of two that are as near the one with less in its targets"


def test_equal_requirements_are_nearer_than_an_equal_state_of_targets() -> None:
    """The environment of the same requirements that another node has made on top of an older one."""
    older = changed(inputs={"requirements.txt": "0" * 64})
    on_top = changed(base=installed("a", "b"))
    found = explain(ONE, [("1" * 64, older), ("2" * 64, on_top)])
    assert found.key == "2" * 64
    assert explain_lines(found)[-1] == (
        "222222222222 has the same commands and inputs, but was made in targets with other content: only such"
        " targets get it"
    )
    assert not any("such targets" in line for line in explain_lines(explain(ONE, [("1" * 64, older)])))


def test_rows_are_json() -> None:
    found = explain(changed(salt="2", inputs={}), [(KEY, ONE)])
    assert json.loads(json.dumps(explain_rows(found))) == [
        {"field": "inputs:requirements.txt", "was": "3f2a" * 16, "now": None},
        {"field": "salt", "was": "", "now": "2"},
    ]


@given(st.text(min_size=1), st.text())
def test_untrusted_text_cannot_reach_the_terminal_raw(name: str, value: str) -> None:
    found = explain(ONE, [(KEY, changed(variables={name: "\x1b[31m" + value * 100}, commands=[value]))])
    for line in explain_lines(found, 100):
        assert line.isprintable()
        assert len(line) < 600
    for row in explain_rows(found):
        assert all(text is None or (text.isprintable() and len(text) <= MAX_ROW_TEXT) for text in row.values())


def test_long_text_is_cut() -> None:
    assert shown("x" * MAX_TEXT) == "x" * MAX_TEXT
    assert shown("x" * (MAX_TEXT + 1)) == "x" * (MAX_TEXT - 3) + "..."
