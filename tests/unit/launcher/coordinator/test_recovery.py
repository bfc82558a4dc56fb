"""What a job does between two attempts, and before it ends ranks: steps, who is asked, and what comes of it."""

from __future__ import annotations

import signal

import pytest

from launcher.coordinator.recovery_steps import MARGIN_S
from launcher.coordinator.restart_policy import StepLimits
from launcher.monitor.failure.record import format_record, unpack
from launcher.rendezvous.messages import (
    BadFinding,
    Examine,
    Examined,
    Note,
    RankFailed,
    RecoveryResult,
    RecoveryStep,
    Signalled,
    Stop,
)
from tests.unit.launcher.jobsim import Sim, make_failure, make_rules

NAN = {"message": "RuntimeError: loss is nan"}
CHECKS, ROLLBACK, REPLAY = "stop-time-checks", "rollback", "replay"
ALL = StepLimits(checks_s=10.0, rollback_s=20.0, replay_s=30.0)


def job_of(nodes: int, work: int | None = None, **changes: object) -> Sim:
    """Nodes 1 to `nodes`, of which `work` take part."""
    work = work or nodes
    rules = {"max_restarts": 9, "backoff_s": 0.0, "steps": ALL, **changes}
    sim = Sim(make_rules(min_nodes=work, max_nodes=work, **rules))
    for node in range(1, nodes + 1):
        sim.join(node)
    return sim


def asked(sim: Sim, step: str) -> list[tuple[int, RecoveryStep]]:
    return [
        (node, m) for node in sim.inbox for m in sim.inbox[node] if isinstance(m, RecoveryStep) and m.step == step
    ]


def notes(sim: Sim, node: int = 1) -> list[str]:
    return [message.text for message in sim.inbox[node] if isinstance(message, Note)]


def unfit(*names: str) -> RecoveryResult:
    return RecoveryResult(
        0, CHECKS, True, 1.0, "failed", tuple(BadFinding(each, f"fail {each}") for each in names)
    )


def test_the_steps_of_a_row_and_what_its_pages_say() -> None:
    sim = job_of(2)
    for _ in range(4):
        sim.advance(3.0)
        sim.fail(2, **NAN)
    sim.advance(3.0)
    assert sim.steps() == [(0, CHECKS), (1, ROLLBACK), (2, REPLAY), (3, "restart-in-place")]
    assert [node for node, _ in asked(sim, CHECKS)] == [1, 2]
    ((node, rollback),) = asked(sim, ROLLBACK)
    assert (node, rollback.attempt, rollback.limit_s, rollback.kind) == (1, 1, 20.0, "numeric")
    early = unpack(rollback.data)
    assert early is not None
    assert (early["number"], early["attempt"], early["class"], early["step"]) == (1, 1, "numeric", ROLLBACK)
    ((_, replay),) = asked(sim, REPLAY)
    assert replay.hosts == ("node1", "node2")
    assert sim.worlds(1)[-1].attempt == 4
    pages = sim.pages()
    assert [page["number"] for page in pages] == [0, 1, 2, 3]
    stages = [{"checks_s", "rollback_s", "replay_s"} & set(page["stages"]) for page in pages]
    assert stages == [{"checks_s"}, {"rollback_s"}, {"replay_s"}, set()]
    assert "           rollback: 2 failures in a row\n           rollback on node1: well\n" in format_record(
        pages[1]
    )


def test_by_default_nothing_is_asked_of_anybody() -> None:
    sim = job_of(2, steps=StepLimits())
    for _ in range(4):
        sim.fail(2, **NAN)
    assert [world.attempt for world in sim.worlds(1)] == [0, 1, 2, 3, 4]
    assert not any(isinstance(message, RecoveryStep | Examine) for message in sim.inbox[1])


def test_a_node_that_is_not_fit_is_left_out_and_comes_back() -> None:
    sim = job_of(4, 2)
    sim.mended[2, CHECKS] = unfit("disks")
    sim.fail(2, **NAN)
    assert sim.ranks() == {1: 0, 3: 1}
    assert "node2 is left out of further attempts while others suffice: fail disks" in notes(sim)
    del sim.mended[2, CHECKS]
    sim.mended[3, CHECKS] = unfit("clock")
    sim.advance(3600.0)  # a new row
    sim.fail(3, **NAN)
    assert sim.ranks() == {1: 0, 2: 1}


def test_checks_that_could_not_be_made_take_nothing_back() -> None:
    sim = job_of(4, 2)
    sim.mended[2, CHECKS] = unfit("disks")
    sim.fail(1, **NAN)
    assert sim.ranks() == {1: 0, 3: 1}
    sim.advance(3600.0)  # a new row
    sim.mended[2, CHECKS] = RecoveryResult(0, CHECKS, False, 1.0, "cut off")
    sim.fail(1, **NAN)
    assert len(asked(sim, CHECKS)) == 8
    sim.lose(3)
    assert sim.ranks() == {1: 0, 4: 1}


