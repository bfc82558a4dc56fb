"""Every byte has one owner, whoever asks and in whatever order the nodes are listed."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from bootseer.peers.spans import MAX_GROUP, SPAN_BYTES, ObjectName, cut, group_of, owners

ids = st.lists(st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=12), unique=True)
nodes_of_a_job = ids.filter(bool)
names = st.builds(ObjectName, st.just("a" * 32), st.text(max_size=20), st.text(max_size=8))
spans = st.integers(0, 1 << 40)


@given(st.integers(0, 1 << 50), st.integers(0, 1 << 26), st.integers(1, 1 << 24))
def test_parts_are_the_range_and_each_lies_in_one_span(offset: int, length: int, span_bytes: int) -> None:
    length = min(length, 200 * span_bytes)
    at = offset
    for part in cut(offset, length, span_bytes):
        assert part.offset == at
        assert part.length > 0
        assert part.span == part.offset // span_bytes == (part.end - 1) // span_bytes
        at = part.end
    assert at == offset + length


@given(nodes_of_a_job, names, spans, st.randoms())
def test_every_span_has_one_owner_for_all(nodes: list[str], name: ObjectName, span: int, random) -> None:
    shuffled = list(nodes)
    random.shuffle(shuffled)
    order = owners(nodes, name, span, len(nodes))
    assert sorted(order) == sorted(nodes)
    assert owners(shuffled, name, span, len(nodes)) == order
    assert owners(shuffled, name, span) == order[:1]
    assert owners(shuffled, name, span, 2) == order[:2]


@given(nodes_of_a_job, names, spans)
def test_as_many_spans_as_nodes_have_as_many_owners(nodes: list[str], name: ObjectName, span: int) -> None:
    first = span // len(nodes) * len(nodes)
    row = [owners(nodes, name, each)[0] for each in range(first, first + len(nodes))]
    assert sorted(row) == sorted(nodes)


def test_who_stands_in_for_a_node_is_not_always_the_same() -> None:
    nodes = [f"node{number}" for number in range(6)]
    orders = [owners(nodes, ObjectName("o", "packs/one"), span, 6) for span in range(6000)]
    assert set(Counter(order[0] for order in orders).values()) == {1000}
    heirs = Counter(order[1] for order in orders if order[0] == "node3")
    assert len(heirs) == 5
    assert max(heirs.values()) < 2 * min(heirs.values())


def test_objects_and_versions_have_owners_of_their_own() -> None:
    nodes = [f"node{number}" for number in range(6)]
    orders = {
        tuple(owners(nodes, name, span, 6))
        for name in (ObjectName("o", "a"), ObjectName("o", "b"), ObjectName("o", "a", "1"), ObjectName("p", "a"))
        for span in range(5)
    }
    assert len(orders) > 15


@given(st.integers(1, 500), st.integers(1, 80), st.data())
def test_groups_part_the_nodes(count: int, most: int, data) -> None:
    nodes = [f"n{number}" for number in range(count)]
    own = data.draw(st.sampled_from(nodes))
    group = group_of(nodes, own, most)
    assert own in group
    assert len(group) <= most
    assert all(group_of(nodes, each, most) == group for each in group[:3] + group[-3:])
    groups = {tuple(group_of(nodes, each, most)) for each in nodes}
    assert sorted(node for each in groups for node in each) == sorted(nodes)
    assert len(groups) == -(-count // most)


def test_a_usual_job_is_one_group() -> None:
    nodes = [f"n{number}" for number in range(MAX_GROUP)]
    assert group_of(nodes, "n7") == sorted(nodes)
    assert SPAN_BYTES == 2 << 20, "nodes of one job must cut alike: a change is another format of the wire"
