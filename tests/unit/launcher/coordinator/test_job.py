"""The job's brain on a virtual clock: membership, restarts, signals, bad input."""

from __future__ import annotations

import itertools
import signal

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bootseer.hangs.calls import Call, Group
from launcher.base.facts import RankFacts
from launcher.coordinator.attempt import MAX_LOST_REPORTED
from launcher.coordinator.membership import JOIN_SETTLE_S
from launcher.coordinator.nodes import Silence
from launcher.coordinator.restart_policy import StepLimits
from launcher.coordinator.restarts import MAX_PORT_RETRIES
from launcher.coordinator.running import SAME_ERROR_WAIT_S
from launcher.coordinator.state import Phase
from launcher.monitor.collectives.ring import RankRing, pack_rings
from launcher.monitor.failure import notes as failure_notes
from launcher.ranks import cause
from launcher.rendezvous.messages import (
    BACKOFF_STEP,
    Distributions,
    Environment,
    Failure,
    FailureRecordMessage,
    Finish,
    Identity,
    Leave,
    Note,
    RankFailed,
    RankSamples,
    Signalled,
    Spare,
    Started,
    StepTaken,
    Stop,
    Stopped,
    WantEnvironment,
    World,
)
from tests.unit.launcher.jobsim import Sim, make_failure, make_rules


def fixed(nodes: int, **changes: object) -> Sim:
    return Sim(make_rules(min_nodes=nodes, max_nodes=nodes, **changes))


def elastic(low: int, high: int, **changes: object) -> Sim:
    return Sim(make_rules(min_nodes=low, max_nodes=high, **changes))


def notes_of(sim: Sim, node: int) -> list[str]:
    return [message.text for message in sim.inbox[node] if isinstance(message, Note)]


# ---- start ---------------------------------------------------------------------------------------------------


def test_single_node_starts_at_once_and_finishes() -> None:
    sim = fixed(1)
    sim.join(1)
    world = sim.world(1)
    assert (world.attempt, world.restart_count, world.world_size) == (0, 0, 1)
    sim.succeed(1)
    finish = sim.finish()
    assert finish is not None
    assert finish.status == 0


def test_fixed_job_waits_for_all_nodes_and_orders_them_naturally() -> None:
    sim = fixed(3)
    for node, host in ((1, "node10"), (2, "node2"), (3, "node1")):
        assert not sim.ranks()
        sim.join(node, host)
    assert sim.ranks() == {1: 2, 2: 1, 3: 0}


def test_node_ranks_decide_where_given() -> None:
    sim = fixed(2)
    sim.join(1, "a", node_rank=1)
    sim.join(2, "b", node_rank=0)
    assert sim.ranks() == {1: 1, 2: 0}


def test_same_node_rank_everywhere_is_only_a_note_for_c10d() -> None:
    sim = fixed(2)
    sim.join(1, "b", node_rank=0)
    sim.join(2, "a", node_rank=0)
    assert sim.ranks() == {1: 1, 2: 0}
    assert any(isinstance(message, Note) for message in sim.inbox[2])


def test_same_node_rank_is_refused_for_static() -> None:
    sim = fixed(2, static=True, master=("head", 29500))
    sim.join(1, "a", node_rank=1)
    sim.join(2, "b", node_rank=1)
    refusal = sim.refusal(2)
    assert refusal is not None
    assert "already taken by a (pid 101)" in refusal.reason
    sim.join(3, "c", node_rank=0)
    assert sim.ranks() == {1: 1, 3: 0}


def test_ranks_add_up_over_nodes_of_different_size_and_role() -> None:
    sim = fixed(3)
    sim.join(1, local_world_size=2, role="trainer")
    sim.join(2, local_world_size=3, role="reader")
    sim.join(3, local_world_size=1, role="trainer")
    worlds = [sim.world(node) for node in (1, 2, 3)]
    assert [world.first_rank for world in worlds] == [0, 2, 5]
    assert [world.world_size for world in worlds] == [6, 6, 6]
    assert [world.first_role_rank for world in worlds] == [0, 0, 2]
    assert [world.role_world_size for world in worlds] == [3, 3, 3]


def test_missing_node_ends_the_job_after_the_join_timeout_and_names_who_is_there() -> None:
    sim = fixed(2, join_s=600.0)
    sim.join(1, "here")
    sim.run_until_idle()
    finish = sim.finish()
    assert sim.now_s == 600.0
    assert finish is not None
    assert finish.status == 1
    assert "only 1 of 2 nodes joined within 600 s (join_timeout): here" in finish.reason


def test_mismatched_nnodes_and_other_jobs_are_refused() -> None:
    sim = fixed(2)
    sim.join(1, min_nodes=3, max_nodes=3)
    sim.join(2, run_id="other")
    for node, word in ((1, "--nnodes differs: 3:3 here, 2:2"), (2, "serves job 'job', not 'other'")):
        refusal = sim.refusal(node)
        assert refusal is not None
        assert word in refusal.reason


# ---- elastic membership --------------------------------------------------------------------------------------


def test_elastic_job_waits_the_last_call_and_starts_at_once_when_full() -> None:
    sim = elastic(1, 2, last_call_s=30.0)
    sim.join(1)
    sim.advance(29.0)
    assert not sim.ranks()
    sim.advance(1.0)
    assert sim.ranks() == {1: 0}
    full = elastic(1, 2)
    full.join(1)
    full.join(2)
    assert full.ranks() == {1: 0, 2: 1}


def test_late_joiners_cost_one_restart_and_no_budget() -> None:
    sim = elastic(1, 4)
    sim.join(1)
    sim.advance(30.0)
    sim.join(2)
    sim.advance(JOIN_SETTLE_S / 2)
    sim.join(3)
    sim.advance(JOIN_SETTLE_S)
    assert sim.ranks() == {1: 0, 2: 1, 3: 2}
    assert [world.attempt for world in sim.worlds(1)] == [0, 1]
    assert sim.world(1).restart_count == 0


def test_spare_steps_in_for_a_lost_node_and_takes_its_place() -> None:
    sim = fixed(3, max_restarts=0)
    for node in (1, 2, 3):
        sim.join(node)
    sim.join(4)
    assert isinstance(sim.inbox[4][-1], Spare)
    sim.lose(2)
    assert sim.ranks() == {1: 0, 3: 2, 4: 1}
    assert sim.world(4).restart_count == 0


