"""The parser of usual command lines gives what argparse gives, or leaves a line to it."""

from __future__ import annotations

import sys
from itertools import chain
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from launcher.cli import parser as cli
from launcher.cli.flags import FLAGS, Flag
from launcher.cli.quick_parse import parse_usual

PLAIN = [flag for flag in FLAGS if flag.dest != "print_completion"]


def words_of(flag: Flag) -> st.SearchStrategy[list[str]]:
    """A flag with a value that it may have, in each of its spellings."""
    name = st.sampled_from(flag.spellings)
    if flag.kind is None:
        return name.map(lambda each: [each])
    if flag.choices:
        values: st.SearchStrategy[str] = st.sampled_from(flag.choices)
    else:
        values = st.sampled_from(["1", "2:4", "0.5", "a", "a=b", "a,b", "", "-1", "x y", "1e3", "store/x"])
    pairs = st.tuples(name, values)
    return st.one_of(
        pairs.map(list), pairs.filter(lambda each: each[0].startswith("--")).map(lambda each: ["=".join(each)])
    )


LINES = st.lists(st.one_of([words_of(flag) for flag in PLAIN]), max_size=6).map(
    lambda found: list(chain.from_iterable(found))
)
SCRIPTS = st.lists(st.sampled_from(["train.py", "--lr", "3", "-x", "--", "", "--nnodes"]), max_size=4)
NAMES = [flag.env for flag in FLAGS if flag.env]
VARIABLES = st.dictionaries(
    st.sampled_from(NAMES), st.sampled_from(["1", "0", "a", "2:4", "auto", "off"]), max_size=2
)


def by_argparse(argv: list[str], environ: dict[str, str]) -> dict[str, Any] | None:
    """None if it ends the process."""
    try:
        return vars(cli.parse(argv, environ))
    except SystemExit:
        return None


@given(LINES, SCRIPTS, VARIABLES)
@example(["--nproc-per-node=2", "--standalone"], ["train.py", "--standalone"], {})
def test_it_gives_what_argparse_gives(line: list[str], script: list[str], environ: dict[str, str]) -> None:
    found = parse_usual([*line, *script], environ)
    if found is None:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", sys.stdout)
        assert vars(found) == by_argparse([*line, *script], environ)


@pytest.mark.parametrize(
    "argv",
    [
        ["--standalone", "--nproc-per-node", "8", "train.py", "--lr", "3e-4"],
        ["--nnodes=2:4", "--max_restarts=3", "-t", "3", "--rdzv_endpoint", "head:29400", "-m", "package.train"],
        ["--setup", "pip install a", "--setup", "pip install b", "--image", "s3://bucket/x", "train.py"],
        ["--fork-ranks", "off", "--no-python", "./run.sh", "${local_rank}"],
    ],
)
def test_usual_lines_are_understood(argv: list[str]) -> None:
    found = parse_usual(argv, {"BOOTSEER_ENV_STORE": "store/x", "PET_NNODES": "1:2"})
    assert found is not None and vars(found) == by_argparse(
        argv, {"BOOTSEER_ENV_STORE": "store/x", "PET_NNODES": "1:2"}
    )


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--help"],
        ["--version"],
        ["--nnode", "2", "train.py"],
        ["--nnodes", "-1", "train.py"],
        ["--standalone=1", "train.py"],
        ["--fork-ranks", "perhaps", "train.py"],
        ["--max-restarts", "many", "train.py"],
        ["-t3", "train.py"],
        ["--unknown", "train.py"],
        ["train.py", "--", "a"],
        ["--nnodes"],
    ],
)
def test_other_lines_are_left_to_argparse(argv: list[str]) -> None:
    assert parse_usual(argv, {}) is None
