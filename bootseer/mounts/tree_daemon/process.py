"""Starts the daemon of a tree, and its reaper: `python -P -m bootseer.mounts.tree_daemon.process ORDERS [SCHEME]`.

    starter        waiting.py: sends one order at ORDERS, a socket, or none
      reaper       waits for the daemon's end; ends the mounts that it has left; opens no file of FUSE
        daemon     imports what it will need, waits for its order, then is serving.py

The process that was started ends at once. The daemon may be started before its starter knows whether it is needed,
and ends when ORDERS does. An order is sent by the socket, as a URL may hold a password and command lines are
public. With it are sent the log, a pipe for the daemon's result, and the lock of the tree's directory, open and
held. Daemon and reaper both have the lock: it is free when both have ended. Little is imported before the fork, so
that the reaper stays small. SCHEME: of the expected URL.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from types import FrameType
from typing import NoReturn

from bootseer.errors import BootseerError
from bootseer.mounts.faults import Journal
from bootseer.mounts.tree_daemon import cgroup
from bootseer.mounts.tree_daemon.orders import ACCEPTED, MAX_DIRECTORY_BYTES, DaemonOrder, receive
from bootseer.mounts.tree_daemon.places import TreeDirectory

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
UNNEEDED_S = 60.0  # without an order it ends: its starter does not need it


def main(orders: int, scheme: str) -> NoReturn:
    """Start reaper and daemon. `orders`: a socket."""
    signal.signal(
        signal.SIGCHLD, signal.SIG_DFL
    )  # if the starter ignores it, exit statuses of children would be lost
    if os.fork():
        os._exit(0)
    os.chdir("/")
    why = cgroup.leave()  # the starter's end must not end the tree for others
    os.set_inheritable(orders, False)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until both have handlers
    daemon = os.fork()
    if daemon:
        os.close(orders)
        theirs.close()
        _reap(ours, daemon, why)
    ours.close()
    status = 1
    try:
        status = _serve(socket.socket(fileno=orders), theirs, scheme)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)  # threads that hang are not waited for


# ---- the daemon ----------------------------------------------------------------------------------------------


def _serve(orders: socket.socket, reaper: socket.socket, scheme: str) -> int:
    """Run the daemon; return the exit status."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # without an order it just ends
    from bootseer.mounts.tree_daemon import warm_imports as tree_warm

    tree_warm.warm_maker()
    from bootseer.mounts.tree_daemon import metadata_maker as tree_maker

    tree_maker.start()
    orders_given = _Orders(orders)
    tree_warm.warm(scheme, orders_given.look)
    from bootseer.mounts.tree_daemon import prefetch
    from bootseer.mounts.tree_daemon import serving as tree_serving
    from bootseer.mounts.tree_daemon.validation import SuppliedIndex

    prefetch.fork_spare_worker()
    order = orders_given.wait()
    if order is None:
        prefetch.end_spare_worker()
        tree_maker.take().close()
        return 0
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # daemon.py handles them
    try:
        orders.sendall(ACCEPTED)  # from now on its starter starts no other daemon
    except OSError:
        return 0  # its starter has ended; the lock is free again
    orders.close()
    place = TreeDirectory.of_directory(order.folder)
    socket.send_fds(reaper, [os.fsencode(order.folder)], [order.lock, order.log])
    _take_log(order.log)
    if reaper.recv(1) != ACCEPTED:
        raise OSError("the reaper has ended")
    reaper.close()
    place.write_state({"minder": os.getppid(), "daemon": os.getpid()})
    vetted = SuppliedIndex(order.vetted_index, order.verdict) if order.vetted_index >= 0 else None
    return tree_serving.serve(place, order.ready, order.settings, SIGNALS, vetted)


class _Orders:
    """The one order. If it arrives during imports, the maker, which takes longest, begins at once."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._order: DaemonOrder | None = None
        self._has_come = False

    def look(self) -> None:
        """Receive the order if it is arriving; do not wait for it otherwise."""
        if not self._has_come and select.select([self._connection], [], [], 0)[0]:
            self.wait()

    def wait(self) -> DaemonOrder | None:
        """Wait for the order; return None when there is none in time, or never will be one."""
        if not self._has_come:
            self._has_come = True
            order = self._order = receive(self._connection, UNNEEDED_S)
            if order is not None and order.vetted_index >= 0:
                from bootseer.mounts.tree_daemon import metadata_maker as tree_maker

                tree_maker.begin(order.vetted_index, TreeDirectory.of_directory(order.folder).digest)
        return self._order


# ---- the reaper ----------------------------------------------------------------------------------------------


def _reap(orders: socket.socket, daemon: int, why: str) -> NoReturn:
    """Wait for the daemon's end, and clean up. Signals are passed on.

    Args: orders: over which the daemon sends what it serves; why: the cgroup could not be left.
    """

    def hand_on(number: int, frame: FrameType | None) -> None:
        del frame
        os.kill(daemon, number)  # it has not been waited for, so the pid is its own

    for number in SIGNALS:
        signal.signal(number, hand_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    place: TreeDirectory | None = None
    lock = -1
    directory, fds, _, _ = socket.recv_fds(orders, MAX_DIRECTORY_BYTES, 2)
    if fds:
        lock, log = fds
        _take_log(log)
        place = TreeDirectory.of_directory(os.fsdecode(directory))
        try:
            orders.sendall(ACCEPTED)
        except OSError:
            pass  # it has died since
        if why:
            _log(f"{place.folder}: {why}")
    orders.close()
    os.waitid(os.P_PID, daemon, os.WEXITED | os.WNOWAIT)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    _, status = os.waitpid(daemon, 0)
    try:
        if place is not None:
            _clean_up(place, lock, os.waitstatus_to_exitcode(status))
    except BootseerError as error:
        _log(f"{place.folder if place else ''}: {error}")
    finally:
        cgroup.remove()
        os._exit(0)


def _clean_up(place: TreeDirectory, lock: int, status: int) -> None:
    if not place.is_lock(lock):
        return  # the daemon has cleaned up, and another one may be there already
    if status:
        how = f"was killed by signal {-status}" if status < 0 else f"has failed (status {status})"
        Journal(place.faults_path).note(f"the process that serves its files {how}")
    count = place.clear()
    if status < 0:
        _log(f"{place.folder}: the daemon was killed by signal {-status}; {count} mounts were ended")
    place.remove()


def _log(line: str) -> None:
    try:
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} bootseer tree: {line}", file=sys.stderr, flush=True)
    except OSError:
        pass


def _take_log(log: int) -> None:
    """Redirect stdout and stderr to the log."""
    for fd in (1, 2):
        os.dup2(log, fd)
    os.close(log)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
