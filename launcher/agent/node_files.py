"""The files of a run on this node: its directories, the agent's events and records, and copies of ranks' logs.

In: the launch specification; spans, findings and ranks of the node's parts. Out: the log tree, one event file,
lines on the console. Separate from node.py, so that no part of a node needs to know whether events are written.
"""

from __future__ import annotations

import os
import time

from bootseer.light_typing import TYPE_CHECKING, Any, Callable, Mapping
from launcher.base.loop import EventLoop
from launcher.ranks.group import Rank, RankGroup
from launcher.ranks.output import logs
from launcher.ranks.output.console import Console
from launcher.spec import LaunchSpec
from launcher.supervisor.client import Exited

if TYPE_CHECKING:
    from bootseer.events import EventWriter, Stage
    from bootseer.health.finding import Finding
    from launcher.base.stage_span import StageSpan
    from launcher.provision.compile_caches import CachesSpan
    from launcher.ranks.output.tail import Tailer
    from launcher.ranks.preloader import PreloadSpan
    from launcher.ranks.spans import AttemptRecord
    from launcher.ranks.start_recorder import HelperSpan
    from launcher.rules.engine import MetricValue

RECORD_AFTER_S = 0.05  # also for an attempt's first events; their times are taken when they happen


class RunDirectories:
    """The directories of a run on this node: its log tree, and where its events are written."""

    def __init__(self) -> None:
        self.run = ""  # logs.NO_LOG_DIR without logs; "" until `make`
        self.events = ""  # "": no events are written

    def make(self, spec: LaunchSpec, say: Callable[[str], object]) -> None:
        """Make the log tree and the directory of events; without the latter, log why no events are written.

        Raises: ConfigError, LaunchError for the log tree.
        """
        self.run = logs.make_run_dir(spec.log_dir, spec.run_id)
        given = spec.events_dir
        if given is None:
            self.events = "" if self.run == logs.NO_LOG_DIR else f"{self.run}/events"
        else:
            self.events = "" if given == os.devnull else os.path.abspath(given)
        if self.events:
            try:
                os.makedirs(self.events, exist_ok=True)
            except OSError as error:
                say(f"warning: no events are written: {self.events}: {error.strerror}")
                self.events = ""

    @property
    def logs(self) -> str:
        """The log tree; "" without logs."""
        return "" if self.run == logs.NO_LOG_DIR else self.run

    def own(self) -> list[str]:
        return [directory for directory in (self.logs, self.events) if directory]

    def written(self) -> list[str]:
        """Return the directories that the job writes to."""
        return [os.getcwd(), os.environ.get("TMPDIR") or "/tmp", *self.own()]  # noqa: S108  read only


