"""bootrun's side of --setup: has the ranks' environment looked for, fetched or made on this node.

A process of its own, the keeper (bootseer/env/setup_keeper.py), does the work: the launch path imports no storage.
In: --setup and its like, orders of the job's coordinator (setup_policy.py), by which all nodes take the same
environment. Out: an Environment, news for the coordinator, lines. A set-up command that fails is the job's error;
when the keeper fails another one is started that only runs set-up. A keeper that publishes outlives the job.
In an image the keeper looks as soon as the image's digest is known, and runs set-up when it is open; where the
image was lost meanwhile, another keeper runs it in the next one, once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from bootseer.own_module import command_of
from launcher.loop import Alarm, EventLoop
from launcher.mounts import Mount
from launcher.ranks.program import RankProgram, inside_of
from launcher.rendezvous.messages import SetupNews, SetupOrder
from launcher.service import ServiceProcess
from launcher.setup_options import SetupOptions
from launcher.spec import LaunchSpec
from launcher.stage_span import StageSpan

if TYPE_CHECKING:
    from launcher.peers import NodePeers

SAY_AFTER_S = 10.0
SAY_EVERY_S = 30.0
SILENT_FOR_S = 60.0  # a store that did not answer is asked again after it
MOST_KEEPERS = 2
MOST_FAULTS = 2  # attempts of a job whose mount could not be read: then it is not mounted any more
LOST_KNOWN_S = 3.0  # until it is known that an image was lost: its keeper looks each second
STABLE_S = 60.0  # a mount that held for so long does not count
SILENCE_S = 300.0  # without a word, on top of what it was given for set-up or for others
# Of join_timeout, at most: so that a job of several nodes does not end before set-up was run in another way.
SILENCE_SHARE = 1 / 3
MOST_TAIL_LINES = 20
LOG_NAME = "setup.log"
MOST_TOUCHED_BYTES = 4 << 20  # of what a start has read, as text; what it reads first counts most
RUNS_SET_UP = ("build", "own", "again")  # orders
EARLY = "--early"  # its first order comes later: what it will need is imported meanwhile


class State(Enum):
    NONE = "none"
    WORKING = "working"
    READY = "ready"
    FAILED = "failed"


class Environment(NamedTuple):
    """What ranks need of it."""

    prefix: tuple[str, ...]  # words before each command that bring it to where this is mounted; () where it lies
    targets: tuple[str, ...]
    python: str  # in an image: the interpreter that set-up made; "" for none
    hot_imports: tuple[str, ...] = ()  # of this workload, where another node has run it; names as they were stored


class SetupEvents(NamedTuple):
    """What the node is told; each a callback."""

    ready: Callable[[Environment], object]  # again when it was made anew, or mounted anew
    failed: Callable[[SetupNews], object]
    news: Callable[[SetupNews], object]  # for the coordinator
    noted: Callable[[StageSpan], object]
    fell_back: Callable[[str], object]  # why what is kept is not used, or not as fast as it could be
    said: Callable[[str], object]  # a line for people
    line: Callable[[str], object]  # of the commands' output
    complained: Callable[[str], object]  # an error, said in any case
    mounted: Callable[[Mount | None], object]  # through what ranks read it from now on; None: it lies there


class NodeSetup:
    """See the module's docstring; made only with --setup."""

    def __init__(
        self,
        loop: EventLoop,
        spec: LaunchSpec,
        unset: tuple[str, ...],
        events: SetupEvents,
        peers: NodePeers | None = None,
    ) -> None:
        """Args: unset: variables that neither the keeper nor set-up gets; peers: None: only the store is read."""
        assert spec.setup is not None
        self._loop = loop
        self._spec = spec
        self._options: SetupOptions = spec.setup
        self._unset = unset
        self._events = events
        self._peers = peers
        self._log_path = self._run_dir = ""
        self._state = State.NONE
        self._keeper: ServiceProcess | None = None
        self._keepers = 0
        self._began_ns = 0
        self._timer = Alarm(loop)
        self._watchdog = Alarm(loop)
        self._failing = Alarm(loop)  # of set-up that could not enter its image: that may have been lost
        self._given_s: float | None = None  # for what the keeper does now; None: it waits for an order
        self._given_before_s: float | None = None  # it waited for another process
        self._key = ""
        self._tree = ""  # that is mounted, or was
        self._is_mounted = False
        self._is_reopening = False  # a mount that was lost: no order of the coordinator is waited for
        self._mended_by: SetupOrder | None = None  # carried out as soon as the new keeper has looked
        self._is_mending = False  # between two attempts, as the mount could not be read
        self._damaged = ""  # a tree that is not what it should be
        self._faults = 0  # attempts in which the mount could not be read
        self._has_waited = False
        self._is_publishing = False
        self._has_built = False  # what other nodes will mount
        self._ready_ns = 0
        self._why = ""  # a keeper has failed
        self._silent_ns: int | None = None  # when the store did not answer
        self._order: dict[str, Any] | None = None  # the first one, until it is known what the image is
        self._digest: str | None = None  # of the image
        self._image: RankProgram | None = None  # while it is open
        self._has_lost_image = False  # since set-up was ordered
        self._has_run_again = False  # as its image was lost
        self._later: list[SetupOrder] = []  # they need it
        self._may_mount = True
        self._lines = 0  # of set-up, that were shown

    # ---- the start -------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return self._state is State.READY

    @property
    def is_store_silent(self) -> bool:
        """Whether it did not answer a moment ago: others need not wait for it once more."""
        silent_ns = self._silent_ns
        return silent_ns is not None and time.monotonic_ns() - silent_ns < SILENT_FOR_S * 1e9

    def begin(self, run_dir: str) -> None:
        """Time zero. Args: run_dir: where the log goes; "" for none."""
        self._run_dir = run_dir
        self._log_path = f"{run_dir}/{LOG_NAME}" if run_dir else _temporary_log()
        self._began_ns = time.monotonic_ns()
        self._start(is_plain=False)

    def _start(self, *, is_plain: bool, is_bare: bool = False) -> None:
        """`is_plain`: set-up is run. `is_bare`: without a look at anything that may hang."""
        self._state = State.WORKING
        self._keepers += 1
        self._later.clear()  # orders for the last keeper: this one looks anew, and gets its own
        environ = {name: value for name, value in os.environ.items() if name not in self._unset}
        argv = command_of("bootseer.env.setup_keeper")
        if self._spec.image is not None:
            argv.append(EARLY)
        try:
            self._keeper = ServiceProcess(self._loop, argv, environ, self._take, self._on_end)
        except OSError as error:
            self._loop.call_soon(
                self._fail, f"the process that sees to it cannot be started: {error.strerror}", []
            )
            return
        options, entry = self._options, self._spec.entry
        is_program = entry.mode == "program"
        ways = () if is_plain else options.ways
        self._order = {
            "spec": {
                "commands": options.commands,
                "inputs": options.inputs,
                "targets": options.targets,
                "store": options.store,
                "python": "" if is_program else self._spec.python,
                "variables": options.variables,
                "salt": options.salt,
                "max_age_s": options.max_age_s,
                "timeout_s": options.timeout_s,
                "wait_s": options.wait_s,
                "cwd": os.getcwd(),
            },
            "ways": ways if self._may_mount else tuple(way for way in ways if way != "mount"),
            "workload": (entry.target, "") if is_program else ("python3", entry.target),
            "log_path": self._log_path,
            "own": _own_files(self._run_dir),
            "is_plain": is_plain,
            "is_bare": is_bare,
            "why_plain": self._why,
            "peers": "" if self._peers is None else self._peers.path,
            "damaged": self._damaged,
        }
        if not self._timer.is_set:
            self._timer.set(SAY_AFTER_S, self._say_waiting)
        self._send_order()

    def _send_order(self) -> None:
        """The first one, as soon as it is known what the image is."""
        order, image = self._order, self._spec.image
        if order is None or self._keeper is None or (image is not None and self._digest is None):
            return
        self._order = None
        if image is not None:
            order["image"] = {"digest": self._digest, "python": image.pythons[0], "environ": image.environ}
        self._keeper.ask("start", **order)
        self._tell_image()
        self._give(0.0)

    def image_resolved(self, digest: str) -> None:
        """It is known what the image is: time zero of the environment. Args: digest: "" if nobody knows."""
        if self._digest is None:
            self._began_ns = time.monotonic_ns()
        self._digest = digest
        self._send_order()

    def image_opened(self, program: RankProgram) -> None:
        """Programs can be run in the image; again when it was opened anew."""
        self._image = program
        self._tell_image()
        later, self._later = self._later, []
        for order in later:
            self.obey(order)

    def image_lost(self) -> None:
        """No program can be started in it any more: what needs it waits for the next one."""
        self._image, self._has_lost_image = None, True
        if self._failing.is_set:
            self._failing.cancel()
            self._run_again()

    @property
    def wants_image(self) -> bool:
        """Something waits for it."""
        return bool(self._later)

    def _tell_image(self) -> None:
        image = self._image
        if image is None or self._keeper is None or self._order is not None:
            return
        self._keeper.ask("image", **inside_of(image))

    def _say_waiting(self) -> None:
        waited_s = (time.monotonic_ns() - self._began_ns) / 1e9
        self._events.said(f"still seeing to the environment, for {waited_s:.0f} s (log: {self._log_path})")
        self._timer.set(SAY_EVERY_S, self._say_waiting)

    def _stop_waiting(self) -> None:
        self._timer.cancel()
        self._watchdog.cancel()

    def _give(self, given_s: float | None) -> None:
        """What the keeper does from now on may take so long, if nothing hangs; None: it waits for an order."""
        self._given_s = given_s
        self._watch()

    def _watch(self) -> None:
        """Counts anew how long the keeper says nothing."""
        self._watchdog.cancel()
        if self._state is State.WORKING and self._keeper is not None and self._given_s is not None:
            limit_s = min(SILENCE_S, self._spec.join_timeout_s * SILENCE_SHARE) + self._given_s
            self._watchdog.set(limit_s, self._end_silent, limit_s)

    def _end_silent(self, limit_s: float) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.kill()
        self._on_end(f"it has said nothing for {round(limit_s, 1):g} s", was_silent=True)

    # ---- orders ----------------------------------------------------------------------------------------------

    def look_again(self) -> None:
        """No order that was given, or was to come, holds any more."""
        if self._state is State.WORKING and not self._is_reopening and not self._failing.is_set:
            self._drop_keeper()
            self._keepers -= 1  # it has done what it could
            self._start(is_plain=False)

    def obey(self, order: SetupOrder) -> None:
        """An order of the coordinator."""
        if order.do == "wait":
            self._has_waited = True
            self._events.said(f"{order.text}: waiting for it")
            return
        if order.do in RUNS_SET_UP and self._spec.image is not None and self._image is None:
            self._later.append(order)  # set-up runs there
            return
        if order.text and order.do in ("own", "again"):
            self._events.fell_back(order.text)
        elif order.text and order.do != "build":
            self._events.said(order.text)
        if self._state is State.FAILED:
            return
        has_one = self._state is State.READY or self._is_reopening
        if order.do == "renew" or (has_one and order.do in ("use", "own")):
            self._mend(order)
            return
        if self._keeper is None:
            return
        if order.do == "again":
            self._state = State.WORKING
            self._began_ns = time.monotonic_ns()
        if order.do in ("own", "again"):
            self._has_waited = False
        if order.do in RUNS_SET_UP:
            self._has_lost_image = False
        if order.do == "build":
            self._keeper.ask("build", is_urgent=order.text == "others", damaged=order.tree)
        else:
            self._keeper.ask(order.do, tree=order.tree)
        # What runs set-up may have to wait for others first.
        self._give(0.0 if order.do in ("use", "show") else self._options.most_s)

    # ---- between attempts ------------------------------------------------------------------------------------

    def unreadable(self, why: str) -> None:
        """The mount could not be read while the last attempt ran: the coordinator says what comes of it."""
        if self._state is State.READY and self._is_mounted:
            self._tell("unreadable", tree=self._tree, text=why)

    def _mend(self, order: SetupOrder) -> None:
        """What ranks had is given up, and had anew as the order says. Renew: as at the start of the job."""
        if order.do == "use":
            self._faults += 1
            self._may_mount = self._may_mount and self._faults < MOST_FAULTS
        elif order.do == "renew":
            self._damaged = order.tree
        self._drop_keeper()
        self._is_mending, self._is_reopening = True, False
        self._mended_by = None if order.do == "renew" else order
        self._has_waited = False
        self._keepers = 0
        self._began_ns = time.monotonic_ns()
        self._start(is_plain=False)

    # ---- what the keeper says --------------------------------------------------------------------------------

    def _take(self, answer: dict[str, Any]) -> None:
        did = answer["did"]
        if answer.get("is_silent"):
            self._silent_ns = time.monotonic_ns()
        if did in ("looked", "fetched", "unfetched", "found"):
            self._given_s = None  # the coordinator has the next word
        match did:
            case "said":
                self._events.said(answer["text"])
            case "fell-back":
                self._events.fell_back(answer["why"])
            case "line":
                self._lines += 1
                self._events.line(answer["text"])
            case "alive":
                pass
            case "origin":
                if self._peers is not None:
                    self._peers.add_origin(answer["url"], answer["folders"])
            case "waiting":
                self._given_before_s, self._given_s = self._given_s, self._options.most_s
                self._tell("waiting")  # from now on the job gives it the time that set-up may take
            case "waited":
                self._given_s = self._given_before_s
            case "setup-began":
                self._given_s = self._options.timeout_s
                count = len(self._options.commands)
                commands = "a command" if count == 1 else f"{count} commands"
                self._events.said(f"set-up runs {commands} (log: {self._log_path})")
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
                self._drop_keeper()
                self._on_end(self._why)
                return
            case "failed":
                self._on_failed(answer["why"], answer["tail"], could_enter=answer.get("could_enter", True))
        self._watch()  # whoever speaks lives

    def _ask(self, do: str, tree: str = "") -> None:
        if self._keeper is not None:
            self._keeper.ask(do, tree=tree)
            self._give(0.0)

    def _tell(self, what: str, *, tree: str = "", text: str = "") -> None:
        self._events.news(SetupNews(what, self._key, tree, text))

    def _on_looked(self, key: str, tree: str, why: str) -> None:
        self._key = key
        mended_by, self._mended_by = self._mended_by, None
        if mended_by is not None:
            self.obey(mended_by._replace(text=""))
        elif self._is_reopening:
            self._ask("use", self._tree)
        else:
            self._tell("looked", tree=tree, text=why)

    def _on_unfetched(self, why: str, damaged: str) -> None:
        if self._is_reopening and not self._may_mount:
            self._set_up_instead(f"the environment cannot be unpacked either: {why}")
            return
        if self._is_reopening:
            self._fail(f"the environment that ranks of this job ran in cannot be had again: {why}", [])
            return
        if damaged:
            self._events.fell_back(f"the kept environment cannot be used: {why}")
            self._tell("damaged", tree=damaged, text=why)
        else:
            self._tell("unfetched", text=why)  # what follows from it says why

    def _on_ready(self, answer: Mapping[str, Any]) -> None:
        if self._state is not State.WORKING:
            return
        self._stop_waiting()
        self._state = State.READY
        self._tree = answer["tree"]
        self._is_mounted = bool(answer["prefix"])
        mount = answer.get("mount")
        self._events.mounted(Mount(*mount) if mount else None)
        self._is_publishing = self._has_built = bool(answer["is_publishing"])
        how = answer["how"]
        self._ready_ns = ended_ns = time.monotonic_ns()
        facts: dict[str, object] = {
            "how": how,
            "key": answer["key"],
            "tree": answer["tree"],
            "hit": how != "installed",
            "waited": self._has_waited,
        }
        if how == "installed":
            facts |= {"setup_s": answer["setup_s"], "capture_s": answer["capture_s"]}
        self._events.noted(StageSpan(self._began_ns, ended_ns, facts, ""))
        self._events.said(ready_line(how, (ended_ns - self._began_ns) / 1e9, facts))
        self._is_reopening = False
        if self._is_mending:
            self._is_mending = False
            self._tell("ready", tree=self._tree)
        self._events.ready(
            Environment(
                tuple(answer["prefix"]), tuple(answer["targets"]), answer["python"], tuple(answer["imports"])
            )
        )

    def _on_failed(self, why: str, tail: list[str], *, could_enter: bool) -> None:
        if self._state is not State.WORKING:
            return
        if could_enter or self._has_run_again or self._spec.image is None:
            self._fail(why, tail)
        elif self._has_lost_image:
            self._run_again()
        else:
            self._stop_waiting()
            self._failing.set(LOST_KNOWN_S, self._fail, why, tail)

    def _run_again(self) -> None:
        """Set-up, in the next image."""
        self._has_run_again = True
        self._why = "its image was lost while set-up ran"
        self._events.said(f"set-up is run once more when the image is open again: {self._why}")
        self._drop_keeper()
        self._keepers -= 1  # it has done what it could
        self._start(is_plain=True)

    def _fail(self, why: str, tail: list[str]) -> None:
        self._stop_waiting()
        self._failing.cancel()
        if self._state is State.FAILED:
            return
        self._state = State.FAILED
        self._events.noted(StageSpan(self._began_ns, time.monotonic_ns(), {}, why))
        if tail and (self._spec.quiet or not self._lines):
            for line in tail[-MOST_TAIL_LINES:]:
                self._events.complained(f"set-up: {line}")
        self._events.failed(SetupNews("failed", self._key, "", why))

    # ---- trouble and the end ---------------------------------------------------------------------------------

    def _on_end(self, why: str, *, was_silent: bool = False) -> None:
        """The keeper is gone."""
        self._keeper = None
        if self._failing.is_set:
            return
        if self._state is State.READY:
            if self._is_publishing:
                self._is_publishing = False
                self._events.said(
                    f"warning: the environment is not kept: the process that publishes it has failed: {why}"
                )
                self._tell("unpublished", text=f"the process that published it has failed: {why}")
            if self._is_mounted:
                if time.monotonic_ns() - self._ready_ns > STABLE_S * 1e9:
                    self._keepers = 1
                self._events.said(f"the environment is mounted anew: {why}")
                self._is_reopening = True
                self._restart(why, is_plain=False)
            return
        if self._state is State.WORKING:
            self._is_reopening = False
            self._restart(why, is_plain=True, is_bare=was_silent)

    def without_mount(self, why: str) -> None:
        """It cannot be seen where ranks run: the same one is unpacked, or set-up is run."""
        self._may_mount = False
        self._keepers = 0
        if "unpack" not in self._options.ways:
            self._set_up_instead(f"the environment cannot be mounted: {why}")
            return
        self._events.fell_back(f"the environment is unpacked: {why}")
        self._is_reopening = True
        self._drop_keeper()
        self._restart(why, is_plain=False)

    def _set_up_instead(self, why: str) -> None:
        """What was mounted cannot be had in any other way."""
        self._drop_keeper()
        self._is_reopening = False
        if self._spec.strict:
            self._fail(why, [])
            return
        self._events.fell_back(f"{why}; set-up is run")
        self._why = why
        self._began_ns = time.monotonic_ns()
        self._start(is_plain=True)

    def _restart(self, why: str, *, is_plain: bool, is_bare: bool = False) -> None:
        self._why = f"the process that sees to the environment has failed: {why}"
        if self._keepers >= MOST_KEEPERS and self._is_reopening and self._may_mount:
            self.without_mount(why)  # it is lost again and again
            return
        if self._keepers >= MOST_KEEPERS:
            self._fail(f"{self._why}, {self._keepers} times", [])
            return
        if is_plain:
            self._events.fell_back(f"{self._why}; set-up is run")
        self._start(is_plain=is_plain, is_bare=is_bare)

    def _drop_keeper(self) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.close()

    def first_step_seen(self) -> None:
        """All ranks of this node have made theirs: what the start needs of the environment is known."""
        has_own = self.is_ready and self._spec.image is not None and not self._options.targets
        if self._is_mounted or has_own:  # of our own folders it takes away those that are old
            self._ask("first-step")

    @property
    def has_built(self) -> bool:
        """What a start reads of it is worth to be known: other nodes will mount it."""
        return self._has_built

    def touched(self, files: Sequence[tuple[str, Sequence[tuple[int, int]]]], imports: Sequence[str]) -> None:
        """What the start has read, in that order.

        Args: files: path, ranges (offset, bytes), none: all of it; imports: hot ones, names of modules.
        """
        if self._has_built and self._keeper is not None:
            self._keeper.ask("touched", files=list(_first(files, MOST_TOUCHED_BYTES)), imports=list(imports))

    def close(self) -> None:
        """What runs in the environment goes on; a keeper that publishes does so to the end."""
        self._stop_waiting()
        self._failing.cancel()
        keeper, self._keeper = self._keeper, None
        if keeper is None:
            return
        if self._is_publishing:
            self._events.said(f"the environment is still being published, by process {keeper.pid}")
            keeper.leave()
        else:
            keeper.close()


