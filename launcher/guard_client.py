"""bootrun's side of the guard: requests out, events in, on the event loop; nothing here blocks.

Separate from guard.py so that the guard's own file stays what the guard needs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from bootseer.light_typing import Any, NamedTuple
from launcher.guard import Pipes, pack, unpack
from launcher.loop import EventLoop


class Exited(NamedTuple):
    """A rank has ended."""

    key: int
    pid: int
    status: int  # exit status, or minus the signal's number
    time_ns: int  # time.monotonic_ns() at which the guard saw it
    wall_s: float
    cpu_s: float
    peak_rss_bytes: int


class SpawnRequest(NamedTuple):
    """A rank to start: `environ` on top of bootrun's own; output to files, None = the console."""

    key: int
    argv: list[str]
    environ: dict[str, str]
    unset: list[str]
    stdout: str | None
    stderr: str | None


class GuardEvents(NamedTuple):
    """What the guard tells; each a callback."""

    spawned: Callable[[int, int, int], object]  # key, pid, monotonic ns
    spawn_failed: Callable[[int, int, str], object]  # key, errno, which file
    exited: Callable[[Exited], object]
    lingering: Callable[[int, list[tuple[int, str]]], object]  # key, (pid, name) of descendants after success
    tree_ended: Callable[[int, list[tuple[int, str]]], object]  # key, what had to be killed
    stopped: Callable[[list[tuple[int, str]], list[tuple[int, str, str]]], object]  # killed; stuck
    gone: Callable[[], object]  # the guard died
    preload_ready: Callable[[int, int, list[str]], object]  # which one, modules it has, names that were not found
    preload_ended: Callable[[int, str, str, bool], object]  # which one, what it imported or "", why, its fault
    forked: Callable[[int, int, int], object]  # key, pid, monotonic ns: as `spawned`
    exec_instead: Callable[[str], object]  # ranks that were to be forked are exec'd, why
    service_ended: Callable[[int, str], object]  # which one, why
    helper_ended: Callable[[int, float, dict[str, Any]], object]  # which one, CPU seconds, what it has said


class GuardClient:
    """The guard as the agent sees it."""

    def __init__(self, loop: EventLoop, pipes: Pipes) -> None:
        self._loop = loop
        self._pipes = pipes
        self._events: GuardEvents | None = None
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._ended = False
        os.set_blocking(pipes.requests_fd, False)
        os.set_blocking(pipes.events_fd, False)

    def listen(self, events: GuardEvents) -> None:
        """From now on events are told; nothing may be asked before."""
        self._events = events
        self._loop.add_reader(self._pipes.events_fd, self._read)

    def set_grace(self, grace_s: float) -> None:
        """How long ranks get to end when bootrun itself is gone, and leftovers of a rank that succeeded."""
        self._ask("grace", grace_s)

    def set_handled(self, signals: Iterable[int]) -> None:
        """Signals that end the job: ranks have the default for them, whatever bootrun's starter ignores."""
        self._ask("handled", list(map(int, signals)))

    def spawn(self, rank: SpawnRequest) -> None:
        """Starts a rank."""
        self._ask("spawn", *rank)

    def preload(
        self, number: int, argv: list[str], environ: dict[str, str], unset: Iterable[str], modules: list[str]
    ) -> None:
        """Starts the preloaded process (preloaded.py says what `modules` are): `preload_ready` or `_ended`."""
        self._ask("preload", number, argv, environ, list(unset), modules)

    def preload_rest(self, number: int, changes: list[str], modules: list[str]) -> None:
        """What a preloaded process waits for that was told so. Args: changes: NAME=VALUE, or NAME to be unset."""
        self._ask("preload_rest", number, changes, modules)

    def unload(self) -> None:
        """Ends the preloaded process, if there is one; ranks go on."""
        self._ask("unload")

    def prepare(self, count: int) -> None:
        """So many ranks may be forked soon: the preloaded process makes ready what it can."""
        self._ask("prepare", count)

    def fork(self, port: int, spare: int, ranks: list[SpawnRequest]) -> None:
        """Starts ranks from the preloaded process, or by exec if that cannot be (`exec_instead`).

        Args: port: the master port when rank 0 is among them (it gets a head start), else 0; spare: processes to
            keep ready for the next attempt.
        """
        self._ask("fork", port, spare, [tuple(rank) for rank in ranks])

    def serve(
        self, number: int, argv: list[str], environ: dict[str, str], unset: Iterable[str], address: bytes
    ) -> None:
        """Starts a process that ends with the job; the guard connects its standard input and output to the Unix
        socket `address`. `service_ended` when it ends before."""
        self._ask("serve", number, argv, environ, list(unset), address)

    def end_service(self, number: int) -> None:
        """Ends a service, with SIGKILL if it does not heed; `service_ended` when it is gone."""
        self._ask("end_service", number)

    def help(self, number: int, name: str, texts: Iterable[str]) -> None:
        """Starts a helper (guard_helpers.py): `helper_ended`, unless the job ends before."""
        self._ask("help", number, name, list(texts))

    def end_help(self, number: int) -> None:
        """Tells a helper to end, if it runs."""
        self._ask("end_help", number)

    def remove_at_end(self, paths: list[str]) -> None:
        """Files that are gone when the guard is, whoever was killed before; instead of those said before."""
        self._ask("remove_at_end", paths)

    def signal(self, keys: list[int], signum: int) -> None:
        """Passes a signal on; the ranks go on."""
        self._ask("signal", keys, signum)

    def stop(self, signum: int, grace_s: float) -> None:
        """Ends everything below the guard: `signum`, after `grace_s` SIGKILL; answered by `stopped`."""
        self._ask("stop", int(signum), grace_s)

    def hasten(self, grace_s: float) -> None:
        """A stop that is under way gets at most `grace_s` more."""
        self._ask("hasten", grace_s)

    def close(self) -> None:
        """Ends the guard, which ends what is left below it; returns when guard and sentinel are gone."""
        self._ended = True
        self._loop.remove_reader(self._pipes.events_fd)
        self._loop.remove_writer(self._pipes.requests_fd)
        os.close(self._pipes.requests_fd)
        try:
            os.waitpid(self._pipes.sentinel_pid, 0)
        except ChildProcessError:
            pass  # reaped already: we are PID 1 of a container
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
            self._outgoing.clear()  # `_read` sees the end as well and tells
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
