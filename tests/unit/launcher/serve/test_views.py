"""A job as the page and the API show it: all known ranks, and nothing that breaks by a bad answer."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.serve.jobs import AgentAnswer, JobView, group
from launcher.serve.page import make_page
from launcher.serve.views import make_detail, make_ranks
from launcher.status.job_ranks import add_cores
from tests.unit.launcher.serve.made_jobs import make_columns, make_status


def answer(status: dict[str, Any], columns: dict[str, Any] | None = None, why: str = "") -> AgentAnswer:
    return AgentAnswer(f"/rt/jobs/{status.get('pid')}", status, columns, why, 5.0)


def test_columns_of_the_job_and_facts_of_the_node_are_joined() -> None:
    status = make_status(ranks=2)
    status["ranks"][1] |= {"process": "T", "steps_per_s": None}
    view = JobView("run7", "run7", (answer(status, make_columns(4, 2, process=["S", "S", "D", None])),))
    ranks = make_ranks(view)
    assert ranks["rank"] == [0, 1, 2, 3]
    assert ranks["node"] == ["node-0", "node-0", "node-1", "node-1"]
    assert ranks["step"] == [1010, 1010, None, None], "only the node of the rank knows"
    assert ranks["steps_per_s"] == [2.0, 2.0, 2.0, 2.0]
    assert ranks["state"] == ["running", "running", "in the kernel", "running"]


def test_without_columns_the_ranks_of_this_node_are_shown() -> None:
    status = make_status(ranks=2)
    status["ranks"][1]["process"] = "T"
    ranks = make_ranks(JobView("run7", "run7", (answer(status),)))
    assert (ranks["rank"], ranks["node"]) == ([0, 1], ["node-a", "node-a"])
    assert ranks["state"] == ["running", "stopped"]


def test_bootruns_of_one_job_belong_together() -> None:
    first = make_status(pid=1, node_rank=1, coordinator=None, standstill="the job hangs", checks=["b", "a"])
    second = make_status(pid=2, node_rank=0, checks=["a"])
    other = make_status("other", pid=3, runs_s=900.0)
    silent = AgentAnswer("/rt/jobs/9-x", {}, None, "it may be stopped", 0.0)
    views = group([answer(first), answer(second), answer(other), silent])
    assert [view.run_id for view in views] == ["other", "run7", "9-x"]
    found = make_detail(views[1])
    assert (found["pid"], found["hang"], found["checks"]) == (2, "the job hangs", ["a", "b"])
    assert make_detail(views[2])["why"] == "it may be stopped"


def test_jobs_with_one_id_are_told_apart() -> None:
    """As where the id is left at its default: each coordinator has a job, and each endpoint."""
    first, second = make_status("none", pid=1, runs_s=9.0), make_status("none", pid=2, runs_s=99.0)
    found = [answer(first), answer(second)]
    for pid, endpoint in ((3, "a:1"), (4, "b:1"), (5, "b:1")):
        found.append(answer(make_status("none", pid=pid, coordinator=None, endpoint=endpoint, node_rank=pid)))
    assert [[agent.status["pid"] for agent in view.agents] for view in group(found)] == [[2], [3], [4, 5], [1]]


def test_cores_are_those_between_two_samples() -> None:
    before = make_columns(3, cpu_s=[1.0, None, 5.0], age_s=[1.0, 1.0, 1.0])
    now = make_columns(3, cpu_s=[7.0, 4.0, 4.0], age_s=[0.0, 0.0, 0.0])
    add_cores(now, before, 2.0)  # its samples are three seconds apart
    assert now["cores"] == [2.0, None, 0.0]
    same = make_columns(3, cpu_s=[7.0, 4.0, 4.0], age_s=[2.0, 2.0, 2.0])
    add_cores(same, now, 2.0)  # the same sample again
    assert same["cores"] == now["cores"]
    for other in (None, make_columns(2), {**before, "attempt": 1}, {**before, "cpu_s": "x"}):
        again = make_columns(3)
        add_cores(again, other, 2.0)
        assert "cores" not in again


def test_a_rank_of_one_core_has_one_however_often_it_is_asked() -> None:
    """It is sampled each 4 s and asked for each 2 s."""
    seen: list[float] = []
    last: dict[str, Any] | None = None
    for at_s in range(0, 41, 2):
        sampled_s = at_s // 4 * 4
        found = make_columns(1, cpu_s=[float(sampled_s)], age_s=[float(at_s - sampled_s)])
        add_cores(found, last, 2.0)
        seen += found.get("cores", [])
        last = found
    assert {each for each in seen if each is not None} == {1.0}


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=6,
)
STATUS_KEYS = st.sampled_from(sorted(make_status()))
RANK_KEYS = st.sampled_from(sorted(make_status()["ranks"][0]))
COLUMN_KEYS = st.sampled_from(sorted(make_columns(1)))


@given(
    st.dictionaries(STATUS_KEYS, VALUES, max_size=4),
    st.dictionaries(RANK_KEYS, VALUES, max_size=3),
    st.dictionaries(COLUMN_KEYS, VALUES, max_size=3),
)
@settings(max_examples=150)
def test_an_answer_of_any_form_is_shown(
    more: dict[str, Any], of_rank: dict[str, Any], columns: dict[str, Any]
) -> None:
    status = make_status(ranks=2)
    status["ranks"][0] |= of_rank
    status |= more
    view = group([answer(status, {**make_columns(3), **columns})])[0]
    detail = make_detail(view)
    json.dumps(detail)
    ranks = detail["ranks"]
    assert {len(column) for column in ranks.values()} == {len(ranks["rank"])}
    assert make_page([view], view).endswith("</html>\n")


def test_texts_of_a_job_are_no_markup() -> None:
    attack = "</script><img src=x onerror=alert(1)>\"'"
    status = make_status(attack, script=attack, host=attack, standstill=attack, checks=[attack])
    columns = make_columns(2, nodes=1)
    columns["nodes"] = [attack]
    views = group([answer(status, columns)])
    for shown in (views[0], None):
        assert "<img" not in make_page(views, shown)
    assert "%3C%2Fscript%3E" in make_page(views, None), "and its address is quoted"
