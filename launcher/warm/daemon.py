"""`bootseer warm --jobs DIR`: keeps a node warm for the job files of a folder, one after the other.

Each file is worked on by a process of its own (worker.py), as the user who owns the file, at the lowest priority,
and is ended when it gets nowhere. This process holds nothing of a job, and connects to nothing. What it did last
is in a file of the user's private runtime folder, for `bootseer warm --status`.
"""

from __future__ import annotations

import fcntl
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any

from bootseer.errors import ConfigError, StorageError
from bootseer.mounts.tree_places import locate, prepare
from bootseer.own_module import command_of
from bootseer.trust.owned_files import NotOwnedError, read_owned
from launcher.warm.jobs import JobFile, Refused, read_folder
from launcher.warm.options import Options
from launcher.warm.results import CHECKPOINT, FAILED, Warmed, from_record, line
from launcher.warm.rounds import Rounds, status_lines

STATUS, LOCK = "warm.json", "warm.lock"
MOST_STATUS_BYTES = 8 << 20
MOST_LINE_BYTES = 4 << 20
LOOK_S = 5.0  # between looks into the folder
SILENCE_S = 600.0  # of a worker: a store's retries take minutes
END_S = 5.0
_ENDS = (signal.SIGTERM, signal.SIGINT)

Say = Callable[[str], object]
Show = Callable[[str, int, int], object]  # stage, bytes done, and in all


class EndedError(Exception):
    """A signal has come."""


