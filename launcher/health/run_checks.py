"""Health checks while ranks run (`--check`): a separate process checks periodically, this module reports changes.

In: the output of that process (bootseer/health/while_running.py). Out: new problems, problems that are over,
current problems. If that process fails, a warning is logged once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from bootseer.health.finding import Finding, from_answer
from bootseer.own_module import command_of
from launcher.base.helper_process import ServiceProcess
from launcher.base.loop import EventLoop
from launcher.health.start_checks import Key, key_of

if TYPE_CHECKING:
    from bootseer.health.options import Options

MAX_KNOWN = 64


class HealthWatch:
    """See the module's docstring; continues from one attempt to the next."""

    def __init__(
        self,
        loop: EventLoop,
        folders: Iterable[str],
        unset: tuple[str, ...],
        options: Options | None,
        say: Callable[[str], object],
        came: Callable[[Finding], object],
        over: Callable[[Finding], object],
    ) -> None:
        """Args: as of NodeHealth; came, over: called for each finding that is new, or over."""
        self._loop = loop
        self._directories = list(folders)
        self._unset = unset
        self._options = options
        self._say = say
        self._came = came
        self._over = over
        self._process: ServiceProcess | None = None
        self.found: dict[Key, Finding] = {}  # current problems

    def begin(self) -> None:
        """Start the checks, once, when ranks run."""
        argv = command_of("bootseer.health.while_running")
        if self._options is not None:
            every_s = self._options.every_s
            argv += [*([f"--every={every_s:g}"] if every_s is not None else []), *self._options.to_argv()]
        environ = {name: value for name, value in os.environ.items() if name not in self._unset}
        try:
            self._process = ServiceProcess(
                self._loop, [*argv, "--", *self._directories], environ, self._take, self._on_end
            )
        except OSError as error:
            self._on_end(error.strerror or "it cannot be started")

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.abandon()

    def _take(self, answer: dict[str, Any]) -> None:
        try:
            found = from_answer(answer)
        except ValueError as error:
            self._say(f"warning: health check returned invalid output: {error}")
            return
        key = key_of(found)
        if answer.get("is_over") is True:
            if self.found.pop(key, None) is not None:
                self._over(found)
        elif key in self.found or len(self.found) < MAX_KNOWN:
            self.found[key] = found
            self._came(found)

    def _on_end(self, why: str) -> None:
        self._process = None
        self.found.clear()  # their end would not be reported
        self._say(f"warning: health checks while ranks run disabled: {why}")