class NodeEvents:
    """The events of a node's agent. Without a directory for them, all methods do nothing."""

    def __init__(self, spec: LaunchSpec, host: str, directories: RunDirectories) -> None:
        self._spec = spec
        self._host = host
        self._directories = directories
        self.attempt = 0  # that events belong to
        self._writer: EventWriter | None = None
        self._fetched: list[tuple[str, str]] = []  # stage and digest, to report which were warmed

    def rank_file(self, rank: int, attempt: int) -> str:
        """Return the path of a rank's event file; "" if no events are written."""
        if not self._directories.events:
            return ""
        from bootseer.events import rank_events_path

        return rank_events_path(self._directories.events, self._host, rank, attempt)

    def agent_file(self) -> str:
        """Return the path of this node's event file; "" if no events are written."""
        if not self._directories.events:
            return ""
        from bootseer.events import agent_events_path

        return agent_events_path(self._directories.events, self._host)

    def instant(
        self, stage: str, name: str, *, error: str | None = None, attempt: int | None = None, **attrs: Any
    ) -> None:
        """Write an event without a duration. Args: stage: "" for none; attempt: by default the present one."""
        writer = self._of(self.attempt if attempt is None else attempt)
        if writer is not None:
            writer.instant(_stage(stage), name, error=error, **attrs)

    def span(self, stage: str, name: str, span: StageSpan | HelperSpan) -> None:
        """Write a timed part of the start. Args: stage: "" for none, if no rank waits for it."""
        writer = self._of(self.attempt)
        if writer is not None:
            _write_span(writer, _stage(stage), name, span)

    def helper(self, span: HelperSpan) -> None:
        """Write the span of a read-ahead, a recording or a command as an event of no stage."""
        self.span("", span.name, span)

    def fetched(self, stage: str, name: str, span: StageSpan, digest: str) -> None:
        """Write how a part was fetched. Args: digest: its fact that holds the digest of the part."""
        self._fetched.append((stage, str(span.facts.get(digest, ""))))
        self.span(stage, name, span)

    def caches(self, span: CachesSpan) -> None:
        """Write the result of compile caches."""
        writer = self._of(self.attempt)
        if writer is None:
            return
        if span.is_part_of_start:
            _write_span(writer, _stage("caches"), span.name, span)
        else:
            attrs: dict[str, Any] = dict(span.facts)
            writer.instant(_stage("caches"), span.name, mono_ns=span.ended_ns, error=span.error or None, **attrs)

    def preload(self, span: PreloadSpan) -> None:
        writer = self._of(self.attempt if span.is_part_of_start else None)
        if writer is None:
            return
        stage = _stage("import")
        number = writer.begin(stage, "preload", mono_ns=span.began_ns)
        attrs = {"modules": span.modules} if not span.error else {}
        writer.end(stage, "preload", number, mono_ns=span.ended_ns, error=span.error or None, **attrs)
        for why in span.left_out if span.is_part_of_start else ():
            writer.instant(stage, "fell_back", error=f"imported in each rank: {why}")
        if span.error and span.is_part_of_start:
            took_s = (span.ended_ns - span.began_ns) / 1e9
            writer.instant(stage, "fell_back", error=f"preloading failed after {took_s:.1f} s: {span.error}")

    def image_figures(self, figures: Mapping[str, float]) -> None:
        """Write how much the start has read from the image, and its stall time."""
        writer = self._of(self.attempt)
        if writer is None:
            return
        for name, value in figures.items():
            unit = {"s": "s", "bytes": "bytes"}.get(name.rpartition("_")[2])
            writer.scalar(_stage("image"), f"image_{name}", value, unit)

    def finding(self, found: Finding, name: str = "check") -> None:
        """Write a finding on this node, or its end."""
        self.instant("", name, error=found.line() if name == "check" else None, **found._asdict())

    def measured(self, measured: MetricValue) -> None:
        """Write a number that a rule has found in a rank's output."""
        writer, rule = self._of(self.attempt), measured.rule
        if writer is not None:
            from bootseer.events import Kind

            attrs = {"rule": rule.name, "metric": rule.metric}
            writer.write(None, Kind.SCALAR, "rule_metric", rank=measured.rank, value=measured.value, attrs=attrs)

    def warmed(self) -> None:
        """Write which parts of this start `bootseer warm` had fetched in advance, once."""
        fetched, self._fetched = [each for each in self._fetched if each[1]], []
        if not fetched or not self._directories.events:
            return
        from launcher.warm.warm_record import find

        writer = self._open()
        for warmed, at_s in find(fetched, os.environ):
            attrs: dict[str, Any] = {"how": warmed.how, "what": warmed.what, "bytes": warmed.fetched_bytes}
            age_s = round(max(0.0, time.time() - at_s), 1)
            writer.instant(_stage(warmed.stage), "warmed", age_s=age_s, **attrs)

    def close(self, say: Callable[[str], object]) -> None:
        """Close the file, and log how many events it lacks."""
        writer = self._writer
        if writer is None:
            return
        if writer.dropped:
            from bootseer.counted import counted

            say(
                f"warning: {counted(writer.dropped, 'event')} could not be written, so reports lack them: is the"
                f" disk of {self._directories.events} full?"
            )
        writer.close()

    def _of(self, attempt: int | None) -> EventWriter | None:
        """Return the writer for an attempt's events; None if no events are written."""
        if not self._directories.events:
            return None
        writer = self._open()
        writer.attempt = attempt
        return writer

    def _open(self) -> EventWriter:
        if self._writer is None:
            from bootseer.events import EventWriter

            self._writer = EventWriter(self.agent_file(), self._spec.run_id, self._host)
        return self._writer


class OutputCopies:
    """Copies the ranks' log files to the console, if that is requested."""

    def __init__(
        self, loop: EventLoop, console: Console, spec: LaunchSpec, host: str, directories: RunDirectories
    ) -> None:
        self._loop = loop
        self._console = console
        self._spec = spec
        self._host = host
        self._directories = directories
        self._tailer: Tailer | None = None

    def begin(self, group: RankGroup) -> None:
        """Begin to copy the output of ranks that are about to start."""
        spec, attempt = self._spec, group.world.attempt
        for rank in group.ranks:
            prefix = logs.line_prefix(
                spec.log_line_prefix_template, spec.role, rank.rank, rank.local_rank, self._host
            )
            for stream, tee, path, needles in (
                (logs.OUT, rank.logs.tee_stdout, rank.logs.stdout_path, spec.stdout_filters),
                (logs.ERR, rank.logs.tee_stderr, rank.logs.stderr_path, spec.stderr_filters),
            ):
                if tee and path is not None:
                    encoded = tuple(needle.encode(errors="surrogateescape") for needle in needles)
                    filtered = logs.filtered_path(self._directories.run, attempt, stream)
                    self._tail().add(path, rank.rank, stream, prefix, encoded, filtered)

    def _tail(self) -> Tailer:
        if self._tailer is None:
            from launcher.ranks.output.tail import Tailer

            self._tailer = Tailer(self._loop, self._console)
        return self._tailer

    def end_attempt(self) -> None:
        """Mark the files of this attempt as finished."""
        if self._tailer is not None:
            self._tailer.end_all()

    def finish(self, then: Callable[[str], object]) -> None:
        """Write the remaining output to the console, then call `then` with a line about what was left out."""
        if self._tailer is None:
            self._loop.call_soon(then, "")
        else:
            self._tailer.finish(then)

    def hasten(self) -> None:
        """Drop the output that the console has not accepted."""
        if self._tailer is not None:
            self._tailer.hasten()

    def close(self) -> None:
        if self._tailer is not None:
            self._tailer.close()


