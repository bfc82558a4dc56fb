"""bootrun's side of --setup: finds, fetches or builds the ranks' environment on this node.

A separate process, the environment service (bootseer/env/service/main.py), does the work: the launch path imports
no storage. In: the --setup flags, orders of the coordinator (setup_policy.py), by which all nodes take the same
environment. Out: an Environment, news for the coordinator, log lines. A set-up command that fails is the job's
error. If the service fails, another one is started that only runs set-up. A service that publishes outlives the
job. With an image the service searches as soon as the image's digest is known, and runs set-up when the image is
open. If the image is lost meanwhile, another service runs set-up in the next image, once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from bootseer.own_module import command_of
from launcher.base.helper_process import ServiceProcess
from launcher.base.loop import Alarm, EventLoop
from launcher.base.stage_span import StageSpan
from launcher.cli.setup_options import SetupOptions
from launcher.provision.answers import check_environment
from launcher.provision.failed_mounts import ServedMount
from launcher.provision.waiting import WaitingLines
from launcher.ranks.program import RankProgram, inside_of
from launcher.rendezvous.messages import SetupOrder, SetupReport
from launcher.spec import LaunchSpec

if TYPE_CHECKING:
    from launcher.provision.peers import NodePeers

SILENT_FOR_S = 60.0  # then a store that did not answer is tried again
MAX_SERVICES = 2
MAX_FAULTS = 2  # attempts with an unreadable mount, after which the job no longer mounts
LOST_KNOWN_S = 3.0  # until the loss of an image is known: its service checks each second
STABLE_S = 60.0  # a mount that lasted this long does not count
# At most this share of join_timeout, so that a job on several nodes does not end before a fallback has run set-up.
SILENCE_SHARE = 1 / 3
MAX_TAIL_LINES = 20
LOG_NAME = "setup.log"
MAX_TOUCHED_BYTES = 4 << 20  # of the access trace as text; the first reads count most
RUNS_SET_UP = ("build", "own", "again")  # orders
EARLY = "--early"  # its first order comes later: it imports modules meanwhile


class SetupState(Enum):
    NONE = "none"
    WORKING = "working"
    READY = "ready"
    FAILED = "failed"


class ReadyEnvironment(NamedTuple):
    """What ranks need from the environment."""

    prefix: tuple[str, ...]  # words before each command that enter the mount; () if it is in place
    targets: tuple[str, ...]
    python: str  # in an image: the interpreter that set-up made; "" for none
    hot_imports: tuple[str, ...] = ()  # modules of this workload, stored by another node


class SetupEvents(NamedTuple):
    """Callbacks of the node."""

    ready: Callable[[ReadyEnvironment], object]  # again after it was rebuilt or remounted
    failed: Callable[[SetupReport], object]
    news: Callable[[SetupReport], object]  # for the coordinator
    noted: Callable[[StageSpan], object]
    fell_back: Callable[[str], object]  # why the kept environment is not used, or is slower
    said: Callable[[str], object]  # a line for the user
    line: Callable[[str], object]  # of the commands' output
    complained: Callable[[str], object]  # an error, always printed
    mounted: Callable[[ServedMount | None], object]  # the mount that ranks read from now on; None: it is in place


class NodeSetup:
    """bootrun's side of --setup; made only with --setup."""

    def __init__(
        self,
        loop: EventLoop,
        spec: LaunchSpec,
        unset: tuple[str, ...],
        events: SetupEvents,
        peers: NodePeers | None = None,
    ) -> None:
        """Args: unset: variables that neither the service nor set-up gets; peers: None: only the store is read."""
        assert spec.setup is not None
        self._loop = loop
        self._spec = spec
        self._options: SetupOptions = spec.setup
        self._events = events
        self._log_path = self._run_dir = ""
        self._state = SetupState.NONE
        self._service = SetupService(loop, spec, unset, events, peers, self._is_working, self._take, self._on_end)
        self._services = 0
        self._began_ns = 0
        self._waiting = WaitingLines(
            loop,
            events.said,
            lambda: self._began_ns,
            lambda time: f"waiting for the environment, {time} (log: {self._log_path})",
        )
        self._image_loss = ImageLoss(loop, self._fail, self._run_again)
        self._key = ""
        self._tree = ""  # that is or was mounted
        self._is_mounted = False
        self._is_reopening = False  # a lost mount is reopened, without an order of the coordinator
        self._pending_step: SetupOrder | None = None  # carried out when the new service has finished its search
        self._is_recovering = False  # between two attempts, since the mount was unreadable
        self._damaged = ""  # a tree with wrong content
        self._faults = 0  # attempts with an unreadable mount
        self._has_waited = False
        self._is_publishing = False
        self.has_built = False  # here: other nodes will mount it, with this start's access trace
        self._ready_ns = 0
        self._why = ""  # why a service has failed
        self._silent_ns: int | None = None  # when the store did not answer
        self._later: list[SetupOrder] = []  # orders that need the image
        self._may_mount = True

    # ---- the start -------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return self._state is SetupState.READY

    def _is_working(self) -> bool:
        return self._state is SetupState.WORKING

    @property
    def is_store_silent(self) -> bool:
        """Whether the store recently failed to answer, so that other readers need not wait for it again."""
        silent_ns = self._silent_ns
        return silent_ns is not None and time.monotonic_ns() - silent_ns < SILENT_FOR_S * 1e9

    def begin(self, run_dir: str) -> None:
        """Start the service, at time zero. Args: run_dir: directory of the log; "" for none."""
        self._run_dir = run_dir
        self._log_path = f"{run_dir}/{LOG_NAME}" if run_dir else _temporary_log()
        self._began_ns = time.monotonic_ns()
        self._start(is_plain=False)

    def _start(self, *, is_plain: bool, is_bare: bool = False) -> None:
        """Start a service. Args: is_plain: only run set-up; is_bare: without any inspection that may hang."""
        self._state = SetupState.WORKING
        self._services += 1
        self._later.clear()  # orders for the last service: this one searches again and gets its own orders
        order = {
            **describe_job(self._spec, self._options),
            "ways": [way for way in self._options.ways if not is_plain and (self._may_mount or way != "mount")],
            "log_path": self._log_path,
            "own": _own_files(self._run_dir),
            "is_plain": is_plain,
            "is_bare": is_bare,
            "why_plain": self._why,
            "damaged": self._damaged,
        }
        try:
            self._service.start(order)
        except OSError as error:
            self._loop.call_soon(self._fail, f"the environment service cannot be started: {error.strerror}", [])
            return
        if not self._waiting.has_begun:
            self._waiting.begin()
        self._service.send_first()

    def image_resolved(self, digest: str) -> None:
        """Begin with the image's digest: time zero of the environment. Args: digest: "" if it is unknown."""
        if not self._service.has_digest:
            self._began_ns = time.monotonic_ns()
        self._service.set_digest(digest)

    def image_opened(self, program: RankProgram) -> None:
        """Use the opened image for programs; called again when it was reopened."""
        self._service.set_image(program)
        later, self._later = self._later, []
        for order in later:
            self.carry_out(order)

    def image_lost(self) -> None:
        """Forget a lost image; orders that need it wait for the next one."""
        self._service.set_image(None)
        self._image_loss.on_lost()

    @property
    def wants_image(self) -> bool:
        """Whether an order waits for the image."""
        return bool(self._later)

    def _stop_waiting(self) -> None:
        self._waiting.stop()
        self._service.stop_watching()

    # ---- orders ----------------------------------------------------------------------------------------------

    def look_again(self) -> None:
        """Search again with a new service; past and expected orders are void."""
        if self._state is SetupState.WORKING and not self._is_reopening and not self._image_loss.is_possible:
            self._service.close()
            self._services -= 1  # it does not count as failed
            self._start(is_plain=False)

    def carry_out(self, order: SetupOrder) -> None:
        if order.do == "wait":
            self._has_waited = True
            self._events.said(f"{order.text}: waiting for it")
            return
        if order.do in RUNS_SET_UP and self._spec.image is not None and not self._service.has_image:
            self._later.append(order)  # set-up runs in the image
            return
        if order.text and order.do in ("own", "again"):
            self._events.fell_back(order.text)
        elif order.text and order.do != "build":
            self._events.said(order.text)
        if self._state is SetupState.FAILED:
            return
        has_one = self._state is SetupState.READY or self._is_reopening
        if order.do == "renew" or (has_one and order.do in ("use", "own")):
            self._replace_environment(order)
            return
        if not self._service.is_running:
            return
        if order.do == "again":
            self._state = SetupState.WORKING
            self._began_ns = time.monotonic_ns()
        if order.do in ("own", "again"):
            self._has_waited = False
        if order.do in RUNS_SET_UP:
            self._image_loss.on_ordered()
        if order.do == "build":
            self._service.ask("build", is_urgent=order.text == "others", damaged=order.tree)
        else:
            self._service.ask(order.do, tree=order.tree)
        # An order that runs set-up may have to wait for other nodes first.
        self._service.allow(0.0 if order.do in ("use", "show") else self._options.max_s)

    # ---- between attempts ------------------------------------------------------------------------------------

    def unreadable(self, why: str) -> None:
        """Report that the mount was unreadable in the last attempt: the coordinator decides what follows."""
        if self._state is SetupState.READY and self._is_mounted:
            self._tell("unreadable", tree=self._tree, text=why)

    def _replace_environment(self, order: SetupOrder) -> None:
        """Drop the ranks' environment, and get one again as ordered; "renew": as at the start of the job."""
        if order.do == "use":
            self._faults += 1
            self._may_mount = self._may_mount and self._faults < MAX_FAULTS
        elif order.do == "renew":
            self._damaged = order.tree
        self._service.close()
        self._is_recovering, self._is_reopening = True, False
        self._pending_step = None if order.do == "renew" else order
        self._has_waited = False
        self._services = 0
        self._began_ns = time.monotonic_ns()
        self._start(is_plain=False)

    # ---- messages of the service -----------------------------------------------------------------------------

    def _take(self, answer: dict[str, Any]) -> None:
        did = answer["did"]
        if answer.get("is_silent"):
            self._silent_ns = time.monotonic_ns()
        if did in ("looked", "fetched", "unfetched", "found"):
            self._service.allow(None)  # the coordinator decides next
        match did:
            case "waiting":
                self._service.wait_for_others(self._options.max_s)
                self._tell("waiting")  # from now on the job allows it the time of set-up
            case "waited":
                self._service.continue_work()
            case "setup-began":
                self._service.allow(self._options.timeout_s)
                self._events.said(f"{setup_line(len(self._options.commands))} (log: {self._log_path})")
            case "looked":
                self._on_looked(answer["key"], answer["tree"], answer["why"])
            case "fetched":
                if self._is_reopening:
                    self._ask("show", answer["tree"])
                else:
                    self._tell("fetched", tree=answer["tree"])
            case "unfetched":
                self._on_unfetched(answer["why"], answer.get("damaged", ""))
            case "ready":
                self._on_ready(answer)
            case "found":
                self._has_waited = True
                self._tell("found", tree=answer["tree"])
            case "published":
                self._is_publishing = False
                self._tell("published", tree=answer["tree"])
            case "unpublished":
                self._is_publishing = False
                self._tell("unpublished", text=answer["why"])
            case "lost":
                self._why = "it cannot be read any more, as the process that serves its files has ended"
                self._service.close()
                self._on_end(self._why)
            case "failed":
                self._on_failed(answer["why"], answer["tail"], could_enter=answer.get("could_enter", True))

    def _ask(self, do: str, tree: str = "") -> None:
        if self._service.is_running:
            self._service.ask(do, tree=tree)
            self._service.allow(0.0)

    def _tell(self, what: str, *, tree: str = "", text: str = "") -> None:
        self._events.news(SetupReport(what, self._key, tree, text))

    def _on_looked(self, key: str, tree: str, why: str) -> None:
        self._key = key
        step, self._pending_step = self._pending_step, None
        if step is not None:
            self.carry_out(step._replace(text=""))
        elif self._is_reopening:
            self._ask("use", self._tree)
        else:
            self._tell("looked", tree=tree, text=why)

    def _on_unfetched(self, why: str, damaged: str) -> None:
        if self._is_reopening and not self._may_mount:
            self._set_up_instead(f"the environment cannot be unpacked either: {why}")
            return
        if self._is_reopening:
            self._fail(f"the environment in which ranks of this job ran cannot be restored: {why}", [])
            return
        if damaged:
            self._events.fell_back(f"the kept environment cannot be used: {why}")
            self._tell("damaged", tree=damaged, text=why)
        else:
            self._tell("unfetched", text=why)  # the next step's message contains the reason

    def _on_ready(self, answer: Mapping[str, Any]) -> None:
        if self._state is not SetupState.WORKING:
            return
        self._stop_waiting()
        self._state = SetupState.READY
        self._tree = answer["tree"]
        self._is_mounted = bool(answer["prefix"])
        mount = answer.get("mount")
        self._events.mounted(ServedMount(*mount) if mount else None)
        self._is_publishing = self.has_built = bool(answer["is_publishing"])
        how = answer["how"]
        self._ready_ns = ended_ns = time.monotonic_ns()
        facts = ready_facts(answer, has_waited=self._has_waited)
        self._events.noted(StageSpan(self._began_ns, ended_ns, facts, ""))
        self._events.said(ready_line(how, (ended_ns - self._began_ns) / 1e9, facts))
        self._is_reopening = False
        if self._is_recovering:
            self._is_recovering = False
            self._tell("ready", tree=self._tree)
        prefix, targets, imports = (tuple(answer[name]) for name in ("prefix", "targets", "imports"))
        self._events.ready(ReadyEnvironment(prefix, targets, answer["python"], imports))

    def _on_failed(self, why: str, tail: list[str], *, could_enter: bool) -> None:
        if self._state is not SetupState.WORKING:
            return
        if could_enter or self._spec.image is None:
            self._fail(why, tail)
        else:
            self._image_loss.on_failed(why, tail)
            if self._image_loss.is_possible:
                self._stop_waiting()

    def _run_again(self) -> None:
        """Run set-up again, in the next image."""
        self._why = "its image was lost while set-up ran"
        self._events.said(f"set-up is run again once the image is reopened: {self._why}")
        self._service.close()
        self._services -= 1  # it does not count as failed
        self._start(is_plain=True)

    def _fail(self, why: str, tail: list[str]) -> None:
        self._stop_waiting()
        self._image_loss.cancel()
        if self._state is SetupState.FAILED:
            return
        self._state = SetupState.FAILED
        self._events.noted(StageSpan(self._began_ns, time.monotonic_ns(), {}, why))
        if tail and (self._spec.quiet or not self._service.lines):
            for line in tail[-MAX_TAIL_LINES:]:
                self._events.complained(f"set-up: {line}")
        self._events.failed(SetupReport("failed", self._key, "", why))

    # ---- trouble and the end ---------------------------------------------------------------------------------

    def _on_end(self, why: str, was_silent: bool = False) -> None:
        """Handle the end of the service: run set-up, mount again, or report that publishing failed."""
        if self._image_loss.is_possible:
            return
        if self._state is SetupState.READY:
            if self._is_publishing:
                self._is_publishing = False
                self._events.said(
                    f"warning: the environment is not kept: the service that publishes it has failed: {why}"
                )
                self._tell("unpublished", text=f"the service that published it has failed: {why}")
            if self._is_mounted:
                if time.monotonic_ns() - self._ready_ns > STABLE_S * 1e9:
                    self._services = 1
                self._events.said(f"mounting the environment again: {why}")
                self._is_reopening = True
                self._restart(why, is_plain=False)
            return
        if self._state is SetupState.WORKING:
            self._is_reopening = False
            self._restart(why, is_plain=True, is_bare=was_silent)

    def without_mount(self, why: str) -> None:
        """Unpack the environment, or run set-up, if ranks cannot see the mount."""
        self._may_mount = False
        self._services = 0
        if "unpack" not in self._options.ways:
            self._set_up_instead(f"the environment cannot be mounted: {why}")
            return
        self._events.fell_back(f"the environment is unpacked: {why}")
        self._is_reopening = True
        self._service.close()
        self._restart(why, is_plain=False)

    def _set_up_instead(self, why: str) -> None:
        """Run set-up: no method can restore the environment that was mounted."""
        self._service.close()
        self._is_reopening = False
        if self._spec.strict:
            self._fail(why, [])
            return
        self._events.fell_back(f"{why}; set-up is run")
        self._why = why
        self._began_ns = time.monotonic_ns()
        self._start(is_plain=True)

    def _restart(self, why: str, *, is_plain: bool, is_bare: bool = False) -> None:
        self._why = f"the environment service has failed: {why}"
        if self._services >= MAX_SERVICES and self._is_reopening and self._may_mount:
            self.without_mount(why)  # it is lost repeatedly
            return
        if self._services >= MAX_SERVICES:
            self._fail(f"{self._why}, {self._services} times", [])
            return
        if is_plain:
            self._events.fell_back(f"{self._why}; set-up is run")
        self._start(is_plain=is_plain, is_bare=is_bare)

    def first_step_seen(self) -> None:
        """Notify the service of the first step of all ranks: the start's access trace is complete."""
        has_own = self.is_ready and self._spec.image is not None and not self._options.targets
        if self._is_mounted or has_own:  # it removes old directories of Bootseer
            self._ask("first-step")

    def touched(self, files: Sequence[tuple[str, Sequence[tuple[int, int]]]], imports: Sequence[str]) -> None:
        """Send the service the start's access trace, in order of reads.

        Args: files: path, ranges (offset, bytes), none: the whole file; imports: names of modules.
        """
        if self.has_built:
            self._service.ask("touched", files=list(_first(files, MAX_TOUCHED_BYTES)), imports=list(imports))

    def close(self) -> None:
        """End the service; programs in the environment continue. A service that publishes finishes first."""
        self._stop_waiting()
        self._image_loss.cancel()
        if self._is_publishing and self._service.is_running:
            self._events.said(f"process {self._service.pid} continues publishing the environment")
            self._service.leave()
        else:
            self._service.close()


