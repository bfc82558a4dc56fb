"""The checks that cost little, beside the start of a job: findings as JSON lines on stdout, as they come.

    python -P -m bootseer.health.beside --log-hours H FOLDER...

At the lowest priority, as ranks start meanwhile; nothing is written to the folders. It ends with who started it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys

from bootseer.health.checks import CHECKS, Path, Request, make_tasks
from bootseer.health.door import Door
from bootseer.health.runner import run_tasks
from bootseer.mounts.namespaces import die_with_parent
from bootseer.priority import lower

LIMIT_S = 60.0  # for each check: on a node that is busy with the start what is slow must not look hung
INTERVAL_S = 0.5
_DEAR = {"storage"}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bootseer.health.beside")
    parser.add_argument("--log-hours", type=float, default=1.0)
    parser.add_argument("--timeout", type=float, default=LIMIT_S)  # for each check
    parser.add_argument("folders", nargs="*")
    args = parser.parse_args(argv)
    ancestor = os.getppid()  # bootrun; the ranks that start meanwhile descend from it
    die_with_parent(signal.SIGKILL)
    lower()
    paths = tuple(Path(os.path.abspath(folder), True, False) for folder in dict.fromkeys(args.folders))
    request = Request(paths, log_hours=args.log_hours, interval_s=INTERVAL_S, ancestor=ancestor)
    tasks = make_tasks(Door(), request, [name for name in CHECKS if name not in _DEAR])
    try:
        for findings in run_tasks(tasks, args.timeout):
            for found in findings:
                sys.stdout.write(json.dumps(found._asdict()) + "\n")
            sys.stdout.flush()
    except BrokenPipeError:  # the job is over
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
