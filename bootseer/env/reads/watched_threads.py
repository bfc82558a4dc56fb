"""The threads whose calls set-up's watch gets: names in their memory, and what program each runs. Stdlib only."""

from __future__ import annotations

import errno
import os
import re

from bootseer.env.reads.watch_calls import HERE

MAX_OPEN = 200  # open memory files of processes
PATH_BYTES, MAX_PATH_BYTES = 256, 4096

_AT_FDCWD = (1 << 32) - 100
# Reads of compilers outside the roots are not recorded: the key covers the machine's own compilers separately.
_COMPILERS = re.compile(
    rb"(cc1\w*|collect2|lto1|lto-wrapper|as|ld(\.\w+)?|[\w.-]*-?(gcc|g\+\+|c\+\+|cc|clang|clang\+\+)(-[\d.]+)?|ar|nm"
    rb"|strip|nvcc|cicc|ptxas|cudafe\+\+|fatbinary|nvlink|hipcc|rustc|cargo|cmake|ninja|make|pkg-config|ldconfig"
    rb"|gfortran|f951|cython)"
)


class WatchedThreads:
    """Reads threads that wait in a call; keeps their open memory files."""

    def __init__(self) -> None:
        self._memories: dict[int, int] = {}

    def locate(self, thread: int, raw: bytes, directory: int) -> bytes | None:
        """Return the absolute path of a name."""
        if raw[:1] != b"/":
            if not raw:
                return None
            here = (
                "cwd"
                if directory == HERE or directory & 0xFFFFFFFF == _AT_FDCWD
                else f"fd/{directory & 0xFFFFFFFF}"
            )
            raw = os.fsencode(os.readlink(f"/proc/{thread}/{here}")) + b"/" + raw
            if raw[:1] != b"/":
                return None
        if b"/." in raw or b"//" in raw or raw[-1:] == b"/":
            raw = _plain(raw)
        return raw

    def read_text(self, thread: int, address: int) -> bytes:
        """Return the name at an address. Raises: OSError."""
        data = self.read(thread, address, PATH_BYTES)
        if b"\0" not in data:
            data = self.read(thread, address, MAX_PATH_BYTES)
        return data.partition(b"\0")[0]

    def read(self, thread: int, address: int, size: int) -> bytes:
        """Read memory of a thread; its memory file changes with an exec. Raises: OSError."""
        for _ in range(2):
            fd = self._memories.get(thread)
            if fd is None:
                if len(self._memories) >= MAX_OPEN:
                    self.forget_all()
                fd = self._memories[thread] = os.open(f"/proc/{thread}/mem", os.O_RDONLY | os.O_CLOEXEC)
            try:
                data = os.pread(fd, size, address)
            except OSError:
                data = b""
            if data:
                return data
            self.forget(thread)
        raise OSError(errno.ESRCH, "the memory of the process cannot be read")

    def forget(self, thread: int) -> None:
        """Close the memory file of a thread: it executes a program, or has ended."""
        fd = self._memories.pop(thread, None)
        if fd is not None:
            os.close(fd)

    def forget_all(self) -> None:
        """Close all memory files."""
        for thread in list(self._memories):
            self.forget(thread)

    def program(self, thread: int) -> bytes:
        """Return the file name of its present program; b"" if it has ended."""
        try:
            return os.path.basename(os.fsencode(os.readlink(f"/proc/{thread}/exe")))
        except OSError:
            return b""

    def words(self, thread: int) -> bytes:
        """Return its command line, with a NUL after each word. Raises: OSError."""
        with open(f"/proc/{thread}/cmdline", "rb") as file:
            return file.read()

    def is_compiler(self, thread: int) -> bool:
        # Asked anew each time: before an exec it runs another program, and ids are reused.
        return _COMPILERS.fullmatch(self.program(thread)) is not None


def _plain(path: bytes) -> bytes:
    """Normalize a path; `..` is resolved through links, as in the kernel."""
    if b"/../" in path or path.endswith(b"/.."):
        parts = path.split(b"/")
        last = len(parts) - 1 - parts[::-1].index(b"..")
        above = os.path.realpath(b"/".join(parts[: last + 1]))
        path = above + b"/" + b"/".join(parts[last + 1 :])
    return os.path.normpath(b"/" + path.lstrip(b"/"))
