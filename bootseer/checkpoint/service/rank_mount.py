"""A version as a directory for one attempt's ranks, served by its own process: `RankMount` is the service's side.

It serves code that opens files by name if links into the arena are impossible: on several nodes that each read a
part, with too little memory for all, or after memory was released. Reads use bounded memory and the kernel's page
cache, so each byte is read once per node. With an arena, bytes come from there, and are recorded like reads of any
rank. The process ends with its connection, so nothing of it outlives the service.

    in      url version digest arena folder
            let_go      the arena will be released: later reads come from the store
    out     alive ... then mounted | failed
            damaged     a program has requested bytes that are damaged
"""

from __future__ import annotations

import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from bootseer.checkpoint.io.source import Source
from bootseer.errors import BootseerError
from bootseer.ipc.channel import Channel
from bootseer.linux.child_processes import end_process, run_limited
from bootseer.mounts.faults import Journal, path_beside
from bootseer.own_module import command_of

READY_S = 60.0  # a store may be slow to answer
ALIVE_S = 10.0
ORDERS_S = 60.0  # between the process's start and its first request
END_S = 5.0
NOT_INHERITED = ("RANK", "LOCAL_RANK", "BOOTSEER_ARENA", "BOOTSEER_CHECKPOINT")
Shown = Callable[[str, str], object]


class RankMount:
    """Starts, watches and ends the process. Runs on the service's loop."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        folder: str,
        then: Shown,
        lost: Callable[[str], object],
        say_alive: Callable[[], object],
        damaged: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Args:
        then: `then(path, why)` is called once: the mount can be used, or, with an empty path, why it failed.
        lost: called with a line when a usable mount has ended by itself.
        say_alive: called regularly until either.
        damaged: called once per mount, with the damaged bytes of the version.
        """
        self._selector = selector
        self._directory = folder
        self._then: Shown | None = then
        self._lost = lost
        self._say_alive = say_alive
        self._damaged = damaged
        self._is_up = False
        self._lines: Channel | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._limit_s = time.monotonic() + READY_S

    def start(self, url: str, version: str, digest: str, arena: str) -> None:
        """Start the process. `arena`: its address; "": it reads from the store itself. Raises OSError."""
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        environ = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        command = command_of("bootseer.checkpoint.service.rank_mount")
        try:
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=2, env=environ)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._lines = Channel(ours)
        self._selector.register(ours.fileno(), selectors.EVENT_READ, self._hear)
        # URLs by the connection: a URL may hold a password, and every user sees command lines.
        self._lines.send(
            {"url": url, "version": version, "digest": digest, "arena": arena, "folder": self._directory}
        )

    def tick(self) -> None:
        if self._then is not None and time.monotonic() > self._limit_s:
            self._give_up(f"the mount was not ready within {READY_S:g} s")

    def let_go(self) -> None:
        """Make the process release its memory of the arena. The mount stays."""
        if self._lines is not None:
            self._lines.send({"let_go": True})

    def end(self) -> int | None:
        """Unmount; open files of ranks fail. Return the process's status, if there was one."""
        self._then = None
        status = None
        lines, self._lines = self._lines, None
        if lines is not None:
            self._selector.unregister(lines.fd)
            lines.close()
        process, self._process = self._process, None
        if process is not None:
            try:
                status = process.wait(END_S)
            except subprocess.TimeoutExpired:
                status = end_process(process)
        clean(self._directory)
        return status

    def _hear(self) -> None:
        assert self._lines is not None
        news = self._lines.receive_ready()
        for each in news or ():
            if "alive" in each:
                self._say_alive()
            elif "damaged" in each:
                self._damaged(str(each["damaged"]))
            elif "mounted" in each:
                self._is_up = True
                then, self._then = self._then, None
                if then is not None:
                    then(self._directory, "")
            else:
                self._give_up(str(each.get("failed")))
                return
        if news is None and self._is_up:
            self._lost(f"the mount at {self._directory} has ended: its process died (status {self.end()})")
        elif news is None:
            self._give_up("the process that mounts it has died")

    def _give_up(self, why: str) -> None:
        then = self._then
        self.end()
        if then is not None:
            then("", why)


