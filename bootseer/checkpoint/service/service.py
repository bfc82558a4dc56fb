"""The checkpoint service: `python -m bootseer.checkpoint.service.service`. Holds a node's arena for the ranks of
one job.

bootrun sends requests to its standard input and reads answers from its standard output, as JSON lines; URLs are
passed only there, never in argv. Ranks connect to a Unix socket in a private directory of the service
(io/arena_source.py). The service ends with its input, and leaves nothing behind.

    start    url memory_bytes arena_bytes keep local_world_size nodes
                                  resolves the version and prepares memory
             whole                          all of it is needed, independent of earlier loads
             holds                          for a later job: offered to it, and when it is taken over -> taken
             max_bytes_per_s               limit for reads; None: no limit
             disk_bytes                     limit of all versions on this node's disk; 0: none are kept
             is_eager                       the default; otherwise no memory is allocated, nor taken over from
                                            `bootseer warm`, before a load is requested
             shows_url                      ranks read only with Bootseer's loaders: if no path is available
                                            without a copy, they get the URL
                                  -> listening saves shown: where savers leave units ("" without arena_bytes),
                                     and the URL without secrets
    resolve  without falls_back   -> resolved version digest passed | absent why kind | unresolved why older
                                     passed: a line for each newer save, why it is not taken
                                     kind: resolving.py; without: digests of versions that cannot be loaded;
                                     falls_back: also skip damaged manifests; older: a version that could be
                                     loaded instead, "" for none
    load     version digest world_size nnodes group_rank attempt
                                  -> progress bytes of_bytes ... then ready path address | direct why path |
                                     failed, all with the request's attempt; ready disk_bytes: bytes that were on
                                     the disk. A path names files that open.
                                  -> failed why kind digest: also later, when bytes that a rank has requested
                                     turn out to be wrong; kind: filler.py
    release                       ranks have their parts: reads are recorded, the checkpoint is copied to the
                                  disk, the memory is released
    copy                          -> copied why: to the disk, "" on success
    statistics                    -> statistics: bytes in the arena and left by savers, units, readers, ranks
    end                           like the end of input
                                  -> at any time `said` text: a line for the log; alive: a long operation
                                     continues; origin url folders: directories of a store that the job's nodes
                                     may exchange
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from bootseer.checkpoint.service.loading import Loader
from bootseer.checkpoint.service.process import (
    Answers,
    Child,
    allow_descriptors,
    close_inherited,
    fork_child,
    make_directory,
    take_streams,
)
from bootseer.checkpoint.service.resolving import News, Resolver, pinned_of
from bootseer.checkpoint.service.start_options import StartOptions, to_options
from bootseer.errors import CheckpointError
from bootseer.ipc.channel import Channel
from bootseer.logs import get_logger, send_to
from bootseer.storage.paths import redact

_log = get_logger(__name__)


class CheckpointService:
    """See the module's docstring. One thread, one loop."""

    def __init__(self, launcher: Channel) -> None:
        self._launcher = launcher
        self._answers = Answers(launcher)
        self._selector = selectors.DefaultSelector()
        self._options = StartOptions()
        self._directory, self._lock_fd = make_directory()
        # For bootrun's requests; the loader has another one: neither may discard the other's answer.
        self._resolver = Resolver(self._selector, self._fork, self._answers.say_alive)
        self._loader = Loader(self._directory, self._selector, self._fork, self._answers)
        self._is_over = False

    def stop(self) -> None:
        """Make `run` end; a signal handler may call it."""
        self._is_over = True

    def say(self, line: str) -> None:
        """Report a line to the user; this process logs with it."""
        self._answers.say(line)

    # ---- loop ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            self._selector.register(self._launcher.fd, selectors.EVENT_READ, self._receive_requests)
            # A signal ends the wait. A handler that raises would do so also where exceptions are ignored.
            woken, waker = socket.socketpair()
            waker.setblocking(False)
            signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
            self._selector.register(woken.fileno(), selectors.EVENT_READ, lambda: woken.recv(1 << 8))
            while not self._is_over:
                for key, _ in self._selector.select(1.0):
                    # An earlier event may have closed it, and its number may be reused.
                    if self._selector.get_map().get(key.fileobj) == key:
                        key.data()
                self._tick()
        finally:
            self._end()

    def _tick(self) -> None:
        """Run about every second."""
        self._resolver.tick()
        self._loader.tick()

    def _end(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from the supervisor, at the end of the job
        self._resolver.drop()
        self._loader.end()
        shutil.rmtree(self._directory, ignore_errors=True)
        os.close(self._lock_fd)

    # ---- requests --------------------------------------------------------------------------------------------

    def _receive_requests(self) -> None:
        lines = self._launcher.receive_ready()
        if lines is None:
            self._is_over = True
            return
        for order in lines:
            match order.get("do"):
                case "start":
                    self._start(order)
                case "resolve":
                    self._resolve(list(order.get("without") or ()), bool(order.get("falls_back")))
                case "load":
                    self._loader.begin(order)
                case "release":
                    self._loader.release(complete=True)
                case "copy":
                    self._loader.copy()
                case "statistics":
                    self._answers.send("statistics", **self._loader.statistics())
                case "end":
                    self._is_over = True

    def _start(self, order: dict[str, Any]) -> None:
        self._options = to_options(order)
        saves = self._loader.start(self._options)
        self._answers.send("listening", saves=saves, shown=redact(self._options.url))
        if self._options.is_eager:
            self._loader.look_ahead()

    def _resolve(self, without: list[str], falls_back: bool) -> None:
        """Find the version to load, for the job's coordinator."""
        answers = self._answers

        def found(news: News) -> None:
            if "pinned" in news:
                pinned = pinned_of(news)
                for why in news.get("damaged") or ():
                    _log.warning("loading an older version, %s, as the newest is damaged: %s", pinned.version, why)
                passed = list(news.get("passed") or ())
                answers.send(
                    "resolved", version=pinned.version, digest=pinned.digest, bytes=pinned.size, passed=passed
                )
                if self._loader.is_idle and self._options.is_eager:
                    self._loader.prepare_ahead(pinned)
            elif "absent" in news:
                answers.send("absent", why=news["absent"], kind=news["kind"])
            else:
                answers.send("unresolved", why=news["failed"], older=news.get("older"))

        if self._loader.is_idle:
            self._loader.stop_looking_ahead()  # this resolves the same
        self._resolver.ask(self._options.url, "", "", found, without, falls_back=falls_back)

    # ---- processes -------------------------------------------------------------------------------------------

    def _fork(self, work: Callable[[socket.socket], None]) -> Child:
        return fork_child(work, self._be_child)

    def _be_child(self) -> None:
        """Close the service's connections in a child: otherwise ranks and bootrun would not see it end."""
        send_to(None)
        signal.set_wakeup_fd(-1)
        close_inherited(self._selector)
        self._launcher.close()


def main() -> NoReturn:
    """Serve until standard input ends."""
    os.umask(0o077)
    allow_descriptors()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # bootrun decides

    status = 0
    try:
        service = CheckpointService(take_streams())
        signal.signal(signal.SIGTERM, lambda *_: service.stop())
        send_to(service.say)
        service.run()
    except CheckpointError as error:
        print(f"bootseer: error: {error}", file=sys.stderr)
        status = 1
    sys.exit(status)


if __name__ == "__main__":
    main()
