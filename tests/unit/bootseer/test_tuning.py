"""The limits of [tuning]: their bounds, where they come from, and how they reach other processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer import tuning, tuning_limits
from bootseer.errors import ConfigError
from bootseer.job_file import TUNING, parse
from bootseer.tuning import DEFAULTS, VARIABLE
from bootseer.tuning_limits import LIMITS, is_whole, merge, parse_variable, to_variable
from launcher import spec as launch_spec
from launcher.cli.parser import parse as parse_line
from launcher.spec import LaunchSpec, build_spec

PATHS = [(package, name) for package, limits in LIMITS.items() for name in limits]
BY_PATH = [f"{package}.{name}" for package, name in PATHS]


def file(package: str, name: str, value: object) -> dict[str, object]:
    return parse(f"[tuning.{package}]\n{name} = {value}\n".encode(), "a.toml")


def of_line(*words: str, environ: dict[str, str] | None = None) -> LaunchSpec:
    environ = environ or {}
    return build_spec(parse_line([*words, "--standalone", "-m", "train"], environ), environ)


def test_records_and_bounds_name_the_same_limits() -> None:
    assert tuple(LIMITS) == DEFAULTS._fields
    for package, limits in LIMITS.items():
        assert tuple(limits) == getattr(DEFAULTS, package)._fields
    assert VARIABLE == tuning_limits.VARIABLE == launch_spec.TUNING_VARIABLE


@pytest.mark.parametrize(("package", "name"), PATHS, ids=BY_PATH)
def test_a_limit_accepts_its_bounds_and_nothing_beyond(package: str, name: str) -> None:
    limit, default = LIMITS[package][name], getattr(getattr(DEFAULTS, package), name)
    assert limit.low < limit.high and limit.low <= default <= limit.high
    assert isinstance(default, int if is_whole(name) else float)
    assert name.endswith(("_s", "_bytes")) or is_whole(name)
    for value in (limit.low, limit.high, default):
        found = file(package, name, int(value) if is_whole(name) else float(value))[TUNING]
        assert found == {f"{package}.{name}": value}
    step = 1 if is_whole(name) else 0.001
    for wrong in (limit.low - step, limit.high + step, "nan", "inf", "true", '"1"', "[1]"):
        with pytest.raises(ConfigError) as raised:
            file(package, name, wrong)
        text = str(raised.value)
        assert raised.value.exit_status == 1
        assert text.startswith(f"a.toml:2: [tuning.{package}] {name} = ")
        assert f" from {limit.low:.15g} to {limit.high:.15g}" in text and "\n" not in text
    for text in (limit.meaning, limit.larger, limit.smaller):
        assert text and not text.endswith(".") and len(text.split()) <= 20
    assert limit.meaning[0].isupper()


@pytest.mark.parametrize("package", [each for each, limits in LIMITS.items() if any(map(is_whole, limits))])
def test_a_number_of_things_is_whole(package: str) -> None:
    name = next(filter(is_whole, LIMITS[package]))
    with pytest.raises(ConfigError, match="give a whole number"):
        file(package, name, LIMITS[package][name].low + 0.5)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tuning = 1\n", "a.toml:1: tuning is a table: write [tuning.PACKAGE]"),
        ("\n[tuning]\npeers = 1\n", "a.toml:3: tuning.peers is a table: write [tuning.peers]"),
        ("[tuning]\npeer.begin_s = 1\n", "a.toml:2: unknown table [tuning.peer]; there are launcher, storage"),
        ("[tuning.peer]\n", "a.toml:1: unknown table [tuning.peer]; there are launcher, storage"),
        ("[tuning.peers]\nbegin = 1\n", "a.toml:2: unknown key 'begin' in [tuning.peers]; there are max_conn"),
        ("[tuning]\nbegin_s = 1\n", "a.toml:2: unknown table [tuning.begin_s]; there are launcher"),
        (
            "[tuning.peers]\n# begin_s = 1\nbegin_s = 0\n",
            "a.toml:3: [tuning.peers] begin_s = 0: give a number of se",
        ),
        ("[tune.peers]\n", "a.toml:1: unknown table [tune]; there are image, "),
    ],
)
def test_wrong_tables(text: str, why: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(text.encode(), "a.toml")
    assert str(raised.value).startswith(why)


def test_a_key_may_be_written_with_dots() -> None:
    found = parse(b"[tuning]\npeers.begin_s = 4\n[tuning.env]\npublish_s = 60\n", "a.toml")
    assert found == {TUNING: {"peers.begin_s": 4.0, "env.publish_s": 60.0}}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("peers.begin_s", "'peers.begin_s' is no limit"),
        ("peers.begins_s=1", "'peers.begins_s=1' is no limit; give PACKAGE.NAME=NUMBER"),
        ("begin_s=1", "is no limit"),
        ("peers.begin_s=soon", "peers.begin_s=soon: give a number of seconds from 0.1 to 300"),
        ("peers.begin_s=0", "peers.begin_s=0: give a number"),
        ("peers.begin_s=nan", "peers.begin_s=nan: give a number"),
        ("peers.spool_bytes=5e9", "peers.spool_bytes=5000000000.0: give a whole number of bytes from 2097152 to"),
        ("x" * 20_000, "longer than 16384 characters"),
    ],
)
def test_a_wrong_variable_is_one_line(text: str, why: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_variable(text)
    assert str(raised.value).startswith(f"{VARIABLE}: ") and why in str(raised.value)
    with pytest.raises(ConfigError, match=VARIABLE):
        of_line(environ={VARIABLE: text})


@given(
    st.dictionaries(st.sampled_from(PATHS), st.floats(0.0, 1.0)).map(
        lambda found: {
            f"{package}.{name}": (round if is_whole(name) else float)(
                LIMITS[package][name].low + share * (LIMITS[package][name].high - LIMITS[package][name].low)
            )
            for (package, name), share in found.items()
        }
    )
)
def test_the_variable_carries_each_value_exactly(values: dict[str, float]) -> None:
    assert parse_variable(to_variable(values)) == values


def test_the_variable_takes_precedence_over_the_file() -> None:
    assert merge({}, "") == {}
    found = merge({"peers.begin_s": 4.0, "peers.stall_s": 4.0}, " peers.begin_s=5   env.publish_s=60 ")[VARIABLE]
    assert parse_variable(found) == {"peers.begin_s": 5.0, "peers.stall_s": 4.0, "env.publish_s": 60}


def test_a_process_reads_its_variable_when_it_needs_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert tuning.current() == DEFAULTS
    monkeypatch.setenv(VARIABLE, "peers.begin_s=7.5")
    assert tuning.current() == DEFAULTS._replace(peers=DEFAULTS.peers._replace(begin_s=7.5))
    assert tuning.current() is tuning.current()
    monkeypatch.setenv(VARIABLE, "peers.begin_s=x")
    with pytest.raises(ConfigError):
        tuning.current()
    monkeypatch.delenv(VARIABLE)
    assert tuning.current() == DEFAULTS


def test_nothing_is_set() -> None:
    found = of_line()
    assert found.tuning == {} and found.job_rules().tuning is None
    code = "import sys, bootseer.tuning as t; t.current(); print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-c", code],
        env={name: value for name, value in os.environ.items() if name != VARIABLE},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert "bootseer.tuning" in modules
    assert not {"bootseer.tuning_limits", "typing", "re", "tomllib", "dataclasses"}.intersection(
        set(modules) - set(plain_modules())
    )


def plain_modules() -> list[str]:
    code = "import sys; print(*sys.modules)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_file_of_a_job(here: Path) -> None:
    (here / "bootseer.toml").write_text("[tuning.launcher]\nmax_backoff_s = 5\n[tuning.env]\npublish_s = 60\n")
    found = of_line("--config", "bootseer.toml", environ={VARIABLE: "env.publish_s=90"})
    assert parse_variable(found.tuning[VARIABLE]) == {"launcher.max_backoff_s": 5.0, "env.publish_s": 90.0}
    rules = found.job_rules()
    assert rules.tuning == DEFAULTS.launcher._replace(max_backoff_s=5.0)
