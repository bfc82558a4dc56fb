"""One node's part of the rules over what ranks print: reads their log files now and then, and tells what it finds.

On the event loop, never waiting for a rank, with about a hundredth of a core at most: after a look that was dear
the next one comes later. In: the ranks of an attempt. Out: messages for the coordinator, which acts on them,
numbers for the event file, lines about rules that are switched off. What fails here is told once, and no more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from launcher.loop import Alarm, EventLoop
from launcher.ranks.group import Rank, RankGroup
from launcher.rendezvous.messages import RuleFound, RuleSeen
from launcher.rules.engine import Found, Measured, Off, Outcome, RuleEngine, Seen
from launcher.rules.job_watch import ANY_LOOK_S, seen_every_s
from launcher.rules.limit import TimeLimit
from launcher.rules.reading import RankReader
from launcher.rules.rule import Rule

LOOK_S = 1.0
MOST_LOOK_S = 10.0
MOST_CORES = 0.01
MOST_RULE_S = 0.05  # of CPU, for one rule and what a rank has written since the last look
MOST_LOOK_BYTES = 256 << 10  # of all files
LEAST_FILE_BYTES = 8 << 10
MEASURED_S = 10.0  # between two numbers of one rule and rank that are kept


def describe_unseen(ranks: Sequence[Rank]) -> str:
    """A line about output that goes to no file, so that no rule can see it; "" where all does."""
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
        f"rules cannot see what ranks print on {' and '.join(streams)} where that goes to the console alone: "
        "--tee 3 keeps it in files, too"
    )


class Told(NamedTuple):
    """Where findings go."""

    send: Callable[[RuleFound | RuleSeen], object]  # to the coordinator
    say: Callable[[str], object]  # to people
    measured: Callable[[Measured], object]  # to the event file


class NodeRules:
    """Of one attempt."""

    def __init__(self, loop: EventLoop, group: RankGroup, rules: Sequence[Rule], told: Told) -> None:
        self._loop, self._group, self._told = loop, group, told
        now_s = loop.time()
        readers = [RankReader(rank.rank, rank.logs, rank.events_file) for rank in group.ranks]
        self._readers = {reader.rank: reader for reader in readers if reader.is_read}
        self._engine = RuleEngine(rules, self._readers, group.world.world_size, now_s)
        files = sum(reader.files for reader in readers)
        self._most_bytes = max(LEAST_FILE_BYTES, MOST_LOOK_BYTES // max(1, files))
        self._limit = TimeLimit(MOST_RULE_S)
        self._alarm = Alarm(loop)
        self._seen_s: dict[tuple[str, str], float] = {}
        self._measured_s: dict[tuple[str, int], float] = {}
        self._is_skipping_told = False
        self._is_cheaper = False  # what made this look dear is switched off
        self._any = [rule for rule in rules if rule.ranks == "any" and rule.has_clock]
        if all(reader.files for reader in readers):
            self._tell_any("watch")
        if self._readers:
            self._look()

    def rank_ended(self, rank: Rank) -> None:
        """Its last lines count before its end does."""
        reader = self._readers.pop(rank.rank, None)
        if reader is None:
            return
        reader.end()
        self._guarded(lambda: self._read(reader))
        self._engine.ended(rank.rank)
        reader.close()

    def stop(self) -> None:
        """The attempt is over."""
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
                min(ANY_LOOK_S if self._any else MOST_LOOK_S, max(LOOK_S, took_s / MOST_CORES)), self._look
            )

    def _guarded(self, work: Callable[[], object]) -> None:
        """Runs it; what goes wrong ends the rules of this attempt, and nothing else."""
        try:
            work()
        except Exception as error:
            self._told.say(
                f"rules over what ranks print are off for this attempt: {type(error).__name__}: {error}"
            )
            self._tell_any("blind")
            self._alarm.cancel()
            for reader in self._readers.values():
                reader.close()
            self._readers.clear()

    def _read(self, reader: RankReader) -> None:
        try:
            batch = reader.read(self._most_bytes)
        except OSError as error:
            self._told.say(
                f"warning: rules see nothing more of rank {reader.rank}: its log cannot be read: {error.strerror}"
            )
            self._engine.ended(reader.rank)
            self._tell_any("blind")
            self._readers.pop(reader.rank, None)
            reader.close()
            return
        now_s = self._loop.time()
        outcomes: list[Outcome] = []
        if batch.lines:
            outcomes += self._engine.read(reader.rank, batch.lines, now_s, self._limit.run)
        if batch.beats:
            outcomes += self._engine.read(reader.rank, batch.beats, now_s, self._limit.run, are_beats=True)
        if batch.skipped_bytes:
            outcomes += self._engine.skipped(reader.rank, now_s)
            if not self._is_skipping_told:
                self._is_skipping_told = True
                self._told.say(
                    f"warning: rules do not see all that ranks print, as it is much"
                    f" ({batch.skipped_bytes} bytes of rank {reader.rank} were left out):"
                    f" at each look they see the last {self._most_bytes} of a file"
                )
        self._tell(outcomes)

    def _tell(self, outcomes: Sequence[Outcome]) -> None:
        attempt = self._group.world.attempt
        for each in outcomes:
            if isinstance(each, Found):
                # What ranks say as they are ended is no news; what forbids to start again still counts.
                if not self._group.is_stopping or each.rule.action in ("give-up", "stop"):
                    rule = each.rule
                    self._told.send(RuleFound(attempt, rule.name, rule.kind, rule.action, each.rank, each.why))
            elif isinstance(each, Off):
                self._is_cheaper = True
                if each.rule in self._any:
                    self._told.send(RuleSeen(attempt, each.rule.name, "blind"))
                self._told.say(f"rule {each.rule.name!r} is switched off for this attempt: {each.why}")
            elif isinstance(each, Seen):
                self._tell_seen(each, attempt)
            else:
                self._tell_measured(each)

    def _tell_any(self, what: str) -> None:
        for rule in self._any:
            self._told.send(RuleSeen(self._group.world.attempt, rule.name, what))

    def _tell_seen(self, seen: Seen, attempt: int) -> None:
        """Not each line: with many nodes that would be many messages."""
        rule, now_s, nodes = seen.rule, self._loop.time(), self._group.world.group_world_size
        every_s = seen_every_s(rule, nodes) if seen.what == "match" else 0.0
        key = rule.name, seen.what
        if now_s >= self._seen_s.get(key, -every_s) + every_s:
            self._seen_s[key] = now_s
            self._told.send(RuleSeen(attempt, rule.name, seen.what))

    def _tell_measured(self, measured: Measured) -> None:
        if measured.rule.is_of_heartbeats:
            return  # there is an event of it
        key, now_s = (measured.rule.name, measured.rank), self._loop.time()
        if now_s >= self._measured_s.get(key, -MEASURED_S) + MEASURED_S:
            self._measured_s[key] = now_s
            self._told.measured(measured)