def test_spare_ends_well_with_the_job() -> None:
    sim = fixed(1)
    sim.join(1)
    sim.join(2)
    sim.succeed(1)
    finish = sim.finish(2)
    assert finish is not None
    assert finish.status == 0


def test_elastic_job_shrinks_and_keeps_the_order() -> None:
    sim = elastic(2, 4)
    for node in (1, 2, 3, 4):
        sim.join(node)
    sim.lose(2)
    assert sim.ranks() == {1: 0, 3: 2, 4: 1} or sim.ranks() == {1: 0, 3: 1, 4: 2}
    assert sorted(sim.ranks().values()) == [0, 1, 2]


def test_lost_node_ends_a_fixed_job_without_restarts_and_is_named() -> None:
    sim = fixed(2)
    sim.join(1)
    sim.join(2)
    sim.lose(2, "no heartbeat for 15 s")
    finish = sim.finish(1)
    assert finish is not None
    assert finish.status == 1
    assert "node2 (pid 102, node rank 1): no heartbeat for 15 s" in finish.reason


def test_lost_node_of_a_fixed_job_with_restarts_is_waited_for() -> None:
    sim = fixed(2, max_restarts=1)
    sim.join(1)
    sim.join(2)
    sim.lose(2)
    assert not sim.finish(1)
    sim.join(3, "replacement")
    assert sim.ranks() == {1: 0, 3: 1}
    assert sim.world(1).restart_count == 1, "the ranks of all were given up"


def test_consequences_of_a_lost_node_do_not_touch_the_budget() -> None:
    sim = elastic(1, 2, max_restarts=0)
    sim.join(1)
    sim.join(2)
    sim.silent = {2}
    sim.fail(1, message="RuntimeError: Connection closed by peer [10.0.0.2]:4711")
    sim.lose(2, "no heartbeat")
    assert not sim.finish(1)
    assert sim.ranks() == {1: 0}


def test_a_node_that_leaves_may_have_failed_before_it_said_so() -> None:
    """Its ranks had ended before, by its dead guard or by its own order: those of others are their victims."""
    sim = elastic(1, 2, max_restarts=0)
    sim.join(1)
    sim.join(2)
    sim.silent = {2}
    sim.fail(1, message="ConnectionError: a rank is gone")
    sim.advance(0.05)
    sim.say(2, Leave("its supervisor process was killed"))
    assert not sim.finish(1)
    assert sim.ranks() == {1: 0}


def test_all_nodes_get_the_pause_before_a_restart() -> None:
    sim = fixed(2, max_restarts=5, backoff_s=10.0)
    sim.join(1)
    sim.join(2)
    sim.fail(1)  # started again at once
    sim.fail(1)
    for node in (1, 2):
        pauses = [m for m in sim.inbox[node] if isinstance(m, StepTaken) and m.step == BACKOFF_STEP]
        assert [(pause.attempt, pause.text) for pause in pauses] == [(1, "10")]


@pytest.mark.parametrize("when", ["stopped", "in the pause"])
def test_a_node_lost_between_attempts_is_named_when_it_is_waited_for_and_at_the_end(when: str) -> None:
    sim = fixed(2, max_restarts=5, backoff_s=10.0)
    sim.join(1)
    sim.join(2)
    sim.fail(1)  # started again at once
    if when == "stopped":
        sim.silent = {1}
    sim.fail(1)
    assert sim.world(1).attempt == 1
    what = "node2 (pid 102, node rank 1): no heartbeat"
    before = len(notes_of(sim, 1))
    sim.lose(2, "no heartbeat")
    if when == "stopped":
        sim.silent = set()
        sim.say(1, Stopped(1, (), sim.new_port(), False))
    told = notes_of(sim, 1)[before:]
    assert f"lost node {what}" in told
    assert told[-1] == "waiting up to 610 s (join_timeout) for 1 more node"  # from the end of the pause on
    sim.advance(10.0)
    assert notes_of(sim, 1)[before:] == told, "once"
    sim.advance(600.0)
    finish = sim.finish(1)
    assert finish is not None
    assert finish.reason == f"only 1 of 2 nodes joined within 600 s (join_timeout): node1; lost: {what}"


def test_a_node_lost_before_the_first_attempt_is_named() -> None:
    sim = fixed(3)
    sim.join(1)
    sim.join(2)
    sim.lose(2, "closed the connection")
    what = "node2 (pid 102): closed the connection"
    assert notes_of(sim, 1) == [f"lost node {what}", "waiting up to 600 s (join_timeout) for 2 more nodes"]
    sim.advance(600.0)
    finish = sim.finish(1)
    assert finish is not None
    assert finish.reason.endswith(f"node1; lost: {what}")


def test_a_node_lost_while_others_stop_is_reported_where_the_job_goes_on_without_it() -> None:
    sim = elastic(1, 2, max_restarts=1)
    sim.join(1)
    sim.join(2)
    sim.silent = {2}
    sim.fail(1)
    sim.lose(2, "closed the connection")
    assert sim.ranks() == {1: 0}
    assert "lost node node2 (pid 102, node rank 1): closed the connection" in notes_of(sim, 1)


def test_many_nodes_that_come_and_go_before_the_start_are_not_all_named() -> None:
    sim = fixed(3)
    sim.join(1)
    for node in range(2, 100):
        sim.join(node)
        sim.say(node, Leave("no more"))
    sim.advance(600.0)
    finish = sim.finish(1)
    assert finish is not None
    assert finish.reason.count("no more") == MAX_LOST_REPORTED
    assert sum(text.startswith("lost node") for text in notes_of(sim, 1)) == MAX_LOST_REPORTED
    assert sum(text.startswith("waiting") for text in notes_of(sim, 1)) == 1


def test_the_loss_of_many_nodes_at_once_is_not_reported_for_each_to_all() -> None:
    sim = elastic(1, 40, max_restarts=1)
    for node in range(1, 41):
        sim.join(node)
    sim.silent = set(range(2, 41))
    sim.fail(1)
    for node in range(2, 40):
        sim.lose(node)
    assert sum(text.startswith("lost node") for text in notes_of(sim, 1)) == MAX_LOST_REPORTED


