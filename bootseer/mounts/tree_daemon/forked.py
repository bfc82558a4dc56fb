"""Helpers of a daemon that are forked from it before it has threads, an event loop or an order.

The daemon has already imported the modules of such a process, so it begins at once when it receives work. It has
only the standard streams and one socket of the daemon open, and ends when the daemon does.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from bootseer.linux.child_processes import wait_killed
from bootseer.linux.processes import set_death_signal, set_name


class ForkedHelper(NamedTuple):
    """A process, not waited for yet, and the connection to it."""

    pid: int
    connection: socket.socket

    def kill(self) -> None:
        """Kill it, unless it has ended. `wait` follows."""
        self.connection.close()
        os.kill(self.pid, signal.SIGKILL)  # it has not been waited for, so the pid is its own

    def wait(self) -> int | None:
        """Wait for the end of the killed process, once; return its status, None if it is left behind."""
        return wait_killed(self.pid)

    def end(self) -> None:
        """Kill it and wait for its end."""
        self.kill()
        self.wait()


def fork_helper(name: str, kind: socket.SocketKind, work: Callable[[socket.socket], int]) -> ForkedHelper | None:
    """Fork a process that runs `work` and exits with its result; return None when it cannot be forked.

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
    return ForkedHelper(pid, ours)


def close_others(keep: set[int]) -> None:
    """Close all descriptors but these."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in keep:
            try:
                os.close(int(name))
            except OSError:
                pass  # the one that listed the directory


def _be_helper(
    name: str, connection: socket.socket, parent: int, work: Callable[[socket.socket], int]
) -> NoReturn:
    status = 1
    try:
        set_death_signal(signal.SIGKILL)
        if os.getppid() == parent:
            set_name(name.encode())
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
