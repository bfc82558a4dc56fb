"""`bootseer report fleet DIR...`: many jobs: the share of time that starts took."""

from __future__ import annotations

from typing import Annotated

import typer

from bootseer.cli import report_job, running
from bootseer.cli.image_words import Json
from bootseer.errors import BootseerError, UsageError
from bootseer.formats import one_line

app = running.new_app("fleet")
MOST_NOTES = 100


@app.command(epilog="bootseer report fleet /logs --parquet starts.parquet")
def fleet(
    folders: Annotated[list[str], typer.Argument(metavar="DIR...", help="log folders; each may hold many jobs")],
    parquet: Annotated[
        str, typer.Option("--parquet", metavar="FILE", help="write one row a job, attempt, node, rank and stage")
    ] = "",
    out: Annotated[
        str, typer.Option("--out", metavar="FILE", help="write the text or JSON there, not to stdout")
    ] = "",
    as_json: Json = False,
) -> None:
    """Say which share of many jobs' time went into starts: by size, by stage, and which nodes were slow."""
    import contextlib

    from bootseer.startup.analysis import analyse_job
    from bootseer.startup.finding import find_jobs
    from bootseer.startup.fleet import FleetMaker, fleet_text
    from bootseer.startup.parquet_rows import ParquetRows
    from bootseer.startup.reading import read_job
    from bootseer.startup.report import encode
    from bootseer.startup.starts import split_runs

    jobs: set[tuple[str, ...]] = set()
    notes: list[str] = []
    for folder in folders:
        try:
            jobs.update(job.paths for job in find_jobs(folder))
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
            raise UsageError(f"there is no job to report on: {notes[0]}{more}" if notes else "there is no job")
    result = maker.finish(notes[:MOST_NOTES])
    report_job.put(encode(result) if as_json else fleet_text(result).encode("utf-8", "replace"), out)
