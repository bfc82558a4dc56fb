"""The command line: what argparse makes of it and what people see."""

from __future__ import annotations

import argparse
import os
import re

import pytest

from bootseer import __version__
from bootseer.errors import ConfigError, UsageError
from launcher.cli.flags import FLAGS
from launcher.cli.parser import get_args_parser, parse


def read(*argv: str, **environ: str) -> argparse.Namespace:
    return parse(argv, environ)


def fails(capsys: pytest.CaptureFixture[str], *argv: str, **environ: str) -> str:
    """The one line of a wrong command line."""
    with pytest.raises(SystemExit) as end:
        read(*argv, **environ)
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1
    return err


def test_what_follows_the_script_is_the_scripts() -> None:
    args = read("--standalone", "-r3", "train.py", "--role", "x", "--", "-h", "--quiet")
    assert (args.training_script, args.training_script_args) == (
        "train.py",
        ["--role", "x", "--", "-h", "--quiet"],
    )
    assert (args.role, args.redirects, args.quiet) == ("default", "3", False)


@pytest.mark.parametrize(
    ("flag", "meant"), [("--keep-cache", "--keep-caches"), ("--nnodez=2", "--nnodes"), ("--frobnicate", "")]
)
def test_a_misspelt_flag(capsys: pytest.CaptureFixture[str], flag: str, meant: str) -> None:
    line = fails(capsys, flag, "train.py")
    assert f"unrecognized arguments: {flag}" in line
    assert (f"did you mean {meant}?" in line) if meant else ("did you mean" not in line)


def test_dashes_before_the_script_are_swallowed() -> None:
    assert read("--", "train.py", "--", "x").training_script_args == ["--", "x"]


def test_the_command_line_wins_over_variables() -> None:
    args = read("--role=mine", "x.py", PET_ROLE="theirs", PET_MAX_RESTARTS="4", BOOTSEER_RESTART_REFILL="1.5")
    assert (args.role, args.max_restarts, args.restart_refill) == ("mine", 4, 1.5)


def test_our_flags_and_their_defaults() -> None:
    args = read("x.py")
    assert {flag.dest: getattr(args, flag.dest) for flag in FLAGS if flag.ours} == {
        "rank_hooks": "auto",
        "fork_ranks": None,
        "preload": [],
        "preload_timeout": None,
        "record_start": None,
        "image": None,
        "image_name": None,
        "image_writable": None,
        "image_bind": [],
        "image_python": None,
        "image_env": [],
        "setup": [],
        "setup_input": [],
        "setup_target": [],
        "setup_variable": [],
        "setup_timeout": None,
        "setup_wait": None,
        "env_store": None,
        "env_key": None,
        "env_max_age": None,
        "env_way": None,
        "keep_caches": False,
        "no_keep_caches": False,
        "cache_dir": [],
        "config": None,
        "load_checkpoint": None,
        "checkpoint_memory": None,
        "checkpoint_disk": None,
        "checkpoint_fallback": None,
        "checkpoint_files": None,
        "require_checkpoint": False,
        "keep_arena": False,
        "arena_bytes": None,
        "peers": None,
        "peers_upload": None,
        "allow_mixed_environments": False,
        "restart_refill": None,
        "restart_backoff": 1.0,
        "on_hang": None,
        "check": None,
        "check_pairs": None,
        "check_own": [],
        "check_path": [],
        "check_nic": [],
        "check_expect_gpus": None,
        "check_every": None,
        "check_timeout": None,
        "check_limit": [],
        "hang_least": None,
        "log_rules": None,
        "trace_collectives": False,
        "same_error": None,
        "exclude_nodes": None,
        "no_progress": None,
        "give_up_status": None,
        "post_mortem": None,
        "post_mortem_timeout": None,
        "stop_checks": None,
        "stop_checks_timeout": None,
        "rollback_command": None,
        "rollback_timeout": None,
        "replay_command": None,
        "replay_timeout": None,
        "forward_signals": "SIGUSR1,SIGUSR2",
        "signal_scope": "job",
        "events_dir": None,
        "dashboard": None,
        "dashboard_token_file": None,
        "strict": False,
        "quiet": False,
    }
    args = read("--rank-hooks=off", "--forward-signals", "", "--signal-scope", "node", "--quiet", "x.py")
    assert (args.rank_hooks, args.forward_signals, args.signal_scope, args.quiet) == ("off", "", "node", True)


def test_variables_of_our_switches() -> None:
    assert read("x.py", BOOTSEER_QUIET="1").quiet
    assert not read("x.py", BOOTSEER_QUIET="0").quiet


def test_a_wrong_variable_is_named() -> None:
    with pytest.raises(ConfigError, match="PET_STANDALONE='true'") as theirs:
        read("x.py", PET_STANDALONE="true")
    assert theirs.value.exit_status == 1
    with pytest.raises(UsageError, match="BOOTSEER_QUIET='yes'"):
        read("x.py", BOOTSEER_QUIET="yes")
    with pytest.raises(UsageError, match="BOOTSEER_SIGNAL_SCOPE=rank: choose job or node"):
        read("x.py", BOOTSEER_SIGNAL_SCOPE="rank")


@pytest.mark.parametrize(
    ("argv", "culprit"),
    [
        (("--none-such", "x.py"), "--none-such"),
        (("--max-restarts", "many", "x.py"), "many"),
        (("--rdzv", "x", "x.py"), "ambiguous"),
        (("--standalone=1", "x.py"), "standalone"),
        (("--quie", "x.py"), "--quie"),
        (("--rank-hooks", "on", "x.py"), "--rank-hooks"),
        (("--standalone",), "no script"),
        ((), "no script"),
    ],
)
def test_one_line_names_the_mistake(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], culprit: str
) -> None:
    assert culprit in fails(capsys, *argv)


def test_help_shows_each_flag_once_and_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        read("--help")
    assert end.value.code == 0
    text = capsys.readouterr().out
    theirs, ours = text.index("torchrun's flags"), text.index("Bootseer's flags")
    for flag in FLAGS:
        rows = re.findall(rf"^  (?:-\w, )?{flag.names[-1]}\b(?!-)", text[: text.index("examples:")], re.MULTILINE)
        assert len(rows) == 1 and (text.index(rows[0]) > ours) == flag.ours
    assert theirs < ours < text.index("examples:")
    assert max(map(len, text.splitlines())) <= 116


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        read("--version")
    assert end.value.code == 0
    assert __version__ in capsys.readouterr().out


def test_the_environment_is_the_default_source() -> None:
    assert get_args_parser().parse_args(["x.py"]).role == os.environ.get("PET_ROLE", "default")
