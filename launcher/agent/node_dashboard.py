"""Starts `bootseer serve` for a job with --dashboard, once its ranks run, on the coordinator's node.

The server is shared by the jobs of this user on this node: it outlives this one, and ends itself when no job has
run for a while. If another one listens there already, the new process says so and ends. It never disturbs the job.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from bootseer.own_module import command_of
from bootseer.secret import SECRET_VARIABLES
from launcher.agent.node_features import NodeFeature
from launcher.base import children
from launcher.base.loop import Alarm, EventLoop
from launcher.ranks.group import RankGroup

UNTIL_IDLE_S = 60
LOOK_S, MAX_LOOKS = 0.25, 80  # until it has told where it listens
MAX_OUTPUT_BYTES = 4096


class NodeDashboard:
    """The dashboard's process of one job."""

    def __init__(
        self,
        loop: EventLoop,
        arguments: tuple[str, ...],
        is_coordinator: Callable[[], bool],
        say: Callable[[str], object],
    ) -> None:
        """Args: arguments: of `bootseer serve`; is_coordinator: whether this node is the coordinator's."""
        self._arguments, self._is_coordinator, self._say = arguments, is_coordinator, say
        self._alarm = Alarm(loop)
        self._pid = 0
        self._output = -1
        self._looks = 0
        self._is_begun = False

    @property
    def feature(self) -> NodeFeature:
        return NodeFeature(started=self._on_started, close=self._close)

    def _on_started(self, _group: RankGroup) -> None:
        if self._is_begun or not self._is_coordinator():
            return
        self._is_begun = True
        argv = command_of("launcher.serve.process", *self._arguments, "--share", "--until-idle", str(UNTIL_IDLE_S))
        environ = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
        try:
            self._output = os.memfd_create("dashboard", os.MFD_CLOEXEC)
            null = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0)
            actions = [null, (os.POSIX_SPAWN_DUP2, 0, 1), (os.POSIX_SPAWN_DUP2, self._output, 2)]
            self._pid = os.posix_spawn(argv[0], argv, environ, file_actions=actions, setsid=True)
        except OSError as error:
            self._say(f"warning: --dashboard: {error.strerror or error}")
            self._close()
            return
        children.add(self._pid)
        self._alarm.set(LOOK_S, self._look)

    def _look(self) -> None:
        """Report what the process has said: its address, or why it has ended."""
        lines = os.pread(self._output, MAX_OUTPUT_BYTES, 0).decode("utf-8", "replace").splitlines()
        status = children.reap(self._pid)
        self._looks += 1
        if status is not None:
            self._pid = 0
        if status:
            self._say(f"warning: --dashboard: {_last(lines)}")
        elif lines and "://" in lines[-1]:
            self._say(f"dashboard: {_last(lines)}")
        elif status is None and self._looks < MAX_LOOKS:
            self._alarm.set(LOOK_S, self._look)
            return
        self._close_output()

    def _close(self) -> None:
        self._alarm.cancel()
        self._close_output()
        if self._pid:
            children.leave(self._pid)  # it serves other jobs, and ends itself
            self._pid = 0

    def _close_output(self) -> None:
        if self._output >= 0:
            os.close(self._output)
            self._output = -1


def _last(lines: list[str]) -> str:
    text = lines[-1] if lines else "it has ended without a word"
    return text.removeprefix("bootseer serve: ").removeprefix("error: ")
