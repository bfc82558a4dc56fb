"""Helpers of a daemon that are forked from it before it has threads, an event loop or an order.

What such a process imports was imported already, so it begins at once when it gets something to do. It has nothing
open of the daemon's but the standard streams and one socket, and ends when the daemon does.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from bootseer.mounts.namespaces import die_with_parent, set_name


class Helper(NamedTuple):
    """A process, not waited for yet, and the way to talk to it."""

    pid: int
    connection: socket.socket

    def kill(self) -> None:
        """Whatever it does: ends it, unless it has ended. `wait` follows."""
        self.connection.close()
        os.kill(self.pid, signal.SIGKILL)  # it has not been waited for, so the pid is its own

    def wait(self) -> int:
        """Once, for its end: its status, as `os.waitstatus_to_exitcode` gives it."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def end(self) -> None:
        """Both."""
        self.kill()
        self.wait()


def fork_helper(name: str, kind: socket.SocketKind, work: Callable[[socket.socket], int]) -> Helper | None:
    """Forks one that does `work` and exits with what that gives; None when there can be none.

    Args: name: in ps and top; kind: of the connection.
    """
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
        parent = os.getpid()
        pid = os.fork()
    except OSError:
        return None
    if not pid:
        _be_helper(name, theirs, parent, work)
    theirs.close()
    return Helper(pid, ours)


def close_others(keep: set[int]) -> None:
    """Closes all descriptors but these."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in keep:
            try:
                os.close(int(name))
            except OSError:
                pass  # the one that listed the folder


def _be_helper(
    name: str, connection: socket.socket, parent: int, work: Callable[[socket.socket], int]
) -> NoReturn:
    status = 1
    try:
        die_with_parent(signal.SIGKILL)
        if os.getppid() == parent:
            set_name(name)
            close_others({0, 1, 2, connection.fileno()})
            status = work(connection)
    except (OSError, MemoryError):
        pass  # the daemon sees that it has ended
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)
