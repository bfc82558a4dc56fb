"""An environment in an image, when either of the two is lost: real keepers that say what a test wants."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.parser import parse
from launcher.provision.runtime_env import RuntimeEnvironment, RuntimeEvents
from launcher.ranks.program import RankProgram
from launcher.rendezvous.messages import SetupOrder, SetupReport
from launcher.spec import build_spec
from tests.unit.launcher.planned_keepers import ServiceBed, install
from tests.unit.launcher.ranks.looping import run_for

OMP = {"OMP_NUM_THREADS": "1"}
DIGEST = "1" * 64
# Of an image, or of an environment: each answers its next plan's way, and notes what it is told to do.
SERVICE = """#!PYTHON -IS
import json, os, socket, sys
connection = socket.socket(fileno=os.dup(0))
who = "image" if "bootseer.mounts.sandbox.service" in sys.argv else "setup"
number = sum(name.startswith(f"{who}-order") for name in os.listdir("TOP"))
with open("TOP/plan") as file:
    plans = json.load(file)[who]
plan = plans[min(number, len(plans) - 1)]
def tell(did, **fields):
    connection.sendall(json.dumps({"did": did, **fields}).encode() + b"\\n")
def ready(how, prefix=()):
    tell("ready", how=how, key="k", tree="t", prefix=prefix, targets=["/t"], imports=[], python="",
         setup_s=1.0, capture_s=0.1, is_publishing=False)
with open(f"TOP/{who}-order{number}", "w") as file:
    file.write(str(os.getpid()))
for line in connection.makefile():
    order = json.loads(line)
    do = order["do"]
    with open("TOP/told", "a") as file:
        file.write(f"{who}{number} {do} {order.get('address', '')}".strip() + "\\n")
    if (who, do) == ("image", "start"):
        tell("resolved", digest="DIGEST")
        tell("ready", prefix=["enter", str(number)], program="/p", set={}, unset=[], digest="DIGEST", lock="",
             how="mounted", source_s=0.0, root_s=0.0, has_user_namespace=False, notes=[])
    elif do == "show-from":
        tell("shown-from", address=order["address"], why=plan.get("hidden", ""))
    elif do == "hide":
        tell("hidden", why="")
    elif (who, do) == ("image", "show"):
        tell("shown", number=order["number"], missing=[])
    elif do == "start":
        tell("looked", key="k", tree="t", why="", is_silent=False)
    elif do == "use":
        tell("fetched", tree="t")
    elif (who, do) == ("setup", "show"):
        ready("mount", ["enter", f"door{number}"]) if "mount" in plan["ways"] else ready("unpack")
    elif do in ("own", "again"):
        for answer in plan.get(do, []):
            tell(**answer)
        if do not in plan:
            ready("installed")
