"""Sizes and progress as people see them."""

from __future__ import annotations

import io
import json

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
    monkeypatch.setattr(progress, "FIRST_LOG_S", 0.0)
    with ProgressLine("copy", stream=stream) as line:
        line(1, 2)
        line(2, 2)
    assert stream.getvalue().startswith("copy: 1 B of 2 B, ") and stream.getvalue().endswith(" left\n")
    assert stream.getvalue().count("\n") == 1, "the next one follows after a while"
    quiet = io.StringIO()
    ProgressLine("copy", stream=quiet, is_quiet=True)(1, 2)
    assert quiet.getvalue() == ""


class Clock:
    """The time that a test sets."""

    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


def test_what_is_left_follows_from_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    stream = io.StringIO()
    line = ProgressLine("copy", stream=stream)
    for now_s, done, total in ((101.9, 1, 2), (102.0, 1000, 6000), (111.9, 3000, 6000), (112.0, 5000, 6_000_000)):
        clock.now_s = now_s
        line(done, total)
    assert stream.getvalue().splitlines() == [
        "copy: 1 kB of 6 kB, 500 B/s, 10 s left",
        "copy: 5 kB of 6 MB, 417 B/s, 4 h 0 min left",
    ]


def test_work_of_unknown_size_counts_files(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    stream = io.StringIO()
    line = ProgressLine("build", stream=stream)
    line.count(1000, 3)
    clock.now_s = 104.0
    line.count(1000, 1)
    assert stream.getvalue() == "build: 2 kB in 4 files, 500 B/s\n"


def test_as_json_each_line_is_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    stream = Terminal()
    with ProgressLine("copy", stream=stream, as_json=True) as line:
        for now_s, total in ((104.0, 4000), (120.0, 0)):
            clock.now_s = now_s
            line(2000, total)
    common = {"what": "copy", "done_bytes": 2000, "files": None}
    assert [json.loads(each)["progress"] for each in stream.getvalue().splitlines()] == [
        {**common, "total_bytes": 4000, "bytes_per_s": 500.0, "left_s": 4.0},
        {**common, "total_bytes": None, "bytes_per_s": 100.0, "left_s": None},
    ]
