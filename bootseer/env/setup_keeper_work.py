"""What the keeper of an environment does with its orders: looks, fetches, shows; or runs set-up, and publishes.

In: orders of bootrun (setup_keeper.py), the job's environment as this process has it. Out: answers. A set-up
command that fails is the job's error; whatever else fails costs only the time that set-up takes.
"""

from __future__ import annotations

import os
import queue
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from bootseer import aio
from bootseer.env import restore
from bootseer.env.admissible import why_other_targets
from bootseer.env.capture import Capture, Changes
from bootseer.env.held_lease import Lease, kept
from bootseer.env.layout import below, tree_folder
from bootseer.env.lease import BuilderLease, Cannot, Over, Ready
from bootseer.env.lease_record import FAILED
from bootseer.env.markers import open_markers
from bootseer.env.redaction import redact_text, redact_urls, secret_values
from bootseer.env.settling import settle_later
from bootseer.env.setup_keeper import Connection
from bootseer.env.setup_keeper_look import Looked, covers, is_still_there, look, look_again, mark, states_of
from bootseer.env.setup_keeper_plain import described, ends_job, is_damage, plain_targets
from bootseer.env.setup_keeper_publish import publish
from bootseer.env.setup_run import run_setup, setup_environ
from bootseer.env.spec import SetupSpec
from bootseer.env.store import Found
from bootseer.env.unclean import begin_setup, end_setup, why_another, why_changed
from bootseer.errors import (
    BootseerError,
    ConfigError,
    IntegrityError,
    SetupFailed,
    StorageError,
    StorageTimeout,
)
from bootseer.mounts.tree_waiting import end_spare
from bootseer.storage.paths import redact
from bootseer.tree.head import split_pin

if TYPE_CHECKING:
    from bootseer.env.env_tree import StoredTree
    from bootseer.env.setup_keeper_look import There
    from bootseer.mounts.holder import Holder

BUSY_S = 10.0  # then another node is at the same folder, of a file system that both have
GIVE_UP_S = 0.4  # for the lease, before this process ends
LOOK_S = 1.0  # between looks whether a mounted environment is still served
FIND_TRIES, FIND_PAUSE_S = 20, 0.25  # of what another node has just published
ALIVE_S = 2.0  # between words that say it gets on
MOST_NAMED = 5


class AbandonedError(Exception):
    """Another order has come, or nobody is there any more."""


