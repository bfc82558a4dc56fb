"""Makes forked ranks join torch's store when rank 0 listens, and rank 0 listen when they are about to join.

A client that comes too early sleeps for 0.3 to 0.7 s. Rank 0 counts clients when it begins to listen, then every
10 ms, so one that comes a moment after the first count costs 10 ms.

Loaded by fork_server.py, by path, beside it; standard library only, needs Python 3.8. On rank 0's node all ranks
run their script at once. They wait where torch selects the rendezvous handler (env://): rank 0 briefly until the
others are there, the others until a process listens on the master port. The first lookup in torch's table of
handlers waits, and restores torch's table.
"""

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

RENDEZVOUS = "torch.distributed.rendezvous"
HANDLERS = "_rendezvous_handlers"
SCHEME = "env"
LAST = "_torchelastic_use_agent_store"  # torch calls it right before it makes a store
# For a rank 0 that joins late: after this time torch's own waits are comparatively short.
MAX_WAIT_S = 5.0
# A rank polls again after a share of the time that it has waited. All ranks of a node poll as often as one would.
MIN_PAUSE_S, MAX_PAUSE_S, PAUSE_SHARE = 0.00005, 0.005, 0.02
# Rank 0 waits as long for the others, which saves 10 ms. They poll without a pause as long: who sleeps on an idle
# CPU can wake later than rank 0 counts.
MAX_MEETING_S = 0.005


def has_place() -> bool:
    """Return whether torch is loaded with the table that `install` changes."""
    return isinstance(getattr(sys.modules.get(RENDEZVOUS), HANDLERS, None), dict)


def install(socket: "Any", port: int, ranks: int, place: int, arrived: "Any") -> None:
    """Make this rank wait at torch's table: rank 0 for the others, the others until a process listens on `port`.

    Args:
        socket: the module _socket.
        ranks: number of ranks of this node, which may all wait.
        place: of this rank among them; rank 0 has 0.
        arrived: memory that all of them share, with a byte for each rank that has come to its wait.
    """
    if not place and not has_cpus(ranks):
        return  # some would come late anyway
    module = sys.modules[RENDEZVOUS]
    handlers = getattr(module, HANDLERS)

    class Gate(dict):  # type: ignore[type-arg]
        """torch's table; exceptions of its handlers contain no frame of Bootseer."""

        def __getitem__(self, scheme: str) -> "Any":
            if scheme == SCHEME and os.environ.get("MASTER_PORT") == str(port):
                if place:
                    arrived[place] = 1
                    wait_last(module, lambda: await_listener(socket, port, ranks))
                else:
                    await_arrivals(arrived, ranks)
            handlers.update(self)  # handlers that the script has registered
            setattr(module, HANDLERS, handlers)
            return handlers[scheme]

    setattr(module, HANDLERS, Gate(handlers))


def has_cpus(ranks: int) -> bool:
    """Return whether all ranks of the node can run at once."""
    return ranks <= len(os.sched_getaffinity(0))


def wait_last(module: "Any", wait: "Any") -> None:
    """Call `wait` in LAST, whose first call restores it, or now if this torch lacks it."""
    asked = getattr(module, LAST, None)
    if asked is None:
        wait()
        return

    def last() -> "Any":
        setattr(module, LAST, asked)
        wait()
        return asked()

    setattr(module, LAST, last)


def await_listener(socket: "Any", port: int, ranks: int) -> None:
    """Wait until a process listens on `port`, at most MAX_WAIT_S."""
    began_s = time.monotonic()
    spins_s = MAX_MEETING_S if has_cpus(ranks) else 0.0
    while not is_listened_on(socket, port):
        waited_s = time.monotonic() - began_s
        if waited_s > MAX_WAIT_S:
            break
        if waited_s >= spins_s:
            time.sleep(min(max(waited_s * PAUSE_SHARE, MIN_PAUSE_S), MAX_PAUSE_S) * ranks)


def await_arrivals(arrived: "Any", ranks: int) -> None:
    """Wait until the other ranks have come, at most MAX_MEETING_S."""
    until_s = time.monotonic() + MAX_MEETING_S
    while 0 in arrived[1:ranks] and time.monotonic() < until_s:
        os.sched_yield()


def is_listened_on(socket: "Any", port: int) -> bool:
    """Return whether a process of this node listens: then a bind fails although both sides allow port sharing."""
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "")):
        try:
            probe = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue  # no IPv6
        try:
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
            return False
        except OSError as error:
            if error.errno == 98:  # EADDRINUSE
                return True
        finally:
            probe.close()
    return False
