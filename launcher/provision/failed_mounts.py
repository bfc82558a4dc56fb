"""Bootseer's mounts below this node's ranks, and their read faults.

In: the journal of each mount (bootseer/mounts/faults.py), and the socket of its server. Out: all faults since a
given time, at the end of a rank; and each fault once, for log lines and events. Exists only if something is
mounted. Nothing here blocks: it reads files in memory and connects to one socket.
"""

from __future__ import annotations

import os
import socket
from typing import NamedTuple

from bootseer.mounts.faults import SAME_NS, read_faults
from launcher.rendezvous.messages import MountFault

MAX_FAULTS = 4  # of one mount, the newest
MAX_REPORTED = 16  # of one attempt
MAX_WAITS = 4


class ServedMount(NamedTuple):
    """A mount of an image, an environment or a checkpoint."""

    journal: str
    control: str = ""  # the socket of the process that serves it; "" for none


class NodeMounts:
    """Bootseer's mounts below this node's ranks, and their read faults."""

    def __init__(self) -> None:
        self._mounts: dict[str, ServedMount] = {}  # by kind: env, image, checkpoint
        self._reported: set[MountFault] = set()
        self._waits: set[tuple[str, str]] = set()

    def put(self, what: str, mount: ServedMount | None) -> None:
        """Set the mount that ranks read from now on; None removes it."""
        if mount is None:
            self._mounts.pop(what, None)
        else:
            self._mounts[what] = mount

    def begin(self) -> None:
        """Begin another attempt, in which each fault may be reported again."""
        self._reported.clear()
        self._waits.clear()

    def find(self, since_ns: int, *, asks: bool = True) -> tuple[MountFault, ...]:
        """Return the read faults since `since_ns` (monotonic), each once; the last ones of each mount.

        Args: asks: also test whether each mount is still served.
        """
        found = [_faults_of(what, mount, since_ns, asks=asks) for what, mount in self._mounts.items()]
        return tuple(dict.fromkeys(fault for faults in found for fault in faults))

    def waits(self, since_ns: int) -> list[tuple[str, str]]:
        """Return waits that were not returned before in this attempt: the kind of mount, and the reason."""
        found = [
            (what, each.why)
            for what, mount in self._mounts.items()
            for each in read_faults(mount.journal, since_ns)
            if each.is_wait
        ]
        news = [each for each in dict.fromkeys(found) if each not in self._waits]
        news = news[: max(0, MAX_WAITS - len(self._waits))]
        self._waits.update(news)
        return news

    def news(self, since_ns: int, *, asks: bool = True) -> list[MountFault]:
        """Return the faults that were not returned before in this attempt."""
        found = [fault for fault in self.find(since_ns, asks=asks) if fault not in self._reported]
        found = found[: max(0, MAX_REPORTED - len(self._reported))]
        self._reported.update(found)
        return found


def _faults_of(what: str, mount: ServedMount, since_ns: int, *, asks: bool) -> list[MountFault]:
    faults = read_faults(mount.journal, since_ns - SAME_NS)  # within SAME_NS a server does not repeat a text
    found = [MountFault(what, each.why, each.is_damage, not each.blocks) for each in faults if not each.is_wait]
    found = list(dict.fromkeys(reversed(found)))[:MAX_FAULTS][::-1]
    if asks and mount.control and not found and not is_served(mount.control):
        found.append(MountFault(what, "the process that serves its files has ended", False, True))
    return found


def is_served(control: str) -> bool:
    """Return whether a process listens on the socket; does not block."""
    directory, name = os.path.split(control)
    try:
        fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.setblocking(False)
            # Through the directory's descriptor: a socket address has at most 107 bytes.
            connection.connect(f"/proc/self/fd/{fd}/{name}")
    except BlockingIOError:
        return True  # its backlog is full
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
