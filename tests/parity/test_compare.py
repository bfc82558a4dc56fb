"""The comparison itself: nothing unexplained gets through, and no promise that does not hold."""

from __future__ import annotations

from tests.parity.compare import compare, flatten
from tests.parity.model import Absent, AtMost, Better, Has, Lacks
from tests.parity.observe import parse_report
from tests.parity.summing import summary

THEIRS = {"status": {"0": 1}, "told": {"r0.0": {"env": {"A": "1"}}}, "tree": ["a", "b"]}


def better(fact: str, expected: object) -> tuple[Better, ...]:
    return (Better(fact, expected, "because"),)


def test_equal_observations_are_the_same() -> None:
    assert compare(THEIRS, THEIRS, ()) == (("status.0", "told.r0.0.env.A", "tree"), (), ())


def test_any_other_value_is_unexplained() -> None:
    verdict = compare(THEIRS, {**THEIRS, "status": {"0": 143}}, ())
    assert verdict.unexplained == ("status.0: torchrun 1, bootrun 143",)


def test_a_missing_and_a_new_fact_are_unexplained() -> None:
    ours = {**THEIRS, "told": {"r0.0": {"env": {"B": "1"}}}}
    assert len(compare(THEIRS, ours, ()).unexplained) == 2


def test_a_declared_difference_is_better_only_with_the_promised_value() -> None:
    ours = {**THEIRS, "status": {"0": 143}}
    assert compare(THEIRS, ours, better("status.*", 143)).better == ("status.0",)
    assert compare(THEIRS, ours, better("status.*", 2)).unexplained


def test_a_declared_difference_that_is_gone_is_unexplained() -> None:
    assert "does not differ any more" in compare(THEIRS, THEIRS, better("status.*", 143)).unexplained[0]


def test_a_declared_difference_may_show_at_some_ranks_only() -> None:
    theirs = {"told": {"r0": "x", "r1": "y"}}
    verdict = compare(theirs, {"told": {"r0": "y", "r1": "y"}}, better("told.*", "y"))
    assert (verdict.same, verdict.better, verdict.unexplained) == (("told.r1",), ("told.r0",), ())


def test_predicates() -> None:
    theirs = {"fact": "x"}
    for expected, good, bad in (
        (Has(("one", "two")), "one and two", "one"),
        (Has(("one",)), ["a one", "b"], ["a", "b"]),
        (Lacks(("one",)), "two", "one"),
        (AtMost(1), 1, 2),
        (True, True, 1),
        (0, 0, False),
    ):
        assert compare(theirs, {"fact": good}, better("fact", expected)).better, expected
        assert compare(theirs, {"fact": bad}, better("fact", expected)).unexplained, expected
    assert compare(theirs, {}, better("fact", Absent())).better
    assert not compare(theirs, {"fact": "y"}, better("fact", Absent())).better


def test_what_only_one_side_has_is_unexplained() -> None:
    assert flatten({"told": {}, "deep": {"er": {"x": 1}}, "list": []}) == {"deep.er.x": 1, "list": []}
    assert compare({"told": {}}, {"told": {"r0.0": {"ran": True}}}, ()).unexplained


def test_summary_counts_probes_by_the_way_they_ran() -> None:
    same = compare(THEIRS, THEIRS, ())
    differs = compare(THEIRS, {**THEIRS, "status": {"0": 2}}, ())
    meant = compare(THEIRS, {**THEIRS, "status": {"0": 2}}, better("status.0", 2))
    verdicts = {("a", "auto"): same, ("a", "off"): meant, ("b", "auto"): same, ("b", "off"): differs}
    assert summary(verdicts) == (
        "parity: 2 probes x hooks auto/off: 2 same, 1 deliberately better, 1 unexplained (11 facts)"
    )


def test_report_of_torchrun_is_read() -> None:
    text = """
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[0]:
  time      : 2026-11-21_04:43:06
  host      : nowhere.invalid
  rank      : 1 (local_rank: 1)
  exitcode  : -15 (pid: 7451)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 7451
------------------------------------------------------------
Root Cause (first observed failure):
[1]:
  time      : 2026-11-21_04:43:06
  host      : nowhere.invalid
  rank      : 0 (local_rank: 0)
  exitcode  : 2 (pid: 7450)\x20
  error_file: /logs/error.json
  traceback : Traceback (most recent call last):
    File "train.py"
  KeyError: 'step'
\x20\x20
============================================================
"""
    report = parse_report(text)
    assert report["title"] == "train.py"
    assert report["root"]["exitcode"] == 2
    assert report["root"]["traceback"] == "KeyError: 'step'"
    assert report["root"]["error_file"] == "/logs/error.json"
    assert [(one["rank"], one["signal"], one["traceback"]) for one in report["others"]] == [
        (1, "SIGTERM", "Signal 15 (SIGTERM) received by PID 0")
    ]
    assert parse_report("nothing") is None
