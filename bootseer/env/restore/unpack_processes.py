"""Unpack processes (unpack_helper.py): start, messages, end.

They start before their tree is known (`begin_spare`), and before their parent has imported its other modules, so
this module imports little. Failures raise HelperFailedError.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from bootseer.errors import BootseerError
from bootseer.ipc.framing import InvalidMessageError, LineBuffer
from bootseer.linux.cgroups import usable_cores
from bootseer.own_module import command_of
from bootseer.storage.local_stores import directory_of
from bootseer.tree.unpack.helpers import HelperFailedError
from bootseer.tuning import current

MAX_LINE_BYTES = 1 << 20
_END_S = 5.0
# Freed blocks stay in the heap: the kernel would have to clear the pages each time.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "67108864", "MALLOC_TRIM_THRESHOLD_": "134217728"}


class UnpackProcess:
    def __init__(self, environ: Mapping[str, str], memory_fd: int) -> None:
        """Raises: HelperFailedError."""
        self._lines = LineBuffer(MAX_LINE_BYTES)
        try:
            self.process = subprocess.Popen(
                command_of("bootseer.env.restore.unpack_helper", str(memory_fd)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env={**environ, **_MALLOC},
                pass_fds=[memory_fd],
                process_group=0,  # a terminal interrupts only the waiting parent
            )
        except OSError as error:
            raise HelperFailedError(f"an unpack process cannot be started: {error.strerror}") from error
        assert self.process.stdout is not None
        self.said_fd = self.process.stdout.fileno()

    def tell(self, line: bytes) -> None:
        """Send a line, given without its end; never blocks, as few lines are queued. Raises: HelperFailedError."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + b"\n")
        except OSError as error:
            raise self._dead() from error

    def read(self) -> list[bytes]:
        """Return received lines. Raises: HelperFailedError."""
        data = os.read(self.said_fd, 1 << 16)
        if not data:
            raise self._dead()
        try:
            return self._lines.feed(data)
        except InvalidMessageError as error:
            raise self._dead() from error

    def kill(self) -> None:
        self.process.kill()

    def close(self) -> None:
        """Collect the killed process."""
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            pass  # it is blocked in the kernel, and ends when that returns
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _dead(self) -> HelperFailedError:
        self.process.kill()
        try:
            status = f"with status {self.process.wait(_END_S)}"
        except subprocess.TimeoutExpired:
            status = "for an unknown reason"
        return HelperFailedError(f"an unpack process has ended {status}")


class UnpackProcesses:
    """A set of unpack processes, and their shared memory."""

    def __init__(self, environ: Mapping[str, str], count: int) -> None:
        """Raises: HelperFailedError."""
        self.environ = dict(environ)
        self.processes: list[UnpackProcess] = []
        with memory_errors():
            self.memory_fd = os.memfd_create("bootseer-unpack", os.MFD_CLOEXEC)
        try:
            for _ in range(count):
                self.processes.append(UnpackProcess(environ, self.memory_fd))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all processes, even during work."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.close()
        self.processes.clear()
        if self.memory_fd >= 0:
            os.close(self.memory_fd)
            self.memory_fd = -1


_spare: list[UnpackProcesses] = []  # at most one; without an order


def begin_spare(url: str, environ: Mapping[str, str]) -> None:
    """Start processes for a tree of the store at `url`, if they would be used for one. Never fails."""
    if _spare or cores() < 2:
        return
    with suppress(BootseerError):  # unpacking tries again, and reports errors of the URL
        if url and directory_of(url):
            _spare.append(UnpackProcesses(environ, cores()))


def take_spare(environ: Mapping[str, str]) -> UnpackProcesses | None:
    """Return the spare processes if they are equal to new ones, else None."""
    if _spare and _spare[0].environ == environ:
        return _spare.pop()
    end_spare()
    return None


def end_spare() -> None:
    """End unused spare processes."""
    if _spare:
        _spare.pop().close()


def cores() -> int:
    """Return how many processes can work at the same time."""
    return min(current().env.unpack_processes, usable_cores())


@contextmanager
def memory_errors() -> Iterator[None]:
    """Convert an OSError into HelperFailedError."""
    try:
        yield
    except OSError as error:
        raise HelperFailedError(f"the shared memory of unpack processes failed: {error.strerror}") from error
