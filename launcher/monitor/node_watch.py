"""One node's part of the watch over ranks: samples them regularly, and collects their stacks.

On the event loop, never waiting. In: the ranks of an attempt. Out: messages for the coordinator, which judges
(watch.py), and the report of a hang in this node's logs. A failure here is logged once and the job continues.
"""

from __future__ import annotations

import errno
import os
import time
import zlib
from collections import deque
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

from launcher.base.facts import RankFacts
from launcher.base.loop import Alarm, Cancellable, EventLoop
from launcher.monitor.collectives.accelerators import DeviceUse, pack_uses, used_by_ranks
from launcher.monitor.samples.sampler import Sampler
from launcher.monitor.samples.stack_collector import StackCollector
from launcher.monitor.samples.stacks import RankStacks
from launcher.monitor.watch import pack_stacks, sample_interval_s
from launcher.ranks.group import RankGroup, RankState
from launcher.rendezvous.messages import HangReport, NodeStacks, RankSamples

if TYPE_CHECKING:
    from launcher.monitor.collectives.flight_recorder import DeviceReader, DeviceSample, RankFiles, RankFilesReader

MAX_SENT_BYTES = 60 << 10  # of stacks: limit of a message
MAX_REPORT_BYTES = 4 << 20
KEPT_SAMPLES = 16  # for status requests
SHOWN_LINES = 40  # of a report, on the console
SAME_S = 20.0  # queries closer together belong to one hang: files are read once for them
FILES_S = 1.5  # for reading files, after the stacks have arrived
DRIVER = "/dev/nvidiactl"
DEVICE_SAMPLE_VALID_S = (
    5.0  # how long a sample of accelerators is valid: not longer than between the queries of two hangs
)


