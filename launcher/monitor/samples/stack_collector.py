"""Collector of the stacks of this node's ranks: from themselves, else by py-spy, else from the kernel.

In: ranks with their stats pages (ranks/stats_page.py). Out: a call with the stacks of each (stacks.py), in some
seconds; nothing here waits. A rank gets the signal only if Bootseer's handler will certainly catch it. The page
names a descriptor, which must be this page's file in the process that gets the signal. The kernel must report that
the signal is caught and not blocked, and the process not stopped. The default action would end the rank. A script
may have replaced the handler by its own, which then gets one signal for each query.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from math import inf
from typing import Protocol

from bootseer.tuning import current
from launcher.base import children
from launcher.base.loop import Cancellable, EventLoop
from launcher.monitor.samples.child_stacks import ChildStacks
from launcher.monitor.samples.processes import (
    GONE,
    STOPPED,
    is_same_file,
    read_kernel_stack,
    read_signals,
    read_stat,
)
from launcher.monitor.samples.stacks import (
    ChildProcess,
    RankStacks,
    Source,
    calls_of,
    find_main,
    parse_looks,
    parse_py_spy,
    parse_stacks,
    waits_for_child,
)
from launcher.ranks.stats_page import StatsPage, head_bytes, read_page

ANSWER_S = 2.0  # a handler answers within milliseconds, unless the machine is overloaded
POLL_EVERY_S = 0.05  # an answer that has not grown between two polls is complete
MAX_STUCK_POLLS = 10
# The main thread of a running rank is sampled more often: a rank that computes is in another function now and
# then, a rank that spins never is.
SAMPLES_PER_QUERY, SAMPLE_EVERY_S = 24, 0.006
MAX_PY_SPY = 2  # at a time
ALL_PY_SPY_S = 20.0  # ranks without a turn by then get none
CHILDREN_VALID_S = 20.0  # no child process gets more signals than one in this time
MAX_READ_BYTES = 1 << 20
KEEP_BYTES = 4 << 20  # of a stats page's file, which is memory
# Why a running rank gets no signal; irrelevant if its stacks are found otherwise.
NO_HANDLER = "has no handler for its stacks"
CLOSED = "has closed the file for its stacks"
BLOCKED = "blocks the signal for its stacks"


class StackRank(Protocol):
    @property
    def rank(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def stacks_file(self) -> str: ...


class _RankQuery:
    def __init__(self, rank: StackRank) -> None:
        self.rank = rank.rank
        self.pid = rank.pid
        self.fd = -1
        self.page: StatsPage | None = None
        self.begin = self.size = 0  # of its file
        self.stuck_looks = 0  # consecutive polls in state D
        self.state = ""
        self.kernel: tuple[str, ...] = ()
        self.note = ""
        self.asked_times = 0
        self.looks = 0  # samples of its main thread alone
        self.asked_bytes = 0  # size of the file at the last signal
        if self.pid and rank.stacks_file:
            try:
                self.fd = os.open(rank.stacks_file, os.O_RDWR | os.O_CLOEXEC)
            except OSError:
                return
            self.page = read_page(self.fd)

    def look(self) -> bool:
        """Read the state from the kernel. Return whether the rank can answer at all."""
        if not self.pid:
            self.note = "has not started"
            return False
        stat = read_stat(self.pid)
        self.state = stat.state if stat is not None else ""
        if stat is None or stat.state in GONE:
            self.note = "has ended"
            return False
        self.kernel = read_kernel_stack(self.pid)
        if stat.state in STOPPED:
            self.note = "is stopped: SIGSTOP, or a debugger"
            return False
        return True

    def may_answer(self) -> bool:
        """Return whether the rank may answer: it runs, and is not stuck in the kernel for long."""
        stat = read_stat(self.pid)
        self.stuck_looks = self.stuck_looks + 1 if stat is not None and stat.state == "D" else 0
        return stat is not None and self.stuck_looks < MAX_STUCK_POLLS

    def ask(self) -> bool:
        """Send the signal. Return whether that succeeded."""
        page = self.page
        if page is None or not page.stacks_signal:
            is_known = self.look()
            self.note = self.note if not is_known else NO_HANDLER
            return False
        try:
            # A descriptor of the process: from here on the signal reaches no other process.
            pidfd = os.pidfd_open(page.pid)
        except OSError:
            self.look()
            return False
        try:
            if not is_same_file(page.pid, page.stacks_fd, self.fd):
                is_known = self.look()
                self.note = self.note if not is_known else CLOSED
                return False
            self.pid = page.pid  # PYTHON_EXEC may have started it as its child
            signals, bit = read_signals(page.pid), 1 << (page.stacks_signal - 1)
            if not self.look() or signals is None:
                return False
            if not signals.caught & bit:
                self.note = NO_HANDLER
                return False
            if signals.blocked & bit:
                self.note = BLOCKED
                return False
            self.begin = self.size = os.fstat(self.fd).st_size
            if self.size > KEEP_BYTES:
                # Free old answers, keep the length, as the rank writes on at its position: a hole costs nothing.
                os.ftruncate(self.fd, head_bytes(self.fd))
                os.ftruncate(self.fd, self.size)
            self.asked_bytes = self.begin
            if not signals.pending & bit:  # else it has not even answered the last signal
                signal.pidfd_send_signal(pidfd, page.stacks_signal)
            self.asked_times = 1 if self.state == "R" and page.main_signal else SAMPLES_PER_QUERY
            return True
        except OSError:
            self.look()
            return False
        finally:
            os.close(pidfd)

    def ask_again(self) -> bool:
        """Signal again if the last signal was answered. Return whether another one is to follow."""
        page = self.page
        if page is None or self.asked_times >= SAMPLES_PER_QUERY:
            return False
        self.asked_times += 1
        try:
            pidfd = os.pidfd_open(page.pid)
        except OSError:
            return False
        try:
            if not is_same_file(page.pid, page.stacks_fd, self.fd):
                return False
            signals = read_signals(page.pid)
            first, bit = 1 << (page.stacks_signal - 1), 1 << (page.main_signal - 1)
            if signals is None or not signals.caught & bit:
                return False
            size = os.fstat(self.fd).st_size
            if size - self.begin > MAX_READ_BYTES // 2:
                return False
            # A handler blocks its own signal, so the text of one handler must not end up within the other's. A
            # rank that does not answer may have a handler other than Bootseer's.
            if size > self.asked_bytes and not (signals.blocked | signals.pending) & (first | bit):
                self.asked_bytes = size
                self.looks += 1
                signal.pidfd_send_signal(pidfd, page.main_signal)
        except OSError:
            return False
        finally:
            os.close(pidfd)
        return self.asked_times < SAMPLES_PER_QUERY

    def has_answered(self) -> bool:
        """Return whether there is an answer that has not grown since the last poll."""
        size = os.fstat(self.fd).st_size
        is_whole = size > self.begin and size == self.size
        self.size = size
        return is_whole or size - self.begin > MAX_READ_BYTES

    def answer(self, is_whole: bool) -> RankStacks | None:
        """Parse its answer; None if empty. Args: is_whole: its samples may be compared with each other."""
        size = min(max(0, self.size - self.begin), MAX_READ_BYTES)
        data = os.pread(self.fd, size, self.begin) if size else b""
        text = data.decode("ascii", "replace")
        threads = parse_stacks(text)
        if not threads:
            return None
        main = find_main(threads, 0 if self.page is None else self.page.main_thread)
        looks = [calls_of(frames) for frames in (main, *parse_looks(text)) if frames]
        if len(looks) > 1 and any(each[: len(looks[-1])] == looks[-1] for each in looks[:-1]):
            looks.pop()  # the same, or truncated while it was written
        return self._made(Source.HANDLER)._replace(
            threads=tuple(threads),
            main=main,
            note="",
            looks=1 + self.looks,
            comes_along=is_whole and len(set(looks)) > 1,
        )

    def from_py_spy(self, text: bytes) -> RankStacks | None:
        """Parse the output of py-spy; None if it is empty."""
        import json

        try:
            threads = parse_py_spy(json.loads(text))
        except (ValueError, RecursionError):
            return None
        main = find_main(threads, 0 if self.page is None else self.page.main_thread)
        if not main:
            return None
        note = "" if self.note in (NO_HANDLER, CLOSED, BLOCKED) else self.note
        return self._made(Source.PY_SPY)._replace(threads=tuple(threads), main=main, note=note)

    def from_kernel(self) -> RankStacks:
        """Return what the kernel shows, as nothing else is available."""
        return self._made(Source.KERNEL if self.kernel else Source.NOTHING)

    def _made(self, source: Source) -> RankStacks:
        return RankStacks(self.rank, self.pid, source, state=self.state, kernel=self.kernel, note=self.note)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class _PySpy:
    """A py-spy process that samples one rank without stopping it."""

    def __init__(self, program: str, asked: _RankQuery, until_s: float) -> None:
        """Raises: OSError."""
        self.asked = asked
        self._until_s = until_s
        self._out = os.memfd_create("py-spy", os.MFD_CLOEXEC)
        argv = [program, "dump", "--nonblocking", "--json", "--pid", str(asked.pid)]
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, self._out, 1),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
        ]
        environ = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
        try:
            self._pid = os.posix_spawn(program, argv, environ, file_actions=actions, setsid=True)
            children.add(self._pid)
        except BaseException:
            os.close(self._out)
            raise

    def has_ended(self, now_s: float) -> bool:
        if self._pid and children.reap(self._pid) is not None:
            self._pid = 0
        return not self._pid or now_s > self._until_s

    def text(self) -> bytes:
        return os.pread(self._out, MAX_READ_BYTES, 0)

    def close(self) -> None:
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)  # not reaped, so the pid is its own
            children.leave(self._pid)  # not waited for: a process stuck in the kernel would block bootrun
            self._pid = 0
        os.close(self._out)


Done = Callable[[dict[int, RankStacks]], object]


class StackCollector:
    """See the module's docstring."""

    def __init__(self, loop: EventLoop, ranks: Iterable[StackRank], py_spy: str | None = None) -> None:
        """Args: ranks: of one attempt; py_spy: the program, "" for none, None to search for it."""
        self._loop = loop
        self._ranks = list(ranks)
        self._py_spy = py_spy
        self._timer: Cancellable | None = None
        self._again: Cancellable | None = None
        self._then: list[Done] = []
        self._found: dict[int, RankStacks] = {}
        self._waiting: list[_RankQuery] = []  # for their handlers
        self._left: list[_RankQuery] = []  # for py-spy
        self._running: list[_PySpy] = []
        self._of_children: list[tuple[ChildStacks, _RankQuery, RankStacks]] = []  # of ranks that wait for one
        self._known_children: dict[int, tuple[float, tuple[ChildProcess, ...]]] = {}  # by rank, since when
        self._with_late: set[int] = set()  # a child may still write into their files: no more signals to children
        self._until_s = 0.0

    @property
    def is_busy(self) -> bool:
        return bool(self._then)

    def collect(self, then: Done) -> None:
        """Call `then` with the stacks of all ranks, never from within; join a running collection."""
        self._then.append(then)
        if len(self._then) > 1:
            return
        children.reap_left()
        self._found, self._left = {}, []
        for rank in self._ranks:
            asked = _RankQuery(rank)
            if asked.ask():
                self._waiting.append(asked)
            elif asked.note in ("has ended", "has not started"):
                self._take(asked, asked.from_kernel())
            else:
                self._left.append(asked)
        self._until_s = self._loop.time() + ANSWER_S
        self._timer = self._loop.call_later(POLL_EVERY_S, self._look)
        if any(asked.asked_times < SAMPLES_PER_QUERY for asked in self._waiting):
            self._again = self._loop.call_later(SAMPLE_EVERY_S, self._ask_again)

    def _ask_again(self) -> None:
        self._again = None
        again = [asked for asked in self._waiting if asked.ask_again()]
        if again:
            self._again = self._loop.call_later(SAMPLE_EVERY_S, self._ask_again)

    def close(self) -> None:
        """Close, without further callbacks."""
        if self._again is not None:
            self._again.cancel()
            self._again = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for asked in (*self._waiting, *self._left):
            asked.close()
        for each in self._running:
            each.asked.close()
            each.close()
        for _, asked, _ in self._of_children:
            asked.close()
        self._waiting, self._left, self._running, self._of_children, self._then = [], [], [], [], []
        children.reap_left()

    def _take_answer(self, asked: _RankQuery, found: RankStacks) -> None:
        """Take the Python stacks of a rank, and those of its children if it waits for one."""
        now_s = self._loop.time()
        since_s, children = self._known_children.get(asked.rank, (-inf, ()))
        if not waits_for_child(found):
            self._take(asked, found)
        elif now_s < since_s + CHILDREN_VALID_S:
            self._take(asked, found._replace(children=children))
        else:
            page = asked.page if found.source is Source.HANDLER and asked.rank not in self._with_late else None
            self._of_children.append((ChildStacks(asked.pid, page, asked.fd, now_s), asked, found))

    def _look_at_children(self) -> None:
        now_s = self._loop.time()
        for each in self._of_children[:]:
            query, asked, found = each
            children = query.look(now_s)
            if children is not None:
                self._of_children.remove(each)
                if query.is_unanswered:
                    self._with_late.add(asked.rank)
                self._known_children[asked.rank] = now_s, children
                self._take(asked, found._replace(children=children))

    def _take(self, asked: _RankQuery, found: RankStacks) -> None:
        self._found[asked.rank] = found
        asked.close()

    def _look(self) -> None:
        is_late = self._loop.time() > self._until_s
        still = []
        for asked in self._waiting:
            is_whole = asked.has_answered() and self._again is None
            found = asked.answer(is_whole) if is_whole or is_late else None
            if found is not None:
                self._take_answer(asked, found)
            elif not is_late and asked.may_answer():
                still.append(asked)
            elif asked.look():
                asked.note = f"has not answered for {ANSWER_S:g} s" if is_late else "is stuck in the kernel"
                self._left.append(asked)
            elif asked.note == "has ended":
                self._take(asked, asked.from_kernel())
            else:
                self._left.append(asked)
        self._waiting = still
        self._run_py_spy()
        self._look_at_children()
        if self._waiting or self._left or self._running or self._of_children:
            self._timer = self._loop.call_later(POLL_EVERY_S, self._look)
            return
        self._timer = None
        found_all, self._found = self._found, {}
        then, self._then = self._then, []
        for each in then:
            each(found_all)

    def _run_py_spy(self) -> None:
        now_s = self._loop.time()
        for each in self._running[:]:
            if each.has_ended(now_s):
                self._running.remove(each)
                asked = each.asked
                self._take_answer(asked, asked.from_py_spy(each.text()) or asked.from_kernel())
                each.close()
        limit_s = current().launcher.py_spy_s if self._left else 0.0
        while self._left and len(self._running) < MAX_PY_SPY:
            asked = self._left.pop(0)
            try:
                if now_s > self._until_s + ALL_PY_SPY_S:
                    raise TimeoutError
                self._running.append(_PySpy(self._find_py_spy(), asked, now_s + limit_s))
            except OSError:
                self._take(asked, asked.from_kernel())

    def _find_py_spy(self) -> str:
        """Find py-spy. Raises: OSError if there is none."""
        if self._py_spy is None:
            directories = os.environ.get("PATH", os.defpath).split(":")
            paths = [f"{directory}/py-spy" for directory in directories if directory.startswith("/")]
            self._py_spy = next((path for path in paths if os.access(path, os.X_OK)), "")
        if not self._py_spy:
            raise FileNotFoundError
        return self._py_spy
