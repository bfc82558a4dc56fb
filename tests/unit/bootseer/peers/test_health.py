"""Who is asked, and who rests; how much of the link others get."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bootseer.peers import health
from bootseer.peers.health import FIRST_REST_S, MAX_REST_S, Health, State, late_s


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
    peers.record_success("a")
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
    assert set(rests[3:]) == {MAX_REST_S}


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
    peers.record_success("a")
    peers.renew("a")
    assert not peers.may_ask("a", 1e9)
    peers.acquit("a")
    assert peers.may_ask("a", 0.0)
    peers.acquit("b")
    assert peers.state("b") is State.WELL


@given(st.one_of(st.none(), st.floats(0, 1e6)))
def test_what_peers_can_cost_is_bounded(p95_s: float | None) -> None:
    assert health.MIN_LATE_S <= late_s(p95_s) <= health.MAX_LATE_S
    assert health.MAX_PEERS * health.MAX_LATE_S == 30.0
