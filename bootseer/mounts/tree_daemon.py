"""Starts the daemon of a tree, and its minder: `python -P -m bootseer.mounts.tree_daemon ORDERS [SCHEME]`.

    starter        tree_waiting.py: gives one order at ORDERS, a socket, or none
      minder       waits for the daemon's end; takes away what it has left mounted; opens nothing of FUSE
        daemon     imports what it will need, waits for its order, then is tree_serving.py

The process that was started ends at once. The daemon may be started before anybody knows whether it is needed, and
ends when ORDERS does. An order comes by the socket, as a URL may hold a password and everybody sees command lines;
with it come the log, a pipe for what the daemon says, and the lock of the tree's folder, open and held. Daemon and
minder both have the lock: it is free when nothing of them is left. Little is imported before the fork, so that the
minder stays small. SCHEME: of the URL that is expected.
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
from bootseer.mounts import cgroup
from bootseer.mounts.faults import Journal
from bootseer.mounts.tree_orders import ACCEPTED, MOST_FOLDER_BYTES, Order, receive
from bootseer.mounts.tree_places import Place

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
UNNEEDED_S = 60.0  # without an order it ends: its starter has something else to do


def main(orders: int, scheme: str) -> NoReturn:
    """`orders`: a socket."""
    signal.signal(
        signal.SIGCHLD, signal.SIG_DFL
    )  # a starter that ignores it would have us lose how children ended
    if os.fork():
        os._exit(0)
    os.chdir("/")
    why = cgroup.leave()  # its starter's end is not that of all who use the tree
    os.set_inheritable(orders, False)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until both know what to do with them
    daemon = os.fork()
    if daemon:
        os.close(orders)
        theirs.close()
        _mind(ours, daemon, why)
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


def _serve(orders: socket.socket, minder: socket.socket, scheme: str) -> int:
    """The exit status."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # one that serves nothing just ends
    from bootseer.mounts import tree_warm

    tree_warm.warm_maker()
    from bootseer.mounts import tree_maker

    tree_maker.start()
    orders_given = _Orders(orders)
    tree_warm.warm(scheme, orders_given.look)
    from bootseer.mounts import bringing, tree_serving
    from bootseer.mounts.tree_vetting import Vetted

    bringing.begin_spare()
    order = orders_given.wait()
    if order is None:
        bringing.end_spare()
        tree_maker.take().close()
        return 0
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # tree_serving.py knows what to do with them
    try:
        orders.sendall(ACCEPTED)  # from here on its starter starts no other one
    except OSError:
        return 0  # nobody waits for it any more; the lock is free again
    orders.close()
    place = Place.of_folder(order.folder)
    socket.send_fds(minder, [os.fsencode(order.folder)], [order.lock, order.log])
    _take_log(order.log)
    if minder.recv(1) != ACCEPTED:
        raise OSError("the minder has ended")
    minder.close()
    place.write_state({"minder": os.getppid(), "daemon": os.getpid()})
    vetted = Vetted(order.vetted_index, order.verdict) if order.vetted_index >= 0 else None
    return tree_serving.serve(place, order.ready, order.settings, SIGNALS, vetted)


class _Orders:
    """The one order, which may come while modules are imported: then the maker, which takes longest, begins."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._order: Order | None = None
        self._has_come = False

    def look(self) -> None:
        """Does not wait, unless an order is on its way."""
        if not self._has_come and select.select([self._connection], [], [], 0)[0]:
            self.wait()

    def wait(self) -> Order | None:
        """None when there is none in time, or never will be one."""
        if not self._has_come:
            self._has_come = True
            order = self._order = receive(self._connection, UNNEEDED_S)
            if order is not None and order.vetted_index >= 0:
                from bootseer.mounts import tree_maker

                tree_maker.begin(order.vetted_index, Place.of_folder(order.folder).digest)
        return self._order


# ---- the minder ----------------------------------------------------------------------------------------------


def _mind(orders: socket.socket, daemon: int, why: str) -> NoReturn:
    """Waits for the daemon's end, and tidies up. Signals are handed on.

    Args: orders: by which the daemon says what it serves; why: the cgroup could not be left.
    """

    def hand_on(number: int, frame: FrameType | None) -> None:
        del frame
        os.kill(daemon, number)  # it has not been waited for, so the pid is its own

    for number in SIGNALS:
        signal.signal(number, hand_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    place: Place | None = None
    lock = -1
    folder, fds, _, _ = socket.recv_fds(orders, MOST_FOLDER_BYTES, 2)
    if fds:
        lock, log = fds
        _take_log(log)
        place = Place.of_folder(os.fsdecode(folder))
        try:
            orders.sendall(ACCEPTED)
        except OSError:
            pass  # it has died since
        if why:
            _say(f"{place.folder}: {why}")
    orders.close()
    os.waitid(os.P_PID, daemon, os.WEXITED | os.WNOWAIT)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    _, status = os.waitpid(daemon, 0)
    try:
        if place is not None:
            _tidy(place, lock, os.waitstatus_to_exitcode(status))
    except BootseerError as error:
        _say(f"{place.folder if place else ''}: {error}")
    finally:
        cgroup.remove()
        os._exit(0)


def _tidy(place: Place, lock: int, status: int) -> None:
    if not place.is_lock(lock):
        return  # the daemon has left in order, and somebody else may be there already
    if status:
        how = f"was killed by signal {-status}" if status < 0 else f"has failed (status {status})"
        Journal(place.faults_path).note(f"the process that serves its files {how}")
    count = place.clear()
    if status < 0:
        _say(f"{place.folder}: the daemon was killed by signal {-status}; {count} mounts were ended")
    place.remove()


def _say(line: str) -> None:
    try:
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} bootseer tree: {line}", file=sys.stderr, flush=True)
    except OSError:
        pass


def _take_log(log: int) -> None:
    """For all that is printed from here on."""
    for fd in (1, 2):
        os.dup2(log, fd)
    os.close(log)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
