"""The supervisor's end of the fork server: starts it, forwards requests, reads its messages, ends it.

In: requests of bootrun (supervisor.py). Out: ranks that have become the supervisor's children, or why they must be
exec'd. Its messages are untrusted, as it runs modules of the user: frames are bounded and checked, and an error
only ends the fork server. Stdlib only. The other end: fork_server.py.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import time
from _socket import AF_UNIX, SOCK_STREAM, socketpair
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

# From the request until all ranks are forked, with the check of its files on a slow file system.
FORK_LIMIT_S = 10.0
MAX_FRAME_BYTES = 1 << 20
OUTPUT_BYTES = 64 * 1024  # maximum output of imports before they fail
# Signals that do not blame the imported module: sent by an operator, a scheduler or the kernel's OOM killer.
FROM_OUTSIDE = {getattr(signal, "SIG" + name) for name in ("TERM", "KILL", "HUP", "INT", "QUIT", "XCPU", "PIPE")}
SOCKET_FD, CONSOLE_FDS = 4, (5, 6, 7)  # as fork_server.py expects them

ForkExec = Callable[[Sequence[tuple[int, int]]], tuple[int, int]]


def start(number: int, modules: list[str], fork_exec: ForkExec, tell: Callable[..., object]) -> ForkServerProcess:
    """Start the fork server.

    Args: number: distinguishes it from earlier ones; fork_exec: takes descriptors, returns its pid and the pipe
        that reports a failed exec.
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
    process = ForkServerProcess(number, pid, ours.detach(), exec_fd, output, tell)
    process.send("modules", *modules)
    return process


class EndReason(NamedTuple):
    """Why the process has ended, for users; a predicate of the module in import, if there is one."""

    why: str
    is_of_process: bool = False  # its subject is the process: "it"


NO_REASON = EndReason("")


class ForkServerProcess:
    """The connection to the fork server. `asked`: the ranks of a request without an answer."""

    def __init__(
        self, number: int, pid: int, fd: int, exec_fd: int, output_fd: int, tell: Callable[..., object]
    ) -> None:
        self.number = number
        self.pid = pid
        self.fd = fd
        self.importing = ""  # the module in import, or the one that has ended it, and its importers
        self.end = NO_REASON
        self.asked: list[Any] = []
        self.parked: list[int] = []  # standby processes
        self.deadline_s: float | None = None
        self.is_gone = False
        self.is_to_blame = False  # the module `importing` has failed
        self._exec_fd = exec_fd
        self._output_fd = output_fd
        self._tell = tell
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._at_end = False
        self._is_garbled = False
        self._is_killed = False  # by the supervisor
        self._refusal = ""
        os.set_blocking(fd, False)

    @property
    def wanted(self) -> int:
        """The poll events for its descriptor."""
        if self._at_end:
            return 0
        return select.POLLIN | (select.POLLOUT if self._outgoing else 0)

    # ---- requests --------------------------------------------------------------------------------------------

    def send(self, *fields: str) -> None:
        """Queue one frame, and send as much as possible."""
        data = b"\0".join(os.fsencode(field) for field in fields)
        self._outgoing += len(data).to_bytes(4, "little") + data
        self.write()

    def ask_prepare(self, count: int) -> None:
        """Announce a request for `count` ranks."""
        self.send("prepare", str(count))

    def ask_fork(self, port: int, spare: int, base: dict[str, str], ranks: list[Any]) -> None:
        """Request ranks: (key, argv, environ, unset, stdout, stderr) each."""
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
            self._outgoing.clear()  # it has ended, which `read` sees too

    # ---- answers ---------------------------------------------------------------------------------------------

    def read(self) -> list[tuple[int, int, int, str]]:
        """Read and handle its messages; return new ranks: key, pid, monotonic ns, RANK."""
        new: list[tuple[int, int, int, str]] = []
        try:
            while not self._at_end:
                data = os.read(self.fd, 1 << 16)
                self._incoming += data
                if not data:
                    self._at_end = True
                    self.kill()
        except BlockingIOError:
            pass
        except OSError:
            self._at_end = True
        while len(self._incoming) >= 4 and not self._is_garbled:
            end = 4 + int.from_bytes(self._incoming[:4], "little")
            if end > MAX_FRAME_BYTES:
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
            self.kill(self._find_subject(f"did not answer within {FORK_LIMIT_S:g} s"))
        return new

    def _note_garbled(self) -> None:
        self._is_garbled = True  # later data is not trusted
        self.kill(self._find_subject("sent an invalid message"))

    def _take(self, fields: list[str], new: list[tuple[int, int, int, str]]) -> None:
        match fields[0]:
            case "importing":
                self.importing = fields[1]
            case "ready":
                self._tell("preload_ready", self.number, int(fields[1]), fields[2:])
            case "failed":
                self.importing = "\n".join([fields[1], *fields[3:]])  # with its importers
                self.is_to_blame = True
                self.kill(EndReason(fields[2]))
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
        """Return the ranks that must be exec'd, and why."""
        if self.asked and (self._refusal or self.is_gone):
            asked, why = self.asked, self._refusal or f"the fork server has ended: {self.end.why}"
            self._refusal = ""
            self._settle()
            return asked, why
        return [], ""

    def _settle(self) -> None:
        self.asked = []
        self.deadline_s = None

    # ---- the end ---------------------------------------------------------------------------------------------

    def kill(self, end: EndReason = NO_REASON) -> None:
        """Kill it with its descendants, except for those that have become ranks."""
        from bootseer.linux import processes

        self._note_end(end)
        if self.is_gone:
            return
        self._is_killed = True
        for process in processes.list_descendants(self.pid):
            processes.send(process, signal.SIGKILL)
        os.kill(self.pid, signal.SIGKILL)  # not reaped, so the pid is its own

    def note_exit(self, status: int) -> None:
        """Record the reason of its end, after it was reaped."""
        failed = os.read(self._exec_fd, 4096)
        self.is_to_blame |= -status not in FROM_OUTSIDE and not self._is_killed
        self.is_gone = True
        if failed:
            end = EndReason("its interpreter cannot be started")
        elif status == -signal.SIGKILL and self._at_end:
            end = self._find_subject(f"was ended by SIGKILL or closed its connection{self._printed()}")
        elif status < 0:
            end = self._find_subject(f"was ended by {_name(-status)}{self._printed()}")
        else:
            end = self._find_subject(f"ended with status {status}{self._printed()}")
        self._note_end(end)

    def _note_end(self, end: EndReason) -> None:
        if not self.end.why:  # the first reason counts
            self.end = end

    def _find_subject(self, what: str) -> EndReason:
        """Return the reason for its end, as a predicate of the module in import, or of "it"."""
        if self.importing:
            return EndReason(f"was being imported when the process {what}")
        return EndReason(f"it {what}", is_of_process=True)

    def _printed(self) -> str:
        """Return the last line that it printed, for the reason."""
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
