"""Set-up commands that succeed, fail, hang, ask and leave things running: real shells, nothing stays behind."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bootseer.env.service import commands as setup_run
from bootseer.env.service.commands import SetupResult, run_setup, setup_environ
from bootseer.errors import SetupFailed
from tests.integration.captured_envs import environ_of, make_venv
from tests.support import is_running, marked_processes, tune, wait_until

Run = Callable[..., SetupResult]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "setup.log"


@pytest.fixture
def run(tmp_path: Path, log: Path) -> Run:
    """Runs commands in the test's folder."""

    def run(*commands: str, **more: object) -> SetupResult:
        values: dict[str, object] = {
            "environ": environ_of(tmp_path),
            "cwd": os.fspath(tmp_path),
            "timeout_s": 60.0,
        }
        return run_setup(commands, log_path=os.fspath(log), **(values | more))  # type: ignore[arg-type]

    return run


def test_commands_run_one_after_the_other(run: Run, log: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    result = run("echo one; echo error >&2", "pwd; printf 'half'", "cat", on_line=lines.append)
    assert lines == ["one", "error", os.fspath(tmp_path), "half"]
    assert log.read_text() == f"one\nerror\n{tmp_path}\nhalf"
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert result.left_running == []
    assert 0 < result.took_s < 60


def test_a_command_of_ours_is_not_counted_among_theirs(run: Run) -> None:
    with pytest.raises(SetupFailed, match=r"^set-up command 1 of 1 \(exit 3\) ended with status 3"):
        run("true", "exit 3", makes_venv=True)
    with pytest.raises(SetupFailed, match=r"^creating the virtual environment \(exit 4\) ended with status 4"):
        run("exit 4", "true", makes_venv=True)


def test_log_goes_on_from_what_is_there(run: Run, log: Path) -> None:
    log.write_text("before\n")
    lines: list[str] = []
    run("echo now", on_line=lines.append)
    assert lines == ["now"]
    assert log.read_text() == "before\nnow\n"
    with pytest.raises(SetupFailed) as failed:
        run("exit 3")
    assert failed.value.tail == ()


def test_failure_names_the_command_and_ends_the_rest(run: Run, tmp_path: Path) -> None:
    script = "for i in $(seq 50); do echo line $i; done\necho the reason >&2; exit 7"
    with pytest.raises(SetupFailed) as failed:
        run("true", script, "touch never")
    assert failed.value.status == 7
    assert failed.value.tail == (*(f"line {number}" for number in range(32, 51)), "the reason")
    text = str(failed.value)
    assert text.startswith(
        "set-up command 2 of 3 (for i in $(seq 50); do echo line $i; done echo the reason >&2; exit 7)"
    )
    assert f"ended with status 7: the reason (full output: {tmp_path}/setup.log)" in text
    assert not (tmp_path / "never").exists()


def test_first_failing_line_of_a_command_ends_it(run: Run, tmp_path: Path) -> None:
    with pytest.raises(SetupFailed):
        run("false\ntouch never")
    assert not (tmp_path / "never").exists()


def test_command_that_is_killed(run: Run) -> None:
    with pytest.raises(SetupFailed, match="was killed by SIGSEGV") as failed:
        run("kill -SEGV $$")
    assert failed.value.status == -signal.SIGSEGV


def test_secrets_are_not_in_the_message(run: Run, tmp_path: Path) -> None:
    environ = environ_of(tmp_path) | {"MY_TOKEN": "abcdef123456"}
    with pytest.raises(SetupFailed) as failed:
        run("echo from https://me:hidden1@host/simple $MY_TOKEN; false https://me:hidden2@host/", environ=environ)
    for text in (str(failed.value), *failed.value.tail):
        assert "hidden" not in text
        assert "abcdef123456" not in text


@pytest.mark.parametrize(
    "command",
    [
        f"{sys.executable} -c 'input(\"Proceed (Y/n)? \")'",
        "echo 'Do you want to continue? [Y/n]'; read answer",
        "echo \"fatal: could not read Username for 'https://host': No such device or address\"; false",
    ],
)
def test_who_asks_is_reported_that_nobody_answers(run: Run, command: str) -> None:
    with pytest.raises(
        SetupFailed, match=r"asked for input, which set-up cannot give; add --yes, -y or --no-input"
    ):
        run(command)


def test_no_terminal_can_be_asked(run: Run) -> None:
    run("! (exec 3</dev/tty) 2>/dev/null")


def test_directory_that_is_not_there(run: Run, tmp_path: Path) -> None:
    with pytest.raises(SetupFailed, match=f"the directory {tmp_path}/nowhere does not exist"):
        run("true", cwd=f"{tmp_path}/nowhere")


def test_deadline_ends_everything(run: Run, tmp_path: Path) -> None:
    """Also what ignores signals, and what went into a session of its own."""
    started_s = time.monotonic()
    with pytest.raises(
        SetupFailed, match=r"command 2 of 2 .* was ended: all commands together took more than 0.7 s"
    ) as failed:
        run(
            "sleep 0.1",
            "trap '' TERM HUP INT; setsid sh -c 'trap \"\" TERM; sleep 600; sleep 600' & wait",
            timeout_s=0.7,
        )
    assert failed.value.status is None
    assert time.monotonic() - started_s < 8
    assert marked_processes(os.environ["LEAK_CHECK_MARK"]) == []


def test_what_is_left_running_is_ended(run: Run, tmp_path: Path) -> None:
    """A server may serve the commands that follow; when all are done it goes."""
    up = "until grep -q ^sleep /proc/$(cat pid)/comm; do :; done"  # and no longer the shell or setsid
    result = run("setsid sleep 600 & echo $! > pid", f"kill -0 $(cat pid); {up}")
    assert result.left_running == ["sleep"]
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_error_of_who_follows_ends_everything(run: Run) -> None:
    def fail(line: str) -> None:
        raise KeyboardInterrupt(line)

    with pytest.raises(KeyboardInterrupt, match="now"):
        run("echo now; sleep 600", on_line=fail)
    assert marked_processes(os.environ["LEAK_CHECK_MARK"]) == []


def test_nothing_survives_who_ran_it(tmp_path: Path) -> None:
    """A launcher that is killed takes its set-up with it."""
    program = textwrap.dedent(f"""
        from bootseer.env.service.commands import run_setup
        import os
        os.chdir({os.fspath(tmp_path)!r})
        run_setup(["setsid sleep 600 & touch ready; sleep 600"], environ=dict(os.environ), cwd=os.getcwd(),
                  log_path="log", timeout_s=600)
    """)
    process = subprocess.Popen([sys.executable, "-c", program], cwd=os.getcwd())
    try:
        wait_until((tmp_path / "ready").exists, 20)
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not marked_processes(os.environ["LEAK_CHECK_MARK"]), 20)


