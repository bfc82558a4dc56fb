"""What goes from an environment store, and above all what does not."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from bootseer.env.store.gc import (
    GRACE_S,
    RECENT_S,
    KeyFacts,
    Limits,
    SnapshotGeneration,
    TreeFile,
    is_alive,
    is_live,
    is_recent,
    plan,
)

NOW_S = 1_800_000_000.0
DAY_S = 86_400.0


def piece(name: str = "p", size: int = 100, age_s: float = 30 * DAY_S) -> TreeFile:
    return TreeFile(f"trees/k/packs/{name}", size, NOW_S - age_s)


def facts(key: str = "k", **more: Any) -> KeyFacts:
    fields: dict[str, Any] = {
        "key": key,
        "generations": (SnapshotGeneration(1, NOW_S - 30 * DAY_S, None),),
        "pieces": (piece(),),
        "needed": None,
        "used_s": NOW_S - 3 * DAY_S,
        "youngest_s": NOW_S - 3 * DAY_S,
        "is_leased": False,
    }
    return KeyFacts(**(fields | more))


def gone(keys: list[KeyFacts], limits: Limits = Limits()) -> list[str]:  # noqa: B008
    return [each.key for each in plan(keys, limits, NOW_S).removals]


def expired(age_s: float) -> tuple[SnapshotGeneration, ...]:
    return (SnapshotGeneration(1, NOW_S - 90 * DAY_S, NOW_S - age_s),)


def test_what_is_fine_stays() -> None:
    done = plan([facts()], Limits(max_bytes=100, max_unused_s=4 * DAY_S), NOW_S)
    assert (done.removals, done.left_bytes, done.leased, done.recent) == ([], 100, 0, 0)


def test_expired_ones_go_a_day_later() -> None:
    assert gone([facts(generations=expired(GRACE_S - 1))]) == []
    done = plan([facts(generations=expired(GRACE_S + 1))], Limits(), NOW_S)
    assert [(each.why, each.freed_bytes, each.paths) for each in done.removals] == [("has expired", 100, ())]
    assert done.left_bytes == 0
    # A later generation that is good keeps the key.
    both = (*expired(GRACE_S + 1), SnapshotGeneration(2, NOW_S, NOW_S + DAY_S))
    assert gone([facts(generations=both)]) == []


def test_builds_that_never_ended_go_a_day_later() -> None:
    assert gone([facts(generations=(), youngest_s=NOW_S - GRACE_S + 1)]) == []
    (removal,) = plan([facts(generations=(), youngest_s=NOW_S - GRACE_S)], Limits(), NOW_S).removals
    assert removal.why == "has no snapshot"
    assert gone([facts(generations=(), youngest_s=0.0)]) == [], "of unknown age"


def test_unused_ones_go() -> None:
    assert gone([facts()], Limits(max_unused_s=2 * DAY_S)) == ["k"]
    assert gone([facts(used_s=0.0)], Limits(max_unused_s=2 * DAY_S)) == []


def test_the_size_limit_takes_what_was_used_least_recently() -> None:
    keys = [facts(f"k{age}", used_s=NOW_S - age * DAY_S) for age in (1, 5, 3, 2, 4)]
    done = plan(keys, Limits(max_bytes=250), NOW_S)
    assert [each.key for each in done.removals] == ["k5", "k4", "k3"]
    assert done.left_bytes == 200


def test_what_is_in_use_stays_beyond_the_limit() -> None:
    keys = [
        facts("recent", used_s=NOW_S - RECENT_S + 1),
        facts("leased", is_leased=True),
        facts("unknown", used_s=0.0),
        facts("built", generations=(), youngest_s=NOW_S - 1),
    ]
    for limits in (Limits(0), Limits(0, 0.0)):
        done = plan(keys, limits, NOW_S)
        assert (done.removals, done.left_bytes, done.leased, done.recent) == ([], 400, 1, 3)
    assert plan(keys, Limits(None, 0.0), NOW_S).recent == 1
    assert gone(keys, Limits(None, 0.0, takes_recent=True)) == ["recent"], "of the others no age is known"
    assert gone(keys, Limits(0, takes_recent=True)) == ["unknown", "recent"], "asked for explicitly"


def test_what_is_in_use_stays_although_it_has_expired() -> None:
    """A job of many days has it mounted."""
    used = facts(generations=expired(GRACE_S + 1), used_s=NOW_S - RECENT_S + 1)
    done = plan([used], Limits(), NOW_S)
    assert (done.removals, done.recent) == ([], 1)
    assert gone([used], Limits(takes_recent=True)) == ["k"]
    assert gone([used._replace(used_s=NOW_S - RECENT_S)]) == ["k"]


def test_the_reason_has_the_time_since_the_last_use() -> None:
    for used_s, why in ((NOW_S - 3 * DAY_S, "was not used for 3 days"), (NOW_S - 8000, "was not used for 2.22 h")):
        assert [each.why for each in plan([facts(used_s=used_s)], Limits(None, 0.0), NOW_S).removals] == [why]


def test_leased_keys_are_left_alone() -> None:
    for each in (
        facts(generations=expired(90 * DAY_S), is_leased=True),
        facts(generations=(), youngest_s=NOW_S - 90 * DAY_S, is_leased=True),
        facts(needed=frozenset(), is_leased=True),
    ):
        assert gone([each], Limits(max_bytes=0, max_unused_s=0.0)) == []


def test_what_no_generation_needs_goes_alone() -> None:
    pieces = (
        piece("needed"),
        piece("old", 30),
        piece("new", 7, age_s=GRACE_S - 1),
        TreeFile("trees/k/packs/u", 1, 0.0),
    )
    needed = frozenset({"trees/k/packs/needed"})
    done = plan([facts(pieces=pieces, needed=needed)], Limits(), NOW_S)
    (removal,) = done.removals
    assert (removal.paths, removal.freed_bytes) == (("trees/k/packs/old",), 30)
    assert done.left_bytes == 108
    assert gone([facts(pieces=pieces, needed=None)]) == [], "what is needed is not known"


times = st.one_of(st.just(0.0), st.floats(NOW_S - 60 * DAY_S, NOW_S))


@st.composite
def any_facts(draw: st.DrawFn, key: str) -> KeyFacts:
    generations = tuple(
        SnapshotGeneration(
            number, NOW_S - 50 * DAY_S, draw(st.none() | st.floats(NOW_S - 40 * DAY_S, NOW_S + 40 * DAY_S))
        )
        for number in range(1, draw(st.integers(0, 3)) + 1)
    )
    pieces = tuple(
        TreeFile(f"trees/{key}/packs/{number}", draw(st.integers(0, 1000)), draw(times))
        for number in range(draw(st.integers(0, 4)))
    )
    needed = draw(st.none() | st.sets(st.sampled_from([each.path for each in pieces] or [""])).map(frozenset))
    return KeyFacts(key, generations, pieces, needed, draw(times), draw(times), draw(st.booleans()))


@given(
    st.integers(0, 6).flatmap(lambda count: st.tuples(*[any_facts(f"k{number}") for number in range(count)])),
    st.none() | st.integers(0, 3000),
    st.none() | st.floats(0, 60 * DAY_S),
    st.booleans(),
)
def test_rules_that_always_hold(
    keys: tuple[KeyFacts, ...], max_bytes: int | None, max_unused_s: float | None, takes_recent: bool
) -> None:
    limits = Limits(max_bytes, max_unused_s, takes_recent)
    done = plan(keys, limits, NOW_S)
    by_key = {each.key: each for each in keys}
    whole = [each.key for each in done.removals if not each.paths]
    assert len(set(whole)) == len(whole)
    for removal in done.removals:
        of = by_key[removal.key]
        assert not of.is_leased
        assert removal.paths or takes_recent or not is_recent(of, NOW_S)
        if removal.paths:
            assert of.needed is not None
            assert not of.needed.intersection(removal.paths)
            assert set(removal.paths) <= {each.path for each in of.pieces if each.mtime_s <= NOW_S - GRACE_S}
        elif not is_live(of, NOW_S):
            assert 0 < of.youngest_s <= NOW_S - GRACE_S
        else:
            assert of.used_s > 0 or (takes_recent and max_bytes is not None)
            assert max_bytes is not None or max_unused_s is not None
    left = sum(each.stored_bytes for each in keys) - sum(each.freed_bytes for each in done.removals)
    assert done.left_bytes == left
    if max_bytes is not None and left > max_bytes:
        # Whatever is left beyond the limit has a reason.
        for of in keys:
            if of.key not in whole and of.stored_bytes:
                assert of.is_leased or not is_live(of, NOW_S) or of.used_s == 0 or of.used_s > NOW_S - RECENT_S
    if max_bytes is None and max_unused_s is None:
        assert all(each.paths or not is_live(by_key[each.key], NOW_S) for each in done.removals)
    assert sorted(done.removals) == sorted(plan(tuple(reversed(keys)), limits, NOW_S).removals)


@given(st.floats(0, 2 * NOW_S), st.none() | st.floats(0, 2 * NOW_S))
def test_a_generation_lives_a_day_longer(now_s: float, expires_s: float | None) -> None:
    alive = is_alive(SnapshotGeneration(1, 0.0, expires_s), now_s)
    assert alive == (expires_s is None or now_s < expires_s + GRACE_S)
