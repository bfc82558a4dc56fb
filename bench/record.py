"""What a bench measured: figures with every sample, their table and their JSON.

A figure's value is always the median of its samples. `low` and `high` enclose that median with at least 95 %
confidence whatever the distribution (order statistics of the sorted samples); fewer than six samples cannot
say that much, then they are the smallest and the largest sample. Ratios are formed within rounds, one sample a
round, because the load of the machine differs more between rounds than within one.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

CONFIDENCE = 0.95


class BenchError(Exception):
    """A run did not end or print as expected: the bench stops, because no figure can be made of it."""


class Figure(NamedTuple):
    """One measured quantity."""

    value: float  # median of the samples
    unit: str
    low: float
    high: float
    n: int
    samples: tuple[float, ...]  # in the order they were taken


class Target(NamedTuple):
    """What a figure has to reach, and of how many samples it must be the median."""

    at_least: float | None = None
    at_most: float | None = None
    samples: int = 1

    def is_met(self, value: float) -> bool:
        """Whether `value` lies within the limits."""
        return (self.at_least is None or value >= self.at_least) and (
            self.at_most is None or value <= self.at_most
        )

    def __str__(self) -> str:
        limits = [f">= {self.at_least:g}"] if self.at_least is not None else []
        limits += [f"<= {self.at_most:g}"] if self.at_most is not None else []
        return " and ".join(limits)


def median_bounds(samples: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The narrowest symmetric pair of order statistics that encloses the median with this confidence."""
    ordered = sorted(samples)
    n = len(ordered)
    cut = 0  # how many samples are left out at each end
    # P(the median lies outside) = 2 * P(at most `cut` of n fair coins show heads)
    outside = 2 * math.comb(n, 0) / 2**n
    while True:
        outside += 2 * math.comb(n, cut + 1) / 2**n
        if outside > 1 - confidence or 2 * (cut + 1) >= n:
            return ordered[cut], ordered[n - 1 - cut]
        cut += 1


def figure(unit: str, samples: Sequence[float]) -> Figure:
    """The figure that these samples make."""
    if not samples:
        raise BenchError("a figure without samples")
    if not all(math.isfinite(sample) for sample in samples):
        raise BenchError(f"samples that are no numbers: {samples}")
    low, high = median_bounds(samples)
    return Figure(statistics.median(samples), unit, low, high, len(samples), tuple(samples))


class Figures:
    """The figures of one bench, by name, in the order they were added."""

    def __init__(self) -> None:
        self._figures: dict[str, Figure] = {}
        self.facts: dict[str, Any] = {}  # of the run, beside the figures

    def add(self, name: str, unit: str, samples: Sequence[float]) -> Figure:
        """Adds a measured quantity; a name is used once."""
        if name in self._figures:
            raise BenchError(f"figure {name} was added twice")
        self._figures[name] = made = figure(unit, samples)
        return made

    def add_ratio(self, name: str, above: Sequence[float], below: Sequence[float]) -> Figure:
        """Adds above/below, divided round by round."""
        return self.add(name, "ratio", [a / b for a, b in zip(above, below, strict=True)])

    def __iter__(self) -> Iterator[tuple[str, Figure]]:
        return iter(self._figures.items())

    def __getitem__(self, name: str) -> Figure:
        return self._figures[name]

    def __len__(self) -> int:
        return len(self._figures)

    def table(self, targets: Mapping[str, Target] | None = None) -> str:
        """The figures as aligned text, with the targets that they have."""
        targets = targets or {}
        rows = [("figure", "median", "low", "high", "unit", "n", "target")]
        for name, made in self:
            target = targets.get(name)
            verdict = ""
            if target is not None:
                verdict = f"{target} {'met' if target.is_met(made.value) else 'NOT MET'}"
            numbers = (format_number(made.value), format_number(made.low), format_number(made.high))
            rows.append((name, *numbers, made.unit, str(made.n), verdict))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = []
        for row in rows:
            cells = [
                cell.rjust(width) if column in (1, 2, 3, 5) else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)


def format_number(value: float) -> str:
    """Four significant digits without exponents where people can read them."""
    if value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.0f}" if abs(value) >= 10000 else f"{value:.4g}"


def describe_machine() -> dict[str, str | int]:
    """What decides how fast a machine is and what ran on it."""
    with open("/proc/meminfo", encoding="ascii") as file:
        memory_kib = int(file.readline().split()[1])
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "not installed"
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_name(),
        "memory_bytes": memory_kib * 1024,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch,
    }


def _cpu_name() -> str:
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def describe_commit() -> str:
    """The commit that was measured, "-dirty" when tracked files differ from it, "unknown" without git."""
    top = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    try:
        head = subprocess.run(
            ["git", "-C", top, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "-C", top, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("-dirty" if changed else "")


def make_document(bench: str, argv: Sequence[str], figures: Figures) -> dict[str, Any]:
    """The JSON of a bench run."""
    return {
        "bench": bench,
        "machine": describe_machine(),
        "commit": describe_commit(),
        "argv": without_directories(argv),
        **({"facts": figures.facts} if figures.facts else {}),
        "figures": {name: {**made._asdict(), "samples": list(made.samples)} for name, made in figures},
    }


def without_directories(argv: Sequence[str]) -> list[str]:
    """The words of a command without directories of this machine, which are not there where it is repeated."""
    return [re.sub(r"^(--[\w-]+=)?/(?:.*/)?(?=[^/])", r"\1", word) for word in argv]


def write_document(path: str, document: Mapping[str, Any]) -> None:
    """Writes it beside and renames: a reader never sees half a file."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    beside = f"{path}.{os.getpid()}.tmp"
    with open(beside, "w", encoding="utf-8") as file:
        json.dump(document, file, indent=1)
        file.write("\n")
    os.replace(beside, path)


def note(text: str) -> None:
    """A line for the people who watch; the table stays alone on stdout."""
    print(text, file=sys.stderr, flush=True)
