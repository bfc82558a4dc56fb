"""bootrun's side of the image: has it opened on this node, says how its ranks get inside, tells it of their start.

A process of its own, the keeper (bootseer/mounts/image_keeper.py), does the work: the launch path imports no
storage. In: --image and its like, what the job needs of this node. Out: a RankProgram, the first step's figures,
or one line why ranks cannot run: an image cannot be done without. When the keeper fails another one is started,
for the same tree, whatever its URL means by then; ranks that run go on. Where they write to a folder of the node
(--image-writable) it is started for the next attempt only: one folder cannot be below two roots.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from bootseer.mounts.binds import OWN_FOLDER
from bootseer.own_module import command_of
from launcher.image_options import ImageOptions
from launcher.loop import Alarm, EventLoop
from launcher.mounts import Mount
from launcher.ranks.command import INSIDE
from launcher.ranks.environ import RANK_VARIABLES
from launcher.ranks.program import IMPORT_WATCH, PRELOADED, RANK_VALUES, STORE_GATE, TRACER, RankProgram
from launcher.service import ServiceProcess
from launcher.spec import LaunchSpec
from launcher.stage_span import StageSpan

if TYPE_CHECKING:
    from launcher.peers import NodePeers

SAY_AFTER_S = 10.0
SAY_EVERY_S = 30.0
MOST_KEEPERS = 3  # one that fails again and again is not what this job needs
STABLE_S = 60.0  # one that has worked for so long does not count
# Without a word from a keeper that owes one. Unpacking says a line every 10 s; a store's retries take minutes.
OPEN_SILENCE_S = 900.0
SHOW_SILENCE_S = 180.0  # more than bootseer.mounts.holder waits
LOCK_EVERY_S = 0.2
RANK_FOLDER = f"{OWN_FOLDER}/rank"  # inside: our files for ranks
LISTING = f"{RANK_FOLDER}/list_distributions.py"
_LISTING_FILE = INSIDE.rpartition("/")[0] + "/rendezvous/list_distributions.py"
_ADDRESSES = ("BOOTSEER_ARENA", "BOOTSEER_SAVE_ARENA")


class State(Enum):
    NONE = "none"
    OPENING = "opening"
    OPEN = "open"
    LOST = "lost"  # to be opened anew before ranks start
    FAILED = "failed"


def _ignore(_: object) -> None:
    pass


class ImageEvents(NamedTuple):
    """What the node is told; each a callback."""

    resolved: Callable[[str], object]  # the tree's digest, "" for a folder; before it can be used
    opened: Callable[[RankProgram], object]  # again after a keeper has failed
    lost: Callable[[], object]  # nothing more can be started in it, until it is opened anew
    failed: Callable[[str], object]
    noted: Callable[[StageSpan], object]
    show_noted: Callable[[StageSpan], object]  # of `NodeImage.show_from`
    started: Callable[[Mapping[str, float]], object]  # figures, after the first step
    fell_back: Callable[[str], object]  # why it is opened in another way than it could be
    said: Callable[[str], object]  # a line for people
    mounted: Callable[[Mount | None], object]  # through what it is read from now on; None: it is unpacked


class NodeImage:
    """See the module's docstring; made only with --image."""

    def __init__(
        self,
        loop: EventLoop,
        spec: LaunchSpec,
        unset: tuple[str, ...],
        events: ImageEvents,
        peers: NodePeers | None = None,
    ) -> None:
        """Args: unset: variables that the keeper does not get; peers: None: it reads the store alone."""
        assert spec.image is not None
        self._loop = loop
        self._spec = spec
        self._options: ImageOptions = spec.image
        self._unset = unset
        self._events = events
        self._peers = peers
        self._own: list[str] = []
        self._state = State.NONE
        self._keeper: ServiceProcess | None = None
        self._keepers = 0
        self._began_ns = 0
        self._timer = Alarm(loop)
        self._showing: dict[int, tuple[list[str], Callable[[list[str]], object]]] = {}
        self._asked = 0
        self._door: tuple[str, list[str]] | None = None  # mounts that are seen inside, and whose they are
        self._on_shown_from: Callable[[str], object] = _ignore
        self._is_showing_from = False  # the keeper owes the answer
        self._show_ns = 0  # since when
        self._hiding: list[Callable[[], object]] = []  # one for each answer that it owes
        self._was_used = False  # ranks of this job may run in it
        self._reopened: RankProgram | None = None  # it is told of when these are seen again
        self._why = ""  # it is lost
        self._opened_s = 0.0
        self._resolved_s: float | None = None  # from the opening's begin until it was known what the image is
        self._digest = ""  # of the tree that ranks of this job have seen
        self._watchdog = Alarm(loop)
        self._is_mounted = False
        self._avoid_mount = ""  # why it is unpacked, if it can be, when it is opened next
        self._has_avoided = False
        self._locks: dict[str, int] = {}  # path -> descriptor, held until the job ends or the next keeper has it

    # ---- opening ---------------------------------------------------------------------------------------------

    def begin(self, own: Iterable[str]) -> None:
        """Time zero. Args: own: folders that ranks need in any case: logs, events."""
        self._own = [folder for folder in own if folder]
        self._open()

    def _open(self) -> None:
        self._state = State.OPENING
        self._began_ns = time.monotonic_ns()
        self._keepers += 1
        environ = {name: value for name, value in os.environ.items() if name not in self._unset}
        argv = command_of("bootseer.mounts.image_keeper")
        try:
            self._keeper = ServiceProcess(self._loop, argv, environ, self._take, self._on_end)
        except OSError as error:
            self._loop.call_soon(self._fail, f"the process that opens it cannot be started: {error.strerror}")
            return
        entry, options = self._spec.entry, self._options
        is_program = entry.mode == "program"
        names = (entry.target, "") if is_program else (options.pythons[0], entry.target)
        self._keeper.ask(
            "start",
            url=options.url,
            name=options.name,
            digest=self._digest,
            workload=names,
            writable=options.writable,
            given=options.binds,
            environ=options.environ,
            programs=options.pythons if not is_program or self._makes_venv() else [],
            work=[_working_directory(), _script_folder(self._spec), os.environ.get("HOME", "")],
            own=[*self._own, *self._more_own()],
            needs=[
                need
                for need, options in (("setup", self._spec.setup), ("caches", self._spec.caches))
                if options is not None
            ],
            parents=[] if self._spec.setup is None else [*map(os.path.dirname, self._spec.setup.targets)],
            cache_dirs=[] if self._spec.caches is None else [path for _, path in self._spec.caches.dirs],
            files={
                f"{RANK_FOLDER}/inside.py": INSIDE,
                f"{RANK_FOLDER}/preloaded.py": PRELOADED,
                f"{RANK_FOLDER}/tracer.py": TRACER,
                f"{RANK_FOLDER}/import_watch.py": IMPORT_WATCH,
                f"{RANK_FOLDER}/rank_values.py": RANK_VALUES,
                f"{RANK_FOLDER}/store_gate.py": STORE_GATE,
                LISTING: _LISTING_FILE,
            },
            peers="" if self._peers is None else self._peers.path,
            avoid_mount=self._avoid_mount,
        )
        self._has_avoided |= self._avoid_mount != ""
        self._timer.set(SAY_AFTER_S, self._say_waiting)
        self._watch()

    def _more_own(self) -> list[str]:
        """TMPDIR, where the arena's socket and links are, and the checkpoint's own folder."""
        found = [os.environ.get("TMPDIR", "")]
        if self._spec.load_checkpoint:
            from launcher.checkpoint import own_path

            path = own_path(self._spec.load_checkpoint, "")
            found.append(path if os.path.isdir(path) else os.path.dirname(path))
        return [folder for folder in found if folder.startswith("/") and folder != "/"]

    def _makes_venv(self) -> bool:
        """Set-up makes one by the image's interpreter."""
        return self._spec.setup is not None and not self._spec.setup.targets

    def _say_waiting(self) -> None:
        waited_s = (time.monotonic_ns() - self._began_ns) / 1e9
        self._events.said(f"still opening the image, for {waited_s:.0f} s")
        self._timer.set(SAY_EVERY_S, self._say_waiting)

    def _watch(self) -> None:
        """Counts anew how long the keeper says nothing, as long as it owes an answer."""
        self._watchdog.cancel()
        if self._keeper is None:
            return
        if self._state is State.OPENING:
            self._watchdog.set(OPEN_SILENCE_S, self._end_silent, OPEN_SILENCE_S)
        elif self._state is State.OPEN and (self._showing or self._is_showing_from or self._hiding):
            self._watchdog.set(SHOW_SILENCE_S, self._end_silent, SHOW_SILENCE_S)

    def _end_silent(self, limit_s: float) -> None:
        """It hangs, or is stopped. What an opening hangs on, the next one would hang on too."""
        why = f"the process that opens it has said nothing for {limit_s:g} s"
        if self._state is State.OPENING:
            self._kill_keeper()
            self._fail(f"{why}: does a file system of this node hang, of the cache or of the network?")
        else:
            self._end_keeper(why)

    def _kill_keeper(self) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.kill()

    def _end_keeper(self, why: str) -> None:
        """One that is of no use is followed by another one."""
        self._kill_keeper()
        self._on_end(why)

    # ---- what the keeper says --------------------------------------------------------------------------------

    def _take(self, answer: dict[str, Any]) -> None:
        self._understand(answer)
        self._watch()  # whoever speaks lives

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
                self._take_shown_from(answer["door"], answer["why"])
            case "hidden":
                self._take_hidden(answer["why"])
            case "shown":
                _, then = self._showing.pop(answer["number"])
                self._was_used = True
                then(answer["missing"])
            case "lost":
                self._why = "it cannot be read any more, as the process that serves its files has ended"
                self._events.lost()  # what is started in it fails from now on, before its keeper has ended
            case "statistics":
                self._events.started(answer["found"])

    def _on_ready(self, answer: dict[str, Any]) -> None:
        self._timer.cancel()
        if self._digest and answer["digest"] != self._digest:
            self._fail(f"it is tree {answer['digest']} by now, not {self._digest}, which the job began with")
            return
        self._digest = answer["digest"]
        if answer["lock"]:
            self._lock(answer["lock"], is_shared=True)
        self._state = State.OPEN
        self._opened_s = self._loop.time()
        mount = answer.get("mount")
        self._is_mounted, self._avoid_mount = bool(mount), ""
        self._events.mounted(Mount(*mount) if mount else None)
        for note in answer["notes"]:
            self._events.said(note)
        program = RankProgram(
            python="" if self._spec.entry.mode == "program" else answer["program"],
            inside=f"{RANK_FOLDER}/inside.py",
            preloaded=f"{RANK_FOLDER}/preloaded.py",
            prefix=tuple(answer["prefix"]),
            environ={name: value for name, value in answer["set"].items() if name not in RANK_VARIABLES},
            unset=tuple(answer["unset"]),
            image=answer["digest"] or self._options.url,
        )
        facts = {name: answer[name] for name in ("how", "digest", "source_s", "root_s")}
        if self._resolved_s is not None:
            facts["resolved_s"] = round(self._resolved_s, 4)
        self._events.noted(StageSpan(self._began_ns, time.monotonic_ns(), facts, ""))
        if self._door is not None:
            self._reopened = program
            self._ask_to_show_from()
        for number, (paths, _) in self._showing.items():
            self._ask_to_show(number, paths)  # the last keeper has not answered
        if self._door is None:
            self._events.opened(program)

    def _on_end(self, why: str) -> None:
        self._keeper = None
        if self._state is State.FAILED:
            return
        if self._state is State.OPEN and self._loop.time() - self._opened_s > STABLE_S:
            self._keepers = 0
        if self._keepers >= MOST_KEEPERS and self._is_mounted and not self._has_avoided:
            self._keepers -= 1
            self._avoid_mount = f"it was lost again and again: {self._why or why}"
        if self._keepers >= MOST_KEEPERS:
            self._fail(f"opened {self._keepers} times, and lost again and again: {self._why or why}")
            return
        why, self._why = self._why or f"the process that holds it has failed: {why}", ""
        self._timer.cancel()
        self._reopened, is_showing_from, self._is_showing_from = None, self._is_showing_from, False
        hiding, self._hiding = self._hiding, []
        if self._state is State.OPEN and self._options.writable.startswith("/"):
            self._state = State.LOST
            self._hold_folder()
        if self._state is State.LOST and self._was_used and not self._showing and not is_showing_from:
            self._events.said(f"the image is opened anew before the next start of ranks: {why}")
        else:
            self._events.said(f"the image is opened anew: {why}")
            self._reopen()
        self._events.lost()
        for then in hiding:
            then()  # with the image it has gone

    def _reopen(self) -> None:
        if self._options.writable in self._locks:
            os.close(self._locks.pop(self._options.writable))  # the next keeper takes it
        self._open()

    def open_again(self) -> None:
        """No rank runs, and something else needs it: one that was lost does not wait for their next start."""
        if self._state is State.LOST:
            self._reopen()

    def unreadable(self, why: str, *, is_damage: bool) -> None:
        """It could not be read while the last attempt ran, in which nothing runs any more.

        What is damaged cannot be unpacked either: then it stays as it is, for ranks that do without.
        """
        if self._is_mounted and not is_damage and not self._has_avoided:
            self._avoid_mount = why

    def _hold_folder(self) -> None:
        """No other job may have it while ranks still write to it; the keeper's end gives it free in a moment."""
        if self._state is State.LOST:
            self._lock(self._options.writable, is_shared=False)
            if self._options.writable not in self._locks:
                self._loop.call_later(LOCK_EVERY_S, self._hold_folder)

    def _lock(self, path: str, *, is_shared: bool) -> None:
        """For the time when no keeper holds it: ranks go on without one. Where it cannot be had there is none."""
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
        self._timer.cancel()
        if self._state is not State.FAILED:
            self._state = State.FAILED
            self._events.noted(StageSpan(self._began_ns, time.monotonic_ns(), {}, why))
            self._events.failed(f"--image: {why}")

    # ---- attempts --------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether it can be asked to show something; one that was lost is opened then."""
        return self._state in (State.OPEN, State.LOST) and self._reopened is None

    def show(self, paths: list[str], then: Callable[[list[str]], object]) -> None:
        """Has these paths of the node be seen inside; calls `then` with those that are not.

        Also without any, before ranks start: an image that was lost meanwhile is opened anew first.
        """
        self._asked += 1
        self._showing[self._asked] = paths, then
        if self._avoid_mount and self._state is State.OPEN:
            self._why = "reads of it have failed"
            self._end_keeper(self._why)
        elif self._state is State.LOST:
            self._reopen()
        elif self._state is State.OPEN:
            self._ask_to_show(self._asked, paths)
            self._watch()

    def show_from(self, door: str, folders: Sequence[str], then: Callable[[str], object]) -> None:
        """Has mounts over these folders, where a door leads (bootseer.mounts.holder), be seen inside.

        Calls `then` with why they are not, "" if they are. One that is opened anew shows them again, and calls
        `then` again.
        """
        self._door, self._on_shown_from = (door, list(folders)), then
        if self._state is State.OPEN:
            self._ask_to_show_from()
            self._watch()
        elif self._state is State.LOST:
            self._reopen()

    def _ask_to_show_from(self) -> None:
        if self._keeper is not None and self._door is not None:
            self._is_showing_from = True
            self._show_ns = time.monotonic_ns()
            self._keeper.ask("show-from", door=self._door[0], folders=self._door[1])

    def _take_shown_from(self, door: str, why: str) -> None:
        if self._door is None or self._door[0] != door:
            return  # of mounts that have been made anew since
        self._is_showing_from = False
        self._events.show_noted(StageSpan(self._show_ns, time.monotonic_ns(), {}, why))
        program, self._reopened = self._reopened, None
        if why:
            self._door = None
            self._on_shown_from(why)  # before it can be taken for complete
        if program is not None:
            self._events.opened(program)
        if not why:
            self._on_shown_from("")

    def hide(self, then: Callable[[], object]) -> None:
        """Has nothing of what `show_from` has shown be seen inside any more, now or later; then calls `then`."""
        door, self._door = self._door, None
        if self._keeper is None or self._state is not State.OPEN or not (door or self._hiding):
            then()  # what is opened later shows nothing
            return
        self._is_showing_from = False  # that answer is of no use
        self._hiding.append(then)
        self._keeper.ask("hide", folders=[] if door is None else door[1])
        self._watch()

    def _take_hidden(self, why: str) -> None:
        if why:
            self._end_keeper(f"it shows an environment that is no longer the job's: {why}")
            return
        then = self._hiding.pop(0)
        if self._door is None and self._reopened is not None:
            program, self._reopened = self._reopened, None
            self._events.opened(program)  # it does not wait any more for what was to be shown
        then()

    def _ask_to_show(self, number: int, paths: list[str]) -> None:
        if self._keeper is not None:
            self._keeper.ask("show", number=number, paths=paths)

    def first_step_seen(self) -> None:
        """All ranks of this node have made theirs: what the start needs of the image is known."""
        if self._keeper is not None and self._state is State.OPEN:
            self._keeper.ask("first-step")

    def close(self) -> None:
        """What still runs inside goes on."""
        self._timer.cancel()
        self._watchdog.cancel()
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None
        for fd in self._locks.values():
            os.close(fd)
        self._locks.clear()


