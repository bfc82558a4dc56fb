"""Runs the groups of a replay: one command each, side by side, each ended with its children when its time is up.

In: the command for a shell, groups, limits. Out: what became of each. The command learns its group by variables of
the environment, never by being put together with names of machines.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bootseer.diagnose.replay import Group

KILL_AFTER_S = 5.0
NOT_RUN = (126, 127)  # of a shell: the command cannot be run


class Result(NamedTuple):
    """What became of a group."""

    group: Group
    status: int  # of its command; minus the signal's number
    seconds: float
    is_late: bool  # it was ended, as its time was up

    @property
    def failed(self) -> bool:
        """Whether the fault has shown: a replay that hangs is one that fails."""
        return self.is_late or self.status != 0

    @property
    def ran(self) -> bool:
        """Whether it says anything about the machines."""
        return self.status not in NOT_RUN


def run_groups(
    groups: Sequence[Group], command: str, limit_s: float, most: int, tell: Callable[[Result], object]
) -> list[Result]:
    """Runs all; returns when all have ended. Args: most: at the same time; tell: of each when it has ended.

    What the commands print goes to our stderr. Raises: OSError when there is no shell.
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
    def __init__(self, group: Group, command: str, limit_s: float) -> None:
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

    def result(self) -> Result | None:
        """None while it runs; asked when its time is up, it is told to end."""
        if self._process.poll() is None:
            if time.monotonic() >= self.until_s:
                self._signal(signal.SIGKILL if self._is_late else signal.SIGTERM)
                self._is_late, self.until_s = True, time.monotonic() + KILL_AFTER_S
            return None
        self._close()
        seconds = time.monotonic() - self._began_s
        return Result(self.group, self._process.returncode, seconds, self._is_late)

    def end(self) -> None:
        """At once: somebody has stopped us."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._close()

    def _close(self) -> None:
        self._signal(signal.SIGKILL)  # what it has left of its session
        os.close(self.fd)

    def _signal(self, signum: int) -> None:
        try:
            os.killpg(self._process.pid, signum)
        except (ProcessLookupError, PermissionError):
            pass


def _wait(running: Sequence[_Running]) -> None:
    """Until one has ended, or the time of one is up."""
    poll = select.poll()
    for each in running:
        poll.register(each.fd, select.POLLIN)
    left_s = min(each.until_s for each in running) - time.monotonic()
    poll.poll(max(0.0, left_s) * 1000 + 1)