def test_supervisor_that_is_killed(run: Run, tmp_path: Path) -> None:
    with pytest.raises(SetupFailed, match="was ended by another process"):
        run("kill -9 $PPID")


def test_endless_output(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    tune(monkeypatch, env__setup_log_bytes=1 << 20)
    with pytest.raises(SetupFailed, match="it wrote more than 1 MiB"):
        run("yes")


def test_lines_of_any_kind(run: Run) -> None:
    lines: list[str] = []
    run(r"printf '10%%\r50%%\r100%%\nbad \377 byte\n'; head -c 100000 /dev/zero | tr '\0' x", on_line=lines.append)
    assert lines[:2] == ["100%", "bad \ufffd byte"]
    assert lines[2] == "x" * setup_run.MAX_LINE_BYTES


def test_environment_of_commands(run: Run, tmp_path: Path, log: Path) -> None:
    venv = make_venv(tmp_path / "venv")
    odd = os.fsdecode(b"\xff")
    environ = setup_environ(
        {
            **environ_of(tmp_path),
            "RANK": "3",
            "LOCAL_RANK": "1",
            "MASTER_ADDR": "a",
            "TORCHELASTIC_RUN_ID": "x",
            "KEPT": odd,
        },
        [os.fspath(tmp_path / "data"), venv],
    )
    run(
        "command -v python; echo $VIRTUAL_ENV",
        "env | grep -a -c -E '^(RANK|LOCAL_RANK|MASTER|TORCHEL)' || true; echo $KEPT",
        environ=environ,
    )
    assert log.read_bytes().splitlines() == [os.fsencode(f"{venv}/bin/python"), os.fsencode(venv), b"0", b"\xff"]


def test_environment_without_a_virtual_one(tmp_path: Path) -> None:
    (tmp_path / "conda" / "bin").mkdir(parents=True)
    (tmp_path / "conda" / "conda-meta").mkdir()
    assert setup_environ({"A": "1"}, ["/nowhere"]) == {"A": "1"}
    made = setup_environ({"PATH": "/bin", "PYTHONHOME": "/x"}, [f"{tmp_path}/conda"])
    assert made == {"PATH": f"{tmp_path}/conda/bin:/bin", "CONDA_PREFIX": f"{tmp_path}/conda", "PYTHONHOME": "/x"}
