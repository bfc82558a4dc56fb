"""The page of running jobs in a real browser: two nodes that lose a rank and then hang, 8,000 ranks, and axe."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from bench.report_browser import Browser, find_browser
from tests import support
from tests.unit.launcher.serve.made_jobs import Served, made_job, make_columns, make_status, served

pytestmark = [
    pytest.mark.skipif(find_browser() is None and not os.environ.get("CI"), reason="chromium is not installed"),
    pytest.mark.slow,
]
# Begins when it is told to; one rank ends in attempt 0; in attempt 1 one rank waits apart from the others.
LOSE_THEN_HANG = """
import os, sys, time
beat = sys.modules["_bootseer_rank"].heartbeat
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
rank = os.environ["RANK"]

def wait_apart():
    time.sleep(3600)

def wait_for_others():
    time.sleep(3600)

while first and not os.path.exists("begin"):
    time.sleep(0.05)
for step in range(100_000):
    beat(1000 + step, {})
    time.sleep(0.05)
    if first and step == 60 and rank == "3":
        while not os.path.exists("go"):
            time.sleep(0.05)
        sys.exit(7)
    if not first and step == 60 and rank == "2":
        wait_apart()
    if not first and step == 70:
        wait_for_others()
"""
AXE = """
(async () => {
  const found = await axe.run(document, { resultTypes: ["violations"] });
  return found.violations.map((each) => each.id + ": " + each.nodes.map((node) => node.html).join(" | "));
})()
"""


@pytest.fixture
def browser() -> Iterator[Browser]:
    """One a test: Chromium keeps a process for each server that it has seen."""
    with Browser() as browser:
        yield browser


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "rt").mkdir(mode=0o700)
    return {"BOOTSEER_RUNTIME": os.fspath(tmp_path / "rt")}


def visit(browser: Browser, server: Served, path: str = "/", ready: str = "bootseer.updates > 0") -> None:
    browser.visit(f"http://127.0.0.1:{server.port}{path}", f"window.bootseer && {ready}")


def text(browser: Browser, name: str) -> str:
    return str(browser.evaluate(f"document.getElementById('{name}').innerText"))


def violations(browser: Browser) -> list[str]:
    """What axe finds in both colour schemes."""
    found: list[str] = []
    script = resources.files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8")
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        browser.settle()
        browser.evaluate(f"{script}; 1")
        found += [f"{scheme}: {each}" for each in browser.evaluate(AXE)]
    return found


def look_at(browser: Browser, pictures: str, name: str) -> None:
    """Pictures for docs/guide, where that was asked for."""
    for scheme in ("light", "dark") if pictures else ():
        browser.prefer(scheme)
        browser.shoot(os.path.join(pictures, f"dashboard-{name}-{scheme}.png"), whole=True)


def test_two_nodes_lose_a_rank_and_then_hang(
    browser: Browser, bootrun: support.Programs, environ: dict[str, str]
) -> None:
    pictures = os.environ.get("BOOTSEER_PICTURES", "")
    port = support.find_free_port()
    Path(bootrun.dir, "train.py").write_text(LOSE_THEN_HANG)
    words = ("--nnodes", 2, "--rdzv-backend", "c10d", "--rdzv-id", "run7", "--nproc-per-node", 2)
    more: tuple[Any, ...] = ("--rdzv-endpoint", f"localhost:{port}", "--max-restarts", 3, "--log-dir", "logs")
    jobs = [bootrun.start(*words, *more, "--node-rank", node, "train.py", env={**environ}) for node in range(2)]
    sockets = Path(environ["BOOTSEER_RUNTIME"], "jobs")
    support.wait_until(lambda: sockets.is_dir() and len(os.listdir(sockets)) == 2, 60, "both sockets")
    with served(environ) as server:
        visit(browser, server)
        browser.wait("bootseer.shown().ranks.rank.length === 4 && bootseer.report()")
        assert text(browser, "title") == "Job run7"
        assert "attempt 0: 0 of 4 first steps so far" in text(browser, "start-line")
        assert "4 no step yet" in text(browser, "keys")
        assert "furthest behind: rank" in text(browser, "start-line")
        assert "spawn" in text(browser, "steps"), "the path so far"
        look_at(browser, pictures, "start")
        Path(bootrun.dir, "begin").touch()
        browser.wait("document.getElementById('start-line').innerText.includes('all first steps after')")
        assert "4\nranks on 2 nodes" in text(browser, "cards")
        assert "rendezvous" in text(browser, "stages")
        steps = browser.evaluate("bootseer.shown().ranks.steps[0]")
        browser.wait(f"bootseer.shown().ranks.steps[0] > {steps}")  # by itself
        browser.wait("document.getElementById('keys').innerText.includes('4 makes steps')")
        assert violations(browser) == []
        look_at(browser, pictures, "steady")
        Path(bootrun.dir, "go").touch()
        browser.wait("bootseer.shown().attempt === 1 && bootseer.shown().restarts === 1")
        browser.wait("document.getElementById('attempts').innerText.includes('rank 3 on')")
        assert "ended with status 7" in text(browser, "attempts")
        look_at(browser, pictures, "failure")
        browser.wait("bootseer.shown().hang")
        assert "the job hangs" in text(browser, "hang-line")
        browser.wait("document.querySelector('#hangs summary')")
        browser.evaluate("document.querySelector('#hangs details').open = true")
        browser.wait("document.querySelector('#hangs pre').textContent.includes('wait_apart')")
        assert "wait_for_others" in text(browser, "hangs"), "the stacks, in groups"
        browser.wait("document.getElementById('keys').innerText.includes('4 far later than usual')")
        assert violations(browser) == []
        look_at(browser, pictures, "hang")
        for job in jobs:
            job.signal(signal.SIGTERM)
        browser.wait("!bootseer.shown().is_running")
        assert "This job has ended" in text(browser, "stale")
        assert browser.problems == []


def test_eight_thousand_ranks_stay_readable(browser: Browser, environ: dict[str, str]) -> None:
    columns = make_columns(8000, 1000)
    columns["since_step_s"][4321] = 900.0
    columns["process"][77] = "D"
    status = make_status(ranks=8, world_size=8000, nodes=1000)
    with made_job(environ, status, columns) as job, served(environ) as server:
        visit(browser, server)
        times = []
        for _ in range(5):
            before = browser.evaluate("bootseer.updates")
            job.columns = columns = {**columns, "steps": [each + 1 for each in columns["steps"]]}
            browser.wait(f"bootseer.updates > {before}")
            times.append(browser.evaluate("bootseer.lastMs"))
        assert "1 far later than usual" in text(browser, "keys")
        assert "1 stopped, or in the kernel" in text(browser, "keys")
        assert browser.evaluate("document.getElementById('ranks').rows.length") == 65
        browser.evaluate("document.getElementById('grid').focus()")
        browser.press("End")
        assert text(browser, "picked").startswith("rank 7999 on node-999: running")
        assert "ranks 7,937 to 8,000 of 8,000" in text(browser, "ranks-note")
        browser.press("Home")
        browser.press("ArrowRight")
        browser.press("ArrowDown")
        across = browser.evaluate("Math.floor(document.getElementById('cells').clientWidth / 5)")
        chosen = int(text(browser, "picked").split()[1])
        assert 1 < chosen <= across + 1
        browser.evaluate("document.getElementById('earlier').click()") if chosen >= 64 else None
        assert violations(browser) == []
        assert browser.problems == []
    assert sorted(times)[2] < 500, f"far from the 60 ms that the bench shows: {times}"


def test_keys_and_colours(browser: Browser, environ: dict[str, str]) -> None:
    with made_job(environ, make_status()), served(environ) as server:
        browser.prefer("dark")
        visit(browser, server)
        dark = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        browser.evaluate("document.getElementById('theme').click()")
        assert browser.evaluate("getComputedStyle(document.body).backgroundColor") != dark
        assert browser.evaluate("document.documentElement.dataset.theme") == "light"
        reached = []
        for _ in range(6):
            browser.press("Tab")
            reached.append(browser.evaluate("document.activeElement.id || document.activeElement.tagName"))
        assert {"theme", "grid"} <= set(reached)
        assert browser.problems == []


def test_without_javascript_it_is_a_table(browser: Browser, environ: dict[str, str]) -> None:
    with (
        made_job(environ, make_status(standstill="the job hangs", checks=["disk: slow"])),
        served(environ) as server,
    ):
        browser.call("Emulation.setScriptExecutionDisabled", value=True)
        try:
            browser.visit(
                f"http://127.0.0.1:{server.port}/", "document.querySelectorAll('#ranks tr').length === 3"
            )
            shown = str(browser.evaluate("document.body.innerText"))
        finally:
            browser.call("Emulation.setScriptExecutionDisabled", value=False)
        assert "Without JavaScript this page shows the moment" in shown
        for each in ("Job run7", "the job hangs", "disk: slow", "1,010", "1.00 GiB", "running"):
            assert each in shown, each


def test_several_jobs_are_listed(browser: Browser, environ: dict[str, str]) -> None:
    first, second = make_status("a/b", runs_s=99.0), make_status("c")
    with made_job(environ, first), made_job(environ, second), served(environ) as server:
        browser.visit(f"http://127.0.0.1:{server.port}/", "document.querySelectorAll('a').length === 2")
        assert violations(browser) == []
        browser.evaluate("document.querySelector('a').click()")
        browser.wait("window.bootseer && bootseer.updates > 0")
        assert text(browser, "title") == "Job a/b"
        assert browser.problems == []


def test_a_token_is_the_password(browser: Browser, environ: dict[str, str]) -> None:
    """As where a browser asks for it; the stream of events carries it too."""
    with made_job(environ, make_status()), served(environ, b"sixteen-bytes-or-more") as server:
        host = f"127.0.0.1:{server.port}"
        browser.visit(f"http://any:sixteen-bytes-or-more@{host}/", "window.bootseer && bootseer.updates > 0")
        assert text(browser, "title") == "Job run7"