def test_the_report_knows_which_nodes_were_lost() -> None:
    sim = fixed(2, max_restarts=3)
    sim.join(1)
    sim.join(2)
    sim.silent = {2}
    sim.fail(1, message="ConnectionError: a rank is gone")
    sim.lose(2, "closed the connection")
    sim.advance(600.0)
    finish = sim.finish(1)
    assert finish is not None
    assert [failure.rank for failure in finish.failures] == [0]
    assert finish.lost == ("node2",)


def test_flapping_node_ends_the_job_and_is_named() -> None:
    sim = elastic(1, 2, max_membership_changes=4)
    sim.join(0, "steady")
    sim.join(1, "flappy")
    for node in range(2, 20):
        sim.lose(node - 1)
        if sim.finish(0):
            break
        sim.join(node, "flappy")
        sim.advance(JOIN_SETTLE_S)
    finish = sim.finish(0)
    assert finish is not None
    assert finish.status == 1
    assert "flappy joined and left" in finish.reason


def test_late_node_does_not_disturb_a_job_that_is_ending() -> None:
    sim = elastic(2, 3)
    sim.join(1)
    sim.join(2)
    sim.advance(30.0)
    sim.succeed(1)
    sim.join(3)
    sim.advance(60.0)
    sim.succeed(2)
    finish = sim.finish(3)
    assert finish is not None
    assert finish.status == 0


def test_no_limit_of_time_between_the_first_and_the_last_success() -> None:
    """torchrun gives up after an exit barrier of 300 s (W11)."""
    sim = fixed(2)
    sim.join(1)
    sim.join(2)
    sim.succeed(1)
    sim.advance(100_000.0)
    assert sim.finish(1) is None
    sim.succeed(2)
    finish = sim.finish(1)
    assert finish is not None
    assert finish.status == 0


# ---- restarts ------------------------------------------------------------------------------------------------


def test_one_budget_for_the_whole_job() -> None:
    sim = fixed(2, max_restarts=2, backoff_s=0.0)
    sim.join(1)
    sim.join(2)
    for node in (1, 2, 1):
        sim.advance(100.0)
        sim.fail(node)
    finish = sim.finish(2)
    assert finish is not None
    assert finish.status == 1
    assert finish.failures[0].status == 3
    assert [world.restart_count for world in sim.worlds(1)] == [0, 1, 2]
    assert [world.attempt for world in sim.worlds(2)] == [0, 1, 2]


def test_a_restart_says_who_failed_first_and_of_what_class() -> None:
    sim = fixed(2, max_restarts=1, backoff_s=0.0)
    sim.join(1)
    sim.join(2)
    sim.fail(2, traceback='Traceback:\n  File "/job/train.py", line 7, in <module>\nKeyError: 1\n')
    sim.advance(SAME_ERROR_WAIT_S)
    said = [message.text for message in sim.inbox[1] if isinstance(message, Note)]
    line = "restart 1 of 1: rank 1 on node1 failed first (exit status 3); class user (KeyError at /job/train.py:7)"
    assert said[-1] == line


def test_all_ranks_may_come_to_the_same_error_before_they_are_stopped() -> None:
    sim = fixed(3, max_restarts=9, backoff_s=0.0, stops_on_same_error=False, on_hang="report")
    for node in (1, 2, 3):
        sim.join(node)
    for node in (2, 1, 3):
        assert not said_of_restarts(sim)
        sim.fail(node, traceback=USER_ERROR.format(line=4))
        sim.advance(SAME_ERROR_WAIT_S / 4)
    (line,) = said_of_restarts(sim)
    assert "ranks 0-2 failed alike, all ranks of the job; class user" in line

    sim.fail(2, traceback=USER_ERROR.format(line=4))
    sim.advance(SAME_ERROR_WAIT_S / 2)
    sim.fail(1, message="RuntimeError: Connection closed by peer [10.0.0.2]:4711")
    assert len(said_of_restarts(sim)) == 2, "the others fail by it: nothing is waited for"
    assert "rank 1 on node1 failed first" in said_of_restarts(sim)[-1]

    sim.fail(2, message="MemoryError")
    assert len(said_of_restarts(sim)) == 3, "no error of the code"

    sim.fail(2, traceback=USER_ERROR.format(line=4))
    sim.advance(SAME_ERROR_WAIT_S / 2)
    sim.lose(1)
    assert sim.job.statistics()["phase"] != "running"
    sim.join(1)
    attempt = sim.job.statistics()["attempt"]
    sim.advance(1.0)
    assert sim.job.statistics()["phase"] == "running"
    assert sim.job.statistics()["attempt"] == attempt, "what was waited for is forgotten"


def test_hangs_of_an_attempt_are_those_of_its_own_ranks() -> None:
    """A lost node is replaced by a spare one with other ranks."""
    sim = Sim(make_rules(min_nodes=2, max_nodes=2, max_restarts=3, backoff_s=0.0, on_hang="report"))
    sim.join(0, local_world_size=2)
    sim.join(1, local_world_size=2)
    sim.join(2, local_world_size=3)
    facts = RankFacts(0, sim.now_s, 0, -1.0, 0, 1.0, 0, "S", "")
    sim.say(0, RankSamples(0, (facts,)))
    sim.lose(1)
    world = sim.world(0)
    assert (world.attempt, world.world_size, world.group_world_size) == (1, 5, 2)
    hangs = sim.job._running._hangs
    assert hangs is not None and hangs._detector is not None
    assert (len(hangs._detector._ranks), hangs._nodes) == (5, 2)


@pytest.mark.parametrize("changes", [{"on_hang": "off"}, {"steps": StepLimits(post_mortem_s=60.0)}])
def test_an_error_waits_for_nobody_where_steps_are_not_seen_or_ranks_are_held(changes: dict[str, object]) -> None:
    sim = fixed(2, **{"max_restarts": 9, "backoff_s": 0.0, "on_hang": "report", **changes})
    sim.join(1)
    sim.join(2)
    sim.fail(2, traceback=USER_ERROR.format(line=4))
    assert sim.job.statistics()["phase"] != "running" or sim.job.statistics()["attempt"] == 1


