"""The guard's end of the preloaded process: starts it, passes requests on, reads what it says, ends it.

In: requests of bootrun (guard.py). Out: ranks that have become the guard's children, or why they must be exec'd.
What the process says is untrusted, as it runs modules of the user's: frames are bounded and checked, and whatever
is wrong with it only ends it. Stdlib only. The other end: preloaded.py.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import time
from _socket import AF_UNIX, SOCK_STREAM, socketpair
from collections.abc import Callable, Sequence
from typing import Any

# From the request to all ranks forked; also for the look at its files on a slow file system.
FORK_LIMIT_S = 10.0
MOST_FRAME_BYTES = 1 << 20
OUTPUT_BYTES = 64 * 1024  # what imports can print before they fail
# Signals that say nothing about what was being imported: an operator, a scheduler, the end of memory.
FROM_OUTSIDE = {getattr(signal, "SIG" + name) for name in ("TERM", "KILL", "HUP", "INT", "QUIT", "XCPU", "PIPE")}
SOCKET_FD, CONSOLE_FDS = 4, (5, 6, 7)  # as preloaded.py expects them

ForkExec = Callable[[Sequence[tuple[int, int]]], tuple[int, int]]


def start(number: int, modules: list[str], fork_exec: ForkExec, tell: Callable[..., object]) -> PreloadedProcess:
    """Starts the process.

    Args: number: tells it from earlier ones; fork_exec: takes descriptors, gives its pid and the pipe that tells
        of a failed exec.
    """
    ours, theirs = socketpair(AF_UNIX, SOCK_STREAM)
    output = os.memfd_create("preload-output", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(output, OUTPUT_BYTES)
    fcntl.fcntl(output, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    console = [(number, fd) for number, fd in enumerate(CONSOLE_FDS)]
    try:
        pid, exec_fd = fork_exec([(null, 0), (output, 1), (output, 2), (theirs.fileno(), SOCKET_FD), *console])
    except OSError:
        ours.close()
        os.close(output)
        raise
    finally:
        os.close(null)
        theirs.close()
    process = PreloadedProcess(number, pid, ours.detach(), exec_fd, output, tell)
    process.send("modules", *modules)
    return process


class PreloadedProcess:
    """The process as the guard sees it. `asked`: the ranks of a request that is not answered."""

    def __init__(
        self, number: int, pid: int, fd: int, exec_fd: int, output_fd: int, tell: Callable[..., object]
    ) -> None:
        self.number = number
        self.pid = pid
        self.fd = fd
        self.importing = ""  # the module that is being imported, or whose fault its end was, and what imports it
        self.why = ""
        self.asked: list[Any] = []
        self.parked: list[int] = []  # processes that wait to become ranks
        self.deadline_s: float | None = None
        self.is_gone = False
        self.is_to_blame = False  # `importing` has failed by itself
        self._exec_fd = exec_fd
        self._output_fd = output_fd
        self._tell = tell
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._at_end = False
        self._is_garbled = False
        self._is_killed = False  # by us
        self._refusal = ""
        os.set_blocking(fd, False)

    @property
    def wanted(self) -> int:
        """What to poll its descriptor for."""
        if self._at_end:
            return 0
        return select.POLLIN | (select.POLLOUT if self._outgoing else 0)

    # ---- requests --------------------------------------------------------------------------------------------

    def send(self, *fields: str) -> None:
        """Queues one frame; `write` sends."""
        data = b"\0".join(os.fsencode(field) for field in fields)
        self._outgoing += len(data).to_bytes(4, "little") + data
        self.write()

    def ask_prepare(self, count: int) -> None:
        """Ranks will be asked for soon."""
        self.send("prepare", str(count))

    def ask_fork(self, port: int, spare: int, base: dict[str, str], ranks: list[Any]) -> None:
        """Asks for ranks: (key, argv, environ, unset, stdout, stderr) each."""
        fields = [
            "fork",
            str(os.getpid()),
            str(port),
            str(spare),
            str(len(base)),
            *(f"{k}={v}" for k, v in base.items()),
        ]
        for key, argv, environ, _unset, stdout, stderr in ranks:
            pairs = [f"{name}={value}" for name, value in environ.items()]
            fields += [str(key), stdout or "", stderr or "", str(len(argv)), *argv, str(len(pairs)), *pairs]
        self.asked = ranks
        self.deadline_s = time.monotonic() + FORK_LIMIT_S
        self.send(*fields)

    def write(self) -> None:
        try:
            while self._outgoing and not self._at_end:
                del self._outgoing[: os.write(self.fd, self._outgoing[: 1 << 18])]
        except BlockingIOError:
            pass
        except OSError:
            self._outgoing.clear()  # it has ended; `read` sees that too

    # ---- answers ---------------------------------------------------------------------------------------------

    def read(self) -> list[tuple[int, int, int, str]]:
        """Takes in what it has said; returns new ranks: key, pid, monotonic ns, RANK."""
        new: list[tuple[int, int, int, str]] = []
        try:
            while not self._at_end:
                data = os.read(self.fd, 1 << 16)
                self._incoming += data
                if not data:
                    self._at_end = True
                    self.kill("")
        except BlockingIOError:
            pass
        except OSError:
            self._at_end = True
        while len(self._incoming) >= 4 and not self._is_garbled:
            end = 4 + int.from_bytes(self._incoming[:4], "little")
            if end > MOST_FRAME_BYTES:
                self._note_garbled()
                break
            if len(self._incoming) < end:
                break
            fields = [os.fsdecode(field) for field in bytes(self._incoming[4:end]).split(b"\0")]
            del self._incoming[:end]
            try:
                self._take(fields, new)
            except (ValueError, IndexError):
                self._note_garbled()
        if self.deadline_s is not None and time.monotonic() >= self.deadline_s:
            self.deadline_s = None
            self.kill(self._blame(f"did not answer within {FORK_LIMIT_S:g} s"))
        return new

    def _note_garbled(self) -> None:
        self._is_garbled = True  # nothing that follows is believed
        self.kill(self._blame("said what could not be understood"))

    def _take(self, fields: list[str], new: list[tuple[int, int, int, str]]) -> None:
        match fields[0]:
            case "importing":
                self.importing = fields[1]
            case "ready":
                self._tell("preload_ready", self.number, int(fields[1]), fields[2:])
            case "failed":
                self.importing = "\n".join([fields[1], *fields[3:]])  # what imports it goes with it
                self.is_to_blame = True
                self.kill(fields[2])
            case "refused":
                self._refusal = fields[1]
            case "parked":
                self.parked = [int(pid) for pid in fields[1:]]
            case "discarded":
                self.parked = []
            case "forked":
                if len(self.asked) != len(self.parked) or len(fields) != 1 + 2 * len(self.asked):
                    raise ValueError(fields)
                for rank, pid, time_ns in zip(self.asked, self.parked, fields[2::2], strict=True):
                    new.append((rank[0], pid, int(time_ns), rank[2].get("RANK", "")))
                self.parked = []
                self._settle()
            case _:
                raise ValueError(fields[0])

    def take_refused(self) -> tuple[list[Any], str]:
        """Ranks that must be exec'd after all, and why."""
        if self.asked and (self._refusal or self.is_gone):
            asked, why = self.asked, self._refusal or f"the preloaded process has ended: {self.why}"
            self._refusal = ""
            self._settle()
            return asked, why
        return [], ""

    def _settle(self) -> None:
        self.asked = []
        self.deadline_s = None

    # ---- the end ---------------------------------------------------------------------------------------------

    def kill(self, why: str) -> None:
        """Ends it, with what it has started and what has not become a rank yet."""
        from launcher import descendants

        self.why = self.why or why
        if self.is_gone:
            return
        self._is_killed = True
        for process in descendants.list_descendants(self.pid):
            descendants.send(process, signal.SIGKILL)
        os.kill(self.pid, signal.SIGKILL)  # not reaped, so nobody else's pid

    def note_exit(self, status: int) -> None:
        """It has been reaped."""
        failed = os.read(self._exec_fd, 4096)
        self.is_to_blame |= -status not in FROM_OUTSIDE and not self._is_killed
        self.is_gone = True
        if failed:
            why = "its interpreter cannot be started"
        elif status == -signal.SIGKILL and self._at_end:
            why = self._blame(f"was ended by SIGKILL or closed its connection{self._printed()}")
        elif status < 0:
            why = self._blame(f"was ended by {_name(-status)}{self._printed()}")
        else:
            why = self._blame(f"ended with status {status}{self._printed()}")
        self.why = self.why or why

    def _blame(self, what: str) -> str:
        """The reason for what the process did, as a predicate of the module that it was importing, if it was."""
        return f"was being imported when the process {what}" if self.importing else f"it {what}"

    def _printed(self) -> str:
        """The last line that it printed, for the reason."""
        size = os.lseek(self._output_fd, 0, os.SEEK_CUR)
        lines = os.pread(self._output_fd, min(size, OUTPUT_BYTES), 0).decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f" ({last[:200]})" if last else ""

    def close(self) -> None:
        for fd in (self.fd, self._exec_fd, self._output_fd):
            os.close(fd)


def _name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
