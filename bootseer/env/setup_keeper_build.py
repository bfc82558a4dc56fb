"""How the keeper of an environment builds one: for this node alone, or for all, with a lease, to be published.

In: what was seen, the order. Out: what bootrun is told. Who is not to publish runs set-up all the same.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from bootseer import aio
from bootseer.env.capture import Capture
from bootseer.env.held_lease import Lease, kept
from bootseer.env.lease import BuilderLease, Cannot, Over, Ready
from bootseer.env.lease_record import FAILED
from bootseer.env.resolving import Resolved, resolve
from bootseer.env.setup_keeper_job import Job
from bootseer.env.setup_keeper_look import Looked, look_again
from bootseer.env.setup_keeper_publish import Made, publish
from bootseer.env.setup_keeper_run import Runner
from bootseer.env.store import Found
from bootseer.env.unclean import why_another
from bootseer.errors import BootseerError

GIVE_UP_S = 0.4  # for the lease, before this process ends


class Builder:
    """Alone at the targets while set-up runs; has the lease, if there is one."""

    def __init__(self, job: Job, runner: Runner) -> None:
        self._job, self._runner = job, runner
        self._lease: Lease | None = None
        self._made: Made | None = None  # that this node has published

    def own(self, *, is_again: bool) -> None:
        """For this node alone. Args: is_again: whatever is in its place. Raises: SetupFailed, BootseerError."""
        job = self._job
        with job.alone():
            self._look_again()
            there = job.known().there
            if there is not None and not is_again:
                job.ready("there", there.tree)
            else:
                self._runner.run(publishes=False)

    def build(self, *, is_urgent: bool, damaged: str) -> None:
        """For all nodes. Args: damaged: the tree that is to be replaced; "" for none. Raises: as `own`."""
        job = self._job
        with job.alone() as leave:
            why_not = self._look_again()
            looked = job.known()
            if looked.there is not None:  # another job of this node was faster
                job.ready("there", looked.there.tree)
                job.unpublished("it is in its place already")
                return
            if why_not:
                job.say(f"warning: {why_not}, so what set-up makes is not kept")
                self._runner.run(publishes=False)
                job.unpublished(why_not)
                return
            outcome = self._take_lease(looked, damaged)
            if isinstance(outcome, Ready):
                keyed, found = outcome.found.keyed, outcome.found.found
                assert found is not None, "it was waited for"
                job.looked = looked._replace(keyed=keyed, found=found)
                job.tell("found", tree=found.snapshot.tree)
                return
            if not isinstance(outcome, Lease):
                job.say(f"set-up is run here: {outcome}")
                self._runner.run(publishes=False)
                job.unpublished(outcome)
                return
            self._lease = outcome
            try:
                with kept(outcome):
                    ran = self._runner.run(publishes=True)
                    leave.close()
                    if isinstance(ran.capture, str):
                        outcome.tell("could not look at what set-up did")
                        job.unpublished(ran.capture)
                        aio.run_sync(outcome.release(FAILED, "it could not be told what set-up did"))
                    else:
                        replaces = self._replaces(damaged)
                        self._publish(ran.capture, outcome, ran.setup_s, is_urgent=is_urgent, replaces=replaces)
            finally:
                self._lease = None

    def give_up(self) -> None:
        """From another thread: this process is about to end, and others need not wait for it."""
        lease = self._lease
        if lease is not None:
            thread = threading.Thread(
                target=lambda: aio.run_sync(lease.release(FAILED, "its job has ended")), daemon=True
            )
            thread.start()
            thread.join(GIVE_UP_S)

    def _look_again(self) -> str:
        """Alone at the targets. Returns: why what set-up makes now is not what the key says; "" if it is."""
        before = self._job.known()
        now = self._job.looked = look_again(before, self._job.spec, self._job.environ, self._job.use_folder())
        if now.keyed.key != before.keyed.key:
            return why_another(before.keyed.document, now.keyed.document)
        return now.unclean

    def _take_lease(self, looked: Looked, damaged: str) -> Ready[Resolved] | Lease | str:
        """Or why there is none. What is `damaged` does not count, but what somebody else has made of it since."""
        store, spec = looked.store, self._job.spec
        if store is None:
            return "there is no environment store to keep it in"
        owner = f"{socket.gethostname()} (pid {os.getpid()})"
        leases = BuilderLease(store.store, owner=owner, say=self._job.say)
        now = looked.keyed.look(self._job.environ)

        async def find() -> Resolved | None:
            resolved = await resolve(store, looked.keyed, now, time.time())
            if resolved.found is None or self._is_old(resolved.found, damaged):
                return None
            return resolved

        try:
            outcome = aio.run_sync(leases.acquire(looked.keyed.key, find, spec.wait_s))
        except BootseerError as error:
            return f"the environment store cannot be used: {error}"
        return outcome.why if isinstance(outcome, Cannot | Over) else outcome

    def _replaces(self, damaged: str) -> int:
        """The generation of the key that this node has found to have that tree, 0 for none."""
        found = self._job.known().found
        is_it = found is not None and damaged == found.snapshot.tree
        return found.generation if found is not None and is_it and found.snapshot.key == self._key() else 0

    def _is_old(self, found: Found, damaged: str) -> bool:
        """Whether it is what is damaged, or what that has replaced."""
        return found.snapshot.key == self._key() and found.generation <= self._replaces(damaged)

    def _key(self) -> str:
        return self._job.known().keyed.key

    def _publish(self, capture: Capture, lease: Lease, setup_s: float, *, is_urgent: bool, replaces: int) -> None:
        """While ranks run. What goes wrong costs nothing but the snapshot."""
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
                say=job.say,
                replaces=replaces,
            )
        except BootseerError as error:
            aio.run_sync(lease.release(FAILED, "what set-up did could not be published"))
            job.unpublished(str(error))
            job.say(f"warning: the environment is not kept, and the next start runs set-up again: {error}")
        else:
            self._made = published.made
            job.tell("published", tree=published.tree)
        finally:
            job.is_publishing = False

    def share_recording(self, files: Iterable[Sequence[Any]], imports: Sequence[str]) -> None:
        """Of the start that has just been. What goes wrong costs others a prefetch.

        Args: files: as Touched; imports: hot ones, names of modules.
        """
        job, made, store = self._job, self._made, self._job.known().store
        self._made = None  # it is large, and this is done once
        if made is None or store is None:
            return
        from bootseer.blocks.trace import workload_key
        from bootseer.env.touched import Touched, share

        touched = (Touched(path, ranges) for path, ranges in files)
        try:
            if share(store, made, touched, imports, workload_key(*job.order["workload"]), job.say):
                job.say("what the start has read of the environment is recorded for other nodes")
        except (BootseerError, OSError, TypeError, ValueError) as error:
            job.say(
                f"warning: what the start has read of the environment is not recorded for other nodes: {error}"
            )
