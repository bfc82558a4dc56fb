"""A node's arena without bootrun: `bootseer ckpt prefetch` starts a checkpoint service, which loads a version.

In: a checkpoint's URL. Out: variables for programs of this user, by which `bootseer.checkpoint` finds the arena,
and other code a path. The service (bootseer.checkpoint.service.service) ends with its standard input, and so with
this process, even if that is killed; nothing is left then.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from bootseer.errors import CheckpointError, ConfigError, NotFound
from bootseer.ipc.channel import Channel
from bootseer.linux.child_processes import end_process
from bootseer.own_module import command_of
from bootseer.storage.paths import redact, scheme_of

END_S = 10.0  # for the service to end by itself
FOLLOW_S = 1.0  # after its end, for the thread that reads its messages
STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class NodeArena:
    """One checkpoint service; `with` ends it."""

    def __init__(
        self,
        url: str,
        memory_bytes: int | None = None,
        *,
        holds: bool = False,
        max_bytes_per_s: float | None = None,
        disk_bytes: int = 0,
        is_eager: bool = True,
    ) -> None:
        """
        Args: memory_bytes: maximum memory; by default the service's own limit. holds: for a later job, whose own
            service takes the memory over. max_bytes_per_s: of reads. disk_bytes: of this node's disk, for all
            versions that are kept there. is_eager: memory is prepared before `load`.
        """
        self.size = 0  # bytes of the loaded version
        self.disk_bytes = 0  # of those, bytes from this node's disk
        self.taken_bytes = 0  # of those, bytes from the memory of another service
        self._found: tuple[str, str] | None = None
        self._url = url = url if scheme_of(url) else os.path.abspath(url)  # for other working directories
        self._service = subprocess.Popen(
            command_of("bootseer.checkpoint.service.service"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._service.stdin is not None and self._service.stdout is not None
        self._channel = Channel.of_streams(self._service.stdout.fileno(), self._service.stdin.fileno())
        self._follower: threading.Thread | None = None
        self._ask(
            "start",
            url=url,
            local_world_size=1,
            memory_bytes=memory_bytes,
            arena_bytes=0,
            keep=True,
            whole=True,
            holds=holds,
            max_bytes_per_s=max_bytes_per_s,
            disk_bytes=disk_bytes,
            is_eager=is_eager,
        )

    def resolve(self) -> tuple[str, str]:
        """Return name and digest of the newest version, which `load` then loads. Raises: as `load`."""
        if self._found is None:
            self._ask("resolve")
            found = self._hear("resolved", lambda _done, _all: None)
            self.size = int(found["bytes"])
            self._found = str(found["version"]), str(found["digest"])
            for line in found.get("passed") or ():
                print(f"bootseer: warning: skipped: {line}", file=sys.stderr, flush=True)
        return self._found

    def load(self, progress: Callable[[int, int], object], max_bytes: int | None = None) -> dict[str, str]:
        """Load the whole newest version and return variables for programs.

        Raises: NotFound if there is none yet; CheckpointError if it cannot be held in memory; ConfigError if it
            has more than `max_bytes`.
        """
        version, digest = self.resolve()
        if max_bytes is not None and self.size > max_bytes:
            raise ConfigError(
                f"{redact(self._url)}: {self.size:,} bytes are to be fetched, and only {max_bytes:,} are allowed"
            )
        self._ask("load", version=version, digest=digest, world_size=1, nnodes=1, group_rank=0, attempt=0)
        ready = self._hear("ready", progress)
        self.disk_bytes, self.taken_bytes = int(ready["disk_bytes"]), int(ready["taken_bytes"])
        return {
            "BOOTSEER_CHECKPOINT": str(ready["path"]) or self._url,
            "BOOTSEER_CHECKPOINT_URL": self._url,
            "BOOTSEER_CHECKPOINT_VERSION": version,
            "BOOTSEER_CHECKPOINT_DIGEST": digest,
            "BOOTSEER_ARENA": str(ready["address"]),
        }

    def copy(self, progress: Callable[[int, int], object]) -> str:
        """Copy the loaded version to this node's disk; return why not, "" on success. Raises: CheckpointError."""
        self._ask("copy")
        return str(self._hear("copied", progress)["why"])

    def is_taken(self, wait_s: float) -> bool:
        """Wait for a job to take it over; return whether it did. Raises: CheckpointError if the service fails."""
        end_s = time.monotonic() + wait_s
        try:
            while (answer := self._channel.receive(end_s - time.monotonic())) is not None:
                if answer.get("did") == "taken":
                    return True
                self._handle(answer)
        except TimeoutError:
            return False
        raise self._lost()

    def follow(self) -> None:
        """Log the service's messages in a thread, from now on: the service ends if its messages stay unread."""
        self._follower = threading.Thread(target=self._follow, name="checkpoint service", daemon=True)
        self._follower.start()

    def wait(self) -> None:
        """Log the service's messages until it ends, which it does not do by itself. Raises: CheckpointError."""
        self._follow()
        raise self._lost()

    def close(self) -> None:
        """End the service. One that waits in the kernel is left behind."""
        assert self._service.stdin is not None and self._service.stdout is not None
        try:
            self._service.stdin.close()
        except OSError:
            pass  # the service has ended
        try:
            self._service.wait(END_S)
        except subprocess.TimeoutExpired:
            end_process(self._service)
        if self._follower is not None:
            self._follower.join(FOLLOW_S)
            if self._follower.is_alive():
                return  # it still reads the stream
        self._service.stdout.close()

    def __enter__(self) -> NodeArena:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, do: str, **fields: object) -> None:
        self._channel.send({"do": do, **fields})

    def _hear(self, wanted: str, progress: Callable[[int, int], object]) -> Mapping[str, Any]:
        while (answer := self._channel.receive()) is not None:
            did = answer.get("did")
            if did == wanted:
                return answer
            if did in ("progress", "copying"):
                progress(int(answer["bytes"]), int(answer["of_bytes"]))
            else:
                self._handle(answer)
        raise self._lost()

    def _handle(self, answer: Mapping[str, Any]) -> None:
        """Handle a message that is no result. Raises: NotFound, CheckpointError for a failure."""
        did = answer.get("did")
        if did == "said":
            print(f"bootseer: {answer['text']}", file=sys.stderr, flush=True)
        elif did == "absent" and answer["kind"] == "none":
            raise NotFound(str(answer["why"]))
        elif did in ("absent", "unresolved"):
            raise CheckpointError(str(answer["why"]))
        elif did == "failed":
            raise CheckpointError(f"{redact(self._url)}: cannot be loaded: {answer['why']}")
        elif did == "direct":
            raise CheckpointError(f"{redact(self._url)}: cannot be held in this node's memory: {answer['why']}")

    def _follow(self) -> None:
        while (answer := self._channel.receive()) is not None:
            try:
                self._handle(answer)
            except CheckpointError as error:  # the program may still have what it needs
                print(f"bootseer: warning: {error}", file=sys.stderr, flush=True)

    def _lost(self) -> CheckpointError:
        return CheckpointError(f"{redact(self._url)}: the checkpoint service has ended")


