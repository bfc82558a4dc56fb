"""`bootseer check`: is this node fit for a job? Each check runs with a time limit; one that hangs is a finding.

In: a command line. Out: a line a finding, or one JSON object, on stdout; errors on stderr; an exit status
(docs/errors.md). What is checked is in bootseer.health.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from typing import Annotated

import typer

from bootseer.cli import running
from bootseer.cli.image_words import Json
from bootseer.errors import UsageError
from bootseer.health.checks import CHECKS, OWN, Path, Request, choose, default_paths, make_tasks
from bootseer.health.door import Door
from bootseer.health.finding import BAD, OK, UNKNOWN, Finding, worst
from bootseer.health.runner import run_tasks

FAILED_STATUS = 3
HELP = """\
Say whether this node is fit for a job: memory, disks, mounts, network, accelerators, the kernel's log.

A line a finding: ok, warn, fail, unknown (it cannot be seen here) or hung (the check itself did not answer).
Exit status 3 when something failed or hung, 0 when nothing did; warnings are allowed.
"""
EPILOG = (
    "bootseer check --path /data:ro --path /checkpoints --expect-gpus 8\n\n"
    "bootseer check --only mounts --only storage --path /mnt/nfs --timeout 5 --json\n\n"
    "bootseer check --own /etc/bootseer/checks/fabric.sh"
)

app = running.new_app("check")


@app.command(help=HELP, epilog=EPILOG)
def check(
    path: Annotated[
        list[str] | None,
        typer.Option(
            "--path", metavar="PATH[:ro]", help="a small file is written there and read; with :ro only read"
        ),
    ] = None,
    expect_gpus: Annotated[
        int | None, typer.Option("--expect-gpus", metavar="N", min=0, help="fail unless so many work")
    ] = None,
    nic: Annotated[
        list[str] | None, typer.Option("--nic", metavar="NAME", help="that has to have a link, as ib0 or mlx5_0/1")
    ] = None,
    own: Annotated[
        list[str] | None,
        typer.Option("--own", metavar="EXECUTABLE", help="a check of your own: JSON on stdout (docs/checks.md)"),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="NAME", help="this check alone; --list shows the names")
    ] = None,
    timeout: Annotated[
        float,
        typer.Option("--timeout", metavar="S", help="seconds for each check (default 10)", show_default=False),
    ] = 10.0,
    interval: Annotated[
        float,
        typer.Option(
            "--interval", metavar="S", help="over which errors of NICs are counted (default 1)", show_default=False
        ),
    ] = 1.0,
    log_hours: Annotated[
        float,
        typer.Option("--log-hours", metavar="H", help="of the kernel's log (default 24)", show_default=False),
    ] = 24.0,
    strict: Annotated[bool, typer.Option("--strict", help="what cannot be seen counts as failed")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="no lines of what is in order")] = False,
    show_list: Annotated[bool, typer.Option("--list", help="name the checks")] = False,
    as_json: Json = False,
) -> None:
    """Check this node."""
    if show_list:
        _show_list(as_json)
        return
    _positive("--timeout", timeout)
    _positive("--log-hours", log_hours)
    if not 0 <= interval < timeout:
        raise UsageError(f"--interval {interval:g}: give seconds from 0 to less than --timeout ({timeout:g})")
    names = choose(only or ())
    paths = tuple(_path(text) for text in path or ())
    temporary = os.environ.get("TMPDIR") or "/tmp"  # noqa: S108  looked at, not written to
    request = Request(
        paths or default_paths(os.getcwd(), temporary),
        tuple(nic or ()),
        expect_gpus,
        tuple(_executable(text) for text in own or ()),
        log_hours=log_hours,
        interval_s=interval,
    )
    tasks = make_tasks(Door(), request, names)
    if not tasks:
        raise UsageError(f"nothing to check: --only {' --only '.join(names)} needs --path or --own")
    began_s = time.monotonic()
    findings: list[Finding] = []
    for found in run_tasks(tasks, timeout):
        findings += found
        for each in () if as_json else found:
            if not (quiet and each.level == OK):
                typer.echo(each.line())
    if as_json:
        _show_json(findings, time.monotonic() - began_s)
    is_bad = any(each.level in BAD or (strict and each.level == UNKNOWN) for each in findings)
    if is_bad:
        raise typer.Exit(FAILED_STATUS)


def _show_json(findings: list[Finding], wall_s: float) -> None:
    record = {
        "version": 1,
        "host": os.uname().nodename,
        "level": worst(findings),
        "wall_s": round(wall_s, 3),
        "findings": [found._asdict() for found in findings],
    }
    typer.echo(json.dumps(record))


def _show_list(as_json: bool) -> None:
    listed = {**{name: each.help for name, each in CHECKS.items()}, OWN: "each --own"}
    if as_json:
        typer.echo(json.dumps(listed))
        return
    for name, words in listed.items():
        typer.echo(f"{name:<14} {words}")


def _positive(flag: str, value: float) -> None:
    if not 0 < value < 1e6:
        raise UsageError(f"{flag} {value:g}: give a number above 0")


def _path(text: str) -> Path:
    path, is_read_only = (text[:-3], True) if text.endswith(":ro") else (text, False)
    if not path:
        raise UsageError(f"--path {text!r}: name a folder or a file")
    return Path(os.path.abspath(path), not is_read_only, True)


def _executable(text: str) -> str:
    found = shutil.which(text)
    if found is None:
        raise UsageError(f"--own {text!r}: there is no such executable; give its path and chmod +x it")
    return os.path.abspath(found)


def main(argv: list[str]) -> int:
    """Runs the command; returns the exit status."""
    return running.run(app, "bootseer check", argv)
