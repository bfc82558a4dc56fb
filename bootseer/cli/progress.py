"""Progress of long work on stderr: a line that is redrawn on a terminal, otherwise a line every few seconds.

With `--json` each line is one JSON object, at the same moments:

    {"progress": {"what": "bootseer ckpt stripe", "done_bytes": 1200, "total_bytes": 4000, "files": null,
                  "bytes_per_s": 830.0, "left_s": 3.4}}

What is not known is null: `total_bytes` and `left_s` of work of unknown size, `files` where they are not counted.
"""

from __future__ import annotations

import json
import sys
import time
from types import TracebackType
from typing import TextIO

from bootseer.counted import counted, format_bytes

TERMINAL_EVERY_S = 0.2
FIRST_LOG_S = 2.0  # shorter work shows nothing in a log
LOG_EVERY_S = 10.0


class ProgressLine:
    """A progress line: `bootseer ckpt stripe: 1.2 GB of 4 GB, 830 MB/s, 4 s left`. Short work shows nothing."""

    def __init__(
        self, what: str, *, is_quiet: bool = False, as_json: bool = False, stream: TextIO | None = None
    ) -> None:
        self._what = what
        self._stream = sys.stderr if stream is None else stream
        self._as_json = as_json
        self._is_terminal = self._stream.isatty() and not as_json
        self._is_quiet = is_quiet
        self._began_s = time.monotonic()
        self._next_s = self._began_s + (TERMINAL_EVERY_S if self._is_terminal else FIRST_LOG_S)
        self._is_drawn = False
        self.done = 0  # bytes
        self.files: int | None = None  # so far; None: they are not counted

    def __call__(self, done: int, total: int) -> None:
        """Show the bytes done, and their total; 0: it is not known."""
        self.done = done
        now_s = time.monotonic()
        if self._is_quiet or now_s < self._next_s:
            return
        self._next_s = now_s + (TERMINAL_EVERY_S if self._is_terminal else LOG_EVERY_S)
        if self._as_json:
            self._stream.write(json.dumps({"progress": self._record(total)}) + "\n")
        elif self._is_terminal:
            self._stream.write(f"\r\x1b[K{self._text(total)}")
            self._is_drawn = True
        else:
            self._stream.write(self._text(total) + "\n")
        self._stream.flush()

    def count(self, size: int, files: int) -> None:
        """Add bytes and files of work of unknown size."""
        self.files = (self.files or 0) + files
        self(self.done + size, 0)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    @property
    def bytes_per_s(self) -> float:
        """The average rate since the beginning."""
        return self.done / max(self.elapsed_s, 1e-6)

    def rate(self) -> str:
        """Return the average rate since the beginning."""
        return f"{format_bytes(self.bytes_per_s)}/s"

    def _left_s(self, total: int) -> float | None:
        return (total - self.done) / self.bytes_per_s if 0 < self.done <= total else None

    def _text(self, total: int) -> str:
        what = f"{format_bytes(self.done)} of {format_bytes(total)}" if total else format_bytes(self.done)
        if self.files is not None:
            what += f" in {counted(self.files, 'file')}"
        left_s = self._left_s(total)
        left = "" if left_s is None else f", {_span(left_s)} left"
        return f"{self._what}: {what}, {self.rate()}{left}"

    def _record(self, total: int) -> dict[str, object]:
        left_s = self._left_s(total)
        return {
            "what": self._what,
            "done_bytes": self.done,
            "total_bytes": total or None,
            "files": self.files,
            "bytes_per_s": round(self.bytes_per_s, 1),
            "left_s": None if left_s is None else round(left_s, 1),
        }

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_drawn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def _span(seconds: float) -> str:
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
