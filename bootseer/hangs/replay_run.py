"""Runs the groups of a replay: one command each, in parallel, each killed with its children after its time limit.

In: the command for a shell, groups, limits. Out: a result for each. The command receives its group in environment
variables; names of machines are never part of the command.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bootseer.hangs.replay import ReplayGroup
from bootseer.linux.child_processes import end_process

KILL_AFTER_S = 5.0
NOT_RUN = (126, 127)  # of a shell: the command cannot be run


class GroupResult(NamedTuple):
    group: ReplayGroup
    status: int  # of its command; or minus the signal's number
    seconds: float
    is_late: bool  # it was ended at its time limit

    @property
    def failed(self) -> bool:
        """Return whether the fault occurred: a replay that hangs has failed."""
        return self.is_late or self.status != 0

    @property
    def ran(self) -> bool:
        """Return whether the command could be run, so that the result counts."""
        return self.status not in NOT_RUN


def run_groups(
    groups: Sequence[ReplayGroup], command: str, limit_s: float, most: int, tell: Callable[[GroupResult], object]
) -> list[GroupResult]:
    """Run all groups; return when all have ended. Args: most: at the same time; tell: called with each result.

    Output of the commands goes to stderr of this process. Raises: OSError when there is no shell.
    """
    waiting, results = list(groups), []
    running: list[_Running] = []
    try:
        while waiting or running:
            while waiting and len(running) < most:
                running.append(_Running(waiting.pop(0), command, limit_s))
            _wait(running)
            for each in running[:]:
                result = each.result()
                if result is not None:
                    running.remove(each)
                    results.append(result)
                    tell(result)
    finally:
        for each in running:
            each.end()
    return results


class _Running:
    def __init__(self, group: ReplayGroup, command: str, limit_s: float) -> None:
        environ = {
            **os.environ,
            "BOOTSEER_REPLAY_HOSTS": ",".join(group.machines),
            "BOOTSEER_REPLAY_NODES": str(len(group.machines)),
            "BOOTSEER_REPLAY_GROUP": str(group.number),
        }
        self.group = group
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=2,
            start_new_session=True,
        )
        self.fd = os.pidfd_open(self._process.pid)
        self._began_s = time.monotonic()
        self.until_s = self._began_s + limit_s
        self._is_late = False

    def result(self) -> GroupResult | None:
        """Return the result, None while it runs; at its time limit signal it to end."""
        if self._process.poll() is None:
            if time.monotonic() >= self.until_s:
                self._signal(signal.SIGKILL if self._is_late else signal.SIGTERM)
                self._is_late, self.until_s = True, time.monotonic() + KILL_AFTER_S
            return None
        self._close()
        seconds = time.monotonic() - self._began_s
        return GroupResult(self.group, self._process.returncode, seconds, self._is_late)

    def end(self) -> None:
        """Kill it at once, as this process is stopped."""
        self._signal(signal.SIGKILL)
        end_process(self._process)
        self._close()

    def _close(self) -> None:
        self._signal(signal.SIGKILL)  # the rest of its session
        os.close(self.fd)

    def _signal(self, signum: int) -> None:
        try:
            os.killpg(self._process.pid, signum)
        except (ProcessLookupError, PermissionError):
            pass


def _wait(running: Sequence[_Running]) -> None:
    """Wait until one has ended or has reached its time limit."""
    poll = select.poll()
    for each in running:
        poll.register(each.fd, select.POLLIN)
    left_s = min(each.until_s for each in running) - time.monotonic()
    poll.poll(max(0.0, left_s) * 1000 + 1)
