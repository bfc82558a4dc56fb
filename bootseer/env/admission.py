"""Looks whether a tree can be an environment while its daemon is mounting it: the longer of the two counts.

In: where the tree is, how many targets it is for. Out: nothing, or the reason why it is not used. What holds for
every tree is the daemon's to check, or checked here for it; daemons serve images by the same digests, which may
have what no environment may.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from bootseer import aio
from bootseer.env.admissible import why_no_environment
from bootseer.errors import BootseerError, IntegrityError
from bootseer.mounts import tree_metadata
from bootseer.mounts.tree_orders import RIGHT
from bootseer.tree.head import split_pin
from bootseer.tree.index import (
    Files,
    Names,
    check_files,
    check_files_alone,
    check_names,
    read_part,
    read_unchecked,
    to_raw,
)

if TYPE_CHECKING:
    from bootseer.storage import Store


class Admission:
    """Begins at once, in a thread that nobody has to wait for. Implements bootseer.mounts.tree_vetting.Vetting.

    On a node that has not shown the tree yet names and files in it are checked as its daemon would do it, which
    then does not: both have to look at it, and this process has nothing else to do.
    """

    def __init__(
        self, url: str, digest: str, targets: int, options: Mapping[str, object], environ: Mapping[str, str]
    ) -> None:
        """Args: url: of the tree's folder; options: of its store; environ: says where the cache is."""
        self._url, self._digest, self._targets = url, digest, targets
        self._options, self._environ = options, environ
        self._error: BootseerError | None = None
        self._to_check: Future[bytes | None] = Future()
        self._is_right: Future[bool] = Future()  # what is looked at here, for whatever it may be used
        self._thread = threading.Thread(target=self._run, name="admission", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Waits for it. Raises: IntegrityError when it is no environment; StorageError, ConfigError."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def index_bytes(self) -> bytes | None:
        """The index object, if names and files in it are checked here."""
        return self._to_check.result()

    def report(self, fd: int) -> None:
        """What is found is said by `fd`, as tree_vetting.py says."""
        self._is_right.add_done_callback(partial(_tell, fd))

    def _run(self) -> None:
        try:
            self._look()
        except BootseerError as error:
            self._error = error
        except Exception as error:  # it is not admitted
            self._error = IntegrityError(f"{self._url}: cannot be looked at: {error}")
        finally:
            if not self._to_check.done():
                self._to_check.set_result(None)
            if not self._is_right.done():
                self._is_right.set_result(False)

    def _look(self) -> None:
        from bootseer.blocks import open_cache

        cache = open_cache(self._environ)
        data = cache.read_index(self._digest)
        if data is None:
            data = aio.run_sync(self._fetch())
        is_known = tree_metadata.may_be_kept(cache, self._digest)
        self._to_check.set_result(None if is_known else data)
        raw = to_raw(data, self._url)
        entries = read_part(raw, Names, self._url)
        if not is_known:
            check_names(entries, self._url)
            if not check_files_alone(read_part(raw, Files, self._url), self._url):
                check_files(read_unchecked(data, self._digest, self._url), self._url)
            self._is_right.set_result(True)
        reason = why_no_environment(entries, self._targets)
        if reason:
            raise IntegrityError(f"{self._url}: {reason}")

    async def _fetch(self) -> bytes:
        from bootseer.storage import open_store
        from bootseer.tree.opening import read_index_bytes

        store: Store = open_store(split_pin(self._url)[0], options=dict(self._options))
        try:
            return await read_index_bytes(store, self._digest)
        finally:
            await store.aclose()


def _tell(fd: int, is_right: Future[bool]) -> None:
    with open(fd, "wb", buffering=0) as pipe, suppress(BrokenPipeError):  # a daemon that has ended waits no longer
        if is_right.result():
            pipe.write(RIGHT)
