"""Progress of long work on stderr: a line that is redrawn on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

from bootseer.counted import format_bytes

TERMINAL_EVERY_S = 0.2
LOG_EVERY_S = 10.0


class ProgressLine:
    """A progress line: `bootseer ckpt stripe: 1.2 GB of 4 GB, 830 MB/s`. Short work shows nothing."""

    def __init__(self, what: str, *, is_quiet: bool = False, stream: TextIO | None = None) -> None:
        self._what = what
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._is_quiet = is_quiet
        self._began_s = time.monotonic()
        self._shown_s = self._began_s
        self._is_drawn = False
        self.done = 0  # bytes

    def __call__(self, done: int, total: int) -> None:
        """Show the bytes done, and their total."""
        self.done = done
        now_s = time.monotonic()
        if self._is_quiet or now_s - self._shown_s < (TERMINAL_EVERY_S if self._is_terminal else LOG_EVERY_S):
            return
        self._shown_s = now_s
        text = f"{self._what}: {format_bytes(done)} of {format_bytes(total)}, {self.rate()}"
        if self._is_terminal:
            self._stream.write(f"\r\x1b[K{text}")
            self._is_drawn = True
        else:
            self._stream.write(text + "\n")
        self._stream.flush()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def rate(self) -> str:
        """Return the average rate since the beginning."""
        return f"{format_bytes(self.done / max(self.elapsed_s, 1e-6))}/s"

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_drawn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
