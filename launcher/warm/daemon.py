"""`bootseer warm --jobs DIR`: keeps a node warm for the job files of a directory, one after the other.

A separate process (worker.py) handles each file, as the user who owns the file, at the lowest priority. The daemon
ends it if it makes no progress. The daemon keeps no data of a job and makes no connections. Its last results are
in a file of the user's private runtime directory, for `bootseer warm --status`.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any

from bootseer.errors import ConfigError, StorageError
from bootseer.ipc.channel import Channel
from bootseer.linux.files import replace_file
from bootseer.mounts.tree_daemon.places import locate, prepare
from bootseer.own_module import command_of
from bootseer.trust.owned_files import NotOwnedError, read_owned
from launcher.warm.answers import MAX_SAID, Done, Failed, Progress, Said, Turn, WillHold, parse
from launcher.warm.jobs import JobFile, RefusedFile, read_directory
from launcher.warm.options import Options
from launcher.warm.results import CHECKPOINT, FAILED, Warmed, line
from launcher.warm.rounds import Rounds, status_lines

STATUS, LOCK = "warm.json", "warm.lock"
MAX_STATUS_BYTES = 8 << 20
MAX_LINE_BYTES = 4 << 20
SCAN_S = 5.0  # between scans of the directory
END_S = 5.0
_ENDS = (signal.SIGTERM, signal.SIGINT)

Say = Callable[[str], object]
Show = Callable[[str, int, int], object]  # stage, bytes done, total bytes


class SignalReceivedError(Exception):
    """A signal has arrived."""


class Daemon:
    """Keeps a node warm for the job files of a directory."""

    def __init__(self, options: Options, say: Say, show: Show) -> None:
        self._options, self._say, self._show = options, say, show
        self._rounds = Rounds(options.every_s)
        self._directory = ""
        self._holding: dict[str, subprocess.Popen[bytes]] = {}  # workers with a checkpoint in memory, by file
        self._held: dict[str, str] = {}  # digest of the checkpoint, by file
        self._stuck: list[tuple[str, subprocess.Popen[bytes]]] = []  # workers that no signal ends, with their file
        self._received: Sequence[int] = ()  # signals

    def run(self) -> int:
        """Run until a signal, with --once for one round. Returns: the exit status. Raises: ConfigError."""
        with ExitStack() as stack:
            self._directory = prepare(locate(os.environ))
            stack.enter_context(_alone(os.path.join(self._directory, LOCK)))
            stack.callback(_remove, os.path.join(self._directory, STATUS))
            stack.callback(self._end_sandboxes)
            self._received = stack.enter_context(_signals())
            try:
                return self._run()
            except SignalReceivedError:
                return 0
        raise AssertionError("it returns above")

    def _run(self) -> int:
        while not self._received:
            files = {each.name: each for each in self._look()}
            name = self._rounds.choose(time.monotonic())
            if not name:
                if self._options.is_once and self._rounds.is_all_done:
                    return int(self._rounds.has_failures)
                self._note("waiting")
                time.sleep(self._rounds.wait_s(time.monotonic(), SCAN_S))
                continue
            self._note(f"at {name}")
            began_s = time.monotonic()
            file = files[name]
            assert isinstance(file, JobFile), "others are never due"
            stages, why = self._work(file)
            for each in stages:
                self._say(f"{name}: {line(each)}")
            if why:
                self._say(f"{name}: {why}")
            now_s = time.monotonic()
            self._rounds.ended(name, now_s, time.time(), now_s - began_s, stages, why)
        return 0

    def _end_sandboxes(self, *names: str) -> None:
        """End the workers that hold checkpoints of these files; of all files if none is named."""
        for name in names or tuple(self._holding):
            worker = self._holding.pop(name, None)
            self._held.pop(name, None)
            if worker is not None:
                self._end(name, worker, signal.SIGTERM)

    def _end(self, name: str, worker: subprocess.Popen[bytes], *at_once: int) -> None:
        """End a worker; leave one that waits in the kernel, as other users' files are next."""
        if not _end(worker, *at_once):
            self._stuck.append((name, worker))
            self._say(
                f"warning: {name}: worker process {worker.pid} does not end: it waits in the kernel;"
                " does a file server of its user hang?"
            )

    def _stuck_worker(self, name: str) -> int:
        """Return the process of a worker of this file that has still not ended; 0 for none."""
        self._stuck = [(file, worker) for file, worker in self._stuck if worker.poll() is None]
        return next((worker.pid for file, worker in self._stuck if file == name), 0)

    def _look(self) -> list[JobFile | RefusedFile]:
        found = read_directory(self._options.jobs, os.geteuid())
        for each in self._rounds.see(found):
            self._say(f"warning: {each.name}: refused: {each.why}")
        jobs = {each.name for each in found if isinstance(each, JobFile)}
        for name, worker in tuple(self._holding.items()):
            if name not in jobs or worker.poll() is not None:
                self._end_sandboxes(name)
        return found

    # ---- one file --------------------------------------------------------------------------------------------

    def _work(self, file: JobFile) -> tuple[tuple[Warmed, ...], str]:
        """Run a worker for a file. Returns: results by stage, and the reason if the worker has failed."""
        if pid := self._stuck_worker(file.name):
            return (), f"its last worker process, {pid}, still waits in the kernel"
        order = {
            "name": file.name,
            "text": file.text.decode("utf-8", "surrogateescape"),
            "owner": None if file.owner in (os.geteuid(), 0) else file.owner,
            "only": self._options.only,
            "max_bytes": self._options.max_bytes,
            "max_bytes_per_s": self._options.max_bytes_per_s,
            "hold_s": self._options.hold_s,
        }
        argv = command_of("launcher.warm.worker")
        try:
            worker = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, cwd="/"
            )
        except OSError as error:
            return (), f"its worker process cannot be started: {(error.strerror or '').lower()}"
        try:
            assert worker.stdin is not None and worker.stdout is not None
            channel = Channel.of_streams(worker.stdout.fileno(), worker.stdin.fileno(), max_bytes=MAX_LINE_BYTES)
            channel.send(order)
            return self._hear(file.name, worker, channel)
        finally:
            if self._holding.get(file.name) is not worker:
                self._end(file.name, worker)

    def _hear(
        self, name: str, worker: subprocess.Popen[bytes], channel: Channel
    ) -> tuple[tuple[Warmed, ...], str]:
        """Handle a worker's messages. A holder of an older version ends before memory is taken for a newer one; a
        holder of the same version passes its memory on."""
        digest = ""
        turn = Turn(time.monotonic())
        while (left_s := turn.left_s(time.monotonic())) > 0:
            try:
                message = channel.receive(left_s)
            except TimeoutError:
                break
            if message is None:
                return (), "its worker process has ended without a result"
            answer = parse(message)
            turn.note(answer, time.monotonic())
            match answer:
                case Said(text) if turn.said <= MAX_SAID:
                    self._say(f"{name}: {text}")
                case Progress(stage, done, total):
                    self._show(stage, done, total)
                case WillHold(wanted):
                    digest = wanted
                    if self._held.get(name) != digest:
                        self._end_sandboxes(name)
                    channel.send({"do": "go"})
                case Failed(why):
                    return (), why
                case Done(found, holds):
                    if holds:
                        self._end_sandboxes(name)
                        self._holding[name], self._held[name] = worker, digest
                    elif not any((each.stage, each.how) == (CHECKPOINT, FAILED) for each in found):
                        self._end_sandboxes(name)  # the job no longer has a checkpoint
                    return found, ""
        return (), turn.why

    def _note(self, state: str) -> None:
        """Write the state for --status; errors are ignored."""
        record = {
            "v": 1,
            "pid": os.getpid(),
            "jobs": self._options.jobs,
            "state": state,
            "files": self._rounds.to_record(),
        }
        with suppress(OSError):
            replace_file(os.path.join(self._directory, STATUS), json.dumps(record).encode())


