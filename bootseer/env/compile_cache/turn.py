"""Lets the nodes of a job publish their compile caches in turn: most then find that there is nothing to add.

All make their first step at once, and most make the same files. Without an order each would read, merge and upload
all files, and all but one would find at the end that another was faster.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from bootseer import aio
from bootseer.env.store.lease import BuilderLease, Lease, WaitResult, renewing
from bootseer.errors import StorageError, StorageTimeout
from bootseer.storage import Store

WAIT_S = 120.0


@contextmanager
def publish_turn(
    store: Store, key: str, is_up_to_date: Callable[[], Awaitable[bool]], *, wait_s: float = WAIT_S
) -> Iterator[bool]:
    """Wait for this node's turn, which lasts as long as the block. Yield whether there is anything to publish.

    Args: store: that of the key's caches. is_needless: called before, during and after the wait; on aio's loop.
    wait_s: the longest wait. After it, or without a lease, the node publishes anyway: if two publish at once, one
    merges again. Raises: StorageTimeout.
    """

    async def until() -> bool | None:
        return await is_up_to_date() or None

    leases = BuilderLease(store, owner=f"{socket.gethostname()} (pid {os.getpid()})")
    try:
        taken = aio.run_sync(leases.acquire(key, until, wait_s))
    except StorageTimeout:
        raise  # the publication would wait for the store once more
    except StorageError:
        taken = None  # the publication reports the error of the store
    if isinstance(taken, Lease):
        with renewing(taken):
            yield True
    else:
        yield not isinstance(taken, WaitResult)
