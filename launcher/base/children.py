"""The processes that bootrun itself starts and reaps.

The first process of a container is also the parent of orphans, which the handler of SIGCHLD reaps. It leaves
bootrun's own processes to their owners: until an owner reaps one, no other process can have its pid.
"""

from __future__ import annotations

import os
import time

KILLED_S = 0.05  # for a killed process to end; the agent must not block for longer

_own: set[int] = set()
_left: set[int] = set()  # of these, processes that have got a signal to end, to be reaped later


def add(pid: int) -> None:
    """Note a process that bootrun has just started; `reap` follows."""
    _own.add(pid)


def reap(pid: int, *, waits: bool = False) -> int | None:
    """Reap a process of bootrun. Args: waits: until its end. Returns: its wait status; None if it still runs."""
    try:
        ended, status = os.waitpid(pid, 0 if waits else os.WNOHANG)
    except ChildProcessError:
        ended, status = pid, 0  # it was reaped elsewhere
    if not ended:
        return None
    _own.discard(pid)
    return status


def leave(pid: int) -> None:
    """Leave a process of bootrun that has got a signal to end and may wait in the kernel; `reap_left` follows."""
    _left.add(pid)


def reap_left() -> bool:
    """Reap the left processes that have ended. Returns: whether there is none any more."""
    for pid in tuple(_left):
        if reap(pid) is not None:
            _left.discard(pid)
    return not _left


def reap_killed(pid: int) -> None:
    """Reap a killed process of bootrun, or leave it if it does not end at once."""
    leave(pid)
    end_s = time.monotonic() + KILLED_S
    while not reap_left() and pid in _left and time.monotonic() < end_s:
        time.sleep(0.001)


def reap_orphans() -> None:
    """Reap ended children that bootrun has not started."""
    from bootseer.linux.processes import list_children

    for pid in list_children(os.getpid()):
        if pid not in _own:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                pass
