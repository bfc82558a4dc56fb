"""What `bootseer env` is asked for: flags before variables before bootseer.toml; and times for people."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from bootseer.cli.env_words import format_expiry, format_time
from bootseer.env.commands.caches import StoredCaches, is_old
from bootseer.env.commands.spec import (
    Flags,
    absolute_store,
    find_python,
    find_store,
    has_commands,
    make_spec,
)
from bootseer.errors import ConfigError, UsageError


def spec(directory: Path, flags: Flags = Flags(), **environ: str) -> Any:  # noqa: B008
    return make_spec(flags, environ, os.fspath(directory))


def test_flags_count_more_than_variables_and_these_more_than_the_file(tmp_path: Path) -> None:
    (tmp_path / "bootseer.toml").write_text(
        "[setup]\ncommands = ['make env']\ninputs = ['a.txt']\ntargets = ['env']\ntimeout_s = 5\nkey = 'file'\n"
        "ways = ['unpack']\n[env]\nstore = 'envs'\n[caches]\nkeep = true\n"
    )
    found = spec(tmp_path)
    assert found.commands == ("make env",)
    assert found.inputs == (f"{tmp_path}/a.txt",)
    assert found.targets == (f"{tmp_path}/env",)
    assert (found.timeout_s, found.wait_s, found.salt) == (5.0, 600.0, "file")
    assert found.store == f"{tmp_path}/envs"
    found = spec(
        tmp_path,
        BOOTSEER_SETUP="one,two",
        BOOTSEER_SETUP_TARGET="/a,/b,,c",
        BOOTSEER_SETUP_TIMEOUT="7",
        BOOTSEER_ENV_STORE="/e",
    )
    assert (found.commands, found.timeout_s, found.store) == (("one,two",), 7.0, "/e")
    assert found.targets == ("/a", "/b,c")
    flags = Flags(commands=["three"], timeout_s=9, store="s3://bucket/envs", salt="flag")
    found = spec(tmp_path, flags, BOOTSEER_SETUP="one", BOOTSEER_ENV_KEY="variable")
    assert (found.commands, found.timeout_s, found.salt) == (("three",), 9.0, "flag")
    assert found.store == "s3://bucket/envs"
    assert has_commands(Flags(), {}, os.fspath(tmp_path))
    assert find_store(Flags(), {}, os.fspath(tmp_path)) == f"{tmp_path}/envs"


def test_nothing_is_asked_for(tmp_path: Path) -> None:
    assert not has_commands(Flags(), {}, os.fspath(tmp_path))
    assert find_store(Flags(), {}, os.fspath(tmp_path)) == ""
    with pytest.raises(ConfigError, match="add --setup"):
        spec(tmp_path)


def test_a_file_that_cannot_be_is_one_line_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "bootseer.toml").write_text("[setup]\ncommand = 'x'\n")
    with pytest.raises(ConfigError, match=r"^bootseer\.toml:2: unknown key 'command' in \[setup\]"):
        spec(tmp_path)
    with pytest.raises(ConfigError, match=r"other\.toml: there is no such file"):
        spec(tmp_path, Flags(config="other.toml"))


def test_a_variable_that_is_no_number_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="BOOTSEER_SETUP_WAIT='soon'"):
        spec(tmp_path, Flags(commands=["x"]), BOOTSEER_SETUP_WAIT="soon")


def test_the_interpreter_keeps_the_links_that_make_it_an_environments(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    cwd = os.fspath(tmp_path)
    assert find_python("bin/python", {}, cwd) == f"{tmp_path}/bin/python"
    assert find_python("", {"PYTHON_EXEC": "python", "PATH": f"{tmp_path}/bin"}, cwd) == f"{tmp_path}/bin/python"
    assert find_python("", {}, cwd) == sys.executable
    assert find_python("none", {}, cwd) == ""
    with pytest.raises(ConfigError, match="no-such-python: there is no such program"):
        find_python("no-such-python", {"PATH": cwd}, cwd)


@pytest.mark.parametrize(
    ("url", "found"),
    [("", ""), ("/a/b", "/a/b"), ("b/../c", "/job/c"), ("file:///a", "file:///a"), ("hdfs://n/a", "hdfs://n/a")],
)
def test_a_store_that_is_a_path_is_absolute(url: str, found: str) -> None:
    assert absolute_store(url, "/job") == found


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (12.34, "12.3 s"), (90, "1.5 min"), (7200, "2 h"), (604_800, "7 days")]
)
def test_times_for_people(seconds: float, text: str) -> None:
    assert format_time(seconds) == text


def test_expiry_for_people() -> None:
    assert format_expiry(None, 100.0) == "never expires"
    assert format_expiry(3700.0, 100.0) == "expires in 1 h"
    assert format_expiry(50.0, 100.0) == "expires in 0 s"


@pytest.mark.parametrize(
    ("made_s", "used_s", "newest_s", "is_gone"),
    [(0, 0, 0, False), (100, 0, 0, True), (100, 900, 0, False), (0, 0, 100, True), (100, 200, 990, False)],
)
def test_caches_go_when_nobody_used_them_for_long(
    made_s: float, used_s: float, newest_s: float, is_gone: bool
) -> None:
    caches = StoredCaches("ab" * 32, 1, 1, 1, made_s, used_s, "", [], newest_s)
    assert is_old(caches, 1000.0, 500.0) is is_gone
