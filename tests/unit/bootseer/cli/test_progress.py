"""Sizes and progress as people see them."""

from __future__ import annotations

import io

import pytest

from bootseer.cli import progress
from bootseer.cli.progress import ProgressLine
from bootseer.cli.sizes import parse_size
from bootseer.counted import format_bytes
from bootseer.errors import UsageError


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_499, "999 kB"), (999_600, "1 MB"), (1.42e9, "1.42 GB"),
     (5e15, "5e+03 TB")],
)  # fmt: skip
def test_format_bytes(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4096", 4096),
        ("16MiB", 16 << 20),
        ("1.5GiB", 3 << 29),
        ("200GB", 200 * 10**9),
        ("64k", 64000),
        ("1 M", 10**6),
    ],
)
def test_parse_size(text: str, count: int) -> None:
    assert parse_size(text, "--unit") == count


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1e9", "12 parsecs"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--unit"):
        parse_size(text, "--unit")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_one_line_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "TERMINAL_EVERY_S", 0.0)
    stream = Terminal()
    with ProgressLine("copy", stream=stream) as line:
        line(500, 2000)
        line(2000, 2000)
    assert "copy: 500 B of 2 kB" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_a_log_gets_lines_now_and_then_and_quiet_none(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    with ProgressLine("copy", stream=stream) as line:
        line(1, 2)
    assert stream.getvalue() == ""  # it took no time
    monkeypatch.setattr(progress, "LOG_EVERY_S", 0.0)
    with ProgressLine("copy", stream=stream) as line:
        line(1, 2)
    assert stream.getvalue().startswith("copy: 1 B of 2 B, ") and stream.getvalue().endswith("\n")
    quiet = io.StringIO()
    ProgressLine("copy", stream=quiet, is_quiet=True)(1, 2)
    assert quiet.getvalue() == ""