def test_while_others_are_waited_for_nothing_else_is_due() -> None:
    """Else the loop would turn for nothing."""
    sim = elastic(2, 3, max_restarts=9, backoff_s=0.0, on_hang="report")
    sim.join(1)
    sim.join(2)
    sim.run_until_idle()
    for node in (1, 2):
        sim.say(node, RankSamples(0, (RankFacts(node - 1, sim.now_s, 0, -1.0, 0, 1.0, 0, "S", ""),)))
    sim.join(3)
    sim.advance(0.1)
    assert sim.job.statistics()["phase"] == "running"
    sim.fail(2, traceback=USER_ERROR.format(line=4))
    assert sim.job.deadline_s() == pytest.approx(sim.now_s + SAME_ERROR_WAIT_S)
    sim.advance(SAME_ERROR_WAIT_S)
    assert len(said_of_restarts(sim, 1)) == 1


def test_after_the_first_step_an_error_waits_for_nobody() -> None:
    sim = fixed(2, max_restarts=9, backoff_s=0.0, on_hang="report")
    sim.join(1)
    sim.join(2)
    for steps in (1, 2):
        sim.advance(2.0)
        for node in (1, 2):
            facts = RankFacts(node - 1, sim.now_s, steps, sim.now_s, 0, 1.0, 0, "S", "")
            sim.say(node, RankSamples(0, (facts,)))
    sim.fail(2, traceback=USER_ERROR.format(line=4))
    assert [line for line in notes(sim, 1) if line.startswith("restart 1 of 9: rank 1 on node1 failed first")]


def said_of_restarts(sim: Sim, node: int = 3) -> list[str]:
    return [line for line in notes(sim, node) if line.startswith("restart ")]


def test_a_restart_says_who_called_another_collective_than_the_rest() -> None:
    """gloo ends a process that gets more than it expects, which is not the one to blame."""
    group = Group("0", "dp", 1, (0, 1, 2))

    def last(rank: int, size_bytes: int, left_ns: int, failed: bool) -> bytes:
        entered = Call(7, group, "all_reduce", 3, -1, 0, size_bytes, "float32", (), 1, 10, left_ns, True, failed)
        return pack_rings([RankRing(rank, (entered,), True)], 0, 1000)

    sim = fixed(3, max_restarts=2, backoff_s=0.0)
    for node in (1, 2, 3):
        sim.join(node)
    sim.traces = {1: last(0, 4, 0, False), 2: last(1, 8, 20, True), 3: last(2, 4, 30, True)}
    sim.fail(1)
    said = [message.text for message in sim.inbox[1] if isinstance(message, Note)]
    assert said[-1].startswith(
        "restart 1 of 2: rank 1 entered all_reduce #3 of group dp (ranks 0-2) with another size, type or root"
    )
    assert "; rank 0 on node0 failed first" in said[-1]
    sim.traces = {1: b"junk"}
    sim.fail(1)
    said = [message.text for message in sim.inbox[1] if isinstance(message, Note)]
    assert said[-1].startswith("restart 2 of 2: rank 0 on node0 failed first")


def test_master_port_is_fresh_for_each_attempt() -> None:
    sim = fixed(2, max_restarts=3, backoff_s=0.0)
    sim.join(1)
    sim.join(2)
    ports = [sim.world(2).master_port]
    for _ in range(3):
        sim.fail(2)
        ports.append(sim.world(2).master_port)
    assert len(set(ports)) == 4


def test_failures_of_an_attempt_are_put_in_order_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    order = cause.order_failures

    def count(failures: tuple[Failure, ...], lost: list[cause.LostNode]) -> cause.OrderedFailures:
        calls.append(len(failures))
        return order(failures, lost)

    monkeypatch.setattr(cause, "order_failures", count)
    sim = fixed(2, max_restarts=5, backoff_s=0.0)
    sim.join(1)
    sim.join(2)
    sim.fail(1)
    sim.fail(2)
    assert sim.world(1).attempt == 2 and len(calls) == 2


def test_the_wait_before_a_restart_is_not_that_for_nodes_to_come_back() -> None:
    sim = fixed(2, max_restarts=5, backoff_s=10.0, join_s=4.0)
    sim.join(1)
    sim.join(2)
    sim.fail(1)
    sim.fail(1)
    sim.run_until_idle()
    assert sim.finish() is None and sim.world(1).attempt == 2


def test_early_failures_are_retried_with_backoff_and_late_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_notes, "SEND_AFTER_S", 0.0)  # else that is one of the moments below
    sim = fixed(1, max_restarts=5, backoff_s=1.0)
    sim.join(1)
    starts: list[float] = []
    for _ in range(4):
        starts.append(sim.now_s)
        sim.fail(1)
        count = len(sim.worlds(1))
        while len(sim.worlds(1)) == count - 1 or sim.job.deadline_s() is not None:
            sim.run_until_idle()
    assert [later - sooner for sooner, later in itertools.pairwise(starts)] == [0.0, 1.0, 2.0]
    sim.advance(31.0)
    sim.fail(1)
    assert sim.job.deadline_s() == sim.now_s, "for its page, not for a restart"
    assert sim.world(1).restart_count == 5


USER_ERROR = 'Traceback (most recent call last):\n  File "/job/train.py", line {line}, in <module>\nKeyError: 1\n'


def test_the_same_error_of_the_code_twice_ends_the_job() -> None:
    sim = fixed(2, max_restarts=9, give_up_status=93)
    sim.join(1)
    sim.join(2)
    sim.fail(1, traceback=USER_ERROR.format(line=4))
    sim.run_until_idle()
    assert sim.finish() is None
    sim.fail(2, traceback=USER_ERROR.format(line=4))
    sim.advance(SAME_ERROR_WAIT_S)
    finish = sim.finish()
    assert finish is not None
    assert finish.status == 93
    assert "KeyError at /job/train.py:4" in finish.reason
    assert "--same-error restart" in finish.reason


def test_errors_at_other_lines_and_other_failures_use_up_the_budget() -> None:
    sim = fixed(1, max_restarts=3)
    sim.join(1)
    for line in (4, 5, None, 5):
        assert sim.finish() is None
        sim.fail(1, traceback="" if line is None else USER_ERROR.format(line=line))
        sim.run_until_idle()
    finish = sim.finish()
    assert finish is not None
    assert (finish.status, finish.reason) == (1, "ranks failed after 3 restarts")


