"""`bootseer check` as people use it: the real checks on this host, options, exit status, mistakes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bootseer.cli import check
from bootseer.health.checks import CHECKS
from bootseer.health.finding import BAD, LEVELS, Finding
from bootseer.health.host_facts import read_descriptors
from bootseer.health.host_interface import HostInterface

pytestmark = [
    pytest.mark.leaks,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),  # pytest's own
]


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return os.fspath(path)


def test_all_real_checks_on_this_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = check.main(["--json", "--path", os.fspath(tmp_path), "--interval", "0.05", "--timeout", "30"])
    record = json.loads(capsys.readouterr().out)
    findings = [Finding(**found) for found in record["findings"]]
    assert (record["version"], record["host"]) == (1, os.uname().nodename)
    assert {found.check for found in findings} == set(CHECKS), "each says something"
    assert record["level"] == max((found.level for found in findings), key=LEVELS.index)
    # What this host has, nobody knows; but no check of ours breaks or hangs here, and these are well anywhere.
    assert not [found for found in findings if found.level == "hung" or "the check failed" in found.what]
    levels = {found.check: found.level for found in findings if found.check in ("files", "storage")}
    assert set(levels) == {"files", "storage"} and "fail" not in levels.values()
    assert status == (3 if any(found.level in BAD for found in findings) else 0)
    assert os.listdir(tmp_path) == []


def test_facts_of_this_host_agree_with_the_system(tmp_path: Path) -> None:
    door = HostInterface()
    room = door.room(os.fspath(tmp_path))
    assert room.total_bytes >= room.free_bytes > 0 and not room.is_read_only
    assert "MemTotal" in door.text("proc/meminfo") and door.text("proc/none") == ""
    assert door.number("proc/sys/kernel/pid_max") == int(Path("/proc/sys/kernel/pid_max").read_text())
    clock = door.clock()
    assert clock is None or 0 <= clock.error_s < 100
    own = next(each for each in read_descriptors(door, os.getpid()) if each.pid == os.getpid())
    assert own.limit == door.file_limit() and 3 <= own.used <= own.limit
    assert door.file_limit() >= -1 and door.cpus() == len(os.sched_getaffinity(0))


def test_lines_and_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = script(tmp_path / "bad", "echo broken >&2; exit 1")
    assert check.main(["--only", "own", "--own", bad]) == 3
    assert (
        capsys.readouterr().out == f"fail    own:bad {bad}: it ended with status 1: broken; see what it checks\n"
    )
    warn = script(
        tmp_path / "warn", """echo '{"level": "warn", "what": "hm", "measured": 2, "limit": 1, "unit": "s"}'"""
    )
    assert check.main(["--only", "own", "--own", warn]) == 0
    assert capsys.readouterr().out == "warn    own:warn: hm (2 s, limit 1 s)\n"
    dead = script(tmp_path / "dead", "kill -9 $$")
    assert check.main(["--only", "own", "--own", dead]) == 0
    assert check.main(["--only", "own", "--own", dead, "--strict"]) == 3
    assert "unknown" in capsys.readouterr().out
    hung = script(tmp_path / "hung", "sleep 600")
    assert check.main(["--only", "own", "--own", hung, "--timeout", "0.5", "--interval", "0"]) == 3
    assert capsys.readouterr().out.startswith("hung    own:hung")
    good = script(tmp_path / "good", "exit 0")
    assert check.main(["--only", "own", "--own", good, "--quiet"]) == 0
    assert capsys.readouterr().out == ""


def test_gpus_that_are_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["--only", "accelerators", "--expect-gpus", "999"]) == 3
    assert "limit 999 GPUs" in capsys.readouterr().out


def test_what_the_file_says_counts_where_the_command_line_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    good = script(tmp_path / "good", "exit 0")
    bad = script(tmp_path / "bad", "exit 1")
    named = tmp_path / "job.toml"
    named.write_text(f"[check]\nown = ['{bad}']\nexpect_gpus = 999\nlimits = {{memory_warn_share = 1.0}}\n")
    assert check.main(["--config", "job.toml", "--only", "own"]) == 3
    assert check.main(["--config", "job.toml", "--only", "own", "--own", good]) == 0
    assert check.main(["--config", "job.toml", "--only", "accelerators"]) == 3
    capsys.readouterr()
    assert check.main(["--config", "job.toml", "--only", "memory"]) == 0
    assert capsys.readouterr().out.startswith("warn    memory: available")
    assert check.main(["--config", "job.toml", "--only", "memory", "--limit", "memory_warn_share=0"]) == 0
    assert capsys.readouterr().out.startswith("ok      memory: available")
    assert check.main(["--config", "none.toml"]) == 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--limit", "speed=3"], "--limit 'speed=3': unknown limit; known are memory_warn_share"),
        (["--only", "memroy"], "--only 'memroy': unknown check; known are memory,"),
        (["--own", "/no/such/check"], "--own '/no/such/check': there is no such executable"),
        (["--timeout", "0"], "--timeout 0: give a number above 0"),
        (["--timeout", "nan"], "--timeout nan"),
        (["--interval", "20"], "--interval 20: give seconds from 0 to less than --timeout (10)"),
        (["--path", ":ro"], "--path ':ro'"),
        (["--only", "storage"], "nothing to check: --only storage needs --path"),
        (["--expect-gpus", "-1"], "--expect-gpus"),
    ],
)
def test_mistakes(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(argv) == 2
    assert words in capsys.readouterr().err


def test_list_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["--list", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {*CHECKS, "own"}
    assert check.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "bootseer check --path /data:ro" in shown and "Exit status 3" in shown
