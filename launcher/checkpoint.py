"""bootrun's side of the checkpoint: has its version found for the job, and this node's copy loaded for its ranks.

A process of its own, the keeper (bootseer/checkpoint/keeper.py), does the work: the launch path imports no
storage. In: --load-checkpoint, the version that the coordinator has pinned. Out: variables for the ranks. Orders
and answers are JSON lines over a socket to which only processes of the same user, the guard among them, connect;
the keeper's standard streams are its other end. When the keeper fails, ranks get the checkpoint's own path or URL
and read for themselves.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

from launcher.guard_client import GuardClient
from launcher.loop import Cancellable, EventLoop
from launcher.rendezvous.messages import Pinned, World
from launcher.spec import LaunchSpec

MOST_LINE_BYTES = 64 << 20  # an answer; they are small
# From the order to an answer or a sign of progress.
RESOLVE_LIMIT_S = 90.0
LOAD_SILENCE_LIMIT_S = 90.0
PROGRESS_EVERY_S = 5.0

Resolved = Callable[[Pinned | None, str], object]
Loaded = Callable[[dict[str, str]], object]


class NodeCheckpoint:
    """See the module's docstring; made only with --load-checkpoint."""

    def __init__(
        self,
        loop: EventLoop,
        guard: GuardClient,
        spec: LaunchSpec,
        unset: tuple[str, ...],
        say: Callable[[str], object],
    ) -> None:
        """Args: unset: variables that the keeper does not get; say: a line for people."""
        self._loop = loop
        self._guard = guard
        self._spec = spec
        self._unset = unset
        self._say = say
        self._listener: socket.socket | None = None
        self._connection: socket.socket | None = None
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._why = ""  # the keeper is gone, or never came
        self._resolved: Resolved | None = None
        self._loaded: Loaded | None = None
        self._pinned: Pinned | None = None  # what is being loaded
        self._saves = ""  # where savers in ranks leave what they write
        self._watchdog: Cancellable | None = None
        self._said_s = 0.0

    # ---- the keeper ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Time zero: starts the keeper, which may make memory ready."""
        import json

        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        address = b"\0bootseer-keeper-" + os.urandom(16).hex().encode()
        self._listener.bind(address)
        self._listener.listen(1)
        self._loop.add_reader(self._listener.fileno(), self._accept)
        self._guard.serve(0, [sys.executable, "-P", "-m", "bootseer.checkpoint.keeper"], {}, self._unset, address)
        spec = self._spec
        order: dict[str, object] = {
            "do": "start",
            "url": spec.load_checkpoint,
            "host": os.uname().nodename,
            "local_world_size": spec.nproc,
            "nodes": spec.max_nodes,
            "memory_bytes": spec.checkpoint_memory_bytes,
            "arena_bytes": spec.arena_bytes,
            "keep": spec.keep_arena,
        }
        self._outgoing += json.dumps(order).encode() + b"\n"

    def _accept(self) -> None:
        assert self._listener is not None
        connection, _ = self._listener.accept()
        _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.geteuid():
            connection.close()
            return
        self._stop_listening()
        connection.setblocking(False)
        self._connection = connection
        self._loop.add_reader(connection.fileno(), self._read)
        self._write()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None

    def _read(self) -> None:
        assert self._connection is not None
        try:
            data = self._connection.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._incoming += data
        if not data or len(self._incoming) > MOST_LINE_BYTES:
            self._fail("it closed its connection" if not data else "it said what could not be understood")
            return
        *lines, rest = self._incoming.split(b"\n")
        self._incoming = bytearray(rest)
        for line in lines:
            self._take(bytes(line))

    def _ask(self, do: str, **fields: object) -> None:
        import json

        self._outgoing += json.dumps({"do": do, **fields}).encode() + b"\n"
        self._write()

    def _write(self) -> None:
        connection = self._connection
        if connection is None:
            return  # what waits is sent when it comes
        try:
            while self._outgoing:
                del self._outgoing[: connection.send(self._outgoing)]
        except BlockingIOError:
            self._loop.add_writer(connection.fileno(), self._write)
            return
        except OSError:
            self._outgoing.clear()  # `_read` sees the end as well
        self._loop.remove_writer(connection.fileno())

    def _take(self, line: bytes) -> None:
        """One answer. The keeper is a program of ours that runs as the same user; still, no answer can raise."""
        import json

        try:
            answer: dict[str, Any] = json.loads(line)
            did = answer["did"]
            if did == "resolved":
                self._on_resolved(Pinned(str(answer["version"]), str(answer["digest"])), "")
            elif did == "absent":
                self._on_resolved(Pinned("", ""), "")
            elif did == "unresolved":
                self._on_resolved(None, str(answer["why"]))
            elif did == "progress":
                self._on_progress(int(answer["bytes"]), int(answer["of_bytes"]))
            elif did == "ready":
                self._on_loaded(str(answer["path"]), str(answer["address"]))
            elif did == "direct":
                self._say(f"the checkpoint is not shared on this node: {answer['why']}")
                self._on_loaded(str(answer.get("path") or ""), "")
            elif did == "listening":
                self._saves = str(answer["saves"])
            elif did == "said":
                self._say(str(answer["text"]))
        except (ValueError, KeyError, TypeError):
            self._fail("it said what could not be understood")

    def on_service_ended(self, _number: int, why: str) -> None:
        """The guard says that the keeper is gone, or cannot be started."""
        self._fail(why)

    # ---- which version ---------------------------------------------------------------------------------------

    def resolve(self, then: Resolved) -> None:
        """For the coordinator: finds the version that the next attempt loads.

        Calls `then` with it, with empty strings if there is none yet, with None if the keeper cannot say (ranks
        then look for themselves), or with why the job must end: a start from nothing would lose what it has.
        """
        self._resolved = then
        if self._why:
            self._loop.call_soon(self._on_resolved, None, "")
            return
        self._ask("resolve")
        self._watch(RESOLVE_LIMIT_S)

    def _on_resolved(self, pinned: Pinned | None, why: str) -> None:
        then, self._resolved = self._resolved, None
        self._unwatch()
        if then is not None:
            then(pinned, f"--load-checkpoint {self._spec.load_checkpoint}: {why}" if why else "")

    # ---- loading ---------------------------------------------------------------------------------------------

    def load(self, world: World, then: Loaded) -> None:
        """Has this node's part of the version loaded and calls `then` with variables for the ranks."""
        pinned = world.checkpoint
        if pinned is None:
            if not self._why:
                self._say("--load-checkpoint is missing at the coordinator: each rank looks for itself")
            then(self._environ("", ""))
            return
        if not pinned.digest:
            self._say(f"there is no checkpoint yet: {self._spec.load_checkpoint}")
            then({**self._environ("", ""), "BOOTSEER_CHECKPOINT": ""})
            return
        if self._why:
            then(self._environ("", "", pinned))
            return
        self._loaded = then
        self._said_s = self._loop.time()
        self._pinned = pinned
        self._ask(
            "load",
            version=pinned.version,
            digest=pinned.digest,
            world_size=world.world_size,
            group_rank=world.group_rank,
            nnodes=world.group_world_size,
            attempt=world.attempt,
        )
        self._watch(LOAD_SILENCE_LIMIT_S)

    def cancel(self) -> None:
        """The attempt is stopped before its ranks were started."""
        self._loaded = None
        self._unwatch()

    def first_step_seen(self) -> None:
        """All ranks have made their first step: they have what they need."""
        if self._connection is not None and not self._spec.keep_arena:
            self._ask("release")

    def _on_progress(self, done_bytes: int, of_bytes: int) -> None:
        self._watch(LOAD_SILENCE_LIMIT_S)
        now_s = self._loop.time()
        if self._loaded is not None and now_s - self._said_s >= PROGRESS_EVERY_S:
            self._said_s = now_s
            self._say(f"loading the checkpoint: {done_bytes / 1e9:.1f} of {of_bytes / 1e9:.1f} GB")

    def _on_loaded(self, path: str, address: str) -> None:
        then, self._loaded = self._loaded, None
        self._unwatch()
        if then is not None:
            then(self._environ(path, address, self._pinned))

    def _environ(self, path: str, address: str, pinned: Pinned | None = None) -> dict[str, str]:
        url = self._spec.load_checkpoint
        environ = {"BOOTSEER_CHECKPOINT": path or url, "BOOTSEER_CHECKPOINT_URL": url}
        if pinned is not None:
            environ.update(BOOTSEER_CHECKPOINT_VERSION=pinned.version, BOOTSEER_CHECKPOINT_DIGEST=pinned.digest)
        if address:
            environ["BOOTSEER_ARENA"] = address
        if self._saves and not self._why:
            environ["BOOTSEER_SAVE_ARENA"] = self._saves
        return environ

    # ---- trouble and the end ---------------------------------------------------------------------------------

    def _watch(self, limit_s: float) -> None:
        self._unwatch()
        self._watchdog = self._loop.call_later(limit_s, self._fail, f"it has said nothing for {limit_s:g} s")

    def _unwatch(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None

    def _fail(self, why: str) -> None:
        """Without the keeper ranks read for themselves."""
        if self._why:
            return
        self._why = why
        self._say(f"ranks read the checkpoint for themselves: the process that keeps it has failed: {why}")
        self.close()
        if self._resolved is not None:
            self._on_resolved(None, "")
        if self._loaded is not None:
            self._on_loaded("", "")

    def close(self) -> None:
        """The keeper ends when its connection does."""
        self._unwatch()
        self._stop_listening()
        if self._connection is not None:
            self._loop.remove_reader(self._connection.fileno())
            self._loop.remove_writer(self._connection.fileno())
            self._connection.close()
            self._connection = None
