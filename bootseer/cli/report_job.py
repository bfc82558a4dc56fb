"""One job for `bootseer report`: find, read, analyse and show it."""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from bootseer.counted import counted
from bootseer.errors import ConfigError, UsageError
from bootseer.formats import one_line
from bootseer.linux.files import replace_file

if TYPE_CHECKING:
    from bootseer.report.analysis import Job
    from bootseer.report.report import Report


def load(directory: str) -> Job:
    """Load the newest job below `directory`.

    Raises: UsageError if there is none.
    """
    from bootseer.report.analysis import analyse_job
    from bootseer.report.finding import find_jobs
    from bootseer.report.reading import read_job
    from bootseer.report.starts import split_runs

    jobs = find_jobs(directory)
    chosen = jobs[-1]
    notes = []
    if len(jobs) > 1:
        when = datetime.fromtimestamp(min(chosen.wall_ns / 1e9, 2.5e11), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        notes.append(
            f"{counted(len(jobs), 'job')} found; this is the newest, {chosen.run_id} of {when}"
            f" ({one_line(chosen.paths[0])}); to see another one, give its directory"
        )
    read = read_job(chosen.paths)
    runs = split_runs(read.events)
    if len(runs) > 1:
        notes.append(f"the same files hold events of {len(runs):,} runs; this is the newest")
    try:
        return analyse_job(list(runs.values())[-1] if runs else [], [*notes, *read.notes])
    except UsageError as error:
        raise UsageError(f"{one_line(directory)}: {error}") from error


def choose(job: Job, attempt: str, directory: str) -> int:
    """Return the number of the attempt to show.

    Raises: UsageError for an unknown attempt.
    """
    known = sorted(job.attempts)
    if not attempt:
        return known[0]
    if attempt == "last":
        return known[-1]
    if not attempt.isdecimal() or len(attempt) > 9 or int(attempt) not in job.attempts:
        listed = ", ".join(map(str, known[:10])) + (f" up to {known[-1]}" if len(known) > 10 else "")
        raise UsageError(f"--attempt {one_line(attempt)}: {one_line(directory)} has {listed}; or give 'last'")
    return int(attempt)


def record_of(job: Job, attempt: int) -> Report:
    from bootseer.report.report import make_report

    return make_report(job, attempt)


def show(record: Report, as_json: bool, out: str) -> None:
    """Write the report as text or JSON."""
    from bootseer.report.report import encode
    from bootseer.report.text import report_text

    write_output(encode(record) if as_json else report_text(record).encode("utf-8", "replace"), out)


def show_comparison(before: Report, after: Report, as_json: bool, out: str, html: str = "") -> None:
    """Write the comparison as text or JSON, and as an HTML page if requested."""
    from bootseer.report.compare import compare
    from bootseer.report.report import encode
    from bootseer.report.text import comparison_text

    found = compare(before, after)
    if html:
        from bootseer.report.compare_page import make_comparison_page

        write(html, make_comparison_page(found))
    write_output(encode(found) if as_json else comparison_text(found).encode("utf-8", "replace"), out)


def write_output(data: bytes, out: str) -> None:
    """Write to a file, or to stdout."""
    if out:
        write(out, data + b"\n")
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(data + b"\n")
    sys.stdout.buffer.flush()


def write(path: str, data: bytes) -> None:
    """Write a file atomically, by a temporary file and a rename. Pipes and devices are written directly.

    Raises: ConfigError if that fails.
    """
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            with open(path, "wb") as file:
                file.write(data)
            return
        replace_file(path, data, 0o666)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ConfigError(f"{one_line(path)}: cannot be written: {error.strerror or error}") from error