def run_command(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a program with additional variables; forward signals to it; return its exit status as a shell does."""
    try:
        with _forwarding() as forward:
            child = subprocess.Popen(command, env={**os.environ, **environ})
            forward(child)
            status = child.wait()
    except FileNotFoundError as error:
        raise ConfigError(f"{command[0]}: no such program") from error
    except OSError as error:
        raise ConfigError(f"{command[0]}: cannot be started: {os.strerror(error.errno or 0).lower()}") from error
    return 128 - status if status < 0 else status


@contextmanager
def _forwarding() -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """Forward this process's signals to the child, except Ctrl-C, which the terminal sends to both."""
    children: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def on_signal(signum: int, _frame: FrameType | None) -> None:
        if not children:
            early.append(signum)
        elif signum != signal.SIGINT:
            children[0].send_signal(signum)

    def forward(child: subprocess.Popen[bytes]) -> None:
        children.append(child)
        for signum in early:
            child.send_signal(signum)

    before = {signum: signal.signal(signum, on_signal) for signum in (*STOP_SIGNALS, signal.SIGINT)}
    try:
        yield forward
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextmanager
def until_signal() -> Iterator[None]:
    """End the block normally at Ctrl-C, SIGTERM or SIGHUP."""

    def stop(_signum: int, _frame: FrameType | None) -> None:
        raise _StopSignal

    before = {signum: signal.signal(signum, stop) for signum in (*STOP_SIGNALS, signal.SIGINT)}
    try:
        yield
    except _StopSignal:
        pass
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


class _StopSignal(BaseException):
    """A signal has arrived."""
