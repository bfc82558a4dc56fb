"""`bootseer report fleet DIR...`: the share of time that starts took, over many jobs."""

from __future__ import annotations

from typing import Annotated

import typer

from bootseer.cli import report_job, running
from bootseer.cli.image_words import Json
from bootseer.errors import BootseerError, UsageError
from bootseer.formats import one_line

app = running.new_app("fleet")
MAX_NOTES = 100


@app.command(epilog="bootseer report fleet /logs --parquet starts.parquet")
def fleet(
    directories: Annotated[
        list[str], typer.Argument(metavar="DIR...", help="Log directories; each may have many jobs")
    ],
    parquet: Annotated[
        str,
        typer.Option(
            "--parquet",
            metavar="FILE",
            help="Write a Parquet file with one row for each job, attempt, node, rank and stage",
        ),
    ] = "",
    out: Annotated[
        str, typer.Option("--out", metavar="FILE", help="Write the text or JSON to this file, not to stdout")
    ] = "",
    as_json: Json = False,
) -> None:
    """Show the share of many jobs' time that starts took: by size and by stage, with the slow nodes."""
    import contextlib

    from bootseer.report.analysis import analyse_job
    from bootseer.report.finding import find_jobs
    from bootseer.report.fleet import FleetMaker, fleet_text
    from bootseer.report.parquet_rows import ParquetRows
    from bootseer.report.reading import read_job
    from bootseer.report.report import encode
    from bootseer.report.starts import split_runs

    jobs: set[tuple[str, ...]] = set()
    notes: list[str] = []
    for directory in directories:
        try:
            jobs.update(job.paths for job in find_jobs(directory))
        except UsageError as error:
            notes.append(str(error))
    maker = FleetMaker()
    count = 0
    with contextlib.ExitStack() as stack:
        rows = stack.enter_context(ParquetRows(parquet)) if parquet else None
        for paths in sorted(jobs):
            source = one_line(paths[0])
            for events in split_runs(read_job(paths).events).values():
                try:
                    found = analyse_job(events)
                except BootseerError as error:
                    notes.append(f"{source}: {error}")
                    continue
                maker.add(found, source)
                if rows is not None:
                    rows.add(found, source)
                count += 1
        if not count:
            more = f" (and {len(notes) - 1:,} more)" if len(notes) > 1 else ""
            raise UsageError(f"no job to report: {notes[0]}{more}" if notes else "no job to report")
    result = maker.finish(notes[:MAX_NOTES])
    report_job.write_output(encode(result) if as_json else fleet_text(result).encode("utf-8", "replace"), out)
