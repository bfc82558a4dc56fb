"""What a job does about broken rules over what its ranks print."""

from __future__ import annotations

import pytest

from launcher.rendezvous.messages import Finish, RuleFired, RuleObservation, RuleReport, Stop, Stopped, World
from launcher.rules.rule import Rule
from tests.unit.launcher.jobsim import Sim, make_rules

STEP = Rule("step", "step", "restart", "any", must_start_within_s=10.0, must_recur_within_s=3.0)


def job_of(nodes: int = 2, **changes: object) -> Sim:
    sim = Sim(make_rules(min_nodes=nodes, max_nodes=nodes, **changes))
    for node in range(nodes):
        sim.join(node)
    return sim


def finding(action: str, attempt: int = 0, rule: str = "loss") -> RuleFired:
    return RuleFired(attempt, rule, "numeric", action, 1, "loss is nan: 'loss nan'")


def inbox(sim: Sim, node: int, kind: type) -> list[object]:
    return [message for message in sim.inbox[node] if isinstance(message, kind)]


def test_a_report_is_reported_to_all_and_changes_nothing() -> None:
    sim = job_of()
    sim.say(1, finding("report"))
    line = "rule 'loss' (numeric): the job (rank 1 prints it): loss is nan: 'loss nan'"
    for node in range(2):
        assert inbox(sim, node, RuleReport) == [RuleReport(0, "loss", "numeric", "report", 1, line)]
        assert inbox(sim, node, Stop) == []
    sim.succeed(0, 1)
    assert inbox(sim, 0, Finish) == [Finish(0, "", (), ())]


def test_a_flood_of_findings_is_reported_in_few_lines() -> None:
    sim = job_of()
    for _ in range(100):
        sim.say(1, finding("report"))
    assert len(inbox(sim, 0, RuleReport)) == 4


def test_a_restart_uses_the_budget() -> None:
    sim = job_of(max_restarts=1)
    sim.say(0, finding("restart"))
    sim.run_until_idle()
    assert len(inbox(sim, 0, World)) == 2
    sim.say(0, finding("restart", attempt=0))
    assert not sim.job.finished, "of an attempt that is over"
    sim.say(1, finding("restart", attempt=1))
    sim.run_until_idle()
    (finish,) = inbox(sim, 1, Finish)
    assert isinstance(finish, Finish) and finish.status == 1
    assert (
        finish.reason
        == "rule 'loss' (numeric): the job (rank 1 prints it): loss is nan: 'loss nan' after 1 restart"
    )


def test_the_page_of_an_attempt_that_a_rule_has_ended_is_about_the_rule() -> None:
    sim = job_of(max_restarts=1)
    sim.advance(7.0)
    sim.say(1, finding("restart"))
    sim.run_until_idle()
    (page,) = sim.pages(0)
    assert (page["class"], page["rank"], page["since_s"]) == ("numeric", 1, 7.0)
    assert page["message"] == "rule 'loss' (numeric): the job (rank 1 prints it): loss is nan: 'loss nan'"
    assert "stacks" not in page


@pytest.mark.parametrize(("action", "status"), [("give-up", 93), ("stop", 1)])
def test_the_job_is_ended_although_it_could_restart(action: str, status: int) -> None:
    sim = job_of(max_restarts=5, give_up_status=93)
    sim.say(0, finding(action))
    (finish,) = inbox(sim, 1, Finish)
    assert isinstance(finish, Finish) and finish.status == status
    assert finish.reason.startswith("rule 'loss'")
    assert len(inbox(sim, 1, World)) == 1


def test_give_up_holds_for_a_rank_that_fails_with_its_last_line() -> None:
    sim = job_of(max_restarts=5, give_up_status=93)
    sim.silent = {0, 1}
    sim.fail(1)
    sim.say(1, finding("give-up"))
    sim.say(0, finding("restart"))
    for node in range(2):
        sim.say(node, Stopped(0, (), sim.new_port(), False))
    (finish,) = inbox(sim, 0, Finish)
    assert isinstance(finish, Finish) and finish.status == 93
    assert [failure.rank for failure in finish.failures] == [1]


def test_a_line_that_no_rank_prints() -> None:
    sim = job_of(max_restarts=1, log_rules=(STEP,))
    for node in range(2):
        sim.say(node, RuleObservation(0, "step", "watch"))
    sim.advance(9.0)
    sim.say(1, RuleObservation(0, "step", "match"))
    sim.advance(6.0)
    assert inbox(sim, 0, RuleReport) == []
    sim.advance(1.0)
    (told,) = inbox(sim, 0, RuleReport)
    assert isinstance(told, RuleReport) and "no further matching line within 3 s" in told.text
    assert len(inbox(sim, 0, World)) == 2, "started again"


def test_nothing_is_awaited_of_a_job_that_ends() -> None:
    sim = job_of(log_rules=(STEP,))
    for node in range(2):
        sim.say(node, RuleObservation(0, "step", "watch"))
    sim.succeed(0)
    sim.advance(100.0)
    assert inbox(sim, 1, RuleReport) == []
