"""One node's part of the log rules: scans the log files of its ranks periodically, and sends its findings.

It runs on the event loop, never waits for a rank, and uses at most about a hundredth of a core: after an expensive
scan the next one is later. In: the ranks of an attempt. Out: messages for the coordinator, which acts on them,
numbers for the event file, lines about rules that are switched off. Each failure is logged once.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from launcher.base.loop import Alarm, EventLoop
from launcher.ranks.group import Rank, RankGroup
from launcher.ranks.output.follow import LogCursor, LogFile, add_prefix
from launcher.ranks.output.logs import RankLogs
from launcher.rendezvous.messages import RuleFired, RuleObservation
from launcher.rules.engine import DisabledRule, MetricValue, Outcome, RuleEngine, RuleFinding, RuleMatch
from launcher.rules.job_watch import ANY_SCAN_S, seen_every_s
from launcher.rules.rule import Rule

SCAN_S = 1.0
MAX_LOOK_S = 10.0
MAX_CORES = 0.01
MAX_RULE_S = 0.05  # CPU time for one rule and a rank's output since the last scan
MAX_LOOK_BYTES = 256 << 10  # of all files
MIN_FILE_BYTES = 8 << 10
MEASURED_S = 10.0  # between two recorded numbers of one rule and rank
T = TypeVar("T")


def describe_unseen(ranks: Sequence[Rank]) -> str:
    """Return a line about output that goes to no file, so that no rule can read it; "" if there is none."""
    streams = [
        name
        for name, paths in (
            ("stdout", [rank.logs.stdout_path for rank in ranks]),
            ("stderr", [rank.logs.stderr_path for rank in ranks]),
        )
        if any(path in (None, os.devnull) for path in paths)
    ]
    if not streams:
        return ""
    return (
        f"rules cannot read output on {' and '.join(streams)} that goes only to the console: "
        "--tee 3 also writes it to files"
    )


class Reported(NamedTuple):
    """Functions that receive findings."""

    send: Callable[[RuleFired | RuleObservation], object]  # to the coordinator
    say: Callable[[str], object]  # to the user
    measured: Callable[[MetricValue], object]  # to the event file


class NodeRules:
    """One node's part of the log rules, in one attempt."""

    def __init__(self, loop: EventLoop, group: RankGroup, rules: Sequence[Rule], told: Reported) -> None:
        self._loop, self._group, self._reported = loop, group, told
        now_s = loop.time()
        readers = [RankReader(rank.rank, rank.logs, rank.events_file) for rank in group.ranks]
        self._readers = {reader.rank: reader for reader in readers if reader.is_read}
        self._engine = RuleEngine(rules, self._readers, group.world.world_size, now_s)
        files = sum(reader.files for reader in readers)
        self._max_bytes = max(MIN_FILE_BYTES, MAX_LOOK_BYTES // max(1, files))
        self._limit = TimeLimit(MAX_RULE_S)
        self._alarm = Alarm(loop)
        self._seen_s: dict[tuple[str, str], float] = {}
        self._measured_s: dict[tuple[str, int], float] = {}
        self._is_skipping_reported = False
        self._is_cheaper = False  # the rule that made this scan expensive is switched off
        self._any = [rule for rule in rules if rule.ranks == "any" and rule.has_clock]
        if all(reader.files for reader in readers):
            self._send_any("watch")
        if self._readers:
            self._look()

    def rank_ended(self, rank: Rank) -> None:
        """Apply rules to the last lines of a rank before its end is handled."""
        reader = self._readers.pop(rank.rank, None)
        if reader is None:
            return
        reader.end()
        self._guarded(lambda: self._read(reader))
        self._engine.ended(rank.rank)
        reader.close()

    def stop(self) -> None:
        """Stop at the end of the attempt."""
        self._alarm.cancel()
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        self._limit.close()

    def _look(self) -> None:
        began_s = time.process_time()
        self._is_cheaper = False
        for reader in list(self._readers.values()):
            self._guarded(lambda reader=reader: self._read(reader))  # type: ignore[misc]
        if not self._group.is_stopping:
            self._guarded(lambda: self._tell(self._engine.tick(self._loop.time())))
        took_s = 0.0 if self._is_cheaper else time.process_time() - began_s
        if self._readers and self._engine.wants_lines:
            self._alarm.set(
                min(ANY_SCAN_S if self._any else MAX_LOOK_S, max(SCAN_S, took_s / MAX_CORES)), self._look
            )

    def _guarded(self, work: Callable[[], object]) -> None:
        """Run `work`; an error ends only the rules of this attempt."""
        try:
            work()
        except Exception as error:
            self._reported.say(f"warning: log rules disabled for this attempt: {type(error).__name__}: {error}")
            self._send_any("blind")
            self._alarm.cancel()
            for reader in self._readers.values():
                reader.close()
            self._readers.clear()

    def _read(self, reader: RankReader) -> None:
        try:
            batch = reader.read(self._max_bytes)
        except OSError as error:
            self._reported.say(
                f"warning: log rules disabled for rank {reader.rank}: its log cannot be read: {error.strerror}"
            )
            self._engine.ended(reader.rank)
            self._send_any("blind")
            self._readers.pop(reader.rank, None)
            reader.close()
            return
        now_s = self._loop.time()
        outcomes: list[Outcome] = []
        if batch.lines:
            outcomes += self._engine.read(reader.rank, batch.lines, now_s, self._limit.run)
        if batch.heartbeats:
            outcomes += self._engine.read(
                reader.rank, batch.heartbeats, now_s, self._limit.run, are_heartbeats=True
            )
        if batch.skipped_bytes:
            outcomes += self._engine.skipped(reader.rank, now_s)
            if not self._is_skipping_reported:
                self._is_skipping_reported = True
                self._reported.say(
                    f"warning: log rules skip part of the ranks' output, since there is too much"
                    f" ({batch.skipped_bytes} bytes of rank {reader.rank} were left out):"
                    f" each scan reads the last {self._max_bytes} bytes of a file"
                )
        self._tell(outcomes)

    def _tell(self, outcomes: Sequence[Outcome]) -> None:
        attempt = self._group.world.attempt
        for each in outcomes:
            if isinstance(each, RuleFinding):
                # Ignore findings while ranks are being ended, except those that forbid a restart.
                if not self._group.is_stopping or each.rule.action in ("give-up", "stop"):
                    rule = each.rule
                    self._reported.send(RuleFired(attempt, rule.name, rule.kind, rule.action, each.rank, each.why))
            elif isinstance(each, DisabledRule):
                self._is_cheaper = True
                if each.rule in self._any:
                    self._reported.send(RuleObservation(attempt, each.rule.name, "blind"))
                self._reported.say(f"warning: rule {each.rule.name!r} disabled for this attempt: {each.why}")
            elif isinstance(each, RuleMatch):
                self._tell_seen(each, attempt)
            else:
                self._tell_measured(each)

    def _send_any(self, what: str) -> None:
        for rule in self._any:
            self._reported.send(RuleObservation(self._group.world.attempt, rule.name, what))

    def _tell_seen(self, seen: RuleMatch, attempt: int) -> None:
        """Send a match at intervals, not for each line: many nodes would send too many messages."""
        rule, now_s, nodes = seen.rule, self._loop.time(), self._group.world.group_world_size
        every_s = seen_every_s(rule, nodes) if seen.what == "match" else 0.0
        key = rule.name, seen.what
        if now_s >= self._seen_s.get(key, -every_s) + every_s:
            self._seen_s[key] = now_s
            self._reported.send(RuleObservation(attempt, rule.name, seen.what))

    def _tell_measured(self, measured: MetricValue) -> None:
        if measured.rule.is_of_heartbeats:
            return  # the heartbeat is an event already
        key, now_s = (measured.rule.name, measured.rank), self._loop.time()
        if now_s >= self._measured_s.get(key, -MEASURED_S) + MEASURED_S:
            self._measured_s[key] = now_s
            self._reported.measured(measured)


class _TooLong(BaseException):
    """The limit has passed; a BaseException, so that the work does not catch it."""


class TimeLimit:
    """A limit on CPU time; `close` restores the handler of SIGVTALRM."""

    def __init__(self, max_s: float) -> None:
        """Args: max_s: CPU time of one call."""
        self._max_s = max_s
        self._is_on = False
        self._before = signal.signal(signal.SIGVTALRM, self._on_time)

    def run(self, work: Callable[[], T]) -> T | None:
        """Return the result of `work`, or None if it takes too long."""
        try:
            self._is_on = True
            signal.setitimer(signal.ITIMER_VIRTUAL, self._max_s)
            try:
                return work()
            finally:
                self._is_on = False
                signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        except _TooLong:
            self._is_on = False
            return None

    def close(self) -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, self._before)

    def _on_time(self, _signum: int, _frame: object) -> None:
        if self._is_on:  # else the signal arrived after the end
            self._is_on = False
            raise _TooLong


