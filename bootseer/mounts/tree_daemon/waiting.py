"""The starter's end of process.py: a daemon that waits for its order; and the spare one of this process.

A process that will mount a tree, but must first find out which, calls `start_spare_daemon`. Meanwhile a daemon
starts and does its imports, which take most of the time of a mount. `mount_tree` takes it if no daemon serves the
tree already. An unused one is ended by `end_spare_daemon`, by the end of this process, or by itself after a while;
one that has died is replaced.
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Mapping

from bootseer.linux.privileges import may_mount
from bootseer.mounts.tree_daemon import orders as tree_orders
from bootseer.mounts.tree_daemon.orders import DaemonOrder
from bootseer.mounts.tree_daemon.places import TREES
from bootseer.own_module import command_of
from bootseer.storage.paths import scheme_of

_FUSE = "/dev/fuse"
_NOT_INHERITED = ("RANK", "LOCAL_RANK")
_NAMESPACES = ("mnt", "net", "user")
# The index of a large environment is some hundred thousand objects, made at once. Their memory is allocated in few
# large pages and not freed meanwhile: saves a fifth of a mount on a virtual machine, where each new page is slow.
_HEAP = {
    "PYTHONMALLOC": "malloc",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "MALLOC_TOP_PAD_": str(32 << 20),
    "MALLOC_MMAP_THRESHOLD_": str(64 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
}


class WaitingDaemon:
    """A daemon without an order. `close` ends it if it still has none."""

    def __init__(self, *, log: int = -1, url: str = "") -> None:
        """Args: log: for output before it has its order; url: its scheme is that of the expected store.

        Raises: OSError.
        """
        self._surroundings = _surroundings()
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        output = log if log >= 0 else subprocess.DEVNULL
        numbers = [str(theirs.fileno()), *filter(None, [scheme_of(url)])]
        try:
            self._process = subprocess.Popen(
                command_of("bootseer.mounts.tree_daemon.process", *numbers),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                cwd="/",
                env={**_HEAP, **self._surroundings[0]},
            )
        except BaseException:
            self.connection.close()
            raise
        finally:
            theirs.close()

    def fits(self) -> bool:
        """Return whether one started now would be equal to it."""
        return self._surroundings == _surroundings()

    def give(self, order: DaemonOrder) -> bool:
        """Send the order; return False when the daemon has died. Raises: OSError."""
        return tree_orders.send(self.connection, order)

    def has_accepted(self) -> bool:
        """Return whether it has accepted its order; call it after the daemon's answer or end."""
        return tree_orders.was_accepted(self.connection)

    def close(self) -> None:
        """Close without a wait: the started process ends as soon as it has forked."""
        self.connection.close()
        if self._process.poll() is None:
            threading.Thread(target=self._process.wait, name="daemon-started", daemon=True).start()


_spare: list[WaitingDaemon] = []  # at most one
_inherited: list[WaitingDaemon] = []  # of the process that this one was forked from


def start_spare_daemon(url: str = "", *, unless_served: str = "") -> None:
    """Start one, where this process may mount. Costs a few milliseconds; never fails.

    Args: url: its scheme is that of the expected store; unless_served: a runtime directory: start none if a tree
    is served there, as it may be the wanted one.
    """
    if _spare or not may_mount() or not os.access(_FUSE, os.R_OK | os.W_OK):
        return
    if unless_served and _has_some(os.path.join(unless_served, TREES)):
        return
    try:
        _spare.append(WaitingDaemon(url=url))
    except OSError:
        pass  # the mount reports the reason


def take_spare_daemon() -> WaitingDaemon | None:
    """Return the spare, if it equals a new one; the caller then owns it."""
    try:
        found = _spare.pop()
    except IndexError:
        return None
    if found.fits():
        return found
    found.close()
    return None


def end_spare_daemon() -> None:
    """End the spare: no further tree will be mounted."""
    try:
        _spare.pop().close()
    except IndexError:
        pass


def _has_some(directory: str) -> bool:
    try:
        return bool(os.listdir(directory))
    except OSError:
        return False


def _surroundings() -> tuple[Mapping[str, str], int, list[str]]:
    """Return what a daemon inherits from its starter."""
    environ = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    return environ, os.geteuid(), [os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES]


def _forget_after_fork() -> None:
    """Drop the spare in a forked child: it is the parent's, and must see the parent's end."""
    for each in _spare:
        each.connection.close()
    _inherited.extend(_spare)  # not to be waited for
    _spare.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
