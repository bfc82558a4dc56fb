"""The restart ladder: which step follows which failure, whatever has been before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.hangs.replay import ReplaySearch, SearchState
from launcher.coordinator.escalation import (
    CALM_S,
    EXPENSIVE,
    MAX_HOSTS_NAMED,
    Decision,
    Fault,
    Ladder,
    Step,
    advise_replay,
    group_size,
)
from launcher.coordinator.machines import ladder_fault
from launcher.rendezvous.messages import MountFault
from tests.unit.launcher.jobsim import make_failure

ALL = frozenset(EXPENSIVE)
KINDS = (
    "user",
    "resource",
    "platform",
    "accelerator",
    "network",
    "numeric",
    "killed",
    "hang",
    "crash",
    "rule",
    "mount",
)
FAULTS = st.builds(
    Fault,
    st.sampled_from(KINDS),
    is_code=st.booleans(),
    is_evicted=st.booleans(),
    hopeless=st.sampled_from(["", "", "it comes again"]),
    is_last=st.sampled_from([False] * 9 + [True]),
)
ROWS = st.lists(st.tuples(FAULTS, st.sampled_from([1.0, 1.0, 1.0, CALM_S])), max_size=30)
AVAILABLE = st.sets(st.sampled_from(EXPENSIVE))


def steps(ladder: Ladder, *faults: Fault | str) -> list[Step]:
    found = []
    for each in faults:
        fault = Fault(each) if isinstance(each, str) else each
        found.append(ladder.after_failure(fault, 1.0).step)
    return found


def test_from_cheap_to_dear() -> None:
    ladder = Ladder(ALL)
    first = [Step.IN_PLACE, Step.CHECKS, Step.ROLLBACK, Step.REPLAY]
    assert steps(ladder, *["resource"] * 6) == [*first, Step.IN_PLACE, Step.IN_PLACE]
    assert ladder.after_failure(Fault("resource"), CALM_S).step is Step.IN_PLACE  # a new row
    assert steps(ladder, "resource") == [Step.CHECKS]


def test_what_may_pass_is_tried_again_before_anything_dearer() -> None:
    ladder = Ladder(ALL)
    assert steps(ladder, "network", "platform", "network") == [Step.REATTEMPT, Step.REATTEMPT, Step.CHECKS]


@pytest.mark.parametrize("kind", ["numeric", "accelerator", "hang", "crash"])
def test_what_machines_do_silently_is_checked_at_once(kind: str) -> None:
    assert steps(Ladder(ALL), kind) == [Step.CHECKS]
    assert steps(Ladder(), kind) == [Step.IN_PLACE]


def test_after_an_eviction_comes_what_is_dearer() -> None:
    fault = Fault("accelerator", is_evicted=True)
    assert steps(Ladder(ALL), fault, fault, "user") == [Step.EVICT, Step.EVICT, Step.CHECKS]


def test_code_that_fails_at_the_same_place_is_rolled_back_once_then_given_up() -> None:
    again = Fault("user", is_code=True, hopeless="KeyError at a.py:3")
    assert steps(Ladder(ALL), Fault("user", is_code=True), again, again) == [
        *(Step.IN_PLACE, Step.ROLLBACK, Step.GIVE_UP)
    ]
    assert Ladder().after_failure(again, 1.0) == Decision(Step.GIVE_UP, "KeyError at a.py:3")


def test_who_is_killed_climbs_nothing() -> None:
    assert steps(Ladder(ALL), *["killed"] * 5, "resource") == [Step.REATTEMPT] * 5 + [Step.IN_PLACE]


@given(AVAILABLE, ROWS)
def test_each_dear_step_once_in_a_row_in_order_and_only_where_asked_for(
    available: set[Step], row: list[tuple[Fault, float]]
) -> None:
    ladder = Ladder(available)
    taken: list[Step] = []
    for fault, lived_s in row:
        if lived_s >= CALM_S:
            taken = []
        decision = ladder.after_failure(fault, lived_s)
        assert decision.why
        assert decision.ends == (decision.step is Step.GIVE_UP)
        if decision.step in EXPENSIVE:
            assert decision.step in available and decision.step not in taken
            assert not fault.is_code or decision.step is Step.ROLLBACK
            # What stands before it was taken, was not asked for, or does not suit code.
            before = EXPENSIVE[: EXPENSIVE.index(decision.step)]
            assert all(each in taken or each not in available or fault.is_code for each in before)
            taken.append(decision.step)
        elif decision.ends:
            suits = [each for each in available if each is Step.ROLLBACK or not fault.is_code]
            assert fault.is_last or (fault.hopeless and set(suits) <= set(taken))
        else:
            assert not fault.is_last
            assert (decision.step is Step.EVICT) == fault.is_evicted
            assert fault.is_evicted or not fault.hopeless


@given(ROWS)
def test_without_steps_of_its_own_it_only_starts_again(row: list[tuple[Fault, float]]) -> None:
    ladder = Ladder()
    for fault, lived_s in row:
        step = ladder.after_failure(fault, lived_s).step
        assert step not in EXPENSIVE
        assert (step is Step.GIVE_UP) == (fault.is_last or (bool(fault.hopeless) and not fault.is_evicted))


@given(AVAILABLE, st.sampled_from(KINDS), st.booleans())
def test_what_is_hopeless_ends_after_each_step_was_tried(available: set[Step], kind: str, is_code: bool) -> None:
    fault = Fault(kind, is_code, hopeless="stuck")
    ladder = Ladder(available)
    found = steps(ladder, *[fault] * (len(available) + 1))
    assert Step.GIVE_UP in found and found.index(Step.GIVE_UP) == len(set(found)) - 1


# ---- group replay --------------------------------------------------------------------------------------------


def test_the_advice_names_machines_and_groups() -> None:
    ladder, hosts = Ladder(), [f"n{number}" for number in range(24)]
    steps(ladder, "numeric")
    assert advise_replay(ladder, hosts) == ""  # it may pass
    steps(ladder, "numeric")
    assert advise_replay(ladder, hosts).endswith(
        f"bootseer replay --hosts {','.join(hosts)} --group-size 4 --run COMMAND"
    )
    assert advise_replay(ladder, hosts[:1]) == ""
    many = [f"n{number}" for number in range(MAX_HOSTS_NAMED + 1)]
    assert "--hosts FILE (its 65 machines, one a line) --group-size 8" in advise_replay(ladder, many)


@pytest.mark.parametrize(
    "last", [Fault("user", is_code=True), Fault("accelerator", is_evicted=True)], ids=["code", "evicted"]
)
def test_no_advice_where_it_is_known_whose_matter_it_is(last: Fault) -> None:
    ladder = Ladder()
    steps(ladder, "numeric", "numeric", last)
    assert advise_replay(ladder, ["a", "b"]) == ""


def test_no_advice_after_a_replay() -> None:
    ladder = Ladder([Step.REPLAY])
    assert steps(ladder, "numeric", "numeric") == [Step.REPLAY, Step.IN_PLACE]
    assert advise_replay(ladder, ["a", "b"]) == ""


@pytest.mark.parametrize("count", [*range(2, 30), 100])
def test_groups_of_the_size_that_is_advised_find_each_machine(count: int) -> None:
    """Of 4 x 6, too: in two rounds, as tests/unit/bootseer/hangs has it."""
    machines = [f"n{number}" for number in range(count)]
    for bad in machines:
        replay = ReplaySearch(machines, group_size(count))
        while groups := replay.next_round():
            replay.ran({group.number: bad in group.machines for group in groups})
        assert replay.verdict() == (SearchState.ONE, (bad,))


def test_what_bootrun_shows_is_no_machines_matter() -> None:
    """It is had in another way; nothing is measured, rolled back or replayed for it."""
    ladder = Ladder(ALL - {Step.ROLLBACK})
    fault = ladder_fault([make_failure(0, status=-7, mounts=(MountFault("image", "block 7", True),))])
    assert steps(ladder, *[fault] * 3) == [Step.REATTEMPT] * 3
    assert not ladder.may_be_a_machine
    assert steps(ladder, fault._replace(hopeless="it comes again")) == [Step.GIVE_UP]
    assert steps(Ladder(ALL), "mount", "user") == [Step.REATTEMPT, Step.IN_PLACE], "it begins no row"
