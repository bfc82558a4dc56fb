"""The search for one machine: every machine of every layout, and what several or none look like."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.hangs.replay import ReplaySearch, SearchState, Verdict

MAX_ROUNDS = 12


def names(count: int) -> list[str]:
    return [f"m{number}" for number in range(count)]


def test_groups_that_cannot_run_end_the_search() -> None:
    replay = ReplaySearch(names(8), 4)
    for _ in range(2):
        replay.ran({group.number: "m5" in group.machines for group in replay.next_round()})
    assert replay.verdict() == Verdict(SearchState.OPEN, ("m5", "m7"))
    assert len(replay.next_round()) == 2
    replay.ran({})
    assert replay.next_round() == []
    assert replay.verdict() == Verdict(SearchState.SEVERAL, ("m5", "m7"))


def search(replay: ReplaySearch, bad: set[str]) -> tuple[Verdict, list[int]]:
    """The verdict, and how many groups each round had. A group fails when a bad machine is in it."""
    rounds = []
    while groups := replay.next_round():
        members = [machine for group in groups for machine in group.machines]
        assert len(members) == len(set(members))  # they run at the same time
        rounds.append(len(groups))
        assert len(rounds) < MAX_ROUNDS
        replay.ran({group.number: bool(bad & set(group.machines)) for group in groups})
    return replay.verdict(), rounds


@pytest.mark.parametrize("bad", range(24))
def test_each_machine_of_a_layout_of_4_by_6_is_found_in_two_rounds(bad: int) -> None:
    replay = ReplaySearch(names(24), 4)
    verdict, rounds = search(replay, {f"m{bad}"})
    assert verdict == Verdict(SearchState.ONE, (f"m{bad}",))
    assert rounds == [6, 6]


def test_the_papers_example() -> None:
    """Machine 13 of 4 by 6 is in group 3 of the first round and in group 1 of the second."""
    replay = ReplaySearch(names(24), 4)
    first = replay.next_round()
    replay.ran({group.number: "m13" in group.machines for group in first})
    second = replay.next_round()
    assert "m13" in first[3].machines and "m13" in second[1].machines


@pytest.mark.parametrize("size", range(1, 9))
def test_each_machine_of_all_smaller_layouts(size: int) -> None:
    """With m <= n two rounds do; else, and with machines left over, more."""
    for count in range(size + 1, 8 * 3 + 3):
        for bad in range(count):
            verdict, rounds = search(ReplaySearch(names(count), size), {f"m{bad}"})
            if verdict.found is SearchState.ALL:  # groups of nearly all machines: none is without it
                assert count < 2 * size
                continue
            if verdict.found is SearchState.SEVERAL:  # there are not enough others
                assert f"m{bad}" in verdict.suspects and count < 2 * size
                continue
            assert verdict == Verdict(SearchState.ONE, (f"m{bad}",)), (count, size)
            if count % size == 0 and size <= count // size:
                assert len(rounds) == 2


@given(st.integers(2, 60), st.integers(1, 12), st.data())
def test_who_is_cleared_was_in_a_group_that_passed(count: int, size: int, data: st.DataObject) -> None:
    if size >= count:
        return
    bad = set(data.draw(st.lists(st.sampled_from(names(count)), max_size=4)))
    verdict, _ = search(ReplaySearch(names(count), size), bad)
    if not bad:
        assert verdict == Verdict(SearchState.NONE, ())
    elif verdict.found is SearchState.ONE:
        assert len(bad) > 1 or set(verdict.suspects) == bad
        assert set(verdict.suspects) <= bad  # nobody is blamed who is well
    elif verdict.found is SearchState.SEVERAL:
        assert bad & set(verdict.suspects)


@given(st.integers(2, 40), st.integers(1, 8), st.randoms())
def test_any_answers_end(count: int, size: int, random: object) -> None:
    """Faults that come and go, groups that could not run: the search ends all the same."""
    if size >= count:
        return
    replay = ReplaySearch(names(count), size)
    rounds = 0
    while groups := replay.next_round():
        rounds += 1
        assert rounds < MAX_ROUNDS
        replay.ran({g.number: random.random() < 0.5 for g in groups if random.random() < 0.9})  # type: ignore[attr-defined]
    assert replay.verdict().found is not SearchState.OPEN


@pytest.mark.parametrize(
    ("machines", "size", "words"),
    [
        (["a", "a", "b"], 1, "a is listed twice"),
        (["a"], 1, "show nothing"),
        (["a", "b"], 0, "show nothing"),
    ],
)
def test_what_is_no_search(machines: list[str], size: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ReplaySearch(machines, size)
