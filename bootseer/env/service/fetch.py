"""Use of an existing environment by the environment service: one that is in place, or a tree of the store.

In: the result of the lookup, the tree that all nodes use. Out: "fetched" when all data are there, then "ready"
after bootrun's order `show`; or "unfetched".
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from bootseer import aio
from bootseer.env.parse.redaction import redact_urls
from bootseer.env.restore import restore
from bootseer.env.restore.markers import open_markers
from bootseer.env.service.job import Job
from bootseer.env.service.look import covers, is_unchanged, states_of
from bootseer.env.service.orders import InterruptedByOrderError, Orders
from bootseer.env.service.plain import is_damage
from bootseer.env.service.resolving import resolve
from bootseer.env.store.admissible import find_target_mismatch
from bootseer.env.store.store import EnvStore, FoundSnapshot
from bootseer.env.store_layout import below, tree_directory
from bootseer.errors import BootseerError, ConfigError, IntegrityError, StorageError, StorageTimeout
from bootseer.logs import get_logger
from bootseer.storage.paths import redact
from bootseer.tree.head import split_pin
from bootseer.tree.index import PACKS

if TYPE_CHECKING:
    from bootseer.env.restore.mounted import MountedEnv
    from bootseer.env.service.look import InstalledEnv
    from bootseer.env.service.mounted_use import MountedUse
    from bootseer.env.store.env_tree import StoredTree
    from bootseer.mounts.sandbox.process import ImageSandbox

_log = get_logger(__name__)

BUSY_S = 10.0  # after that, another node is assumed to be at the same directory on a shared file system
FIND_TRIES, FIND_PAUSE_S = 20, 0.25  # for a tree that another node has just published
IMPORTS_S = 0.5  # after all else is ready; imports are optional


class Fetcher:
    """A fetcher of one job; it owns the mount, if any."""

    def __init__(self, job: Job, orders: Orders, sandbox: ImageSandbox | None) -> None:
        self._job, self._orders, self._sandbox = job, orders, sandbox
        self._ways = tuple(way for way in job.order["ways"] if way != "mount" or sandbox is not None)
        self._mounted: MountedEnv | None = None
        self._use: MountedUse | None = None  # of the mounted environment, in its store

    def use(self, tree: str) -> None:
        """Make the environment ready. Raises: InterruptedByOrderError if another order arrives; OSError."""
        looked = self._job.known()
        there = looked.there
        if there is not None and there.tree == tree and "there" in self._ways:
            try:
                self._check_there(there)
                self._wait_for_show(tree)
                self._check_there(there)
            except BootseerError as error:
                self._job.tell("unfetched", why=str(error))
                return
            self._job.ready("there", tree)
            if looked.store is not None and looked.found is not None:
                aio.run_sync(looked.store.touch(looked.found, time.time(), looked.keyed.guess_key))
            return
        try:
            found = self._find(tree)
            if there is not None:
                self._prepare_over(there, found)
            self._restore(found)
        except BootseerError as error:
            self.unmount()
            damaged = tree if is_damage(error) else ""
            is_silent = isinstance(error, StorageTimeout)
            self._job.tell("unfetched", why=str(error), damaged=damaged, is_silent=is_silent)

    def _wait_for_show(self, tree: str) -> None:
        """Report that all data are there, and wait until all nodes are ready. Raises: InterruptedByOrderError."""
        self._job.tell("fetched", tree=tree)
        order = self._orders.wait(self.check_mount)
        if order is None or order["do"] != "show":
            self._orders.put_back(order)
            self.unmount()
            raise InterruptedByOrderError

    # ---- an environment in place -----------------------------------------------------------------------------

    def _check_there(self, there: InstalledEnv) -> None:
        """Raise ConfigError if another job has changed the targets since the lookup."""
        targets = self._job.known().keyed.targets
        if not is_unchanged(there, targets, self._job.environ):
            raise ConfigError(f"{', '.join(targets)}: changed since its environment was looked up")

    def _prepare_over(self, there: InstalledEnv, found: FoundSnapshot) -> None:
        """Prepare to replace an environment of the same key. Raises: ConfigError if their files would be mixed."""
        looked = self._job.known()
        targets = looked.keyed.targets
        self._job.looked = looked._replace(expected=states_of(targets))
        self._check_there(there)
        if there.tree == found.snapshot.tree:
            return
        with self._tree_of(found).open() as opened:
            if not covers(opened.tree, targets, self._job.environ):
                raise ConfigError(
                    f"{', '.join(targets)}: has another environment of this key, and files of both would be mixed;"
                    " recreate the directory to use that of the store"
                )

    # ---- a tree of the store ---------------------------------------------------------------------------------

    def _tree_of(self, found: FoundSnapshot) -> StoredTree:
        from bootseer.env.store.env_tree import StoredTree

        looked = self._job.known()
        assert looked.store is not None
        url = below(split_pin(looked.store.url)[0], tree_directory(found.snapshot.key))
        tree = StoredTree(url, found.snapshot.tree, environ=self._job.environ, peers=self._job.peers)
        if tree.has_peers:
            self._job.tell("origin", url=tree.store_url, folders=[PACKS])
        return tree

    def _find(self, tree: str) -> FoundSnapshot:
        """Find the tree in the store. Raises: StorageError, also if the store has another one by now."""
        looked = self._job.known()
        if looked.found is not None and looked.found.snapshot.tree == tree:
            return looked.found
        if looked.store is None:
            raise ConfigError(looked.cannot or "the environment store cannot be used")
        now = looked.keyed.look(self._job.environ)
        for _ in range(FIND_TRIES):
            resolved = aio.run_sync(resolve(looked.store, looked.keyed, now, time.time()))
            found = resolved.found
            if found is not None and found.snapshot.tree == tree:
                self._job.looked = looked._replace(keyed=resolved.keyed)
                return found
            time.sleep(FIND_PAUSE_S)
            self._orders.check()
        raise StorageError(
            f"{redact(looked.store.url)}: does not return the environment that another node has found"
        )

    def _restore(self, found: FoundSnapshot) -> None:
        looked = self._job.known()
        store = looked.store
        assert store is not None
        snapshot, tree = found.snapshot, self._tree_of(found)
        if reason := find_target_mismatch(snapshot.targets, looked.keyed.targets):
            raise IntegrityError(f"{redact_urls(tree.url)}: {reason}")
        from bootseer.blocks.trace import workload_key

        workload = workload_key(*self._job.order["workload"])
        imports = self._read_imports(store, tree, workload)
        mounting = None
        if self._sandbox is not None:
            from bootseer.env.restore import mounted

            options = mounted.OPTIONS._replace(peers=self._job.peers if tree.has_peers else "")
            mounting = restore.MountOptions(self._sandbox, store.trust, workload, options)
        is_shown = False

        def before_move() -> None:
            nonlocal is_shown
            self._wait_for_show(snapshot.tree)
            is_shown = True

        def run(wait_s: float) -> restore.Restored:
            return restore.restore(
                snapshot,
                tree,
                base=looked.keyed.document.base,
                reads=looked.keyed.reads,
                expected=looked.expected,
                ways=self._ways,
                mounting=mounting,
                on_progress=self._orders.check,
                environ=self._job.environ,
                wait_s=wait_s,
                before_move=(lambda: None) if is_shown else before_move,
            )

        try:
            done = run(BUSY_S)
        except StorageTimeout:
            if is_shown or not self._is_busy():
                raise
            before_move()  # a node that shares the directory has it, and waits for this one
            self._job.tell("waiting")
            done = run(restore.WAIT_S)
        self._mounted = done.mounted
        for failure in done.failures:
            self._job.fell_back(failure)
        for note in done.notes:
            _log.line(note)
        if not is_shown:
            self._wait_for_show(snapshot.tree)
        if done.how == restore.UNPACK:
            self._date(snapshot.created_s)
        aio.run_sync(store.touch(found, time.time(), looked.keyed.guess_key))
        held = self._mounted
        if held is not None:
            from bootseer.env.service.mounted_use import MountedUse

            self._use = MountedUse(store, found, looked.keyed.guess_key)
        self._job.ready(
            done.how,
            snapshot.tree,
            prefix=done.prefix,
            seen_by=0 if held is None else held.pid,
            mount=() if held is None else (held.faults_path, held.control),
            imports=imports(),
        )

    def _read_imports(self, store: EnvStore, tree: StoredTree, workload: str) -> Callable[[], list[str]]:
        """Read the recorded imports in the background; the returned function waits for them briefly."""
        read: list[str] = []

        async def ask() -> list[str]:
            from bootseer.env.capture import hot_imports
            from bootseer.storage.open import open_store

            opened = open_store(tree.store_url)
            try:
                return await hot_imports.read(opened, tree.digest, workload, store.trust)
            finally:
                await opened.aclose()

        def run() -> None:
            try:
                read.extend(aio.run_sync(ask()))
            except BootseerError as error:
                _log.warning("imports of earlier starts are unknown: %s", error)

        thread = threading.Thread(target=run, name="hot-imports", daemon=True)
        thread.start()

        def wait() -> list[str]:
            thread.join(IMPORTS_S)
            return [] if thread.is_alive() else read

        return wait

    def _date(self, made_s: float) -> None:
        """Set the creation time of the markers to that of the snapshot."""
        for target in self._job.known().keyed.targets:
            try:
                open_markers(self._job.environ, target).date(os.path.realpath(target), made_s)
            except BootseerError:
                return  # the environment counts as new

    def _is_busy(self) -> bool:
        """Return whether another process is at the targets."""
        try:
            with restore.exclusive_at(self._job.known().keyed.targets, environ=self._job.environ, wait_s=0.0):
                return False
        except StorageTimeout:
            return True

    # ---- the mount -------------------------------------------------------------------------------------------

    def check_mount(self) -> None:
        """Report and end a mounted environment whose daemon has ended; called periodically."""
        if self._mounted is not None and self._mounted.is_lost():
            self._job.tell("lost")
            self.unmount()

    def end_start(self) -> None:
        """End the access trace at the first step."""
        if self._mounted is not None:
            try:
                self._mounted.end_start()
            except BootseerError as error:
                _log.warning("the access trace of the environment is not recorded: %s", error)

    def unmount(self) -> None:
        """Unmount the environment, if mounted."""
        mounted, self._mounted = self._mounted, None
        use, self._use = self._use, None
        if use is not None:
            use.close()
        if mounted is not None:
            self._sandbox = None  # closed together with the mount
            mounted.close()
