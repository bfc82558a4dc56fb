"""Two ends of a way that breaks now and then: every message arrives once, in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from launcher.rendezvous.messages import Note, Ping, Started
from launcher.rendezvous.session import MAX_UNCONFIRMED, MessageSession

STEPS = st.lists(st.sampled_from(["send", "arrive", "lose", "hear"]), max_size=200)


@given(STEPS)
def test_nothing_is_lost_and_nothing_comes_twice(steps: list[str]) -> None:
    here, there = MessageSession(), MessageSession()
    on_the_way: list[Note] = []
    sent: list[Note] = []
    arrived: list[Note] = []
    for step in [*steps, "lose", *["arrive"] * len(steps)]:
        if step == "send":
            sent.append(Note(str(len(sent))))
            here.sends(sent[-1])
            on_the_way.append(sent[-1])
        elif step == "arrive" and on_the_way:
            arrived.append(on_the_way.pop(0))
            there.receives(arrived[-1])
        elif step == "hear":
            here.heard(there.received)
        elif step == "lose":
            here.heard(there.received)
            on_the_way = [message for message in here.missing() if isinstance(message, Note)]
    assert arrived == sent


def test_what_belongs_to_a_connection_is_not_counted() -> None:
    session = MessageSession()
    session.sends(Ping(1))
    session.receives(Ping(1))
    assert (session.missing(), session.received) == ([], 0)


def test_counts_that_cannot_be_change_nothing() -> None:
    session = MessageSession()
    session.sends(Started(0, 0.0))
    for count in (-5, 0, 2, 2**60):
        session.heard(count)
    assert session.missing() == [Started(0, 0.0)]
    session.heard(1)
    assert session.missing() == []


def test_another_coordinator_counts_from_what_was_said_early() -> None:
    session = MessageSession()
    session.sends(Started(0, 0.0))
    session.receives(Note("of the first one"))
    assert session.begin() == [Started(0, 0.0)]
    session.sends(Started(1, 0.0))
    session.heard(1)
    assert (session.missing(), session.received) == ([Started(1, 0.0)], 0)


def test_who_is_far_behind_is_known() -> None:
    session = MessageSession()
    for _ in range(MAX_UNCONFIRMED):
        session.sends(Started(0, 0.0))
    assert not session.is_far_behind
    session.sends(Started(0, 0.0))
    assert session.is_far_behind
