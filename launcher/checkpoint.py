"""bootrun's side of the checkpoint: has its version found for the job, and this node's copy loaded for its ranks.

A process of its own, the keeper (bootseer/checkpoint/keeper.py), does the work: the launch path imports no
storage. In: --load-checkpoint, the version that the coordinator has pinned. Out: variables for the ranks. Orders
and answers (lines.py) go over a socket to which only processes of the same user, the guard among them, connect;
the keeper's standard streams are its other end. When the keeper fails, another one is started; the last takes no
memory. What ranks are told names files that open: where there are none, no rank is started, and the coordinator
is told why (CheckpointFailed). It decides whether an older version will do.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from bootseer.errors import LaunchError
from bootseer.own_module import command_of
from launcher.guard_client import GuardClient
from launcher.lines import NOT_UNDERSTOOD, JsonLines
from launcher.loop import Alarm, EventLoop
from launcher.rendezvous.messages import CheckpointFailed, Failure, Pinned, RankFailed, World
from launcher.spec import LaunchSpec
from launcher.stage_span import StageSpan

if TYPE_CHECKING:
    from launcher.peers import NodePeers

SILENCE_LIMIT_S = 90.0  # while it owes an answer; it gives a sign of life every 10 s
PROGRESS_EVERY_S = 5.0
# After the load. Compiling takes minutes; a job that never shows a first step keeps the memory for its life.
MOST_PASSED = 8  # lines about newer saves that are not whole
FIRST_STEP_SAY_S = 600.0
MOST_KEEPERS = 4  # the last takes no memory: for want of it the kernel may have ended the others
DAMAGED, AWAY = "damaged", "away"  # as the keeper says why
MISPLACED = "misplaced"  # nothing can be there: a typo

_STRIPED = re.compile(r"(.*/)?(v-)?[0-9]{20}-[0-9a-f]{12}")  # docs/formats.md; its files are no files of users

Resolved = Callable[[Pinned | None, str], object]
Loaded = Callable[[dict[str, str]], object]


def own_path(url: str, version: str) -> str:
    """PURE: what code that opens files finds this version by without the keeper.

    Its path on a file system of this machine; the URL where there is none: of another store, of a striped version.
    """
    if _STRIPED.fullmatch(version):
        return url
    path = url
    if not url.startswith("/"):
        scheme, _, place = url.partition("://")
        host, _, rest = place.partition("/")
        if scheme.lower() not in ("file", "local") or host not in ("", "localhost") or "::" in place:
            return url
        from urllib.parse import unquote

        path = "/" + unquote(rest)
    return os.path.join(path, version) if version else path


# What loaders say of a file that ends too early or is none of theirs; old pickles tell only by being read.
_LOAD_ERROR = re.compile(
    r"PytorchStreamReader failed|SafetensorError|pickle data was truncated|Ran out of input|invalid load key|"
    r"unexpected EOF|UnpicklingError|BadZipFile"
)


def load_error(failure: Failure) -> str:
    """PURE: the line by which a rank says that it could not read a checkpoint; "" where it says nothing of it."""
    lines = [*failure.message.splitlines(), *failure.traceback.splitlines(), *failure.stderr_tail]
    return next((line.strip()[:200] for line in reversed(lines) if _LOAD_ERROR.search(line)), "")


class Bad(NamedTuple):
    """A version that could not be had, at the coordinator."""

    version: str
    why: str
    is_damaged: bool


def damage_line(shown: str, bad: Bad, older: str) -> str:
    """PURE: what ends the job, and the ways out. `shown`: the URL without what is secret."""
    what = f"version {bad.version or 'itself'} cannot be loaded: {bad.why}"
    if not bad.is_damaged:
        return what
    verify = f"`bootseer ckpt verify {shlex.quote(shown)}` looks at all of it"
    if older:
        return f"{what}; {verify}; {older} is older and complete: --checkpoint-fallback older takes it"
    return f"{what}; {verify}; there is no older complete version"


class NodeCheckpoint:
    """See the module's docstring; made only with --load-checkpoint."""

    def __init__(
        self,
        loop: EventLoop,
        guard: GuardClient,
        spec: LaunchSpec,
        unset: tuple[str, ...],
        say: Callable[[str], object],
        fell_back: Callable[[str], object],
        noted: Callable[[StageSpan], object],
        peers: NodePeers | None = None,
        failed: Callable[[CheckpointFailed], object] = lambda _: None,
        passed: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Args: unset: variables that the keeper does not get; say: a line for people; fell_back: told why ranks
        read for themselves; noted: told how long loading took; peers: None: it reads the store alone; failed: told
        why ranks cannot have it; passed: why a newer save is not taken."""
        self._loop = loop
        self._guard = guard
        self._spec = spec
        self._unset = unset
        self._say = say
        self._fell_back = fell_back
        self._noted = noted
        self._peers = peers
        self._failed = failed
        self._passed = passed
        self._told: set[str] = set()  # what was said of saves that are not taken
        self._bad: dict[str, Bad] = {}  # by digest; at the coordinator
        self._replaced: list[Bad] = []  # for which another version was taken
        self._unread: dict[str, Bad] = {}  # by digest: ranks could not read it, and nobody knows why
        self._version = Pinned("", "")  # that was found last; at the coordinator
        self._has_stepped = False  # in this attempt
        self._listener: socket.socket | None = None
        self._lines = JsonLines(loop, self._take, self._fail)  # another one for each keeper
        self._number = 0  # of the keeper among the guard's services, counted from the first one
        self._why = ""  # the keeper is gone, or never came
        self._shown = ""  # the URL without what is secret; the keeper knows what that is
        self._resolved: Resolved | None = None
        self._absent = ""  # what was said when nothing was found to load
        self._loaded: Loaded | None = None
        self._pinned: Pinned | None = None  # what is being loaded
        self._world: World | None = None  # the attempt that loads it
        self._path = ""  # that ranks of it were given
        self._brought: list[str] = []  # paths of keepers that have failed
        self._attempt = -1  # that loads it
        self._began_ns = 0  # to load it
        self._saves = ""  # where savers in ranks leave what they write
        self._watchdog = Alarm(loop)
        self._reminder = Alarm(loop)  # of memory that no first step gives back
        self._said_s = 0.0

    # ---- the keeper ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Time zero: starts the keeper, which may make memory ready."""
        self._lines = JsonLines(self._loop, self._take, self._fail)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        address = b"\0bootseer-keeper-" + os.urandom(16).hex().encode()
        self._listener.bind(address)
        self._listener.listen(1)
        self._loop.add_reader(self._listener.fileno(), self._accept)
        argv = command_of("bootseer.checkpoint.keeper")
        self._guard.serve(self._number, argv, {}, self._unset, address)
        spec, is_last = self._spec, self._number + 1 >= MOST_KEEPERS
        self._lines.ask(
            "start",
            url=spec.load_checkpoint,
            local_world_size=spec.nproc,
            nodes=spec.max_nodes,
            memory_bytes=0 if is_last else spec.checkpoint_memory_bytes,
            arena_bytes=0 if is_last else spec.arena_bytes,
            shows_url=not spec.checkpoint_files,
            disk_bytes=spec.checkpoint_disk_bytes,
            keep=spec.keep_arena,
            peers="" if self._peers is None else self._peers.path,
        )

    def _has_keeper(self) -> bool:
        """Starts another one if the last one has failed."""
        if not self._why:
            return True
        if self._number + 1 >= MOST_KEEPERS:
            return False
        self._number += 1
        self._why = self._saves = ""
        self.begin()
        return True

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(f"it cannot be reached: {error.strerror}")
            return
        _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.geteuid():
            connection.close()
            return
        self._stop_listening()
        self._lines.open(connection)

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None

    def _take(self, answer: dict[str, Any]) -> None:
        """One answer. What follows from it is outside the `try`: its errors are not the keeper's."""
        try:
            act = self._understand(answer)
        except (ValueError, KeyError, TypeError):
            self._fail(NOT_UNDERSTOOD)
            return
        if self._watchdog.is_set:
            self._watch()  # whoever speaks lives
        act()

    def _understand(self, answer: dict[str, Any]) -> Callable[[], object]:
        """What one answer has this object do."""
        match answer["did"]:
            case "resolved":
                passed = [str(each) for each in answer.get("passed") or ()]
                return partial(self._on_found, Pinned(str(answer["version"]), str(answer["digest"])), passed)
            case "absent":
                return partial(self._on_absent, str(answer["why"]), str(answer["kind"]))
            case "unresolved":
                return partial(self._on_unresolved, str(answer["why"]), answer.get("older"))
            case "progress":
                done_bytes, of_bytes = int(answer["bytes"]), int(answer["of_bytes"])
                return partial(self._on_progress, int(answer["attempt"]), done_bytes, of_bytes)
            case "ready":
                found = (str(answer["path"]), str(answer["address"]))
                disk_bytes = int(answer["disk_bytes"])
                return partial(self._on_loaded, int(answer["attempt"]), *found, disk_bytes=disk_bytes)
            case "direct":
                path, why = str(answer.get("path") or ""), str(answer["why"])
                return partial(self._on_loaded, int(answer["attempt"]), path, "", why)
            case "failed":
                where, kind = (int(answer["attempt"]), str(answer["digest"])), str(answer["kind"])
                return partial(self._on_failed, *where, kind, str(answer["why"]))
            case "listening":
                return partial(self._on_listening, str(answer["saves"]), str(answer["shown"]))
            case "origin":
                return partial(self._on_origin, str(answer["url"]), list(answer["folders"]))
            case "statistics":
                return partial(self._remind, int(answer["taken_bytes"]))
            case "said":
                return partial(self._say, str(answer["text"]))
        return lambda: None

    def _on_listening(self, saves: str, shown: str) -> None:
        self._saves, self._shown = saves, shown

    def _on_origin(self, url: str, folders: list[str]) -> None:
        """What the keeper reads now and may read from other nodes."""
        if self._peers is not None:
            self._peers.add_origin(url, folders)

    def on_service_ended(self, number: int, why: str) -> None:
        """The guard says that a keeper is gone, or cannot be started."""
        if number == self._number:
            self._fail(why)

    # ---- which version ---------------------------------------------------------------------------------------

    def resolve(self, then: Resolved) -> None:
        """For the coordinator: finds the version that the next attempt loads.

        Calls `then` with it; with empty strings if there is none yet; with why the job must end, as a start from
        nothing would lose what it has.
        """
        self._resolved = then
        last = next(reversed(self._bad.values()), None)
        if last is not None and not last.is_damaged:
            self._loop.call_soon(self._on_unresolved, damage_line(self._shown, last, ""))
        elif not self._has_keeper():
            self._loop.call_soon(self._resolve_without)
        else:
            self._ask_version()

    def _ask_version(self) -> None:
        # Also without --checkpoint-fallback: to tell which older version there is.
        falls_back = bool(self._bad) or self._falls_back
        self._lines.ask("resolve", without=[*self._bad, *self._unread], falls_back=falls_back)
        self._watch()

    @property
    def _falls_back(self) -> bool:
        return self._spec.checkpoint_fallback == "older"

    def spoiled(self, message: CheckpointFailed | RankFailed) -> None:
        """At the coordinator: a node cannot have the version that the attempt loads, or a rank has failed."""
        if isinstance(message, RankFailed):
            failure, digest = message.failure, self._version.digest
            is_ours = digest and message.attempt == self._attempt and not self._has_stepped
            why = load_error(failure) if is_ours else ""
            if why and not _STRIPED.fullmatch(self._version.version):  # of those each byte was checked
                text = f"rank {failure.rank} could not read it: {why}"
                self._unread[digest] = Bad(self._version.version, text, True)
            return
        version = self._version.version if self._version.digest == message.digest else ""
        self._bad[message.digest] = Bad(version, message.text, message.is_damaged)

    def _on_found(self, pinned: Pinned, passed: list[str]) -> None:
        for line in passed[:MOST_PASSED]:
            if line not in self._told:
                self._told.add(line)
                self._passed(f"the checkpoint is {pinned.version or 'the folder itself'}, not a newer one: {line}")
        last = next(reversed(self._bad.values()), None)
        if last is None:
            last = next(reversed(self._unread.values()), None)
        elif not self._falls_back:
            self._on_unresolved(damage_line(self._shown, last, pinned.version or "another version"))
            return
        if last is not None and last not in self._replaced:
            self._replaced.append(last)
            self._say(
                f"warning: an older version of the checkpoint is taken, {pinned.version}, as {last.version} cannot"
                f" be loaded: {last.why}"
            )
        self._version = pinned
        self._on_resolved(pinned, "")

    def _on_unresolved(self, why: str, older: object = None) -> None:
        """Args: older: for a damaged version, what is complete instead, "" for nothing; else None."""
        if isinstance(older, str):
            why = damage_line(self._shown, Bad("", why, True), older).partition(": ")[2]
        self._on_resolved(None, why)

    def _on_resolved(self, pinned: Pinned | None, why: str) -> None:
        then, self._resolved = self._resolved, None
        self._watchdog.cancel()
        if then is not None:
            name = f"--load-checkpoint {self._shown}".rstrip()
            then(pinned, f"{name}: {why}" if why else "")

    def _on_absent(self, why: str, kind: str) -> None:
        last = next(reversed(self._bad.values()), None)
        if last is not None:
            self._on_unresolved(damage_line(self._shown, last, ""))
            return
        if self._unread:  # the only one: it may be read this time
            self._unread = {}
            self._ask_version()
            return
        if kind == MISPLACED:
            self._on_unresolved(why)
            return
        if self._spec.require_checkpoint:
            self._on_unresolved(f"{why}; --require-checkpoint is given: leave it out where a start is meant")
            return
        if kind == "unusable":
            self._absent = f"warning: the job starts from nothing, as no checkpoint can be loaded: {why}"
        else:
            self._absent = f"there is no checkpoint yet, so the job starts from nothing: {self._shown}"
        self._on_resolved(Pinned("", ""), "")

    def _resolve_without(self) -> None:
        """Keepers have failed. A plain file is its own version; of all else nobody knows which one is meant."""
        if self._spec.max_nodes == 1 and os.path.isfile(own_path(self._spec.load_checkpoint, "")):
            self._on_resolved(None, "")
            return
        self._on_resolved(
            None,
            f"the process that finds its version has failed on {os.uname().nodename}: {self._why}; "
            "start the job again, or without --load-checkpoint, with ranks that are told what to load",
        )

    # ---- loading ---------------------------------------------------------------------------------------------

    def load(self, world: World, then: Loaded) -> None:
        """Has this node's part of the version loaded and calls `then` with variables for the ranks.

        Raises: LaunchError where the nodes were started with different flags.
        """
        pinned = world.checkpoint
        self._attempt, self._has_stepped = world.attempt, False
        if pinned is None:
            if world.group_world_size > 1 or not self._why:
                raise LaunchError(
                    "--load-checkpoint is missing at the coordinator, so nobody says which version all nodes load:"
                    " start all nodes with it, or none"
                )
            self._go_without("each rank reads the file")
            then(self._environ("", ""))
            return
        if not pinned.digest:
            self._say(self._absent or "there is no checkpoint to load: the coordinator has found none")
            then({**self._environ("", ""), "BOOTSEER_CHECKPOINT": ""})
            return
        self._pinned, self._world = pinned, world
        if not self._has_keeper():
            self._load_without(then)
            return
        self._loaded = then
        self._said_s = self._loop.time()
        self._began_ns = time.monotonic_ns()
        self._ask_load(world, pinned)

    def _ask_load(self, world: World, pinned: Pinned) -> None:
        self._lines.ask(
            "load",
            version=pinned.version,
            digest=pinned.digest,
            world_size=world.world_size,
            group_rank=world.group_rank,
            nnodes=world.group_world_size,
            attempt=world.attempt,
        )
        self._watch()

    def cancel(self) -> None:
        """The attempt is over; it may have been stopped before its ranks were started."""
        self._attempt, self._world, self._path = -1, None, ""
        self._reminder.cancel()
        if self._loaded is not None:
            self._loaded = None
            self._watchdog.cancel()

    def _on_progress(self, attempt: int, done_bytes: int, of_bytes: int) -> None:
        now_s = self._loop.time()
        if attempt == self._attempt and self._loaded is not None and now_s - self._said_s >= PROGRESS_EVERY_S:
            self._said_s = now_s
            self._say(f"loading the checkpoint: {done_bytes / 1e9:.1f} of {of_bytes / 1e9:.1f} GB")

    def _on_loaded(self, attempt: int, path: str, address: str, why: str = "", disk_bytes: int = 0) -> None:
        then = self._loaded
        if then is None or attempt != self._attempt:
            return
        self._loaded = None
        self._watchdog.cancel()
        pinned, failure = self._pinned, self._why
        facts: dict[str, object] = {
            "version": "" if pinned is None else pinned.version,
            "how": "memory" if address else "files",
        }
        if disk_bytes:
            facts["disk_bytes"] = disk_bytes
        self._noted(StageSpan(self._began_ns, time.monotonic_ns(), {} if failure else facts, failure))
        if why:
            self._fell_back(f"the checkpoint is not shared on this node: {why}")
        if address and not self._spec.keep_arena:
            self._reminder.set(FIRST_STEP_SAY_S, self._lines.ask, "statistics")
        environ = self._environ(path, address, self._pinned)
        self._path = environ["BOOTSEER_CHECKPOINT"] if environ["BOOTSEER_CHECKPOINT"].startswith("/") else ""
        then(environ)

    def _load_without(self, then: Loaded) -> None:
        """No keeper is left: the files have to be on this machine as they are."""
        assert self._pinned is not None
        path = own_path(self._spec.load_checkpoint, self._pinned.version)
        if os.path.exists(path):
            self._go_without("ranks read it for themselves")
            then(self._environ("", "", self._pinned))
        else:
            self._tell_failed(f"the process that keeps it has failed: {self._why}", is_damaged=False)

    def _on_failed(self, attempt: int, digest: str, kind: str, why: str) -> None:
        """Ranks cannot have it, or not all of it."""
        if attempt != self._attempt or self._pinned is None or digest != self._pinned.digest:
            return
        self._loaded = None
        self._watchdog.cancel()
        if self._has_stepped:
            self._say(f"error: the checkpoint cannot be read any more: {why}")
        else:
            self._tell_failed(why, is_damaged=kind == DAMAGED)

    @property
    def _is_needed(self) -> bool:
        """Whether ranks may still look for files that went with their keeper."""
        if self._world is None or self._pinned is None or self._has_stepped:
            return False
        return self._path not in ("", own_path(self._spec.load_checkpoint, self._pinned.version))

    def _bring_back(self, path: str, environ: dict[str, str]) -> None:
        """Under the path that ranks were given."""
        self._path = path
        try:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            if os.path.islink(path):
                os.unlink(path)
            elif os.path.exists(path):
                os.rename(path, f"{path}.gone")
            os.symlink(environ["BOOTSEER_CHECKPOINT"], path)
        except OSError as error:
            self._say(f"error: the checkpoint's files cannot be brought back to {path}: {error.strerror}")
        else:
            self._brought.append(path)
            self._say(f"the checkpoint's files are back at {path}")

    def _forget_brought(self) -> None:
        brought, self._brought = self._brought, []
        for path in brought:
            try:
                os.unlink(path)
                os.removedirs(os.path.dirname(path))
            except OSError:
                pass  # something else is there by now

    def _tell_failed(self, why: str, *, is_damaged: bool) -> None:
        assert self._pinned is not None
        self._failed(CheckpointFailed(self._attempt, self._pinned.digest, is_damaged, why))

    # ---- giving it back --------------------------------------------------------------------------------------

    def first_step_seen(self) -> None:
        """All ranks have made their first step: they have what they need."""
        self._has_stepped = True
        self._reminder.cancel()
        if self._lines.is_open and (self._spec.checkpoint_disk_bytes or not self._spec.keep_arena):
            self._lines.ask("release")

    def _remind(self, taken_bytes: int) -> None:
        """Long after the start nobody has seen a first step."""
        if not self._reminder.is_set or not taken_bytes:
            return
        self._reminder.cancel()
        self._say(
            f"warning: the checkpoint still takes {taken_bytes / 1e9:.1f} GB of this node's memory: no first step "
            f"of all ranks was seen in {FIRST_STEP_SAY_S / 60:.0f} min. A torch optimizer's first step gives it"
            " back, or bootseer.heartbeat(step) in each rank (not with --rank-hooks off, or without an events"
            " folder)"
        )

    def _environ(self, path: str, address: str, pinned: Pinned | None = None) -> dict[str, str]:
        url = self._spec.load_checkpoint
        if not path:
            path = own_path(url, "" if pinned is None else pinned.version)
        environ = {"BOOTSEER_CHECKPOINT": path or url, "BOOTSEER_CHECKPOINT_URL": url}
        if pinned is not None:
            environ.update(BOOTSEER_CHECKPOINT_VERSION=pinned.version, BOOTSEER_CHECKPOINT_DIGEST=pinned.digest)
        if address:
            environ["BOOTSEER_ARENA"] = address
        if self._saves and not self._why:
            environ["BOOTSEER_SAVE_ARENA"] = self._saves
        return environ

    # ---- trouble and the end ---------------------------------------------------------------------------------

    def _watch(self) -> None:
        self._watchdog.set(SILENCE_LIMIT_S, self._fail, f"it has said nothing for {SILENCE_LIMIT_S:g} s")

    def _fail(self, why: str) -> None:
        """Without the keeper ranks read for themselves."""
        if self._why:
            return
        self._why = why
        self._leave_keeper()
        # One that hangs does not see that its connection is closed, and ranks need the memory that it holds.
        self._guard.end_service(self._number)
        said = "the process that keeps the checkpoint has failed"
        if self._resolved is None and self._loaded is None:
            if self._is_needed and self._has_keeper():
                assert self._world is not None and self._pinned is not None
                self._say(f"warning: {said}, another one brings back its files: {why}")
                self._loaded = partial(self._bring_back, self._path)
                self._ask_load(self._world, self._pinned)
                self._watch()
            else:
                self._fell_back(f"{said}: {why}")
        elif self._has_keeper():
            self._say(f"warning: {said}, another one is started: {why}")
            if self._resolved is not None:
                self._ask_version()
            elif self._world is not None and self._pinned is not None:
                self._ask_load(self._world, self._pinned)
                self._watch()
        elif self._resolved is not None:
            self._resolve_without()
        elif self._loaded is not None:
            then, self._loaded = self._loaded, None
            self._load_without(then)

    def _go_without(self, what: str) -> None:
        """No keeper is left that could be asked."""
        now_ns = time.monotonic_ns()
        self._noted(StageSpan(now_ns, now_ns, {}, self._why))
        self._fell_back(f"processes that keep the checkpoint have failed, {what}: {self._why}")

    def close(self) -> None:
        """The job is over."""
        self._leave_keeper()
        self._forget_brought()

    def _leave_keeper(self) -> None:
        """It ends when its connection does."""
        self._watchdog.cancel()
        self._reminder.cancel()
        self._stop_listening()
        self._lines.close()
