"""The agent's own events of an attempt, and the line that sums up its start.

In: moments of the agent and its ranks. Out: the event file of this node's agent and one line for people. Written
when the ranks run already, so that it is not part of what it measures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from bootseer.events import (
    BEAT_MARK,
    RANK_EXITED,
    RANK_STARTED,
    Event,
    EventWriter,
    Stage,
    agent_events_path,
    read_events,
)
from bootseer.light_typing import Any
from launcher.loop import EventLoop
from launcher.ranks.group import Rank, RankGroup
from launcher.ranks.start_watch import StartWatch


class AttemptRecord:
    """Events of one attempt on this node; `finish` at its end."""

    def __init__(
        self,
        loop: EventLoop,
        events_dir: str,
        run_id: str,
        node: str,
        group: RankGroup,
        began_ns: int,
        launched_ns: int,
        say: Callable[[str], object],
        first_step_seen: Callable[[], object],
    ) -> None:
        self._group = group
        self._began_ns = began_ns  # when bootrun began, or what made this attempt necessary
        self._launched_ns = launched_ns  # bootrun knew what to do; 0 for a later attempt
        self._say = say
        self._first_step_seen = first_step_seen
        self._path = agent_events_path(events_dir, node)
        self._writer = EventWriter(self._path, run_id, node, attempt=group.world.attempt)
        self._write_start()
        self._watch = StartWatch(loop, {rank.rank: rank.events_file for rank in group.ranks}, self._tell)

    def _write_start(self) -> None:
        group, writer = self._group, self._writer
        span = writer.begin(Stage.RENDEZVOUS, "rendezvous", mono_ns=self._began_ns)
        launch: dict[str, Any] = {}
        if self._launched_ns:
            launch["launch_s"] = (self._launched_ns - self._began_ns) / 1e9
        writer.end(Stage.RENDEZVOUS, "rendezvous", span, mono_ns=group.prepared_ns, **launch)
        span = writer.begin(
            Stage.SPAWN,
            "spawn",
            mono_ns=group.spawn_began_ns,
            ranks=len(group.ranks),
            world_size=group.world.world_size,
        )
        started = [rank for rank in group.ranks if rank.pid]
        for rank in started:
            how = "fork" if rank.is_forked else "exec"
            writer.instant(
                Stage.SPAWN, RANK_STARTED, rank=rank.rank, mono_ns=rank.started_ns, pid=rank.pid, how=how
            )
        if len(started) == len(group.ranks):
            writer.end(Stage.SPAWN, "spawn", span, mono_ns=max(rank.started_ns for rank in started))

    def note_exit(self, rank: Rank, status: int, time_ns: int) -> None:
        """A rank has ended."""
        self._writer.instant(None, RANK_EXITED, rank=rank.rank, mono_ns=time_ns, status=status, cpu_s=rank.cpu_s)

    def stop(self) -> None:
        """The attempt is over; `finish` follows."""
        self._watch.stop()

    def finish(self) -> None:
        """The attempt is over: what is still to be said is said."""
        self._watch.finish()
        self._writer.close()

    def _tell(self, all_made_step: bool) -> None:
        from bootseer.startup import start_line, summarise_start

        world = self._group.world
        attempt = f"attempt {world.attempt}: " if world.attempt else ""
        where = f"node {world.group_rank} of {world.group_world_size}: " if world.group_world_size > 1 else ""
        self._say(attempt + where + start_line(summarise_start(self._read(), world.attempt)))
        if all_made_step:
            self._first_step_seen()

    def _read(self) -> Iterable[Event]:
        """This start's events on this node; a folder used before holds older ones too."""
        now_ns = time.monotonic_ns()
        for path in (self._path, *(rank.events_file for rank in self._group.ranks)):
            for event in read_events(path, without=BEAT_MARK):  # of which there may be many
                if self._began_ns <= event.mono_ns <= now_ns:
                    yield event
