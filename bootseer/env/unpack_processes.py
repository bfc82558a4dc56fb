"""Processes of unpack_helper.py: started, told lines, heard, ended.

They begin before it is known which tree they are for (`begin_spare`), and before whoever starts them has imported
the rest: so this imports little. What goes wrong with them is a HelperFailedError.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from bootseer.errors import BootseerError
from bootseer.own_module import command_of
from bootseer.storage.cpu_limits import usable_cores
from bootseer.storage.near import folder_of
from bootseer.tree.materialise_helpers import HelperFailedError

MOST_PROCESSES = 8
_END_S = 5.0
# Blocks that are unpacked go back to the heap, not to the kernel, which would have to clear them each time.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "67108864", "MALLOC_TRIM_THRESHOLD_": "134217728"}


class HelperProcess:
    """One of them."""

    def __init__(self, environ: Mapping[str, str], memory_fd: int) -> None:
        """Raises: HelperFailedError."""
        self._line = b""
        try:
            self.process = subprocess.Popen(
                command_of("bootseer.env.unpack_helper", str(memory_fd)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env={**environ, **_MALLOC},
                pass_fds=[memory_fd],
                process_group=0,  # what a terminal interrupts is the one who waits for it
            )
        except OSError as error:
            raise HelperFailedError(f"a process that unpacks cannot be started: {error.strerror}") from error
        assert self.process.stdout is not None
        self.said_fd = self.process.stdout.fileno()

    def tell(self, line: bytes) -> None:
        """Without its end; few lines wait at a time, so that it never blocks. Raises: HelperFailedError."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + b"\n")
        except OSError as error:
            raise self._dead() from error

    def read(self) -> list[bytes]:
        """Lines that have come. Raises: HelperFailedError."""
        data = os.read(self.said_fd, 1 << 16)
        if not data:
            raise self._dead()
        *lines, self._line = (self._line + data).split(b"\n")
        return lines

    def kill(self) -> None:
        self.process.kill()

    def close(self) -> None:
        """When it was killed."""
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            pass  # it hangs in the kernel, and ends when it comes back
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _dead(self) -> HelperFailedError:
        self.process.kill()
        try:
            status = f"with status {self.process.wait(_END_S)}"
        except subprocess.TimeoutExpired:
            status = "for no known reason"
        return HelperFailedError(f"a process that unpacks has ended {status}")


class Started:
    """So many of them, and the memory that they share."""

    def __init__(self, environ: Mapping[str, str], count: int) -> None:
        """Raises: HelperFailedError."""
        self.environ = dict(environ)
        self.processes: list[HelperProcess] = []
        with memory_errors():
            self.memory_fd = os.memfd_create("bootseer-unpack", os.MFD_CLOEXEC)
        try:
            for _ in range(count):
                self.processes.append(HelperProcess(environ, self.memory_fd))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends them all, in the middle of whatever they do."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.close()
        self.processes.clear()
        if self.memory_fd >= 0:
            os.close(self.memory_fd)
            self.memory_fd = -1


_spare: list[Started] = []  # at most one; without an order


def begin_spare(url: str, environ: Mapping[str, str]) -> None:
    """Starts them for a tree of the store at `url`, if they would be used for one. Never fails."""
    if _spare or cores() < 2:
        return
    with suppress(BootseerError):  # whoever unpacks tries again, and says what is wrong with the URL
        if url and folder_of(url):
            _spare.append(Started(environ, cores()))


def take_spare(environ: Mapping[str, str]) -> Started | None:
    """Those, if they are as good as new ones."""
    if _spare and _spare[0].environ == environ:
        return _spare.pop()
    end_spare()
    return None


def end_spare() -> None:
    """Those that nobody has needed."""
    if _spare:
        _spare.pop().close()


def cores() -> int:
    """How many of them have something to do at once."""
    return min(MOST_PROCESSES, usable_cores())


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raises: HelperFailedError for an OSError."""
    try:
        yield
    except OSError as error:
        raise HelperFailedError(f"processes that unpack cannot be told what to do: {error.strerror}") from error
