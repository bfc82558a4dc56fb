"""Who measures with whom, and who is named: for made-up networks with bad nodes and links, and healthy ones."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.health.finding import FAIL, OK, UNKNOWN, WARN
from bootseer.health.limits import Limits
from bootseer.health.pairs import MAX_LINKS, MAX_ROUNDS, PairMeasurement, count_rounds, find_partner, judge_pairs

RATE, LATENCY_S = 1e9, 1e-4
Results = dict[int, list[PairMeasurement]]


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 60))
def test_each_measures_with_each_other_once_and_one_at_a_time(nodes: int) -> None:
    met = []
    for turn in range(count_rounds(nodes)):
        partners = {number: find_partner(nodes, number, turn) for number in range(nodes)}
        for number, partner in partners.items():
            assert partner is None or (partner != number and partners[partner] == number)
        assert sum(partner is None for partner in partners.values()) == nodes % 2
        met += [frozenset((number, partner)) for number, partner in partners.items() if partner is not None]
    assert all(met.count(pair) == 2 for pair in set(met))
    expected = nodes * (nodes - 1) // 2 if nodes <= MAX_ROUNDS + 1 else MAX_ROUNDS * (nodes // 2)
    assert len(set(met)) == expected


def test_one_node_has_nobody() -> None:
    assert count_rounds(1) == count_rounds(0) == 0


def measure(nodes: int, seed: int, change: Callable[[int, int, PairMeasurement], PairMeasurement]) -> Results:
    """A healthy network but for `change`: of receiver, sender and what the receiver would have measured."""
    chance = random.Random(seed)
    results: Results = {number: [] for number in range(nodes)}
    for turn in range(count_rounds(nodes)):
        for number in range(nodes):
            partner = find_partner(nodes, number, turn)
            if partner is None:
                continue
            latency_s = LATENCY_S * chance.uniform(0.6, 2.0) if number < partner else None
            rate, lost = RATE * chance.uniform(0.5, 1.3), chance.choice((0.0, 0.0, 0.01))
            results[number].append(change(number, partner, PairMeasurement(partner, "", latency_s, rate, lost)))
    return results


def slow(found: PairMeasurement) -> PairMeasurement:
    return found._replace(bytes_per_s=(found.bytes_per_s or 0) / 40)


def late(found: PairMeasurement) -> PairMeasurement:
    return found._replace(latency_s=None if found.latency_s is None else found.latency_s + 0.05)


def lost(found: PairMeasurement) -> PairMeasurement:
    return found._replace(lost_share=0.3)


def dead(found: PairMeasurement) -> PairMeasurement:
    return PairMeasurement(found.partner, "no answer in time")


def judge(results: Results, nodes: int):
    return judge_pairs(results, [f"node{number}" for number in range(nodes)], Limits())


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 24), st.integers(0, 10**6))
def test_a_healthy_network_is_in_order(nodes: int, seed: int) -> None:
    findings, named = judge(measure(nodes, seed, lambda _number, _partner, found: found), nodes)
    assert [found.level for found in findings] == [OK] and named == []


@settings(max_examples=40, deadline=None)
@given(
    st.integers(3, 18),
    st.integers(0, 10**6),
    st.sampled_from([(slow, "slow"), (late, "answers late"), (dead, "nothing goes through"), (lost, "loses")]),
    st.data(),
)
def test_a_bad_node_is_named_and_nobody_else(nodes: int, seed: int, how, data) -> None:
    bad = data.draw(st.integers(0, nodes - 1))
    spoil, words = how
    results = measure(
        nodes, seed, lambda number, partner, found: spoil(found) if bad in (number, partner) else found
    )
    findings, named = judge(results, nodes)
    assert named == [bad]
    assert [(found.level, found.where) for found in findings] == [(FAIL, f"node{bad}")]
    assert words in findings[0].what and findings[0].way_out


@settings(max_examples=40, deadline=None)
@given(st.integers(3, 18), st.integers(0, 10**6), st.booleans(), st.data())
def test_a_node_that_is_bad_in_one_direction(nodes: int, seed: int, sends: bool, data) -> None:
    bad = data.draw(st.integers(0, nodes - 1))
    results = measure(
        nodes, seed, lambda number, partner, found: slow(found) if bad == (partner if sends else number) else found
    )
    findings, named = judge(results, nodes)
    assert named == [bad] and len(findings) == 1
    assert ("in sending" if sends else "in receiving") in findings[0].what


@settings(max_examples=40, deadline=None)
@given(st.integers(3, 18), st.integers(0, 10**6), st.sampled_from([slow, late, dead, lost]), st.data())
def test_a_bad_link_is_named_and_no_node(nodes: int, seed: int, spoil, data) -> None:
    first = data.draw(st.integers(0, nodes - 1))
    partners = [
        partner for turn in range(count_rounds(nodes)) if (partner := find_partner(nodes, first, turn)) is not None
    ]
    second = data.draw(st.sampled_from(partners))
    results = measure(
        nodes, seed, lambda number, partner, found: spoil(found) if {number, partner} == {first, second} else found
    )
    findings, named = judge(results, nodes)
    assert named == [] and len(findings) == 1
    assert findings[0].level == WARN and set(findings[0].where.split(" to ")) == {f"node{first}", f"node{second}"}


def test_of_many_bad_links_the_worst_are_reported_and_the_rest_counted() -> None:
    nodes, rates = 60, {}
    for number in range(nodes):  # each node has one, so that no node differs
        partner = find_partner(nodes, number, 3)
        if partner is not None and not {number, partner} & {each for pair in rates for each in pair}:
            rates[frozenset((number, partner))] = 1e6 * (nodes - number)

    def change(number: int, partner: int, found: PairMeasurement) -> PairMeasurement:
        return found._replace(bytes_per_s=rates.get(frozenset((number, partner)), found.bytes_per_s))

    findings, named = judge(measure(nodes, 1, change), nodes)
    assert named == [] and len(rates) > MAX_LINKS
    told = [frozenset(int(each.removeprefix("node")) for each in f.where.split(" to ")) for f in findings[:-1]]
    assert told == sorted(rates, key=rates.__getitem__)[:MAX_LINKS]
    assert (findings[-1].level, findings[-1].what) == (WARN, f"{len(rates) - MAX_LINKS} more links are bad")


@settings(max_examples=40, deadline=None)
@given(st.integers(5, 18), st.integers(0, 10**6), st.data())
def test_two_bad_nodes(nodes: int, seed: int, data) -> None:
    bad = set(data.draw(st.lists(st.integers(0, nodes - 1), min_size=2, max_size=2, unique=True)))
    results = measure(
        nodes, seed, lambda number, partner, found: dead(found) if bad & {number, partner} else found
    )
    assert judge(results, nodes)[1] == sorted(bad)


@pytest.mark.parametrize("nodes", [3, 4, 9])
def test_where_nothing_works_no_node_is_named(nodes: int) -> None:
    findings, named = judge(measure(nodes, 1, lambda _number, _partner, found: dead(found)), nodes)
    assert named == [] and [found.level for found in findings] == [FAIL]
    assert "no node differs" in findings[0].what


def test_of_two_nodes_neither_is_named() -> None:
    findings, named = judge(measure(2, 1, lambda _number, _partner, found: dead(found)), 2)
    assert named == [] and [(found.level, found.where) for found in findings] == [(WARN, "node1 to node0")]


def test_without_measurements_nothing_is_known() -> None:
    findings, named = judge({0: [], 1: []}, 2)
    assert named == [] and [found.level for found in findings] == [UNKNOWN]


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(
        st.integers(0, 5),
        st.lists(
            st.builds(
                PairMeasurement,
                st.integers(0, 5),
                st.sampled_from(("", "", "", "refused")),
                st.none() | st.floats(0, 10),
                st.none() | st.floats(0, 1e12),
                st.none() | st.floats(0, 1),
            ),
            max_size=6,
        ),
    )
)
def test_any_measurements_give_findings(results: Results) -> None:
    findings, named = judge(results, 6)
    assert findings and all(found.line() for found in findings)
    assert len(named) < 3 and {f"node{number}" for number in named} <= {found.where for found in findings}
