"""Health checks beside the start of an attempt (`--check`): a process of its own looks, this tells what it found.

In: what that process says (bootseer/health/beside.py). Out: a line and an event for each finding that is not in
order; with `--check fail` the first failure, which makes this node leave the job. Nothing waits for it, and its
own failure is told and costs nothing.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from bootseer.health.finding import BAD, OK, UNKNOWN, Finding, from_json, one_line
from launcher.loop import EventLoop
from launcher.service import ServiceProcess

FIRST_LOG_HOURS = 1.0  # of the kernel's log, before the first attempt
MOST_TOLD = 64  # lines of a job


class NodeHealth:
    """See the module's docstring."""

    def __init__(
        self,
        loop: EventLoop,
        folders: Iterable[str],
        unset: tuple[str, ...],
        say: Callable[[str], object],
        note: Callable[[Finding], object],
        failed: Callable[[str], object] | None,
    ) -> None:
        """Args: folders: that the job writes to; unset: variables that the process does not get; note: makes an
        event; failed: called once when something failed, None where that is only told."""
        self._loop = loop
        self._folders = list(folders)
        self._unset = unset
        self._say = say
        self._note = note
        self._failed = failed
        self._process: ServiceProcess | None = None
        self._began_s = 0.0
        self._told: set[Finding] = set()

    def begin(self) -> None:
        """An attempt begins: what is still being looked at for the last one is of no use any more."""
        self.close()
        before_s, self._began_s = self._began_s, time.monotonic()
        hours = (self._began_s - before_s) / 3600 if before_s else FIRST_LOG_HOURS
        argv = [sys.executable, "-P", "-m", "bootseer.health.beside", "--log-hours", f"{hours:.6f}", "--"]
        environ = {name: value for name, value in os.environ.items() if name not in self._unset}
        try:
            self._process = ServiceProcess(self._loop, argv + self._folders, environ, self._take, self._on_end)
        except OSError as error:
            self._say(f"this node is not checked: {error.strerror}")

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    def _take(self, answer: dict[str, Any]) -> None:
        try:
            found = from_json(one_line(str(answer.get("check")))[:64], answer)[0]
        except ValueError as error:
            self._say(f"a check said what could not be understood: {error}")
            return
        if found.level == OK:
            return
        self._note(found)
        # Figures change from attempt to attempt, and are told once.
        known = found._replace(measured=None, limit=None)
        if found.level != UNKNOWN and known not in self._told and len(self._told) < MOST_TOLD:
            self._told.add(known)
            self._say(f"check: {found.line()}")
        if found.level in BAD and self._failed is not None:
            failed, self._failed = self._failed, None
            failed(f"this node is not fit for the job: {found.line()}")

    def _on_end(self, _why: str) -> None:
        self._process = None
