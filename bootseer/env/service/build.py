"""Building of an environment by the environment service: for this node alone, or with a lease and published for
all.

In: the result of the lookup, the order. Out: answers to bootrun. A node that may not publish still runs set-up.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from bootseer import aio
from bootseer.env.capture.capture import Capture
from bootseer.env.service.job import Job
from bootseer.env.service.look import LookupResult, look_again
from bootseer.env.service.publish import PublishedTree, publish
from bootseer.env.service.resolving import Resolved, resolve
from bootseer.env.service.run import Runner
from bootseer.env.service.unclean import why_another
from bootseer.env.store.held_lease import Lease, renewing
from bootseer.env.store.lease import BuilderLease, LeaseUnavailable, WaitEnded, WaitResult
from bootseer.env.store.lease_record import FAILED
from bootseer.env.store.store import FoundSnapshot
from bootseer.env.store.unwritable import explain_failure
from bootseer.errors import BootseerError, StorageError
from bootseer.logs import get_logger

_log = get_logger(__name__)

GIVE_UP_S = 0.4  # for the release of the lease, before this process ends


class Builder:
    """A builder with exclusive access to the targets while set-up runs, and with the lease, if any."""

    def __init__(self, job: Job, runner: Runner) -> None:
        self._job, self._runner = job, runner
        self._lease: Lease | None = None
        self._made: PublishedTree | None = None  # published by this node

    def own(self, *, is_again: bool) -> None:
        """Build for this node alone. Args: is_again: even if in place. Raises: SetupFailed, BootseerError."""
        job = self._job
        with job.alone():
            self._repeat_lookup()
            there = job.known().there
            if there is not None and not is_again:
                job.ready("there", there.tree)
            else:
                if why := job.known().unwritable:
                    job.fell_back(_unstored_line(why))
                self._runner.run(publishes=False)

    def build(self, *, is_urgent: bool, damaged: str) -> None:
        """Build for all nodes. Args: damaged: the tree to replace; "" for none. Raises: as `own`."""
        job = self._job
        with job.alone() as leave:
            why_not = self._repeat_lookup()
            looked = job.known()
            if looked.there is not None:  # another job of this node was faster
                job.ready("there", looked.there.tree)
                job.unpublished("it is in place already")
                return
            if why_not:
                _log.warning("%s; the result of set-up is not stored", why_not)
                self._runner.run(publishes=False)
                job.unpublished(why_not)
                return
            outcome = self._take_lease(looked, damaged)
            if isinstance(outcome, WaitResult):
                keyed, found = outcome.found.keyed, outcome.found.found
                assert found is not None, "the lease was waited for"
                job.looked = looked._replace(keyed=keyed, found=found)
                job.tell("found", tree=found.snapshot.tree)
                return
            if isinstance(outcome, LeaseUnavailable | WaitEnded):
                _log.info("set-up runs on this node: %s", outcome.why)
                outcome = outcome.why
            if isinstance(outcome, str):
                self._runner.run(publishes=False)
                job.unpublished(outcome)
                return
            self._lease = outcome
            try:
                with renewing(outcome):
                    ran = self._runner.run(publishes=True)
                    leave.close()
                    if isinstance(ran.capture, str):
                        outcome.tell("the changes of set-up are unknown")
                        job.unpublished(ran.capture)
                        aio.run_sync(outcome.release(FAILED, "the changes of set-up are unknown"))
                    else:
                        replaces = self._replaces(damaged)
                        self._publish(ran.capture, outcome, ran.setup_s, is_urgent=is_urgent, replaces=replaces)
            finally:
                self._lease = None

    def give_up(self) -> None:
        """Release the lease from another thread before this process ends, so that other nodes stop waiting."""
        lease = self._lease
        if lease is not None:
            thread = threading.Thread(
                target=lambda: aio.run_sync(lease.release(FAILED, "its job has ended")), daemon=True
            )
            thread.start()
            thread.join(GIVE_UP_S)

    def _repeat_lookup(self) -> str:
        """Repeat the lookup with exclusive access. Return why the key no longer matches set-up; "" if it does."""
        before = self._job.known()
        now = self._job.looked = look_again(before, self._job.spec, self._job.environ, self._job.use_directory())
        if now.keyed.key != before.keyed.key:
            return why_another(before.keyed.document, now.keyed.document)
        return now.unclean

    def _take_lease(
        self, looked: LookupResult, damaged: str
    ) -> WaitResult[Resolved] | Lease | LeaseUnavailable | WaitEnded | str:
        """Acquire the lease, or return the reason for none. A successor of the damaged tree counts as found.

        A text is a reason that is reported.
        """
        store, spec = looked.store, self._job.spec
        if store is None:
            return "no environment store is set"
        owner = f"{socket.gethostname()} (pid {os.getpid()})"
        leases = BuilderLease(store.store, owner=owner)
        now = looked.keyed.look(self._job.environ)

        async def find() -> Resolved | None:
            resolved = await resolve(store, looked.keyed, now, time.time())
            if resolved.found is None or self._is_old(resolved.found, damaged):
                return None
            return resolved

        try:
            return aio.run_sync(leases.acquire(looked.keyed.key, find, spec.wait_s))
        except BootseerError as error:
            why = explain_failure(error, spec.store)
            self._job.fell_back(_unstored_line(why))
            return why

    def _replaces(self, damaged: str) -> int:
        """Return the generation of the key at which this node found the damaged tree; 0 for none."""
        found = self._job.known().found
        is_it = found is not None and damaged == found.snapshot.tree
        return found.generation if found is not None and is_it and found.snapshot.key == self._key() else 0

    def _is_old(self, found: FoundSnapshot, damaged: str) -> bool:
        """Return whether it is the damaged generation or an older one."""
        return found.snapshot.key == self._key() and found.generation <= self._replaces(damaged)

    def _key(self) -> str:
        return self._job.known().keyed.key

    def _publish(self, capture: Capture, lease: Lease, setup_s: float, *, is_urgent: bool, replaces: int) -> None:
        """Publish while ranks run. A failure costs only the snapshot."""
        job = self._job
        looked = job.known()
        try:
            published = publish(
                capture,
                looked,
                lease,
                setup_s,
                job.environ,
                is_urgent=is_urgent,
                replaces=replaces,
            )
        except BootseerError as error:
            aio.run_sync(lease.release(FAILED, "the result of set-up could not be published"))
            why = explain_failure(error, job.spec.store) if isinstance(error, StorageError) else str(error)
            job.unpublished(why)
            _log.warning("%s", _unstored_line(why))
        else:
            self._made = published.made
            job.tell("published", tree=published.tree)
        finally:
            job.is_publishing = False

    def publish_trace(self, files: Iterable[Sequence[Any]], imports: Sequence[str]) -> None:
        """Publish the access trace of the start. A failure costs other nodes only a prefetch.

        Args: files: as Touched. imports: names of the modules that the start imports.
        """
        job, made, store = self._job, self._made, self._job.known().store
        self._made = None  # it is large, and needed only once
        if made is None or store is None:
            return
        from bootseer.blocks.trace import workload_key
        from bootseer.env.service.access_trace import AccessedFile, share

        touched = (AccessedFile(path, ranges) for path, ranges in files)
        try:
            if share(store, made, touched, imports, workload_key(*job.order["workload"])):
                _log.info("the access trace of the environment is published for other nodes")
        except (BootseerError, OSError, TypeError, ValueError) as error:
            _log.warning("the access trace of the environment is not published for other nodes: %s", error)


def _unstored_line(why: str) -> str:
    """PURE: return the line for set-up whose result cannot be stored."""
    return f"the environment cannot be stored, so other nodes run set-up again: {why}"
