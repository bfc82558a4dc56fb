"""Where the time of a test run goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.durations import (
    UNKNOWN_ELSEWHERE_S,
    Recorder,
    Time,
    directory_of,
    expected_s,
    family_of,
    load,
    load_table,
    main,
    summary,
    sums,
    table_of,
    write_table,
)

JOBS = "tests/integration/test_jobs.py"
TIMES = {
    f"{JOBS}::test_one[a]": Time(1.0, 2.0, 0.5, 1.5),
    f"{JOBS}::test_one[b::c[0]]": Time(0.0, 0.5, 0.0, 0.5),
    "tests/unit/launcher/test_quick.py::TestIt::test_two": Time(0.0, 0.01),
}


def test_cases_of_a_family_are_those_of_a_function() -> None:
    assert {family_of(nodeid) for nodeid in TIMES} == {
        f"{JOBS}::test_one",
        "tests/unit/launcher/test_quick.py::TestIt::test_two",
    }
    assert sums(TIMES, family_of)[f"{JOBS}::test_one"] == (2, 4.0, 2.0)


def test_directories() -> None:
    assert list(sums(TIMES, directory_of)) == ["tests/integration", "tests/unit/launcher"]
    assert directory_of("tests/unit/test_x.py::test_y") == "tests/unit"


def test_the_table_gives_the_mean_of_a_family(tmp_path: Path) -> None:
    write_table(table_of(TIMES), str(tmp_path / "table.json"))
    table = load_table(str(tmp_path / "table.json"))
    assert table == {JOBS: {"test_one": (2, 4.0)}}, "what takes no time is left out"
    assert expected_s(f"{JOBS}::test_one[new]", table) == 2.0
    assert expected_s(f"{JOBS}::test_new", table) == UNKNOWN_ELSEWHERE_S
    assert expected_s("tests/unit/test_x.py::test_y", table) < 0.1
    assert load_table(str(tmp_path / "none.json")) == {}


def test_a_record_is_written_and_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "out" / "record.json")
    recorder = Recorder(path)
    for when, seconds in (("setup", 1.0), ("call", 2.0), ("teardown", 0.5)):
        report = pytest.TestReport(f"{JOBS}::test_é", (JOBS, 1, ""), {}, "passed", None, when, duration=seconds)  # type: ignore[arg-type]
        report.cpu_s = 0.25  # type: ignore[attr-defined]
        recorder.pytest_runtest_logreport(report)
    recorder.pytest_unconfigure()
    assert load([path]) == {f"{JOBS}::test_é": Time(1.0, 2.0, 0.5, 0.75)}
    main(["families", path])
    assert capsys.readouterr().out.split() == ["3.5", "0.8", "1", f"{JOBS}::test_é"]


def test_the_summary_has_directories_and_the_slowest() -> None:
    lines = list(summary(TIMES, 9.0))
    assert lines[0] == "3 tests in 9 s: 4 s of tests, 2 s of CPU"
    assert lines[1].split() == ["4", "s", "2", "s", "CPU", "2", "tests", "tests/integration"]
    assert lines[4].split() == ["1.0", "2.0", "0.5", "s", f"{JOBS}::test_one[a]"]
