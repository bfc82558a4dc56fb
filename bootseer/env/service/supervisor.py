"""Running of users' commands, and ending of their processes: `python -I -S -X utf8 supervisor.py`. Stdlib
only.

It is a separate process, so that it can be the subreaper of all processes that the commands start, including
daemons in their own sessions. Its standard input is a socket, which carries one order, a JSON line. When the other
end is closed or shut down, all processes are ended. Its answers are JSON lines: `done` (number of a command) and
`status` of each, then `ended`: names of processes that still ran. Output of the commands goes to its own output.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bootseer.env.reads.setup_watch import Watch

GRACE_S = 1.0  # between SIGTERM and SIGKILL
KILLED_S = 5.0  # processes that still exist then are blocked in the kernel
LOOK_S = 0.02
MAX_ORDER_BYTES = 16 << 20
_PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Run the commands of the order; see the module's docstring."""
    connection = socket.socket(fileno=0)
    os.set_inheritable(0, False)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTTIN, signal.SIGTTOU):
        signal.signal(signum, signal.SIG_IGN)  # the other end decides, by closing the socket
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    order = json.loads(_read_line(connection))
    environ = {os.fsencode(name): os.fsencode(value) for name, value in order["environ"].items()}
    watching = _WatchState(order.get("watch"))
    for number, command in enumerate(order["commands"]):
        words = [*order["prefix"], "/bin/sh", "-e", "-c", command]
        status = _run(connection, words, order["cwd"], environ, watching)
        if status is None:
            break
        _say(connection, {"done": number, "status": status})
        if status:
            break
    ended = _end_all(watching)
    if watching.is_on:
        _say(connection, {"watched": watching.report()})
    _say(connection, {"ended": ended})


class _WatchState:
    """The record of the commands' reads, if requested and possible."""

    def __init__(self, order: dict[str, Any] | None) -> None:
        self.is_on = order is not None
        self._watch: Watch | None = None
        self._why = ""
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        self._looks = order is not None and bool(order["looks"])
        self._makes = order is not None and bool(order.get("makes", True))
        self.listeners: list[int] = []
        if order is None:
            return
        sys.path.append(order["package"])  # last, so that the package replaces no module of Python
        try:
            from bootseer.env.reads.setup_watch import Watch
            from bootseer.env.reads.watch_rules import make_rules

            self._watch = Watch(make_rules(order))
        except ImportError as error:
            self._why = str(error)

    def prepare(self) -> None:
        """Create the sockets before a fork."""
        if self._watch is not None:
            self._sockets = socket.socketpair()

    def begin(self) -> None:
        """Start watching in the child."""
        if self._sockets is None:
            return
        ours, theirs = self._sockets
        ours.close()
        try:
            from bootseer.env.reads.setup_watch import begin

            fd = begin(looks=self._looks, makes=self._makes)
        except OSError as error:
            theirs.sendall(os.fsencode(f"{error.strerror}"[:200]) or b"?")
        else:
            socket.send_fds(theirs, [b"+"], [fd])
            os.close(fd)
        theirs.close()

    def follow(self) -> None:
        """Wait in the parent until the child has started watching."""
        if self._sockets is None or self._watch is None:
            return
        ours, theirs = self._sockets
        theirs.close()
        self._sockets = None
        data, fds, _, _ = socket.recv_fds(ours, 256, 1)
        ours.close()
        if fds:
            self._watch.take(fds[0])
            self.listeners.append(fds[0])
        elif not self._why:
            self._why = os.fsdecode(data) or "the command ended before watching began"

    def serve(self, fd: int, is_over: bool) -> None:
        """Process a readable listener. Args: is_over: no watched process is left."""
        if is_over or self._watch is None or not self._watch.serve(fd):
            self.listeners.remove(fd)
            os.close(fd)

    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = {} if self._watch is None else self._watch.report()
        if self._why:
            found["why"] = [*found.get("why", ()), self._why]
        return found


def _run(
    connection: socket.socket, words: list[str], cwd: str, environ: dict[bytes, bytes], watching: _WatchState
) -> int | None:
    """Run a command. Return its exit status; None if all processes have to end."""
    watching.prepare()
    pid = os.fork()
    if not pid:
        _become(words, cwd, environ, watching)
    watching.follow()
    pidfd = os.pidfd_open(pid)
    try:
        reaped_s = time.monotonic()
        while True:
            ready = _wait([connection.fileno(), pidfd], watching, 1.0)
            if pidfd in ready:
                return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if connection.fileno() in ready:
                return None
            # Orphans are reaped periodically, so that a long command does not fill the process table.
            if time.monotonic() - reaped_s > 1.0:
                _reap(but=pid)
                reaped_s = time.monotonic()
    finally:
        os.close(pidfd)


