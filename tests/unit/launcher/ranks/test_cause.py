"""Which failure was the first: by kind, by time, and when that cannot be told."""

from hypothesis import given
from hypothesis import strategies as st

from launcher.ranks.cause import SAME_COLLECTION_NS, LostNode, order_failures
from launcher.ranks.exits import FailureOrigin, classify

from .failing import make_failure

MS = 1_000_000
CLOSED = "RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:8929"
TIMEOUT = (
    "RuntimeError: [/gloo/transport/tcp/buffer.cc:78] Timed out waiting 6000ms for recv operation to complete"
)


def at(rank, time_ms, error_ms=0, node=0, **changes):
    return make_failure(
        rank,
        time_ns=round(time_ms * MS),
        error_ns=round(error_ms * MS),
        node=f"host{node}",
        group_rank=node,
        **changes,
    )


def test_nothing_failed():
    assert order_failures(()) == ((), (), ())


def test_the_earliest_is_first():
    ordered = order_failures([at(0, 500), at(1, 100), at(2, 300)])
    assert [failure.rank for failure in ordered.failures] == [1, 2, 0]
    assert ordered.unsure == ()


def test_consequences_and_stopped_ranks_are_never_first_while_there_is_another():
    ordered = order_failures([at(0, 1, stopped_by_us=True), at(1, 2, message=CLOSED), at(2, 900)])
    assert [failure.rank for failure in ordered.failures] == [2, 1, 0]
    assert ordered.unsure == ()
    ordered = order_failures([at(0, 1, stopped_by_us=True), at(1, 2, message=CLOSED)])
    assert [failure.rank for failure in ordered.failures] == [1, 0]


def test_among_victims_those_that_waited_in_vain_are_nearer_to_the_cause():
    ordered = order_failures([at(0, 1, message=CLOSED), at(1, 50, message=TIMEOUT)])
    assert [failure.rank for failure in ordered.failures] == [1, 0]


def test_a_tie_on_one_node_cannot_be_reported():
    ordered = order_failures([at(7, 100), at(3, 100.5), at(5, 200)])
    assert ordered.unsure == (3, 7)
    assert ordered.failures[0].rank == 7


def test_the_order_on_one_node_is_known_better_than_the_clock():
    ordered = order_failures([at(0, 100, error_ms=1000), at(1, 110, error_ms=1000)])
    assert ordered.unsure == ()
    assert ordered.failures[0].rank == 0


def test_nodes_whose_clocks_leave_it_open():
    near = [at(3, 100, error_ms=4, node=0), at(7, 105, error_ms=4, node=1)]
    assert order_failures(near).unsure == (3, 7)
    far = [at(3, 100, error_ms=4, node=0), at(7, 120, error_ms=4, node=1)]
    assert order_failures(far).unsure == ()
    assert order_failures([*near, at(1, 150, error_ms=4, node=1)]).unsure == (3, 7)


def test_two_agents_on_one_host_are_two_clocks():
    same_host = [at(0, 100, error_ms=9, node=0), at(1, 110, error_ms=9, node=1)._replace(node="host0")]
    assert order_failures(same_host).unsure == (0, 1)


def test_a_lost_node_is_the_cause_of_its_victims():
    lost = LostNode("host9", 100 * MS, 6000 * MS)
    ordered = order_failures([at(0, 200, message=CLOSED)], [lost])
    assert ordered.nodes == ("host9",)
    assert ordered.unsure == ()


def test_a_lost_node_and_a_failure_of_its_own_right():
    lost = LostNode("host9", 1000 * MS, 6000 * MS)
    assert order_failures([at(0, 200)], [lost]).nodes == ()  # the node was heard of after it
    unknown = order_failures([at(0, 2000)], [lost])
    assert (unknown.nodes, unknown.unsure) == (("host9",), (0,))
    after = order_failures([at(0, 9000)], [lost])
    assert (after.nodes, after.unsure) == (("host9",), ())


true_failures = st.lists(
    st.tuples(
        st.integers(0, 3),  # node
        st.integers(0, 50 * MS),  # true moment
        st.integers(0, SAME_COLLECTION_NS),  # how late the guard saw it
        st.sampled_from(["", "", CLOSED, TIMEOUT]),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)
clocks = st.lists(st.tuples(st.integers(0, 20 * MS), st.floats(-1, 1)), min_size=4, max_size=4)


@given(true_failures, clocks, st.randoms())
def test_the_true_first_is_always_among_those_named(happened, clocks, random):
    failures = []
    for rank, (node, true_ns, late_ns, message, stopped) in enumerate(happened):
        error_ns, part = clocks[node]
        seen_ns = true_ns + late_ns + round(error_ns * part)
        failures.append(
            at(rank, 0, node=node, message=message, stopped_by_us=stopped)._replace(
                time_ns=seen_ns, error_ns=error_ns
            )
        )
    random.shuffle(failures)
    ordered = order_failures(failures)
    named = set(ordered.unsure) or {ordered.failures[0].rank}
    causes = [failure for failure in failures if classify(failure) is FailureOrigin.CAUSE]
    if causes:
        assert min(causes, key=lambda f: happened[f.rank][1]).rank in named
        assert all(classify(f) is FailureOrigin.CAUSE for f in failures if f.rank in named)
    assert ordered.failures[0].rank in named
    assert sorted(ordered.failures) == sorted(failures)
    kinds = [classify(failure) for failure in ordered.failures]
    assert kinds == sorted(kinds)
    assert len(ordered.unsure) != 1