@pytest.mark.parametrize("changes", [{"stops_on_same_error": False}, {"max_restarts": 0}])
def test_the_same_error_is_tried_again_where_that_was_asked_for(changes: dict[str, object]) -> None:
    sim = fixed(1, **{"max_restarts": 2, "give_up_status": 93, **changes})
    sim.join(1)
    for _ in range(1 + sim.rules.max_restarts):
        sim.fail(1, traceback=USER_ERROR.format(line=4))
        sim.run_until_idle()
    finish = sim.finish()
    assert finish is not None
    assert finish.status == 1


ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"


def notes(sim: Sim, node: int) -> list[str]:
    return [message.text for message in sim.inbox[node] if isinstance(message, Note)]


def test_a_node_whose_accelerator_is_broken_is_left_out_where_a_spare_is_there() -> None:
    sim = fixed(2, max_restarts=3)
    for node in (1, 2, 3):
        sim.join(node)
    assert sim.ranks() == {1: 0, 2: 1}
    sim.fail(1, message=ECC)
    sim.run_until_idle()
    assert sim.ranks() == {2: 1, 3: 0}
    assert isinstance(sim.inbox[1][-1], Spare)
    told = "node1 is left out of further attempts while others suffice: an uncorrectable memory error"
    assert [text for text in notes(sim, 2) if told in text]
    sim.fail(3)
    sim.run_until_idle()
    assert sim.ranks() == {2: 1, 3: 0}  # it stays out
    sim.succeed(2, 3)
    finish = sim.finish(1)
    assert finish is not None and finish.status == 0  # who waited ends with the others


def test_a_job_that_can_be_smaller_goes_on_without_it_and_takes_it_back_for_want_of_others() -> None:
    sim = elastic(1, 2, max_restarts=3)
    sim.join(1)
    sim.join(2)
    sim.fail(2, message=ECC)
    sim.run_until_idle()
    assert sim.ranks() == {1: 0}
    sim.lose(1)
    sim.run_until_idle()
    assert sim.ranks() == {2: 0}
    assert [text for text in notes(sim, 2) if "node2 would be excluded" in text]


@pytest.mark.parametrize(
    ("first", "changes"),
    [
        ("RuntimeError: CUDA error: an illegal memory access was encountered", {}),  # mostly the code
        ("OSError: [Errno 5] Input/output error", {}),  # once
        (ECC, {"excludes_nodes": False}),
    ],
)
def test_what_is_not_certain_leaves_no_node_out(first: str, changes: dict[str, object]) -> None:
    sim = elastic(1, 2, **{"max_restarts": 3, **changes})
    sim.join(1)
    sim.join(2)
    sim.fail(2, message=first)
    sim.run_until_idle()
    assert sim.ranks() == {1: 0, 2: 1}


def test_a_newcomer_that_left_again_costs_no_restart_for_a_node_that_is_left_out() -> None:
    sim = elastic(1, 2, max_restarts=3)
    sim.join(1)
    sim.join(2)
    sim.fail(2, message=ECC)
    sim.run_until_idle()
    sim.join(3)
    sim.lose(3)
    sim.advance(JOIN_SETTLE_S + 1)
    assert sim.world(1).attempt == 1
    sim.join(3)
    sim.run_until_idle()
    assert sim.ranks() == {1: 0, 3: 1}


def fail_at(sim: Sim, *reached: tuple[int, int | None], **changes: object) -> None:
    """Attempts that fail after so many steps, with such numbers of heartbeats."""
    for each in reached:
        assert sim.finish() is None
        sim.reached = each
        sim.fail(1, **changes)
        sim.run_until_idle()


def test_three_attempts_without_progress_end_the_job() -> None:
    sim = fixed(1, max_restarts=9, give_up_status=93)
    sim.join(1)
    fail_at(sim, (40, 39), (9, 59), (2, 59), (3, 59), (1, 58))
    finish = sim.finish()
    assert finish is not None
    assert (finish.status, finish.reason.split(",")[0]) == (
        93,
        "none of the last 3 attempts has got beyond step 59",
    )
    assert "--no-progress restart" in finish.reason
    assert sim.pages()[-1]["rule"] == finish.reason
    assert sim.pages()[-1]["next_attempt"] is None


@pytest.mark.parametrize(
    ("rules", "reached", "failure"),
    [
        ({}, (-1, None), {}),  # nothing counts steps
        ({"stops_without_progress": False}, (7, 3), {}),
        ({}, (0, None), {}),  # it may be a job without an optimizer
        ({}, (7, 3), {"status": -9}),  # somebody's signal says nothing of the job
        ({}, (7, None), {}),  # a step may be progress, where steps have no numbers
    ],
)
def test_what_is_no_lack_of_progress_uses_up_the_budget(
    rules: dict[str, object], reached: tuple[int, int | None], failure: dict[str, object]
) -> None:
    sim = fixed(1, max_restarts=4, give_up_status=93, **rules)
    sim.join(1)
    fail_at(sim, *[reached] * 5, **failure)
    finish = sim.finish()
    assert finish is not None
    assert (finish.status, finish.reason) == (1, "ranks failed after 4 restarts")


def test_a_kill_for_want_of_memory_is_no_chance() -> None:
    sim = fixed(1, max_restarts=9, give_up_status=93)
    sim.join(1)
    fail_at(sim, (1, None), *[(0, None)] * 3, status=-9, oom="yes")
    assert sim.finish() is not None


def test_a_lost_node_is_no_lack_of_progress() -> None:
    sim = elastic(1, 4, max_restarts=9, max_membership_changes=99)
    for node in range(1, 5):
        sim.join(node)
    sim.reached = (5, 5)
    sim.fail(1)
    for node in (4, 3, 2):
        sim.run_until_idle()
        sim.lose(node)
    fail_at(sim, (1, 2), (1, 2))
    assert sim.finish() is None
    fail_at(sim, (1, 2))
    assert sim.finish() is not None


# ---- pages of failures ---------------------------------------------------------------------------------------