def read_status() -> dict[str, Any]:
    """Return the last status of this user's daemon. Raises: ConfigError if there is no daemon."""
    path = os.path.join(locate(os.environ), STATUS)
    try:
        data, _ = read_owned(path, max_bytes=MAX_STATUS_BYTES)
        record: dict[str, Any] = json.loads(data)
        status_lines(record, 0.0)  # raises if a field that is shown is missing
    except FileNotFoundError as error:
        raise ConfigError("no `bootseer warm --jobs` of this user runs on this node") from error
    except (OSError, NotOwnedError, ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{path}: invalid status file: {error}") from error
    return record


def _end(worker: subprocess.Popen[bytes], *at_once: int) -> bool:
    """End a worker and all processes of its session, at first with the signals `at_once`, if any.

    Returns: whether it has ended.
    """
    assert worker.stdin is not None and worker.stdout is not None
    with suppress(BrokenPipeError):
        worker.stdin.close()
    worker.stdout.close()
    for signum in (*at_once, 0, signal.SIGTERM, signal.SIGKILL):
        if signum:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.pid, signum)  # not reaped yet: no other process has the pid
        with suppress(subprocess.TimeoutExpired):
            worker.wait(END_S)
            return True
    return False


@contextmanager
def _alone(path: str) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise ConfigError("another `bootseer warm --jobs` of this user runs on this node (--status)") from error
    finally:
        os.close(fd)


@contextmanager
def _signals() -> Iterator[Sequence[int]]:
    """Raise SignalReceivedError at the first signal of _ENDS; ignore SIGHUP, which a closed terminal sends.

    Yields: what was received, as the exception is lost where Python ignores exceptions.
    """
    received: list[int] = []

    def stop(signum: int, _frame: FrameType | None) -> None:
        received.append(signum)
        for each in _ENDS:
            signal.signal(each, signal.SIG_IGN)  # it is ending
        raise SignalReceivedError

    before = {signum: signal.signal(signum, stop) for signum in _ENDS}
    before[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _remove(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)
