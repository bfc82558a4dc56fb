"""The keeper of a job's environment: `python -P -m bootseer.env.setup_keeper`. One for each job and node.

bootrun starts it, gives orders on its standard input and hears answers on its standard output, JSON lines: command
lines and URLs come that way, never in argv. It ends when its input does, except while it publishes what it has
built: that it finishes first, within PUBLISH_MOST_S.

    start  ... (setup_keeper_job.Job)      -> looked key tree why is_silent  what this node has, or could have;
                                              is_silent: the store does not answer
    use    tree                            -> fetched tree, or unfetched why damaged (the tree, or "") is_silent
    show   tree                            -> ready ...                      what was fetched is in its place
    build  is_urgent damaged (a tree)      -> ready ... then published tree, or unpublished why; or found tree
    own, again                             -> ready ...                      set-up was run, if it had to be
    image  prefix set unset python                                           it is open: set-up can run there
    first-step                                                               what the start has read is known
    touched files (path, ranges (offset, bytes), none: all) imports          it was that, of what was built
    any time:  fell-back why (what is kept cannot be used, or not as fast as it could be)
               | origin url folders (of the store: the nodes of the job may give each other what is below)
               | said text | setup-began | line text (of set-up) | lost | alive (it gets on)
               | failed why tail could_enter (false: a command of set-up was not begun in the image, so it seems)
               | waiting, waited (for another process that is at the targets)
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

MOST_LINE_BYTES = 16 << 20
PUBLISH_MOST_S = 3600.0  # after its job has ended


class Connection:
    """bootrun's end of it: orders come into a queue by a thread of its own, answers go out from any thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._received = b""
        self.orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()  # None: bootrun has gone
        self.is_gone = False

    def first(self) -> dict[str, Any] | None:
        """The first order; to be called before `listen`. None: bootrun has gone."""
        while b"\n" not in self._received:
            data = self._sock.recv(1 << 16)
            if not data or len(self._received) > MOST_LINE_BYTES:
                return None
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        order: dict[str, Any] = json.loads(line)
        return order

    def listen(self, on_gone: Callable[[], object]) -> None:
        """Starts the thread. `on_gone` is called in it when bootrun has gone."""
        threading.Thread(target=self._listen, args=(on_gone,), name="orders", daemon=True).start()

    def tell(self, did: str, **fields: object) -> None:
        """An answer; nobody may be there to hear it any more."""
        data = json.dumps({"did": did, **fields}).encode("ascii") + b"\n"
        try:
            with self._lock:
                self._sock.sendall(data)
        except OSError:
            pass  # the thread that listens sees the end as well

    def _listen(self, on_gone: Callable[[], object]) -> None:
        try:
            while len(self._received) <= MOST_LINE_BYTES:
                *lines, self._received = self._received.split(b"\n")
                for line in lines:
                    self.orders.put(json.loads(line))
                select.select([self._sock], [], [])
                data = self._sock.recv(1 << 16)
                if not data:
                    break
                self._received += data
        except (OSError, ValueError):
            pass
        self.is_gone = True
        self.orders.put(None)
        on_gone()


def open_connection() -> socket.socket:
    """The standard streams are the connection; what libraries print goes to stderr."""
    sock = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    return sock


def end_at_once() -> None:
    """Whatever runs: what it has half done is completed or undone by the next one, and set-up ends with it."""
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    """The holder of mounts is forked first: it has to be while there is one thread."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # bootrun decides when a job ends
    connection = Connection(open_connection())
    if "--early" in sys.argv:
        import_module("bootseer.env.setup_keeper_work")
    order = connection.first()
    if order is None:
        return
    from bootseer.env.setup_keeper_mount import begin_spares, make_holder

    begin_spares(order)
    holder = make_holder() if "mount" in order["ways"] else None
    from bootseer.env.setup_keeper_work import Work

    if holder is not None:
        import_module("bootseer.env.mounted")  # while nobody waits for it

    work = Work(order, connection, holder)

    def on_gone() -> None:
        if not work.is_publishing:
            work.give_up()
            end_at_once()
        timer = threading.Timer(PUBLISH_MOST_S, end_at_once)
        timer.daemon = True
        timer.start()

    connection.listen(on_gone)
    work.run()


if __name__ == "__main__":
    main()
    end_at_once()  # threads of libraries are not waited for
