"""The page of a report in a real browser: it comes up, says what the text says, can be used by keys alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.report_browser import Browser, find_browser
from bench.report_job import Plan, Planted, write_job
from bootseer.cli import report_job
from bootseer.events import Event
from bootseer.report.analysis import analyse_job
from bootseer.report.page import make_page
from bootseer.report.report import Report, make_report
from bootseer.report.text import report_text
from tests.support import wait_until
from tests.unit.bootseer.report.made_jobs import event, in_order, span, started

pytestmark = [
    pytest.mark.skipif(
        find_browser() is None and not os.environ.get("CI"),
        reason="chromium is not installed",
    ),
    pytest.mark.slow,
]
ATTACK = '</script><img src="http://127.0.0.1:9/x" onerror="window.hit=1"><b>'


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


def show(browser: Browser, directory: Path, plan: Plan) -> tuple[Report, float]:
    browser.problems.clear()
    job = report_job.load(write_job(os.fspath(directory), plan))
    report = make_report(job, 0)
    path = directory / "page.html"
    path.write_bytes(make_page(job.attempts[0], report))
    return report, browser.open(os.fspath(path))


def ended_in(attempt: int, status: int) -> list[Event]:
    """An attempt of one rank, and how that ended."""
    later_ns = attempt * 10**11
    events = [
        *span("spawn", 0, 0.1),
        *started(0, 0, 1, 2),
        event(8, None, "instant", "rank_exited", 0, attrs={"status": status}),
    ]
    return [
        each._replace(attempt=attempt, wall_ns=each.wall_ns + later_ns, mono_ns=each.mono_ns + later_ns)
        for each in events
    ]


def text_of(browser: Browser, name: str) -> Any:
    return browser.evaluate(f"document.getElementById('{name}').innerText")


def picture(browser: Browser, name: str = "lanes") -> Any:
    browser.settle()
    return browser.evaluate(f"document.getElementById('{name}').toDataURL()")


def colours(browser: Browser, name: str = "lanes") -> set[tuple[int, ...]]:
    """Those that fill a fair part of a canvas."""
    browser.settle()
    found = browser.evaluate(
        f"(() => {{ const c = document.getElementById('{name}'); const d = c.getContext('2d')"
        ".getImageData(0, 0, c.width, c.height).data; const n = {}; for (let i = 0; i < d.length; i += 4)"
        " { const k = d[i] + ',' + d[i+1] + ',' + d[i+2]; n[k] = (n[k] || 0) + 1; }"
        " return Object.entries(n).filter((e) => e[1] > 150).map((e) => e[0]) })()"
    )
    return {tuple(map(int, each.split(","))) for each in found}


def test_four_ranks(browser: Browser, tmp_path: Path) -> None:
    browser.prefer("light")
    report, _ = show(browser, tmp_path, Plan(nodes=2, ranks=2, planted=(Planted("import", 9, 1, 1),)))
    assert browser.problems == []
    assert text_of(browser, "slow-lines") == "\n".join(report.slow)
    assert f"{report.first_step_s:.1f} s" in text_of(browser, "cards")
    rows = browser.evaluate("[...document.querySelectorAll('#stages tbody tr')].map((row) => row.innerText)")
    assert [row.split("\t")[0].strip() for row in rows] == [row.stage for row in report.stages]
    assert {(0xE8, 0x62, 0x2C), (0x0E, 0x9F, 0x8E)} <= colours(browser)  # import and env are drawn
    assert browser.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_a_picture_that_is_not_shown_takes_no_room(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, Plan(nodes=1, ranks=2))
    assert browser.evaluate("document.getElementById('area').hidden") is True
    assert browser.evaluate("document.getElementById('area').getBoundingClientRect().height") == 0
    hidden = "[...document.querySelectorAll('[hidden]')].filter((each) => each.getBoundingClientRect().height > 0)"
    assert browser.evaluate(f"{hidden}.length") == 0


def test_attempts_and_who_failed_are_shown(browser: Browser, tmp_path: Path) -> None:
    events = [each for attempt, status in ((0, -9), (1, 3), (2, 0)) for each in ended_in(attempt, status)]
    job = analyse_job(in_order(events))
    report = make_report(job, 2)
    path = tmp_path / "page.html"
    path.write_bytes(make_page(job.attempts[2], report))
    browser.problems.clear()
    browser.open(os.fspath(path))
    rows = browser.evaluate("[...document.querySelectorAll('#attempts tbody tr')].map((row) => row.innerText)")
    assert [row.split("\t")[0] for row in rows] == ["0", "1", "2 (shown)"]
    assert [row.split("\t")[-1] for row in rows] == ["1", "1", "0"]
    ended = text_of(browser, "ended")
    assert "attempt 0: rank 0 on a was ended by signal 9" in ended
    assert "attempt 1: rank 0 on a ended with status 3" in ended
    assert "attempt 0: rank 0 on a: SIGKILL after" in report_text(report)
    assert browser.problems == []


def test_light_and_dark(browser: Browser, tmp_path: Path) -> None:
    browser.prefer("dark")
    show(browser, tmp_path, Plan(nodes=2))
    back = "getComputedStyle(document.body).backgroundColor"
    dark = browser.evaluate(back)
    assert sum(map(int, dark[4:-1].split(","))) < 120
    browser.evaluate("document.getElementById('theme').click()")
    assert sum(map(int, browser.evaluate(back)[4:-1].split(","))) > 650
    browser.prefer("light")
    assert browser.evaluate("document.documentElement.dataset.theme") == "light"
    assert browser.problems == []


def test_by_keys_alone(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, Plan(nodes=40, ranks=8))
    browser.evaluate("document.getElementById('lanes').focus()")
    before = picture(browser)
    browser.press("+")
    zoomed = picture(browser)
    assert zoomed != before
    browser.press("ArrowRight")
    assert picture(browser) != zoomed
    browser.press("ArrowDown", shift=True)
    browser.press("0")
    assert picture(browser) == before
    browser.press("ArrowDown")
    assert "agent of node0000" in text_of(browser, "picked") or "rank 0 on node0000" in text_of(browser, "picked")
    browser.press("End")
    assert "on node0039" in text_of(browser, "picked")
    browser.press("Escape")
    assert browser.evaluate("document.getElementById('picked').hidden") is True
    assert browser.problems == []


def test_pointer_and_tables(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, Plan(nodes=3, ranks=2, planted=(Planted("env", 20, 1),)))
    x = y = 0.0

    def is_pointed_at() -> bool:
        """A page that is being laid out may have moved away meanwhile."""
        nonlocal x, y
        left, top, _, _ = browser.place("lanes")
        x, y = left + 300, top + 40
        browser.mouse("mouseMoved", x - 1, y)
        browser.mouse("mouseMoved", x, y)
        return "rank 0 on node0000" in text_of(browser, "tip")

    def is_picked() -> bool:
        if is_pointed_at():
            browser.click(x, y)
        return text_of(browser, "picked").startswith("rank 0 on node0000")

    wait_until(is_pointed_at, 10, "the words at the pointer")
    wait_until(is_picked, 10, "the rank that was picked")
    before = picture(browser)
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-200, modifiers=2)
    assert picture(browser) != before
    assert text_of(browser, "nodes").splitlines()[1].startswith("node0001")  # what stands out first
    browser.evaluate("document.querySelector('#nodes th:first-child button').click()")
    assert text_of(browser, "nodes").splitlines()[1].startswith("node0000")
    browser.evaluate("document.querySelector('#nodes th:first-child button').click()")
    assert text_of(browser, "nodes").splitlines()[1].startswith("node0002")
    browser.evaluate("document.querySelector('#legend button').click()")
    assert browser.evaluate("document.querySelector('#legend button').getAttribute('aria-pressed')") == "true"
    assert browser.problems == []


def test_eight_thousand_ranks(browser: Browser, tmp_path: Path) -> None:
    browser.prefer("light")
    plan = Plan(nodes=1000, ranks=8, planted=(Planted("import", 30, 633, 5),), heartbeats=0)
    _, took_s = show(browser, tmp_path, plan)
    assert took_s < 15
    assert text_of(browser, "lod").startswith("Each line stands for ")
    # The one slow rank is in sight though each line stands for dozens: its import is drawn where others wait.
    assert (0xE8, 0x62, 0x2C) in colours(browser)
    browser.fill("find", "5069")
    assert text_of(browser, "picked").startswith("rank 5069 on node0633")
    assert browser.problems == []


ODD_JOBS = {
    "one rank": [*span("spawn", 0, 0.1), *started(0, 0, 1, 2)],
    "no ranks": [*span("rendezvous", 0, 3), *span("env", 0, None)],
    "died in a stage": [
        *span("spawn", 0, 0.1),
        *started(0, 0, 1),
        *span("import", 1, None, rank=0),
        event(8, None, "instant", "rank_exited", 0, attrs={"status": -9}),
    ],
    "no first steps": [*span("spawn", 0, 0.1), *started(0, 0, 1), *started(1, 0, 1)],
    "all at once": [*span("spawn", 0, 0), *started(0, 0, 0, 0)],
    "no common clock": [
        each._replace(job_ns=None, job_error_ns=None)
        for node, rank in (("a", 0), ("b", 1))
        for each in [*span("env", 0, 4, node=node), *started(rank, 4, 5, 6, node=node)]
    ],
    "a failed stage nobody knows": [
        *[each._replace(error="no <b>disk</b>") for each in span("polish", 0, 2)],
        *span("spawn", 2, 2.1),
        *started(0, 2, 3, 4),
    ],
}


@pytest.mark.parametrize("name", ODD_JOBS)
def test_odd_jobs_come_up(browser: Browser, tmp_path: Path, name: str) -> None:
    browser.problems.clear()
    job = analyse_job(in_order(ODD_JOBS[name]))
    report = make_report(job, 0)
    path = tmp_path / "page.html"
    path.write_bytes(make_page(job.attempts[0], report))
    browser.open(os.fspath(path))
    assert text_of(browser, "slow-lines") == "\n".join(report.slow)
    shown = browser.evaluate("document.body.innerText")
    for note in report.notes:
        assert note in shown
    for each in (*report.open, *report.failed):
        assert each.name in text_of(browser, "troubles")
    browser.evaluate("document.getElementById('lanes').focus()")
    for key in ("ArrowDown", "+", "ArrowDown", "0", "End", "Home"):
        browser.press(key)
    browser.settle()
    assert browser.problems == []


def test_texts_from_outside_run_nothing(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, Plan(nodes=2, run_id=ATTACK, name=ATTACK + "{}", planted=(Planted("env", 30, 1),)))
    assert text_of(browser, "title") == f"Start of {ATTACK}"
    assert browser.evaluate("window.hit === undefined && document.querySelectorAll('img, b b').length === 0")
    assert browser.problems == []
