"""The commands: `bootrun` (also `python -m launcher`, `bootseer run`) and `bootseer`.

The supervisor is forked here, before any heavy import. It stays small, has no threads, and is ready when the first
rank is to start.
"""

from __future__ import annotations

if __name__ == "__main__":  # before a file of the user can hide a standard module
    import _bootseer_entry

    _bootseer_entry.find_own()

import gc
import os
import sys

from bootseer.light_stdlib import signal
from bootseer.light_typing import NoReturn

FEW_FILES = 1024  # the usual soft limit; a rank that logs to files needs two descriptors


def bootrun(argv: list[str] | None = None) -> NoReturn:
    """Run `bootrun` and exit with its status."""
    _check_platform("bootrun")
    gc.disable()  # a start allocates little and keeps all of it
    from launcher.base import inherited
    from launcher.supervisor.supervisor import start_supervisor

    pipes = start_supervisor()
    _end_by_signals()
    inherited.unblock()
    if os.sysconf("SC_OPEN_MAX") < FEW_FILES:
        inherited.raise_limits()
    from launcher.app import main

    _leave(main(sys.argv[1:] if argv is None else argv, pipes))


def bootseer() -> NoReturn:
    """Run a command group of `bootseer`; `bootseer run` is `bootrun`."""
    _check_platform("bootseer")
    argv = sys.argv[1:]
    if argv and argv[0] == "run":
        bootrun(argv[1:])
    from launcher.commands import main

    _leave(main(argv))


def _check_platform(name: str) -> None:
    if sys.platform != "linux":
        print(f"{name}: error: Bootseer runs on Linux only, this is {sys.platform}", file=sys.stderr)
        sys.exit(1)


def _end_by_signals() -> None:
    """Let signals end bootrun with status 128+n until the agent has been imported and handles them."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, lambda number, _frame: os._exit(128 + number))


def _leave(status: int) -> NoReturn:
    # bootrun does not need the interpreter's tear-down, which costs milliseconds of each start.
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed from the start
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    bootrun()
