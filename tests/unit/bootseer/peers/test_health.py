"""Who is asked, and who rests; how much of the link others get."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.peers import health
from bootseer.peers.health import FIRST_REST_S, MOST_REST_S, Health, State, late_s, most_added_s
from bootseer.peers.uploads import BURST_S, Uploads


def test_a_peer_that_fails_rests_and_then_one_read_tries_it() -> None:
    peers = Health()
    assert peers.may_ask("a", 0.0)
    assert peers.may_ask("a", 0.0), "as many reads as one likes"
    peers.failed("a", 10.0)
    peers.failed("a", 10.5)  # of a read that was under way with the first one
    assert peers.may_ask("b", 10.0)
    assert not peers.may_ask("a", 10.0 + FIRST_REST_S - 0.1)
    assert peers.may_ask("a", 10.0 + FIRST_REST_S)
    assert not peers.may_ask("a", 10.0 + FIRST_REST_S), "one tries"
    peers.went_well("a")
    assert peers.state("a") is State.WELL
    assert peers.may_ask("a", 16.0)


def test_rests_grow_to_a_bound() -> None:
    peers = Health()
    peers.failed("a", 0.0)
    now_s, rests = FIRST_REST_S, []
    for _ in range(8):
        assert peers.may_ask("a", now_s)
        peers.failed("a", now_s)
        rest_s = next(step for step in range(1, 200) if peers.may_ask("a", now_s + step))
        rests.append(rest_s)
        peers.left("a", now_s + rest_s)
        now_s += rest_s
    assert rests[:3] == [10, 20, 40]
    assert set(rests[3:]) == {MOST_REST_S}


def test_a_read_that_is_given_up_says_nothing() -> None:
    peers = Health()
    peers.left("a", 0.0)
    assert peers.state("a") is State.WELL
    peers.failed("a", 0.0)
    assert peers.may_ask("a", 5.0)
    peers.left("a", 5.0)
    assert peers.may_ask("a", 5.0)


def test_a_liar_is_out_until_it_is_acquitted() -> None:
    peers = Health()
    peers.strike("a")
    peers.failed("a", 0.0)
    peers.went_well("a")
    peers.renew("a")
    assert not peers.may_ask("a", 1e9)
    peers.acquit("a")
    assert peers.may_ask("a", 0.0)
    peers.acquit("b")
    assert peers.state("b") is State.WELL


@given(st.one_of(st.none(), st.floats(0, 1e6)))
def test_what_peers_can_cost_is_bounded(p95_s: float | None) -> None:
    assert health.LEAST_LATE_S <= late_s(p95_s) <= health.MOST_LATE_S
    assert most_added_s() == 30.0


grants = st.lists(st.tuples(st.integers(1, 1 << 20), st.floats(0, 1)), min_size=1, max_size=50)


@given(st.floats(1e3, 1e10), grants)
def test_uploads_keep_to_their_rate(rate: float, taken: list[tuple[int, float]]) -> None:
    uploads = Uploads(rate)
    now_s = last_s = 100.0
    sent = 0
    for count, pause_s in taken:
        now_s += pause_s
        wait_s = uploads.wait_s(count, now_s)
        assert wait_s >= 0
        begin_s = now_s + wait_s
        assert begin_s >= last_s - 1e-6, "first come, first served"
        # What was granted before this one has gone through by then, but for the burst.
        assert sent <= rate * (begin_s - 100.0 + BURST_S) * (1 + 1e-6) + 1
        sent += count
        last_s = begin_s


def test_uploads_without_a_limit() -> None:
    uploads = Uploads(None)
    assert [uploads.wait_s(1 << 40, 0.0) for _ in range(3)] == [0.0] * 3
    with pytest.raises(ValueError, match="bytes/s"):
        Uploads(0)
