"""bootrun's side of the image: has it opened on this node, makes the program of its ranks, reports the first step.

A separate process, the image service (bootseer/mounts/sandbox/service.py), does the work: the launch path imports
no storage. In: --image and related flags, the paths that the job needs. Out: a RankProgram, statistics of the
start, or the reason why ranks cannot run (the image is required). If the service fails, another one starts for the
same tree, even if its URL has another tree by then; running ranks continue. If ranks write to a directory of the
node (--image-writable), it starts only for the next attempt: one directory cannot be the upper layer of two roots.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from bootseer.counted import format_bytes
from bootseer.mounts.sandbox.binds import OWN_DIRECTORY
from bootseer.own_module import command_of
from launcher.base.helper_process import ServiceProcess
from launcher.base.loop import Alarm, EventLoop
from launcher.base.stage_span import StageSpan
from launcher.cli.image_options import ImageOptions
from launcher.provision.answers import check_image
from launcher.provision.failed_mounts import ServedMount
from launcher.provision.waiting import WaitingLines
from launcher.ranks.command import INSIDE
from launcher.ranks.environ import RANK_VARIABLES
from launcher.ranks.program import FORK_SERVER, IMPORT_WATCH, RANK_VALUES, STORE_GATE, TRACER, RankProgram
from launcher.spec import LaunchSpec

if TYPE_CHECKING:
    from launcher.provision.peers import NodePeers

MAX_SERVICES = 3  # starts in a row, until the job fails
STABLE_S = 60.0  # a service that has worked for so long does not count
SHOW_SILENCE_S = (
    180.0  # without a message while an answer is due; longer than the waits of bootseer.mounts.sandbox.process
)
LOCK_EVERY_S = 0.2
RANK_DIR = f"{OWN_DIRECTORY}/rank"  # in the image: Bootseer's files for ranks
LISTING = f"{RANK_DIR}/list_distributions.py"
_LISTING_FILE = INSIDE.rpartition("/in_rank/")[0] + "/rendezvous/list_distributions.py"
_ADDRESSES = ("BOOTSEER_ARENA", "BOOTSEER_SAVE_ARENA")


class State(Enum):
    NONE = "none"
    OPENING = "opening"
    OPEN = "open"
    LOST = "lost"  # to be reopened before ranks start
    FAILED = "failed"


def _ignore(_: object) -> None:
    pass


class ImageEvents(NamedTuple):
    """Callbacks to the node."""

    resolved: Callable[[str], object]  # the tree's digest, "" for a directory; before it can be used
    opened: Callable[[RankProgram], object]  # again after a service has failed
    lost: Callable[[], object]  # no process can start in it until it is reopened
    failed: Callable[[str], object]
    noted: Callable[[StageSpan], object]
    show_noted: Callable[[StageSpan], object]  # of `NodeImage.show_from`
    started: Callable[[Mapping[str, float]], object]  # statistics, after the first step
    fell_back: Callable[[str], object]  # why a fallback is used
    said: Callable[[str], object]  # a log line
    mounted: Callable[[ServedMount | None], object]  # the mount through which it is read; None: it is unpacked


class NodeImage:
    """See the module's docstring; exists only with --image."""

    def __init__(
        self,
        loop: EventLoop,
        spec: LaunchSpec,
        unset: tuple[str, ...],
        events: ImageEvents,
        peers: NodePeers | None = None,
    ) -> None:
        """Args: unset: variables to remove for the service; peers: None: only the store is read."""
        assert spec.image is not None
        self._loop = loop
        self._spec = spec
        self._options: ImageOptions = spec.image
        self._unset = unset
        self._events = events
        self._peers = peers
        self._own: list[str] = []
        self._state = State.NONE
        self._service: ServiceProcess | None = None
        self._services = 0
        self._began_ns = 0
        self._waiting = WaitingLines(
            loop, events.said, lambda: self._began_ns, lambda time: f"opening the image: {time}"
        )
        self._showing: dict[int, tuple[list[str], Callable[[list[str]], object]]] = {}
        self._asked = 0
        self._adapter: tuple[str, list[str]] | None = None  # adapter of mounts to show, their directories
        self._on_shown_from: Callable[[str], object] = _ignore
        self._is_showing_from = False  # the answer is due
        self._show_ns = 0  # since when
        self._hiding: list[Callable[[], object]] = []  # one for each answer that is due
        self._was_used = False  # ranks of this job may run in it
        self._reopened: RankProgram | None = None  # reported once these mounts are shown again
        self._why = ""  # why it is lost
        self._opened_s = 0.0
        self._resolved_s: float | None = None  # from the begin of the opening until the tree was known
        self._digest = ""  # of the tree that ranks of this job have used
        self._watchdog = Alarm(loop)
        self._is_mounted = False
        self._avoid_mount = ""  # why the next opening unpacks it, if possible
        self._has_avoided = False
        self._locks: dict[str, int] = {}  # path -> descriptor, held until the job ends or the next service has it

    # ---- opening ---------------------------------------------------------------------------------------------

    def begin(self, own: Iterable[str]) -> None:
        """Open the image at the launch. Args: own: directories that ranks always need: logs, events."""
        self._own = [directory for directory in own if directory]
        self._open()

    def _open(self) -> None:
        self._state = State.OPENING
        self._began_ns = time.monotonic_ns()
        self._services += 1
        environ = {name: value for name, value in os.environ.items() if name not in self._unset}
        argv = command_of("bootseer.mounts.sandbox.service")
        try:
            self._service = ServiceProcess(self._loop, argv, environ, self._take, self._on_end, check_image)
        except OSError as error:
            self._loop.call_soon(self._fail, f"the image service cannot be started: {error.strerror}")
            return
        entry, options = self._spec.entry, self._options
        is_program = entry.mode == "program"
        names = (entry.target, "") if is_program else (options.pythons[0], entry.target)
        self._service.ask(
            "start",
            url=options.url,
            name=options.name,
            digest=self._digest,
            workload=names,
            writable=options.writable,
            given=options.binds,
            environ=options.environ,
            programs=options.pythons if not is_program or self._makes_venv() else [],
            work=[_working_directory(), _script_directory(self._spec), os.environ.get("HOME", "")],
            own=[*self._own, *self._more_own()],
            needs=[
                need
                for need, options in (("setup", self._spec.setup), ("caches", self._spec.caches))
                if options is not None
            ],
            parents=[] if self._spec.setup is None else [*map(os.path.dirname, self._spec.setup.targets)],
            cache_dirs=[] if self._spec.caches is None else [path for _, path in self._spec.caches.dirs],
            files={
                f"{RANK_DIR}/bootstrap.py": INSIDE,
                f"{RANK_DIR}/fork_server.py": FORK_SERVER,
                f"{RANK_DIR}/tracer.py": TRACER,
                f"{RANK_DIR}/import_watch.py": IMPORT_WATCH,
                f"{RANK_DIR}/rank_values.py": RANK_VALUES,
                f"{RANK_DIR}/store_gate.py": STORE_GATE,
                LISTING: _LISTING_FILE,
            },
            peers="" if self._peers is None else self._peers.path,
            avoid_mount=self._avoid_mount,
        )
        self._has_avoided |= self._avoid_mount != ""
        self._waiting.begin()
        self._watch()

    def _more_own(self) -> list[str]:
        """Return TMPDIR, with the arena's socket and links, and the checkpoint's own directory."""
        found = [os.environ.get("TMPDIR", "")]
        if self._spec.load_checkpoint:
            from launcher.provision.checkpoint_version import own_path

            path = own_path(self._spec.load_checkpoint, "")
            found.append(path if os.path.isdir(path) else os.path.dirname(path))
        return [directory for directory in found if directory.startswith("/") and directory != "/"]

    def _makes_venv(self) -> bool:
        """Return whether set-up makes a virtual environment by the image's interpreter."""
        return self._spec.setup is not None and not self._spec.setup.targets

    def _watch(self) -> None:
        """Restart the timeout for messages of the service, while an answer is due."""
        self._watchdog.cancel()
        if self._service is None:
            return
        if self._state is State.OPENING:
            from bootseer.tuning import current

            # Unpacking logs a line every 10 s; a store's retries take minutes.
            limit_s = current().launcher.image_silence_s
            self._watchdog.set(limit_s, self._on_silence_timeout, limit_s)
        elif self._state is State.OPEN and (self._showing or self._is_showing_from or self._hiding):
            self._watchdog.set(SHOW_SILENCE_S, self._on_silence_timeout, SHOW_SILENCE_S)

    def _on_silence_timeout(self, limit_s: float) -> None:
        """End a service that hangs or is stopped. Fail during an opening: the next one would hang too."""
        why = f"the image service has sent no message for {limit_s:g} s"
        if self._state is State.OPENING:
            self._kill_service()
            self._fail(f"{why}; check whether a file system of this node hangs (of the cache or of the network)")
        else:
            self._restart_service(why)

    def _kill_service(self) -> None:
        service, self._service = self._service, None
        if service is not None:
            service.kill()

    def _restart_service(self, why: str) -> None:
        """Kill a service that does not work, and handle its end."""
        self._kill_service()
        self._on_end(why)

    # ---- messages of the service -----------------------------------------------------------------------------

    def _take(self, answer: dict[str, Any]) -> None:
        self._understand(answer)
        self._watch()  # each message is a sign of life

    def _understand(self, answer: dict[str, Any]) -> None:
        match answer["did"]:
            case "said":
                self._events.said(answer["text"])
            case "fell-back":
                self._events.fell_back(answer["why"])
            case "origin":
                if self._peers is not None:
                    self._peers.add_origin(answer["url"], answer["folders"])
            case "resolved":
                self._resolved_s = (time.monotonic_ns() - self._began_ns) / 1e9
                self._events.resolved(answer["digest"])
            case "ready":
                self._on_ready(answer)
            case "failed":
                self._fail(answer["why"])
            case "shown-from":
                self._on_shown_from_answer(answer["address"], answer["why"])
            case "hidden" if self._hiding:
                self._take_hidden(answer["why"])
            case "shown":
                if answer["number"] in self._showing:
                    _, then = self._showing.pop(answer["number"])
                    self._was_used = True
                    then(answer["missing"])
            case "lost":
                self._why = "it cannot be read any more, as the process that serves its files has ended"
                self._events.lost()  # new processes in it fail from now on, before its service has ended
            case "statistics":
                self._events.started(answer["found"])

    def _on_ready(self, answer: dict[str, Any]) -> None:
        self._waiting.stop()
        if self._digest and answer["digest"] != self._digest:
            self._fail(f"its tree is now {answer['digest']}, not {self._digest}, with which the job began")
            return
        self._digest = answer["digest"]
        if answer["lock"]:
            self._lock(answer["lock"], is_shared=True)
        self._state = State.OPEN
        self._opened_s = self._loop.time()
        mount = answer.get("mount")
        self._is_mounted, self._avoid_mount = bool(mount), ""
        self._events.mounted(ServedMount(*mount) if mount else None)
        for note in answer["notes"]:
            self._events.said(note)
        program = RankProgram(
            python="" if self._spec.entry.mode == "program" else answer["program"],
            inside=f"{RANK_DIR}/bootstrap.py",
            fork_server=f"{RANK_DIR}/fork_server.py",
            prefix=tuple(answer["prefix"]),
            environ={name: value for name, value in answer["set"].items() if name not in RANK_VARIABLES},
            unset=tuple(answer["unset"]),
            image=answer["digest"] or self._options.url,
        )
        facts = {name: answer[name] for name in ("how", "digest", "source_s", "root_s")}
        if self._resolved_s is not None:
            facts["resolved_s"] = round(self._resolved_s, 4)
        self._events.noted(StageSpan(self._began_ns, time.monotonic_ns(), facts, ""))
        if self._adapter is not None:
            self._reopened = program
            self._ask_to_show_from()
        for number, (paths, _) in self._showing.items():
            self._ask_to_show(number, paths)  # the last service has not answered
        if self._adapter is None:
            self._events.opened(program)

    def _on_end(self, why: str) -> None:
        self._service = None
        if self._state is State.FAILED:
            return
        if self._state is State.OPEN and self._loop.time() - self._opened_s > STABLE_S:
            self._services = 0
        if self._services >= MAX_SERVICES and self._is_mounted and not self._has_avoided:
            self._services -= 1
            self._avoid_mount = f"it was lost repeatedly: {self._why or why}"
        if self._services >= MAX_SERVICES:
            self._fail(f"opened {self._services} times, and lost repeatedly: {self._why or why}")
            return
        why, self._why = self._why or f"the image service failed: {why}", ""
        self._waiting.stop()
        self._reopened, is_showing_from, self._is_showing_from = None, self._is_showing_from, False
        hiding, self._hiding = self._hiding, []
        if self._state is State.OPEN and self._options.writable.startswith("/"):
            self._state = State.LOST
            self._lock_writable()
        if self._state is State.LOST and self._was_used and not self._showing and not is_showing_from:
            self._events.said(f"reopening the image before the next start of ranks: {why}")
        else:
            self._events.said(f"reopening the image: {why}")
            self._reopen()
        self._events.lost()
        for then in hiding:
            then()  # the mount has gone with the image

    def _reopen(self) -> None:
        if self._options.writable in self._locks:
            os.close(self._locks.pop(self._options.writable))  # the next service takes it
        self._open()

    def open_again(self) -> None:
        """Reopen a lost image at once, as another part needs it while no rank runs."""
        if self._state is State.LOST:
            self._reopen()

    def unreadable(self, why: str, *, is_damage: bool) -> None:
        """Unpack the image at the next opening, as it could not be read in the attempt that has ended.

        Keep it mounted if its data is damaged: then it cannot be unpacked, and ranks may not need that data.
        """
        if self._is_mounted and not is_damage and not self._has_avoided:
            self._avoid_mount = why

    def _lock_writable(self) -> None:
        """Lock the writable directory against other jobs while ranks use it; retry until the service frees it."""
        if self._state is State.LOST:
            self._lock(self._options.writable, is_shared=False)
            if self._options.writable not in self._locks:
                self._loop.call_later(LOCK_EVERY_S, self._lock_writable)

    def _lock(self, path: str, *, is_shared: bool) -> None:
        """Lock a path for the time without a service, as ranks continue; hold no lock if that fails."""
        import fcntl

        if path in self._locks:
            return
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return
        self._locks[path] = fd

    def _fail(self, why: str) -> None:
        self._waiting.stop()
        if self._state is not State.FAILED:
            self._state = State.FAILED
            self._events.noted(StageSpan(self._began_ns, time.monotonic_ns(), {}, why))
            self._events.failed(f"--image: {why}")

    # ---- attempts --------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether `show` may be called, which reopens a lost image."""
        return self._state in (State.OPEN, State.LOST) and self._reopened is None

    def show(self, paths: list[str], then: Callable[[list[str]], object]) -> None:
        """Make these paths of the node visible inside; call `then` with those that are not.

        Without paths, before ranks start: only reopen an image that was lost meanwhile.
        """
        self._asked += 1
        self._showing[self._asked] = paths, then
        if self._avoid_mount and self._state is State.OPEN:
            self._why = "reads of it have failed"
            self._restart_service(self._why)
        elif self._state is State.LOST:
            self._reopen()
        elif self._state is State.OPEN:
            self._ask_to_show(self._asked, paths)
            self._watch()

    def show_from(self, address: str, directories: Sequence[str], then: Callable[[str], object]) -> None:
        """Make mounts over these directories visible inside, through an adapter (`address`,
        bootseer.mounts.sandbox.process).

        Call `then` with the reason if that fails, else "". A reopened image shows them again and calls it again.
        """
        self._adapter, self._on_shown_from = (address, list(directories)), then
        if self._state is State.OPEN:
            self._ask_to_show_from()
            self._watch()
        elif self._state is State.LOST:
            self._reopen()

    def _ask_to_show_from(self) -> None:
        if self._service is not None and self._adapter is not None:
            self._is_showing_from = True
            self._show_ns = time.monotonic_ns()
            self._service.ask("show-from", address=self._adapter[0], folders=self._adapter[1])

    def _on_shown_from_answer(self, address: str, why: str) -> None:
        if self._adapter is None or self._adapter[0] != address:
            return  # of mounts that were replaced since
        self._is_showing_from = False
        self._events.show_noted(StageSpan(self._show_ns, time.monotonic_ns(), {}, why))
        program, self._reopened = self._reopened, None
        if why:
            self._adapter = None
            self._on_shown_from(why)  # before `opened` reports it as complete
        if program is not None:
            self._events.opened(program)
        if not why:
            self._on_shown_from("")

    def hide(self, then: Callable[[], object]) -> None:
        """Hide the mounts of `show_from`, now and after a reopening; then call `then`."""
        address, self._adapter = self._adapter, None
        if self._service is None or self._state is not State.OPEN or not (address or self._hiding):
            then()  # a later opening shows no mounts
            return
        self._is_showing_from = False  # that answer is not needed
        self._hiding.append(then)
        self._service.ask("hide", folders=[] if address is None else address[1])
        self._watch()

    def _take_hidden(self, why: str) -> None:
        if why:
            self._restart_service(f"it shows an environment that is no longer the job's: {why}")
            return
        then = self._hiding.pop(0)
        if self._adapter is None and self._reopened is not None:
            program, self._reopened = self._reopened, None
            self._events.opened(program)  # it does not wait for the mounts any more
        then()

    def _ask_to_show(self, number: int, paths: list[str]) -> None:
        if self._service is not None:
            self._service.ask("show", number=number, paths=paths)

    def first_step_seen(self) -> None:
        """Report the first step of all ranks of this node: the access trace of the start is complete."""
        if self._service is not None and self._state is State.OPEN:
            self._service.ask("first-step")

    def close(self) -> None:
        """End the service; processes inside the image continue."""
        self._waiting.stop()
        self._watchdog.cancel()
        if self._service is not None:
            self._service.close()
            self._service = None
        for fd in self._locks.values():
            os.close(fd)
        self._locks.clear()