class ImageLoss:
    """Decides what follows when set-up could not enter its image: one more run if the image was lost."""

    def __init__(
        self, loop: EventLoop, fail: Callable[[str, list[str]], object], run_again: Callable[[], object]
    ) -> None:
        self._fail = fail
        self._run_again = run_again
        self._alarm = Alarm(loop)
        self._is_lost = False  # since set-up was ordered
        self._has_run_again = False

    @property
    def is_possible(self) -> bool:
        """Whether set-up has failed, and it is not known yet whether its image was lost."""
        return self._alarm.is_set

    def on_ordered(self) -> None:
        """Note that set-up was ordered."""
        self._is_lost = False

    def on_lost(self) -> None:
        self._is_lost = True
        if self._alarm.is_set:
            self._alarm.cancel()
            self._repeat()

    def on_failed(self, why: str, tail: list[str]) -> None:
        """Decide on set-up that could not enter its image. Args: tail: the last lines of its output."""
        if self._has_run_again:
            self._fail(why, tail)
        elif self._is_lost:
            self._repeat()
        else:
            self._alarm.set(LOST_KNOWN_S, self._fail, why, tail)

    def cancel(self) -> None:
        self._alarm.cancel()

    def _repeat(self) -> None:
        self._has_run_again = True
        self._run_again()


