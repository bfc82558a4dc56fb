"""bootrun's side of the checkpoint: has its version resolved for the job, and loaded on this node for its ranks.

A separate process, the checkpoint service (bootseer/checkpoint/service/service.py), does the work: the launch path
imports no storage. In: --load-checkpoint, the version that the coordinator has pinned. Out: variables for the
ranks. Orders and answers (json_lines.py) use a socket that accepts only processes of the same user (the
supervisor). The service's standard streams are the other end. If the service fails, another one starts; the last
uses no memory. Ranks only get paths that can be opened. If there are none, no rank starts and the coordinator gets
the reason (CheckpointFailed); it decides whether to use an older version.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from bootseer.errors import LaunchError
from bootseer.ipc.unix_sockets import is_own
from bootseer.own_module import command_of
from launcher.base.json_lines import NOT_UNDERSTOOD, JsonLines
from launcher.base.loop import Alarm, EventLoop
from launcher.base.stage_span import StageSpan
from launcher.provision.checkpoint_version import Resolved, VersionChoice, own_path
from launcher.rendezvous.messages import CheckpointFailed, Pinned, RankFailed, World
from launcher.spec import LaunchSpec
from launcher.supervisor.client import SupervisorClient

if TYPE_CHECKING:
    from launcher.provision.peers import NodePeers

PROGRESS_EVERY_S = 5.0
# After the load. Compiling takes minutes; without a visible first step the job keeps the memory until its end.
FIRST_STEP_WARNING_S = 600.0
MAX_SERVICES = 4  # the last uses no memory: the kernel may have ended the others for lack of it
DAMAGED, AWAY = "damaged", "away"  # reasons that the service gives

Loaded = Callable[[dict[str, str]], object]


class NodeCheckpoint:
    """See the module's docstring; exists only with --load-checkpoint."""

    def __init__(
        self,
        loop: EventLoop,
        guard: SupervisorClient,
        spec: LaunchSpec,
        unset: tuple[str, ...],
        say: Callable[[str], object],
        fell_back: Callable[[str], object],
        noted: Callable[[StageSpan], object],
        peers: NodePeers | None = None,
        failed: Callable[[CheckpointFailed], object] = lambda _: None,
        passed: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Args: unset: variables to remove for the service; say: logs a line; fell_back: gets the reason why ranks
        read the files themselves; noted: gets the time of loading; peers: None: only the store is read; failed:
        gets the reason why ranks cannot load it; passed: gets the reason why a newer save is not used."""
        self._loop = loop
        self._supervisor = guard
        self._spec = spec
        self._unset = unset
        self._say = say
        self._fell_back = fell_back
        self._noted = noted
        self._peers = peers
        self._failed = failed
        self._watchdog = Alarm(loop)
        self._choice = VersionChoice(spec, say, passed, self._watchdog.cancel)  # at the coordinator
        self._restored = RestoredFiles(say)  # of failed services
        self._has_stepped = False  # in this attempt
        self._listener: socket.socket | None = None
        self._lines = JsonLines(loop, self._take, self._fail)  # a new one for each service process
        self._number = 0  # of the service process, counted from the first one
        self._why = ""  # why the service has ended or cannot start
        self._loaded: Loaded | None = None
        self._pinned: Pinned | None = None  # the version that is being loaded
        self._world: World | None = None  # the attempt that loads it
        self._path = ""  # the path that its ranks have
        self._attempt = -1  # that loads it
        self._began_ns = 0  # to load it
        self._saves = ""  # address at which savers in ranks leave their data
        self._reminder = Alarm(loop)  # warns of memory that no first step frees
        self._said_s = 0.0

    # ---- the service -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the service, which may prepare memory, at the launch."""
        self._lines = JsonLines(self._loop, self._take, self._fail)
        address = b"\0bootseer-keeper-" + os.urandom(16).hex().encode()
        try:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            self._listener.bind(address)
            self._listener.listen(1)
        except OSError as error:
            # Later, as the caller sends orders first.
            self._loop.call_soon(self.on_service_ended, self._number, f"it cannot be reached: {error.strerror}")
            return
        self._loop.add_reader(self._listener.fileno(), self._accept)
        argv = command_of("bootseer.checkpoint.service.service")
        self._supervisor.serve(self._number, argv, dict(self._spec.tuning), self._unset, address)
        spec, is_last = self._spec, self._number + 1 >= MAX_SERVICES
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

    def _ensure_service(self) -> bool:
        """Start another service if the last one has failed; return whether there is one."""
        if not self._why:
            return True
        if self._number + 1 >= MAX_SERVICES:
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
        if not is_own(connection):
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
        """Handle one answer. Act on it outside of the `try`: errors there are not the service's."""
        try:
            act = self._understand(answer)
        except (ValueError, KeyError, TypeError, OverflowError):
            self._fail(NOT_UNDERSTOOD)
            return
        if self._watchdog.is_set:
            self._watch()  # each message is a sign of life
        act()

    def _understand(self, answer: dict[str, Any]) -> Callable[[], object]:
        """Return the action that follows from an answer."""
        match answer["did"]:
            case "resolved":
                passed = [str(each) for each in answer.get("passed") or ()]
                pinned = Pinned(str(answer["version"]), str(answer["digest"]))
                return partial(self._choice.on_found, pinned, passed)
            case "absent":
                return partial(self._on_absent, str(answer["why"]), str(answer["kind"]))
            case "unresolved":
                return partial(self._choice.on_unresolved, str(answer["why"]), answer.get("older"))
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
                return partial(self._on_origin, str(answer["url"]), [str(each) for each in answer["folders"]])
            case "statistics":
                return partial(self._remind, int(answer["taken_bytes"]))
            case "said":
                return partial(self._say, str(answer["text"]))
        return lambda: None

    def _on_listening(self, saves: str, shown: str) -> None:
        self._saves, self._choice.shown = saves, shown

    def _on_origin(self, url: str, directories: list[str]) -> None:
        """Let peers know the origin that the service reads, and that it may read from other nodes."""
        if self._peers is not None:
            self._peers.add_origin(url, directories)

    def on_service_ended(self, number: int, why: str) -> None:
        """Handle the supervisor's event that a service has ended or cannot be started."""
        if number == self._number:
            self._fail(why)

    # ---- which version ---------------------------------------------------------------------------------------

    def resolve(self, then: Resolved) -> None:
        """Find the version that the next attempt loads, for the coordinator.

        Call `then` with it; with empty strings if there is none yet; or with the reason why the job must end, as
        training from scratch would lose its progress.
        """
        obstacle = self._choice.begin(then)
        if obstacle:
            self._loop.call_soon(self._choice.refuse, obstacle)
        elif not self._ensure_service():
            self._loop.call_soon(self._resolve_without)
        else:
            self._ask_version()

    def _ask_version(self) -> None:
        self._lines.ask("resolve", **self._choice.question())
        self._watch()

    def _on_absent(self, why: str, kind: str) -> None:
        if self._choice.on_absent(why, kind):
            self._ask_version()

    def _resolve_without(self) -> None:
        self._choice.on_no_service(self._why)

    def spoiled(self, message: CheckpointFailed | RankFailed) -> None:
        """Record, at the coordinator, a node that cannot load the version, or a rank that could not read it."""
        if isinstance(message, CheckpointFailed):
            self._choice.add_failed(message)
        elif message.attempt == self._attempt and not self._has_stepped:
            self._choice.add_unread(message.failure)

    # ---- loading ---------------------------------------------------------------------------------------------

    def load(self, world: World, then: Loaded) -> None:
        """Have this node's part of the version loaded, and call `then` with variables for the ranks.

        Raises: LaunchError if the nodes were started with different flags.
        """
        pinned = world.checkpoint
        self._attempt, self._has_stepped = world.attempt, False
        if pinned is None:
            if world.group_world_size > 1 or not self._why:
                raise LaunchError(
                    "--load-checkpoint is missing at the coordinator, which selects the version for all nodes;"
                    " start all nodes with it, or none"
                )
            self._disable("each rank reads the file itself")
            then(self._environ("", ""))
            return
        if not pinned.digest:
            self._say(self._choice.absent_line or "there is no checkpoint to load: the coordinator found none")
            then({**self._environ("", ""), "BOOTSEER_CHECKPOINT": ""})
            return
        self._pinned, self._world = pinned, world
        if not self._ensure_service():
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
        """Cancel the load of an attempt that is over, perhaps before its ranks started."""
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
            self._reminder.set(FIRST_STEP_WARNING_S, self._lines.ask, "statistics")
        environ = self._environ(path, address, self._pinned)
        self._path = environ["BOOTSEER_CHECKPOINT"] if environ["BOOTSEER_CHECKPOINT"].startswith("/") else ""
        then(environ)

    def _load_without(self, then: Loaded) -> None:
        """Let ranks read the files of this machine, as no service is left; report a failure if there are none."""
        assert self._pinned is not None
        path = own_path(self._spec.load_checkpoint, self._pinned.version)
        if os.path.exists(path):
            self._disable("each rank reads the files itself")
            then(self._environ("", "", self._pinned))
        else:
            self._report_failure(f"the checkpoint service has failed: {self._why}", is_damaged=False)

    def _on_failed(self, attempt: int, digest: str, kind: str, why: str) -> None:
        """Handle a version that ranks cannot load, or not completely."""
        if attempt != self._attempt or self._pinned is None or digest != self._pinned.digest:
            return
        self._loaded = None
        self._watchdog.cancel()
        if self._has_stepped:
            self._say(f"error: the checkpoint cannot be read any more: {why}")
        else:
            self._report_failure(why, is_damaged=kind == DAMAGED)

    @property
    def _is_needed(self) -> bool:
        """Whether ranks may still open files that a failed service has provided."""
        if self._world is None or self._pinned is None or self._has_stepped:
            return False
        return self._path not in ("", own_path(self._spec.load_checkpoint, self._pinned.version))

    def _restore_files(self, path: str, environ: dict[str, str]) -> None:
        """Restore the files under the path that ranks have."""
        self._path = path
        self._restored.link(path, environ["BOOTSEER_CHECKPOINT"])

    def _report_failure(self, why: str, *, is_damaged: bool) -> None:
        assert self._pinned is not None
        self._failed(CheckpointFailed(self._attempt, self._pinned.digest, is_damaged, why))

    # ---- freeing memory --------------------------------------------------------------------------------------

    def first_step_seen(self) -> None:
        """Free the memory: all ranks have made their first step and have read the checkpoint."""
        self._has_stepped = True
        self._reminder.cancel()
        if self._lines.is_open and (self._spec.checkpoint_disk_bytes or not self._spec.keep_arena):
            self._lines.ask("release")

    def _remind(self, taken_bytes: int) -> None:
        """Warn that the memory is still in use, as no first step was detected long after the start."""
        if not self._reminder.is_set or not taken_bytes:
            return
        self._reminder.cancel()
        self._say(
            f"warning: the checkpoint still takes {taken_bytes / 1e9:.1f} GB of this node's memory: no first step "
            f"of all ranks was detected in {FIRST_STEP_WARNING_S / 60:.0f} min. A step of a torch optimizer frees"
            " it, or bootseer.heartbeat(step) in each rank (not with --rank-hooks off, or without an events"
            " directory)"
        )

    def _environ(self, path: str, address: str, pinned: Pinned | None = None) -> dict[str, str]:
        return rank_variables(self._spec.load_checkpoint, path, address, "" if self._why else self._saves, pinned)

    # ---- failures and the end --------------------------------------------------------------------------------

    def _watch(self) -> None:
        from bootseer.tuning import current

        limit_s = current().launcher.checkpoint_silence_s
        self._watchdog.set(limit_s, self._fail, f"it has sent no message for {limit_s:g} s")

    def _fail(self, why: str) -> None:
        """Replace a failed service, or let ranks read the files themselves."""
        if self._why:
            return
        self._why = why
        self._leave_service()
        # A hanging service does not notice that its connection is closed, and ranks need its memory.
        self._supervisor.end_service(self._number)
        said = "the checkpoint service has failed"
        if not self._choice.is_due and self._loaded is None:
            if self._is_needed and self._ensure_service():
                assert self._world is not None and self._pinned is not None
                self._say(f"warning: {said}, another one restores its files: {why}")
                self._loaded = partial(self._restore_files, self._path)
                self._ask_load(self._world, self._pinned)
                self._watch()
            else:
                self._fell_back(f"{said}: {why}")
        elif self._ensure_service():
            self._say(f"warning: {said}, another one is started: {why}")
            if self._choice.is_due:
                self._ask_version()
            elif self._world is not None and self._pinned is not None:
                self._ask_load(self._world, self._pinned)
                self._watch()
        elif self._choice.is_due:
            self._resolve_without()
        elif self._loaded is not None:
            then, self._loaded = self._loaded, None
            self._load_without(then)

    def _disable(self, what: str) -> None:
        """Log and record that no service is left."""
        now_ns = time.monotonic_ns()
        self._noted(StageSpan(now_ns, now_ns, {}, self._why))
        self._fell_back(f"the checkpoint service has failed too often, {what}: {self._why}")

    def close(self) -> None:
        """End the service at the end of the job."""
        self._leave_service()
        self._restored.remove()

    def _leave_service(self) -> None:
        """Close the connection, which ends the service."""
        self._watchdog.cancel()
        self._reminder.cancel()
        self._stop_listening()
        self._lines.close()


def rank_variables(url: str, path: str, address: str, saves: str, pinned: Pinned | None) -> dict[str, str]:
    """PURE: return the ranks' variables about their checkpoint.

    Args: path: of its files, "" for those that the URL names; address: of its memory, "" for none; saves: the
        address at which savers leave their data, "" for none; pinned: None if no version was chosen.
    """
    if not path:
        path = own_path(url, "" if pinned is None else pinned.version)
    environ = {"BOOTSEER_CHECKPOINT": path or url, "BOOTSEER_CHECKPOINT_URL": url}
    if pinned is not None:
        environ.update(BOOTSEER_CHECKPOINT_VERSION=pinned.version, BOOTSEER_CHECKPOINT_DIGEST=pinned.digest)
    if address:
        environ["BOOTSEER_ARENA"] = address
    if saves:
        environ["BOOTSEER_SAVE_ARENA"] = saves
    return environ


class RestoredFiles:
    """Checkpoint files of failed services, restored as links under the paths that ranks have."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._paths: list[str] = []

    def link(self, path: str, target: str) -> None:
        """Have `path` lead to the files of the new service; log whether that has worked."""
        try:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            if os.path.islink(path):
                os.unlink(path)
            elif os.path.exists(path):
                os.rename(path, f"{path}.gone")
            os.symlink(target, path)
        except OSError as error:
            self._say(f"error: the checkpoint's files cannot be restored at {path}: {error.strerror}")
        else:
            self._paths.append(path)
            self._say(f"the checkpoint's files are restored at {path}")

    def remove(self) -> None:
        """Remove all links, at the end of the job."""
        paths, self._paths = self._paths, []
        for path in paths:
            try:
                os.unlink(path)
                os.removedirs(os.path.dirname(path))
            except OSError:
                pass  # another file has replaced it
