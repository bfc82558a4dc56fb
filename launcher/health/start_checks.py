"""Health checks beside the start of an attempt (`--check`): runs them in a separate process and reports findings.

In: the output of that process (bootseer/health/at_start.py). Out: a log line and an event for each problem; with
`--check fail` the first failure, which makes this node leave the job. Nothing waits for the checks. If their
process fails, a warning is logged.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from bootseer.health.finding import BAD, OK, UNKNOWN, Finding, from_answer
from bootseer.own_module import command_of
from launcher.base.helper_process import ServiceProcess
from launcher.base.loop import EventLoop

if TYPE_CHECKING:
    from bootseer.health.options import Options

FIRST_LOG_HOURS = 1.0  # of the kernel's log, before the first attempt
MAX_REPORTED = 64  # log lines of a job
MAX_LINES = 8  # of a failure record

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
        """Args: folders: directories that the job writes to; unset: variables to remove for the process; note:
        makes an event; failed: called once at a failed check, None to only report it; options: of the user."""
        self._loop = loop
        self._arguments = [*(options.to_argv() if options is not None else []), "--", *folders]
        self._unset = unset
        self._say = say
        self._note = note
        self._failed = failed
        self._process: ServiceProcess | None = None
        self._is_done = False  # all checks of this attempt were made
        self._began_s = 0.0
        self._reported: set[Finding] = set()
        self.found: dict[Key, Finding] = {}  # problems at the start of the attempt

    def begin(self) -> None:
        """Start the checks of a new attempt, and cancel those of the last one."""
        self.close()
        self.found.clear()
        self._is_done = False
        before_s, self._began_s = self._began_s, time.monotonic()
        hours = (self._began_s - before_s) / 3600 if before_s else FIRST_LOG_HOURS
        argv = command_of("bootseer.health.at_start", "--log-hours", f"{hours:.6f}")
        environ = {name: value for name, value in os.environ.items() if name not in self._unset}
        try:
            self._process = ServiceProcess(self._loop, argv + self._arguments, environ, self._take, self._on_end)
        except OSError as error:
            self._say(f"warning: health checks disabled: {error.strerror}")

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.abandon()

    def tell(self, found: Finding) -> None:
        """Report a problem: log it once, and make an event each time."""
        if found.level == OK:
            return
        self._note(found)
        # Measured values change from attempt to attempt: ignore them, so that the problem is logged once.
        known = found._replace(measured=None, limit=None)
        if found.level != UNKNOWN and known not in self._reported and len(self._reported) < MAX_REPORTED:
            self._reported.add(known)
            self._say(f"check: {found.line()}")

    def report_over(self, found: Finding) -> None:
        """Log that a problem is over, if it was logged before; then log it anew if it recurs."""
        self.found.pop(key_of(found), None)
        known = found._replace(measured=None, limit=None)
        if known in self._reported:
            self._reported.discard(known)
            self._say(over_line(found))

    def _take(self, answer: dict[str, Any]) -> None:
        if answer.get("done") is True:
            self._is_done = True
            return
        try:
            found = from_answer(answer)
        except ValueError as error:
            self._say(f"warning: health check returned invalid output: {error}")
            return
        self.tell(found)
        if found.level not in (OK, UNKNOWN) and len(self.found) < MAX_REPORTED:
            self.found[key_of(found)] = found
        if found.level in BAD and self._failed is not None:
            failed, self._failed = self._failed, None
            failed(f"this node is not fit for the job: {found.line()}")

    def _on_end(self, why: str) -> None:
        self._process = None
        if not self._is_done:
            self._say(
                f"warning: health checks of this start disabled: their process has failed: {why}; "
                "run `bootseer check` on this node"
            )


def key_of(found: Finding) -> Key:
    """Return the key of a finding, which does not depend on measured values."""
    return found.check, found.where, found.what


def over_line(found: Finding) -> str:
    """Return the log line for a problem that is over."""
    return f"check: over    {found.check}{f' {found.where}' if found.where else ''}: {found.what}"


def worst_finding_lines(found: Iterable[Finding]) -> tuple[str, ...]:
    """Return lines for a failure record, the worst findings first."""
    return tuple(each.line() for each in sorted(found, key=lambda each: each.level not in BAD)[:MAX_LINES])
