"""Running of set-up commands, one after the other, by `/bin/sh -e -c`, without leaving processes behind.

In: command lines as the user wrote them. Out: their duration; or SetupFailed with the last lines of their output.
The output goes to a file, never through a pipe of this process, and is followed there. The commands run below a
supervisor, which ends all processes that they start (supervisor.py).
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import bootseer
from bootseer.env.parse.redaction import redact_text, secret_values
from bootseer.env.parse.redaction_commands import redact_command
from bootseer.errors import SetupFailed
from bootseer.ipc.channel import Channel, wait_readable
from bootseer.linux.child_processes import end_process
from bootseer.storage.os_errors import map_os_errors
from bootseer.tuning import current

TAIL_LINES = 20
MAX_LINE_BYTES = 4096  # of a shown line
MAX_READS = 64  # per round, as there are deadlines to keep
LOOK_S = 0.1  # between reads of the log
END_S = 10.0  # for the supervisor to end all processes
_PACKAGE = os.path.dirname(os.path.dirname(bootseer.__file__))
_SUPERVISOR = os.path.join(os.path.dirname(__file__), "supervisor.py")

# Variables of a rank's place in the job: set-up is not a rank, and its result must not depend on one.
_OF_RANKS = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
}
_OF_RANKS_PREFIXES = ("TORCHELASTIC_", "BOOTSEER_CHECKPOINT", "BOOTSEER_ARENA", "BOOTSEER_SAVE_ARENA")
_ASKS = re.compile(
    r"\bEOFError\b|EOF when reading a line|\[y/n\]|\(y/n\)|proceed \(\[y\]|could not read (username|password)"
    r"|terminal prompts disabled|no input was expected|not a terminal|not a tty",
    re.IGNORECASE,
)


class SetupResult(NamedTuple):
    """The result of commands that all succeeded."""

    took_s: float
    left_running: list[str]  # names of processes that still ran and were ended
    watched: dict[str, Any] | None = None  # what they read (setup_watch.py); None: not requested


def run_setup(
    commands: Sequence[str],
    *,
    environ: Mapping[str, str],
    cwd: str,
    log_path: str,
    timeout_s: float,
    on_line: Callable[[str], object] | None = None,
    prefix: Sequence[str] = (),
    makes_venv: bool = False,
    watch: Mapping[str, Any] | None = None,
) -> SetupResult:
    """Run the commands up to the first that fails.

    Args:
        prefix: argument prefix of each shell, which enters the image (exec_place.py).
        environ: all of their environment; see `setup_environ`.
        log_path: a file that stdout and stderr are appended to; a new one is private to this user.
        timeout_s: for all commands together.
        on_line: called with each line of output, in this thread. An exception of it ends the commands.
        makes_venv: the first command is Bootseer's, creates a virtual environment, and is not counted in messages.
        watch: rules of setup_watch.py, and `looks`; None: reads are not recorded.
    Raises: SetupFailed; StorageError if the log cannot be written.
    """
    started_s = time.monotonic()
    with map_os_errors(log_path):
        log_fd = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        log = _Log(log_path, on_line)
    ours, theirs = socket.socketpair()
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-X", "utf8", _SUPERVISOR],
            stdin=theirs.fileno(),
            stdout=log_fd,
            stderr=log_fd,
            cwd="/",
            env={name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
            start_new_session=True,
        )
    except OSError as error:
        ours.close()
        log.close()
        raise SetupFailed(f"{sys.executable}: {error.strerror}: set-up commands could not be started") from error
    finally:
        theirs.close()
        os.close(log_fd)
    try:
        with ours:
            followed = _RunningCommands(commands, environ, Channel(ours), log, started_s + timeout_s, watch)
            left_running = followed.run(cwd, prefix)
    finally:
        _end(process)
        log.close()
    followed.judge(timeout_s, log_path, cwd, makes_venv)
    return SetupResult(time.monotonic() - started_s, left_running, followed.watched)


def setup_environ(
    environ: Mapping[str, str], targets: Sequence[str], *, makes_venv: bool = False
) -> dict[str, str]:
    """Return the variables of set-up commands, from those of the ranks; PATH begins with the first `bin` of a
    target.

    Args: makes_venv: the first command creates a virtual environment in the first target.
    """
    made = {
        name: value
        for name, value in environ.items()
        if name not in _OF_RANKS and not name.startswith(_OF_RANKS_PREFIXES)
    }
    for target in targets:
        directory = os.path.join(target, "bin")
        if not makes_venv and not os.path.isdir(directory):
            continue
        made["PATH"] = os.pathsep.join((directory, made.get("PATH") or os.defpath))
        if makes_venv or os.path.isfile(os.path.join(target, "pyvenv.cfg")):
            made["VIRTUAL_ENV"] = target
            made.pop("PYTHONHOME", None)
        elif os.path.isdir(os.path.join(target, "conda-meta")):
            made["CONDA_PREFIX"] = target
        break
    return made


class _RunningCommands:
    """Running commands, and their results."""

    def __init__(
        self,
        commands: Sequence[str],
        environ: Mapping[str, str],
        supervisor: Channel,
        log: _Log,
        end_s: float,
        watch: Mapping[str, Any] | None = None,
    ) -> None:
        self._commands = commands
        self._environ = environ
        self._supervisor = supervisor
        self._log = log
        self._end_s = end_s
        self._max_log_bytes = current().env.setup_log_bytes  # a command that writes more is out of control
        self._watch = None if watch is None else {**watch, "package": _PACKAGE}
        self.watched: dict[str, Any] | None = None if watch is None else {"why": ["the watcher did not report"]}
        self._done = 0  # commands that succeeded
        self._status: int | None = None  # of the one that failed
        self._why_ended = ""  # the reason, if this process ended them

    def run(self, cwd: str, prefix: Sequence[str]) -> list[str]:
        """Follow the commands to the end. Return the names of processes that they left running."""
        order = {
            "commands": list(self._commands),
            "cwd": cwd,
            "environ": dict(self._environ),
            "prefix": list(prefix),
            "watch": self._watch,
        }
        self._supervisor.send(order)
        last_s = float("inf")
        while time.monotonic() < last_s:
            is_answered = wait_readable(self._supervisor.fd, LOOK_S)
            self._log.follow()
            if is_answered:
                answers = self._supervisor.receive_ready()
                if answers is None:
                    return []  # it has ended; `judge` raises the error
                for answer in answers:
                    if "ended" in answer:
                        self._log.follow(is_last=True)
                        return [str(name) for name in answer["ended"]]
                    self._take(answer)
            elif not self._why_ended and (why := self._why_end()):
                self._why_ended = why
                self._supervisor.shutdown()  # the supervisor ends all processes, and answers
                last_s = time.monotonic() + END_S
        return []

    def _take(self, answer: dict[str, Any]) -> None:
        if "watched" in answer:
            self.watched = answer["watched"]
        elif answer["status"]:
            self._status = int(answer["status"])
        else:
            self._done += 1

    def _why_end(self) -> str:
        if time.monotonic() > self._end_s:
            return "too long"
        return "too much" if self._log.size > self._max_log_bytes else ""

    def judge(self, timeout_s: float, log_path: str, cwd: str, makes_venv: bool) -> None:
        """Raise SetupFailed unless all commands succeeded."""
        if self._done == len(self._commands):
            return
        secrets = secret_values(self._environ)
        tail = tuple(redact_text(line, secrets) for line in self._log.tail())
        command = _shorten(redact_command(self._commands[self._done], secrets))
        number, count = self._done + 1 - makes_venv, len(self._commands) - makes_venv
        which = f"set-up command {number} of {count}" if number else "creating the virtual environment"
        which += f" ({command})"
        if self._why_ended == "too long":
            what = f"was ended: all commands together took more than {timeout_s:g} s (--setup-timeout)"
        elif self._why_ended:
            what = f"was ended: it wrote more than {self._max_log_bytes >> 20} MiB"
        elif self._status is None:
            what = "was ended by another process, with all processes that it had started"
        elif self._status < 0:
            what = f"was killed by {_signal_name(-self._status)}"
        else:
            what = f"ended with status {self._status}"
        last = f": {tail[-1][:300]}" if tail else ""
        hint = ""
        if any(_ASKS.search(line) for line in tail):
            hint = "; it asked for input, which set-up cannot give; add --yes, -y or --no-input"
        elif not os.path.isdir(cwd):
            hint = f"; the directory {cwd} does not exist"
        raise SetupFailed(f"{which} {what}{last}{hint} (full output: {log_path})", tail=tail, status=self._status)


class _Log:
    """The output of the commands, read from its file."""

    def __init__(self, path: str, on_line: Callable[[str], object] | None) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        self._start = self._file.seek(0, os.SEEK_END)  # earlier content is from other commands
        self._on_line = on_line
        self._rest = b""

    @property
    def size(self) -> int:
        """Bytes that these commands have written."""
        return os.fstat(self._file.fileno()).st_size - self._start

    def follow(self, *, is_last: bool = False) -> None:
        """Pass on new output, line by line."""
        if self._on_line is None:
            return
        for _ in range(MAX_READS):
            data = self._file.read(1 << 16)
            if not data:
                break
            *lines, rest = (self._rest + data).split(b"\n")
            self._rest = rest[-MAX_LINE_BYTES:]
            for line in lines:
                self._on_line(_to_text(line))
        if is_last and self._rest:
            self._on_line(_to_text(self._rest))
            self._rest = b""

    def tail(self) -> list[str]:
        """Return the last lines that are not empty."""
        size = TAIL_LINES * MAX_LINE_BYTES
        with open(self._file.name, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self._start, end - size))
            lines = [_to_text(line) for line in file.read(size).split(b"\n")]
        return [line for line in lines if line.strip()][-TAIL_LINES:]

    def close(self) -> None:
        self._file.close()


def _to_text(line: bytes) -> str:
    """Decode a line as a terminal shows it: the last state of a progress bar."""
    return line.rstrip(b"\r").rpartition(b"\r")[2][:MAX_LINE_BYTES].decode(errors="replace")


def _shorten(command: str) -> str:
    one_line = " ".join(command.split())
    return one_line if len(one_line) <= 100 else one_line[:97] + "..."


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the supervisor: after the socket is closed, it ends all processes, then itself.

    One that waits in the kernel is left behind.
    """
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        end_process(process)
