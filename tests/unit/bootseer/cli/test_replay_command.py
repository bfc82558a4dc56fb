"""`bootseer replay` with real commands: each machine found, hangs ended with their children, clear errors."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bootseer.cli.replay import main
from tests.support import wait_until

HOSTS = [f"n{number}" for number in range(24)]
BAD = "case ,$BOOTSEER_REPLAY_HOSTS, in *,{},*) exit 7;; esac; test $BOOTSEER_REPLAY_NODES = 4"


@pytest.mark.parametrize("bad", ["n0", "n13", "n23"])
def test_a_machine_of_4_by_6_is_found(tmp_path: Path, capfd: pytest.CaptureFixture[str], bad: str) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("# ours\n" + "\n".join(HOSTS) + "\n\n")
    assert main(["--hosts", str(hosts), "--group-size", "4", "--run", BAD.format(bad), "--json"]) == 0
    out, err = capfd.readouterr()
    record = json.loads(out)
    assert (record["found"], record["suspects"]) == ("one", [bad])
    assert [each["failed"] for each in record["groups"]].count(True) == 2
    assert err.count("failed (exit status 7)") == 2


@pytest.mark.parametrize(
    ("command", "status", "words"),
    [
        ("true", 3, "no group failed"),
        ("false", 4, "every group failed"),
        (BAD.format("*") + "; false", 4, "every"),
    ],
)
def test_no_single_machine(capfd: pytest.CaptureFixture[str], command: str, status: int, words: str) -> None:
    assert main(["--hosts", ",".join(HOSTS), "--group-size", "4", "--run", command]) == status
    assert words in capfd.readouterr().out


def test_two_machines_are_not_taken_for_one(capfd: pytest.CaptureFixture[str]) -> None:
    command = "case ,$BOOTSEER_REPLAY_HOSTS, in *,n3,*|*,n13,*) exit 7;; esac"
    assert main(["--hosts", ",".join(HOSTS), "--group-size", "4", "--run", command]) == 5
    assert "n3" in capfd.readouterr().out


def test_a_replay_that_hangs_has_failed_and_nothing_of_it_is_left(capfd: pytest.CaptureFixture[str]) -> None:
    mark = f"{time.time_ns()}"
    command = f"case ,$BOOTSEER_REPLAY_HOSTS, in *,b,*) sleep 987.{mark} & sleep 987.{mark};; esac"
    argv = ["--hosts", "a,b,c,d", "--group-size", "2", "--limit", "0.2", "--run", command, "--json"]
    assert main(argv) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["suspects"] == ["b"]
    assert "no end within 0.2 s" in err
    # Killed, which the kernel does a moment later where it has much to do.
    wait_until(lambda: not subprocess.run(["pgrep", "-f", mark], stdout=subprocess.PIPE, check=False).stdout)


def test_the_plan_runs_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--hosts", "a,b,c,d", "--group-size", "2", "--plan", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["rounds"] == [[["a", "b"], ["c", "d"]], [["a", "c"], ["b", "d"]]]


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        (
            ["--hosts", "/nowhere/hosts", "--group-size", "2", "--run", "true"],
            1,
            "there is no file /nowhere/hosts",
        ),
        (["--hosts", "a,b;rm,c", "--group-size", "2", "--run", "true"], 1, "'b;rm' is not a valid machine name"),
        (["--hosts", "a,b,a", "--group-size", "2", "--run", "true"], 1, "a is listed twice"),
        (["--hosts", "a,b", "--group-size", "2", "--run", "true"], 1, "show nothing"),
        (["--hosts", "a,b,c", "--group-size", "2"], 2, "--run is missing"),
        (["--hosts", "a,b,c", "--group-size", "2", "--run", "true", "--limit", "-1"], 2, "--limit needs"),
        (["--hosts", "a,b,c,d", "--group-size", "2", "--run", "/nowhere/command"], 1, "no group could run it"),
    ],
)
def test_what_is_wrong_is_named(
    capfd: pytest.CaptureFixture[str], argv: list[str], status: int, words: str
) -> None:
    assert main(argv) == status
    assert words in capfd.readouterr().err


def test_it_is_a_command_of_bootseer() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from launcher.commands import main; raise SystemExit(main(['replay', '--help']))",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "bootseer replay --hosts hosts.txt" in done.stdout
