"""bootrun's side of set-up when its keepers fail or go on: real processes that say what a test wants."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.tuning import DEFAULTS
from launcher.base.stage_span import StageSpan
from launcher.cli.parser import parse
from launcher.provision import environment as setup
from launcher.provision.environment import NodeSetup, ReadyEnvironment, SetupEvents
from launcher.ranks.program import RankProgram
from launcher.rendezvous.messages import SetupOrder, SetupReport
from launcher.spec import build_spec
from tests.support import is_running, tune, wait_until
from tests.unit.launcher.planned_keepers import ServiceBed, install
from tests.unit.launcher.ranks.looping import run_for

OMP = {"OMP_NUM_THREADS": "1"}
# Answers each order by the lines of the plan; notes what it is told to do. Lives on after its input's end if told.
SERVICE = """#!PYTHON -IS
import json, os, socket, time
connection = socket.socket(fileno=os.dup(0))
number = sum(name.startswith("order") for name in os.listdir("TOP"))
with open("TOP/plan") as file:
    plan = json.load(file)[number]
for line in connection.makefile():
    order = json.loads(line)
    with open("TOP/told", "a") as file:
        file.write(order["do"] + "\\n")
    with open("TOP/heard", "a") as file:
        file.write(line)
    if order["do"] == "start":
        with open(f"TOP/new{number}", "w") as file:
            json.dump({**order, "pid": os.getpid()}, file)
        os.rename(f"TOP/new{number}", f"TOP/order{number}")
    for answer in plan.get(order["do"], []):
        if answer == "die":
            os._exit(3)
        if "pause_s" in answer:
            time.sleep(answer["pause_s"])
            continue
        connection.sendall(json.dumps(answer).encode() + b"\\n")
if plan.get("lingers"):
    time.sleep(60)
"""
LOOKED = {"did": "looked", "key": "k", "tree": "", "why": "", "is_silent": False}
READY = {
    "did": "ready",
    "how": "installed",
    "key": "k",
    "tree": "",
    "prefix": [],
    "targets": ["/t"],
    "imports": [],
    "python": "",
    "setup_s": 1.0,
    "capture_s": 0.1,
    "is_publishing": False,
}


class Bed(ServiceBed):
    """A node's set-up on a loop of its own, with the keepers of a plan."""

    def __init__(self, top: Path, *words: str) -> None:
        super().__init__(top)
        self.ready: list[ReadyEnvironment] = []
        self.failed: list[SetupReport] = []
        self.news: list[SetupReport] = []
        self.spans: list[StageSpan] = []
        self.said: list[str] = []
        self.complained: list[str] = []
        events = SetupEvents(
            self.ready.append,
            self.failed.append,
            self.news.append,
            self.spans.append,
            self.said.append,
            self.said.append,
            lambda _: None,
            self.complained.append,
            lambda _: None,
        )
        spec = build_spec(parse(["--setup", "true", *words, __file__], OMP), OMP)
        self.setup = NodeSetup(self.loop, spec, (), events)

    def begin(self, *plan: dict[str, Any]) -> None:
        self.plan(plan)
        self.setup.begin(os.fspath(self.top))

    def told(self) -> list[str]:
        path = self.top / "told"
        return path.read_text().split() if path.exists() else []


@pytest.fixture
def bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Bed]]:
    made: list[Bed] = []
    install(SERVICE, tmp_path, monkeypatch)

    def make(*words: str) -> Bed:
        made.append(Bed(tmp_path, *words))
        return made[-1]

    yield make
    for each in made:
        each.setup.close()
        each.loop.close()


