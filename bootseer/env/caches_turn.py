"""Nodes of a job publish their first-step caches one after the other: most then find that there is nothing to add.

All make their first step at once, and most have made the same. Without an order each would read, merge and upload
everything, and all but one would learn at the end that another was faster.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from bootseer import aio
from bootseer.env.lease import BuilderLease, Lease, Ready, kept
from bootseer.errors import StorageError, StorageTimeout
from bootseer.storage import Store

WAIT_S = 120.0


@contextmanager
def turn(
    store: Store, key: str, is_needless: Callable[[], Awaitable[bool]], *, wait_s: float = WAIT_S
) -> Iterator[bool]:
    """Whether there is something to publish when it is this node's turn; others wait as long as the block lasts.

    Args: store: that of the key's caches. is_needless: asked before, while and after it waits; on aio's loop.
    wait_s: at most; then, and where there is no lease to be had, nobody is waited for: of two that publish at once
    one merges again.
    Raises: StorageTimeout.
    """

    async def until() -> bool | None:
        return await is_needless() or None

    leases = BuilderLease(store, owner=f"{socket.gethostname()} (pid {os.getpid()})")
    try:
        taken = aio.run_sync(leases.acquire(key, until, wait_s))
    except StorageTimeout:
        raise  # who publishes would wait for it once more
    except StorageError:
        taken = None  # what is wrong with the store is told by whoever publishes
    if isinstance(taken, Lease):
        with kept(taken):
            yield True
    else:
        yield not isinstance(taken, Ready)