class SetupService:
    """The environment service of a node, one process after another, and how long each may be silent.

    With an image its first order waits until the image's digest is known.
    """

    def __init__(
        self,
        loop: EventLoop,
        spec: LaunchSpec,
        unset: tuple[str, ...],
        events: SetupEvents,
        peers: NodePeers | None,
        is_awaited: Callable[[], bool],
        on_answer: Callable[[dict[str, Any]], object],
        on_end: Callable[[str, bool], object],
    ) -> None:
        """Args: is_awaited: whether ranks wait for it, so that it may not be silent; on_answer: gets answers that
        need a decision; on_end: gets the reason, and whether the process was killed as it was silent."""
        self._loop = loop
        self._spec = spec
        self._unset = unset
        self._events = events
        self._peers = peers
        self._is_awaited = is_awaited
        self._on_answer = on_answer
        self._on_end = on_end
        self._process: ServiceProcess | None = None
        self._watchdog = Alarm(loop)
        self._limit_s: float | None = None  # of its present work, beyond the silence; None: it waits for an order
        self._limit_before_s: float | None = None  # it waited for another process
        self._first: dict[str, Any] | None = None  # the first order, until the image's digest is known
        self._digest: str | None = None  # of the image
        self._image: RankProgram | None = None  # while it is open
        self.lines = 0  # of set-up's output shown so far

    @property
    def is_running(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        """The number of the process; 0 for none."""
        return self._process.pid if self._process is not None else 0

    # ---- orders ----------------------------------------------------------------------------------------------

    def start(self, first: dict[str, Any]) -> None:
        """Start a process. `send_first` follows. Args: first: its first order. Raises: OSError."""
        environ = {name: value for name, value in os.environ.items() if name not in self._unset}
        argv = command_of("bootseer.env.service.main")
        if self._spec.image is not None:
            argv.append(EARLY)
        self._process = ServiceProcess(
            self._loop, argv, environ, self._take, self._on_process_end, check_environment
        )
        self._first = {**first, "peers": "" if self._peers is None else self._peers.path}

    def send_first(self) -> None:
        """Send the first order, as soon as the image's digest is known."""
        first, image = self._first, self._spec.image
        if first is None or self._process is None or (image is not None and self._digest is None):
            return
        self._first = None
        if image is not None:
            first["image"] = {"digest": self._digest, "python": image.pythons[0], "environ": image.environ}
        self._process.ask("start", **first)
        self._send_image()
        self.allow(0.0)

    def ask(self, do: str, **fields: object) -> None:
        """Send an order, if there is a process."""
        if self._process is not None:
            self._process.ask(do, **fields)

    @property
    def has_digest(self) -> bool:
        """Whether `set_digest` was called."""
        return self._digest is not None

    def set_digest(self, digest: str) -> None:
        """Set the digest of the image; "" if it is unknown."""
        self._digest = digest
        self.send_first()

    @property
    def has_image(self) -> bool:
        return self._image is not None

    def set_image(self, image: RankProgram | None) -> None:
        """Set the open image, in which set-up runs; None: it is lost."""
        self._image = image
        self._send_image()

    def _send_image(self) -> None:
        if self._image is not None and self._process is not None and self._first is None:
            self._process.ask("image", **inside_of(self._image))

    def _take(self, answer: dict[str, Any]) -> None:
        self.watch()  # a service that sends is alive
        match answer["did"]:
            case "said":
                self._events.said(answer["text"])
            case "fell-back":
                self._events.fell_back(answer["why"])
            case "line":
                self.lines += 1
                self._events.line(answer["text"])
            case "origin":
                if self._peers is not None:
                    self._peers.add_origin(answer["url"], answer["folders"])
            case "alive":
                pass
            case _:
                self._on_answer(answer)

    # ---- time limits -----------------------------------------------------------------------------------------

    def allow(self, limit_s: float | None) -> None:
        """Set the time limit of the present work; None: it waits for an order."""
        self._limit_s = limit_s
        self.watch()

    def wait_for_others(self, limit_s: float) -> None:
        """Allow it to wait for another process."""
        self._limit_before_s = self._limit_s
        self.allow(limit_s)

    def continue_work(self) -> None:
        """Restore the time limit from before it waited."""
        self.allow(self._limit_before_s)

    def watch(self) -> None:
        """Restart the count of the service's silence."""
        self._watchdog.cancel()
        if self._is_awaited() and self._process is not None and self._limit_s is not None:
            from bootseer.tuning import current

            silence_s = current().launcher.environment_silence_s
            limit_s = min(silence_s, self._spec.join_timeout_s * SILENCE_SHARE) + self._limit_s
            self._watchdog.set(limit_s, self._end_silent, limit_s)

    def stop_watching(self) -> None:
        """Let it be silent."""
        self._watchdog.cancel()

    def _end_silent(self, limit_s: float) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
        self._on_end(f"it has sent nothing for {round(limit_s, 1):g} s", True)

    # ---- the end ---------------------------------------------------------------------------------------------

    def _on_process_end(self, why: str) -> None:
        self._process = None
        self._on_end(why, False)

    def leave(self) -> None:
        """Let the process finish its work after the job."""
        process, self._process = self._process, None
        if process is not None:
            process.leave()

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.close()


def describe_job(spec: LaunchSpec, options: SetupOptions) -> dict[str, Any]:
    """Return the part of the first order that is the same for all services of a job."""
    entry = spec.entry
    is_program = entry.mode == "program"
    return {
        "spec": {
            "commands": options.commands,
            "inputs": options.inputs,
            "targets": options.targets,
            "store": options.store,
            "python": "" if is_program else spec.python,
            "variables": options.variables,
            "salt": options.salt,
            "max_age_s": options.max_age_s,
            "timeout_s": options.timeout_s,
            "wait_s": options.wait_s,
            "cwd": os.getcwd(),
        },
        "workload": (entry.target, "") if is_program else ("python3", entry.target),
    }


def _first(
    files: Iterable[tuple[str, Sequence[tuple[int, int]]]], max_bytes: int
) -> Iterator[tuple[str, Sequence[tuple[int, int]]]]:
    """PURE: yield the first files of at most so many bytes as JSON."""
    for path, ranges in files:
        max_bytes -= 6 * len(path) + 32 * (1 + len(ranges))  # as JSON, at most
        if max_bytes < 0:
            return
        yield path, ranges


def setup_line(count: int) -> str:
    """PURE: return the line that reports that so many commands run now."""
    return f"set-up runs {'a command' if count == 1 else f'{count} commands'}"


def ready_facts(answer: Mapping[str, Any], *, has_waited: bool) -> dict[str, object]:
    """PURE: return the facts of the event that reports that the environment is ready."""
    facts: dict[str, object] = {
        "how": answer["how"],
        "key": answer["key"],
        "tree": answer["tree"],
        "hit": answer["how"] != "installed",
        "waited": has_waited,
    }
    if answer["how"] == "installed":
        facts |= {"setup_s": answer["setup_s"], "capture_s": answer["capture_s"]}
    return facts


def ready_line(how: str, took_s: float, facts: Mapping[str, object]) -> str:
    """PURE: return the line that reports that the environment is ready."""
    if how == "installed":
        return f"set-up took {facts['setup_s']:.1f} s; the environment is ready after {took_s:.1f} s"
    words = {"there": "is already in place", "mount": "was mounted for the ranks alone", "unpack": "was restored"}
    waited = ", once another builder had finished" if facts.get("waited") else ""
    return f"the environment {words.get(how, how)}{waited}, after {took_s:.2f} s; set-up is not run"


def _own_files(run_dir: str) -> list[str]:
    """Return paths that change while set-up runs but not because of it: logs, and bootrun's output files."""
    found = [run_dir]
    for fd in (1, 2):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            pass
    return [path for path in found if path.startswith("/") and path != os.devnull]


def _temporary_log() -> str:
    directory = os.environ.get("TMPDIR") or "/tmp"  # noqa: S108  the service creates it for this user only
    return os.path.join(os.path.abspath(directory), f"bootseer-setup-{os.getpid()}-{os.urandom(4).hex()}.log")
