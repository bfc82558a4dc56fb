"""The cheap checks, during the start of a job: findings as JSON lines on stdout, one by one.

    python -P -m bootseer.health.at_start --log-hours H [options of options.py] -- DIR...

The last line is {"done": true}: without it the output was cut off. It runs at the lowest priority, as ranks start
at the same time. It writes nothing to the directories, but writes and reads each --path. It ends with its parent.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

from bootseer.health.checks import CHECKS, OWN, Path, Request, make_tasks
from bootseer.health.host_interface import HostInterface
from bootseer.health.options import Options, add_arguments, from_arguments, split_path
from bootseer.health.runner import run_tasks
from bootseer.ipc.framing import encode
from bootseer.linux.priority import lower
from bootseer.linux.processes import set_death_signal

LIMIT_S = 60.0  # for each check: on a node that is busy with the start a slow check must not count as hung
INTERVAL_S = 0.5


def make_request(
    options: Options, directories: list[str], log_hours: float, interval_s: float, ancestor: int
) -> Request:
    """Return the request. Args: folders: of the job, checked for space only; ancestor: bootrun's pid."""
    paths = [Path(os.path.abspath(directory), True, False) for directory in dict.fromkeys(directories)]
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
    parser = argparse.ArgumentParser(prog="bootseer.health.at_start")
    parser.add_argument("--log-hours", type=float, default=1.0)
    parser.add_argument("folders", nargs="*")
    add_arguments(parser)
    args = parser.parse_args(argv)
    ancestor = os.getppid()  # bootrun; the ranks descend from it
    set_death_signal(signal.SIGKILL)
    lower()
    options = from_arguments(args)
    request = make_request(options, args.folders, args.log_hours, INTERVAL_S, ancestor)
    tasks = make_tasks(HostInterface(), request, [*CHECKS, OWN])
    try:
        for findings in run_tasks(tasks, options.timeout_s or LIMIT_S):
            for found in findings:
                sys.stdout.buffer.write(encode(found._asdict()))
            sys.stdout.flush()
        sys.stdout.buffer.write(encode({"done": True}))
        sys.stdout.flush()
    except BrokenPipeError:  # the job is over
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
