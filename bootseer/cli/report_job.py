"""One job for `bootseer report`: found, read, analysed, shown."""

from __future__ import annotations

import contextlib
import os
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from bootseer.counted import counted
from bootseer.errors import ConfigError, UsageError
from bootseer.formats import one_line

if TYPE_CHECKING:
    from bootseer.startup.analysis import Job
    from bootseer.startup.report import Report


def load(folder: str) -> Job:
    """The newest job below `folder`.

    Raises: UsageError where there is none.
    """
    from bootseer.startup.analysis import analyse_job
    from bootseer.startup.finding import find_jobs
    from bootseer.startup.reading import read_job
    from bootseer.startup.starts import split_runs

    jobs = find_jobs(folder)
    chosen = jobs[-1]
    notes = []
    if len(jobs) > 1:
        when = datetime.fromtimestamp(min(chosen.wall_ns / 1e9, 2.5e11), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        notes.append(
            f"{counted(len(jobs), 'job')} lie there; this is the newest, {chosen.run_id} of {when}"
            f" ({one_line(chosen.paths[0])}): name the folder of another one to see it"
        )
    read = read_job(chosen.paths)
    runs = split_runs(read.events)
    if len(runs) > 1:
        notes.append(f"the same files hold events of {len(runs):,} runs; this is the newest")
    try:
        return analyse_job(list(runs.values())[-1] if runs else [], [*notes, *read.notes])
    except UsageError as error:
        raise UsageError(f"{one_line(folder)}: {error}") from error


def choose(job: Job, attempt: str, folder: str) -> int:
    """The number of the attempt that is to be shown.

    Raises: UsageError where there is no such attempt.
    """
    known = sorted(job.attempts)
    if not attempt:
        return known[0]
    if attempt == "last":
        return known[-1]
    if not attempt.isdecimal() or len(attempt) > 9 or int(attempt) not in job.attempts:
        listed = ", ".join(map(str, known[:10])) + (f" up to {known[-1]}" if len(known) > 10 else "")
        raise UsageError(f"--attempt {one_line(attempt)}: {one_line(folder)} has {listed}; or give 'last'")
    return int(attempt)


def record_of(job: Job, attempt: int) -> Report:
    """What is shown and encoded."""
    from bootseer.startup.report import make_report

    return make_report(job, attempt)


def show(record: Report, as_json: bool, out: str) -> None:
    """As text or JSON."""
    from bootseer.startup.report import encode
    from bootseer.startup.text import report_text

    put(encode(record) if as_json else report_text(record).encode("utf-8", "replace"), out)


def show_comparison(before: Report, after: Report, as_json: bool, out: str, html: str = "") -> None:
    """As text or JSON, and as a page where that is wanted."""
    from bootseer.startup.compare import compare
    from bootseer.startup.report import encode
    from bootseer.startup.text import comparison_text

    found = compare(before, after)
    if html:
        from bootseer.startup.compare_page import make_comparison_page

        write(html, make_comparison_page(found))
    put(encode(found) if as_json else comparison_text(found).encode("utf-8", "replace"), out)


def put(data: bytes, out: str) -> None:
    """To a file, or to stdout."""
    if out:
        write(out, data + b"\n")
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(data + b"\n")
    sys.stdout.buffer.flush()


def write(path: str, data: bytes) -> None:
    """Writes it beside and renames: nobody sees half a file. A pipe or a device is written to as it is.

    Raises: ConfigError where that cannot be.
    """
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            with open(path, "wb") as file:
                file.write(data)
            return
        beside = f"{path}.{os.getpid()}.tmp"
        try:
            with open(beside, "wb") as file:
                file.write(data)
            os.replace(beside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(beside)
            raise
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ConfigError(f"{one_line(path)} cannot be written: {error.strerror or error}") from error
