"""Which job file is next, and what is told of each."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from launcher.warm.jobs import JobFile, RefusedFile
from launcher.warm.results import CACHED, FAILED, IMAGE, Warmed
from launcher.warm.rounds import AGAIN_S, Rounds, status_lines

GOOD = (Warmed(IMAGE, CACHED, "d" * 64, 10, 5),)
BAD = (Warmed(IMAGE, FAILED, text="no"),)


def file(name: str, stamp: int = 0) -> JobFile:
    return JobFile(name, 0, (stamp, 0, 0), b"")


def test_each_once_then_again_after_a_while() -> None:
    rounds = Rounds(300.0)
    rounds.see([file("a"), file("b")])
    assert rounds.choose(100.0) == "a"
    rounds.ended("a", 100.0, 1e9, 2.0, GOOD, "")
    assert rounds.choose(100.0) == "b"
    assert not rounds.is_all_done
    rounds.ended("b", 101.0, 1e9, 2.0, GOOD, "")
    assert rounds.is_all_done and not rounds.has_failures
    assert rounds.choose(399.0) == ""
    assert rounds.wait_s(399.0, 60.0) == 1.0
    assert rounds.choose(400.0) == "a"


def test_what_failed_is_tried_again_sooner() -> None:
    rounds = Rounds(300.0)
    rounds.see([file("a")])
    rounds.ended("a", 0.0, 1e9, 2.0, BAD, "")
    assert rounds.has_failures
    assert rounds.choose(AGAIN_S - 1) == ""
    assert rounds.choose(AGAIN_S) == "a"


def test_a_file_that_changed_is_due_at_once_and_one_that_went_is_forgotten() -> None:
    rounds = Rounds(300.0)
    rounds.see([file("a"), file("b")])
    for name in ("a", "b"):
        rounds.ended(name, 0.0, 1e9, 2.0, GOOD, "")
    rounds.see([file("b", stamp=1)])
    assert rounds.choose(1.0) == "b"
    assert [each["name"] for each in rounds.to_record()] == ["b"]
    rounds.ended("a", 1.0, 1e9, 2.0, GOOD, "")  # it was taken away while it was worked on
    assert [each["name"] for each in rounds.to_record()] == ["b"]


def test_what_is_refused_is_said_once() -> None:
    rounds = Rounds(300.0)
    assert rounds.see([RefusedFile("a", "why")]) == [RefusedFile("a", "why")]
    assert rounds.see([RefusedFile("a", "why")]) == []
    assert rounds.see([RefusedFile("a", "other")]) == [RefusedFile("a", "other")]
    assert rounds.choose(1e12) == "" and rounds.is_all_done and rounds.has_failures
    rounds.see([file("a")])
    assert rounds.choose(0.0) == "a"


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans(), st.floats(0.1, 50.0)), max_size=40))
def test_nobody_is_forgotten(steps: list[tuple[str, bool, float]]) -> None:
    """However long files take, and whatever fails: a file waits for each other one at most twice."""
    rounds = Rounds(30.0)
    names = [file(name) for name in "abcd"]
    now_s, waited = 0.0, dict.fromkeys("abcd", 0)
    for _, fails, took_s in steps:
        rounds.see(names)
        while not (name := rounds.choose(now_s)):
            wait_s = rounds.wait_s(now_s, 1000.0)
            assert wait_s <= 30.0
            now_s += wait_s + 1e-6  # a sum may be rounded down
        waited = {each: 0 if each == name else count + 1 for each, count in waited.items()}
        assert max(waited.values()) <= 2 * len(names)
        now_s += took_s
        rounds.ended(name, now_s, 1e9, took_s, BAD if fails else GOOD, "")


def test_status_for_people() -> None:
    rounds = Rounds(300.0)
    rounds.see([file("a"), file("b"), RefusedFile("c", "is no file")])
    rounds.ended("a", 0.0, 1000.0, 2.0, GOOD, "")
    record = {"pid": 7, "jobs": "/jobs", "state": "at b", "files": rounds.to_record()}
    assert status_lines(record, 1005.0) == [
        "pid 7, /jobs: 3 job files, at b",
        "a: image cached; 5 s ago, in 2.0 s",
        "b: not warmed yet",
        "c: is no file",
    ]
