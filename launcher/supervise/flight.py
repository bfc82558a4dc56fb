"""What ranks have left in files (flight_child.py), had from a process that may fail, or never come back.

On the event loop, never waiting: a mount that does not answer must not hold who watches over a job.
"""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from bootseer.diagnose.layout import MOST_LINE
from bootseer.secret import SECRET_VARIABLES
from launcher.loop import Alarm, EventLoop
from launcher.service import ServiceProcess
from launcher.supervise.accelerators import MOST_DEVICES, DeviceUse

MOST_RANKS = 1024  # whose dumps are read
LIMIT_S = 3.0  # less than a coordinator waits for a node, or for the stacks of its ranks


class Left(NamedTuple):
    """What there was."""

    traces: bytes = b""  # calls in dumps of torch's flight recorder, packed as of rings (ring.py)
    layout: str = ""  # how ranks lie in parallel groups
    devices: tuple[tuple[DeviceUse, tuple[int, ...]], ...] = ()  # and the processes on each; ranks are not known


class LeftReader:
    """One reading at a time."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._alarm = Alarm(loop)
        self._process: ServiceProcess | None = None
        self._then: Callable[[Left], object] | None = None

    @property
    def is_busy(self) -> bool:
        return self._then is not None

    def read(
        self,
        then: Callable[[Left], object],
        ranks: Iterable[int],
        after_wall_s: float = 0.0,
        shift_ns: int = 0,
        layout: str = "",
        devices: bool = False,
    ) -> None:
        """Calls `then` once, within LIMIT_S, never from within; of a reading under way no more is heard.

        Args: ranks: whose dumps are looked for; after_wall_s: older ones are others'; shift_ns: from this node's
        monotonic clock to the one on which calls are told; layout: the file with that; "": none;
        devices: what accelerators do, too.
        """
        self.close()
        self._then = then
        argv = [sys.executable, "-P", "-m", "launcher.supervise.flight_child"]
        environ = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
        try:
            self._process = ServiceProcess(self._loop, argv, environ, self._take, lambda _why: self._end(Left()))
        except OSError:
            self._alarm.set(0.0, self._end, Left())
            return
        order = {
            "ranks": list(ranks)[:MOST_RANKS],
            "after_wall_s": after_wall_s,
            "shift_ns": shift_ns,
            "layout": layout,
            "devices": devices,
        }
        self._process.ask("read", **order)
        self._alarm.set(LIMIT_S, self._end, Left())

    def close(self) -> None:
        """Nobody is called any more."""
        self._then = None
        self._alarm.cancel()
        process, self._process = self._process, None
        if process is not None:
            process.abandon()

    def _take(self, answer: dict[str, Any]) -> None:
        try:
            traces = base64.b64decode(str(answer["traces"]))
            devices = tuple(
                (DeviceUse(int(number), int(busy), int(memory), float(power_w), ()), tuple(map(int, pids)))
                for number, busy, memory, power_w, pids in answer["devices"][:MOST_DEVICES]
            )
            self._end(Left(traces, str(answer["layout"])[:MOST_LINE], devices))
        except (ValueError, KeyError, TypeError):
            self._end(Left())

    def _end(self, found: Left) -> None:
        then = self._then
        self.close()
        if then is not None:
            then(found)
