"""How the keeper of an environment uses what is kept: what is in its place already, or a tree of the store.

In: what was seen, the tree that all nodes take. Out: "fetched" when all is at hand, "ready" when bootrun had it
shown; or "unfetched".
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from bootseer import aio
from bootseer.env import restore
from bootseer.env.admissible import why_other_targets
from bootseer.env.layout import below, tree_folder
from bootseer.env.markers import open_markers
from bootseer.env.redaction import redact_urls
from bootseer.env.resolving import resolve
from bootseer.env.setup_keeper_job import Job
from bootseer.env.setup_keeper_look import covers, is_still_there, states_of
from bootseer.env.setup_keeper_orders import AbandonedError, Orders
from bootseer.env.setup_keeper_plain import is_damage
from bootseer.env.store import EnvStore, Found
from bootseer.errors import BootseerError, ConfigError, IntegrityError, StorageError, StorageTimeout
from bootseer.storage.paths import redact
from bootseer.tree.head import split_pin
from bootseer.tree.index import PACKS

if TYPE_CHECKING:
    from bootseer.env.env_tree import StoredTree
    from bootseer.env.mounted import MountedEnv
    from bootseer.env.setup_keeper_look import There
    from bootseer.mounts.holder import Holder

BUSY_S = 10.0  # then another node is at the same folder, of a file system that both have
FIND_TRIES, FIND_PAUSE_S = 20, 0.25  # of what another node has just published
IMPORTS_S = 0.5  # after all else is there; a start does well without


class Fetcher:
    """Has the mount, if there is one."""

    def __init__(self, job: Job, orders: Orders, holder: Holder | None) -> None:
        self._job, self._orders, self._holder = job, orders, holder
        self._ways = tuple(way for way in job.order["ways"] if way != "mount" or holder is not None)
        self._mounted: MountedEnv | None = None

    def use(self, tree: str) -> None:
        """Raises: AbandonedError when there is another order; OSError."""
        looked = self._job.known()
        there = looked.there
        if there is not None and there.tree == tree and "there" in self._ways:
            try:
                self._check_there(there)
                self._gate(tree)
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

    def _gate(self, tree: str) -> None:
        """All is at hand; waits until all nodes have come so far. Raises: AbandonedError."""
        self._job.tell("fetched", tree=tree)
        order = self._orders.wait(self.see_to_mount)
        if order is None or order["do"] != "show":
            self._orders.put_back(order)
            self.unmount()
            raise AbandonedError

    # ---- what is in its place --------------------------------------------------------------------------------

    def _check_there(self, there: There) -> None:
        """Raises: ConfigError when another job has changed the targets since they were looked at."""
        targets = self._job.known().keyed.targets
        if not is_still_there(there, targets, self._job.environ):
            raise ConfigError(f"{', '.join(targets)}: was changed since its environment was looked for")

    def _prepare_over(self, there: There, found: Found) -> None:
        """To put a tree over what is in place, of the same key. Raises: ConfigError when both would be mixed."""
        looked = self._job.known()
        targets = looked.keyed.targets
        self._job.looked = looked._replace(expected=states_of(targets))
        self._check_there(there)
        if there.tree == found.snapshot.tree:
            return
        with self._tree_of(found).open() as opened:
            if not covers(opened.tree, targets, self._job.environ):
                raise ConfigError(
                    f"{', '.join(targets)}: has another environment of this key, and files of both would be mixed:"
                    " make the folder anew to get that of the store"
                )

    # ---- what the store has ----------------------------------------------------------------------------------

    def _tree_of(self, found: Found) -> StoredTree:
        from bootseer.env.env_tree import StoredTree

        looked = self._job.known()
        assert looked.store is not None
        url = below(split_pin(looked.store.url)[0], tree_folder(found.snapshot.key))
        tree = StoredTree(
            url, found.snapshot.tree, environ=self._job.environ, peers=self._job.peers, log=self._job.say
        )
        if tree.has_peers:
            self._job.tell("origin", url=tree.store_url, folders=[PACKS])
        return tree

    def _find(self, tree: str) -> Found:
        """Raises: StorageError, also when the store has another one by now."""
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
            f"{redact(looked.store.url)}: does not show the environment that another node has found"
        )

    def _restore(self, found: Found) -> None:
        looked = self._job.known()
        store = looked.store
        assert store is not None
        snapshot, tree = found.snapshot, self._tree_of(found)
        if reason := why_other_targets(snapshot.targets, looked.keyed.targets):
            raise IntegrityError(f"{redact_urls(tree.url)}: {reason}")
        from bootseer.blocks.trace import workload_key

        workload = workload_key(*self._job.order["workload"])
        imports = self._ask_imports(store, tree, workload)
        mounting = None
        if self._holder is not None:
            from bootseer.env import mounted

            options = mounted.OPTIONS._replace(peers=self._job.peers if tree.has_peers else "")
            mounting = restore.Mounting(self._holder, store.trust, workload, options)
        is_shown = False

        def before_move() -> None:
            nonlocal is_shown
            self._gate(snapshot.tree)
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
            before_move()  # a node with the same folder has it, and waits for this one
            self._job.tell("waiting")
            done = run(restore.WAIT_S)
        self._mounted = done.mounted
        for failure in done.failures:
            self._job.fell_back(failure)
        for note in done.notes:
            self._job.say(note)
        if not is_shown:
            self._gate(snapshot.tree)
        if done.how == restore.UNPACK:
            self._date(snapshot.created_s)
        aio.run_sync(store.touch(found, time.time(), looked.keyed.guess_key))
        held = self._mounted
        self._job.ready(
            done.how,
            snapshot.tree,
            prefix=done.prefix,
            seen_by=0 if held is None else held.pid,
            mount=() if held is None else (held.faults_path, held.control),
            imports=imports(),
        )

    def _ask_imports(self, store: EnvStore, tree: StoredTree, workload: str) -> Callable[[], list[str]]:
        """Reads hot imports meanwhile; what is returned waits for them, not for long."""
        read: list[str] = []

        async def ask() -> list[str]:
            from bootseer.env import hot_imports
            from bootseer.storage.open import open_store

            opened = open_store(tree.store_url, options=tree.options)
            try:
                return await hot_imports.read(opened, tree.digest, workload, store.trust, self._job.say)
            finally:
                await opened.aclose()

        def run() -> None:
            try:
                read.extend(aio.run_sync(ask()))
            except BootseerError as error:
                self._job.say(f"warning: what earlier starts have imported is not known: {error}")

        thread = threading.Thread(target=run, name="hot-imports", daemon=True)
        thread.start()

        def wait() -> list[str]:
            thread.join(IMPORTS_S)
            return [] if thread.is_alive() else read

        return wait

    def _date(self, made_s: float) -> None:
        """What was restored is as old as its snapshot."""
        for target in self._job.known().keyed.targets:
            try:
                open_markers(self._job.environ, target).date(os.path.realpath(target), made_s)
            except BootseerError:
                return  # it counts as made just now

    def _is_busy(self) -> bool:
        """Whether another process is at the targets."""
        try:
            with restore.alone_at(self._job.known().keyed.targets, environ=self._job.environ, wait_s=0.0):
                return False
        except StorageTimeout:
            return True

    # ---- the mount -------------------------------------------------------------------------------------------

    def see_to_mount(self) -> None:
        """Now and then: a mounted environment that is served no more is told of, and ended."""
        if self._mounted is not None and self._mounted.is_lost():
            self._job.tell("lost")
            self.unmount()

    def end_start(self) -> None:
        """The first step is over."""
        if self._mounted is not None:
            try:
                self._mounted.end_start()
            except BootseerError as error:
                self._job.say(f"warning: what the start has read of the environment is not recorded: {error}")

    def unmount(self) -> None:
        """If something is mounted."""
        mounted, self._mounted = self._mounted, None
        if mounted is not None:
            self._holder = None  # it is closed with the mount
            mounted.close()
