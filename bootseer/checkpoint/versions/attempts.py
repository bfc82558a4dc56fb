"""Retries of a write, each under another name: a name is never used twice.

A write that was given up may complete later, but only under its own name, which no reader opens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from bootseer.backoff import Backoff
from bootseer.errors import StorageError
from bootseer.jitter import jitter

TRIES = 4
GIVEN_UP_AFTER_S = 60.0  # no retry begins later than this after the first failure
PAUSES = Backoff(0.2, 2.0)


async def write_retrying(name: str, write: Callable[[str], Awaitable[None]]) -> str:
    """Call `write` with `name`, then with NAME.t1 and so on while the errors are retryable.

    Returns the name that succeeded.
    """
    failed_s = 0.0
    for attempt in range(TRIES):
        tried = f"{name}.t{attempt}" if attempt else name
        try:
            await write(tried)
            return tried
        except StorageError as error:
            failed_s = failed_s or time.monotonic()
            if not error.retryable or attempt + 1 == TRIES or time.monotonic() - failed_s > GIVEN_UP_AFTER_S:
                raise
        await asyncio.sleep(PAUSES.wait_s(attempt + 1, jitter()))
    raise AssertionError