def test_what_all_nodes_fail_leaves_nobody_out() -> None:
    sim = job_of(3, 2)
    for node in (1, 2, 3):
        sim.mended[node, CHECKS] = unfit("mounts")
    sim.fail(2, **NAN)
    assert sim.ranks() == {1: 0, 2: 1}


def test_nobody_is_left_out_where_that_is_off() -> None:
    sim = job_of(3, 2, excludes_nodes=False)
    sim.mended[2, CHECKS] = unfit("disks")
    sim.fail(2, **NAN)
    assert sim.ranks() == {1: 0, 2: 1}


def test_a_node_that_says_nothing_of_its_checks_is_waited_for_so_long_and_left_out() -> None:
    sim = job_of(3, 2)
    sim.mended[2, CHECKS] = None
    sim.fail(2, **NAN)
    sim.advance(10.0 + MARGIN_S - 0.1)
    assert len(sim.worlds(1)) == 1
    assert sim.job.statistics()["phase"] == "mending"
    sim.advance(0.2)
    assert sim.ranks() == {1: 0, 3: 1}
    assert any("node2 is left out" in line and "its checks have not answered" in line for line in notes(sim))


def test_checks_before_each_restart() -> None:
    sim = job_of(1, steps=ALL._replace(checks_always=True, replay_s=0.0))
    sim.fail(1)
    sim.fail(1)  # its turn
    sim.fail(1)  # beside the rollback
    assert [message.attempt for _, message in asked(sim, CHECKS)] == [0, 1, 2]
    assert [message.attempt for _, message in asked(sim, ROLLBACK)] == [2]
    assert sim.world(1).attempt == 3


@pytest.mark.parametrize("step", [ROLLBACK, REPLAY])
def test_a_command_that_fails_or_says_nothing_costs_its_time(step: str) -> None:
    limits = StepLimits(rollback_s=20.0) if step == ROLLBACK else StepLimits(replay_s=20.0)
    sim = job_of(2, steps=limits)
    sim.mended[1, step] = RecoveryResult(0, step, False, 1.0, "exit status 3")
    sim.fail(2, **NAN)
    assert sim.world(1).attempt == 1
    assert f"{step} on node1: exit status 3" in notes(sim)
    sim.advance(3600.0)
    sim.mended[1, step] = None
    sim.fail(2, **NAN)
    sim.advance(20.0 + MARGIN_S)
    assert sim.world(1).attempt == 2
    assert f"{step} on node1: no answer in time" in notes(sim)


@pytest.mark.parametrize(
    ("suspects", "left"), [(("node2",), {1: 0, 3: 1}), (("node7",), {1: 0, 2: 1}), ((), {1: 0, 2: 1})]
)
def test_a_machine_that_a_replay_names_is_left_out(suspects: tuple[str, ...], left: dict[int, int]) -> None:
    sim = job_of(3, 2, steps=StepLimits(replay_s=20.0))
    sim.mended[1, REPLAY] = RecoveryResult(0, REPLAY, True, 1.0, "", (), suspects)
    sim.fail(2, **NAN)
    assert sim.ranks() == left


def test_the_node_that_runs_a_command_may_be_lost() -> None:
    sim = job_of(3, 2, steps=StepLimits(rollback_s=20.0))
    sim.mended[1, ROLLBACK] = None
    sim.fail(2, **NAN)
    sim.lose(1)
    assert sim.ranks() == {2: 1, 3: 0}


def test_who_joins_meanwhile_is_in_the_next_attempt() -> None:
    sim = Sim(make_rules(min_nodes=1, max_nodes=2, max_restarts=3, steps=StepLimits(rollback_s=20.0)))
    sim.join(1)
    sim.advance(30.0)
    sim.mended[1, ROLLBACK] = None
    sim.fail(1, **NAN)
    sim.join(2)
    assert len(sim.worlds(2)) == 0
    sim.say(1, RecoveryResult(0, ROLLBACK, True, 1.0, "well"))
    assert sim.ranks() == {1: 0, 2: 1}


def test_answers_of_others_and_of_another_step_count_for_nothing() -> None:
    sim = job_of(2, steps=StepLimits(rollback_s=20.0))
    sim.mended[1, ROLLBACK] = None
    sim.say(1, RecoveryResult(0, ROLLBACK, True, 1.0, "unasked"))
    sim.fail(2, **NAN)
    for node, answer in ((2, (0, ROLLBACK)), (1, (0, CHECKS)), (1, (7, ROLLBACK))):
        sim.say(node, RecoveryResult(*answer, True, 1.0, "no"))
    assert sim.job.statistics()["phase"] == "mending"
    sim.say(1, RecoveryResult(0, ROLLBACK, True, 1.0, "well"))
    assert sim.world(1).attempt == 1


