"""The starter's end of tree_daemon.py: a daemon that waits for its order; and the spare one of this process.

A process that will mount a tree, but has first to find out which, begins with `begin_spare`: while it looks, a
daemon is started and imports what it needs, which is most of the time that a mount takes. `mount_tree` takes it if
no daemon serves the tree already. One that nobody takes is ended by `end_spare`, by the end of this process, or by
itself after a while; one that has died is replaced by another.
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Mapping

from bootseer.mounts import tree_orders
from bootseer.mounts.privileges import may_mount
from bootseer.mounts.tree_orders import Order
from bootseer.mounts.tree_places import TREES
from bootseer.own_module import command_of
from bootseer.storage.paths import scheme_of

_FUSE = "/dev/fuse"
_NOT_INHERITED = ("RANK", "LOCAL_RANK")
_NAMESPACES = ("mnt", "net", "user")
# The index of a large environment is some hundred thousand objects, made at once: their memory comes in few large
# pages and is not given back meanwhile. A fifth of a mount on a virtual machine, where each new page is slow.
_HEAP = {
    "PYTHONMALLOC": "malloc",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "MALLOC_TOP_PAD_": str(32 << 20),
    "MALLOC_MMAP_THRESHOLD_": str(64 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
}


class WaitingDaemon:
    """A daemon without an order. `close` ends it, if it has none then."""

    def __init__(self, *, log: int = -1, url: str = "") -> None:
        """Args: log: for what is printed before it has its order; url: of which kind the store will be.

        Raises: OSError.
        """
        self._surroundings = _surroundings()
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        output = log if log >= 0 else subprocess.DEVNULL
        numbers = [str(theirs.fileno()), *filter(None, [scheme_of(url)])]
        try:
            self._process = subprocess.Popen(
                command_of("bootseer.mounts.tree_daemon", *numbers),
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
        """Whether one that is started now would be like it."""
        return self._surroundings == _surroundings()

    def give(self, order: Order) -> bool:
        """Whether the order went out; False when the daemon has died. Raises: OSError."""
        return tree_orders.send(self.connection, order)

    def has_accepted(self) -> bool:
        """When it has said something at the pipe of its order, or never will."""
        return tree_orders.was_accepted(self.connection)

    def close(self) -> None:
        """Does not wait: what was started ends as soon as it has forked."""
        self.connection.close()
        if self._process.poll() is None:
            threading.Thread(target=self._process.wait, name="daemon-started", daemon=True).start()


_spare: list[WaitingDaemon] = []  # at most one
_inherited: list[WaitingDaemon] = []  # of the process that this one was forked from


def begin_spare(url: str = "", *, unless_served: str = "") -> None:
    """Starts one, where this process may mount. Costs a few milliseconds; never fails.

    Args: url: of which kind the store will be; unless_served: a runtime folder: not where some tree is served
        there, as it may be the one that is wanted.
    """
    if _spare or not may_mount() or not os.access(_FUSE, os.R_OK | os.W_OK):
        return
    if unless_served and _has_some(os.path.join(unless_served, TREES)):
        return
    try:
        _spare.append(WaitingDaemon(url=url))
    except OSError:
        pass  # whoever mounts says why


def take_spare() -> WaitingDaemon | None:
    """The one that there is, if it is as good as a new one; the caller's then."""
    try:
        found = _spare.pop()
    except IndexError:
        return None
    if found.fits():
        return found
    found.close()
    return None


def end_spare() -> None:
    """Nothing is going to be mounted that is not yet."""
    try:
        _spare.pop().close()
    except IndexError:
        pass


def _has_some(folder: str) -> bool:
    try:
        return bool(os.listdir(folder))
    except OSError:
        return False


def _surroundings() -> tuple[Mapping[str, str], int, list[str]]:
    """What a daemon gets from its starter."""
    environ = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    return environ, os.geteuid(), [os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES]


def _forget_after_fork() -> None:
    """In the child of a fork: the spare is the parent's, and has to see its end."""
    for each in _spare:
        each.connection.close()
    _inherited.extend(_spare)  # not to be waited for
    _spare.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