class Daemon:
    """See the module's docstring."""

    def __init__(self, options: Options, say: Say, show: Show) -> None:
        self._options, self._say, self._show = options, say, show
        self._rounds = Rounds(options.every_s)
        self._folder = ""
        self._holding: dict[str, subprocess.Popen[bytes]] = {}  # by file: they have a checkpoint in memory
        self._held: dict[str, str] = {}  # its digest
        self._state = "starting"

    def run(self) -> int:
        """Until a signal, or, once, until each file was worked on. The exit status. Raises: ConfigError."""
        with ExitStack() as stack:
            self._folder = prepare(locate(os.environ))
            stack.enter_context(_alone(os.path.join(self._folder, LOCK)))
            stack.callback(_remove, os.path.join(self._folder, STATUS))
            stack.callback(self._let_go)
            stack.enter_context(_signals())
            try:
                return self._run()
            except EndedError:
                return 0
        raise AssertionError("it returns above")

    def _run(self) -> int:
        while True:
            files = {each.name: each for each in self._look()}
            name = self._rounds.choose(time.monotonic())
            if not name:
                if self._options.is_once and self._rounds.is_all_done:
                    return int(self._rounds.has_failures)
                self._note("waiting")
                time.sleep(self._rounds.wait_s(time.monotonic(), LOOK_S))
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

    def _let_go(self, *names: str) -> None:
        """Ends who holds checkpoints of these files; of all, if none is named."""
        for name in names or tuple(self._holding):
            worker = self._holding.pop(name, None)
            self._held.pop(name, None)
            if worker is not None:
                _end(worker, signal.SIGTERM)

    def _look(self) -> list[JobFile | Refused]:
        found = read_folder(self._options.jobs, os.geteuid())
        for each in self._rounds.see(found):
            self._say(f"warning: {each.name}: not worked on: {each.why}")
        jobs = {each.name for each in found if isinstance(each, JobFile)}
        for name, worker in tuple(self._holding.items()):
            if name not in jobs or worker.poll() is not None:
                self._let_go(name)
        return found

    # ---- one file --------------------------------------------------------------------------------------------

    def _work(self, file: JobFile) -> tuple[tuple[Warmed, ...], str]:
        """What came of it, and why it came to nothing."""
        order = {
            "name": file.name,
            "text": file.text.decode("utf-8", "surrogateescape"),
            "owner": None if file.owner in (os.geteuid(), 0) else file.owner,
            "only": self._options.only,
            "most_bytes": self._options.most_bytes,
            "most_bytes_per_s": self._options.most_bytes_per_s,
            "hold_s": self._options.hold_s,
        }
        argv = command_of("launcher.warm.worker")
        worker = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, cwd="/"
        )
        try:
            _tell(worker, json.dumps(order))
            return self._hear(file.name, worker)
        finally:
            if self._holding.get(file.name) is not worker:
                _end(worker)

    def _hear(self, name: str, worker: subprocess.Popen[bytes]) -> tuple[tuple[Warmed, ...], str]:
        """Who holds an older version lets go before memory is taken for a newer one; of the same the memory is
        taken over."""
        digest = ""
        for answer in _answers(worker):
            match answer.get("did"):
                case "said":
                    self._say(f"{name}: {answer.get('text')}")
                case "progress":
                    with suppress(KeyError, TypeError, ValueError):
                        self._show(str(answer["stage"]), int(answer["done"]), int(answer["total"]))
                case "will-hold":
                    digest = str(answer.get("digest"))
                    if self._held.get(name) != digest:
                        self._let_go(name)
                    _tell(worker, "go")
                case "failed":
                    return (), str(answer.get("why"))
                case "done":
                    records = [from_record(each) for each in answer.get("stages", ()) if isinstance(each, dict)]
                    found = tuple(each for each in records if each is not None)
                    if answer.get("holds") is True:
                        self._let_go(name)
                        self._holding[name], self._held[name] = worker, digest
                    elif not any((each.stage, each.how) == (CHECKPOINT, FAILED) for each in found):
                        self._let_go(name)  # the job has none any more
                    return found, ""
        return (), "the process that worked on it has ended without a word"

    def _note(self, state: str) -> None:
        """For --status; nobody has to be able to read it."""
        record = {
            "v": 1,
            "pid": os.getpid(),
            "jobs": self._options.jobs,
            "state": state,
            "files": self._rounds.to_record(),
        }
        path = os.path.join(self._folder, STATUS)
        with suppress(OSError):
            fd = os.open(
                f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
            with open(fd, "w", encoding="ascii") as file:
                json.dump(record, file)
            os.replace(f"{path}.new", path)


def read_status() -> dict[str, Any]:
    """What the daemon of this user wrote last. Raises: ConfigError when there is none."""
    path = os.path.join(locate(os.environ), STATUS)
    try:
        data, _ = read_owned(path, most_bytes=MOST_STATUS_BYTES)
        record: dict[str, Any] = json.loads(data)
        status_lines(record, 0.0)  # it has all that is shown
    except FileNotFoundError as error:
        raise ConfigError("no `bootseer warm --jobs` of this user runs on this node") from error
    except (OSError, NotOwnedError, ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{path}: cannot be understood: {error}") from error
    return record


def _tell(worker: subprocess.Popen[bytes], line: str) -> None:
    assert worker.stdin is not None
    with suppress(BrokenPipeError):
        worker.stdin.write(line.encode("ascii") + b"\n")
        worker.stdin.flush()


def _answers(worker: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """Until it ends, says too much at once, or nothing for too long."""
    assert worker.stdout is not None
    fd, received = worker.stdout.fileno(), b""
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        while len(received) < MOST_LINE_BYTES:
            if not selector.select(SILENCE_S):
                yield {
                    "did": "failed",
                    "why": f"the process that works on it has said nothing for {SILENCE_S:g} s",
                }
                return
            data = os.read(fd, 1 << 16)
            if not data:
                return
            *lines, received = (received + data).split(b"\n")
            for text in lines:
                try:
                    answer = json.loads(text)
                except ValueError:
                    return
                if isinstance(answer, dict):
                    yield answer


def _end(worker: subprocess.Popen[bytes], *at_once: int) -> None:
    """With all that it has started in its session. By itself, if it is not told so `at_once`."""
    assert worker.stdin is not None and worker.stdout is not None
    with suppress(BrokenPipeError):
        worker.stdin.close()
    worker.stdout.close()
    for signum in (*at_once, 0, signal.SIGTERM, signal.SIGKILL):
        if signum:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.pid, signum)  # not waited for yet, so the number is no other's
        with suppress(subprocess.TimeoutExpired):
            worker.wait(END_S)
            return
    worker.wait()


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
def _signals() -> Iterator[None]:
    """The first of _ENDS ends what is waited for; SIGHUP is what a terminal's end says, and changes nothing."""

    def stop(_signum: int, _frame: FrameType | None) -> None:
        for signum in _ENDS:
            signal.signal(signum, signal.SIG_IGN)  # it is ending
        raise EndedError

    before = {signum: signal.signal(signum, stop) for signum in _ENDS}
    before[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _remove(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)