class Batch(NamedTuple):
    """New lines of a rank."""

    lines: list[str]
    skipped_bytes: int
    heartbeats: list[str]  # its heartbeats


class RankReader:
    """Reader of one rank's output. Its methods raise OSError."""

    def __init__(self, rank: int, logs: RankLogs, events_file: str = "") -> None:
        """Args: events_file: written by the rank itself; "" for none."""
        self.rank = rank
        self._heartbeats = LogCursor(LogFile(events_file)) if events_file else None
        paths = (logs.stdout_path, logs.stderr_path)
        self._cursors = [LogCursor(LogFile(path)) for path in paths if path is not None and path != os.devnull]

    @property
    def files(self) -> int:
        """The number of log files to read."""
        return len(self._cursors)

    @property
    def is_read(self) -> bool:
        """Whether there is any file to read."""
        return bool(self._cursors or self._heartbeats)

    def read(self, max_bytes: int) -> Batch:
        """Read new lines. Args: max_bytes: for each file; a longer line is still read, up to 1 MiB."""
        lines: list[str] = []
        skipped_bytes = 0
        for cursor in self._cursors:
            cursor.source.open()
            size = os.fstat(cursor.source.fd).st_size
            left_out = cursor.skip(size - max_bytes) if size - cursor.offset > max_bytes else 0
            parts: list[bytes] = []
            while sum(map(len, parts)) < max_bytes and (part := cursor.take()):
                parts.append(part)
            body = b"".join(parts)
            if left_out:
                body = body[body.find(b"\n") + 1 :]  # the first line is incomplete
            skipped_bytes += left_out
            lines += [line for line in add_prefix(body, b"").decode(errors="replace").split("\n") if line]
        return Batch(lines, skipped_bytes, self._read_heartbeats(max_bytes))

    def _read_heartbeats(self, max_bytes: int) -> list[str]:
        cursor = self._heartbeats
        if cursor is None:
            return []
        if cursor.source.fd < 0:
            try:  # never create the file: the rank must own it
                cursor.source.fd = os.open(cursor.source.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except FileNotFoundError:
                return []
        size = os.fstat(cursor.source.fd).st_size
        if size - cursor.offset > max_bytes:
            cursor.skip(size - max_bytes)
        return [line for event in cursor.take().split(b"\n") if (line := describe_beat(event))]

    def end(self) -> None:
        """Treat the rest as a line; the rank writes no more."""
        for cursor in self._all():
            cursor.source.ended = True

    def close(self) -> None:
        for cursor in self._all():
            cursor.source.close()

    def _all(self) -> list[LogCursor]:
        return self._cursors if self._heartbeats is None else [*self._cursors, self._heartbeats]


def describe_beat(event: bytes) -> str:
    """Return a heartbeat as a line; "" for another or invalid event. Args: event: of a rank's event file."""
    if b'"name":"heartbeat"' not in event:
        return ""
    try:
        found: dict[str, Any] = json.loads(event)
        metrics = found.get("attrs", {})
        words = [f"{name}={value}" for name, value in metrics.items() if value is not None]
        return " ".join(["heartbeat", f"step={found.get('value')}", *words])
    except (ValueError, AttributeError, RecursionError):
        return ""