def test_a_signal_ends_the_job_in_the_middle_of_a_step() -> None:
    sim = job_of(2, steps=StepLimits(rollback_s=20.0))
    sim.mended[1, ROLLBACK] = None
    sim.fail(2, **NAN)
    sim.say(2, Signalled(signal.SIGTERM))
    finish = sim.finish()
    assert finish is not None and finish.status == 143


def test_a_job_that_is_given_up_says_how_its_machine_is_found() -> None:
    sim = job_of(2, steps=StepLimits(), max_restarts=1)
    sim.fail(2, **NAN)
    sim.fail(2, **NAN)
    finish = sim.finish()
    assert finish is not None and (finish.status, finish.reason) == (1, "ranks failed after 1 restart")
    line = next(text for text in notes(sim) if "group replay" in text)
    assert line.endswith("bootseer replay --hosts node1,node2 --group-size 1 --run COMMAND")
    assert sim.steps() == [(0, "restart-in-place"), (1, "replay-advised"), (1, "give-up")]


# ---- post-mortem ---------------------------------------------------------------------------------------------

MORTEM = StepLimits(post_mortem_s=10.0)


def examined(sim: Sim) -> dict[int, list[bool]]:
    return {node: [m.runs for m in sim.inbox[node] if isinstance(m, Examine)] for node in sorted(sim.inbox)}


def stops(sim: Sim, node: int) -> int:
    return sum(isinstance(message, Stop) for message in sim.inbox[node])


def test_all_hold_their_ranks_while_the_node_of_the_failure_is_looked_at() -> None:
    sim = job_of(3, 2, steps=MORTEM)
    sim.silent = {2}
    sim.fail(2)
    assert examined(sim) == {1: [False], 2: [True], 3: []}
    sim.advance(4.0)
    sim.silent = {1, 2}
    for pid in (7, 8):  # of a node whose ranks were not held in time
        sim.say(1, RankFailed(0, make_failure(0, status=1, pid=pid)))
    assert examined(sim) == {1: [False, True], 2: [True], 3: []}
    sim.say(2, Examined(0, 4.0, "post-mortem: well"))
    assert stops(sim, 1) == 0
    sim.silent = set()
    sim.say(1, Examined(0, 0.0, "post-mortem: exit status 1"))
    assert (stops(sim, 1), stops(sim, 2)) == (1, 1)
    sim.advance(2.0)
    (page,) = sim.pages()
    assert page["stages"]["post_mortem_s"] == 4.0 and page["stages"]["ranks_stopped_s"] == 0.0
    assert {"node2: post-mortem: well", "node1: post-mortem: exit status 1"} <= set(page["steps_done"])
    assert len(page["others"]) == 2


def test_a_post_mortem_without_an_end_is_waited_for_so_long() -> None:
    sim = job_of(2, steps=MORTEM)
    sim.silent = {2}
    sim.fail(2)
    sim.silent = set()
    sim.advance(10.0 + MARGIN_S)
    assert sim.world(1).attempt == 1


@pytest.mark.parametrize("how", ["signal", "lost"])
def test_a_post_mortem_holds_nothing_else_up(how: str) -> None:
    sim = job_of(3, 2, steps=MORTEM)
    sim.silent = {2}
    sim.fail(2)
    sim.silent = set()
    if how == "signal":
        sim.say(1, Signalled(signal.SIGTERM))
        finish = sim.finish()
        assert finish is not None and finish.status == 143
    else:
        sim.lose(2)
        assert sim.ranks() == {1: 0, 3: 1}


def test_what_a_post_mortem_takes_is_no_life_of_the_attempt() -> None:
    sim = job_of(1, steps=MORTEM, max_restarts=1, restart_refill_s=5.0)
    for _ in range(2):
        sim.advance(3.0)
        sim.silent = {1}
        sim.fail(1)
        sim.silent = set()
        sim.advance(4.0)
        attempt = sim.world(1).attempt
        sim.say(1, Examined(attempt, 4.0, "well"))
    assert sim.finish() is not None


def test_nodes_that_join_or_go_are_no_failure() -> None:
    sim = Sim(make_rules(min_nodes=1, max_nodes=2, steps=MORTEM))
    sim.join(1)
    sim.advance(30.0)
    sim.join(2)
    sim.advance(2.0)
    sim.lose(2)
    assert examined(sim) == {1: [], 2: []}
    assert sim.world(1).attempt == 2
