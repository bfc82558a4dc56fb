"""`bootseer report DIR [OTHER]` and `bootseer report fleet DIR...`: where the time of starts went.

In: a command line. Out: text or one JSON object on stdout, files where flags name them, errors on stderr, an exit
status (docs/errors.md). What is computed is in bootseer.startup.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from bootseer.cli import report_fleet, report_job, running
from bootseer.cli.image_words import Json
from bootseer.errors import UsageError

if TYPE_CHECKING:
    from bootseer.startup.analysis import Analysis
    from bootseer.startup.report import Report

HELP = """\
Say where the time of a start went: stages, critical path, who was slow, what it cost.

DIR is a job's log folder, a run folder in it, its events folder, or one event file. Of several jobs the newest is
taken. With OTHER the two are compared, DIR being the one before.

`bootseer report fleet DIR...` sums up many jobs.
"""
EPILOG = (
    "bootseer report /logs/run1 --html run1.html\n\nbootseer report /logs/before /logs/after --html compared.html"
)

app = running.new_app("report")


@app.command(help=HELP, epilog=EPILOG)
def report(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="where the events of a job lie")],
    other: Annotated[str, typer.Argument(metavar="[OTHER]", help="of a second job, to compare")] = "",
    attempt: Annotated[
        str,
        typer.Option(
            "--attempt", metavar="N", help="which start of the job: a number or 'last' (default the first)"
        ),
    ] = "",
    html: Annotated[str, typer.Option("--html", metavar="FILE", help="write one self-contained page")] = "",
    trace: Annotated[
        str, typer.Option("--trace", metavar="FILE", help="write a Chrome trace, for Perfetto or chrome://tracing")
    ] = "",
    prometheus: Annotated[
        str,
        typer.Option("--prometheus", metavar="FILE", help="write metrics for node exporter's textfile collector"),
    ] = "",
    otlp: Annotated[
        str, typer.Option("--otlp", metavar="URL", help="send a trace to an OpenTelemetry collector, by HTTP")
    ] = "",
    out: Annotated[
        str, typer.Option("--out", metavar="FILE", help="write the text or JSON there, not to stdout")
    ] = "",
    as_json: Json = False,
) -> None:
    """Report on one job, or compare two."""
    if other and (trace or prometheus or otlp):
        raise UsageError("--trace, --prometheus and --otlp show one job: give one DIR")
    job = report_job.load(folder)
    number = report_job.choose(job, attempt, folder)
    found, record = job.attempts[number], report_job.record_of(job, number)
    if other:
        second = report_job.load(other)
        newer = report_job.record_of(second, report_job.choose(second, attempt, other))
        report_job.show_comparison(record, newer, as_json, out, html)
        return
    _write_files(found, record, html, trace, prometheus)
    report_job.show(record, as_json, out)
    if otlp:
        from bootseer.startup.otlp import send_trace

        send_trace(found, otlp)


def _write_files(found: Analysis, record: Report, html: str, trace: str, prometheus: str) -> None:
    if html:
        from bootseer.startup.page import make_page

        report_job.write(html, make_page(found, record))
    if trace:
        from bootseer.startup.chrome import trace_json

        report_job.write(trace, trace_json(found))
    if prometheus:
        from bootseer.startup.prometheus_file import write_metrics

        write_metrics(record, prometheus)


def main(argv: list[str]) -> int:
    """Runs one command; returns the exit status."""
    if argv[:1] == ["fleet"]:
        return running.run(report_fleet.app, "bootseer report fleet", argv[1:])
    if not argv:
        print("bootseer: error: report of what? give the log folder of a job (--help says more)", file=sys.stderr)
        return 2
    return running.run(app, "bootseer report", argv)
