"""The mapping of clocks: the bound must hold for any delays, any offset and any drift that is allowed for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from launcher.rendezvous.clock import DRIFT_PPM, UNKNOWN_NS, JobClock, map_back

SECOND = 10**9


def test_nothing_is_known_before_the_first_answer() -> None:
    assert JobClock().map(5) == (5, UNKNOWN_NS)


delays = st.integers(0, 3 * SECOND)


@given(
    st.integers(-(10**15), 10**15),
    st.integers(-DRIFT_PPM, DRIFT_PPM),
    st.lists(st.tuples(st.integers(0, 60 * SECOND), delays, delays, delays), min_size=1, max_size=12),
    st.integers(-100 * SECOND, 100 * SECOND),
)
def test_the_truth_is_within_the_bound(
    offset: int, drift_ppm: int, rounds: list[tuple[int, int, int, int]], distance: int
) -> None:
    """Coordinator's clock = local + offset + drift; pings with any delay on each of the two ways."""

    def truth(local_ns: int) -> int:
        return local_ns + offset + local_ns * drift_ppm // 1_000_000

    clock = JobClock()
    local_ns = 10**12
    for pause, there, at_work, back in rounds:
        sent_ns = local_ns + pause
        received_ns, answered_ns = truth(sent_ns + there), truth(sent_ns + there + at_work)
        local_ns = sent_ns + there + at_work + back
        clock.add(sent_ns, received_ns, answered_ns, local_ns)
        mapped, error = clock.map(local_ns + distance)
        # The two samples' own drift during one round trip adds a little that is bounded as well.
        slack = (there + at_work + back) * DRIFT_PPM // 1_000_000 + 5
        assert abs(mapped - truth(local_ns + distance)) <= error + slack


def test_the_best_sample_is_kept_until_it_is_too_old() -> None:
    clock = JobClock()
    clock.add(0, 1000, 1000, 100)
    assert clock.map(50) == (1000, 54)
    clock.add(200, 10_000, 10_000, 10_200)  # a slow one soon after
    assert clock.map(50)[1] == 54
    later = 3600 * SECOND
    clock.add(later, later + 7000, later + 7000, later + 10_000)
    assert clock.map(later + 5000) == (later + 7000, 5006)


def test_impossible_times_are_not_trusted() -> None:
    clock = JobClock()
    clock.add(100, 5, 5, 50)  # answered before it was asked
    clock.add(100, 50, 5, 200)
    clock.add(100, 0, 500, 200)  # longer at the coordinator than the whole round trip
    assert clock.map(1) == (1, UNKNOWN_NS)


moments = st.integers(0, 10**15)


@given(st.integers(-(10**12), 10**12), st.integers(0, 10**9), moments, moments, moments)
def test_a_mapping_made_earlier_is_never_surer_than_the_clock_itself(
    offset: int, round_trip: int, asked: int, made: int, moment: int
) -> None:
    clock = JobClock()
    clock.add(asked, asked + offset, asked + offset, asked + round_trip)
    job_ns, error_ns = clock.map(made)
    mapped = map_back(moment, made, job_ns, error_ns)
    true_ns, bound_ns = clock.map(moment)
    assert mapped[0] == true_ns
    assert bound_ns <= mapped[1] <= bound_ns + 2 * abs(moment - made) * DRIFT_PPM // 1_000_000 + 4


def test_of_one_clock_nothing_is_unsure() -> None:
    assert map_back(5, 100, 100, 0) == (5, 0)