def _first(
    files: Iterable[tuple[str, Sequence[tuple[int, int]]]], most_bytes: int
) -> Iterator[tuple[str, Sequence[tuple[int, int]]]]:
    """PURE: as many as can be told."""
    for path, ranges in files:
        most_bytes -= 6 * len(path) + 32 * (1 + len(ranges))  # as JSON, at most
        if most_bytes < 0:
            return
        yield path, ranges


def ready_line(how: str, took_s: float, facts: Mapping[str, object]) -> str:
    """PURE: that the environment is there, for people."""
    if how == "installed":
        return f"set-up took {facts['setup_s']:.1f} s; the environment is there after {took_s:.1f} s"
    words = {"there": "is in its place already", "mount": "was mounted", "unpack": "was restored"}
    waited = ", once another one had built it" if facts.get("waited") else ""
    return f"the environment {words.get(how, how)}{waited}, after {took_s:.2f} s; set-up is not run"


def _own_files(run_dir: str) -> list[str]:
    """What changes while set-up runs although set-up does not write there: logs, and where bootrun's lines go."""
    found = [run_dir]
    for fd in (1, 2):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            pass
    return [path for path in found if path.startswith("/") and path != os.devnull]


def _temporary_log() -> str:
    folder = os.environ.get("TMPDIR") or "/tmp"  # noqa: S108  the keeper makes it anew, for this user alone
    return os.path.join(os.path.abspath(folder), f"bootseer-setup-{os.getpid()}-{os.urandom(4).hex()}.log")
