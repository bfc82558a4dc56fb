"""The restart budget: never more than allowed, never a smaller count, waits that grow and are bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bootseer.tuning import DEFAULTS
from launcher.coordinator.restart_policy import NoProgress, RestartPolicy, SameError

MAX_BACKOFF_S = DEFAULTS.launcher.max_backoff_s
MAX_WITHOUT_PROGRESS = DEFAULTS.launcher.attempts_without_progress

LIVES = st.lists(st.floats(0.0, 1e5), max_size=50)


@given(max_restarts=st.integers(0, 10), lives=LIVES)
def test_no_more_restarts_than_allowed(max_restarts: int, lives: list[float]) -> None:
    policy = RestartPolicy(max_restarts, 30.0, 1.0)
    delays = []
    for lived_s in lives:
        has_left = policy.has_left(lived_s)
        delays.append(policy.after_failure(lived_s, MAX_BACKOFF_S))
        assert (delays[-1] is not None) == has_left
    assert delays == [*delays[:max_restarts], *[None] * (len(delays) - max_restarts)]
    assert None not in delays[:max_restarts]
    assert policy.count == min(max_restarts, len(lives))


@given(max_restarts=st.integers(0, 5), refill_s=st.floats(0.1, 1e4), lives=LIVES)
def test_refill_gives_the_budget_back_and_the_count_never_falls(
    max_restarts: int, refill_s: float, lives: list[float]
) -> None:
    policy = RestartPolicy(max_restarts, 30.0, 0.0, refill_s)
    counts = []
    for lived_s in lives:
        has_left = policy.has_left(lived_s)
        delay_s = policy.after_failure(lived_s, MAX_BACKOFF_S)
        assert (delay_s is not None) == has_left
        counts.append(policy.count)
        assert policy.used <= max_restarts
        if lived_s >= refill_s and max_restarts:
            assert delay_s == 0.0
            assert policy.used == 1
    assert counts == sorted(counts)


@given(lives=LIVES)
def test_early_failures_in_a_row_wait_longer_up_to_a_bound(lives: list[float]) -> None:
    policy = RestartPolicy(1000, 30.0, 1.0)
    last_s = 0.0
    for lived_s in lives:
        delay_s = policy.after_failure(lived_s, MAX_BACKOFF_S)
        assert delay_s is not None
        assert 0.0 <= delay_s <= MAX_BACKOFF_S
        if lived_s >= 30.0:
            assert delay_s == 0.0
            last_s = 0.0
        else:
            assert delay_s >= last_s
            last_s = delay_s


def test_waits_double() -> None:
    policy = RestartPolicy(10, 30.0, 1.0)
    waits_s = [policy.after_failure(0.0, 30.0) for _ in range(9)]
    assert waits_s == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert RestartPolicy(2, 30.0, 0.0).after_failure(0.0, MAX_BACKOFF_S) == 0.0


def test_the_same_error_in_two_attempts_in_a_row() -> None:
    same = SameError()
    assert same.after_failure(["KeyError at a.py:1", "KeyError at b.py:2"]) == ""
    assert same.after_failure(["KeyError at b.py:2"]) == "KeyError at b.py:2"


REACHED = st.tuples(st.integers(-1, 4), st.one_of(st.none(), st.integers(-5, 5)))


@given(st.lists(REACHED, max_size=40))
def test_nothing_is_given_up_unless_three_in_a_row_are_known_to_have_got_nowhere(
    attempts: list[tuple[int, int | None]],
) -> None:
    policy = NoProgress(MAX_WITHOUT_PROGRESS)
    best: int | None = None
    nowhere, makes_steps = 0, False
    for steps, number in attempts:
        said = policy.after_failure(steps, number)
        makes_steps |= steps > 0
        if (steps == 0 and makes_steps) or (
            steps > 0 and number is not None and best is not None and number <= best
        ):
            nowhere += 1
        elif steps > 0 and not (number is None and best is not None):
            best, nowhere = number, 0
        else:
            assert said == "", "what is not known decides nothing"
            continue
        assert bool(said) == (nowhere >= MAX_WITHOUT_PROGRESS)


@given(st.lists(st.integers(0, 100), min_size=1, unique=True))
def test_a_job_that_gets_further_each_time_is_never_given_up(numbers: list[int]) -> None:
    policy = NoProgress(MAX_WITHOUT_PROGRESS)
    assert [policy.after_failure(1, number) for number in sorted(numbers)] == [""] * len(numbers)


@given(st.lists(st.integers(1, 100)))
def test_without_numbers_any_step_may_be_progress(steps: list[int]) -> None:
    policy = NoProgress(MAX_WITHOUT_PROGRESS)
    assert [policy.after_failure(each, None) for each in steps] == [""] * len(steps)


def test_what_is_said_of_a_job_without_progress() -> None:
    policy = NoProgress(MAX_WITHOUT_PROGRESS)
    assert [policy.after_failure(0, None) for _ in range(9)] == [""] * 9, "it may be a job without steps"
    said = [policy.after_failure(steps, None) for steps in (8, 0, 0, 0)]
    assert said == ["", "", "", "none of the last 3 attempts has made a step"]
    policy = NoProgress(MAX_WITHOUT_PROGRESS)
    said = [policy.after_failure(9, number) for number in (150, 150, 80, 120)]
    assert said == ["", "", "", "none of the last 3 attempts has got beyond step 150"]


def test_another_failure_between_them_begins_again() -> None:
    same = SameError()
    assert [same.after_failure(each) for each in (["a"], [], ["a"], ["b"], ["a"])] == [""] * 5
