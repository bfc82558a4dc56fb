"""bootrun's side of an image when its keepers fail or hang: real processes that say what a test wants."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.parser import parse
from launcher.provision import image
from launcher.provision.image import ImageEvents, NodeImage
from launcher.ranks.program import RankProgram
from launcher.spec import build_spec
from tests.support import is_running, tune, wait_until
from tests.unit.launcher.planned_keepers import ServiceBed, install
from tests.unit.launcher.ranks.looping import run_for

OMP = {"OMP_NUM_THREADS": "1"}
FIRST, SECOND = "1" * 64, "2" * 64
# Takes the next line of the plan; notes what it is told to do.
SERVICE = """#!PYTHON -IS
import json, os, socket
connection = socket.socket(fileno=os.dup(0))
number = sum(name.startswith("order") for name in os.listdir("TOP"))
with open("TOP/plan") as file:
    plan = json.load(file)[number]
def tell(did, **fields):
    connection.sendall(json.dumps({"did": did, **fields}).encode() + b"\\n")
for line in connection.makefile():
    order = json.loads(line)
    if order["do"] == "start":
        with open(f"TOP/new{number}", "w") as file:
            json.dump({**order, "pid": os.getpid()}, file)
        os.rename(f"TOP/new{number}", f"TOP/order{number}")
        if plan["silent"] != "start":
            tell("resolved", digest=plan["digest"])
            tell("ready", prefix=[str(number)], program="/p", set={}, unset=[], digest=plan["digest"],
                 lock=plan["lock"], how="mounted", mount=["/journal", "/control"], source_s=0.0, root_s=0.0,
                 has_user_namespace=False, notes=[])
        for answer in plan.get("more", []):
            tell(**answer)
    elif order["do"] == "show-from":
        with open(f"TOP/shown{number}", "w") as file:
            json.dump(order, file)
        if plan["silent"] == "show-from":
            continue
        tell("shown-from", address=order["address"], why=plan.get("hidden", ""))
    elif order["do"] == "hide":
        with open(f"TOP/hidden{number}", "w") as file:
            json.dump(order, file)
        if plan["silent"] != "hide":
            tell("hidden", why=plan.get("stays", ""))
    elif order["do"] == "show" and plan["silent"] != "show":
        tell("shown", number=order["number"], missing=[])
"""


class Bed(ServiceBed):
    """A node's image on a loop of its own, with the keepers of a plan."""

    def __init__(self, top: Path, *words: str) -> None:
        super().__init__(top)
        self.opened: list[RankProgram] = []
        self.failed: list[str] = []
        self.said: list[str] = []
        self.digests: list[str] = []
        self.lost: list[int] = []  # how often it had been opened by then
        events = ImageEvents(
            self.digests.append,
            self.opened.append,
            lambda: self.lost.append(len(self.opened)),
            self.failed.append,
            lambda _: None,
            lambda _: None,
            lambda _: None,
            self.said.append,
            self.said.append,
            lambda _: None,
        )
        spec = build_spec(parse(["--image", "/trees/x", *words, __file__], OMP), OMP)
        self.image = NodeImage(self.loop, spec, (), events)

    def begin(self, *plan: dict[str, Any]) -> None:
        self.plan([{"digest": FIRST, "lock": "", "silent": "", **each} for each in plan])
        self.image.begin([])

    def kill(self, number: int) -> None:
        os.kill(self.order(number)["pid"], signal.SIGKILL)


@pytest.fixture
def make_bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Bed]]:
    beds: list[Bed] = []
    install(SERVICE, tmp_path, monkeypatch)

    def make(*words: str) -> Bed:
        beds.append(Bed(tmp_path, *words))
        return beds[-1]

    yield make
    for bed in beds:
        bed.image.close()
        bed.loop.close()


