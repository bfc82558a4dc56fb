"""The command line of `bootseer warm`."""

from __future__ import annotations

import pytest

from bootseer.errors import UsageError
from launcher.warm.options import EVERY_S, Options, is_named, parse
from launcher.warm.results import STAGES

PLAIN = Options("", EVERY_S, False, STAGES, None, None, 0.0, False, False)


def test_it_takes_what_bootrun_takes() -> None:
    options, args = parse(["--image", "/trees/a", "--nproc-per-node", "gpu", "train.py", "--rate", "5"], {})
    assert options == PLAIN, "what stands after the script is the script's"
    assert (args.image, args.training_script, args.training_script_args) == (
        "/trees/a",
        "train.py",
        ["--rate", "5"],
    )
    assert args.nproc_per_node == "1", "devices may not be there yet"


def test_a_script_need_not_be_named() -> None:
    _, args = parse(["--image", "/trees/a"], {})
    assert not is_named(args.training_script)
    assert args.training_script_args == []


def test_variables_count_as_for_bootrun() -> None:
    _, args = parse([], {"BOOTSEER_IMAGE": "/trees/b", "PET_MODULE": "1"})
    assert args.image == "/trees/b"
    assert args.module


def test_own_flags() -> None:
    words = ["--rate", "200MB", "--most", "1GiB", "--only", "env,image,env", "--json"]
    options, _ = parse([*words, "--env-store", "/envs", "train.py"], {})
    assert options == PLAIN._replace(max_bytes_per_s=2e8, max_bytes=1 << 30, only=("env", "image"), as_json=True)
    options, _ = parse(["--jobs", "/jobs", "--every", "30", "--once"], {})
    assert options == PLAIN._replace(jobs="/jobs", every_s=30.0, is_once=True)
    assert parse(["--status"], {})[0].shows_status


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--jobs", "/jobs", "train.py"], "--jobs and a script: give one of them"),
        (["--once", "train.py"], "--once is without effect"),
        (["--hold", "-1"], "--hold -1: give seconds"),
        (["--jobs", "/jobs", "--once", "--hold", "9"], "--hold and --once"),
        (["--every", "0.5"], "--every 0.5: give seconds, 1 or more"),
        (["--every", "nan"], "give seconds"),
        (["--rate", "fast"], "--rate 'fast': give bytes"),
        (["--rate", "0"], "--rate 0: give more than 0"),
        (["--most", "0MB"], "--most 0MB: give more than 0"),
        (["--only", "image,gpu"], "--only 'gpu': the values are image, env, caches, checkpoint"),
    ],
)
def test_mistakes(words: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse(words, {})


@pytest.mark.parametrize("words", [["--rat", "5"], ["--stat"], ["--imag", "/x"]])
def test_flags_of_ours_are_not_abbreviated(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(words, {})
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and words[0] in error
