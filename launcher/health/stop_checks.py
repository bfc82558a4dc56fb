"""Health checks of this node between two attempts: the same as during a start, but waited for, with a time limit.

In: directories, a limit. Out: findings that are not OK, and whether all checks were made. A check that hangs is
a finding, and so is a run that does not end in time. A run that was cut off proves nothing about the node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from bootseer.health.finding import HUNG, MAX_FINDINGS, OK, UNKNOWN, Finding, from_answer
from bootseer.own_module import command_of
from launcher.base.helper_process import ServiceProcess
from launcher.base.loop import Alarm, EventLoop

if TYPE_CHECKING:
    from bootseer.health.options import Options

OF_A_CHECK = 0.8  # of the whole limit, so that a check that hangs is named
WAY_OUT = "run `bootseer check` there"


class StopChecks:
    def __init__(
        self,
        loop: EventLoop,
        folders: Iterable[str],
        environ: Mapping[str, str],
        log_hours: float,
        limit_s: float,
        then: Callable[[list[Finding], bool], object],
        options: Options | None = None,
    ) -> None:
        """Start the checks. Args: log_hours: of the kernel's log; then: called once, not after `close`, with the
        findings and whether all checks were made; options: of the user. Raises: OSError."""
        self._then = then
        self._limit_s = limit_s
        self._found: list[Finding] = []
        self._is_done = False
        argv = command_of("bootseer.health.at_start", "--log-hours", f"{log_hours:.6f}")
        argv += options.to_argv() if options is not None else []
        argv += ["--timeout", f"{limit_s * OF_A_CHECK:.3f}", "--", *folders]
        self._process = ServiceProcess(loop, argv, environ, self._take, self._on_end)
        self._alarm = Alarm(loop)
        self._alarm.set(limit_s, self._on_late)

    def close(self) -> None:
        """End the checks without a result."""
        self._alarm.cancel()
        self._process.abandon()

    def _take(self, answer: dict[str, Any]) -> None:
        if answer.get("done") is True:
            self._is_done = True
            return
        try:
            found = from_answer(answer)
        except ValueError:
            return  # an invalid answer proves nothing about the node
        if found.level != OK and len(self._found) < MAX_FINDINGS:
            self._found.append(found)

    def _on_late(self) -> None:
        self._process.abandon()
        if not self._is_done:
            what = f"no end within {self._limit_s:g} s"
            self._found.append(Finding("checks", HUNG, what, "", self._limit_s, self._limit_s, "s", WAY_OUT))
        self._then(self._found, True)

    def _on_end(self, _why: str) -> None:
        self._alarm.cancel()
        if not self._is_done:
            self._found.append(Finding("checks", UNKNOWN, "cut off before all were made", way_out=WAY_OUT))
        self._then(self._found, self._is_done)
