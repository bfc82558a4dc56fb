"""Progress of long work on stderr: a line that is drawn anew on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

TERMINAL_EVERY_S = 0.2
LOG_EVERY_S = 10.0


class ProgressLine:
    """As `bootseer ckpt stripe: 1.2 GB of 4 GB, 830 MB/s`. Nothing is shown of work that is done at once."""

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
        """Bytes that are done, of how many."""
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
        """Since the beginning."""
        return f"{format_bytes(self.done / max(self.elapsed_s, 1e-6))}/s"

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_drawn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def format_bytes(count: float) -> str:
    """Powers of 1000: 12 B, 4.1 kB, 830 MB, 1.4 GB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 999.5 or unit == "TB":
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1000
    raise AssertionError