def clean(directory: str) -> None:
    """Remove the directory of a mount, also of one whose process was killed."""
    try:
        os.unlink(path_beside(directory))
    except OSError:
        pass  # there was no failure
    try:
        os.rmdir(directory)
        return
    except FileNotFoundError:
        return
    except OSError:
        pass
    for command in (["umount", "-l", directory], ["fusermount3", "-u", "-z", directory]):
        try:
            if run_limited(command, timeout_s=END_S).returncode == 0:
                break
        except (OSError, subprocess.TimeoutExpired):
            continue
    try:
        os.rmdir(directory)
    except OSError:
        pass  # the next service retries


# ---- the process ---------------------------------------------------------------------------------------------


def _serve(connection: socket.socket) -> None:
    lines = Channel(connection)
    settings, *more = _first_orders(lines)
    serving = _Serving(lines, more)
    try:
        from bootseer.checkpoint.mounting import SourceFiles, default_window_bytes
        from bootseer.checkpoint.opening import Job, open_job
        from bootseer.logs import sent_to
        from bootseer.mounts.fuse.mounting import Options, mount

        threading.Thread(target=serving.listen, daemon=True).start()
        job = Job("", settings["url"], settings["version"], settings["digest"], settings["arena"])
        source = open_job(job, None)
        serving.take(source)
        files = SourceFiles(source, on_damage=serving.report_damage)
        options = Options(name="bootseer", window_bytes=default_window_bytes())
        journal = Journal(path_beside(settings["folder"]))

        def tell(line: str) -> None:
            """Record a failed read, so that bootrun knows it before the rank has its error."""
            journal.note(line)
            print(f"bootseer mount: {line}", file=sys.stderr, flush=True)

        try:
            with sent_to(tell):
                mount(files, settings["folder"], options=options, on_ready=serving.report_ready)
        finally:
            files.close()
    except BootseerError as error:
        lines.send({"failed": str(error)})
    except ImportError as error:
        lines.send({"failed": f"{error.name or error} is missing: pip install 'bootseer[checkpoint]'"})


class _Serving:
    """Receives the service's messages in a thread: `let_go`, and the end, which ends this process."""

    def __init__(self, lines: Channel, orders: list[dict[str, Any]]) -> None:
        """`orders`: messages that have arrived already."""
        self._lines = lines
        self._lock = threading.Lock()
        self._source: Source | None = None
        self._is_ready = False
        self._has_reported_damage = False
        self._has_let_go = any("let_go" in each for each in orders)

    def listen(self) -> None:
        poll = select.poll()
        poll.register(self._lines.fd, select.POLLIN)
        while True:
            if not poll.poll(ALIVE_S * 1000):
                with self._lock:
                    if not self._is_ready:
                        self._lines.send({"alive": True})
                continue
            orders = self._lines.receive_ready()
            if orders is None:
                break
            if any("let_go" in each for each in orders):
                self._let_go()
        os.kill(os.getpid(), signal.SIGTERM)

    def take(self, source: Source) -> None:
        with self._lock:
            self._source = source
            is_late = self._has_let_go
        if is_late:
            self._let_go()

    def report_ready(self) -> None:
        with self._lock:
            self._is_ready = True
            self._lines.send({"mounted": True})

    def report_damage(self, error: BootseerError) -> None:
        """Report damage; called by any thread of the mount."""
        with self._lock:
            if not self._has_reported_damage:
                self._has_reported_damage = True
                self._lines.send({"damaged": str(error)})

    def _let_go(self) -> None:
        from bootseer.checkpoint.io.arena_source import ArenaSource

        with self._lock:
            self._has_let_go = True
            source = self._source
        if isinstance(source, ArenaSource):
            source.let_go()


def _first_orders(lines: Channel) -> list[dict[str, Any]]:
    while select.select([lines.fd], [], [], ORDERS_S)[0]:
        orders = lines.receive_ready()
        if orders is None:
            break
        if orders:
            return orders
    sys.exit(1)


if __name__ == "__main__":
    _serve(socket.socket(fileno=os.dup(0)))