class Work:
    """One job's environment on one node; `run` until bootrun has gone."""

    def __init__(self, order: Mapping[str, Any], connection: Connection, holder: Holder | None) -> None:
        self._environ = dict(os.environ)
        self._connection = connection
        self._holder = holder
        self._order = order
        self._secrets = secret_values(self._environ)
        self._setup_s = 0.0
        self._ways = tuple(way for way in order["ways"] if way != "mount" or holder is not None)
        self._log_path: str = order["log_path"]
        self._is_plain: bool = order["is_plain"]  # set-up is run whatever is kept somewhere
        self._spec: SetupSpec | None = None
        self._looked: Looked | None = None
        self._lease: Lease | None = None
        self._mounted: Any = None
        self._is_ready = False
        self._has_no_key = False  # set-up can only be run
        self._why_no_key = ""
        self._alive_s = 0.0  # when it was said last
        self._next: dict[str, Any] | None = None  # an order that came while another was carried out
        self.is_publishing = False

    # ---- orders ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Looks, then does what it is told."""
        try:
            self._look()
            while True:
                order, self._next = self._next or self._wait(), None
                if order is None:
                    return
                try:
                    self._obey(order)
                except AbandonedError:
                    if self._connection.is_gone and self._next is None:
                        return
                except (BootseerError, OSError) as error:
                    if ends_job(error):
                        raise
                    self._go_on_without(order, described(error))
        except SetupFailed as error:
            self._fail(str(error), error.tail)
        except (BootseerError, OSError) as error:
            self._fail(described(error))
        finally:
            self._unmount()

    def give_up(self) -> None:
        """From another thread: this process is about to end, and others need not wait for it."""
        lease = self._lease
        if lease is not None:
            thread = threading.Thread(
                target=lambda: aio.run_sync(lease.release(FAILED, "its job has ended")), daemon=True
            )
            thread.start()
            thread.join(GIVE_UP_S)

    def _wait(self) -> dict[str, Any] | None:
        while True:
            try:
                return self._connection.orders.get(timeout=LOOK_S)
            except queue.Empty:
                if self._mounted is not None and self._mounted.is_lost():
                    self._connection.tell("lost")
                    self._unmount()

    def _obey(self, order: dict[str, Any]) -> None:
        self._is_ready = self._is_ready and order["do"] == "first-step"
        if self._has_no_key:
            self._go_on_without(order, "")
            return
        match order["do"]:
            case "use":
                self._use(order["tree"])
            case "build":
                self._build(is_urgent=order["is_urgent"], damaged=order.get("damaged", ""))
            case "own":
                self._own(is_again=False)
            case "again":
                self._own(is_again=True)
            case "first-step":
                if self._mounted is not None:
                    try:
                        self._mounted.end_start()
                    except BootseerError as error:
                        self._say(f"what the start has read of the environment is not recorded: {error}")

    def _check(self, *_: object) -> None:
        """In the middle of something. Raises: AbandonedError when there is another order."""
        if time.monotonic() - self._alive_s > ALIVE_S:
            self._alive_s = time.monotonic()
            self._connection.tell("alive")
        try:
            self._next = self._connection.orders.get_nowait()
        except queue.Empty:
            return
        raise AbandonedError

    # ---- looking ---------------------------------------------------------------------------------------------

    def _look(self) -> None:
        given = self._order["spec"]
        spec = SetupSpec(
            commands=tuple(given["commands"]),
            inputs=tuple(given["inputs"]),
            targets=tuple(given["targets"]),
            store="" if self._is_plain else given["store"],
            python=_absolute(given["python"], self._environ),
            variables=tuple(given["variables"]),
            salt=given["salt"],
            max_age_s=given["max_age_s"],
            timeout_s=given["timeout_s"],
            wait_s=given["wait_s"],
            cwd=given["cwd"],
        )
        self._spec = spec
        if self._order.get("is_bare"):
            self._has_no_key = True
            self._connection.tell("looked", key="", tree="", why=self._order["why_plain"])
            return
        try:
            most_s = spec.wait_s + spec.timeout_s
            self._looked = found = look(spec, self._environ, self._say, most_s, self._on_wait)
        except (BootseerError, OSError) as error:
            if ends_job(error):
                raise
            plain_targets(spec, self._environ)  # there is something to be set up, or this says why not
            self._has_no_key, self._why_no_key = True, described(error)
            self._say(f"{self._why_no_key}; set-up is run, and what it does is not kept")
            self._connection.tell("looked", key="", tree="", why=self._why_no_key)
            return
        self._connection.tell(
            "looked",
            key=found.keyed.key,
            tree=found.tree,
            why=self._order["why_plain"] if self._is_plain else found.cannot,
        )

    def _on_wait(self, is_waiting: bool) -> None:
        """For another process that is at the targets."""
        if is_waiting:
            self._say("another process is at the folder of the environment: waiting for it")
        self._connection.tell("waiting" if is_waiting else "waited")

    # ---- what is kept ----------------------------------------------------------------------------------------

    def _use(self, tree: str) -> None:
        looked = self._known()
        there = looked.there
        if there is not None and there.tree == tree and "there" in self._ways:
            try:
                self._check_there(there)
                self._gate(tree)
                self._check_there(there)
            except BootseerError as error:
                self._connection.tell("unfetched", why=str(error))
                return
            self._ready("there", tree)
            if looked.store is not None and looked.found is not None:
                aio.run_sync(looked.store.touch(looked.found, time.time()))
            return
        try:
            found = self._find(tree)
            if there is not None:
                self._prepare_over(there, found)
            self._restore(found)
        except BootseerError as error:
            self._unmount()
            damaged = tree if is_damage(error) else ""
            self._connection.tell("unfetched", why=str(error), damaged=damaged)

    def _check_there(self, there: There) -> None:
        """Raises: ConfigError when another job has changed the targets since they were looked at."""
        targets = self._known().keyed.targets
        if not is_still_there(there, targets, self._environ):
            raise ConfigError(f"{', '.join(targets)}: was changed since its environment was looked for")

    def _prepare_over(self, there: There, found: Found) -> None:
        """To put a tree over what is in place, of the same key. Raises: ConfigError when both would be mixed."""
        looked = self._known()
        targets = looked.keyed.targets
        self._looked = looked._replace(expected=states_of(targets))
        self._check_there(there)
        if there.tree == found.snapshot.tree:
            return
        with self._tree_of(found).open() as opened:
            if not covers(opened.tree, targets, self._environ):
                raise ConfigError(
                    f"{', '.join(targets)}: has another environment of this key, and files of both would be mixed:"
                    " make the folder anew to get that of the store"
                )

    def _tree_of(self, found: Found) -> StoredTree:
        from bootseer.env.env_tree import StoredTree

        looked = self._known()
        assert looked.store is not None
        url = below(split_pin(looked.store.url)[0], tree_folder(found.snapshot.key))
        return StoredTree(url, found.snapshot.tree, environ=self._environ, log=self._say)

    def _find(self, tree: str) -> Found:
        """Raises: StorageError, also when the store has another one by now."""
        looked = self._known()
        if looked.found is not None and looked.found.snapshot.tree == tree:
            return looked.found
        if looked.store is None:
            raise ConfigError(looked.cannot or "the environment store cannot be used")
        for _ in range(FIND_TRIES):
            found = aio.run_sync(looked.store.find(looked.keyed.key, time.time()))
            if found is not None and found.snapshot.tree == tree:
                return found
            time.sleep(FIND_PAUSE_S)
            self._check()
        raise StorageError(
            f"{redact(looked.store.url)}: does not show the environment that another node has found"
        )

    def _restore(self, found: Found) -> None:
        looked = self._known()
        store = looked.store
        assert store is not None
        snapshot, tree = found.snapshot, self._tree_of(found)
        if reason := why_other_targets(snapshot.targets, looked.keyed.targets):
            raise IntegrityError(f"{redact_urls(tree.url)}: {reason}")
        mounting = None
        if self._holder is not None:
            from bootseer.blocks.trace import workload_key

            workload = workload_key(*self._order["workload"])
            mounting = restore.Mounting(self._holder, store.trust, workload)
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
                expected=looked.expected,
                ways=self._ways,
                mounting=mounting,
                on_progress=self._check,
                environ=self._environ,
                wait_s=wait_s,
                before_move=(lambda: None) if is_shown else before_move,
            )

        try:
            done = run(BUSY_S)
        except StorageTimeout:
            if is_shown or not self._is_busy():
                raise
            before_move()  # a node with the same folder has it, and waits for this one
            self._connection.tell("waiting")
            done = run(restore.WAIT_S)
        self._mounted = done.mounted
        for note in done.notes:
            self._say(note)
        if not is_shown:
            self._gate(snapshot.tree)
        if done.how == restore.UNPACK:
            self._date(snapshot.created_s)
        aio.run_sync(store.touch(found, time.time()))
        self._ready(done.how, snapshot.tree, prefix=done.prefix)

    def _date(self, made_s: float) -> None:
        """What was restored is as old as its snapshot."""
        for target in self._known().keyed.targets:
            try:
                open_markers(self._environ, target).date(os.path.realpath(target), made_s)
            except BootseerError:
                return  # it counts as made just now

    def _is_busy(self) -> bool:
        """Whether another process is at the targets."""
        try:
            with restore.alone_at(self._known().keyed.targets, environ=self._environ, wait_s=0.0):
                return False
        except StorageTimeout:
            return True

    def _gate(self, tree: str) -> None:
        """All is at hand; waits until all nodes have come so far. Raises: AbandonedError."""
        self._connection.tell("fetched", tree=tree)
        order = self._wait()
        if order is None or order["do"] != "show":
            self._next = order
            self._unmount()
            raise AbandonedError

    def _unmount(self) -> None:
        mounted, self._mounted = self._mounted, None
        if mounted is not None:
            self._holder = None  # it is closed with the mount
            mounted.close()

    # ---- set-up ----------------------------------------------------------------------------------------------

    def _own(self, *, is_again: bool) -> None:
        """For this node alone."""
        self._unmount()
        with self._alone():
            self._look_again()
            there = self._known().there
            if there is not None and not is_again:
                self._ready("there", there.tree)
            else:
                self._run(publishes=False)

    def _build(self, *, is_urgent: bool, damaged: str) -> None:
        """Args: damaged: the tree that is to be replaced; "" for none."""
        with self._alone() as leave:
            why_not = self._look_again()
            looked = self._known()
            if looked.there is not None:  # another job of this node was faster
                self._ready("there", looked.there.tree)
                self._unpublished("it is in its place already")
                return
            if why_not:
                self._say(f"{why_not}, so what set-up makes is not kept")
                self._run(publishes=False)
                self._unpublished(why_not)
                return
            outcome = self._take_lease(looked, damaged)
            if isinstance(outcome, Ready):
                self._looked = looked._replace(found=outcome.found)
                self._connection.tell("found", tree=outcome.found.snapshot.tree)
                return
            if not isinstance(outcome, Lease):
                self._say(f"set-up is run here: {outcome}")
                self._run(publishes=False)
                self._unpublished(outcome)
                return
            self._lease = outcome
            try:
                with kept(outcome):
                    capture = self._run(publishes=True)
                    leave.close()
                    if isinstance(capture, str):
                        outcome.tell("could not look at what set-up did")
                        self._unpublished(capture)
                        aio.run_sync(outcome.release(FAILED, "it could not be told what set-up did"))
                    else:
                        self._publish(capture, outcome, is_urgent=is_urgent, replaces=self._replaces(damaged))
            finally:
                self._lease = None

    def _take_lease(self, looked: Looked, damaged: str) -> Ready[Found] | Lease | str:
        """Or why there is none. What is `damaged` does not count, but what somebody else has made of it since."""
        store, spec = looked.store, self._spec
        assert store is not None and spec is not None
        leases = BuilderLease(store.store, owner=f"{socket.gethostname()} (pid {os.getpid()})", say=self._say)

        async def find() -> Found | None:
            found = await store.find(looked.keyed.key, time.time())
            return None if found is not None and found.generation <= self._replaces(damaged) else found

        try:
            outcome = aio.run_sync(leases.acquire(looked.keyed.key, find, spec.wait_s))
        except BootseerError as error:
            return f"the environment store cannot be used: {error}"
        return outcome.why if isinstance(outcome, Cannot | Over) else outcome

    def _look_again(self) -> str:
        """Alone at the targets. Returns: why what set-up makes now is not what the key says; "" if it is."""
        before, spec = self._known(), self._spec
        assert spec is not None
        now = self._looked = look_again(before, spec, self._environ)
        if now.keyed.key != before.keyed.key:
            return why_another(before.keyed.document, now.keyed.document)
        return now.unclean

    def _run(self, *, publishes: bool) -> Capture | str:
        """Runs the commands; the environment is there. The capture, or why it cannot be told what they did.

        Raises: SetupFailed.
        """
        looked, spec = self._known(), self._spec
        assert spec is not None
        keyed = looked.keyed
        environ = setup_environ(self._environ, keyed.targets)
        capture: Capture | str
        began_s = time.monotonic()
        try:
            begin_setup(keyed.targets, self._environ)
            capture = Capture(
                keyed.targets,
                environ,
                inputs=[*spec.inputs, *keyed.editables],
                python=spec.python,
                cwd=spec.cwd,
                without=[self._log_path, *self._order["own"]],
            )
            capture.begin()
        except BootseerError as error:
            self._say(f"what set-up does cannot be kept: {error}")
            capture = str(error)
        look_s = time.monotonic() - began_s
        self._connection.tell("setup-began")
        done = run_setup(
            spec.commands,
            environ=environ,
            cwd=spec.cwd,
            log_path=self._log_path,
            timeout_s=spec.timeout_s,
            on_line=self._on_line,
        )
        if done.left_running:
            self._say(
                f"set-up left processes running, which were ended: {', '.join(done.left_running[:MOST_NAMED])}"
            )
        self._setup_s = done.took_s
        changes: Changes | None = None
        changed = why_changed(keyed, spec, self._environ)
        try:
            if isinstance(capture, Capture):
                changes = capture.end()
                if not changed:
                    mark(capture.left(), keyed.key, "", keyed.document.base, self._environ)
                    settle_later(keyed.targets, self._environ)
            end_setup(keyed.targets, self._environ, is_clean=not (changed or looked.unclean or changes is None))
        except BootseerError as error:
            self._say(f"what set-up did cannot be kept: {error}")
            capture = str(error)
        if changed and isinstance(capture, Capture):
            self._say(f"{changed}, so what it made is not kept")
            capture = changed
        if changes is not None:
            look_s += changes.took_s
            if changes.outside and publishes:
                named = ", ".join(changes.outside[:MOST_NAMED])
                more = len(changes.outside) - MOST_NAMED
                self._say(
                    f"warning: set-up wrote outside its targets, which is not kept: {named}"
                    f"{f' and {more} more' if more > 0 else ''}"
                )
        self.is_publishing = isinstance(capture, Capture) and publishes
        self._ready("installed", "", setup_s=done.took_s, capture_s=look_s)
        return capture

    def _on_line(self, line: str) -> None:
        self._connection.tell("line", text=redact_text(line, self._secrets))

    def _go_on_without(self, order: Mapping[str, Any], why: str) -> None:
        """Without what keeps environments: an order is carried out as far as it can be. `why`: if it is not known.

        Raises: SetupFailed, and what else ends the job.
        """
        what = order["do"]
        if self._is_ready:
            self._say(f"the environment is not kept: {why}")
            if what == "build":
                self._unpublished(why)
        elif what in ("own", "again", "build"):
            self._run_plainly(why)
            if what == "build":
                self._unpublished(why)
        elif what == "use":
            self._unmount()
            self._connection.tell("unfetched", why=why or "it cannot be told which one it is")

    def _run_plainly(self, why: str) -> None:
        """Runs the commands and nothing else. Raises: SetupFailed, and what else ends the job."""
        spec = self._spec
        assert spec is not None
        targets = plain_targets(spec, self._environ)
        if why:
            self._say(f"{why}; set-up is run, and what it does is not kept")
        self.is_publishing = False
        with ExitStack() as stack:
            try:
                self._come_alone(stack, targets)
            except (BootseerError, OSError) as error:
                if isinstance(error, StorageTimeout):
                    raise
                if described(error) not in self._why_no_key:
                    self._say(f"whether another process is at its folder cannot be told: {described(error)}")
            self._note_plain(targets, is_over=False)
            self._connection.tell("setup-began")
            done = run_setup(
                spec.commands,
                environ=setup_environ(self._environ, targets),
                cwd=spec.cwd,
                log_path=self._log_path,
                timeout_s=spec.timeout_s,
                on_line=self._on_line,
            )
            self._note_plain(targets, is_over=True)
        self._setup_s = done.took_s
        self._ready("installed", "", setup_s=done.took_s)

    def _note_plain(self, targets: list[str], *, is_over: bool) -> None:
        """What plain set-up leaves is in no key either: nothing may be kept that is made on top of it."""
        try:
            if is_over:
                end_setup(targets, self._environ, is_clean=False)
            else:
                begin_setup(targets, self._environ)
        except (BootseerError, OSError) as error:
            self._say(f"that set-up was run is not noted: {described(error)}")

    # ---- publishing ------------------------------------------------------------------------------------------

    def _replaces(self, damaged: str) -> int:
        """The generation that this node has found to have that tree, 0 for none."""
        found = self._known().found
        return found.generation if found is not None and damaged == found.snapshot.tree else 0

    def _publish(self, capture: Capture, lease: Lease, *, is_urgent: bool, replaces: int) -> None:
        """While ranks run. What goes wrong costs nothing but the snapshot."""
        looked = self._known()
        try:
            tree = publish(
                capture,
                looked,
                lease,
                self._setup_s,
                self._environ,
                is_urgent=is_urgent,
                say=self._say,
                replaces=replaces,
            )
        except BootseerError as error:
            aio.run_sync(lease.release(FAILED, "what set-up did could not be published"))
            self._unpublished(str(error))
            self._say(f"the environment is not kept, and the next start runs set-up again: {error}")
        else:
            self._connection.tell("published", tree=tree)
        finally:
            self.is_publishing = False

    def _unpublished(self, why: str) -> None:
        self._connection.tell("unpublished", why=why)

    # ---- in general ------------------------------------------------------------------------------------------

    @contextmanager
    def _alone(self) -> Iterator[ExitStack]:
        """At the targets; the stack may be closed before."""
        looked, spec = self._known(), self._spec
        assert spec is not None
        with ExitStack() as stack:
            self._come_alone(stack, looked.keyed.targets)
            yield stack

    def _come_alone(self, stack: ExitStack, targets: list[str]) -> None:
        """Raises: StorageTimeout when another process does not go away; as restore.alone_at."""
        spec = self._spec
        assert spec is not None
        try:
            notes = stack.enter_context(restore.alone_at(targets, environ=self._environ, wait_s=0.0))
        except StorageTimeout:
            self._on_wait(True)
            most_s = spec.wait_s + spec.timeout_s
            notes = stack.enter_context(restore.alone_at(targets, environ=self._environ, wait_s=most_s))
            self._on_wait(False)
        for note in notes:
            self._say(note)

    def _ready(
        self, how: str, tree: str, *, prefix: tuple[str, ...] = (), setup_s: float = 0.0, capture_s: float = 0.0
    ) -> None:
        end_spare()  # that a mount would have taken
        self._is_ready = True
        self._connection.tell(
            "ready",
            how=how,
            key="" if self._looked is None else self._looked.keyed.key,
            tree=tree,
            prefix=list(prefix),
            setup_s=setup_s,
            capture_s=capture_s,
            is_publishing=self.is_publishing,
        )

    def _known(self) -> Looked:
        assert self._looked is not None, "it looks first"
        return self._looked

    def _say(self, text: str) -> None:
        if not self._connection.is_gone:
            self._connection.tell("said", text=text)
            return
        try:  # the job is over: who looks for what became of its environment finds the log
            with open(self._log_path, "a", encoding="utf-8") as log:
                log.write(f"bootseer: {text}\n")
        except OSError:
            pass

    def _fail(self, why: str, tail: tuple[str, ...] = ()) -> None:
        self._connection.tell("failed", why=why, tail=list(tail))


def _absolute(python: str, environ: Mapping[str, str]) -> str:
    """The path of a program that may be a name; "" stays."""
    if not python or python.startswith("/"):
        return python
    found = shutil.which(python, path=environ.get("PATH")) if "/" not in python else None
    return os.path.abspath(found or python)