def test_a_failure_has_a_page_with_its_recovery_reported_when_ranks_run_again() -> None:
    sim = fixed(2, max_restarts=2)
    sim.join(1)
    sim.join(2)
    sim.advance(50.0)
    sim.silent = {1, 2}
    failure = make_failure(1, time_ns=int(49.5e9), traceback=USER_ERROR.format(line=4))
    sim.say(2, RankFailed(0, failure))
    sim.advance(2.0)
    for node in (1, 2):
        sim.say(node, Stopped(0, (failure,) if node == 2 else (), sim.new_port(), False))
    assert not sim.pages(), "the restart comes first"
    sim.advance(0.25)
    for node in (1, 2):
        sim.say(node, Started(1, 0.1))
    assert not sim.pages(), "and its ranks"
    sim.run_until_idle()
    (page,) = sim.pages()
    assert not sim.pages(2), "one node keeps it"
    assert page["stages"] == {
        "seen_s": 0.5,
        "ranks_stopped_s": 2.0,
        "backoff_s": 0.0,
        "rendezvous_s": 0.0,
        "spawn_s": 0.25,
        "first_step_s": None,
    }
    assert (page["number"], page["attempt"], page["next_attempt"], page["rank"]) == (0, 0, 1, 1)
    assert (page["class"], page["class_sure"], page["culprit_sure"]) == ("user", "certain", "certain")
    assert page["where"] == "KeyError at /job/train.py:4"
    assert (page["action"], page["rule"]) == ("restart 1 of 2", "--max-restarts")


def test_pages_of_attempts_that_never_ran_come_too_and_the_last_one_with_the_end() -> None:
    sim = fixed(1, max_restarts=2)
    sim.join(1)
    sim.silent = {1}
    for attempt in range(3):
        sim.say(1, RankFailed(attempt, make_failure(0)))
        sim.say(1, Stopped(attempt, (), sim.new_port(), False))
        sim.advance(5.0)
    pages = sim.pages()
    assert [page["number"] for page in pages] == [0, 1, 2]
    assert [page["next_attempt"] for page in pages] == [1, 2, None]
    assert [page["stages"]["backoff_s"] for page in pages] == [0.0, 1.0, None]
    assert all(page["stages"]["spawn_s"] is None for page in pages)
    assert pages[2]["rule"] == "ranks failed after 2 restarts"
    kinds = [type(message) for message in sim.inbox[1]]
    assert kinds.index(FailureRecordMessage) < kinds.index(Finish) == len(kinds) - 1


def test_a_lost_node_has_a_page() -> None:
    sim = elastic(1, 2, max_restarts=2)
    sim.join(1)
    sim.join(2)
    sim.advance(10.0)
    sim.lose(2)
    sim.run_until_idle()
    (page,) = sim.pages()
    assert (page["class"], page["node"], page["culprit_sure"]) == ("lost-node", "node2", "certain")
    assert page["since_s"] == 5.0, "when it was heard of last"
    assert "another attempt with the remaining nodes" in page["action"]


def test_a_signal_is_no_failure_and_has_no_page() -> None:
    sim = fixed(1, max_restarts=2)
    sim.join(1)
    sim.say(1, Signalled(signal.SIGTERM))
    assert sim.finish() is not None
    assert sim.pages() == []


def test_refill_gives_the_budget_back_but_the_count_never_falls() -> None:
    sim = fixed(1, max_restarts=1, restart_refill_s=3600.0)
    sim.join(1)
    for count in range(1, 6):
        sim.advance(4000.0)
        sim.fail(1)
        assert sim.world(1).restart_count == count
    sim.fail(1)
    assert sim.finish(1) is not None


def test_taken_port_is_retried_without_the_budget_and_not_for_ever() -> None:
    sim = fixed(1, max_restarts=0)
    sim.join(1)
    sim.silent = {1}
    for attempt in range(MAX_PORT_RETRIES + 1):
        assert sim.world(1).attempt == attempt
        sim.say(1, RankFailed(attempt, make_failure(0)))
        sim.say(1, Stopped(attempt, (), sim.new_port(), True))
    finish = sim.finish(1)
    assert finish is not None
    assert finish.status == 1


def test_failure_after_others_succeeded_restarts_all() -> None:
    sim = fixed(2, max_restarts=1)
    sim.join(1)
    sim.join(2)
    sim.succeed(1)
    sim.fail(2)
    assert sim.world(1).attempt == 1
    sim.succeed(1, 2)
    finish = sim.finish(1)
    assert finish is not None
    assert finish.status == 0


def test_node_that_does_not_stop_is_given_up() -> None:
    sim = elastic(1, 2, max_restarts=1, grace_s=5.0)
    sim.join(1)
    sim.join(2)
    sim.silent = {2}
    sim.fail(1)
    sim.run_until_idle(60.0)
    refusal = sim.refusal(2)
    assert refusal is not None
    assert "did not stop" in refusal.reason


def test_stale_messages_of_an_earlier_attempt_change_nothing() -> None:
    sim = fixed(1, max_restarts=1)
    sim.join(1)
    sim.fail(1)
    sim.say(1, RankFailed(0, make_failure(0)))
    sim.say(1, Stopped(0, (), 1, False))
    assert sim.world(1).attempt == 1
    assert sim.finish(1) is None


# ---- signals -------------------------------------------------------------------------------------------------


def test_signal_reaches_all_nodes_and_is_no_failure() -> None:
    sim = fixed(2, max_restarts=5)
    sim.join(1)
    sim.join(2)
    sim.silent = {1, 2}
    sim.say(2, Signalled(signal.SIGTERM))
    for node in (1, 2):
        stop = sim.inbox[node][-1]
        assert isinstance(stop, Stop)
        assert stop.signum == signal.SIGTERM
    failure = make_failure(0, status=-15, stopped_by_us=True)
    for node in (1, 2):
        sim.say(node, Stopped(0, (failure,), 1, False))
    finish = sim.finish(1)
    assert finish is not None
    assert finish.status == 128 + 15


def test_second_signal_shortens_the_wait() -> None:
    sim = fixed(1, grace_s=30.0)
    sim.join(1)
    sim.silent = {1}
    sim.say(1, Signalled(signal.SIGINT))
    sim.say(1, Signalled(signal.SIGINT))
    stops = [message for message in sim.inbox[1] if isinstance(message, Stop)]
    assert [stop.grace_s for stop in stops] == [30.0, 2.0]


def test_signal_while_nodes_gather_ends_the_job() -> None:
    sim = fixed(2)
    sim.join(1)
    sim.say(1, Signalled(signal.SIGINT))
    finish = sim.finish(1)
    assert finish is not None
    assert finish.status == 130


def test_leaving_node_lets_an_elastic_job_go_on() -> None:
    sim = elastic(1, 2)
    sim.join(1)
    sim.join(2)
    sim.say(2, Leave("stopped by SIGTERM"))
    assert sim.ranks() == {1: 0}
    assert sim.finish(1) is None