"""


class Bed(ServiceBed):
    """A workplace on a loop of its own, with the keepers of a plan; orders are given by the test."""

    def __init__(self, top: Path, *words: str) -> None:
        super().__init__(top)
        self.known: list[RankProgram] = []
        self.failed: list[str] = []
        self.news: list[str] = []
        self.fallen: list[str] = []
        self.said: list[str] = []

        def ignore(*_: object) -> None:
            """What no test here looks at."""

        def news(each: SetupReport) -> None:
            self.news.append(each.what)

        events = RuntimeEvents(
            coming=ignore,
            hot_imports=ignore,
            known=lambda program, _: self.known.append(program),
            image_failed=self.failed.append,
            setup_failed=lambda news: self.failed.append(news.text),
            setup_news=news,
            image_noted=ignore,
            setup_noted=ignore,
            show_noted=ignore,
            caches_noted=ignore,
            image_figures=ignore,
            fell_back=lambda _, why: self.fallen.append(why),
            said=self.said.append,
            setup_line=ignore,
            complained=ignore,
            mounted=ignore,
        )
        words = ("--image", "/trees/x", "--setup", "true", "--no-keep-caches", *words)
        self.place = RuntimeEnvironment(self.loop, build_spec(parse([*words, __file__], OMP), OMP), (), events)

    def begin(self, *setup: dict[str, Any], image: tuple[dict[str, Any], ...] = ({},)) -> None:
        self.plan({"image": image, "setup": [{"ways": ["mount"], **each} for each in setup or ({},)]})
        self.place.begin([], os.fspath(self.top), None)

    def order(self, do: str) -> None:
        self.place.set_up(SetupOrder(do, "t", ""))

    def show(self) -> None:
        """Until what is kept is in its place."""
        self.until(lambda: "looked" in self.news)
        self.order("use")
        self.until(lambda: "fetched" in self.news)
        self.order("show")
        self.until(lambda: self.known)

    def told(self) -> list[str]:
        return (self.top / "told").read_text().splitlines()

    def kill(self, who: str, number: int) -> None:
        path = self.top / f"{who}-order{number}"
        self.until(path.exists)
        os.kill(int(path.read_text()), signal.SIGKILL)


@pytest.fixture
def make_bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Bed]]:
    beds: list[Bed] = []
    install(SERVICE.replace("DIGEST", DIGEST), tmp_path, monkeypatch)

    def make(*words: str) -> Bed:
        beds.append(Bed(tmp_path, *words))
        return beds[-1]

    yield make
    for bed in beds:
        bed.place.close()
        bed.loop.close()


def test_set_up_does_not_run_below_another_environment(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed()
    bed.begin()
    bed.show()
    bed.order("again")
    bed.until(lambda: len(bed.known) == 2)
    told = bed.told()
    assert told.index("image0 show-from door0") < told.index("image0 hide") < told.index("setup0 again")


def test_what_is_unpacked_is_not_below_what_was_mounted(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed()
    bed.begin({}, {"ways": ["unpack"]})
    bed.show()
    bed.kill("setup", 0)
    bed.until(lambda: len(bed.known) == 2)
    told = bed.told()
    assert told.index("setup1 show") < told.index("image0 hide")
    assert told.count("image0 hide") == 1 and told.count("image0 show-from door0") == 1


def test_what_cannot_be_seen_in_the_image_is_unpacked_and_ranks_run(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed()
    bed.begin({}, {"ways": ["unpack"]}, image=({"hidden": "no door"},))
    bed.show()
    assert bed.fallen == ["the environment is unpacked: no door"] and len(bed.known) == 1
    ready: list[RankProgram] = []
    bed.place.when_known(ready.append)
    assert ready == bed.known


def test_set_up_waits_for_an_image_that_is_lost_while_it_hides(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed()
    bed.begin()
    bed.show()
    bed.kill("image", 0)
    bed.order("again")
    bed.until(lambda: len(bed.known) == 2)
    assert bed.known[1].prefix == ("enter", "1")
    told = bed.told()
    assert not any(line.startswith("image1 show-from") for line in told)
    assert told[told.index("image1 start") :] == ["image1 start", "setup0 image", "setup0 again"]


@pytest.mark.parametrize("has_ranks", [False, True])
def test_set_up_has_an_image_opened_that_would_wait_for_ranks(
    make_bed: Callable[..., Bed], tmp_path: Path, has_ranks: bool
) -> None:
    """Unless ranks run: they write to the same folder."""
    directory = tmp_path / "upper"
    directory.mkdir()
    bed = make_bed("--image-writable", os.fspath(directory))
    bed.begin()
    bed.show()
    started: list[dict[str, str]] = []
    bed.place.make_ready({}, "", started.append, print)
    bed.until(lambda: started)
    if not has_ranks:
        bed.place.attempt_over()
    bed.kill("image", 0)
    bed.until(lambda: any("before the next start of ranks" in line for line in bed.said))
    bed.order("again")
    if has_ranks:
        run_for(bed.loop, 0.3)
        assert not (tmp_path / "image-order1").exists()
        bed.place.attempt_over()
    bed.until(lambda: len(bed.known) >= 2 and bed.place.program is bed.known[-1])
    assert bed.known[-1].prefix == ("enter", "1") and bed.told()[-1] == "setup0 again"


def test_set_up_is_run_where_an_image_does_not_show_again_what_may_only_be_mounted(
    make_bed: Callable[..., Bed],
) -> None:
    bed = make_bed("--env-way", "mount")
    bed.begin(image=({}, {"hidden": "no door"}))
    bed.show()
    bed.kill("image", 0)
    bed.until(lambda: bed.news.count("looked") == 2)
    bed.order("own")
    bed.until(lambda: bed.known[-1].prefix == ("enter", "1"))
    assert bed.fallen == ["the environment cannot be mounted: no door; set-up is run"] and bed.failed == []
    assert bed.told()[-1] == "setup1 own"
