"""Makes forked ranks join torch's store when rank 0 listens, and rank 0 not wait for them there.

A client that comes too early sleeps for 0.3 to 0.7 s. Rank 0 counts its clients when it begins to listen, then
every 10 ms; a job pays the rest of the last 10 ms at each start. Ranks of torchrun are clients of the agent's
store, and do not count either.

Loaded by fork_server.py, by path, beside it; standard library only, needs Python 3.8. On rank 0's node the other
ranks run their script at once. They wait where torch selects the rendezvous handler (env://), until a process
listens on the master port. The first lookup in torch's table of handlers waits, and restores torch's table.
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
STORE, WAITS, AGENTS_STORE = "TCPStore", "wait_for_workers", "TORCHELASTIC_USE_AGENT_STORE"
# For a rank 0 that joins late: after this time torch's own waits are comparatively short.
MAX_WAIT_S = 5.0
# A rank polls again after a share of the time that it has waited. All ranks of a node poll as often as one would.
MIN_PAUSE_S, MAX_PAUSE_S, PAUSE_SHARE = 0.00005, 0.005, 0.02


def has_place() -> bool:
    """Return whether torch is loaded with the table that `install` changes."""
    return isinstance(getattr(sys.modules.get(RENDEZVOUS), HANDLERS, None), dict)


def install(socket: "Any", port: int, ranks: int, place: int) -> None:
    """Make this rank wait at torch's table until a process listens on `port`; rank 0 will not count its clients.

    Args:
        socket: the module _socket.
        ranks: number of ranks of this node, which may all wait.
        place: of this rank among them; rank 0 has 0.
    """
    module = sys.modules[RENDEZVOUS]
    handlers = getattr(module, HANDLERS)

    class Gate(dict):  # type: ignore[type-arg]
        """torch's table; exceptions of its handlers contain no frame of Bootseer."""

        def __getitem__(self, scheme: str) -> "Any":
            if scheme == SCHEME and os.environ.get("MASTER_PORT") == str(port):
                if place:
                    await_listener(socket, port, ranks)
                elif os.environ.get(AGENTS_STORE) != "True":
                    count_no_clients(module)
            handlers.update(self)  # handlers that the script has registered
            setattr(module, HANDLERS, handlers)
            return handlers[scheme]

    setattr(module, HANDLERS, Gate(handlers))


def count_no_clients(module: "Any") -> None:
    """Make the next store of torch's module not count its clients; torch's class is back before it is made."""
    store = getattr(module, STORE, None)
    if WAITS + ": bool" not in (getattr(getattr(store, "__init__", None), "__doc__", None) or ""):
        return  # a torch that does not say that it has this argument

    class Restoring:
        """An argument: its conversion to bool is the last code of Python before the store is made."""

        def __bool__(self) -> bool:
            setattr(module, STORE, store)
            return False

    # No function, as tracebacks would contain its frame.
    setattr(module, STORE, sys.modules["functools"].partial(store, **{WAITS: Restoring()}))


def await_listener(socket: "Any", port: int, ranks: int) -> None:
    """Wait until a process listens on `port`, at most MAX_WAIT_S."""
    began_s = time.monotonic()
    while not is_listened_on(socket, port):
        waited_s = time.monotonic() - began_s
        if waited_s > MAX_WAIT_S:
            break
        time.sleep(min(max(waited_s * PAUSE_SHARE, MIN_PAUSE_S), MAX_PAUSE_S) * ranks)


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
