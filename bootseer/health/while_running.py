"""The cheap checks, repeated while ranks run: new and ended findings as JSON lines on stdout.

    python -P -m bootseer.health.while_running --every S [options of options.py] -- DIR...

It runs at the lowest priority, with each check in its own process (runner.py): one that hangs is reported and
delays no other. It writes no files. It ends with its parent, or at the end of standard input.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import time

from bootseer.health.at_start import make_request
from bootseer.health.changes import Changes
from bootseer.health.checks import CHECKS, make_tasks
from bootseer.health.host_interface import HostInterface
from bootseer.health.options import EVERY_S, add_arguments, from_arguments
from bootseer.health.runner import run_tasks
from bootseer.ipc.framing import encode
from bootseer.linux.priority import lower
from bootseer.linux.processes import set_death_signal

LIMIT_S = 10.0  # for each check
# Checking the driver costs most, and Xids are in the kernel's log at once.
SELDOM = {"accelerators": 4}
NEVER = {"storage", "shared-memory"}  # the first writes; the second does not change


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bootseer.health.while_running")
    parser.add_argument("--every", type=float, default=EVERY_S)
    parser.add_argument("folders", nargs="*")
    add_arguments(parser)
    args = parser.parse_args(argv)
    ancestor = os.getppid()  # bootrun; ranks descend from it
    set_death_signal(signal.SIGKILL)
    lower()
    options = from_arguments(args)
    system, changes, began_s = HostInterface(), Changes(), time.monotonic()
    left: dict[tuple[str, str], int] = {}
    look = 0
    try:
        while True:
            looked_s = time.monotonic()
            names = [name for name in CHECKS if name not in NEVER and look % SELDOM.get(name, 1) == 0]
            request = make_request(options, args.folders, (looked_s - began_s) / 3600, 0.0, ancestor)
            tasks = make_tasks(system, request, names)
            found = [
                each for findings in run_tasks(tasks, options.timeout_s or LIMIT_S, left) for each in findings
            ]
            for change in changes.look(names, found):
                said = {**change.finding._asdict(), "is_over": change.is_over}
                sys.stdout.buffer.write(encode(said))
            sys.stdout.flush()
            look += 1
            if _has_ended(max(0.0, looked_s + args.every - time.monotonic())):
                return 0
    except BrokenPipeError:  # the job is over
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _has_ended(seconds: float) -> bool:
    """Wait, and return whether standard input has ended."""
    end_s = time.monotonic() + seconds
    while (left_s := end_s - time.monotonic()) > 0:
        if select.select([0], [], [], left_s)[0] and not os.read(0, 4096):
            return True
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
