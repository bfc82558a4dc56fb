"""What the warm daemon accepts from a worker, another user's process, and when a worker's turn is over."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.warm.answers import (
    MAX_SAID,
    SILENCE_S,
    TURN_S,
    Done,
    Failed,
    Progress,
    Said,
    Turn,
    WillHold,
    parse,
)
from launcher.warm.results import CACHED, IMAGE, STAGES, Warmed, line, to_record

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=5,
)
WORDS = st.sampled_from(["said", "progress", "will-hold", "failed", "done", "other"])
FIELDS = ("text", "stage", "done", "total", "digest", "why", "stages", "holds")


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        ({"did": "said", "text": "trying again"}, Said("trying again")),
        ({"did": "progress", "stage": IMAGE, "done": 3, "total": 7}, Progress(IMAGE, 3, 7)),
        ({"did": "will-hold", "digest": "abc"}, WillHold("abc")),
        ({"did": "failed", "why": "no such file"}, Failed("no such file")),
        ({"did": "done", "stages": [], "holds": True}, Done((), True)),
        (
            {"did": "done", "stages": [to_record(Warmed(IMAGE, CACHED, "d"))], "holds": False},
            Done((Warmed(IMAGE, CACHED, "d"),), False),
        ),
    ],
)
def test_answers(message: dict[str, Any], answer: object) -> None:
    assert parse(message) == answer


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"did": None},
        {"did": ["said"]},
        {"did": "done", "stages": None},
        {"did": "done", "stages": 3},
        {"did": "progress", "stage": IMAGE, "done": -1, "total": 7},
        {"did": "progress", "stage": IMAGE, "done": 1, "total": -1},
        {"did": "progress", "stage": IMAGE, "done": True, "total": 7},
        {"did": "progress", "stage": IMAGE, "done": 10**400, "total": 7},
        {"did": "progress", "stage": "gpu", "done": 1, "total": 7},
        {"did": "progress", "stage": [], "done": 1, "total": 7},
        {"did": "progress"},
    ],
)
def test_anything_else_is_no_answer(message: dict[str, Any]) -> None:
    assert parse(message) is None


@pytest.mark.parametrize(
    "change", [{"how": "free \x1b[2J"}, {"size_bytes": 10**400}, {"took_s": float("inf")}, {"stage": "gpu"}]
)
def test_an_invalid_result_is_left_out(change: dict[str, Any]) -> None:
    record = {**to_record(Warmed(IMAGE, CACHED)), **change}
    assert parse({"did": "done", "stages": [record, 3, None], "holds": False}) == Done((), False)


@given(WORDS, st.dictionaries(st.sampled_from(FIELDS), VALUES))
def test_no_message_raises_or_reaches_the_terminal(did: str, fields: dict[str, Any]) -> None:
    answer = parse(json.loads(json.dumps({**fields, "did": did})))
    match answer:
        case Said(text) | Failed(text):
            assert text.isprintable()
        case Progress(stage, done, total):
            assert stage in STAGES and done >= 0 and total >= 0
        case Done(found, _):
            assert all(line(each).isprintable() for each in found)


def test_control_characters_are_removed() -> None:
    text = "\x1b]0;root\x07 a\nline"
    assert parse({"did": "said", "text": text}) == Said("]0;root a line")
    assert parse({"did": "failed", "why": text}) == Failed("]0;root a line")
    warmed = Warmed(IMAGE, CACHED, text=text)
    cleaned = warmed._replace(text="]0;root a line")
    assert parse({"did": "done", "stages": [to_record(warmed)]}) == Done((cleaned,), False)


# ---- turns ---------------------------------------------------------------------------------------------------


def test_a_worker_without_progress_is_ended() -> None:
    turn = Turn(0.0)
    assert turn.left_s(SILENCE_S - 1) == 1
    assert turn.left_s(SILENCE_S) == 0
    assert turn.why == "its worker process has made no progress for 600 s"


@pytest.mark.parametrize("answer", [Progress(IMAGE, 5, 7), Said("a line"), WillHold("d")])
def test_progress_extends_a_turn(answer: Any) -> None:
    turn = Turn(0.0)
    turn.note(answer, 100.0)
    assert turn.left_s(100.0) == SILENCE_S


@pytest.mark.parametrize("answer", [Progress(IMAGE, 5, 7), WillHold("d"), None])
def test_repeated_answers_extend_no_turn(answer: Any) -> None:
    turn = Turn(0.0)
    turn.note(answer, 0.0)
    turn.note(answer, 100.0)
    assert turn.left_s(100.0) == SILENCE_S - 100


def test_each_stage_makes_its_own_progress() -> None:
    turn = Turn(0.0)
    for number, stage in enumerate(STAGES):
        turn.note(Progress(stage, 0, 7), 100.0 * number)
    assert turn.left_s(300.0) == SILENCE_S


def test_lines_extend_a_turn_only_so_often() -> None:
    turn = Turn(0.0)
    for number in range(MAX_SAID + 5):
        turn.note(Said("a line"), float(number))
    assert turn.left_s(0.0) == MAX_SAID - 1 + SILENCE_S


def test_a_turn_has_an_end() -> None:
    turn = Turn(0.0)
    turn.note(Progress(IMAGE, 5, 7), TURN_S - 1)
    assert turn.left_s(TURN_S - 1) == 1
    assert turn.why == "its worker process was ended after 6 h; the next round continues"
