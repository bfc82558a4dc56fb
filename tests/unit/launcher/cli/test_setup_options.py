"""The flags of set-up and compile caches, and bootseer.toml: what is read, and what is refused with a line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bootseer import job_file
from bootseer.errors import ConfigError, UsageError
from launcher.cli.flags import FLAGS
from launcher.cli.parser import parse
from launcher.cli.setup_options import WAYS
from launcher.spec import LaunchSpec, build_spec

OMP = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return tmp_path


def spec(*words: str, **environ: str) -> LaunchSpec:
    environ = {**OMP, **environ}
    return build_spec(parse([*words, "train.py"], environ), environ)


def test_without_them_there_is_nothing() -> None:
    found = spec()
    assert (found.setup, found.caches, found.notes) == (None, None, ())


def test_all_of_them(here: Path) -> None:
    found = spec(
        *("--setup", "pip install a,b", "--setup", "true", "--setup-input", "requirements.txt"),
        *("--setup-target", "/opt/venv", "--setup-variable", "MINE", "--setup-timeout", "10", "--setup-wait", "0"),
        *("--env-store", "store", "--env-key", "x", "--env-max-age", "60", "--env-way", "unpack,there"),
    ).setup
    assert found is not None
    assert found.commands == ("pip install a,b", "true")
    assert found.inputs == (os.fspath(here / "requirements.txt"),)
    assert found.targets == ("/opt/venv",)
    assert found.variables == ("MINE",)
    assert (found.timeout_s, found.wait_s, found.max_age_s) == (10.0, 0.0, 60.0)
    assert found.store == os.fspath(here / "store")
    assert (found.salt, found.ways) == ("x", ("unpack", "there"))


def test_the_file_beside_the_script_comes_before_that_of_the_working_directory(here: Path) -> None:
    (here / "job").mkdir(mode=0o700)
    (here / "job" / "train.py").write_text("")
    (here / "job" / "bootseer.toml").write_text("[setup]\nkey = 'beside'\ncommands = ['true']\n")
    (here / "bootseer.toml").write_text("[setup]\nkey = 'here'\ncommands = ['true']\n")

    def made(*words: str) -> LaunchSpec:
        return build_spec(parse([*words], OMP), OMP)

    found = made("job/train.py")
    assert found.setup is not None
    assert found.setup.salt == "beside"
    assert found.notes == ("using settings of job/bootseer.toml; ignoring bootseer.toml",)
    assert made("train.py").notes == ("using settings of bootseer.toml",)
    assert made("-m", "job.train").notes == ("using settings of bootseer.toml",)
    assert made("--config", "bootseer.toml", "job/train.py").notes == ("using settings of bootseer.toml",)
    (here / "job" / "bootseer.toml").unlink()
    assert made("job/train.py").notes == ("using settings of bootseer.toml",)
    (here / "job" / "bootseer.toml").write_text("[stup]\n")
    with pytest.raises(ConfigError, match=r"job/bootseer\.toml:1: unknown table"):
        made("job/train.py")


def test_defaults() -> None:
    found = spec("--setup", "true", "--env-store", "s3://bucket/environments").setup
    assert found is not None
    assert (found.timeout_s, found.wait_s, found.max_age_s) == (3600.0, 600.0, None)
    assert found.store == "s3://bucket/environments"
    assert found.ways == WAYS


def test_a_command_in_a_variable_keeps_its_commas() -> None:
    found = spec(BOOTSEER_SETUP="pip install 'a[x,y]'").setup
    assert found is not None
    assert found.commands == ("pip install 'a[x,y]'",)


def test_a_store_for_all_jobs_is_no_mistake() -> None:
    found = spec(BOOTSEER_ENV_STORE="/s", BOOTSEER_ENV_KEY="k")
    assert found.setup is None


def test_where_hot_imports_are_remembered_is_no_directory_to_be_kept() -> None:
    assert spec(BOOTSEER_CACHE_DIR="/c").caches is None


def test_caches(here: Path) -> None:
    found = spec("--keep-caches", "--cache-dir", "mine=.kernels", "--env-store", "/s").caches
    assert found is not None
    assert found.dirs == (("mine", os.fspath(here / ".kernels")),)
    assert found.store == "/s"


@pytest.mark.parametrize(
    ("words", "is_kept"),
    [
        ([], False),
        (["--env-store", "/s"], True),
        (["--setup", "true", "--env-store", "/s"], True),
        (["--setup", "true"], False),
        (["--keep-caches"], True),
        (["--env-store", "/s", "--no-keep-caches"], False),
        (["--env-store", "/s", "--no-keep-caches", "--cache-dir", "a=b"], False),
        (["--env-store", "/s", "--image", "/x"], True),
        (["--env-store", "/s", "--no-python"], False),
        (["--env-store", "/s", "--no-python", "--keep-caches"], True),
    ],
)
def test_caches_are_kept_where_a_store_is_named(words: list[str], is_kept: bool) -> None:
    assert (spec(*words).caches is not None) == is_kept


def test_own_directories_need_no_other_flag_with_a_store(here: Path) -> None:
    found = spec(BOOTSEER_ENV_STORE="/s", BOOTSEER_ENV_KEY="k").caches
    assert found == ("/s", (), "k")
    found = spec("--env-store", "/s", "--cache-dir", "mine=.kernels").caches
    assert found is not None
    assert found.dirs == (("mine", os.fspath(here / ".kernels")),)


@pytest.mark.parametrize(
    ("words", "culprit"),
    [
        (["--setup-input", "x"], "--setup-input"),
        (["--env-way", "mount"], "--env-way"),
        (["--cache-dir", "a=b"], "--keep-caches"),
        (["--keep-caches", "--no-keep-caches"], "--no-keep-caches"),
        (["--keep-caches", "--cache-dir", "b"], "NAME=DIR"),
        (["--keep-caches", "--cache-dir", "a=x", "--cache-dir", "a=y"], "twice"),
        (["--setup", " "], "empty"),
        (["--setup", "true", "--setup-timeout", "-1"], "--setup-timeout"),
        (["--setup", "true", "--setup-timeout", "nan"], "--setup-timeout"),
        (["--setup", "true", "--env-max-age", "0"], "--env-max-age"),
        (["--setup", "true", "--env-way", "copy"], "there, mount, unpack"),
        (["--setup", "true", "--setup-variable", "A=B"], "--setup-variable"),
        (["--setup", "true", "--env-store", ""], "--env-store"),
        (["--setup", "true", "--image", "/x", "--setup-target", "/opt/env"], "--setup-target /opt/env"),
    ],
)
def test_what_cannot_be_is_one_line(words: list[str], culprit: str) -> None:
    with pytest.raises(UsageError) as raised:
        spec(*words)
    assert culprit in str(raised.value)
    assert "\n" not in str(raised.value)


FILE = """
[setup]
commands = ["pip install -r requirements.txt"]
inputs = ["requirements.txt"]
timeout_s = 100
key = "file"
ways = ["unpack"]
[env]
store = "s3://bucket/e"
[caches]
keep = true
dirs = {kernels = "/k"}
"""


def test_file(here: Path) -> None:
    (here / "bootseer.toml").write_text(FILE)
    found = spec()
    assert found.setup is not None and found.caches is not None
    assert found.setup.commands == ("pip install -r requirements.txt",)
    assert (found.setup.timeout_s, found.setup.salt, found.setup.ways) == (100.0, "file", ("unpack",))
    assert found.setup.store == found.caches.store == "s3://bucket/e"
    assert found.caches.dirs == (("kernels", "/k"),)
    assert found.notes == ("using settings of bootseer.toml",)


def test_command_line_wins_then_the_variable(here: Path) -> None:
    (here / "bootseer.toml").write_text(FILE)
    found = spec(
        *("--setup", "true", "--setup-timeout", "3600", "--no-keep-caches"),
        BOOTSEER_ENV_KEY="variable",
        BOOTSEER_SETUP_TIMEOUT="7",
    )
    assert found.setup is not None
    assert found.setup.commands == ("true",)
    assert found.setup.timeout_s == 3600.0
    assert found.setup.salt == "variable"
    assert found.caches is None


def test_the_file_says_what_the_other_flags_say(here: Path) -> None:
    (here / "bootseer.toml").write_text("""
