"""The mounts of ours below this node's ranks, and what of them could not be read.

In: where each mount's journal lies (bootseer/mounts/faults.py), and who serves it. Out: faults since a moment, at
the end of a rank, when it has to be known at once; and each once, for people and events. Made only where something
is mounted. Nothing here waits: files in memory are read, and one socket is connected to.
"""

from __future__ import annotations

import os
import socket
from typing import NamedTuple

from bootseer.mounts.faults import SAME_NS, read_faults
from launcher.rendezvous.messages import MountFault

MOST_FAULTS = 4  # of one mount, the newest
MOST_TOLD = 16  # of one attempt
MOST_WAITS = 4


class Mount(NamedTuple):
    """Of an image, an environment, a checkpoint."""

    journal: str
    control: str = ""  # the socket of the process that serves it; "" for none


class NodeMounts:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._mounts: dict[str, Mount] = {}  # by what it is of: env, image, checkpoint
        self._told: set[MountFault] = set()
        self._waits: set[tuple[str, str]] = set()

    def put(self, what: str, mount: Mount | None) -> None:
        """It is read from now on; None: no longer."""
        if mount is None:
            self._mounts.pop(what, None)
        else:
            self._mounts[what] = mount

    def begin(self) -> None:
        """Another attempt: what was told before may be told again."""
        self._told.clear()
        self._waits.clear()

    def find(self, since_ns: int, *, asks: bool = True) -> tuple[MountFault, ...]:
        """What could not be read since then (monotonic), each once; the last of each mount.

        Args: asks: also whether each mount is still served.
        """
        found = [_faults_of(what, mount, since_ns, asks=asks) for what, mount in self._mounts.items()]
        return tuple(dict.fromkeys(fault for faults in found for fault in faults))

    def waits(self, since_ns: int) -> list[tuple[str, str]]:
        """What is waited for, that was not given before in this attempt: of which mount, and a line."""
        found = [
            (what, each.why)
            for what, mount in self._mounts.items()
            for each in read_faults(mount.journal, since_ns)
            if each.is_wait
        ]
        news = [each for each in dict.fromkeys(found) if each not in self._waits]
        news = news[: max(0, MOST_WAITS - len(self._waits))]
        self._waits.update(news)
        return news

    def news(self, since_ns: int, *, asks: bool = True) -> list[MountFault]:
        """Those that were not given before in this attempt."""
        found = [fault for fault in self.find(since_ns, asks=asks) if fault not in self._told]
        found = found[: max(0, MOST_TOLD - len(self._told))]
        self._told.update(found)
        return found


def _faults_of(what: str, mount: Mount, since_ns: int, *, asks: bool) -> list[MountFault]:
    faults = read_faults(mount.journal, since_ns - SAME_NS)  # the same words are not written again within it
    found = [MountFault(what, each.why, each.is_damage, not each.blocks) for each in faults if not each.is_wait]
    found = list(dict.fromkeys(reversed(found)))[:MOST_FAULTS][::-1]
    if asks and mount.control and not found and not is_served(mount.control):
        found.append(MountFault(what, "the process that serves its files has ended", False, True))
    return found


def is_served(control: str) -> bool:
    """Whether somebody listens at a socket; does not wait."""
    folder, name = os.path.split(control)
    try:
        fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.setblocking(False)
            # By the folder's descriptor: addresses of sockets have at most 107 bytes.
            connection.connect(f"/proc/self/fd/{fd}/{name}")
    except BlockingIOError:
        return True  # many ask it
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
