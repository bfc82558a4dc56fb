"""`bootseer report DIR [OTHER]` and `bootseer report fleet DIR...`: how starts spent their time.

In: a command line. Out: text or one JSON object on stdout, files that flags name, errors on stderr, an exit status
(docs/reference/errors.md). bootseer.report computes the figures.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from bootseer.cli import report_fleet, report_job, running
from bootseer.cli.image_words import Json
from bootseer.errors import UsageError

if TYPE_CHECKING:
    from bootseer.report.analysis import Analysis
    from bootseer.report.report import Report

HELP = """\
Show how a start spent its time: stages, critical path, stragglers, lost accelerator time.

DIR is a job's log directory, a run directory in it, its events directory, or one event file. Of several jobs the
newest is used. With OTHER the report compares both, with DIR as the earlier one.

`bootseer report fleet DIR...` summarises many jobs.
"""
EPILOG = (
    "bootseer report /logs/run1 --html run1.html\n\nbootseer report /logs/before /logs/after --html compared.html"
)

app = running.new_app("report")


@app.command(help=HELP, epilog=EPILOG)
def report(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Log directory of a job")],
    other: Annotated[
        str, typer.Argument(metavar="[OTHER]", help="Log directory of a second job, to compare")
    ] = "",
    attempt: Annotated[
        str,
        typer.Option(
            "--attempt", metavar="N", help="Start of the job to report: a number or 'last' (default: the first)"
        ),
    ] = "",
    html: Annotated[str, typer.Option("--html", metavar="FILE", help="Write a self-contained HTML page")] = "",
    trace: Annotated[
        str, typer.Option("--trace", metavar="FILE", help="Write a Chrome trace, for Perfetto or chrome://tracing")
    ] = "",
    prometheus: Annotated[
        str,
        typer.Option("--prometheus", metavar="FILE", help="Write metrics for node exporter's textfile collector"),
    ] = "",
    otlp: Annotated[
        str, typer.Option("--otlp", metavar="URL", help="Send a trace to an OpenTelemetry collector, by HTTP")
    ] = "",
    out: Annotated[
        str, typer.Option("--out", metavar="FILE", help="Write the text or JSON to this file, not to stdout")
    ] = "",
    as_json: Json = False,
) -> None:
    """Report on one job, or compare two."""
    if other and (trace or prometheus or otlp):
        raise UsageError("--trace, --prometheus and --otlp show one job: give one DIR")
    job = report_job.load(directory)
    number = report_job.choose(job, attempt, directory)
    found, record = job.attempts[number], report_job.record_of(job, number)
    if other:
        second = report_job.load(other)
        newer = report_job.record_of(second, report_job.choose(second, attempt, other))
        report_job.show_comparison(record, newer, as_json, out, html)
        return
    _write_files(found, record, html, trace, prometheus)
    report_job.show(record, as_json, out)
    if otlp:
        from bootseer.report.otlp import send_trace

        send_trace(found, otlp)


def _write_files(found: Analysis, record: Report, html: str, trace: str, prometheus: str) -> None:
    if html:
        from bootseer.report.page import make_page

        report_job.write(html, make_page(found, record))
    if trace:
        from bootseer.report.chrome import trace_json

        report_job.write(trace, trace_json(found))
    if prometheus:
        from bootseer.report.prometheus_file import write_metrics

        write_metrics(record, prometheus)


def main(argv: list[str]) -> int:
    """Run one command and return the exit status."""
    if argv[:1] == ["fleet"]:
        return running.run(report_fleet.app, "bootseer report fleet", argv[1:])
    if not argv:
        print("bootseer: error: missing argument: the log directory of a job (see --help)", file=sys.stderr)
        return 2
    return running.run(app, "bootseer report", argv)
