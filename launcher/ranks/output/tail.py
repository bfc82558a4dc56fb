"""Copies of ranks' log files to the console and to filtered logs while the ranks write them.

In: paths of log files (`add`). Out: whole lines with a prefix, to sinks. A log file is read only when its sink has
room, so the file is the backlog and memory stays bounded; ranks never wait for bootrun.
inotify reports when there is more to read. After an event the watch rests for a moment, so that a rank that writes
many small lines does not cost a wake-up for each.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable

from launcher.base.loop import Cancellable, EventLoop
from launcher.ranks.output.console import Console, Sink
from launcher.ranks.output.follow import LogCursor, LogFile, add_prefix, count_without_prefix
from launcher.ranks.output.inotify import ALL, Inotify

REST_S = 0.01
POLL_S = 1.0  # only where inotify is unavailable
STALL_S = 2.0  # at the end: how long a console may accept nothing before bootrun stops waiting
MAX_OPEN = 256  # log files of ended attempts that stay open while they wait for a slow console
_ROUND_BYTES = 2 << 20  # copied before other callbacks get a turn


class _Copy:
    """The copy of one log file to one sink."""

    __slots__ = ("cursor", "needles", "prefix", "rank", "sink", "waiting")

    def __init__(
        self, cursor: LogCursor, rank: int, sink: Sink, prefix: bytes, needles: tuple[bytes, ...]
    ) -> None:
        self.cursor = cursor
        self.rank = rank
        self.sink = sink
        self.prefix = prefix
        self.needles = needles
        self.waiting = False  # is in the queue of its sink


class Tailer:
    """Copier of all log files of a job on this node; one for all attempts."""

    def __init__(self, loop: EventLoop, console: Console) -> None:
        self._loop = loop
        self._console = console
        self._copies: dict[LogFile, list[_Copy]] = {}
        self._by_watch: dict[int, LogFile] = {}
        self._queues: dict[Sink, deque[_Copy]] = {}  # copies that may have more to read, in turn
        self._last: dict[Sink, _Copy] = {}  # the copy whose lines the sink holds
        self._filtered: dict[str, Sink] = {}
        self._timer: Cancellable | None = None
        self._stall_timer: Cancellable | None = None
        self._on_done: Callable[[str], object] | None = None
        self._left: dict[_Copy, int] = {}  # bytes not shown
        self._why = f"the console accepted nothing for {STALL_S:g} s"
        self._inotify: Inotify | None = None
        try:
            self._inotify = Inotify()
            loop.add_reader(self._inotify.fd, self._on_news)
        except OSError as error:
            self._fall_back(error)

    # ---- in --------------------------------------------------------------------------------------------------

    def add(
        self,
        path: str,
        rank: int,
        stream: int,
        prefix: bytes,
        needles: tuple[bytes, ...] = (),
        filtered_path: str = "",
    ) -> None:
        """Follow a log file from its start; copy lines with one of `needles` also to the file `filtered_path`."""
        source = LogFile(path)
        try:
            source.open()
            self._watch(source)
        except OSError as error:
            source.close()
            self._console.say(f"warning: cannot copy {path} to the console: {error.strerror}")
            return
        self._copies[source] = []
        self._attach(source, rank, self._console.stream(stream), prefix, ())
        if needles and filtered_path and (sink := self._filtered_sink(filtered_path)) is not None:
            self._attach(source, rank, sink, prefix, needles)

    def end_all(self) -> None:
        """Mark the files added so far as finished: their last lines get a newline."""
        for source in list(self._copies):
            self._end(source)
        self._loop.call_soon(self._pump_all)

    def finish(self, on_done: Callable[[str], object]) -> None:
        """Copy the rest while the console accepts it; `on_done` gets the line logged about what is left, or ""."""
        self._on_done = on_done
        for sink in self._queues:
            sink.progress_s = self._loop.time()
        self.end_all()
        self._stall_timer = self._loop.call_later(STALL_S / 8, self._check_stall)

    def hasten(self) -> None:
        """End `finish` now, with what has been shown so far."""
        if self._on_done is not None:
            self._why = "the wait for the console was cut short"
            for sink in list(self._queues):
                self._give_up(sink)
            self._check_done()

    def close(self) -> None:
        """Release everything; lines that are not copied stay in the log files."""
        for timer in (self._timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        for source in self._copies:
            source.close()
        self._copies.clear()
        self._queues.clear()
        if self._inotify is not None:
            self._loop.remove_reader(self._inotify.fd)
            self._inotify.close()
            self._inotify = None
        for sink in self._filtered.values():
            sink.close()
        self._filtered.clear()

    def _filtered_sink(self, path: str) -> Sink | None:
        if path in self._filtered:
            return self._filtered[path]
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            self._console.say(f"warning: cannot write {path}: {error.strerror}")
            return None

        def tell_dead(sink: Sink) -> None:
            self._console.say(f"warning: cannot write {path}: {sink.dead}; the log files have all lines")

        sink = Sink(self._loop, fd, tell_dead, owned=True)
        self._filtered[path] = sink
        return sink

    def _attach(self, source: LogFile, rank: int, sink: Sink, prefix: bytes, needles: tuple[bytes, ...]) -> None:
        copy = _Copy(LogCursor(source), rank, sink, prefix, needles)
        self._copies[source].append(copy)
        self._queues.setdefault(sink, deque())
        self._enqueue(copy)
        self._loop.call_soon(self._pump, sink)

    # ---- news ------------------------------------------------------------------------------------------------

    def _watch(self, source: LogFile) -> None:
        if self._inotify is None:
            return
        try:
            source.watch = self._inotify.watch(source.path)
            self._by_watch[source.watch] = source
        except OSError as error:
            self._fall_back(error)

    def _fall_back(self, error: OSError) -> None:
        if self._inotify is not None:
            self._loop.remove_reader(self._inotify.fd)
            self._inotify.close()
            self._inotify = None
        if self._timer is not None:
            self._timer.cancel()
        self._console.say(
            f"warning: no inotify for log files ({error.strerror}), so output is copied every {POLL_S:g} s: "
            "raise fs.inotify.max_user_instances or max_user_watches"
        )
        self._timer = self._loop.call_later(POLL_S, self._on_poll)

    def _on_news(self) -> None:
        assert self._inotify is not None
        watches = self._inotify.read()
        for watch in self._by_watch if ALL in watches else watches:
            if (source := self._by_watch.get(watch)) is not None:
                self._enqueue_all(source)
        self._loop.remove_reader(self._inotify.fd)
        self._timer = self._loop.call_later(REST_S, self._listen_again)
        self._pump_all()

    def _listen_again(self) -> None:
        if self._inotify is not None:
            self._loop.add_reader(self._inotify.fd, self._on_news)

    def _on_poll(self) -> None:
        for source in self._copies:
            self._enqueue_all(source)
        self._timer = self._loop.call_later(POLL_S, self._on_poll)
        self._pump_all()

    def _end(self, source: LogFile) -> None:
        if source.ended:
            return
        source.ended = True
        self._unwatch(source)
        if len(self._copies) > MAX_OPEN:
            source.close()
        self._enqueue_all(source)

    def _unwatch(self, source: LogFile) -> None:
        if self._by_watch.pop(source.watch, None) is not None and self._inotify is not None:
            self._inotify.unwatch(source.watch)

    def _enqueue_all(self, source: LogFile) -> None:
        for copy in self._copies[source]:
            self._enqueue(copy)

    def _enqueue(self, copy: _Copy) -> None:
        if not copy.waiting:
            copy.waiting = True
            self._queues[copy.sink].append(copy)

    # ---- copying ---------------------------------------------------------------------------------------------

    def _pump_all(self) -> None:
        for sink in list(self._queues):
            self._pump(sink)
        self._check_done()

    def _pump(self, sink: Sink) -> None:
        """Copy from the queue in turn until the sink is full, nothing is left or others need a turn."""
        queue = self._queues.get(sink)
        if queue is None:
            return
        budget = _ROUND_BYTES
        while queue and budget > 0 and sink.has_room():
            budget -= self._copy_some(queue.popleft())
        if sink.dead:
            self._forget(sink)
        elif not sink.has_room():
            sink.when_room(lambda: self._pump(sink))
        elif queue:
            self._loop.call_soon(self._pump, sink)
        self._check_done()

    def _copy_some(self, copy: _Copy) -> int:
        """Copy one batch and move the copy to the end of the queue. Return the number of bytes read."""
        copy.waiting = False
        source = copy.cursor.source
        try:
            source.open()
            body = copy.cursor.take()
        except OSError as error:
            self._console.say(f"warning: cannot read {source.path}: {error.strerror}")
            self._remove(copy)
            return 0
        if not body:
            if source.ended:
                self._remove(copy)
            return 0
        if source.ended and len(self._copies) > MAX_OPEN:
            source.close()
        self._enqueue(copy)
        if lines := add_prefix(body, copy.prefix, copy.needles):
            self._last[copy.sink] = copy
            copy.sink.copy(lines)
        return len(body)

    def _remove(self, copy: _Copy) -> None:
        source = copy.cursor.source
        copies = self._copies[source]
        copies.remove(copy)
        if not copies:
            self._unwatch(source)
            source.close()
            del self._copies[source]

    def _forget(self, sink: Sink) -> None:
        """Stop copying to a sink."""
        self._queues[sink].clear()
        for copy in [copy for copies in self._copies.values() for copy in copies if copy.sink is sink]:
            copy.waiting = False
            self._remove(copy)

    # ---- end -------------------------------------------------------------------------------------------------

    def _check_stall(self) -> None:
        for sink in list(self._queues):
            if sink.stalled_s() >= STALL_S:
                self._give_up(sink)
        self._check_done()
        if self._on_done is not None:
            self._stall_timer = self._loop.call_later(STALL_S / 8, self._check_stall)

    def _give_up(self, sink: Sink) -> None:
        back = sink.give_up()
        if back:
            copy = self._last[sink]
            self._left[copy] = count_without_prefix(back, copy.prefix)
        for copy in (copy for copies in self._copies.values() for copy in copies if copy.sink is sink):
            if left := copy.cursor.count_left():
                self._left[copy] = self._left.get(copy, 0) + left
        self._forget(sink)

    def _check_done(self) -> None:
        if self._on_done is None or any(self._queues.values()) or any(s.has_copies() for s in self._queues):
            return
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        note = self._describe_left()
        if note:
            self._console.say(note)
        on_done, self._on_done = self._on_done, None
        on_done(note)

    def _describe_left(self) -> str:
        if not self._left:
            return ""
        ranks = sorted({copy.rank for copy in self._left})
        names = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
        files = sorted({copy.cursor.source.path for copy in self._left})
        where = files[0] if len(files) == 1 else os.path.commonpath(files)
        return (
            f"warning: {self._why}: {sum(self._left.values())} bytes of output of "
            f"rank{'s' if len(ranks) > 1 else ''} {names} were not shown; they are in {where}"
        )
