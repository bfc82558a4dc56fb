"""The commands: `bootrun` (also `python -m launcher`, `bootseer run`) and `bootseer`.

The guard is forked here, before anything heavy is imported: it stays small, has no threads, and is there when
the first rank is to be started.
"""

from __future__ import annotations

if __name__ == "__main__":  # before anything of the user's is taken for a module of Python's
    import _bootseer_entry

    _bootseer_entry.find_own()

import os
import signal
import sys

from bootseer.light_typing import NoReturn

FEW_FILES = 1024  # what most systems give; ranks with files of their own need two each


def bootrun(argv: list[str] | None = None) -> NoReturn:
    """Entry point of `bootrun`."""
    _check_platform("bootrun")
    from launcher import inherited
    from launcher.guard import start_guard

    pipes = start_guard()
    _end_by_signals()
    inherited.unblock()
    if os.sysconf("SC_OPEN_MAX") < FEW_FILES:
        inherited.raise_limits()
    from launcher.app import main

    _leave(main(sys.argv[1:] if argv is None else argv, pipes))


def bootseer() -> NoReturn:
    """Entry point of `bootseer`: command groups; `bootseer run` is `bootrun`."""
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
    """Until the agent handles them itself (it imports for a moment), signals end bootrun with their status."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, lambda number, _frame: os._exit(128 + number))


def _leave(status: int) -> NoReturn:
    # Nothing of ours needs the interpreter's tear-down, which costs milliseconds of each start.
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed from the start
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    bootrun()
