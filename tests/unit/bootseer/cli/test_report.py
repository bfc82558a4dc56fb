"""`bootseer report` as it is called: what it writes where, and what it says of bad input."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from bench.report_job import Plan, Planted, write_job
from launcher import commands


@pytest.fixture
def run(tmp_path: Path) -> str:
    return write_job(os.fspath(tmp_path / "logs"), Plan(planted=(Planted("env", 36, 2),)))


def report(*args: str | Path) -> int:
    return commands.main(["report", *map(str, args)])


def test_text_and_files(run: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert report(run, "--html", tmp_path / "a.html", "--trace", tmp_path / "a.json") == 0
    out, err = capfd.readouterr()
    assert "env on node0002: 42.5 s" in out
    assert err == ""
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")
    assert json.loads((tmp_path / "a.json").read_bytes())["traceEvents"]
    assert sorted(os.listdir(tmp_path)) == ["a.html", "a.json", "logs"]


def test_json(run: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert report(run, "--json") == 0
    record = json.loads(capfd.readouterr().out)
    assert record["format"] == "bootseer-report/1"
    assert report(run, "--json", "--out", tmp_path / "r.json") == 0
    assert capfd.readouterr().out == ""
    assert json.loads((tmp_path / "r.json").read_bytes()) == record


def test_two_runs(run: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    other = write_job(os.fspath(tmp_path / "other"), Plan(run_id="after"))
    assert report(run, other) == 0
    assert "times faster" in capfd.readouterr().out
    assert report(run, other, "--json") == 0
    assert json.loads(capfd.readouterr().out)["format"] == "bootseer-comparison/1"
    assert report(run, other, "--html", tmp_path / "x.html") == 0
    assert "times faster" in (tmp_path / "x.html").read_text()
    assert report(run, other, "--trace", tmp_path / "x.json") == 2
    assert "show one job" in capfd.readouterr().err


def test_the_newest_of_several_jobs(run: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    directory = Path(write_job(os.fspath(tmp_path / "logs"), Plan(run_id="newer")))
    path = directory / "events" / "run.jsonl"
    later = [
        json.dumps({**each, "wall_ns": each["wall_ns"] + 10**13})
        for each in map(json.loads, path.read_text().splitlines())
    ]
    path.write_text("\n".join(later) + "\n")
    assert report(tmp_path / "logs") == 0
    out = capfd.readouterr().out
    assert out.startswith("newer, attempt 0")
    assert "2 jobs found; this is the newest, newer of " in out


def test_attempts(run: str, capfd: pytest.CaptureFixture[str]) -> None:
    for given in ("0", "last"):
        assert report(run, "--attempt", given, "--json") == 0
        assert json.loads(capfd.readouterr().out)["attempt"] == 0
    for given in ("1", "x", "-1"):
        assert report(run, "--attempt", given) == 2
        assert f"--attempt {given}: {run} has 0; or give 'last'" in capfd.readouterr().err


def test_fleet(run: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_job(os.fspath(tmp_path / "more"), Plan(run_id="more", nodes=20, ranks=4))
    parquet = tmp_path / "starts.parquet"
    assert report("fleet", tmp_path / "logs", tmp_path / "more", tmp_path / "gone", "--parquet", parquet) == 0
    out = capfd.readouterr().out
    assert out.startswith("2 jobs: ")
    assert "gone: no such file or directory" in out
    assert parquet.stat().st_size > 1000
    assert report("fleet", tmp_path, "--json") == 0
    assert json.loads(capfd.readouterr().out)["jobs"] == 2


@pytest.mark.parametrize("command", [[], ["fleet"]])
def test_nothing_to_report_on_is_one_line(
    command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run" / "events").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    for what in (tmp_path / "gone", tmp_path / "empty", tmp_path / "run", "/dev/null"):
        assert report(*command, what) == 2
        out, err = capfd.readouterr()
        assert out == ""
        assert err.startswith("bootseer: error: ")
        assert err.count("\n") == 1
        assert str(what) in err


def test_a_file_that_cannot_be_written(run: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert report(run, "--html", tmp_path / "no" / "a.html") == 1
    assert capfd.readouterr().err.startswith(f"bootseer: error: {tmp_path}/no/a.html: cannot be written: ")


def test_files_are_as_others_would_be(run: str, tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        assert report(run, "--html", tmp_path / "a.html", "--out", "/dev/null") == 0
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "a.html").stat().st_mode) == 0o640
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_help(capfd: pytest.CaptureFixture[str]) -> None:
    assert report("--help") == 0
    out = capfd.readouterr().out
    for flag in ("--attempt", "--html", "--trace", "--prometheus", "--otlp", "--out", "--json", "fleet"):
        assert flag in out
    assert report("fleet", "--help") == 0
    assert "--parquet" in capfd.readouterr().out
    assert report() == 2
    path = os.path.join(os.path.dirname(__file__), "../../../../docs/guide/report.md")
    with open(path, encoding="utf-8") as file:
        text = file.read()
    for flag in ("--attempt", "--html", "--trace", "--prometheus", "--otlp", "--out", "--json", "--parquet"):
        assert f"{flag}" in text
