"""A mounted environment: its tree is mounted over its targets, and only the ranks see it. Nothing is unpacked.

In: the location of the tree, its targets, a sandbox process (forked before the caller had threads). Out: an
argument prefix for a rank's command that enters the sandbox. The tree's daemon fetches blocks as they are read,
caches and prefetches them. The next start on the node finds the daemon again. The mount namespace and the files
written in it belong to one job.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from bootseer import aio
from bootseer.env.store.admissible import find_tree_fault
from bootseer.errors import BootseerError, ConfigError, IntegrityError, StorageError
from bootseer.linux.privileges import may_mount
from bootseer.mounts.sandbox.image_root import enter_path
from bootseer.mounts.sandbox.layers import Layer, LayersSpec
from bootseer.mounts.sandbox.process import ImageSandbox
from bootseer.mounts.tree_daemon import metadata as tree_metadata
from bootseer.mounts.tree_daemon.mount import MountedTree, TreeOptions, mount_tree
from bootseer.mounts.tree_daemon.orders import RIGHT
from bootseer.storage.os_errors import map_os_errors
from bootseer.storage.paths import redact
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
    from bootseer.trust import Trust

WHOLE_BYTES = 4 << 30  # stored bytes; the reads of a start without an access trace are small and many
OPTIONS = TreeOptions(whole_bytes=WHOLE_BYTES, shares=True)


class DamagedError(IntegrityError):
    """Blocks of the tree are damaged in all sources, so unpacking the tree would fail as well."""


class MountedEnv:
    """A mounted environment; ranks can be started in it until `close`, and running ranks continue after that."""

    def __init__(
        self, tree: MountedTree, sandbox: ImageSandbox, targets: Sequence[str], seconds: Mapping[str, float]
    ) -> None:
        self._tree, self._sandbox = tree, sandbox
        self._lease = tree.hold()
        self.seconds = dict(seconds)  # by step
        try:
            began_s = time.monotonic()
            layers = [Layer(os.path.join(tree.folder, str(n)), target) for n, target in enumerate(targets)]
            self.address = sandbox.lay(LayersSpec(layers, tree.folder))
            self.seconds["lay"] = time.monotonic() - began_s
        except BaseException:
            self._lease.close()
            raise
        # -I and -S: Python ignores the caller's Python settings and searches for nothing.
        self.prefix = (sys.executable, "-I", "-S", enter_path(), self.address)

    @property
    def pid(self) -> int:
        """Process id of the sandbox, which sees the mounts and admits other processes."""
        return self._sandbox.pid

    @property
    def digest(self) -> str:
        return self._tree.digest

    @property
    def faults_path(self) -> str:
        """Path of the file that lists failed reads (bootseer.mounts.faults)."""
        return self._tree.faults_path

    @property
    def control(self) -> str:
        """Socket path of the daemon that serves the tree."""
        return self._tree.control

    def is_lost(self) -> bool:
        """Return whether the tree's daemon has ended, after which reads of the tree fail."""
        return self._lease.is_lost()

    def end_start(self) -> bool:
        """End the access trace at the first step. Return whether anything was recorded."""
        return self._tree.end_start()

    def status(self) -> dict[str, object]:
        """Return the statistics of the tree's daemon."""
        return self._tree.status()

    def close(self) -> None:
        """Close the mount and end the sandbox process."""
        self._sandbox.close()
        self._lease.close()


