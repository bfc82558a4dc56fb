"""Writing a file again, under another name, when its store fails: a name is never used twice.

What was given up may come to life later and finish under its own name, where nobody looks for it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

from bootseer.errors import StorageError

TRIES = 4
GIVEN_UP_AFTER_S = 60.0  # no try begins later than this after the first failure
PAUSE_S = 0.2  # before the second try at most; twice as much before each further one


async def write_anew(name: str, write: Callable[[str], Awaitable[None]]) -> str:
    """Calls `write` with `name`, then with NAME.t1 and so on while errors say that it may help.

    Returns the name that it worked with.
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
        await asyncio.sleep(random.random() * PAUSE_S * 2**attempt)  # noqa: S311  no secret
    raise AssertionError
