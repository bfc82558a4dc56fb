"""Health checks of this node between two attempts: the same as beside a start, but waited for, with a bound.

In: folders, a limit. Out: the findings that are not in order, and whether it was a whole look. A check that hangs
is a finding, and so is a look that does not end; one that was cut off says nothing of the node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from bootseer.health.finding import HUNG, MOST_FINDINGS, OK, UNKNOWN, Finding, from_json, one_line
from bootseer.own_module import command_of
from launcher.loop import Alarm, EventLoop
from launcher.service import ServiceProcess

if TYPE_CHECKING:
    from bootseer.health.options import Options

OF_A_CHECK = 0.8  # of the whole time: a check that hangs is told by its name
WAY_OUT = "run `bootseer check` there"


class StopChecks:
    """One look."""

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
        """Begins it. Args: log_hours: of the kernel's log; then: called once, not after `close`, with whether it
        was a whole look; options: of the user. Raises: OSError."""
        self._then = then
        self._limit_s = limit_s
        self._found: list[Finding] = []
        self._is_done = False
        argv = command_of("bootseer.health.beside", "--log-hours", f"{log_hours:.6f}")
        argv += options.to_argv() if options is not None else []
        argv += ["--timeout", f"{limit_s * OF_A_CHECK:.3f}", "--", *folders]
        self._process = ServiceProcess(loop, argv, environ, self._take, self._on_end)
        self._alarm = Alarm(loop)
        self._alarm.set(limit_s, self._on_late)

    def close(self) -> None:
        """Nobody waits for it any more."""
        self._alarm.cancel()
        self._process.kill()

    def _take(self, answer: dict[str, Any]) -> None:
        if answer.get("done") is True:
            self._is_done = True
            return
        try:
            found = from_json(one_line(str(answer.get("check")))[:64], answer)[0]
        except ValueError:
            return  # an answer that is none says nothing of the node
        if found.level != OK and len(self._found) < MOST_FINDINGS:
            self._found.append(found)

    def _on_late(self) -> None:
        self._process.kill()
        if not self._is_done:
            what = f"no end within {self._limit_s:g} s"
            self._found.append(Finding("checks", HUNG, what, "", self._limit_s, self._limit_s, "s", WAY_OUT))
        self._then(self._found, True)

    def _on_end(self, _why: str) -> None:
        self._alarm.cancel()
        if not self._is_done:
            self._found.append(Finding("checks", UNKNOWN, "cut off before all were made", way_out=WAY_OUT))
        self._then(self._found, self._is_done)
