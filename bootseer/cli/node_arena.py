"""A node's arena without bootrun: `bootseer ckpt prefetch` starts the keeper, has a version loaded, and holds it.

In: a checkpoint's URL. Out: variables for programs of this user, by which `bootseer.checkpoint` finds the arena,
and other code a path. The keeper (bootseer.checkpoint.keeper) ends with its standard input, and so with this
process, however that ends; nothing is left then.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from bootseer.errors import CheckpointError, ConfigError, NotFound
from bootseer.own_module import command_of
from bootseer.storage.paths import redact, scheme_of

END_S = 10.0  # for the keeper to end by itself
STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class NodeArena:
    """One keeper; `with` ends it."""

    def __init__(
        self,
        url: str,
        memory_bytes: int | None = None,
        *,
        holds: bool = False,
        most_bytes_per_s: float | None = None,
        disk_bytes: int = 0,
        is_eager: bool = True,
    ) -> None:
        """
        Args: memory_bytes: at most so much; by default what the keeper itself allows. holds: for a job that comes
            later, whose own keeper takes it over. most_bytes_per_s: of what is read. disk_bytes: of this
            node's disk, for all versions that are kept there. is_eager: memory is made ready before `load`.
        """
        self.size = 0  # bytes of the version that is loaded
        self.disk_bytes = 0  # of those, what this node's disk had
        self.taken_bytes = 0  # and what another keeper held in memory
        self._found: tuple[str, str] | None = None
        self._url = url = url if scheme_of(url) else os.path.abspath(url)  # programs may stand elsewhere
        self._keeper = subprocess.Popen(
            command_of("bootseer.checkpoint.keeper"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # `is_taken` waits for what can be read
        )
        self._ask(
            "start",
            url=url,
            local_world_size=1,
            memory_bytes=memory_bytes,
            arena_bytes=0,
            keep=True,
            whole=True,
            holds=holds,
            most_bytes_per_s=most_bytes_per_s,
            disk_bytes=disk_bytes,
            is_eager=is_eager,
        )

    def resolve(self) -> tuple[str, str]:
        """Name and digest of the newest version, which `load` then loads. Raises: as `load`."""
        if self._found is None:
            self._ask("resolve")
            found = self._hear("resolved", lambda _done, _all: None)
            self.size = int(found["bytes"])
            self._found = str(found["version"]), str(found["digest"])
            for line in found.get("passed") or ():
                print(f"bootseer: warning: passed over: {line}", file=sys.stderr, flush=True)
        return self._found

    def load(self, progress: Callable[[int, int], object], most_bytes: int | None = None) -> dict[str, str]:
        """Loads the whole newest version; returns variables for programs.

        Raises: NotFound when there is none yet; CheckpointError when it cannot be held in memory; ConfigError when
            it has more than `most_bytes`.
        """
        version, digest = self.resolve()
        if most_bytes is not None and self.size > most_bytes:
            raise ConfigError(
                f"{redact(self._url)}: {self.size:,} bytes are to be fetched, and only {most_bytes:,} are allowed"
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
        """Has this node's disk get what is loaded; returns why not, "" if it has it. Raises: CheckpointError."""
        self._ask("copy")
        return str(self._hear("copied", progress)["why"])

    def is_taken(self, wait_s: float) -> bool:
        """Waits for a job to take it over, for so long. Raises: CheckpointError when the keeper has ended."""
        assert self._keeper.stdout is not None
        end_s = time.monotonic() + wait_s
        while select.select([self._keeper.stdout], [], [], max(0.0, end_s - time.monotonic()))[0]:
            line = self._keeper.stdout.readline()
            if not line:
                raise self._lost()
            if b'"taken"' in line:
                return True
        return False

    def wait(self) -> None:
        """Until the keeper ends, which it does not do by itself."""
        self._keeper.wait()
        raise self._lost()

    def close(self) -> None:
        assert self._keeper.stdin is not None and self._keeper.stdout is not None
        try:
            self._keeper.stdin.close()
        except OSError:
            pass  # it is gone
        try:
            self._keeper.wait(END_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
        self._keeper.stdout.close()

    def __enter__(self) -> NodeArena:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, do: str, **fields: object) -> None:
        assert self._keeper.stdin is not None
        try:
            self._keeper.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")
            self._keeper.stdin.flush()
        except OSError as error:
            raise self._lost() from error

    def _hear(self, wanted: str, progress: Callable[[int, int], object]) -> Mapping[str, Any]:
        assert self._keeper.stdout is not None
        for line in self._keeper.stdout:
            try:
                answer: dict[str, Any] = json.loads(line)
                did = answer["did"]
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"{redact(self._url)}: the keeper says {line[:80]!r}") from error
            if did == wanted:
                return answer
            if did in ("progress", "copying"):
                progress(int(answer["bytes"]), int(answer["of_bytes"]))
            elif did == "said":
                print(f"bootseer: {answer['text']}", file=sys.stderr, flush=True)
            elif did == "absent" and answer["kind"] == "none":
                raise NotFound(str(answer["why"]))
            elif did in ("absent", "unresolved"):
                raise CheckpointError(str(answer["why"]))
            elif did == "direct":
                raise CheckpointError(
                    f"{redact(self._url)}: cannot be held in this node's memory: {answer['why']}"
                )
        raise self._lost()

    def _lost(self) -> CheckpointError:
        return CheckpointError(f"{redact(self._url)}: the process that keeps it in memory has ended")


def run_command(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs a program with more variables; signals are its own. Returns its exit status as a shell has it."""
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
    """Signals to us go on to the child; the terminal's Ctrl-C has reached it already."""
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
    """Ctrl-C, SIGTERM and SIGHUP end the block, which is how it is meant to end."""

    def stop(_signum: int, _frame: FrameType | None) -> None:
        raise _Stopped

    before = {signum: signal.signal(signum, stop) for signum in (*STOP_SIGNALS, signal.SIGINT)}
    try:
        yield
    except _Stopped:
        pass
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


class _Stopped(BaseException):
    """A signal has come."""
