"""bootrun's side of the supervisor: requests out, events in, on the event loop; nothing here blocks.

Separate from supervisor.py, which contains only code that the supervisor needs.
"""

from __future__ import annotations

import os

from bootseer.light_typing import Any, Callable, Iterable, NamedTuple
from launcher.base import children
from launcher.base.loop import EventLoop
from launcher.supervisor.supervisor import Pipes, pack, unpack


class Exited(NamedTuple):
    """A rank has ended."""

    key: int
    pid: int
    status: int  # exit status, or minus the signal's number
    time_ns: int  # time.monotonic_ns() at which the supervisor saw it
    wall_s: float
    cpu_s: float
    peak_rss_bytes: int


class SpawnRequest(NamedTuple):
    """A rank to start: `environ` is added to bootrun's own; output goes to files, None: to the console."""

    key: int
    argv: list[str]
    environ: dict[str, str]
    unset: list[str]
    stdout: str | None
    stderr: str | None


class SupervisorEvents(NamedTuple):
    """Callbacks for the supervisor's events."""

    spawned: Callable[[int, int, int], object]  # key, pid, monotonic ns
    spawn_failed: Callable[[int, int, str], object]  # key, errno, which file
    exited: Callable[[Exited], object]
    lingering: Callable[[int, list[tuple[int, str]]], object]  # key, (pid, name) of descendants after success
    tree_ended: Callable[[int, list[tuple[int, str]]], object]  # key, killed processes
    stopped: Callable[[list[tuple[int, str]], list[tuple[int, str, str]]], object]  # killed; stuck
    gone: Callable[[], object]  # the supervisor died
    preload_ready: Callable[[int, int, list[str]], object]  # which one, module count, names that were not found
    # Which one, module in import, why, is it to blame, is the process the subject of the reason (EndReason).
    preload_ended: Callable[[int, str, str, bool, bool], object]
    forked: Callable[[int, int, int], object]  # key, pid, monotonic ns: as `spawned`
    exec_instead: Callable[[str], object]  # reason why ranks are exec'd instead of forked
    service_ended: Callable[[int, str], object]  # which one, why
    helper_ended: Callable[[int, float, dict[str, Any]], object]  # which one, CPU seconds, answer


class SupervisorClient:
    def __init__(self, loop: EventLoop, pipes: Pipes) -> None:
        self._loop = loop
        self._pipes = pipes
        self._events: SupervisorEvents | None = None
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._ended = False
        children.add(pipes.watchdog_pid)
        os.set_blocking(pipes.requests_fd, False)
        os.set_blocking(pipes.events_fd, False)

    def listen(self, events: SupervisorEvents) -> None:
        """Deliver events from now on; call this before any request."""
        self._events = events
        self._loop.add_reader(self._pipes.events_fd, self._read)

    def set_grace(self, grace_s: float) -> None:
        """Set the time to end: for ranks after bootrun is gone, and for processes left by a successful rank."""
        self._ask("grace", grace_s)

    def set_handled(self, signals: Iterable[int]) -> None:
        """Set the signals that end the job: ranks get the default action for them in any case."""
        self._ask("handled", list(map(int, signals)))

    def spawn(self, rank: SpawnRequest) -> None:
        self._ask("spawn", *rank)

    def preload(
        self, number: int, argv: list[str], environ: dict[str, str], unset: Iterable[str], modules: list[str]
    ) -> None:
        """Start the fork server (`modules`: see fork_server.py); `preload_ready` or `preload_ended` answers."""
        self._ask("preload", number, argv, environ, list(unset), modules)

    def preload_rest(self, number: int, changes: list[str], modules: list[str]) -> None:
        """Send the rest to a fork server that waits for it. Args: changes: NAME=VALUE, or NAME to be unset."""
        self._ask("preload_rest", number, changes, modules)

    def unload(self) -> None:
        """End the fork server, if there is one; ranks continue."""
        self._ask("unload")

    def prepare(self, count: int) -> None:
        """Let the fork server prepare for `count` ranks that may be forked soon."""
        self._ask("prepare", count)

    def fork(self, port: int, spare: int, ranks: list[SpawnRequest]) -> None:
        """Start ranks from the fork server, or by exec if that fails (`exec_instead`).

        Args: port: the master port if rank 0 is among them (it starts first), else 0; spare: standby processes for
            the next attempt.
        """
        self._ask("fork", port, spare, [tuple(rank) for rank in ranks])

    def serve(
        self, number: int, argv: list[str], environ: dict[str, str], unset: Iterable[str], address: bytes
    ) -> None:
        """Start a service, which ends with the job; `service_ended` reports an earlier end.

        The supervisor connects its standard input and output to the Unix socket `address`.
        """
        self._ask("serve", number, argv, environ, list(unset), address)

    def end_service(self, number: int) -> None:
        """End a service, with SIGKILL if it ignores SIGTERM; answered by `service_ended`."""
        self._ask("end_service", number)

    def help(self, number: int, name: str, module: str, texts: Iterable[str]) -> None:
        """Start a helper (helpers.py) that calls `run` of the module.

        Its answer comes by `helper_ended`, unless the job ends before.
        """
        self._ask("help", number, name, module, list(texts))

    def end_help(self, number: int) -> None:
        """End a helper, if it runs."""
        self._ask("end_help", number)

    def remove_at_end(self, paths: list[str]) -> None:
        """Set the files that the supervisor removes at its end, in place of earlier ones."""
        self._ask("remove_at_end", paths)

    def signal(self, keys: list[int], signum: int) -> None:
        """Forward a signal to ranks, which continue."""
        self._ask("signal", keys, signum)

    def stop(self, signum: int, grace_s: float) -> None:
        """End all processes of the job: `signum`, after `grace_s` SIGKILL; answered by `stopped`."""
        self._ask("stop", int(signum), grace_s)

    def hasten(self, grace_s: float) -> None:
        """Limit the current stop to `grace_s` more seconds."""
        self._ask("hasten", grace_s)

    def close(self) -> None:
        """End the supervisor with all its processes; return when supervisor and watchdog are gone."""
        self._ended = True
        self._loop.remove_reader(self._pipes.events_fd)
        self._loop.remove_writer(self._pipes.requests_fd)
        os.close(self._pipes.requests_fd)
        children.reap(self._pipes.watchdog_pid, waits=True)
        os.close(self._pipes.events_fd)

    def _ask(self, *request: Any) -> None:
        if self._ended:
            return
        self._outgoing += pack(request)
        self._flush()

    def _flush(self) -> None:
        fd = self._pipes.requests_fd
        try:
            while self._outgoing:
                del self._outgoing[: os.write(fd, self._outgoing)]
        except BlockingIOError:
            self._loop.add_writer(fd, self._flush)
            return
        except BrokenPipeError:
            self._outgoing.clear()  # `_read` sees the end too and reports it
        self._loop.remove_writer(fd)

    def _read(self) -> None:
        try:
            data = os.read(self._pipes.events_fd, 1 << 18)
        except BlockingIOError:
            return
        assert self._events is not None
        if not data:
            self._ended = True
            self._loop.remove_reader(self._pipes.events_fd)
            self._loop.remove_writer(self._pipes.requests_fd)
            self._events.gone()
            return
        self._incoming += data
        for name, *values in unpack(self._incoming):
            if name == "exited":
                self._events.exited(Exited(*values))
            else:
                getattr(self._events, name)(*values)