# ---- environments --------------------------------------------------------------------------------------------


def test_nodes_that_differ_do_not_start_and_the_table_says_how() -> None:
    sim = fixed(2)
    for node in (1, 2):
        sim.join(node, has_identity=True)
    sim.say(1, Identity("aaa", ""))
    assert not sim.ranks()
    sim.say(2, Identity("bbb", ""))
    for node, version in ((1, "2.13.0"), (2, "2.12.1")):
        assert isinstance(sim.inbox[node][-1], WantEnvironment)
        sim.say(node, Environment(Distributions("3.11", ("numpy==2.0", f"torch=={version}"))))
    finish = sim.finish(1)
    assert finish is not None
    assert "--allow-mixed-environments" in finish.reason
    assert "torch  2.13.0  2.12.1" in finish.reason
    assert "numpy" not in finish.reason


def test_mixed_environments_start_when_allowed_and_unknown_ones_are_no_reason() -> None:
    for allow, second in ((True, "bbb"), (False, "")):
        sim = fixed(2, allow_mixed=allow)
        for node in (1, 2):
            sim.join(node, has_identity=True)
        sim.say(1, Identity("aaa", ""))
        sim.say(2, Identity(second, "" if second else "interpreter not found"))
        assert sim.ranks() == {1: 0, 2: 1}


# ---- static --------------------------------------------------------------------------------------------------


def test_static_job_frees_the_endpoint_while_ranks_run() -> None:
    sim = fixed(2, static=True, master=("head", 29500), frees_endpoint=True, max_restarts=1)
    sim.join(1, node_rank=0)
    sim.join(2, node_rank=1)
    assert (sim.world(2).master_addr, sim.world(2).master_port) == ("head", 29500)
    assert sim.listening == [False]
    sim.fail(2)
    assert sim.listening == [False, True, False]


# ---- any order of facts --------------------------------------------------------------------------------------


class AnyJob(RuleBasedStateMachine):
    """Random nodes, failures, losses and signals: what must hold whatever happens."""

    @initialize(
        low=st.integers(1, 3),
        extra=st.integers(0, 2),
        restarts=st.integers(0, 3),
        limits=st.sampled_from([StepLimits(), StepLimits(5.0, 5.0, True, 5.0, 5.0), StepLimits(0.0, 5.0)]),
        deaf=st.sets(st.tuples(st.integers(1, 6), st.sampled_from(["stop-time-checks", "rollback", "replay"]))),
        pairs=st.sampled_from(("off", "always")),
    )
    def begin(
        self, low: int, extra: int, restarts: int, limits: StepLimits, deaf: set[tuple[int, str]], pairs: str
    ) -> None:
        changes = {"max_restarts": restarts, "backoff_s": 1.0, "steps": limits, "check_pairs": pairs}
        changes["on_hang"] = "report"
        self.sim = elastic(low, low + extra, **changes)
        self.sim.mended = dict.fromkeys(deaf)
        self.count = 0

    @rule(host=st.sampled_from(["a1", "a2", "a10", "b"]))
    def join(self, host: str) -> None:
        self.count += 1
        self.sim.join(self.count, host)

    def _running(self) -> list[int]:
        if self.sim.job.statistics()["phase"] != Phase.RUNNING.value:
            return []
        return [node for node in self.sim.ranks() if node in self.sim.alive]

    @precondition(lambda self: self._running())
    @rule(pick=st.integers(0, 9), line=st.sampled_from([None, 4, 5]))
    def fail(self, pick: int, line: int | None) -> None:
        running = self._running()
        traceback = "" if line is None else USER_ERROR.format(line=line)
        self.sim.fail(running[pick % len(running)], traceback=traceback)

    @precondition(lambda self: self._running())
    @rule(pick=st.integers(0, 9))
    def succeed(self, pick: int) -> None:
        running = self._running()
        self.sim.succeed(running[pick % len(running)])

    @precondition(lambda self: self.sim.alive)
    @rule(pick=st.integers(0, 9))
    def lose(self, pick: int) -> None:
        alive = sorted(self.sim.alive)
        self.sim.lose(alive[pick % len(alive)])

    @precondition(lambda self: self.sim.alive)
    @rule(pick=st.integers(0, 9), how=st.sampled_from(list(Silence)))
    def fall_silent(self, pick: int, how: Silence) -> None:
        alive = sorted(self.sim.alive)
        self.sim.unheard(alive[pick % len(alive)], how)

    @precondition(lambda self: self.sim.unanswered)
    @rule(pick=st.integers(0, 9))
    def come_back(self, pick: int) -> None:
        silent = sorted(self.sim.unanswered)
        self.sim.hear(silent[pick % len(silent)])

    @rule(seconds=st.floats(0.0, 100.0))
    def wait(self, seconds: float) -> None:
        self.sim.advance(seconds)

    @invariant()
    def ranks_are_dense_and_attempts_never_repeat(self) -> None:
        if not hasattr(self, "sim"):
            return
        ranks = self.sim.ranks()
        assert sorted(ranks.values()) == list(range(len(ranks)))
        assert not ranks or self.sim.rules.min_nodes <= len(ranks) <= self.sim.rules.max_nodes
        for node in self.sim.inbox:
            worlds = self.sim.worlds(node)
            attempts = [world.attempt for world in worlds]
            assert attempts == sorted(set(attempts))
            counts = [world.restart_count for world in worlds]
            assert counts == sorted(counts)
            assert all(count <= self.sim.rules.max_restarts for count in counts)

    @invariant()
    def a_finished_job_says_so_to_all_and_starts_nothing(self) -> None:
        if not hasattr(self, "sim") or not self.sim.job.finished:
            return
        for node in self.sim.alive:
            messages = self.sim.inbox[node]
            assert self.sim.finish(node) is not None or self.sim.refusal(node) is not None
            assert not any(isinstance(message, World) for message in messages[-1:])


AnyJob.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnyJob = AnyJob.TestCase


# ---- found by review -----------------------------------------------------------------------------------------


