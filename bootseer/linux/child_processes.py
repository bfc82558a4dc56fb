"""The end of child processes that may wait in the kernel (state D), where no signal reaches them.

A wait without a limit for such a process lasts as long as its file server or device hangs. So each wait here has a
limit; a process that exceeds it is left behind, and a later call reaps it. Light: the launch path imports it.
"""

from __future__ import annotations

import os
import time

from bootseer.light_typing import TYPE_CHECKING
from bootseer.linux.processes import read_process

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping, Sequence

IN_KERNEL_S = 1.0  # for a killed process that waits in the kernel
SLOW_S = 10.0  # for any other: it ends as soon as an overloaded machine runs it
_MAX_PAUSE_S = 0.02

_left: set[int] = set()  # killed processes that are still to be reaped
os.register_at_fork(after_in_child=_left.clear)  # they are the parent's


def reap_left() -> None:
    """Reap the processes that were left behind and have ended since."""
    for pid in tuple(_left):
        try:
            has_ended = os.waitpid(pid, os.WNOHANG)[0] != 0
        except ChildProcessError:
            has_ended = True  # reaped by the handler for orphans (first process of a container)
        if has_ended:
            _left.discard(pid)


def wait_killed(pid: int, limit_s: float | None = None) -> int | None:
    """Wait for a killed child, and return its `os.waitstatus_to_exitcode`; None if it is left behind.

    Args: limit_s: by default IN_KERNEL_S or SLOW_S.
    """
    reap_left()
    began_s, pause_s = time.monotonic(), 0.001
    while True:
        try:
            found, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return 0  # reaped by the handler for orphans (first process of a container)
        if found:
            return os.waitstatus_to_exitcode(status)
        most_s = limit_s
        if most_s is None:
            most_s = IN_KERNEL_S if waits_in_kernel(pid) else SLOW_S
        if time.monotonic() - began_s > most_s:
            _left.add(pid)
            return None
        time.sleep(pause_s)
        pause_s = min(_MAX_PAUSE_S, 2 * pause_s)


def end_process(process: subprocess.Popen[bytes]) -> int | None:
    """Kill a process and wait for its end; return its status, None if it is left behind. Its pipes stay open."""
    try:
        process.kill()
    except PermissionError:
        pass  # it has become another user's, as fusermount3 does: it ends by itself
    status = process.poll()
    if status is None:
        status = wait_killed(process.pid)
        process.returncode = -9 if status is None else status  # this module reaps it
    return status


def run_limited(
    words: Sequence[str],
    *,
    timeout_s: float,
    data: bytes = b"",
    environ: Mapping[str, str] | None = None,
    cwd: str | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Run a program with the input `data`; return its status and output.

    Not by `subprocess.run`, which waits for a killed program without a limit.
    Raises: subprocess.TimeoutExpired, after the program was killed; OSError.
    """
    import subprocess

    process = subprocess.Popen(
        words,
        stdin=subprocess.PIPE if data else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environ,
        cwd=cwd,
    )
    try:
        out, err = process.communicate(data or None, timeout_s)
    except BaseException:
        end_process(process)
        raise
    finally:
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def waits_in_kernel(pid: int) -> bool:
    """Return whether no signal reaches a process (state D)."""
    process = read_process(pid)
    return process is not None and process.state == "D"
