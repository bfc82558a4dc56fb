"""`bootseer replay`: find the machine at fault by replaying a job on groups of machines.

In: a command line. Out: results on stdout (`--json` for scripts), progress and errors on stderr, an exit status
(docs/reference/errors.md). bootseer.hangs chooses the groups and finds the culprit.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated, Any

import typer

from bootseer.cli import running
from bootseer.cli.image_words import Json
from bootseer.errors import ConfigError, NotFound, UsageError

HELP = """\
Find the machine at fault: replay a job on groups of machines, and deduce it from the groups that fail.

The command runs once for each group, and the groups of a round run at the same time. Its environment names its
machines: BOOTSEER_REPLAY_HOSTS (separated by commas), BOOTSEER_REPLAY_NODES (their number), BOOTSEER_REPLAY_GROUP
(a number). If the command ends with status 0, the group is fault-free. Any other status, or the time limit, means
that the fault occurred.

For M machines in groups of m, two rounds are enough if m is at most M / m; otherwise more follow. The search
assumes one faulty machine, and reports if there are several.
"""
EPILOG = """\
bootseer replay --hosts hosts.txt --group-size 4 --limit 900
--run 'srun -w $BOOTSEER_REPLAY_HOSTS -N $BOOTSEER_REPLAY_NODES bootrun --nnodes $BOOTSEER_REPLAY_NODES replay.py'

bootseer replay --hosts node1,node2,node3,node4 --group-size 2 --plan
"""
MAX_HOSTS = 100_000
MAX_HOSTS_BYTES = 16 << 20
VERDICT_TEXTS = {
    "one": "{0} is at fault: every group with it failed, and every other machine was in one that did not",
    "none": "no group failed: the fault did not recur, or needs more machines than a group has",
    "all": "every group failed: no single machine is at fault",
    "several": "several machines are at fault, or cannot be distinguished: {0}",
}
STATUSES = {"one": 0, "none": 3, "all": 4, "several": 5}

app = running.new_app("replay")


@app.command(help=HELP, epilog=EPILOG)
def replay(
    hosts: Annotated[
        str,
        typer.Option("--hosts", metavar="FILE|A,B,...", help="Machines: a file with one on each line, or a list"),
    ],
    group_size: Annotated[
        int,
        typer.Option(
            "--group-size", metavar="M", help="Machines that one replay needs: a whole pipeline, or several"
        ),
    ],
    run: Annotated[str, typer.Option("--run", metavar="COMMAND", help="Shell command that replays the job")] = "",
    limit: Annotated[float, typer.Option("--limit", metavar="S", help="Seconds for one replay")] = 1800.0,
    parallel: Annotated[
        int,
        typer.Option("--parallel", metavar="N", help="Groups to run at the same time (default: a whole round)"),
    ] = 0,
    plan: Annotated[bool, typer.Option("--plan", help="Show the first rounds, and run nothing")] = False,
    as_json: Json = False,
) -> None:
    """Find the machine at fault."""
    from bootseer.hangs.replay import ReplaySearch

    machines = _read_hosts(hosts)
    try:
        search = ReplaySearch(machines, group_size)
    except ValueError as error:
        raise ConfigError(f"--hosts and --group-size: {error}") from None
    if plan:
        _show_plan(search, as_json)
        return
    if not run.strip():
        raise UsageError("--run is missing; give the command that replays the job, or --plan to see the groups")
    if not 0 < limit < 1e7 or parallel < 0:
        raise UsageError("--limit needs a number of seconds above 0, --parallel a number of groups")
    raise typer.Exit(_search(search, run, limit, parallel, as_json))


def _search(search: Any, command: str, limit_s: float, parallel: int, as_json: bool) -> int:
    from bootseer.hangs.replay_run import GroupResult, run_groups

    done: list[dict[str, Any]] = []
    number = 0
    while groups := search.next_round():
        number += 1
        print(f"bootseer replay: round {number}: {len(groups)} groups", file=sys.stderr)

        def tell(result: GroupResult, number: int = number) -> None:
            how = f"no end within {limit_s:g} s" if result.is_late else f"exit status {result.status}"
            word = "passed" if not result.failed else f"failed ({how})" if result.ran else f"did not run ({how})"
            named = " ".join(result.group.machines)
            print(f"  group {result.group.number}: {word} after {result.seconds:.1f} s: {named}", file=sys.stderr)
            done.append(
                {
                    "round": number,
                    "group": result.group.number,
                    "machines": list(result.group.machines),
                    "status": result.status,
                    "is_late": result.is_late,
                    "failed": result.failed,
                    "ran": result.ran,
                    "seconds": round(result.seconds, 3),
                }
            )

        try:
            results = run_groups(groups, command, limit_s, parallel or len(groups), tell)
        except OSError as error:
            raise ConfigError(f"--run: no process can be started: {error.strerror}") from None
        if not any(result.ran for result in results):
            raise ConfigError(f"--run: no group could run it (exit status {results[0].status} of the shell)")
        search.ran({result.group.number: result.failed for result in results if result.ran})
    verdict = search.verdict()
    name = verdict.found.value
    if as_json:
        record = {"v": 1, "found": name, "suspects": list(verdict.suspects), "groups": done}
        print(json.dumps(record))
    else:
        print(VERDICT_TEXTS[name].format(", ".join(verdict.suspects)))
    return STATUSES[name]


def _show_plan(search: Any, as_json: bool) -> None:
    rounds = search.planned()
    if as_json:
        print(json.dumps({"v": 1, "rounds": [[list(group.machines) for group in each] for each in rounds]}))
        return
    for number, groups in enumerate(rounds, 1):
        print(f"round {number}:")
        for group in groups:
            print(f"  group {group.number}: {' '.join(group.machines)}")


def _read_hosts(hosts: str) -> list[str]:
    if "," not in hosts and (os.path.exists(hosts) or "/" in hosts):
        try:
            with open(hosts, "rb") as file:
                text = file.read(MAX_HOSTS_BYTES).decode("utf-8", "replace")
        except FileNotFoundError:
            raise NotFound(f"--hosts: there is no file {hosts}") from None
        except OSError as error:
            raise ConfigError(f"--hosts {hosts}: cannot be read: {error.strerror}") from None
        names = [line.split("#")[0].strip() for line in text.splitlines()]
    else:
        names = [each.strip() for each in hosts.split(",")]
    names = [each for each in names if each]
    bad = next((each for each in names if len(each) > 255 or not set(each) <= _ALLOWED), "")
    if bad:
        raise ConfigError(f"--hosts: {bad[:80]!r} is not a valid machine name; give one a line, or use commas")
    if len(names) > MAX_HOSTS:
        raise ConfigError(f"--hosts: {len(names)} machines, more than {MAX_HOSTS}")
    return names


_ALLOWED = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-:")


def main(argv: list[str]) -> int:
    """Run the command and return the exit status."""
    return running.run(app, "bootseer replay", argv)