def test_a_store_that_does_not_answer_is_remembered_for_a_while(
    bed: Callable[..., Bed], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bed()
    assert not made.setup.is_store_silent
    made.begin({"start": [{**LOOKED, "is_silent": True}]})
    made.until(lambda: made.news)
    assert made.setup.is_store_silent
    monkeypatch.setattr(setup, "SILENT_FOR_S", 0.0)
    assert not made.setup.is_store_silent


@pytest.mark.parametrize(
    "answer",
    [{"did": "fetched"}, {**LOOKED, "why": 3}, {**READY, "prefix": "text"}, {"text": "of no kind"}],
    ids=["missing", "of another type", "text for a list", "no kind"],
)
def test_a_service_whose_answer_is_not_valid_has_failed(bed: Callable[..., Bed], answer: dict[str, Any]) -> None:
    made = bed()
    made.begin({"start": [answer]}, {"start": [READY]})
    made.until(lambda: made.ready)
    assert made.order(1)["is_plain"] and made.news == [] and made.failed == []
    assert made.said[0] == "the environment service has failed: it sent an invalid message; set-up is run"


def test_orders_reach_it_and_its_news_the_coordinator(bed: Callable[..., Bed]) -> None:
    made = bed()
    made.begin({"start": [LOOKED], "build": [{**READY, "is_publishing": True}, {"did": "published", "tree": "t"}]})
    made.until(lambda: made.news)
    assert made.news == [SetupReport("looked", "k", "", "")]
    assert made.ready == []
    made.setup.carry_out(SetupOrder("build", "", ""))
    made.until(lambda: len(made.news) > 1)
    assert made.setup.is_ready
    assert len(made.ready) == 1
    assert made.news[1:] == [SetupReport("published", "k", "t", "")]
    assert made.spans[0].facts["how"] == "installed"
    order = made.order(0)
    assert order["spec"]["commands"] == ["true"]
    assert order["log_path"] == f"{made.top}/setup.log"
    assert order["is_plain"] is False


def test_service_that_dies_is_followed_by_one_that_only_runs_set_up(bed: Callable[..., Bed]) -> None:
    made = bed()
    made.begin({"start": ["die"]}, {"start": [LOOKED], "own": [READY]})
    assert made.order(1)["is_plain"] is True
    assert "has failed" in made.order(1)["why_plain"]
    made.until(lambda: made.news)
    made.setup.carry_out(SetupOrder("own", "", ""))
    made.until(lambda: made.ready)
    assert any("set-up is run" in line for line in made.said)
    assert made.failed == []


def test_two_services_that_die_are_the_jobs_error(bed: Callable[..., Bed]) -> None:
    made = bed()
    made.begin({"start": ["die"]}, {"start": ["die"]})
    made.until(lambda: made.failed)
    assert "2 times" in made.failed[0].text


def test_set_up_that_fails_shows_the_last_lines_once(bed: Callable[..., Bed]) -> None:
    made = bed("--quiet")
    made.begin({"start": [{"did": "failed", "why": "set-up command 1 of 1 (false)", "tail": ["one", "two"]}]})
    made.until(lambda: made.failed)
    assert made.failed == [SetupReport("failed", "", "", "set-up command 1 of 1 (false)")]
    assert made.complained == ["set-up: one", "set-up: two"]


def test_service_that_publishes_outlives_the_job(bed: Callable[..., Bed]) -> None:
    made = bed()
    made.begin({"start": [LOOKED, {**READY, "is_publishing": True}], "lingers": True})
    made.until(lambda: made.ready)
    pid = made.order(0)["pid"]
    made.setup.close()
    assert is_running(pid)
    assert any("continues publishing" in line for line in made.said)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_service_that_does_not_publish_ends_with_the_job(bed: Callable[..., Bed]) -> None:
    made = bed()
    made.begin({"start": [LOOKED, READY]})
    made.until(lambda: made.ready)
    pid = made.order(0)["pid"]
    made.setup.close()
    wait_until(lambda: not is_running(pid), 5)


def test_publisher_that_dies_is_news_and_no_error(bed: Callable[..., Bed]) -> None:
    made = bed()
    made.begin({"start": [LOOKED, {**READY, "is_publishing": True}, "die"]})
    made.until(lambda: len(made.news) > 1)
    assert made.news[1].what == "unpublished"
    assert made.setup.is_ready and made.failed == []


def test_mount_that_is_lost_is_made_again_without_the_coordinator(bed: Callable[..., Bed]) -> None:
    made = bed()
    mounted = {**READY, "how": "mount", "tree": "t", "prefix": ["enter"]}
    fetched = {"did": "fetched", "tree": "t"}
    made.begin(
        {"start": [{**LOOKED, "tree": "t"}], "use": [fetched], "show": [mounted, {"did": "lost"}]},
        {"start": [{**LOOKED, "tree": "t"}], "use": [fetched], "show": [{**mounted, "prefix": ["again"]}]},
    )
    made.until(lambda: made.news)
    made.setup.carry_out(SetupOrder("use", "t", ""))
    made.until(lambda: len(made.news) == 2)
    made.setup.carry_out(SetupOrder("show", "t", ""))
    made.until(lambda: len(made.ready) == 2)
    assert [program.prefix for program in made.ready] == [("enter",), ("again",)]
    assert [each.what for each in made.news] == ["looked", "fetched"]


def test_service_that_hangs_is_ended(bed: Callable[..., Bed], monkeypatch: pytest.MonkeyPatch) -> None:
    tune(monkeypatch, launcher__environment_silence_s=0.3)
    made = bed("--setup-timeout", "0", "--setup-wait", "0")
    made.begin({"start": []}, {"start": [LOOKED], "own": [READY]})
    pid = made.order(0)["pid"]
    tune(monkeypatch, launcher__environment_silence_s=60.0)  # the next one may start slowly
    made.until(lambda: made.news)
    assert not is_running(pid)
    made.setup.carry_out(SetupOrder("own", "", ""))
    made.until(lambda: made.ready)


def test_service_that_hangs_is_ended_long_before_the_job(
    bed: Callable[..., Bed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ever, with all the time that set-up was given: what is not set-up has no share of it."""
    made = bed("--rdzv-conf", "join_timeout=4.5")
    assert DEFAULTS.launcher.environment_silence_s <= 600 * setup.SILENCE_SHARE * 1.5
    made.begin({"start": []}, {"start": [LOOKED], "own": [READY]})
    made.until(lambda: made.news)
    assert made.order(1)["is_plain"] is True
    assert any("has sent nothing for 1.5 s" in line for line in made.said)
    made.setup.carry_out(SetupOrder("own", "", ""))
    made.until(lambda: made.ready)


@pytest.mark.parametrize("order", ["use", "show"])
def test_service_that_hangs_in_a_restore_is_ended(bed: Callable[..., Bed], order: str) -> None:
    made = bed("--rdzv-conf", "join_timeout=4.5")
    made.begin({"start": [LOOKED], "use": []}, {"start": [LOOKED]})
    made.until(lambda: made.news)
    made.setup.carry_out(SetupOrder(order, "t", ""))
    made.until(lambda: len(made.news) == 2)
    assert [each.what for each in made.news] == ["looked", "looked"]


def test_service_that_waits_for_orders_is_not_silent(bed: Callable[..., Bed]) -> None:
    made = bed("--rdzv-conf", "join_timeout=4.5")
    made.begin({"start": [LOOKED], "own": [READY]})
    made.until(lambda: made.news)
    made.loop.call_later(2, made.setup.carry_out, SetupOrder("own", "", ""))
    made.until(lambda: made.ready)
    assert not made.said[:-1], "it was left alone for longer than it may be silent"


def test_service_that_waits_for_another_process_gets_time_and_the_job_knows(bed: Callable[..., Bed]) -> None:
    made = bed("--rdzv-conf", "join_timeout=4.5")
    made.begin({"start": [{"did": "waiting"}, {"pause_s": 2}, {"did": "waited"}, LOOKED]})
    made.until(lambda: len(made.news) == 2)
    assert [each.what for each in made.news] == ["waiting", "looked"]
    assert made.said == []


def test_damage_is_news_of_its_own_and_the_builder_hears_of_it(bed: Callable[..., Bed]) -> None:
    made = bed()
    damaged = {"did": "unfetched", "why": "block 0 is not what it was", "damaged": "t"}
    made.begin({"start": [{**LOOKED, "tree": "t"}], "use": [damaged], "build": [READY]})
    made.until(lambda: made.news)
    made.setup.carry_out(SetupOrder("use", "t", ""))
    made.until(lambda: len(made.news) == 2)
    assert made.news[1] == SetupReport("damaged", "k", "t", "block 0 is not what it was")
    assert any("block 0 is not what it was" in line for line in made.said)
    made.setup.carry_out(SetupOrder("build", "t", ""))
    made.until(lambda: made.ready)
    assert '"damaged": "t"' in (made.top / "heard").read_text()


IN_IMAGE = RankProgram(
    "/usr/bin/python3", "inside", "fork_server", ("enter", "a"), {"OF": "image"}, ("GONE",), "d" * 64
)


def test_in_an_image_it_looks_when_the_digest_is_known_and_runs_set_up_when_it_is_open(
    bed: Callable[..., Bed],
) -> None:
    made = bed("--image", "/trees/x", "--image-python", "/usr/bin/python3", "--image-env", "MINE=1")
    made.begin({"start": [LOOKED], "build": [READY]})
    made.setup.image_resolved("d" * 64)
    made.until(lambda: made.news)
    image = made.order(0)["image"]
    assert image == {"digest": "d" * 64, "python": "/usr/bin/python3", "environ": {"MINE": "1"}}
    made.setup.carry_out(SetupOrder("build", "", ""))
    made.setup.image_opened(IN_IMAGE)
    made.until(lambda: made.ready)
    assert made.told() == ["start", "image", "build"], "set-up waited until it was open"
    assert made.ready == [ReadyEnvironment((), ("/t",), "", ())]
    heard = [json.loads(line) for line in (made.top / "heard").read_text().splitlines()]
    assert heard[1] == {
        "do": "image",
        "prefix": ["enter", "a"],
        "set": {"OF": "image"},
        "unset": ["GONE"],
        "python": "/usr/bin/python3",
    }


FAILED = {"did": "failed", "why": "ended with status 126", "tail": [], "could_enter": False}


def in_image(made: Bed, *plan: dict[str, Any]) -> None:
    """Until set-up runs there."""
    made.begin(*plan)
    made.setup.image_resolved("d" * 64)
    made.setup.image_opened(IN_IMAGE)
    made.until(lambda: made.news)
    made.setup.carry_out(SetupOrder("build", "", ""))


def test_set_up_whose_image_was_lost_is_run_once_more_in_the_next_one(bed: Callable[..., Bed]) -> None:
    made = bed("--image", "/trees/x")
    in_image(
        made,
        {"start": [LOOKED], "build": [{"did": "setup-began"}, {"pause_s": 0.3}, FAILED]},
        {"start": [LOOKED], "own": [READY]},
    )
    made.setup.image_lost()
    made.until(lambda: len(made.news) == 2)
    assert made.order(1)["is_plain"] is True and made.failed == []
    assert [line for line in made.said if "run again" in line] == [
        "set-up is run again once the image is reopened: its image was lost while set-up ran"
    ]
    assert not made.setup.wants_image
    made.setup.carry_out(SetupOrder("own", "", ""))
    assert made.setup.wants_image
    run_for(made.loop, 0.2)
    assert made.told()[-1] == "start", "it waits for the next image"
    made.setup.image_opened(IN_IMAGE._replace(prefix=("enter", "b")))
    made.until(lambda: made.ready)
    assert made.told()[-2:] == ["image", "own"] and not made.setup.wants_image
    assert '["enter", "b"]' in (made.top / "heard").read_text()


@pytest.mark.parametrize("is_lost", [True, False])
def test_set_up_fails_before_it_is_known_that_its_image_was_lost(
    bed: Callable[..., Bed], monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    monkeypatch.setattr("launcher.provision.environment.LOST_KNOWN_S", 60.0 if is_lost else 0.05)
    made = bed("--image", "/trees/x")
    in_image(made, {"start": [LOOKED], "build": [FAILED]}, {"start": [LOOKED], "own": [READY]})
    if is_lost:
        made.until(lambda: made.setup._image_loss.is_possible)
        made.setup.image_lost()
        made.until(lambda: len(made.news) == 2)
        assert made.failed == [] and any("run again" in line for line in made.said)
    else:
        made.until(lambda: made.failed)
        assert [each.text for each in made.failed] == ["ended with status 126"]
        assert not (made.top / "order1").exists()


def test_set_up_is_run_again_only_once(bed: Callable[..., Bed]) -> None:
    made = bed("--image", "/trees/x")
    again = {"start": [LOOKED], "own": [{"pause_s": 0.3}, FAILED]}
    in_image(made, {"start": [LOOKED], "build": [{"pause_s": 0.3}, FAILED]}, again, again)
    made.setup.image_lost()
    made.setup.image_opened(IN_IMAGE)
    made.until(lambda: len(made.news) == 2)
    made.setup.carry_out(SetupOrder("own", "", ""))
    made.setup.image_lost()
    made.setup.image_opened(IN_IMAGE)
    made.until(lambda: made.failed)
    assert [each.text for each in made.failed] == ["ended with status 126"]
    assert not (made.top / "order2").exists()


@pytest.mark.parametrize("is_lost", [True, False])
def test_set_up_that_fails_by_itself_is_not_run_again(bed: Callable[..., Bed], is_lost: bool) -> None:
    made = bed("--image", "/trees/x")
    made.begin({"start": [LOOKED], "build": [{"pause_s": 0.3}, {**FAILED, "could_enter": is_lost}]})
    made.setup.image_resolved("d" * 64)
    made.setup.image_opened(IN_IMAGE)
    made.setup.image_lost()  # before set-up was to run
    made.setup.image_opened(IN_IMAGE)
    made.until(lambda: made.news)
    made.setup.carry_out(SetupOrder("build", "", ""))
    if is_lost:
        made.setup.image_lost()
    made.until(lambda: made.failed)
    assert not (made.top / "order1").exists()


def test_set_up_waits_for_the_next_image(bed: Callable[..., Bed]) -> None:
    made = bed("--image", "/trees/x")
    made.begin({"start": [LOOKED], "build": [READY]})
    made.setup.image_resolved("d" * 64)
    made.setup.image_opened(IN_IMAGE)
    made.until(lambda: made.news)
    made.setup.image_lost()
    made.setup.carry_out(SetupOrder("build", "", ""))
    run_for(made.loop, 0.2)
    assert made.told() == ["start", "image"]
    made.setup.image_opened(IN_IMAGE)
    made.until(lambda: made.ready)
    assert made.told() == ["start", "image", "image", "build"]


def take_kept(made: Bed) -> None:
    """Until what is kept is in its place."""
    made.setup.image_resolved("d" * 64)
    made.until(lambda: made.news)
    made.setup.carry_out(SetupOrder("use", "t", ""))
    made.until(lambda: len(made.news) == 2)
    made.setup.carry_out(SetupOrder("show", "t", ""))
    made.until(lambda: made.ready)


def test_what_is_kept_needs_no_open_image(bed: Callable[..., Bed]) -> None:
    made = bed("--image", "/trees/x")
    fetched = {"did": "fetched", "tree": "t"}
    made.begin({"start": [{**LOOKED, "tree": "t"}], "use": [fetched], "show": [{**READY, "how": "unpack"}]})
    take_kept(made)
    assert made.told() == ["start", "use", "show"]


@pytest.mark.parametrize("words", [(), ("--setup-target", "/opt/x/env")])
def test_old_directories_of_ours_go_after_the_first_step_also_where_nothing_is_mounted(
    bed: Callable[..., Bed], words: tuple[str, ...]
) -> None:
    made = bed("--image", "/trees/x", *words)
    made.begin({"start": [{**LOOKED, "tree": "t"}], "show": [READY]})
    made.setup.image_resolved("d" * 64)
    made.until(lambda: made.news)
    made.setup.first_step_seen()  # too early: it would end what the keeper is at
    made.setup.carry_out(SetupOrder("show", "t", ""))
    made.until(lambda: made.ready)
    made.setup.first_step_seen()
    made.setup.touched([], [])
    made.setup.carry_out(SetupOrder("show", "t", ""))
    expected = ["start", "show", *(() if words else ("first-step",)), "show"]
    made.until(lambda: len(made.told()) == len(expected))
    assert made.told() == expected


MOUNTED = {
    "start": [{**LOOKED, "tree": "t"}],
    "use": [{"did": "fetched", "tree": "t"}],
    "show": [{**READY, "how": "mount", "prefix": ["enter", "b"], "tree": "t"}],
}


def mount_in_image(made: Bed, *later: dict[str, Any]) -> None:
    """Until it is mounted; `later`: what its next keepers do."""
    made.begin(MOUNTED, *later)
    made.setup.image_resolved("d" * 64)
    made.setup.image_opened(IN_IMAGE)
    made.until(lambda: made.news)
    made.setup.carry_out(SetupOrder("use", "t", ""))
    made.until(lambda: len(made.news) == 2)
    made.setup.carry_out(SetupOrder("show", "t", ""))
    made.until(lambda: made.ready)


UNFETCHED = {"start": MOUNTED["start"], "use": [{"did": "unfetched", "why": "no store"}]}


@pytest.mark.parametrize(
    ("ways", "unpacks", "line"),
    [
        ("mount", [], "the environment cannot be mounted: no door; set-up is run"),
        ("there,mount", [], "the environment cannot be mounted: no door; set-up is run"),
        ("mount,unpack", [UNFETCHED], "the environment cannot be unpacked either: no store; set-up is run"),
    ],
)
def test_set_up_is_run_where_what_was_mounted_cannot_be_had_in_another_way(
    bed: Callable[..., Bed], ways: str, unpacks: list[dict[str, Any]], line: str
) -> None:
    made = bed("--image", "/trees/x", "--env-way", ways)
    mount_in_image(made, *unpacks, {"start": [LOOKED], "own": [READY]})
    made.setup.without_mount("no door")
    made.until(lambda: len(made.news) == 3)
    assert made.order(1 + len(unpacks))["is_plain"] is True
    made.setup.carry_out(SetupOrder("own", "", ""))
    made.until(lambda: len(made.ready) == 2)
    assert made.ready[1].prefix == () and made.failed == []
    assert made.said.count(line) == 1


@pytest.mark.parametrize(("ways", "unpacks"), [("mount", []), ("mount,unpack", [UNFETCHED])])
def test_with_strict_it_is_an_error(bed: Callable[..., Bed], ways: str, unpacks: list[dict[str, Any]]) -> None:
    made = bed("--image", "/trees/x", "--strict", "--env-way", ways)
    mount_in_image(made, *unpacks)
    made.setup.without_mount("no door")
    made.until(lambda: made.failed)
    assert made.failed[0].text.startswith("the environment cannot be ") and len(made.failed) == 1


def test_one_that_cannot_be_seen_in_the_image_is_unpacked(bed: Callable[..., Bed]) -> None:
    made = bed("--image", "/trees/x")
    looked, fetched = {**LOOKED, "tree": "t"}, {"did": "fetched", "tree": "t"}
    ready = {**READY, "how": "mount", "prefix": ["enter", "b"], "tree": "t"}
    made.begin(
        {"start": [looked], "use": [fetched], "show": [ready]},
        {"start": [looked], "use": [fetched], "show": [{**READY, "how": "unpack", "tree": "t"}]},
    )
    take_kept(made)
    assert "mount" in made.order(0)["ways"]
    made.setup.without_mount("no door")
    made.until(lambda: len(made.ready) == 2)
    assert made.ready[1].prefix == ()
    assert "mount" not in made.order(1)["ways"] and "the environment is unpacked: no door" in made.said


# ---- mounts that cannot be read --------------------------------------------------------------------------------

T_FETCHED = {"did": "fetched", "tree": "t"}
T_FOUND = {**LOOKED, "tree": "t"}
T_MOUNTED = {**READY, "how": "mount", "tree": "t", "prefix": ["enter"], "mount": ["/journal", "/control"]}


def mounted_bed(bed: Callable[..., Bed], *plan: dict[str, Any]) -> Bed:
    made = bed()
    made.begin({"start": [T_FOUND], "use": [T_FETCHED], "show": [T_MOUNTED]}, *plan)
    made.until(lambda: made.news)
    for do in ("use", "show"):
        made.setup.carry_out(SetupOrder(do, "t", ""))
    made.until(lambda: made.ready)
    return made


def test_a_mount_that_could_not_be_read_is_news_and_had_again_when_that_is_ordered(
    bed: Callable[..., Bed],
) -> None:
    again = {"start": [T_FOUND], "use": [T_FETCHED], "show": [{**T_MOUNTED, "prefix": ["again"]}]}
    made = mounted_bed(bed, again, again)
    count = len(made.news)
    for number in (1, 2):
        made.setup.unreadable("block 7")
        assert made.news[-1] == SetupReport("unreadable", "k", "t", "block 7")
        made.setup.carry_out(SetupOrder("use", "t", ""))
        assert not made.setup.is_ready
        assert ("mount" in made.order(number)["ways"]) == (number == 1), "not for ever"
        made.until(lambda: made.news[-1].what == "fetched")
        made.setup.carry_out(SetupOrder("show", "t", ""))
        made.until(lambda: made.setup.is_ready)
        assert [each.what for each in made.news[count:]] == ["unreadable", "fetched", "ready"]
        count = len(made.news)
    assert made.ready[-1].prefix == ("again",)


def test_nodes_begin_again_where_what_is_kept_is_damaged(bed: Callable[..., Bed]) -> None:
    damaged = {"did": "unfetched", "why": "block 7", "damaged": "t"}
    made = mounted_bed(
        bed, {"start": [T_FOUND], "use": [damaged]}, {"start": [T_FOUND], "build": [{**READY, "tree": "t2"}]}
    )
    made.setup.unreadable("block 7")
    made.setup.carry_out(SetupOrder("use", "t", ""))
    made.until(lambda: made.news[-1].what == "damaged")
    made.setup.carry_out(SetupOrder("renew", "t", ""))
    assert made.order(2)["damaged"] == "t"
    made.until(lambda: made.news[-1].what == "looked")
    made.setup.carry_out(SetupOrder("build", "t", ""))
    made.until(lambda: made.setup.is_ready)
    assert made.news[-1].what == "ready"


def test_what_lies_in_its_place_cannot_be_unreadable(bed: Callable[..., Bed]) -> None:
    made = bed()
    made.begin({"start": [LOOKED, READY]})
    made.until(lambda: made.ready)
    count = len(made.news)
    made.setup.unreadable("block 7")
    assert len(made.news) == count


def test_a_mount_that_is_lost_again_and_again_is_unpacked(bed: Callable[..., Bed]) -> None:
    lost = {"start": [T_FOUND], "use": [T_FETCHED], "show": [T_MOUNTED, {"did": "lost"}]}
    unpacked = {"start": [T_FOUND], "use": [T_FETCHED], "show": [{**READY, "how": "unpack", "tree": "t"}]}
    made = mounted_bed(bed, *[lost] * (setup.MAX_SERVICES - 1), unpacked)
    os.kill(made.order(0)["pid"], signal.SIGKILL)
    made.until(lambda: made.spans[-1].facts["how"] == "unpack")
    assert made.failed == []
    assert "mount" not in made.order(setup.MAX_SERVICES)["ways"]


def test_a_mount_that_is_lost_and_ordered_again_at_once_is_had_once(bed: Callable[..., Bed]) -> None:
    """The coordinator waits for the word that it is there."""
    again = {"start": [T_FOUND], "use": [T_FETCHED], "show": [{**T_MOUNTED, "prefix": ["again"]}]}
    made = mounted_bed(bed, {"start": []}, again)
    made.setup.unreadable("the process that serves its files has ended")
    os.kill(made.order(0)["pid"], signal.SIGKILL)
    made.order(1)
    made.setup.carry_out(SetupOrder("use", "t", ""))
    made.until(lambda: made.news[-1].what == "fetched")
    made.setup.carry_out(SetupOrder("show", "t", ""))
    made.until(lambda: made.setup.is_ready)
    assert made.news[-1].what == "ready" and made.ready[-1].prefix == ("again",)
