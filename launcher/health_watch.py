"""Health checks while ranks run (`--check`): a process of its own looks now and then, this tells what is new.

In: what that process says (bootseer/health/watching.py). Out: what has come, what is over, what is wrong by now.
Its own failure is told once and costs nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from bootseer.health.finding import Finding, from_json, one_line
from bootseer.own_module import command_of
from launcher.health import Key, key_of
from launcher.loop import EventLoop
from launcher.service import ServiceProcess

if TYPE_CHECKING:
    from bootseer.health.options import Options

MOST_KNOWN = 64


class HealthWatch:
    """See the module's docstring; goes on from one attempt to the next."""

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
        """Args: as of NodeHealth; came, over: told of each finding that has come, and gone."""
        self._loop = loop
        self._folders = list(folders)
        self._unset = unset
        self._options = options
        self._say = say
        self._came = came
        self._over = over
        self._process: ServiceProcess | None = None
        self.found: dict[Key, Finding] = {}  # that is wrong by now

    def begin(self) -> None:
        """Ranks run: from now on, once."""
        argv = command_of("bootseer.health.watching")
        if self._options is not None:
            every_s = self._options.every_s
            argv += [*([f"--every={every_s:g}"] if every_s is not None else []), *self._options.to_argv()]
        environ = {name: value for name, value in os.environ.items() if name not in self._unset}
        try:
            self._process = ServiceProcess(
                self._loop, [*argv, "--", *self._folders], environ, self._take, self._on_end
            )
        except OSError as error:
            self._on_end(error.strerror or "it cannot be started")

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    def _take(self, answer: dict[str, Any]) -> None:
        try:
            found = from_json(one_line(str(answer.get("check")))[:64], answer)[0]
        except ValueError as error:
            self._say(f"warning: a check said what could not be understood: {error}")
            return
        key = key_of(found)
        if answer.get("is_over") is True:
            if self.found.pop(key, None) is not None:
                self._over(found)
        elif key in self.found or len(self.found) < MOST_KNOWN:
            self.found[key] = found
            self._came(found)

    def _on_end(self, why: str) -> None:
        self._process = None
        self.found.clear()  # nobody would say that it is over
        self._say(f"warning: this node is not checked any more while ranks run: {why}")
