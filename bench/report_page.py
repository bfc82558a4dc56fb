"""Pictures of the page of `bootseer report`: `python -m bench.report_page DIRECTORY` (needs chromium).

Jobs of 4 and of 8,000 ranks, light and dark, whole and zoomed. Prints how long each page took to come up. What the
page throws, logs as an error or asks the network for ends it with status 1.
"""

from __future__ import annotations

import os
import sys

from bench.report_browser import Browser
from bench.report_job import Plan, Planted, write_job
from bootseer.cli import report_job
from bootseer.report.compare import compare
from bootseer.report.compare_page import make_comparison_page
from bootseer.report.page import make_page
from bootseer.report.report import make_report

JOBS = {
    "4": Plan(nodes=2, ranks=2, run_id="llama-8b-sft", planted=(Planted("import", 6.0, 1, 1),)),
    "8000": Plan(
        nodes=1000,
        ranks=8,
        run_id="pretrain-70b",
        planted=(Planted("env", 36.0, 17), Planted("import", 12.0, 633, 5), Planted("checkpoint", 9.0, 402, 1)),
        heartbeats=0,
    ),
}

BEFORE = Plan(
    nodes=2, ranks=2, run_id="llama-8b-sft-plain", stages={name: took * 3 for name, took in Plan().stages.items()}
)


def make_pages(directory: str) -> dict[str, str]:
    """One page a job."""
    pages = {}
    for name, plan in JOBS.items():
        job = report_job.load(write_job(os.path.join(directory, f"job-{name}"), plan))
        pages[name] = os.path.join(directory, f"{name}.html")
        report_job.write(pages[name], make_page(job.attempts[0], make_report(job, 0)))
    before = report_job.load(write_job(os.path.join(directory, "job-before"), BEFORE))
    after = report_job.load(os.path.join(directory, "job-4"))
    pages["compared"] = os.path.join(directory, "compared.html")
    found = compare(make_report(before, 0), make_report(after, 0))
    report_job.write(pages["compared"], make_comparison_page(found))
    return pages


def main(argv: list[str]) -> int:
    """Makes the pictures; returns the exit status."""
    if len(argv) != 1 or argv[0].startswith("-"):
        print("usage: python -m bench.report_page FOLDER", file=sys.stderr)
        return 2
    directory = argv[0]
    os.makedirs(directory, exist_ok=True)
    pages = make_pages(directory)
    with Browser() as browser:
        for scheme in ("light", "dark"):
            browser.prefer(scheme)
            for name, path in pages.items():
                took_s = browser.open(path)
                print(f"{name} ranks, {scheme}: {os.path.getsize(path) / 1e6:.2f} MB, up after {took_s:.2f} s")
                browser.shoot(os.path.join(directory, f"{name}-{scheme}.png"), whole=True)
        browser.prefer("light")
        browser.open(pages["8000"])
        browser.fill("find", "node0017")
        left, top, width, height = browser.place("lanes")
        browser.mouse("mouseMoved", left + width * 0.5, top + height * 0.45)
        browser.shoot(os.path.join(directory, "8000-found.png"))
        browser.resize(420, 900)
        browser.open(pages["4"])
        browser.shoot(os.path.join(directory, "4-narrow.png"), whole=True)
        for problem in browser.problems:
            print(f"problem: {problem}", file=sys.stderr)
        return 1 if browser.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
