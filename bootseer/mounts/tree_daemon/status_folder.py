"""The status folder of a mounted tree, for its daemon: made at the first request, after the tree can be used.

A request for a text waits PATIENCE_S at most for the daemon's event loop, then returns the previous one. Texts are
FRESH_S old at most, so that many readers cost no more than one.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from bootseer.linux import mount as kernel
from bootseer.logs import get_logger
from bootseer.mounts.device.text_files import TextFiles
from bootseer.mounts.tree_daemon.status_texts import render
from bootseer.storage.os_errors import map_os_errors
from bootseer.tree.status_folder import MARK_NS

_log = get_logger(__name__)

FRESH_S = 0.2
PATIENCE_S = 0.5
MAX_DEAD = 16  # mounts whose server has ended, one on another


class StatusFolder:
    """The folder. Its files are read in a thread of `TextFiles`."""

    def __init__(self, directory: str, ask: Callable[[], Coroutine[Any, Any, Mapping[str, Any]]]) -> None:
        """Call it on the daemon's event loop. Args: ask: answers `status` on it."""
        self._directory, self._ask = directory, ask
        self._loop = asyncio.get_running_loop()
        self._texts: Mapping[str, bytes] = {}
        self._made_s = 0.0
        self._files = TextFiles(self._directory, self._find_texts, mtime_ns=MARK_NS)

    def start(self, status: Mapping[str, Any]) -> None:
        """Mount it. Blocks. Args: status: the first one. Raises: ConfigError, StorageError."""
        self._keep(status)
        for _ in range(MAX_DEAD):
            if not self._is_mounted():
                break
            kernel.unmount_lazily(self._directory, kernel.FORCE)  # its server has ended
        with map_os_errors(self._directory):
            os.makedirs(self._directory, mode=0o700, exist_ok=True)
        self._files.start()

    def is_shown(self) -> bool:
        """Return whether it is mounted in its directory; False after an unmount by another process."""
        return self._is_mounted() and self._files.is_serving()

    def _is_mounted(self) -> bool:
        return any(each.target == self._directory and kernel.is_fuse(each) for each in kernel.mounts())

    def _find_texts(self) -> Mapping[str, bytes]:
        if time.monotonic() - self._made_s >= FRESH_S:
            asking = self._ask()
            try:
                future = asyncio.run_coroutine_threadsafe(asking, self._loop)
            except RuntimeError:
                asking.close()  # the loop is closed: the daemon ends
                return self._texts
            try:
                self._keep(future.result(PATIENCE_S))
            except TimeoutError:
                future.cancel()
                self._made_s = time.monotonic()  # further readers need not wait as well
            except Exception as error:
                _log.info("the status folder shows what it showed before: %r", error)
                self._made_s = time.monotonic()
        return self._texts

    def _keep(self, status: Mapping[str, Any]) -> None:
        self._texts = render(status, time.time())
        self._made_s = time.monotonic()
