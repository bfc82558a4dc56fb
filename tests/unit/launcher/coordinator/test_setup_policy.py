"""How the nodes of a job agree on one environment: facts in, orders out, on a virtual clock."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.coordinator.setup_policy import DECIDE_AFTER_S, JobSetup, NodeOrder, SetupPhase
from launcher.rendezvous.messages import SetupOrder, SetupReport

WAIT_S, USE_S = 100.0, 30.0


class Sim:
    """Nodes whose orders are kept; `do` of the last one is what they are at."""

    def __init__(self, least: int) -> None:
        self.setup = JobSetup(least, WAIT_S, USE_S)
        self.now_s = 0.0
        self.orders: dict[int, list[SetupOrder]] = {}

    def say(self, node: int, what: str, *, key: str = "k", tree: str = "", text: str = "") -> None:
        self._keep(self.setup.receive(node, f"node{node}", SetupReport(what, key, tree, text), self.now_s))

    def lose(self, node: int) -> None:
        self.orders.pop(node, None)
        self._keep(self.setup.lost(node, self.now_s))

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        self._keep(self.setup.tick(self.now_s))

    def again(self) -> bool:
        orders = self.setup.try_again()
        self._keep(orders)
        return bool(orders)

    def done(self, node: int) -> list[str]:
        return [order.do for order in self.orders.get(node, [])]

    def _keep(self, orders: list[NodeOrder]) -> None:
        for order in orders:
            self.orders.setdefault(order.node, []).append(order.order)


def test_one_node_takes_what_is_kept() -> None:
    sim = Sim(1)
    sim.say(0, "looked", tree="t")
    assert sim.orders[0] == [SetupOrder("use", "t", "")]
    sim.say(0, "fetched", tree="t")
    assert sim.done(0) == ["use", "show"]
    assert sim.setup.phase is SetupPhase.SHOWN


def test_one_node_builds_what_is_not_there_and_nobody_waits() -> None:
    sim = Sim(1)
    sim.say(0, "looked")
    assert sim.orders[0] == [SetupOrder("build", "", "")]
    assert sim.setup.deadline_s() is None
    sim.say(0, "published", tree="t")
    assert sim.done(0) == ["build"]


def test_one_node_that_cannot_publish_runs_set_up() -> None:
    sim = Sim(1)
    sim.say(0, "looked", text="there is no store")
    assert sim.done(0) == ["own"]


def test_what_one_node_cannot_have_is_shown_on_none() -> None:
    sim = Sim(2)
    sim.say(0, "looked", tree="t")
    assert sim.done(0) == ["use"], "fetching changes nothing, so it begins at once"
    sim.say(1, "looked", tree="t")
    sim.say(0, "fetched", tree="t")
    assert sim.done(0) == ["use"], "the other one has not got it yet"
    sim.say(1, "unfetched", text="the store is gone")
    assert sim.done(0) == ["use", "own"]
    assert sim.done(1) == ["use", "own"]
    assert "node1 cannot fetch the kept environment: the store is gone" in sim.orders[0][-1].text


def test_all_show_it_when_all_have_it() -> None:
    sim = Sim(3)
    for node in range(3):
        sim.say(node, "looked", tree="t" if node else "")
    for node in range(3):
        assert "show" not in sim.done(node)
        sim.say(node, "fetched", tree="t")
    assert all(sim.done(node) == ["use", "show"] for node in range(3))


def test_one_builds_and_the_others_fetch_what_it_published() -> None:
    sim = Sim(3)
    for node in range(3):
        sim.say(node, "looked")
    assert [sim.done(node) for node in range(3)] == [["build"], ["wait"], ["wait"]]
    assert sim.orders[0][0].text == "others"
    sim.say(0, "published", tree="t")
    for node in (1, 2):
        sim.say(node, "fetched", tree="t")
    assert [sim.done(node) for node in range(3)] == [["build"], ["wait", "use", "show"], ["wait", "use", "show"]]


def test_a_builder_that_finds_it_in_the_store_fetches_it_as_well() -> None:
    sim = Sim(2)
    sim.say(0, "looked")
    sim.say(1, "looked")
    sim.say(0, "found", tree="t")
    assert sim.done(0) == ["build", "use"]
    assert sim.done(1) == ["wait", "use"]


def test_nobody_waits_longer_than_asked_for() -> None:
    sim = Sim(2)
    sim.say(0, "looked")
    sim.say(1, "looked")
    assert sim.setup.deadline_s() == WAIT_S
    sim.advance(WAIT_S)
    assert sim.done(1) == ["wait", "own"]
    assert sim.done(0) == ["build"]
    sim.say(0, "published", tree="t")
    assert sim.done(1) == ["wait", "own"], "it has its own by now"


def test_a_builder_that_is_lost_is_replaced() -> None:
    sim = Sim(2)
    sim.say(0, "looked")
    sim.say(1, "looked")
    sim.lose(0)
    assert sim.done(1) == ["wait", "build"]


def test_a_builder_that_cannot_publish_sends_all_to_their_own() -> None:
    sim = Sim(2)
    sim.say(0, "looked")
    sim.say(1, "looked")
    sim.say(0, "unpublished", text="the disk is full")
    assert sim.done(0) == ["build"]
    assert sim.done(1) == ["wait", "own"]


def test_a_node_that_begins_with_something_else_is_on_its_own() -> None:
    sim = Sim(3)
    sim.say(0, "looked", tree="t")
    sim.say(1, "looked", tree="t")
    sim.say(2, "looked", key="other")
    assert sim.done(2) == ["own"]
    sim.say(0, "fetched", tree="t")
    sim.say(1, "fetched", tree="t")
    assert sim.done(0) == ["use", "show"]


def test_a_node_that_does_not_look_is_not_waited_for() -> None:
    sim = Sim(2)
    sim.say(0, "looked")
    assert sim.done(0) == []
    assert sim.setup.deadline_s() == DECIDE_AFTER_S
    sim.advance(DECIDE_AFTER_S)
    assert sim.done(0) == ["build"]
    sim.say(1, "looked")
    assert sim.done(1) == ["wait"]


def test_a_node_that_comes_later_gets_the_same() -> None:
    sim = Sim(1)
    sim.say(0, "looked", tree="t")
    sim.say(0, "fetched", tree="t")
    sim.say(1, "looked")
    assert sim.orders[1] == [SetupOrder("use", "t", "")]
    sim.say(1, "fetched", tree="t")
    assert sim.done(1) == ["use", "show"]


def test_environments_that_differ_are_made_again_once() -> None:
    sim = Sim(2)
    sim.say(0, "looked", tree="t")
    sim.say(1, "looked", key="other")
    assert sim.again()
    assert sim.done(0)[-1] == sim.done(1)[-1] == "again"
    assert not sim.again()


def test_a_service_that_dies_while_it_builds_is_set_up_without_publishing() -> None:
    sim = Sim(2)
    sim.say(0, "looked")
    sim.say(1, "looked")
    sim.say(0, "looked", text="the process has failed")
    assert sim.done(0) == ["build", "own"]
    assert sim.done(1) == ["wait", "own"]


FACTS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from(
            ["looked", "fetched", "unfetched", "damaged", "published", "unpublished", "found", "lost", "time"]
        ),
        st.sampled_from(["k", "l"]),
        st.sampled_from(["", "t", "u"]),
        st.sampled_from(["", "cannot"]),
    ),
    max_size=40,
)


@settings(max_examples=400, deadline=None)
@given(st.integers(1, 4), FACTS)
def test_whatever_nodes_say_nobody_is_shown_what_another_cannot_have(
    least: int, facts: list[tuple[int, str, str, str, str]]
) -> None:
    """And every node that looked gets something to do in the end, unless it builds or has it."""
    sim = Sim(least)
    looked: set[int] = set()
    for node, what, key, tree, text in facts:
        if what == "lost":
            looked.discard(node)
            sim.lose(node)
        elif what == "time":
            sim.advance(DECIDE_AFTER_S)
        else:
            if what == "looked":
                looked.add(node)
            sim.say(node, what, key=key, tree=tree, text=text)
    sim.advance(DECIDE_AFTER_S)
    sim.advance(WAIT_S)
    for node in looked:
        assert sim.done(node), "it hangs"
        assert sim.done(node)[-1] in ("use", "show", "build", "own", "again")
    for orders in sim.orders.values():
        for before, order in zip([None, *orders], orders, strict=False):
            if order.do == "show":
                assert before is not None and before.do == "use" and before.tree == order.tree


def test_nodes_that_never_have_it_are_not_waited_for() -> None:
    sim = Sim(2)
    sim.say(0, "looked", tree="t")
    sim.say(1, "looked", tree="t")
    sim.say(0, "fetched", tree="t")
    assert sim.setup.deadline_s() == WAIT_S + USE_S
    sim.advance(WAIT_S + USE_S - 1)
    assert sim.done(0) == ["use"]
    sim.advance(1)
    assert sim.done(0) == sim.done(1) == ["use", "own"]
    assert "not fetched in time on node1; every node runs set-up" in sim.orders[0][-1].text
    assert sim.setup.deadline_s() is None


def test_what_a_builder_took_is_not_given_to_those_that_fetch() -> None:
    sim = Sim(2)
    sim.say(0, "looked")
    sim.say(1, "looked")
    sim.advance(WAIT_S - 1)
    sim.say(0, "published", tree="t")
    assert sim.setup.deadline_s() == WAIT_S + USE_S
    sim.advance(1 + USE_S)
    assert sim.done(1) == ["wait", "use", "own"]
    assert sim.done(0) == ["build"], "it has made it"


def test_a_single_node_may_take_as_long_as_it_gets_on() -> None:
    sim = Sim(1)
    sim.say(0, "looked", tree="t")
    assert sim.setup.deadline_s() is None


def test_what_is_damaged_is_built_again_once() -> None:
    sim = Sim(2)
    sim.say(0, "looked", tree="t")
    sim.say(1, "looked", tree="t")
    sim.say(1, "damaged", tree="t", text="block 0 is not what it was")
    assert sim.orders[0][-1] == SetupOrder("build", "t", "others")
    assert sim.done(1) == ["use", "wait"]
    assert "since the stored one is damaged" in sim.orders[1][-1].text
    sim.say(1, "fetched", tree="t")
    sim.say(1, "unfetched", tree="t")
    assert sim.done(1) == ["use", "wait"], "it is for another tree by now"
    sim.say(0, "published", tree="u")
    assert sim.orders[1][-1] == SetupOrder("use", "u", "")
    sim.say(1, "damaged", tree="u", text="again")
    assert sim.done(1) == ["use", "wait", "use", "own"], "once is enough"


def test_what_is_damaged_is_built_again_on_one_node() -> None:
    sim = Sim(1)
    sim.say(0, "looked", tree="t")
    sim.say(0, "damaged", tree="t", text="block 0 is not what it was")
    assert sim.orders[0][-1] == SetupOrder("build", "t", "")


def test_what_is_found_damaged_before_all_have_come() -> None:
    sim = Sim(2)
    sim.say(0, "looked", tree="t")
    sim.say(0, "damaged", tree="t", text="block 0 is not what it was")
    assert sim.done(0) == ["use"]
    sim.say(1, "looked", tree="t")
    assert sim.orders[0][-1] == SetupOrder("build", "t", "others")
    assert sim.done(1)[-1] == "wait"


def test_who_cannot_publish_does_not_build_again() -> None:
    sim = Sim(1)
    sim.say(0, "looked", tree="t", text="this store cannot create a file exactly once")
    sim.say(0, "damaged", tree="t", text="block 0 is not what it was")
    assert sim.done(0) == ["use", "own"]


# ---- between attempts ------------------------------------------------------------------------------------------


def shown(count: int, tree: str = "t") -> Sim:
    sim = Sim(count)
    for what in ("looked", "fetched"):
        for node in range(count):
            sim.say(node, what, tree=tree)
    assert all(sim.done(node)[-1] == "show" for node in range(count))
    sim.orders.clear()
    return sim


def between(sim: Sim) -> None:
    sim._keep(sim.setup.between_attempts(sim.now_s))


def test_a_mount_that_could_not_be_read_is_had_again_by_its_node() -> None:
    sim = shown(2)
    between(sim)
    assert sim.orders == {} and not sim.setup.mending
    sim.say(1, "unreadable", tree="t", text="block 7")
    assert sim.orders == {}, "ranks may go on with it"
    between(sim)
    assert sim.orders == {1: [SetupOrder("use", "t", "")]} and sim.setup.mending == {1}
    sim.say(1, "fetched", tree="t")
    assert sim.done(1) == ["use", "show"]
    sim.say(1, "ready", tree="t")
    assert not sim.setup.mending and sim.setup.phase is SetupPhase.SHOWN
    between(sim)
    assert sim.done(1) == ["use", "show"] and sim.done(0) == []


def test_what_is_damaged_is_built_again_and_all_nodes_take_that() -> None:
    sim = shown(3)
    sim.say(2, "unreadable", tree="t")
    between(sim)
    sim.say(2, "damaged", tree="t", text="block 7")
    assert [sim.done(node)[-1] for node in range(3)] == ["renew"] * 3
    assert sim.orders[0] == [SetupOrder("renew", "t", "")] and sim.setup.mending == {0, 1, 2}
    sim.say(0, "looked", tree="t", text="it is in its place already")
    sim.say(1, "looked", tree="t")
    sim.say(2, "looked", tree="t")
    assert sim.orders[1][-1] == SetupOrder("build", "t", "others"), "by one that can, and replaces it"
    sim.say(1, "ready", tree="t2")
    sim.say(1, "published", tree="t2")
    for node in (0, 2):
        assert sim.orders[node][-1] == SetupOrder("use", "t2", "")
        sim.say(node, "fetched", tree="t2")
    for node in (0, 2):
        assert sim.done(node)[-1] == "show"
        sim.say(node, "ready", tree="t2")
    assert not sim.setup.mending and sim.setup.phase is SetupPhase.SHOWN


def test_nodes_that_all_find_the_same_damage_have_one_builder() -> None:
    sim = shown(2)
    for node in range(2):
        sim.say(node, "unreadable", tree="t")
    between(sim)
    for node in range(2):
        sim.say(node, "damaged", tree="t")
    assert sim.done(0) == sim.done(1) == ["use", "renew"]
    for node in range(2):
        sim.say(node, "looked", tree="t")
    assert (sim.done(0)[2:], sim.done(1)[2:]) == (["build"], ["wait"]), "nobody tries once more what is damaged"
    sim.say(0, "damaged", tree="t")  # of what it was at before
    sim.say(0, "published", tree="t2")
    assert sim.orders[1][-1] == SetupOrder("use", "t2", "")


def test_what_another_job_has_replaced_meanwhile_is_taken() -> None:
    sim = shown(1)
    sim.say(0, "unreadable", tree="t")
    between(sim)
    sim.say(0, "damaged", tree="t")
    sim.say(0, "looked", tree="t2")
    assert sim.orders[0][-1] == SetupOrder("use", "t2", "")


def test_a_store_that_is_gone_has_all_nodes_run_set_up() -> None:
    """One alone would have another environment than the others, which cannot read theirs for long either."""
    sim = shown(2)
    sim.say(0, "unreadable", tree="t")
    between(sim)
    sim.say(0, "unfetched", text="the store is gone")
    assert sim.done(0) == ["use", "own"] and sim.done(1) == ["own"]


def test_a_tree_that_is_damaged_again_is_built_again_once_more() -> None:
    sim = shown(1)
    for tree in ("t", "t2"):
        sim.say(0, "unreadable", tree=tree)
        between(sim)
        sim.say(0, "damaged", tree=tree)
        sim.say(0, "looked", tree=tree)
        assert sim.orders[0][-1] == SetupOrder("build", tree, "")
        sim.say(0, "published", tree="t2")
        sim.say(0, "ready", tree="t2")
        if tree == "t":  # another start of the job
            sim = shown(1, "t2")


def test_a_node_that_goes_while_it_has_its_own_again_is_not_waited_for() -> None:
    sim = shown(2)
    sim.say(1, "unreadable", tree="t")
    between(sim)
    sim.lose(1)
    assert not sim.setup.mending and sim.setup.phase is SetupPhase.SHOWN


def test_what_is_not_the_tree_that_is_shown_is_no_news() -> None:
    sim = shown(1)
    sim.say(0, "unreadable", tree="other")
    between(sim)
    assert sim.orders == {}
