"""Readers of files that ranks have left (flight_child.py), and of accelerators (devices_child.py).

On the event loop, never waiting. Child processes read, as they may fail, or never return: a mount that does not
answer must not block the watch over a job.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterable
from typing import Any, Generic, NamedTuple, TypeVar

from bootseer.hangs.layout import MAX_LINE
from bootseer.own_module import command_of
from bootseer.secret import SECRET_VARIABLES
from launcher.base.helper_process import ServiceProcess
from launcher.base.loop import Alarm, EventLoop
from launcher.monitor.collectives.accelerators import MAX_DEVICES, DeviceUse

T = TypeVar("T")
MAX_RANKS = 1024  # ranks whose dumps are read
LIMIT_S = 3.0  # less than a coordinator waits for a node, or for the stacks of its ranks


class RankFiles(NamedTuple):
    traces: bytes = b""  # calls in dumps of torch's flight recorder, packed like rings (ring.py)
    layout: str = ""  # how ranks lie in parallel groups


class DeviceSample(NamedTuple):
    """The activity of an accelerator, and the processes on it."""

    use: DeviceUse  # without ranks
    pids: tuple[int, ...]


class _Reader(Generic[T]):
    """One reading at a time, by a process that gets one request and answers it."""

    def __init__(self, loop: EventLoop, module: str, nothing: T, parse: Callable[[dict[str, Any]], T]) -> None:
        """Args: nothing: result without an answer; parse: may fail on data that others wrote."""
        self._loop, self._module, self._nothing, self._parse = loop, module, nothing, parse
        self._alarm = Alarm(loop)
        self._process: ServiceProcess | None = None
        self._then: Callable[[T], object] | None = None

    @property
    def is_busy(self) -> bool:
        return self._then is not None

    def close(self) -> None:
        """Close, without further callbacks."""
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


class RankFilesReader(_Reader[RankFiles]):
    def __init__(self, loop: EventLoop) -> None:
        super().__init__(loop, "launcher.monitor.collectives.flight_child", RankFiles(), _parse_left)

    def read(
        self,
        then: Callable[[RankFiles], object],
        ranks: Iterable[int],
        after_wall_s: float = 0.0,
        shift_ns: int = 0,
        layout: str = "",
    ) -> None:
        """Call `then` once, within LIMIT_S, never from within; a running reading is dropped.

        Args: ranks: whose dumps are read; after_wall_s: older ones belong to others; shift_ns: from this node's
        monotonic clock to the clock of the calls; layout: the file with the layout; "": none.
        """
        wanted = list(ranks)[:MAX_RANKS]
        self._begin(then, ranks=wanted, after_wall_s=after_wall_s, shift_ns=shift_ns, layout=layout)


class DeviceReader(_Reader[tuple[DeviceSample, ...]]):
    """Reader of NVIDIA's driver."""

    def __init__(self, loop: EventLoop) -> None:
        super().__init__(loop, "launcher.monitor.collectives.devices_child", (), _parse_devices)

    def read(self, then: Callable[[tuple[DeviceSample, ...]], object]) -> None:
        """Call `then` once, as RankFilesReader.read; () if nothing is known."""
        self._begin(then)


def _parse_left(answer: dict[str, Any]) -> RankFiles:
    return RankFiles(base64.b64decode(str(answer["traces"])), str(answer["layout"])[:MAX_LINE])


def _parse_devices(answer: dict[str, Any]) -> tuple[DeviceSample, ...]:
    return tuple(
        DeviceSample(DeviceUse(int(number), int(busy), int(memory), float(power_w), ()), tuple(map(int, pids)))
        for number, busy, memory, power_w, pids in answer["devices"][:MAX_DEVICES]
    )