class NodeWatch:
    """The watch over one attempt. `send` takes messages for the coordinator; `say` lines for users."""

    def __init__(
        self,
        loop: EventLoop,
        group: RankGroup,
        to_job_clock: Callable[[int], tuple[int, int]],
        send: Callable[[RankSamples | NodeStacks], object],
        say: Callable[[str], object],
        traced: bool = False,
    ) -> None:
        self._loop, self._group, self._send, self._say = loop, group, send, say
        self._to_job_clock = to_job_clock
        self._traced = traced
        self._moved_s = loop.time()  # when a rank had made a step, or printed something
        self._counts: list[tuple[int, int]] = []
        self._sampler = Sampler(group.ranks)
        self._collector: StackCollector | None = None
        self._reader: RankFilesReader | None = None  # of files that ranks have left
        self._read_at_s = 0.0
        self._left: RankFiles | None = None  # result of the last reading
        self._device_reader: DeviceReader | None = None
        self._asked_s = -inf
        self._devices: tuple[DeviceSample, ...] = ()
        self._held: NodeStacks | None = None  # the answer that waits for these readers
        self._files_alarm = Alarm(loop)
        self._timer: Cancellable | None = None
        self.looks: deque[list[RankFacts]] = deque(maxlen=KEPT_SAMPLES)  # by this node's clock, the newest last
        self._look()  # the first sample is learned from, too

    @property
    def numbers_fall(self) -> bool:
        """Whether heartbeat numbers do not show the progress of ranks (sampler.py)."""
        return self._sampler.numbers_fall

    def sample_now(self) -> list[RankFacts]:
        """Sample the ranks now, by this node's clock, without sending the result."""
        return self._sampler.look(self._loop.time())

    def stop(self) -> None:
        """Stop, as the attempt is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._sampler.close()
        if self._collector is not None:
            self._collector.close()
        self._files_alarm.cancel()
        self._held = None
        for reader in (self._reader, self._device_reader):
            if reader is not None:
                reader.close()

    def ask(self, number: int) -> None:
        """Answer a query about a hang: collect what the ranks of this node do."""
        if self._collector is None:
            self._collector = StackCollector(self._loop, self._group.ranks)
        self._read_files()
        self._ask_driver()
        self._collector.collect(lambda found: self._on_stacks(number, found))

    def _read_files(self) -> None:
        """Start reading dumps of torch's flight recorder and the ranks' layout, in parallel to the query."""
        now_s = self._loop.time()
        if self._reader is not None and now_s < self._read_at_s + SAME_S:
            return
        from launcher.monitor.collectives.flight_recorder import RankFilesReader

        self._reader = self._reader or RankFilesReader(self._loop)
        self._read_at_s, self._left = now_s, None
        began_ns = min((each.started_ns for each in self._group.ranks), default=0)
        after_s = time.time() - (time.monotonic_ns() - began_ns) / 1e9
        first = next((each.events_file for each in self._group.ranks if each.local_rank == 0), "")
        self._reader.read(
            self._on_files,
            () if self._traced else [each.rank for each in self._group.ranks],
            after_s,
            self._to_job_clock(0)[0],
            f"{first[:-6]}.layout" if first.endswith(".jsonl") else "",
        )

    def _ask_driver(self) -> None:
        """Start sampling the accelerators, once for queries that belong together."""
        now_s = self._loop.time()
        if now_s < self._asked_s + DEVICE_SAMPLE_VALID_S or not os.path.exists(DRIVER):
            return
        from launcher.monitor.collectives.flight_recorder import DeviceReader

        self._device_reader = self._device_reader or DeviceReader(self._loop)
        self._asked_s, self._devices = now_s, ()
        self._device_reader.read(self._on_devices)

    def _on_stacks(self, number: int, found: dict[int, RankStacks]) -> None:
        traces = pack_traces(self._group, self._to_job_clock(0)[0]) if self._traced else b""
        self._held = NodeStacks(number, pack_stacks(found, MAX_SENT_BYTES), traces, "")
        if self._is_reading():
            self._files_alarm.set(FILES_S, self._answer)
        else:
            self._answer()

    def _is_reading(self) -> bool:
        return any(each is not None and each.is_busy for each in (self._reader, self._device_reader))

    def _on_files(self, found: RankFiles) -> None:
        self._left = found
        if not self._is_reading():
            self._answer()

    def _on_devices(self, found: tuple[DeviceSample, ...]) -> None:
        self._devices = found
        if not self._is_reading():
            self._answer()

    def _answer(self) -> None:
        self._files_alarm.cancel()
        held, self._held = self._held, None
        if held is None:
            return
        if self._left is not None:
            held = held._replace(traces=held.traces or self._left.traces, layout=self._left.layout)
        if self._devices:
            held = held._replace(devices=pack_uses(self._uses()))
        self._send(held)

    def _uses(self) -> list[DeviceUse]:
        by_pid = {each.pid: each.rank for each in self._group.ranks}
        return used_by_ranks(
            [
                seen.use._replace(ranks=tuple(sorted({by_pid[pid] for pid in seen.pids if pid in by_pid})))
                for seen in self._devices
            ]
        )

    def _look(self) -> None:
        self.looks.append(self.sample_now())
        counts = [(each.steps, each.output_bytes) for each in self.looks[-1]]
        if counts != self._counts:
            self._counts, self._moved_s = counts, self._loop.time()
        silence_s = self._loop.time() - self._moved_s
        self._timer = self._loop.call_later(
            sample_interval_s(self._group.world.group_world_size, silence_s), self._look
        )
        shift_s = self._to_job_clock(0)[0] / 1e9
        facts = tuple(_on_job_clock(each, shift_s) for each in self.looks[-1])
        self._send(RankSamples(self._group.world.attempt, facts))


def pack_traces(group: RankGroup, shift_ns: int) -> bytes:
    """Serialize the ranks' calls of torch.distributed from their rings. Args: shift_ns: to the job's clock."""
    from launcher.monitor.collectives.ring import pack_rings, read_ring

    ended = (RankState.LINGERING, RankState.SUCCEEDED, RankState.FAILED)
    found = [read_ring(each.page_file, each.rank, each.state in ended) for each in group.ranks]
    return pack_rings([each for each in found if each is not None], shift_ns, MAX_SENT_BYTES)


def _on_job_clock(facts: RankFacts, shift_s: float) -> RankFacts:
    if not shift_s:
        return facts
    step_at_s = facts.step_at_s + shift_s if facts.step_at_s >= 0 else facts.step_at_s
    return facts._replace(at_s=facts.at_s + shift_s, step_at_s=step_at_s)


def write_hang_report(directory: str, found: HangReport) -> str:
    """Write the report of a hang beside the attempts' logs, each file atomically. Return the path of its text.

    Raises: OSError.
    """
    from bootseer.linux.files import replace_file

    path = os.path.join(directory, f"standstill-{found.number}")
    try:
        data = zlib.decompressobj().decompress(found.data, MAX_REPORT_BYTES)
    except zlib.error:
        raise OSError(errno.EBADMSG, "it cannot be unpacked") from None
    for end, content in ((".json", data + b"\n"), (".txt", found.text.encode(errors="replace"))):
        replace_file(path + end, content, 0o666)
    return path + ".txt"
