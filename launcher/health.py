"""Health checks beside the start of an attempt (`--check`): a process of its own looks, this tells what it found.

In: what that process says (bootseer/health/beside.py). Out: a line and an event for each finding that is not in
order; with `--check fail` the first failure, which makes this node leave the job. Nothing waits for it, and its
own failure is told and costs nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from bootseer.health.finding import BAD, OK, UNKNOWN, Finding, from_json, one_line
from bootseer.own_module import command_of
from launcher.loop import EventLoop
from launcher.service import ServiceProcess

if TYPE_CHECKING:
    from bootseer.health.options import Options

FIRST_LOG_HOURS = 1.0  # of the kernel's log, before the first attempt
MOST_TOLD = 64  # lines of a job
MOST_LINES = 8  # of a failure's page

Key = tuple[str, str, str]


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
        options: Options | None = None,
    ) -> None:
        """Args: folders: that the job writes to; unset: variables that the process does not get; note: makes an
        event; failed: called once when something failed, None where that is only told; options: of the user."""
        self._loop = loop
        self._arguments = [*(options.to_argv() if options is not None else []), "--", *folders]
        self._unset = unset
        self._say = say
        self._note = note
        self._failed = failed
        self._process: ServiceProcess | None = None
        self._began_s = 0.0
        self._told: set[Finding] = set()
        self.found: dict[Key, Finding] = {}  # that was wrong at the start of the attempt

    def begin(self) -> None:
        """An attempt begins: what is still being looked at for the last one is of no use any more."""
        self.close()
        self.found.clear()
        before_s, self._began_s = self._began_s, time.monotonic()
        hours = (self._began_s - before_s) / 3600 if before_s else FIRST_LOG_HOURS
        argv = command_of("bootseer.health.beside", "--log-hours", f"{hours:.6f}")
        environ = {name: value for name, value in os.environ.items() if name not in self._unset}
        try:
            self._process = ServiceProcess(self._loop, argv + self._arguments, environ, self._take, self._on_end)
        except OSError as error:
            self._say(f"warning: this node is not checked: {error.strerror}")

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    def tell(self, found: Finding) -> None:
        """A line once, and an event each time, for what is not in order."""
        if found.level == OK:
            return
        self._note(found)
        # Figures change from attempt to attempt, and are told once.
        known = found._replace(measured=None, limit=None)
        if found.level != UNKNOWN and known not in self._told and len(self._told) < MOST_TOLD:
            self._told.add(known)
            self._say(f"check: {found.line()}")

    def tell_over(self, found: Finding) -> None:
        """What was not in order is again: a line, if there was one before. Should it come back, that is told."""
        self.found.pop(key_of(found), None)
        known = found._replace(measured=None, limit=None)
        if known in self._told:
            self._told.discard(known)
            self._say(over_line(found))

    def _take(self, answer: dict[str, Any]) -> None:
        if answer.get("done") is True:
            return
        try:
            found = from_json(one_line(str(answer.get("check")))[:64], answer)[0]
        except ValueError as error:
            self._say(f"warning: a check said what could not be understood: {error}")
            return
        self.tell(found)
        if found.level not in (OK, UNKNOWN) and len(self.found) < MOST_TOLD:
            self.found[key_of(found)] = found
        if found.level in BAD and self._failed is not None:
            failed, self._failed = self._failed, None
            failed(f"this node is not fit for the job: {found.line()}")

    def _on_end(self, _why: str) -> None:
        self._process = None


def key_of(found: Finding) -> Key:
    """What makes it the same finding when its figures change."""
    return found.check, found.where, found.what


def over_line(found: Finding) -> str:
    """Of what was not in order, and is again."""
    return f"check: over    {found.check}{f' {found.where}' if found.where else ''}: {found.what}"


def worst_lines(found: Iterable[Finding]) -> tuple[str, ...]:
    """For the page of a failure: what is bad comes first."""
    return tuple(each.line() for each in sorted(found, key=lambda each: each.level not in BAD)[:MOST_LINES])
