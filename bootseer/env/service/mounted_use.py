"""Record of the use of a mounted environment in its store while ranks may read it: no collection deletes it then.

In: the store, the snapshot that is mounted. Out: a stamp in the store, renewed at least hourly. A thread, as a
store that does not answer must not delay orders of bootrun.
"""

from __future__ import annotations

import threading
import time

from bootseer import aio
from bootseer.env.store.store import HELD_S, EnvStore, FoundSnapshot
from bootseer.errors import PermissionDenied
from bootseer.jitter import jitter
from bootseer.logs import get_logger

_log = get_logger(__name__)

RETRY_S = 300.0  # after a failure


class MountedUse:
    """The use of one mounted snapshot, until `close`."""

    def __init__(
        self,
        store: EnvStore,
        found: FoundSnapshot,
        guess: str,
        *,
        every_s: float = HELD_S,
        retry_s: float = RETRY_S,
    ) -> None:
        """Args: guess: the key of the first guess. every_s: the shortest interval; the longest is double."""
        self._store, self._found, self._guess = store, found, guess
        self._every_s, self._retry_s = every_s, retry_s
        self._ended = threading.Event()
        try:
            threading.Thread(target=self._run, name="env-use", daemon=True).start()
        except RuntimeError as error:  # too many processes
            _log.warning("the use of the mounted environment is not recorded in its store: %s", error)

    def close(self) -> None:
        """Renew it no more."""
        self._ended.set()

    def _run(self) -> None:
        wait_s, has_failed = 0.0, False
        while not self._ended.wait(wait_s):
            try:
                aio.run_sync(self._store.hold(self._found, time.time(), self._guess))
                wait_s, has_failed = self._pause_s(), False
            except Exception as error:  # any store: without this thread the environment could be deleted
                if not has_failed and not isinstance(error, PermissionDenied):  # nodes may be readers only
                    _log.warning("the use of the mounted environment is not recorded in its store: %s", error)
                wait_s, has_failed = self._retry_s, True

    def _pause_s(self) -> float:
        """Return a random interval: of many nodes, the first one writes for all."""
        return self._every_s * (1 + jitter())