def _wait(fds: list[int], watching: _WatchState, max_s: float) -> set[int]:
    """Return readable descriptors, and process notifications of watched commands meanwhile."""
    poll = select.poll()
    for fd in (*fds, *watching.listeners):
        poll.register(fd, select.POLLIN)
    end_s = time.monotonic() + max_s
    while True:
        ready = set()
        known = len(watching.listeners)
        for fd, events in poll.poll(max(0.0, end_s - time.monotonic()) * 1000):
            if fd in fds:
                ready.add(fd)
            else:
                watching.serve(fd, is_over=not events & select.POLLIN)
        if ready or len(watching.listeners) != known or time.monotonic() >= end_s:
            return ready


def _become(words: list[str], cwd: str, environ: dict[bytes, bytes], watching: _WatchState) -> None:
    """Execute the command in the child. Never returns."""
    try:
        os.setsid()  # no terminal on which programs could request a password
        for signum in (
            signal.SIGINT,
            signal.SIGTERM,
            signal.SIGHUP,
            signal.SIGTTIN,
            signal.SIGTTOU,
            signal.SIGPIPE,
        ):
            signal.signal(signum, signal.SIG_DFL)
        null = os.open("/dev/null", os.O_RDONLY)
        os.dup2(null, 0, inheritable=True)
        os.chdir(cwd)
        watching.begin()
        os.execve(words[0], [os.fsencode(word) for word in words], environ)
    except OSError as error:
        os.write(2, os.fsencode(f"{error.filename or words[0]}: {error.strerror}\n"))
    finally:
        os._exit(127)


def _end_all(watching: _WatchState) -> list[str]:
    """End every descendant. Return their names."""
    names: dict[int, str] = {}
    started_s = time.monotonic()
    told: set[int] = set()
    while True:
        _reap()
        left = _descendants()
        passed_s = time.monotonic() - started_s
        if not left or passed_s > GRACE_S + KILLED_S:
            return sorted(names.values())
        for pid, (name, ticks) in left.items():
            names.setdefault(pid, name)
            if passed_s > GRACE_S:
                _send(pid, ticks, signal.SIGKILL)
            elif pid not in told:
                told.add(pid)
                _send(pid, ticks, signal.SIGTERM)
                _send(pid, ticks, signal.SIGCONT)  # a stopped process could not handle SIGTERM
        _wait([], watching, LOOK_S)


def _reap(but: int = 0) -> None:
    """Collect ended children, except one."""
    try:
        while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if found.si_pid == but:
                return
            os.waitpid(found.si_pid, os.WNOHANG)
    except ChildProcessError:
        pass


def _descendants() -> dict[int, tuple[str, int]]:
    """Return living descendants: name and start time by pid."""
    children: dict[int, list[int]] = {}
    found: dict[int, tuple[str, int, str]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := _stat(int(entry))) is not None:
            name, state, parent, ticks = fields
            found[int(entry)] = (name, ticks, state)
            children.setdefault(parent, []).append(int(entry))
    below: dict[int, tuple[str, int]] = {}
    todo = [os.getpid()]
    while todo:
        for pid in children.pop(todo.pop(), ()):
            todo.append(pid)
            name, ticks, state = found[pid]
            if state not in "ZX":
                below[pid] = (name, ticks)
    return below


def _stat(pid: int) -> tuple[str, str, int, int] | None:
    """Return name, state, parent and start time; None if the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            head, _, tail = file.read().rpartition(b")")
    except OSError:
        return None
    fields = tail.split()
    if len(fields) < 20:
        return None
    return head.partition(b"(")[2].decode(errors="replace"), fields[0].decode(), int(fields[1]), int(fields[19])


def _send(pid: int, ticks: int, signum: int) -> None:
    """Signal a process, but never another one that has reused its pid."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        now = _stat(pid)
        if now is not None and now[3] == ticks:
            signal.pidfd_send_signal(pidfd, signum)
    except OSError:
        pass
    finally:
        os.close(pidfd)


def _read_line(connection: socket.socket) -> bytes:
    received = bytearray()
    while not received.endswith(b"\n") and len(received) < MAX_ORDER_BYTES:
        data = connection.recv(1 << 16)
        if not data:
            raise SystemExit(1)  # the requesting process has ended
        received += data
    return bytes(received)


def _say(connection: socket.socket, answer: dict[str, object]) -> None:
    try:
        connection.sendall(json.dumps(answer).encode() + b"\n")
    except OSError:
        pass  # the other end is closed


if __name__ == "__main__":
    main()
