"""The agent's own events of an attempt, and the line that summarizes its start.

In: times of the agent and its ranks. Out: the event file of this node's agent and one line for users. Written
when the ranks already run, so that writing is not part of what it measures.
"""

from __future__ import annotations

import os
import time

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
from bootseer.light_typing import TYPE_CHECKING, Any, Callable, Iterable, Mapping
from launcher.base.loop import Cancellable, EventLoop
from launcher.ranks.group import Rank, RankGroup

if TYPE_CHECKING:
    from launcher.ranks.output.inotify import Inotify

# Up to its first step a rank writes a handful of short events.
MAX_READ_BYTES = 256 * 1024
CLOSE_AFTER_S = 1.0
POLL_S = 5.0  # where inotify is unavailable
_FIRST_STEP = b'"first_step"'


class AttemptRecord:
    """Events of one attempt on this node; call `finish` at its end."""

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
        watch_after_s: float = 0.0,
        backoff_ns: tuple[int, int] = (0, 0),
    ) -> None:
        """Args: backoff_ns: begin and end of the pause before this attempt, if there was one."""
        self._group = group
        self._backoff_ns = backoff_ns
        self._began_ns = began_ns  # when bootrun began, or when this attempt became necessary
        self._launched_ns = launched_ns  # when bootrun had its orders; 0 for a later attempt
        self._say = say
        self._first_step_seen = first_step_seen
        self._path = agent_events_path(events_dir, node)
        self._writer = EventWriter(self._path, run_id, node, attempt=group.world.attempt)
        self._write_start()
        files = {rank.rank: rank.events_file for rank in group.ranks}
        self._watch = StartWatch(loop, files, self._tell, watch_after_s)

    def _write_start(self) -> None:
        group, writer = self._group, self._writer
        span = writer.begin(Stage.RENDEZVOUS, "rendezvous", mono_ns=self._began_ns)
        launch: dict[str, Any] = {}
        begin_ns, end_ns = max(self._backoff_ns[0], self._began_ns), min(self._backoff_ns[1], group.prepared_ns)
        if begin_ns < end_ns:
            writer.end(Stage.RENDEZVOUS, "rendezvous", span, mono_ns=begin_ns)
            span = writer.begin(Stage.BACKOFF, "backoff", mono_ns=begin_ns)
            writer.end(Stage.BACKOFF, "backoff", span, mono_ns=end_ns)
            span = writer.begin(Stage.RENDEZVOUS, "rendezvous", mono_ns=end_ns)
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
        self._writer.instant(None, RANK_EXITED, rank=rank.rank, mono_ns=time_ns, status=status, cpu_s=rank.cpu_s)
        self._watch.rank_ended(rank.rank)

    def stop(self) -> None:
        """Stop watching the start, as the attempt is over; `finish` follows."""
        self._watch.stop()

    def finish(self) -> None:
        """Log what is still to be logged at the end of the attempt, and close the file."""
        self._watch.finish()
        self._writer.close()

    def _tell(self, all_made_step: bool) -> None:
        from bootseer.report import start_line, summarise_start

        world = self._group.world
        attempt = f"attempt {world.attempt}: " if world.attempt else ""
        where = f"node {world.group_rank} of {world.group_world_size}: " if world.group_world_size > 1 else ""
        self._say(attempt + where + start_line(summarise_start(self._read(), world.attempt)))
        if all_made_step:
            self._first_step_seen()

    def _read(self) -> Iterable[Event]:
        """Return this start's events on this node; a reused directory also holds older ones."""
        now_ns = time.monotonic_ns()
        for path in (self._path, *(rank.events_file for rank in self._group.ranks)):
            for event in read_events(path, without=BEAT_MARK):  # there may be many heartbeats
                if self._began_ns <= event.mono_ns <= now_ns:
                    yield event


class StartWatch:
    """One for each attempt; call `finish` at its end. `tell` gets whether all have made their first step."""

    def __init__(
        self, loop: EventLoop, files: Mapping[int, str], tell: Callable[[bool], object], after_s: float
    ) -> None:
        """Args: after_s: begin so late; an attempt that is over by then needs no watch."""
        self._loop = loop
        self._tell = tell
        self._waiting = dict(files)  # rank: path
        self._by_watch: dict[int, int] = {}
        self._inotify: Inotify | None = None
        self._timer: Cancellable | None = None
        self._done = False
        if after_s:
            self._timer = loop.call_later(after_s, self._begin)
            self._look(list(self._waiting))
        else:
            self._begin()

    def _begin(self) -> None:
        from launcher.ranks.output.inotify import Inotify

        self._timer = None
        try:
            self._inotify = Inotify()
            for rank, path in self._waiting.items():
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644))
                self._by_watch[self._inotify.watch(path)] = rank
            self._loop.add_reader(self._inotify.fd, self._on_news)
        except OSError:
            self.stop()
            self._poll()
            return
        self._look(list(self._waiting))

    def finish(self) -> None:
        """End the watch, as the attempt is over; call back unless that was done."""
        self.stop()
        if not self._done:
            self._done = True
            self._tell(not self._waiting)

    def rank_ended(self, rank: int) -> None:
        """Look for the first step of a rank that has ended, which no event may report in time."""
        if not self._done:
            self._look([rank])

    def _on_news(self) -> None:
        assert self._inotify is not None
        for watch in self._inotify.read():
            rank = self._by_watch.get(watch)
            self._look([rank] if rank is not None else list(self._waiting))

    def _poll(self) -> None:
        self._look(list(self._waiting))
        if not self._done:
            self._timer = self._loop.call_later(POLL_S, self._poll)

    def _look(self, ranks: list[int]) -> None:
        if self._find_stepped(ranks) and not self._waiting:
            self.finish()

    def _find_stepped(self, ranks: list[int]) -> bool:
        """Wait no longer for ranks that have made their first step; return whether there are any."""
        waited = len(self._waiting)
        for rank in ranks:
            try:
                with open(self._waiting.get(rank, ""), "rb") as file:
                    if _FIRST_STEP in file.read(MAX_READ_BYTES):
                        del self._waiting[rank]
            except OSError:
                continue  # it has made it, or there is no file yet
        return len(self._waiting) < waited

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._inotify is not None:
            self._loop.remove_reader(self._inotify.fd)
            # The kernel takes 8 ms to close it; a restart must not wait for that.
            self._loop.call_later(CLOSE_AFTER_S, self._inotify.close)
            self._inotify = None
