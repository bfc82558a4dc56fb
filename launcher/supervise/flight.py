"""What ranks have left in files (flight_child.py), and what accelerators do (devices_child.py), had from processes
that may fail, or never come back.

On the event loop, never waiting: a mount that does not answer must not hold who watches over a job.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterable
from typing import Any, Generic, NamedTuple, TypeVar

from bootseer.diagnose.layout import MOST_LINE
from bootseer.own_module import command_of
from bootseer.secret import SECRET_VARIABLES
from launcher.loop import Alarm, EventLoop
from launcher.service import ServiceProcess
from launcher.supervise.accelerators import MOST_DEVICES, DeviceUse

T = TypeVar("T")
MOST_RANKS = 1024  # whose dumps are read
LIMIT_S = 3.0  # less than a coordinator waits for a node, or for the stacks of its ranks


class Left(NamedTuple):
    """What there was."""

    traces: bytes = b""  # calls in dumps of torch's flight recorder, packed as of rings (ring.py)
    layout: str = ""  # how ranks lie in parallel groups


class DeviceSeen(NamedTuple):
    """What an accelerator does, and the processes on it."""

    use: DeviceUse  # without ranks
    pids: tuple[int, ...]


class _Reader(Generic[T]):
    """One reading at a time, by a process that is given an order and answers it."""

    def __init__(self, loop: EventLoop, module: str, nothing: T, parse: Callable[[dict[str, Any]], T]) -> None:
        """Args: nothing: what is told where there is no answer; parse: may fail with what others wrote."""
        self._loop, self._module, self._nothing, self._parse = loop, module, nothing, parse
        self._alarm = Alarm(loop)
        self._process: ServiceProcess | None = None
        self._then: Callable[[T], object] | None = None

    @property
    def is_busy(self) -> bool:
        return self._then is not None

    def close(self) -> None:
        """Nobody is called any more."""
        self._then = None
        self._alarm.cancel()
        process, self._process = self._process, None
        if process is not None:
            process.abandon()

    def _begin(self, then: Callable[[T], object], **order: object) -> None:
        self.close()
        self._then = then
        argv = command_of(self._module)
        environ = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
        try:
            self._process = ServiceProcess(
                self._loop, argv, environ, self._take, lambda _why: self._end(self._nothing)
            )
        except OSError:
            self._alarm.set(0.0, self._end, self._nothing)
            return
        self._process.ask("read", **order)
        self._alarm.set(LIMIT_S, self._end, self._nothing)

    def _take(self, answer: dict[str, Any]) -> None:
        try:
            found = self._parse(answer)
        except (ValueError, KeyError, TypeError, OverflowError):
            found = self._nothing
        self._end(found)

    def _end(self, found: T) -> None:
        then = self._then
        self.close()
        if then is not None:
            then(found)


class LeftReader(_Reader[Left]):
    """Of files."""

    def __init__(self, loop: EventLoop) -> None:
        super().__init__(loop, "launcher.supervise.flight_child", Left(), _parse_left)

    def read(
        self,
        then: Callable[[Left], object],
        ranks: Iterable[int],
        after_wall_s: float = 0.0,
        shift_ns: int = 0,
        layout: str = "",
    ) -> None:
        """Calls `then` once, within LIMIT_S, never from within; of a reading under way no more is heard.

        Args: ranks: whose dumps are looked for; after_wall_s: older ones are others'; shift_ns: from this node's
        monotonic clock to the one on which calls are told; layout: the file with that; "": none.
        """
        wanted = list(ranks)[:MOST_RANKS]
        self._begin(then, ranks=wanted, after_wall_s=after_wall_s, shift_ns=shift_ns, layout=layout)


class DeviceReader(_Reader[tuple[DeviceSeen, ...]]):
    """Of NVIDIA's driver."""

    def __init__(self, loop: EventLoop) -> None:
        super().__init__(loop, "launcher.supervise.devices_child", (), _parse_devices)

    def read(self, then: Callable[[tuple[DeviceSeen, ...]], object]) -> None:
        """Calls `then` once, as LeftReader.read; () where nothing is known."""
        self._begin(then)


def _parse_left(answer: dict[str, Any]) -> Left:
    return Left(base64.b64decode(str(answer["traces"])), str(answer["layout"])[:MOST_LINE])


def _parse_devices(answer: dict[str, Any]) -> tuple[DeviceSeen, ...]:
    return tuple(
        DeviceSeen(DeviceUse(int(number), int(busy), int(memory), float(power_w), ()), tuple(map(int, pids)))
        for number, busy, memory, power_w, pids in answer["devices"][:MOST_DEVICES]
    )