# ---- what ranks are told -------------------------------------------------------------------------------------


def checkpoint_paths(checkpoint: Mapping[str, str], own: str) -> list[str]:
    """PURE: the paths of this node that ranks may open by these variables. `own`: the version's own path."""
    found = [checkpoint.get(name, "") for name in ("BOOTSEER_CHECKPOINT", *_ADDRESSES)]
    return [path for path in dict.fromkeys((*found, own)) if path.startswith("/")]


def reachable(checkpoint: Mapping[str, str], own: str, missing: Iterable[str]) -> tuple[dict[str, str], str]:
    """PURE: the variables without paths that ranks cannot open, and a line about it, "" for none."""
    hidden = set(missing)
    found = {name: value for name, value in checkpoint.items() if not (name in _ADDRESSES and value in hidden)}
    path = found.get("BOOTSEER_CHECKPOINT", "")
    if path not in hidden:
        return found, ""
    instead = own if own and own not in hidden else found.get("BOOTSEER_CHECKPOINT_URL", "")
    found["BOOTSEER_CHECKPOINT"] = instead
    return found, f"the checkpoint's files are not seen inside the image at {path}: ranks get {_shown(instead)}"


def without_files(checkpoint: Mapping[str, str], found: Mapping[str, str]) -> str:
    """PURE: why no rank can be started in the image: it would find no files where the node has some; "" else."""
    path = checkpoint.get("BOOTSEER_CHECKPOINT", "")
    if not path.startswith("/") or found.get("BOOTSEER_CHECKPOINT", "").startswith("/"):
        return ""
    return (
        f"the checkpoint's files are not seen inside the image at {path}, so ranks would begin from nothing: bind"
        " its folder (--image-bind), or --checkpoint-files off where ranks read it by Bootseer's loaders"
    )


def _shown(place: str) -> str:
    return place if place.startswith("/") else "its URL"


def figures_line(figures: Mapping[str, float]) -> str:
    """PURE: what the start read of its image, in one line; "" where nothing is known."""
    if "blocked_s" not in figures:
        return ""
    fetched = f"{figures.get('read_bytes', 0) / 1e6:.0f} MB fetched in {figures.get('requests', 0):.0f} requests"
    blocks = figures.get("prefetch_blocks", 0) + figures.get("demand_blocks", 0)
    ahead = f", {figures.get('prefetch_blocks', 0) / blocks:.0%} of it ahead" if blocks else ""
    recorded = "; recorded for the next start" if figures.get("recorded") else ""
    return f"image: {fetched}{ahead}; the start waited {figures['blocked_s']:.2f} s for it{recorded}"


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""


def _script_folder(spec: LaunchSpec) -> str:
    """Of a script that is on this node; another one is in the image."""
    if spec.entry.mode not in ("script", "run-path") and not spec.entry.target.startswith(("/", "./", "../")):
        return ""
    path = os.path.abspath(spec.entry.target)
    return os.path.dirname(path) if os.path.exists(path) else ""
