"""Runner of checks, each in its own process with a time limit: one that hangs is a finding, and is abandoned.

In: tasks. Out: findings, in the order of the tasks. A process that waits in the kernel (for a silent disk or file
server) cannot be ended: it is killed without waiting. Results are bounded and validated like any untrusted data.
This process has one thread.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, NoReturn

from bootseer.health.finding import HUNG, UNKNOWN, Finding, from_json, one_line
from bootseer.linux.child_processes import waits_in_kernel
from bootseer.linux.processes import set_death_signal, wait_channel
from bootseer.tuning import current

MAX_RESULT_BYTES = 1 << 20
_END_S = 0.2  # for a killed process to end that waits in the kernel
_MIN_LOOKS = 20
_SLOW_END_S = 10.0  # for one that does not: it ends as soon as an overloaded machine runs it
_LOOK_S = 1.0
_STOPPED_S = 1.0  # a longer pause means that this process was stopped itself (SIGSTOP, a paused VM)


class Task(NamedTuple):
    """One check of one object."""

    check: str
    where: str
    run: Callable[[], list[Finding]]


class _Child:
    """A process that runs a task."""

    def __init__(self, number: int, task: Task, limit_s: float) -> None:
        self.number, self.task = number, task
        self.end_s = time.monotonic() + limit_s
        self.data = bytearray()
        self.is_over = False  # it has sent everything, or too much
        sys.stdout.flush()
        sys.stderr.flush()
        self.fd, theirs = os.pipe()
        parent = os.getpid()
        try:
            self.pid = os.fork()
        except OSError:
            os.close(self.fd)
            os.close(theirs)
            raise
        if not self.pid:
            _work(task, theirs, parent)
        os.close(theirs)

    def end(self, is_over: bool) -> int | None:
        """End it and return its `waitstatus_to_exitcode`; None if it does not end. Args: is_over: it has ended."""
        os.close(self.fd)
        if not is_over:
            self._kill()
        began_s = free_s = time.monotonic()  # free: it did not wait in the kernel when last looked at
        looks = 0  # since then: one may meet a moment, and this process may be run late itself
        while os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            now_s = time.monotonic()
            waited_s = now_s - began_s
            looks += 1
            if not waits_in_kernel(self.pid):
                free_s, looks = now_s, 0
            if is_over and waited_s > _END_S:
                is_over = False  # it has closed its pipe but still runs
                self._kill()
                began_s = free_s = time.monotonic()
            elif waited_s > _SLOW_END_S or (looks > _MIN_LOOKS and now_s - free_s > _END_S):
                return None
            time.sleep(0.001)
        self._kill_group()  # its children; until it is reaped no other group has its number
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _kill(self) -> None:
        self._kill_group()
        os.kill(self.pid, signal.SIGKILL)  # not reaped yet, so the pid is its own

    def _kill_group(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # the group is empty


def run_tasks(
    tasks: Iterable[Task], limit_s: float, left: dict[tuple[str, str], int] | None = None
) -> Iterator[list[Finding]]:
    """Yield the findings of each task, in order, as soon as they and all earlier ones are present.

    Args: left: processes that could not be ended, by check and place. While one still waits there, repeated rounds
    start no further one.
    """
    left = {} if left is None else left
    most = current().health.checks_at_once
    waiting = list(enumerate(tasks))
    waiting.reverse()
    done: dict[int, list[Finding]] = {}
    next_out = 0
    looked_s = time.monotonic()
    with selectors.DefaultSelector() as selector:
        running: set[_Child] = set()
        try:
            while waiting or running:
                while waiting and len(running) < most:
                    number, task = waiting.pop()
                    if _still_hangs(task, left):
                        done[number] = [Finding(task.check, HUNG, "it still does not answer", task.where)]
                        continue
                    try:
                        child = _Child(number, task, limit_s)
                    except OSError as error:
                        done[number] = [_unknown(task, f"cannot be started: {error.strerror}")]
                        continue
                    running.add(child)
                    selector.register(child.fd, selectors.EVENT_READ, child)
                over = _wait_finished(selector, running)
                before_s, looked_s = looked_s, time.monotonic()
                if looked_s - before_s > _LOOK_S + _STOPPED_S:
                    for child in running:
                        child.end_s += looked_s - before_s  # they could not run either
                for child in over + _find_late(running, over):
                    selector.unregister(child.fd)
                    running.discard(child)
                    done[child.number] = _collect(child, limit_s, left)
                while next_out in done:
                    yield done.pop(next_out)
                    next_out += 1
        finally:
            for child in running:
                child.end(is_over=False)


def _wait_finished(selector: selectors.BaseSelector, running: set[_Child]) -> list[_Child]:
    """Return the processes that have sent everything, or too much; waits briefly."""
    if not running:
        return []
    left_s = min(child.end_s for child in running) - time.monotonic()
    over = []
    for key, _ in selector.select(min(max(0.0, left_s), _LOOK_S)):
        child: _Child = key.data
        data = os.read(child.fd, 65536)
        child.data += data
        if not data or len(child.data) > MAX_RESULT_BYTES:
            child.is_over = True
            over.append(child)
    return over


def _find_late(running: Iterable[_Child], over: list[_Child]) -> list[_Child]:
    """Return the processes that have no time left."""
    now_s = time.monotonic()
    return [child for child in running if child.end_s <= now_s and child not in over]


def _collect(child: _Child, limit_s: float, left: dict[tuple[str, str], int]) -> list[Finding]:
    task = child.task
    is_late = not child.is_over
    doing = one_line(wait_channel(child.pid)[:100]) if is_late else ""
    status = child.end(is_over=not is_late)
    if status is None:
        left[task.check, task.where] = child.pid
    if is_late:
        what = f"no answer in {limit_s:g} s"
        what += f", it waits in {doing}" if doing else ""
        what += "; its process cannot be ended" if status is None else ""
        way_out = "check the device, driver or file server that it waits for"
        return [Finding(task.check, HUNG, what, task.where, limit_s, limit_s, "s", way_out)]
    if len(child.data) > MAX_RESULT_BYTES:
        return [_unknown(task, "it found more than can be reported")]
    try:
        return from_json(task.check, json.loads(child.data))
    except (ValueError, RecursionError):
        how = f"was ended by signal {-status}" if status is not None and status < 0 else "ended without a result"
        return [_unknown(task, f"the process of the check {how}")]


def _still_hangs(task: Task, left: dict[tuple[str, str], int]) -> bool:
    """Return whether the process of an earlier round still waits there."""
    pid = left.get((task.check, task.where))
    if pid is None:
        return False
    try:
        is_over = bool(os.waitpid(pid, os.WNOHANG)[0])
    except ChildProcessError:
        is_over = True  # already reaped
    if is_over:
        del left[task.check, task.where]
    return not is_over


def _unknown(task: Task, what: str) -> Finding:
    way_out = "run it again (bootseer check --only NAME), and see dmesg"
    return Finding(task.check, UNKNOWN, what, task.where, way_out=way_out)


def _work(task: Task, fd: int, parent: int) -> NoReturn:
    """Run a task in the child; never returns."""
    try:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_DFL)
        os.setpgid(0, 0)
        set_death_signal(signal.SIGKILL)
        if os.getppid() == parent:
            try:
                findings = task.run()
            except Exception as error:
                findings = [
                    _unknown(task, f"the check failed: {type(error).__name__}: {one_line(str(error))[:200]}")
                ]
            data = json.dumps([found._asdict() for found in findings]).encode() + b"\n"
            while data:
                data = data[os.write(fd, data) :]
    finally:
        os._exit(0)
