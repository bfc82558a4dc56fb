"""The checks that cost little, again and again while ranks run: what has come or gone as JSON lines on stdout.

    python -P -m bootseer.health.watching --every S [what options.py adds] -- FOLDER...

At the lowest priority, and each check in a process of its own (runner.py): one that hangs is told and holds up
nothing else. Nothing is written anywhere. It ends with who started it, or when standard input does.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
import time

from bootseer.health.beside import make_request
from bootseer.health.changes import Changes
from bootseer.health.checks import CHECKS, make_tasks
from bootseer.health.door import Door
from bootseer.health.options import EVERY_S, add_arguments, from_arguments
from bootseer.health.runner import run_tasks
from bootseer.mounts.namespaces import die_with_parent
from bootseer.priority import lower

LIMIT_S = 10.0  # for each check
# Looks at the driver cost more than all else, and Xids are in the kernel's log at once.
SELDOM = {"accelerators": 4}
NEVER = {"storage", "shared-memory"}  # it writes; it does not change


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bootseer.health.watching")
    parser.add_argument("--every", type=float, default=EVERY_S)
    parser.add_argument("folders", nargs="*")
    add_arguments(parser)
    args = parser.parse_args(argv)
    ancestor = os.getppid()  # bootrun; ranks descend from it
    die_with_parent(signal.SIGKILL)
    lower()
    options = from_arguments(args)
    door, changes, began_s = Door(), Changes(), time.monotonic()
    left: dict[tuple[str, str], int] = {}
    look = 0
    try:
        while True:
            looked_s = time.monotonic()
            names = [name for name in CHECKS if name not in NEVER and look % SELDOM.get(name, 1) == 0]
            request = make_request(options, args.folders, (looked_s - began_s) / 3600, 0.0, ancestor)
            tasks = make_tasks(door, request, names)
            found = [
                each for findings in run_tasks(tasks, options.timeout_s or LIMIT_S, left) for each in findings
            ]
            for change in changes.look(names, found):
                said = {**change.finding._asdict(), "is_over": change.is_over}
                sys.stdout.write(json.dumps(said) + "\n")
            sys.stdout.flush()
            look += 1
            if _has_ended(max(0.0, looked_s + args.every - time.monotonic())):
                return 0
    except BrokenPipeError:  # the job is over
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _has_ended(seconds: float) -> bool:
    """Waits; whether standard input has ended meanwhile."""
    end_s = time.monotonic() + seconds
    while (left_s := end_s - time.monotonic()) > 0:
        if select.select([0], [], [], left_s)[0] and not os.read(0, 4096):
            return True
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