def mount_env(
    url: str,
    digest: str,
    targets: Sequence[str],
    sandbox: ImageSandbox,
    *,
    trust: Trust | None = None,
    workload: str = "",
    options: TreeOptions | None = None,
    environ: Mapping[str, str] | None = None,
) -> MountedEnv:
    """Mount the tree at `url` over its targets: its directory "0" over the first target, and so on.

    Args: url: of the tree's directory in its store. digest: of the tree, and the only thing that is trusted.
        workload: by bootseer.blocks.trace.workload_key; selects the access trace to prefetch (without one:
        everything). holder: the sandbox process; closed with the result, or by the caller after an error.
    Raises: ConfigError if this user or machine cannot mount it; StorageError, also if earlier reads of blocks
        failed and still fail; IntegrityError, also for a tree with content that no environment may have.
    """
    if not may_mount():
        raise ConfigError("mounts need root (CAP_SYS_ADMIN)")
    began_s = time.monotonic()
    options = options or OPTIONS
    admission = TreeCheck(url, digest, len(targets), options.store, os.environ if environ is None else environ)
    tree = mount_tree(
        url,
        trust=trust,
        digest=digest,
        workload=workload,
        options=options,
        environ=environ,
        vetting=admission,
    )
    if tree.unreadable:
        why = "; ".join(tree.unreadable)
        if tree.is_damaged:
            raise DamagedError(why)
        raise StorageError(f"{redact(url)}: reads failed in this start or an earlier one: {why}")
    seconds = {"tree": time.monotonic() - began_s}
    admission.check()
    seconds["admission"] = time.monotonic() - began_s - seconds["tree"]
    real = []
    for target in targets:
        with map_os_errors(target):
            os.makedirs(target, mode=0o755, exist_ok=True)  # a mount point
        real.append(os.path.realpath(target))
        if real[-1] == "/":
            raise ConfigError(f"{target}: cannot be a target: it is the root directory")
    return MountedEnv(tree, sandbox, real, seconds)


class TreeCheck:
    """A check that starts at once, in a daemon thread. Implements
    bootseer.mounts.tree_daemon.validation.IndexValidation.

    On a node that has not mounted the tree before, it also checks names and files in place of the daemon.
    """

    def __init__(
        self, url: str, digest: str, targets: int, options: Mapping[str, object], environ: Mapping[str, str]
    ) -> None:
        """Args: url: of the tree's directory; options: of its store; environ: locates the cache."""
        self._url, self._digest, self._targets = url, digest, targets
        self._options, self._environ = options, environ
        self._error: BootseerError | None = None
        self._to_check: Future[bytes | None] = Future()
        self._is_right: Future[bool] = Future()  # whether the tree is valid, for any use
        self._thread = threading.Thread(target=self._run, name="admission", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Wait for the result. Raises: IntegrityError if it is no environment; StorageError, ConfigError."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def index_bytes(self) -> bytes | None:
        """Return the index object if this process checks its names and files, else None."""
        return self._to_check.result()

    def report(self, fd: int) -> None:
        """Write the result to `fd`, as validation.py describes."""
        self._is_right.add_done_callback(partial(_tell, fd))

    def _run(self) -> None:
        try:
            self._look()
        except BootseerError as error:
            self._error = error
        except Exception as error:
            self._error = IntegrityError(f"{self._url}: cannot be checked: {error}")
        finally:
            if not self._to_check.done():
                self._to_check.set_result(None)
            if not self._is_right.done():
                self._is_right.set_result(False)

    def _look(self) -> None:
        from bootseer.blocks.cache import open_cache

        cache = open_cache(self._environ)
        data = cache.read_index(self._digest)
        if data is None:
            data = aio.run_sync(self._fetch())
        is_known = tree_metadata.may_be_cached(cache, self._digest)
        self._to_check.set_result(None if is_known else data)
        raw = to_raw(data, self._url)
        entries = read_part(raw, Names, self._url)
        if not is_known:
            check_names(entries, self._url)
            if not check_files_alone(read_part(raw, Files, self._url), self._url):
                check_files(read_unchecked(data, self._digest, self._url), self._url)
            self._is_right.set_result(True)
        reason = find_tree_fault(entries, self._targets)
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
    with open(fd, "wb", buffering=0) as pipe, suppress(BrokenPipeError):  # the daemon has ended
        if is_right.result():
            pipe.write(RIGHT)