[image]
url = "/trees/a"
python = "python3.12"
variables = ["A=1"]
[checkpoint]
url = "hdfs://namenode/run1"
memory = "2GiB"
keep = true
save_memory = "1GiB"
[ranks]
fork = "on"
preload = ["numpy"]
preload_timeout_s = 7
[job]
folder = "/elsewhere"
command = ["--nnodes", "7"]
""")
    found = spec()
    assert found.image is not None
    assert (found.image.url, found.image.pythons, found.image.environ) == ("/trees/a", ("python3.12",), {"A": "1"})
    assert found.image.writable == "tmpfs"
    assert (found.load_checkpoint, found.checkpoint_memory_bytes) == ("hdfs://namenode/run1", 2 << 30)
    assert (found.keep_arena, found.arena_bytes) == (True, 1 << 30)
    assert (found.fork_ranks, found.preload, found.preload_timeout_s) == ("on", ("numpy",), 7.0)
    assert found.max_nodes == 1, "[job] is for `bootseer warm`"
    other = spec("--fork-ranks", "off", "--preload-timeout", "0", "--image-writable", "none", BOOTSEER_IMAGE="/b")
    assert other.image is not None
    assert (other.fork_ranks, other.preload_timeout_s) == ("off", 0.0)
    assert (other.image.url, other.image.writable) == ("/b", "none")


def test_without_a_file_flags_have_their_defaults() -> None:
    found = spec()
    assert (found.fork_ranks, found.preload_timeout_s, found.arena_bytes) == ("auto", 120.0, 0)


def test_another_file(here: Path) -> None:
    (here / "bootseer.toml").write_text("[setup]\nkey = 'here'\n")
    (here / "other.toml").write_text("[setup]\ncommands = ['true']\n")
    found = spec("--config", "other.toml")
    assert found.setup is not None and found.setup.salt == ""
    assert found.notes == ("using settings of other.toml",)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "[setup]\ncomands = []\n",
            "bootseer.toml:2: unknown key 'comands' in [setup]; there are commands, inputs",
        ),
        ("# a\n\n[stup]\n", "bootseer.toml:3: unknown table [stup]; there are image, setup, env, caches"),
        ("setup = 1\n", "bootseer.toml:1: setup is a table: write [setup]"),
        (
            "[setup]\nkey = 'a'\ncommands = 'true'\n",
            "bootseer.toml:3: [setup] commands: has to be a list of texts",
        ),
        ("[setup]\ntimeout_s = true\n", "a number of seconds"),
        ("[setup]\ntimeout_s = nan\n", "a number of seconds"),
        ("[setup]\nkey = 3\n", "a text"),
        ("setup.key = 3\n", "bootseer.toml:1: [setup] key"),
        ("[env]\nstores = 'x'\n", "unknown key 'stores' in [env]; there are store"),
        ("[caches]\nkeep = 'yes'\n", "true or false"),
        ("[caches]\ndirs = ['a']\n", "a table of directories"),
        ("[ranks]\nfork = 'maybe'\n", "bootseer.toml:2: [ranks] fork: 'maybe': the values are auto"),
        (
            "[check]\nlimits = {clock_warn_s = 'a'}\n",
            "bootseer.toml:2: [check] limits: has to be a table of numbers",
        ),
        ("[check]\nuse = 'on'\n", "bootseer.toml:2: [check] use: 'on': the values are off, report, fail"),
        ("[setup\n", "is not valid TOML"),
        ("\xff", "is not valid TOML"),
    ],
)
def test_wrong_files(here: Path, text: str, says: str) -> None:
    (here / "bootseer.toml").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError) as raised:
        spec()
    assert says in str(raised.value)
    assert "bootseer.toml" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_checks_of_the_file(here: Path) -> None:
    (here / "bootseer.toml").write_text(
        "[check]\nuse = 'report'\npairs = 'off'\nown = ['sh']\npaths = ['data:ro']\nnics = ['ib0']\n"
        "expect_gpus = 0\n"
        "every_s = 5\ntimeout_s = 3\nlimits = {clock_warn_s = 0.5, errors_warn_per_s = 2}\n"
    )
    found = spec()
    assert (found.check, found.check_pairs) == ("report", "off")
    options = found.check_options
    assert options is not None and os.path.basename(options.own[0]) == "sh"
    assert options.paths == (f"{here}/data:ro",)
    assert (options.nics, options.expect_gpus, options.every_s, options.timeout_s) == (("ib0",), 0, 5.0, 3.0)
    assert options.limits == (("clock_warn_s", 0.5), ("errors_warn_per_s", 2.0))
    other = spec("--check", "fail", "--check-every", "9", "--check-limit", "clock_warn_s=1").check_options
    assert other is not None and (other.every_s, other.limits) == (9.0, (("clock_warn_s", 1.0),))
    with pytest.raises(UsageError, match="--check-own '/no/such': there is no such executable"):
        spec("--check-own", "/no/such")


def test_a_file_that_is_named_has_to_be_there() -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        spec("--config", "missing.toml")


def test_every_key_is_a_flag_that_tells_whether_it_was_given() -> None:
    flags = {flag.names[0]: flag for flag in FLAGS}
    for table, keys in job_file.TABLES.items():
        for setting in () if table == "job" else keys.values():
            flag = flags[setting.flag]
            assert setting.choices == (flag.choices or ())
            assert flag.default in (None, []) or flag.kind is None
            assert not setting.off or flags[setting.off].kind is None
