"""`bootseer check`: health checks of this node. Each check has a time limit; one that hangs is a finding.

In: a command line. Out: a line a finding, or one JSON object, on stdout; errors on stderr; an exit status
(docs/reference/errors.md). The checks are in bootseer.health.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from bootseer.cli import running
from bootseer.cli.check_pairs import measure, serve
from bootseer.cli.image_words import Json
from bootseer.errors import UsageError
from bootseer.health.checks import CHECKS, OWN, Path, Request, choose, default_paths, make_tasks
from bootseer.health.finding import BAD, OK, UNKNOWN, Finding, worst
from bootseer.health.host_interface import HostInterface
from bootseer.health.options import Options, read_options, split_path
from bootseer.health.runner import run_tasks
from bootseer.job_file import read_job_file

FAILED_STATUS = 3
TIMEOUT_S = 10.0
KEYS = ("path", "nic", "expect-gpus", "own", "timeout", "limit")  # names of bootrun's flags, without --check-
HELP = """\
Check whether this node is fit for a job: memory, disks, mounts, network, accelerators, the kernel's log.

Each finding is a line: ok, warn, fail, unknown (cannot be checked here) or hung (the check did not answer).
Exit status 3 if a check failed or hung, otherwise 0, also with warnings.
"""
EPILOG = (
    "bootseer check --path /data:ro --path /checkpoints --expect-gpus 8\n\n"
    "bootseer check --only mounts --only storage --path /mnt/nfs --timeout 5 --json\n\n"
    "bootseer check --own /etc/bootseer/checks/fabric.sh\n\n"
    "bootseer check --pair-listen 29517 on one node, bootseer check --pair NODE on another"
)

app = running.new_app("check")


@app.command(help=HELP, epilog=EPILOG)
def check(
    path: Annotated[
        list[str] | None,
        typer.Option(
            "--path", metavar="PATH[:ro]", help="Path to write and read a small file at; with :ro only read"
        ),
    ] = None,
    expect_gpus: Annotated[
        int | None, typer.Option("--expect-gpus", metavar="N", min=0, help="Number of GPUs that must work")
    ] = None,
    nic: Annotated[
        list[str] | None,
        typer.Option("--nic", metavar="NAME", help="Network interface that must have a link, as ib0 or mlx5_0/1"),
    ] = None,
    own: Annotated[
        list[str] | None,
        typer.Option(
            "--own",
            metavar="EXECUTABLE",
            help="Program of a custom check, which prints JSON (docs/guide/checks.md)",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="NAME", help="Run only this check; --list shows the names"),
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option("--limit", metavar="NAME=NUMBER", help="Limit to change (docs/guide/checks.md)"),
    ] = None,
    config: Annotated[
        str,
        typer.Option(
            "--config",
            metavar="FILE",
            help="File whose table [check] has further settings (default: ./bootseer.toml)",
        ),
    ] = "",
    timeout: Annotated[
        float | None, typer.Option("--timeout", metavar="S", help="Seconds for each check (default: 10)")
    ] = None,
    interval: Annotated[
        float,
        typer.Option(
            "--interval",
            metavar="S",
            help="Seconds over which errors of network interfaces are counted (default: 1)",
            show_default=False,
        ),
    ] = 1.0,
    log_hours: Annotated[
        float,
        typer.Option(
            "--log-hours",
            metavar="H",
            help="Hours of the kernel's log to search (default: 24)",
            show_default=False,
        ),
    ] = 24.0,
    pair: Annotated[
        list[str] | None,
        typer.Option(
            "--pair", metavar="HOST[:PORT]", help="Only measure the network to a node that runs --pair-listen"
        ),
    ] = None,
    pair_listen: Annotated[
        int | None,
        typer.Option(
            "--pair-listen",
            metavar="PORT",
            min=0,
            max=65535,
            help="Let other nodes measure the network to this one",
        ),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Treat a check that cannot run as failed")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Omit the lines of passed checks")] = False,
    show_list: Annotated[bool, typer.Option("--list", help="List the checks")] = False,
    as_json: Json = False,
) -> None:
    """Check this node."""
    if show_list:
        _show_list(as_json)
        return
    _positive("--log-hours", log_hours)
    options = _options(config, path, nic, expect_gpus, own, timeout, limit)
    limit_s = options.timeout_s or TIMEOUT_S
    if not 0 <= interval < limit_s:
        raise UsageError(f"--interval {interval:g}: give seconds from 0 to less than --timeout ({limit_s:g})")
    if pair_listen is not None:
        serve(pair_listen, typer.echo)
        return
    if pair:
        _print_findings([measure(pair, limit_s, options.all_limits())], strict, quiet, as_json)
        return
    names = choose(only or ())
    temporary = os.environ.get("TMPDIR") or "/tmp"  # noqa: S108  checked, not written to
    request = Request(
        tuple(Path(*split_path(text), True) for text in options.paths) or default_paths(os.getcwd(), temporary),
        options.nics,
        options.expect_gpus,
        options.own,
        log_hours=log_hours,
        interval_s=interval,
        limits=options.all_limits(),
    )
    tasks = make_tasks(HostInterface(), request, names)
    if not tasks:
        raise UsageError(f"nothing to check: --only {' --only '.join(names)} needs --path or --own")
    _print_findings(run_tasks(tasks, limit_s), strict, quiet, as_json)


def _print_findings(found: Iterable[list[Finding]], strict: bool, quiet: bool, as_json: bool) -> None:
    """Print findings one by one, and set the exit status."""
    began_s = time.monotonic()
    findings: list[Finding] = []
    for some in found:
        findings += some
        for each in () if as_json else some:
            if not (quiet and each.level == OK):
                typer.echo(each.line())
    if as_json:
        _show_json(findings, time.monotonic() - began_s)
    if any(each.level in BAD or (strict and each.level == UNKNOWN) for each in findings):
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


def _options(
    config: str,
    path: list[str] | None,
    nic: list[str] | None,
    expect_gpus: int | None,
    own: list[str] | None,
    timeout: float | None,
    limit: list[str] | None,
) -> Options:
    """Return the options of the command line, completed by the file's. Raises: UsageError, ConfigError."""
    given = read_options("--", path or (), nic or (), expect_gpus, own or (), timeout, limits=limit or ())
    file: dict[str, Any] = read_job_file(config, os.getcwd()) or {}
    values = {name: value for name in KEYS if (value := file.get(f"--check-{name}")) is not None}
    found = read_options(
        "--check-",
        values.get("path", ()),
        values.get("nic", ()),
        values.get("expect-gpus"),
        values.get("own", ()),
        values.get("timeout"),
        limits=values.get("limit", ()),
    )
    return Options(
        given.paths or found.paths,
        given.nics or found.nics,
        found.expect_gpus if given.expect_gpus is None else given.expect_gpus,
        given.own or found.own,
        given.timeout_s or found.timeout_s,
        limits=found.limits + given.limits,
    )


def main(argv: list[str]) -> int:
    """Run the command and return the exit status."""
    return running.run(app, "bootseer check", argv)
