"""Which version a job loads, without a service."""

from __future__ import annotations

from launcher.cli.parser import parse
from launcher.provision.checkpoint_version import VersionChoice
from launcher.rendezvous.messages import CheckpointFailed, Pinned
from launcher.spec import build_spec

OMP = {"OMP_NUM_THREADS": "1"}
NEW, OLD = Pinned("step-30", "aa"), Pinned("step-20", "bb")


class Choice:
    """A choice, and what it has led to."""

    def __init__(self, *flags: str) -> None:
        spec = build_spec(parse(["--load-checkpoint", "s3://host/ckpt", *flags, __file__], OMP), OMP)
        self.said: list[str] = []
        self.passed: list[str] = []
        self.overs = 0
        self.answers: list[tuple[Pinned | None, str]] = []
        self.choice = VersionChoice(spec, self.said.append, self.passed.append, self._over)
        self.choice.shown = "s3://host/ckpt"

    def _over(self) -> None:
        self.overs += 1

    def begin(self) -> str:
        return self.choice.begin(lambda pinned, why: self.answers.append((pinned, why)))


def test_the_version_that_is_found_is_taken_and_why_a_newer_one_is_not() -> None:
    made = Choice()
    assert made.begin() == "" and made.choice.is_due
    assert made.choice.question() == {"without": [], "falls_back": False}
    made.choice.on_found(OLD, ["step-30 is incomplete"])
    assert made.answers == [(OLD, "")] and made.overs == 1 and not made.choice.is_due
    assert made.passed == ["the checkpoint is step-20, not a newer one: step-30 is incomplete"]


def test_a_damaged_version_ends_the_job_unless_it_may_fall_back() -> None:
    for flags, answers in (((), [None]), (("--checkpoint-fallback", "older"), [OLD])):
        made = Choice(*flags)
        made.begin()
        made.choice.on_found(NEW, [])
        made.choice.add_failed(CheckpointFailed(0, "aa", True, "its sums differ"))
        made.answers.clear()
        assert made.begin() == ""
        assert made.choice.question() == {"without": ["aa"], "falls_back": True}
        made.choice.on_found(OLD, [])
        assert [pinned for pinned, _ in made.answers] == answers
        assert ("step-20 is older and complete" in made.answers[0][1]) == (answers == [None])
        assert len(made.said) == len(flags) // 2


def test_a_version_that_is_not_damaged_ends_the_job_at_once() -> None:
    made = Choice()
    made.begin()
    made.choice.on_found(NEW, [])
    made.choice.add_failed(CheckpointFailed(0, "aa", False, "the node has no memory left"))
    assert made.begin() == "version step-30 cannot be loaded: the node has no memory left"


def test_without_a_checkpoint_the_job_trains_from_scratch_unless_it_is_required() -> None:
    made = Choice()
    made.begin()
    assert not made.choice.on_absent("nothing is there", "absent")
    assert made.answers == [(Pinned("", ""), "")]
    assert "trains from scratch" in made.choice.absent_line
    made = Choice("--require-checkpoint")
    made.begin()
    assert not made.choice.on_absent("nothing is there", "absent")
    assert made.answers[0][0] is None and "--require-checkpoint" in made.answers[0][1]