def test_many_nodes_that_come_or_go_at_once_are_one_change() -> None:
    sim = elastic(1, 64, max_membership_changes=3, backoff_s=0.0)
    sim.join(0)
    sim.advance(30.0)
    for node in range(1, 40):
        sim.join(node)
    sim.advance(JOIN_SETTLE_S)
    assert len(sim.ranks()) == 40
    sim.silent = set(range(1, 40))
    for node in range(1, 30):
        sim.lose(node)
    for node in range(30, 40):
        sim.say(node, Stopped(1, (), 1, False))
    assert sim.finish(0) is None
    assert sim.job.statistics()["membership_changes"] == 2


def test_time_to_stop_is_no_life_of_an_attempt() -> None:
    sim = fixed(1, max_restarts=1, restart_refill_s=2.0, grace_s=30.0)
    sim.join(1)
    sim.silent = {1}
    for attempt in (0, 1):
        sim.advance(0.3)
        sim.say(1, RankFailed(attempt, make_failure(0, pid=attempt)))
        sim.advance(29.0)
        sim.say(1, Stopped(attempt, (), 1, False))
    finish = sim.finish(1)
    assert finish is not None
    assert finish.status == 1


def test_late_joiner_with_another_environment_is_refused_and_disturbs_nobody() -> None:
    sim = elastic(1, 3)
    sim.join(1, has_identity=True)
    sim.say(1, Identity("aaa", ""))
    sim.advance(30.0)
    sim.join(2, has_identity=True)
    sim.advance(100.0)
    assert [world.attempt for world in sim.worlds(1)] == [0]
    sim.say(2, Identity("bbb", ""))
    refusal = sim.refusal(2)
    assert refusal is not None
    assert "--allow-mixed-environments" in refusal.reason
    sim.join(3, has_identity=True)
    sim.say(3, Identity("aaa", ""))
    sim.advance(JOIN_SETTLE_S)
    assert sim.ranks() == {1: 0, 3: 1}


def test_restart_does_not_wait_for_what_a_newcomer_has_to_say() -> None:
    sim = elastic(1, 3, max_restarts=1)
    sim.join(1)
    sim.advance(30.0)
    sim.join(2, has_identity=True)
    sim.fail(1)
    assert sim.ranks() == {1: 0}
    assert sim.world(1).attempt == 1


def test_newcomer_that_goes_again_restarts_nothing() -> None:
    sim = elastic(1, 2)
    sim.join(1)
    sim.advance(30.0)
    sim.join(2)
    sim.lose(2)
    sim.advance(10.0)
    assert [world.attempt for world in sim.worlds(1)] == [0]


def test_newcomer_does_not_restart_a_job_that_has_begun_to_succeed() -> None:
    sim = elastic(2, 3)
    sim.join(1)
    sim.join(2)
    sim.advance(30.0)
    sim.join(3)
    sim.succeed(1)
    sim.advance(10.0)
    sim.succeed(2)
    finish = sim.finish(3)
    assert finish is not None
    assert finish.status == 0


def test_success_that_crosses_the_stop_for_a_newcomer_counts() -> None:
    sim = elastic(1, 2)
    sim.join(1)
    sim.advance(30.0)
    sim.silent = {1}
    sim.join(2)
    sim.advance(JOIN_SETTLE_S)
    sim.succeed(1)
    sim.say(1, Stopped(0, (), 1, False))
    finish = sim.finish(1)
    assert finish is not None
    assert finish.status == 0


def test_no_tick_in_the_past_while_an_identity_is_missing() -> None:
    sim = elastic(1, 2, last_call_s=5.0)
    sim.join(1)
    sim.join(2, has_identity=True)
    sim.advance(20.0)
    moment_s = sim.job.deadline_s()
    assert moment_s is not None
    assert moment_s > sim.now_s


def test_signal_without_a_name_is_reported_by_its_number() -> None:
    sim = fixed(1)
    sim.join(1)
    sim.say(1, Signalled(35))
    finish = sim.finish(1)
    assert finish is not None
    assert (finish.status, finish.reason) == (128 + 35, "stopped by SIGRTMIN+1") or "35" in finish.reason


def test_missing_nodes_are_reported_with_why_they_left() -> None:
    sim = fixed(2, max_restarts=1, join_s=5.0)
    sim.join(1)
    sim.join(2)
    sim.say(2, Leave("cannot start rank 1: /nonexist: no such file or directory"))
    sim.run_until_idle()
    finish = sim.finish(1)
    assert finish is not None
    assert "cannot start rank 1: /nonexist" in finish.reason


@pytest.mark.parametrize("when", ["as a spare", "before it is known whether there is room"])
def test_a_signal_to_a_node_without_ranks_ends_that_node_alone(when: str) -> None:
    sim = elastic(1, 1 if when == "as a spare" else 2)
    sim.join(1)
    sim.advance(30.0)
    sim.join(2)
    sim.say(2, Signalled(signal.SIGTERM))
    refusal = sim.refusal(2)
    assert refusal is not None
    assert refusal.status == 143 and "the job continues without this node" in refusal.reason
    sim.advance(10.0)
    assert [world.attempt for world in sim.worlds(1)] == [0]
    sim.succeed(1)
    finish = sim.finish(1)
    assert finish is not None
    assert finish.status == 0


def test_a_signal_before_the_first_attempt_ends_the_job() -> None:
    sim = fixed(3)
    sim.join(1)
    sim.join(2)
    sim.say(2, Signalled(signal.SIGTERM))
    finish = sim.finish(1)
    assert finish is not None
    assert finish.status == 143


def test_an_error_before_the_script_ends_the_job_at_once() -> None:
    sim = fixed(2, max_restarts=9, give_up_status=93)
    sim.join(1)
    sim.join(2)
    sim.fail(1, traceback='  File "/job/train.py", line 2\nSyntaxError: invalid syntax\n')
    sim.advance(SAME_ERROR_WAIT_S)
    finish = sim.finish()
    assert finish is not None
    assert finish.status == 93
    assert finish.reason.startswith("SyntaxError at /job/train.py:2: before the script's first statement")


def test_a_rank_that_ended_with_zero_on_another_node_is_reported_with_those_that_lost_it() -> None:
    sim = fixed(2)
    sim.join(1)
    sim.join(2)
    sim.ended[2] = (1,)
    sim.fail(1, traceback="RuntimeError: [/x/gloo/transport/tcp/pair.cc:534] Connection closed by peer\n")
    sim.advance(SAME_ERROR_WAIT_S)
    finish = sim.finish()
    assert finish is not None
    assert [failure.early for failure in finish.failures if not failure.stopped_by_us] == [(1,)]