def is_free(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


def test_an_image_that_is_opened_again_is_the_same_tree(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed()
    bed.begin({}, {}, {"digest": SECOND})
    assert bed.order(0)["digest"] == ""
    bed.until(lambda: len(bed.opened) == 1)
    bed.kill(0)
    assert bed.order(1)["digest"] == FIRST, "whatever the URL means by now"
    bed.until(lambda: len(bed.opened) == 2)
    bed.kill(1)
    bed.until(lambda: bed.failed)
    (why,) = bed.failed
    assert f"its tree is now {SECOND}, not {FIRST}" in why and len(bed.opened) == 2


@pytest.mark.parametrize(
    "answer",
    [{"did": "shown", "number": 1}, {"did": "resolved", "digest": 3}, {"did": "statistics", "found": []}],
)
def test_a_service_whose_answer_is_not_valid_is_replaced(
    make_bed: Callable[..., Bed], answer: dict[str, object]
) -> None:
    bed = make_bed()
    bed.begin({"more": [answer]}, {})
    bed.until(lambda: len(bed.opened) == 2)
    assert bed.said == ["reopening the image: the image service failed: it sent an invalid message"]
    assert bed.failed == []


def test_answers_to_no_question_change_nothing(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed()
    last = {"did": "said", "text": "last"}
    bed.begin({"more": [{"did": "shown", "number": 7, "missing": []}, {"did": "hidden", "why": "busy"}, last]})
    bed.until(lambda: bed.said)
    assert bed.said == ["last"] and bed.image.is_open and len(bed.opened) == 1


def test_a_directory_that_is_written_to_is_not_below_two_roots(
    make_bed: Callable[..., Bed], tmp_path: Path
) -> None:
    directory = tmp_path / "upper"
    directory.mkdir()
    bed = make_bed("--image-writable", os.fspath(directory))
    bed.begin({}, {})
    bed.until(lambda: bed.opened)
    assert is_free(directory), "it is the keeper's to hold"
    first: list[list[str]] = []
    bed.image.show([], first.append)
    bed.until(lambda: first)  # ranks may be started
    other = os.open(directory, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)  # the end of what held it takes a moment
    bed.kill(0)
    bed.until(lambda: bed.said)
    assert "before the next start of ranks" in bed.said[0] and bed.image.is_open
    os.close(other)
    bed.until(lambda: not is_free(directory))
    run_for(bed.loop, 0.3)
    assert not (tmp_path / "order1").exists() and not is_free(directory), "ranks still write to it"
    assert bed.lost == [1]
    shown: list[list[str]] = []
    bed.image.show([], shown.append)
    assert not bed.image.is_open
    bed.until(lambda: shown)
    assert shown == [[]] and [each.prefix for each in bed.opened] == [("0",), ("1",)]
    assert bed.order(1)["writable"] == os.fspath(directory) and is_free(directory)


def opened_with_directory(make_bed: Callable[..., Bed], above: Path) -> Bed:
    """An image that is open, with a folder for what is written in it."""
    directory = above / "upper"
    directory.mkdir()
    bed = make_bed("--image-writable", os.fspath(directory))
    bed.begin({}, {})
    bed.until(lambda: bed.opened)
    return bed


def test_a_directory_that_no_rank_has_used_is_opened_again_at_once(
    make_bed: Callable[..., Bed], tmp_path: Path
) -> None:
    bed = opened_with_directory(make_bed, tmp_path)
    bed.kill(0)
    bed.until(lambda: len(bed.opened) == 2)
    assert bed.lost == [1]


def test_one_that_waits_for_ranks_is_opened_for_others_as_well(
    make_bed: Callable[..., Bed], tmp_path: Path
) -> None:
    bed = opened_with_directory(make_bed, tmp_path)
    bed.image.show([], lambda _: None)
    bed.image.open_again()  # it is open
    bed.until(lambda: not bed.image._showing)
    bed.kill(0)
    bed.until(lambda: bed.lost)
    bed.image.open_again()
    bed.until(lambda: len(bed.opened) == 2)


def test_an_environment_is_shown_in_an_image_that_was_lost(make_bed: Callable[..., Bed], tmp_path: Path) -> None:
    directory = tmp_path / "upper"
    directory.mkdir()
    bed = make_bed("--image-writable", os.fspath(directory))
    bed.begin({}, {}, {})
    bed.until(lambda: bed.opened)
    shown: list[list[str]] = []
    bed.image.show([], shown.append)
    bed.until(lambda: shown)
    bed.kill(0)
    bed.until(lambda: bed.said)
    found: list[tuple[str, int]] = []
    bed.image.show_from("door", ["/t"], lambda why: found.append((why, len(bed.opened))))
    bed.until(lambda: found)
    assert found == [("", 2)], "of the image that is opened by then"
    bed.kill(1)
    bed.until(lambda: len(bed.said) == 2)
    open_then: list[bool] = []
    bed.image.show([], lambda _: open_then.append(bed.image.is_open and len(bed.opened) == 3))
    bed.until(lambda: open_then)
    assert open_then == [True], "the environment is shown first"


def test_a_service_that_does_not_show_an_environment(
    make_bed: Callable[..., Bed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image, "SHOW_SILENCE_S", 0.3)
    bed = make_bed()
    bed.begin({"silent": "show-from"}, {})
    bed.until(lambda: bed.opened)
    why: list[str] = []
    bed.image.show_from("door", ["/t"], why.append)
    bed.until(lambda: why)
    assert why == [""] and len(bed.opened) == 2 and "sent no message for 0.3 s" in bed.said[0]


def test_the_files_stay_while_no_service_holds_them(make_bed: Callable[..., Bed], tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    bed = make_bed()
    bed.begin({"lock": os.fspath(lock)}, {"lock": os.fspath(lock), "silent": "start"})
    bed.until(lambda: bed.opened)
    assert not is_free(lock)
    bed.kill(0)
    bed.order(1)
    assert not is_free(lock)
    bed.image.close()
    assert is_free(lock)


def test_a_service_that_says_nothing(make_bed: Callable[..., Bed], monkeypatch: pytest.MonkeyPatch) -> None:
    tune(monkeypatch, launcher__image_silence_s=0.5)
    bed = make_bed()
    bed.begin({"silent": "start"})
    pid = bed.order(0)["pid"]
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)  # it hears of nothing
    bed.until(lambda: bed.failed)
    assert "has sent no message for 0.5 s" in bed.failed[0] and "\n" not in bed.failed[0]
    wait_until(lambda: not is_running(pid), 5)


def test_a_service_that_does_not_show(make_bed: Callable[..., Bed], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "SHOW_SILENCE_S", 0.3)
    bed = make_bed()
    bed.begin({"silent": "show"}, {})
    bed.until(lambda: bed.opened)
    run_for(bed.loop, 0.5)
    assert bed.image.is_open, "it owes nothing"
    shown: list[list[str]] = []
    bed.image.show(["/x"], shown.append)
    bed.until(lambda: shown)
    assert shown == [[]] and len(bed.opened) == 2 and "sent no message for 0.3 s" in bed.said[0]


def test_mounts_are_shown_again_in_an_image_that_is_opened_again(
    make_bed: Callable[..., Bed], tmp_path: Path
) -> None:
    bed = make_bed()
    bed.begin({}, {}, {"hidden": "no door"})
    bed.until(lambda: bed.opened)
    assert bed.digests == [FIRST], "before it is open"
    why: list[str] = []
    bed.image.show_from("door", ["/t"], why.append)
    bed.until(lambda: why)
    bed.kill(0)
    bed.until(lambda: len(bed.opened) == 2)
    wanted = {"do": "show-from", "address": "door", "folders": ["/t"]}
    assert json.loads((tmp_path / "shown1").read_text()) == wanted, "before anybody is told that it is open"
    assert why == ["", ""]
    bed.kill(1)
    bed.until(lambda: len(bed.opened) == 3)
    assert why == ["", "", "no door"], "who mounted them is asked for another way"


def test_what_is_hidden_is_not_shown_again(make_bed: Callable[..., Bed], tmp_path: Path) -> None:
    bed = make_bed()
    bed.begin({}, {})
    bed.until(lambda: bed.opened)
    done: list[str] = []
    bed.image.hide(lambda: done.append("nothing was shown"))
    assert done == ["nothing was shown"], "at once"
    bed.image.show_from("door", ["/t"], done.append)
    bed.until(lambda: len(done) == 2)
    bed.image.hide(lambda: done.append("hidden"))
    assert len(done) == 2, "when it is so"
    bed.until(lambda: len(done) == 3)
    assert json.loads((tmp_path / "hidden0").read_text()) == {"do": "hide", "folders": ["/t"]}
    bed.kill(0)
    bed.until(lambda: len(bed.opened) == 2)
    run_for(bed.loop, 0.2)
    assert done == ["nothing was shown", "", "hidden"] and not (tmp_path / "shown1").exists()


@pytest.mark.parametrize("plan", [{"stays": "busy"}, {"silent": "hide"}])
def test_an_image_that_cannot_hide_something_is_opened_again(
    make_bed: Callable[..., Bed], monkeypatch: pytest.MonkeyPatch, plan: dict[str, str]
) -> None:
    monkeypatch.setattr(image, "SHOW_SILENCE_S", 0.3)
    bed = make_bed()
    bed.begin(plan, {})
    bed.until(lambda: bed.opened)
    bed.image.show_from("door", ["/t"], lambda _: None)
    done: list[int] = []
    bed.image.hide(lambda: done.append(len(bed.opened)))
    bed.until(lambda: done and len(bed.opened) == 2)
    assert done == [1] and len(bed.said) == 1


def test_one_that_is_opened_again_does_not_wait_for_what_is_hidden(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed()
    bed.begin({}, {"silent": "show-from"})
    bed.until(lambda: bed.opened)
    bed.image.show_from("door", ["/t"], lambda _: None)
    bed.kill(0)
    bed.until((bed.top / "shown1").exists)
    assert len(bed.opened) == 1
    done: list[int] = []
    bed.image.hide(lambda: done.append(len(bed.opened)))
    bed.until(lambda: done)
    assert done == [2] and bed.image.is_open


def test_an_image_that_could_not_be_read_is_opened_in_another_way_before_the_next_attempt(
    make_bed: Callable[..., Bed],
) -> None:
    bed = make_bed()
    bed.begin({}, {})
    bed.until(lambda: bed.opened)
    bed.image.unreadable("block 7 has the wrong bytes", is_damage=True)
    answers: list[list[str]] = []
    bed.image.show([], answers.append)
    bed.until(lambda: answers)
    assert len(bed.opened) == 1, "what is damaged cannot be unpacked either"
    bed.image.unreadable("block 7 did not come", is_damage=False)
    bed.image.show([], answers.append)
    assert bed.order(1)["avoid_mount"] == "block 7 did not come"
    bed.until(lambda: len(answers) == 2)
    assert len(bed.opened) == 2
    bed.image.unreadable("block 7 did not come", is_damage=False)  # it was mounted all the same
    bed.image.show([], answers.append)
    bed.until(lambda: len(answers) == 3)
    assert len(bed.opened) == 2 and bed.failed == []


def test_an_image_that_is_lost_again_and_again_is_opened_in_another_way(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed()
    bed.begin(*[{}] * (image.MAX_SERVICES + 1))
    for number in range(image.MAX_SERVICES):
        bed.until(lambda: len(bed.opened) == number + 1)  # noqa: B023
        bed.kill(number)
    bed.until(lambda: len(bed.opened) == image.MAX_SERVICES + 1)
    assert "lost repeatedly" in bed.order(image.MAX_SERVICES)["avoid_mount"] and bed.failed == []