# ---- variables of ranks --------------------------------------------------------------------------------------


def checkpoint_paths(checkpoint: Mapping[str, str], own: str) -> list[str]:
    """PURE: return the paths of this node that ranks may open by these variables. `own`: the version's path."""
    found = [checkpoint.get(name, "") for name in ("BOOTSEER_CHECKPOINT", *_ADDRESSES)]
    return [path for path in dict.fromkeys((*found, own)) if path.startswith("/")]


def reachable(checkpoint: Mapping[str, str], own: str, missing: Iterable[str]) -> tuple[dict[str, str], str]:
    """PURE: return the variables without paths that ranks cannot open, and a warning, "" for none."""
    hidden = set(missing)
    found = {name: value for name, value in checkpoint.items() if not (name in _ADDRESSES and value in hidden)}
    path = found.get("BOOTSEER_CHECKPOINT", "")
    if path not in hidden:
        return found, ""
    instead = own if own and own not in hidden else found.get("BOOTSEER_CHECKPOINT_URL", "")
    found["BOOTSEER_CHECKPOINT"] = instead
    return found, f"the checkpoint's files are not visible inside the image at {path}: ranks get {_shown(instead)}"


def without_files(checkpoint: Mapping[str, str], found: Mapping[str, str]) -> str:
    """PURE: return why no rank can start in the image, as the node's checkpoint is not visible there; else ""."""
    path = checkpoint.get("BOOTSEER_CHECKPOINT", "")
    if not path.startswith("/") or found.get("BOOTSEER_CHECKPOINT", "").startswith("/"):
        return ""
    return (
        f"the checkpoint's files are not visible inside the image at {path}, so ranks would train from scratch;"
        " bind its directory (--image-bind), or use --checkpoint-files off if ranks read it by Bootseer's loaders"
    )


def _shown(place: str) -> str:
    return place if place.startswith("/") else "its URL"


def figures_line(figures: Mapping[str, float]) -> str:
    """PURE: return a line with the reads of the start from its image; "" if they are unknown."""
    if "blocked_s" not in figures:
        return ""
    fetched = f"{format_bytes(figures.get('read_bytes', 0))} fetched in {figures.get('requests', 0):.0f} requests"
    blocks = figures.get("prefetch_blocks", 0) + figures.get("demand_blocks", 0)
    ahead = f", {figures.get('prefetch_blocks', 0) / blocks:.0%} prefetched" if blocks else ""
    recorded = "; recorded for the next start" if figures.get("recorded") else ""
    return f"image: {fetched}{ahead}; stall time {figures['blocked_s']:.2f} s{recorded}"


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""


def _script_directory(spec: LaunchSpec) -> str:
    """Return the directory of a script on this node; "" if the script is in the image."""
    if spec.entry.mode not in ("script", "run-path") and not spec.entry.target.startswith(("/", "./", "../")):
        return ""
    path = os.path.abspath(spec.entry.target)
    return os.path.dirname(path) if os.path.exists(path) else ""
