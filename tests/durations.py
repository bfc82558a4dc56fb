"""A plugin: where the time of a test run goes, and what the schedule knows of it.

At the end of a run it prints the seconds of each directory and the slowest tests. `--record-durations FILE` writes
those of each test as it ends, one line of JSON each. Two commands read such files:

    python -m tests.durations families FILE    prints them by family: a test function with all its cases
    python -m tests.durations keep FILE        writes tests/durations.json, which the schedule reads
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pytest

TABLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "durations.json")
KEPT_S = 0.2  # families of less time are left out of the table
UNKNOWN_S = {"tests/unit/": 0.02, "tests/guards/": 0.05}  # of a case that the table lacks
UNKNOWN_ELSEWHERE_S = 1.0
SLOWEST = 20


class Time(NamedTuple):
    """Of one test, with its fixtures; module and session fixtures count for the test that caused them."""

    setup_s: float = 0.0
    call_s: float = 0.0
    teardown_s: float = 0.0
    cpu_s: float = 0.0  # of its worker, and of processes that have ended and were waited for

    @property
    def wall_s(self) -> float:
        """The whole of it."""
        return self.setup_s + self.call_s + self.teardown_s


class Sum(NamedTuple):
    """Of several tests."""

    cases: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0

    def plus(self, time: Time) -> Sum:
        """With one test more."""
        return Sum(self.cases + 1, self.wall_s + time.wall_s, self.cpu_s + time.cpu_s)


Times = Mapping[str, Time]
# Path -> name of the function, with that of its class -> number of cases and their seconds.
Table = dict[str, dict[str, tuple[int, float]]]


def family_of(nodeid: str) -> str:
    """The test function of a case: its node id without the parameters."""
    return nodeid.partition("[")[0]


def directory_of(nodeid: str) -> str:
    """The directory that its time is added to: `tests/integration`, `tests/unit/launcher`."""
    parts = nodeid.partition("::")[0].split("/")[:-1]
    return "/".join(parts[: 3 if parts[1:2] == ["unit"] else 2])


def sums(times: Times, key: Any) -> dict[str, Sum]:
    """The sum for each value of `key(nodeid)`, largest first."""
    found: dict[str, Sum] = {}
    for nodeid, time_ in times.items():
        name = key(nodeid)
        found[name] = found.get(name, Sum()).plus(time_)
    return dict(sorted(found.items(), key=lambda item: (-item[1].wall_s, item[0])))


def table_of(times: Times) -> Table:
    """What the schedule needs of a run."""
    table: Table = {}
    for family, total in sums(times, family_of).items():
        if total.wall_s >= KEPT_S:
            path, _, name = family.partition("::")
            table.setdefault(path, {})[name] = (total.cases, round(total.wall_s, 1))
    return table


def expected_s(nodeid: str, table: Table) -> float:
    """The seconds that a test will take: the mean of its family."""
    path, _, name = family_of(nodeid).partition("::")
    if (found := table.get(path, {}).get(name)) is not None:
        return found[1] / found[0]
    return next((value for start, value in UNKNOWN_S.items() if path.startswith(start)), UNKNOWN_ELSEWHERE_S)


def load_table(path: str = TABLE) -> Table:
    """The recorded table; empty where there is none."""
    try:
        with open(path, encoding="utf-8") as file:
            return {
                name: {key: (row[0], row[1]) for key, row in rows.items()}
                for name, rows in json.load(file).items()
            }
    except FileNotFoundError:
        return {}


def write_table(table: Table, path: str = TABLE) -> None:
    """One line for each test file, so that two records can be compared."""
    lines = [f"{json.dumps(name)}: {json.dumps(table[name], sort_keys=True)}" for name in sorted(table)]
    with open(path, "w", encoding="utf-8") as file:
        file.write("{\n" + ",\n".join(lines) + "\n}\n")


def load(paths: Iterable[str]) -> dict[str, Time]:
    """The records of `--record-durations`; the last line counts for tests that have several."""
    times = {}
    for path in paths:
        with open(path, encoding="utf-8") as file:
            for line in file:
                nodeid, *values = json.loads(line)
                times[nodeid] = Time(*values)
    return times


def summary(times: Times, wall_s: float) -> Iterator[str]:
    """The lines at the end of a run."""
    total_s, cpu_s = (sum(getattr(time_, name) for time_ in times.values()) for name in ("wall_s", "cpu_s"))
    yield f"{len(times)} tests in {wall_s:.0f} s: {total_s:.0f} s of tests, {cpu_s:.0f} s of CPU"
    for name, found in sums(times, directory_of).items():
        yield f"{found.wall_s:8.0f} s {found.cpu_s:8.0f} s CPU {found.cases:6} tests  {name}"
    yield "the slowest (setup, call, teardown):"
    slowest = sorted(times, key=lambda nodeid: -times[nodeid].wall_s)[:SLOWEST]
    for nodeid in slowest:
        time_ = times[nodeid]
        yield f"{time_.setup_s:6.1f} {time_.call_s:6.1f} {time_.teardown_s:6.1f} s  {nodeid}"


# ---- in pytest -------------------------------------------------------------------------------------------------


class Recorder:
    """In the process that starts the tests: it collects what all workers report."""

    def __init__(self, path: str | None) -> None:
        self._began_s = time.monotonic()
        self._times: dict[str, Time] = {}
        self._file = None
        if path is not None:
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
            self._file = open(path, "w", encoding="utf-8", buffering=1)  # noqa: SIM115  # to the end of the run

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        known = self._times.get(report.nodeid, Time())
        part = f"{report.when}_s"
        now = known._replace(
            **{part: getattr(known, part) + report.duration}, cpu_s=known.cpu_s + getattr(report, "cpu_s", 0.0)
        )
        self._times[report.nodeid] = now
        if self._file is not None and report.when == "teardown":
            self._file.write(json.dumps([report.nodeid, *(round(value, 3) for value in now)]) + "\n")

    def pytest_unconfigure(self) -> None:
        if self._file is not None:
            self._file.close()

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if len(self._times) > SLOWEST:
            terminalreporter.section("durations")
            for line in summary(self._times, time.monotonic() - self._began_s):
                terminalreporter.write_line(line)


class CpuClock:
    """In each process that runs tests: reports carry the CPU seconds of each phase."""

    def __init__(self) -> None:
        self._last_s = 0.0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        self._last_s = sum(os.times()[:4])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[Any]:
        report = yield
        now_s = sum(os.times()[:4])
        report.cpu_s, self._last_s = round(now_s - self._last_s, 3), now_s
        return report


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", metavar="FILE", help="Write the seconds of each test to a JSON file")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CpuClock(), "cpu-clock")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config.getoption("record_durations")), "durations-recorder")


# ---- by hand ---------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.durations", description=__doc__)
    parser.add_argument("command", choices=("families", "keep"))
    parser.add_argument("files", nargs="+", metavar="FILE", help="Records of --record-durations")
    parsed = parser.parse_args(arguments)
    times = load(parsed.files)
    if parsed.command == "keep":
        write_table(table_of(times))
        return
    for family, found in sums(times, family_of).items():
        print(f"{found.wall_s:8.1f} {found.cpu_s:8.1f} {found.cases:5}  {family}")


if __name__ == "__main__":
    main()
