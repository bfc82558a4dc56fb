"""The checks that cost little, beside the start of a job: findings as JSON lines on stdout, as they come.

    python -P -m bootseer.health.beside --log-hours H [what options.py adds] -- FOLDER...

The last line is {"done": true}: without it the look was cut off. At the lowest priority, as ranks start meanwhile;
nothing is written to the folders, and what is named by --path is written and read. It ends with who started it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys

from bootseer.health.checks import CHECKS, OWN, Path, Request, make_tasks
from bootseer.health.door import Door
from bootseer.health.options import Options, add_arguments, from_arguments, split_path
from bootseer.health.runner import run_tasks
from bootseer.mounts.namespaces import die_with_parent
from bootseer.priority import lower

LIMIT_S = 60.0  # for each check: on a node that is busy with the start what is slow must not look hung
INTERVAL_S = 0.5


def make_request(
    options: Options, folders: list[str], log_hours: float, interval_s: float, ancestor: int
) -> Request:
    """What is to be looked at. Args: folders: of the job, of which only the space is; ancestor: bootrun's pid."""
    paths = [Path(os.path.abspath(folder), True, False) for folder in dict.fromkeys(folders)]
    for text in options.paths:
        path, is_written = split_path(text)
        paths.append(Path(path, is_written, True))
    return Request(
        tuple(paths),
        options.nics,
        options.expect_gpus,
        options.own,
        ancestor,
        log_hours,
        interval_s,
        options.all_limits(),
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bootseer.health.beside")
    parser.add_argument("--log-hours", type=float, default=1.0)
    parser.add_argument("folders", nargs="*")
    add_arguments(parser)
    args = parser.parse_args(argv)
    ancestor = os.getppid()  # bootrun; the ranks that start meanwhile descend from it
    die_with_parent(signal.SIGKILL)
    lower()
    options = from_arguments(args)
    request = make_request(options, args.folders, args.log_hours, INTERVAL_S, ancestor)
    tasks = make_tasks(Door(), request, [*CHECKS, OWN])
    try:
        for findings in run_tasks(tasks, options.timeout_s or LIMIT_S):
            for found in findings:
                sys.stdout.write(json.dumps(found._asdict()) + "\n")
            sys.stdout.flush()
        sys.stdout.write('{"done": true}\n')
        sys.stdout.flush()
    except BrokenPipeError:  # the job is over
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