class AttemptRecords:
    """The agent's record of each attempt: the present one, and the last one until its files are read."""

    def __init__(
        self,
        loop: EventLoop,
        spec: LaunchSpec,
        host: str,
        directories: RunDirectories,
        say: Callable[[str], object],
        first_step: Callable[[Rank], object],
        began_ns: int,
    ) -> None:
        """Args: first_step: called when all ranks here have made it, with local rank 0; began_ns: of bootrun."""
        self._loop = loop
        self._spec = spec
        self._host = host
        self._directories = directories
        self._say = say
        self._first_step = first_step
        self.began_ns = began_ns  # when bootrun began, or the last attempt ended
        self.launched_ns = 0  # when bootrun had parsed its arguments; 0 once recorded
        self._ended_ns = 0  # the first rank of the attempt has ended
        self._backoff_ns = (0, 0)  # begin and end of the pause before the next attempt
        self._unrecorded: RankGroup | None = None  # has just started
        self._record: AttemptRecord | None = None
        self._last: AttemptRecord | None = None  # of the last attempt
        self._early_exits: list[tuple[Rank, Exited]] = []  # exits of ranks before there was a record

    def prepare(self) -> None:
        """Measure the next attempt from the end of the last one."""
        if self._ended_ns:
            self.began_ns, self._ended_ns = self._ended_ns, 0

    def pause(self, seconds: str) -> None:
        """Note that the coordinator starts no attempt for so long from now. Args: seconds: as it has sent them."""
        try:
            self._backoff_ns = (now_ns := time.monotonic_ns()), now_ns + int(float(seconds) * 1e9)
        except (ValueError, OverflowError):
            pass  # then the pause counts as rendezvous

    def started(self, group: RankGroup) -> None:
        """Record soon that all ranks run."""
        if self._directories.events:
            self._unrecorded = group
            self._loop.call_later(RECORD_AFTER_S, self.make)

    def make(self, watch_after_s: float = 0.0) -> None:
        """Write the start of the attempt, if that is still to be done.

        Args: watch_after_s: look for first steps from then on; the attempt may be over by then.
        """
        group, self._unrecorded = self._unrecorded, None
        if group is None:
            return
        from launcher.ranks.spans import AttemptRecord

        self._record = AttemptRecord(
            self._loop,
            self._directories.events,
            self._spec.run_id,
            self._host,
            group,
            self.began_ns,
            self.launched_ns,
            self._say,
            lambda: self._first_step(group.ranks[0]),
            watch_after_s,
            self._backoff_ns,
        )
        self.launched_ns, self._backoff_ns = 0, (0, 0)
        for rank, exited in self._early_exits:
            self._record.note_exit(rank, exited.status, exited.time_ns)
        self._early_exits.clear()

    def note_exit(self, group: RankGroup, rank: Rank, exited: Exited) -> None:
        if self._record is not None:
            self._record.note_exit(rank, exited.status, exited.time_ns)
        elif self._directories.events:
            self._early_exits.append((rank, exited))  # before the node's other ranks have started
        if (exited.status or group.is_stopping) and not self._ended_ns:
            self._ended_ns = exited.time_ns  # a next start is measured from here

    def end_attempt(self, group: RankGroup | None) -> None:
        """End the record. Its files are read while the next attempt runs, so that no process waits."""
        if self._early_exits:
            self._unrecorded = group  # it was stopped before all of its ranks had started
        self.make(RECORD_AFTER_S)
        if self._record is not None:
            self.finish_last()
            self._last, self._record = self._record, None
            self._last.stop()
        self._early_exits.clear()

    def finish_last(self) -> None:
        """Read the files of the last attempt, and log its line if that is still to be done."""
        over, self._last = self._last, None
        if over is not None:
            over.finish()

    def close(self) -> None:
        self.finish_last()
        if self._record is not None:
            self._record.finish()


def _stage(name: str) -> Stage | None:
    from bootseer.events import Stage

    return Stage(name) if name else None


def _write_span(
    writer: EventWriter, stage: Stage | None, name: str, span: StageSpan | HelperSpan | CachesSpan
) -> None:
    number = writer.begin(stage, name, mono_ns=span.began_ns)
    writer.end(stage, name, number, mono_ns=span.ended_ns, error=span.error or None, **span.facts)
