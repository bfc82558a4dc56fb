"""bootrun's side of the checkpoint: has its version found for the job, and this node's copy loaded for its ranks.

A process of its own, the keeper (bootseer/checkpoint/keeper.py), does the work: the launch path imports no
storage. In: --load-checkpoint, the version that the coordinator has pinned. Out: variables for the ranks. Orders
and answers (lines.py) go over a socket to which only processes of the same user, the guard among them, connect;
the keeper's standard streams are its other end. When the keeper fails, ranks get the version's own path or the URL
and read for themselves; another one is started when the next thing is asked of it.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from launcher.guard_client import GuardClient
from launcher.lines import NOT_UNDERSTOOD, JsonLines
from launcher.loop import Alarm, EventLoop
from launcher.rendezvous.messages import Pinned, World
from launcher.spec import LaunchSpec
from launcher.stage_span import StageSpan

if TYPE_CHECKING:
    from launcher.peers import NodePeers

SILENCE_LIMIT_S = 90.0  # while it owes an answer; it gives a sign of life every 10 s
PROGRESS_EVERY_S = 5.0
# After the load. Compiling takes minutes; a job that never shows a first step keeps the memory for its life.
FIRST_STEP_SAY_S = 600.0
MOST_KEEPERS = 3  # one that fails again and again is not what this job needs

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
    ) -> None:
        """Args: unset: variables that the keeper does not get; say: a line for people; fell_back: told why ranks
        read for themselves; noted: told how long loading took; peers: None: it reads the store alone."""
        self._loop = loop
        self._guard = guard
        self._spec = spec
        self._unset = unset
        self._say = say
        self._fell_back = fell_back
        self._noted = noted
        self._peers = peers
        self._listener: socket.socket | None = None
        self._lines = JsonLines(loop, self._take, self._fail)  # another one for each keeper
        self._number = 0  # of the keeper among the guard's services, counted from the first one
        self._why = ""  # the keeper is gone, or never came
        self._shown = ""  # the URL without what is secret; the keeper knows what that is
        self._resolved: Resolved | None = None
        self._absent = ""  # what was said when nothing was found to load
        self._loaded: Loaded | None = None
        self._pinned: Pinned | None = None  # what is being loaded
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
        argv = [sys.executable, "-P", "-m", "bootseer.checkpoint.keeper"]
        self._guard.serve(self._number, argv, {}, self._unset, address)
        spec = self._spec
        self._lines.ask(
            "start",
            url=spec.load_checkpoint,
            local_world_size=spec.nproc,
            nodes=spec.max_nodes,
            memory_bytes=spec.checkpoint_memory_bytes,
            arena_bytes=spec.arena_bytes,
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
                return partial(self._on_resolved, Pinned(str(answer["version"]), str(answer["digest"])), "")
            case "absent":
                return partial(self._on_absent, str(answer["why"]), str(answer["kind"]))
            case "unresolved":
                return partial(self._on_resolved, None, str(answer["why"]))
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
        nothing would lose what it has; with None if the keeper has failed and ranks look for themselves. Those of
        one node only: of several nodes, each at its own time, they could load different ones.
        """
        self._resolved = then
        if not self._has_keeper():
            self._loop.call_soon(self._resolve_without)
            return
        self._lines.ask("resolve")
        self._watch()

    def _on_resolved(self, pinned: Pinned | None, why: str) -> None:
        then, self._resolved = self._resolved, None
        self._watchdog.cancel()
        if then is not None:
            name = f"--load-checkpoint {self._shown}".rstrip()
            then(pinned, f"{name}: {why}" if why else "")

    def _on_absent(self, why: str, kind: str) -> None:
        if kind == "unusable":
            self._absent = f"warning: the job starts from nothing, as no checkpoint can be loaded: {why}"
        else:
            self._absent = f"there is no checkpoint yet, so the job starts from nothing: {self._shown}"
        self._on_resolved(Pinned("", ""), "")

    def _resolve_without(self) -> None:
        """Keepers have failed."""
        if self._spec.max_nodes == 1:
            self._on_resolved(None, "")
            return
        self._on_resolved(
            None,
            f"the process that finds its version for all nodes has failed on {os.uname().nodename}: {self._why}; "
            "start the job again, or without --load-checkpoint, with ranks that are told what to load",
        )

    # ---- loading ---------------------------------------------------------------------------------------------

    def load(self, world: World, then: Loaded) -> None:
        """Has this node's part of the version loaded and calls `then` with variables for the ranks."""
        pinned = world.checkpoint
        if pinned is None:
            if self._why:
                self._go_without("each rank looks for itself")
            else:
                self._say("--load-checkpoint is missing at the coordinator: each rank looks for itself")
            then(self._environ("", ""))
            return
        if not pinned.digest:
            self._say(self._absent or "there is no checkpoint to load: the coordinator has found none")
            then({**self._environ("", ""), "BOOTSEER_CHECKPOINT": ""})
            return
        if not self._has_keeper():
            self._go_without("ranks read it for themselves")
            then(self._environ("", "", pinned))
            return
        self._loaded = then
        self._said_s = self._loop.time()
        self._pinned, self._attempt = pinned, world.attempt
        self._began_ns = time.monotonic_ns()
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
        self._attempt = -1
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
        then(self._environ(path, address, self._pinned))

    # ---- giving it back --------------------------------------------------------------------------------------

    def first_step_seen(self) -> None:
        """All ranks have made their first step: they have what they need."""
        self._reminder.cancel()
        if self._lines.is_open and (self._spec.checkpoint_disk_bytes or not self._spec.keep_arena):
            self._lines.ask("release")

    def _remind(self, taken_bytes: int) -> None:
        """Long after the start nobody has seen a first step."""
        if not self._reminder.is_set or not taken_bytes:
            return
        self._reminder.cancel()
        self._say(
            f"the checkpoint still takes {taken_bytes / 1e9:.1f} GB of this node's memory: no first step of all "
            f"ranks was seen in {FIRST_STEP_SAY_S / 60:.0f} min. A torch optimizer's first step gives it back, or "
            "bootseer.heartbeat(step) in each rank (not with --rank-hooks off, or without an events folder)"
        )

    def _environ(self, path: str, address: str, pinned: Pinned | None = None) -> dict[str, str]:
        url = self._spec.load_checkpoint
        if not path and pinned is not None and self._why:
            path = own_path(url, pinned.version)  # a keeper that lives has given the path if there is one
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
        self.close()
        # One that hangs does not see that its connection is closed, and ranks need the memory that it holds.
        self._guard.end_service(self._number)
        said = "the process that keeps the checkpoint has failed"
        if self._resolved is not None and self._has_keeper():
            self._say(f"{said}, another one is started: {why}")
            self._lines.ask("resolve")
            self._watch()
        elif self._resolved is not None:
            self._resolve_without()
        else:
            self._fell_back(f"{said}, ranks read it for themselves: {why}")
            if self._loaded is not None:
                self._on_loaded(self._attempt, "", "")

    def _go_without(self, what: str) -> None:
        """No keeper is left that could be asked."""
        now_ns = time.monotonic_ns()
        self._noted(StageSpan(now_ns, now_ns, {}, self._why))
        self._fell_back(f"processes that keep the checkpoint have failed, {what}: {self._why}")

    def close(self) -> None:
        """The keeper ends when its connection does."""
        self._watchdog.cancel()
        self._reminder.cancel()
        self._stop_listening()
        self._lines.close()
