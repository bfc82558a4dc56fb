"""bootrun reads every command line that torchrun reads, and reads it alike.

Both parsers get the same argv: each prefix of each option string in all forms, random command lines, PET_*
variables. What must agree is the namespace (without our own values) or the exit status. It is compared with the
newest torchrun; the ones before, down to the installed, read the same but for the options that they do not have.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import run as torchrun

from bootseer.errors import BootseerError
from launcher.cli.flags import FLAGS
from launcher.cli.parser import get_args_parser
from tests.parity import options_of

OWN = frozenset(flag.dest for flag in FLAGS if flag.ours)
OWN_SPELLINGS = [name for flag in FLAGS if flag.ours for name in flag.spellings] + ["--version"]
VERSIONS = ("2.13.0", "2.14.1", "2.15.0")
THEIRS = torchrun.get_args_parser()
options_of.add_missing(THEIRS, VERSIONS[-1])
INSTALLED = torchrun.get_args_parser()
NEWER = frozenset(action.dest for action in THEIRS._actions) - {action.dest for action in INSTALLED._actions}
OURS = get_args_parser({})
OPTIONS = sorted(name for action in THEIRS._actions for name in action.option_strings)
PREFIXES = sorted({name[:length] for name in OPTIONS for length in range(1, len(name) + 1)})
OWN_PREFIXES = sorted({name[:length] for name in OWN_SPELLINGS for length in range(3, len(name))} - set(OPTIONS))
VALUES = (
    "1",
    "0",
    "-1",
    "1:2",
    "a,,b,c",
    "x=y",
    "",
    "spawn",
    "node",
    "-",
    "--",
    "-x",
    "two words",
    "${local_rank}",
)

Outcome = tuple[str, object]


@pytest.fixture(autouse=True, scope="module")
def without_words() -> Iterator[None]:
    """What is said of a mistake is not compared, and would take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(difflib, "get_close_matches", lambda *_: [])
        patch.setattr(THEIRS, "format_usage", str)
        patch.setattr(INSTALLED, "format_usage", str)
        yield


def outcome(parse: Callable[[], argparse.Namespace]) -> Outcome:
    """What a parser makes of a command line."""
    silent = io.StringIO()
    with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
        try:
            found = vars(parse())
        except SystemExit as end:
            return "exit", end.code
        except BootseerError as error:
            return "exit", error.exit_status
        except ValueError:
            return "exit", 1  # a traceback
    return "read", {name: value for name, value in found.items() if name not in OWN}


def both(*argv: str) -> tuple[Outcome, Outcome]:
    return outcome(lambda: THEIRS.parse_args(argv)), outcome(lambda: OURS.parse_args(argv))


def forms(name: str) -> Iterator[tuple[str, ...]]:
    yield (name,)
    yield name, "script.py"
    yield name, "script.py", name, "7"
    yield "--", name, "script.py"
    yield "script.py", name
    for value in VALUES:
        yield f"{name}={value}", "script.py", "--", "-r3"
        yield f"{name}{value}", "script.py"
        yield name, value, "script.py", "--role", "x"


def differences(lines: Iterable[Sequence[str]]) -> list[tuple[Sequence[str], Outcome, Outcome]]:
    """Command lines that are not read alike, with what torchrun and bootrun make of them."""
    return [(argv, *found) for argv in lines if (found := both(*argv))[0] != found[1]]


@pytest.mark.parametrize("prefixes", [PREFIXES, OWN_PREFIXES], ids=["torchrun's", "ours"])
def test_every_prefix_is_read_alike(prefixes: list[str]) -> None:
    # A prefix and a value can make up a flag of ours in full: that is what they are for.
    lines = [
        argv
        for prefix in prefixes
        for argv in forms(prefix)
        if not any(part.split("=", 1)[0] in OWN_SPELLINGS for part in argv)
    ]
    assert len(lines) > 20 * len(prefixes)
    assert differences(lines) == []


def test_the_recorded_options_are_those_of_the_installed_torchrun() -> None:
    recorded = options_of.load()
    assert tuple(recorded) == VERSIONS
    assert recorded[metadata.version("torch").partition("+")[0]] == options_of.read("")
    assert recorded["2.14.1"] == recorded["2.15.0"], "one parser stands for both"


def test_older_versions_read_the_same_but_for_what_they_do_not_have() -> None:
    compared = 0
    for prefix in PREFIXES:
        meant = {action.dest for name, action in THEIRS._option_string_actions.items() if name.startswith(prefix)}
        if meant & NEWER or not prefix.startswith("--"):
            continue  # a prefix of an option that they do not have, which may be one of another there
        for argv in ([prefix, "1", "script.py"], [f"{prefix}=node", "script.py"]):
            older = outcome(lambda argv=argv: INSTALLED.parse_args(argv))
            ours = outcome(lambda argv=argv: OURS.parse_args(argv))
            if ours[0] == "read":
                values = {
                    name: value for name, value in vars(OURS.parse_args(argv)).items() if name not in OWN | NEWER
                }
                ours = "read", values
            assert older == ours, argv
            compared += 1
    assert compared > 600


def test_there_is_something_to_compare() -> None:
    read = sum(both(prefix, "1", "script.py")[1][0] == "read" for prefix in PREFIXES)
    assert len(PREFIXES) > 300 and 100 < read < len(PREFIXES)


def test_our_flags_match_in_full_only() -> None:
    assert not set(OWN_SPELLINGS) & set(OPTIONS)
    nothing = outcome_of_nothing()
    for name in OWN_SPELLINGS:
        values = [flag for flag in FLAGS if name in flag.spellings]
        value = (values[0].choices or ("1",))[-1] if values and values[0].kind is not None else None
        argv = [name] if value is None else [name, value]
        full = outcome(lambda argv=argv: OURS.parse_args([*argv, "script.py"]))
        assert full == (("exit", 0) if name == "--version" else ("read", nothing)), name
        cut = outcome(lambda name=name, argv=argv: OURS.parse_args([name[:-1], *argv[1:], "script.py"]))
        assert cut[0] == "exit", name


def outcome_of_nothing() -> object:
    return both("script.py")[0][1]


WORDS = st.one_of(
    st.sampled_from(PREFIXES),
    st.sampled_from(OPTIONS),
    st.sampled_from(VALUES),
    st.sampled_from(OWN_PREFIXES),
    st.builds("{}={}".format, st.sampled_from(PREFIXES), st.sampled_from(VALUES)),
    st.builds("{}{}".format, st.sampled_from(("-r", "-t", "-m", "-mr", "-mt=", "-mm")), st.sampled_from(VALUES)),
    st.sampled_from(("script.py", "--", "-", "@file", "-h", "--help")),
    st.text(max_size=6),
)


@settings(max_examples=600, deadline=None)
@given(st.lists(WORDS, max_size=9))
def test_random_command_lines_are_read_alike(argv: list[str]) -> None:
    if any(part.split("=", 1)[0] in OWN_SPELLINGS for part in argv):
        return
    theirs, ours = both(*argv)
    assert ours == theirs


GOOD = st.builds(
    lambda name, value: f"{name}={value}", st.sampled_from(OPTIONS), st.sampled_from(("1", "2", "node", "spawn"))
)


@settings(max_examples=300, deadline=None)
@given(st.lists(GOOD, max_size=6), st.lists(WORDS, max_size=4))
def test_random_good_command_lines_are_read_alike(flags: list[str], rest: list[str]) -> None:
    theirs, ours = both(*flags, "script.py", *rest)
    assert ours == theirs


# ---- variables -----------------------------------------------------------------------------------------------

VARIABLES = sorted("PET_" + action.dest.upper() for action in THEIRS._actions)


@contextlib.contextmanager
def variables(environ: Mapping[str, str]) -> Iterator[None]:
    """torchrun reads the process's own environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name in VARIABLES:
            patch.delenv(name, raising=False)
        for name, value in environ.items():
            patch.setenv(name, value)
        yield


def both_with(environ: Mapping[str, str], *argv: str) -> tuple[Outcome, Outcome]:
    def parse() -> argparse.Namespace:
        parser = torchrun.get_args_parser()
        options_of.add_missing(parser, VERSIONS[-1])
        return parser.parse_args(argv)

    with variables(environ):
        theirs = outcome(parse)
    return theirs, outcome(lambda: get_args_parser(environ).parse_args(argv))


@pytest.mark.parametrize("value", ["1", "0", "2", "", "true", "a,,b", "none-such", " 1 "])
def test_each_variable_is_read_alike(value: str) -> None:
    for variable in VARIABLES:
        theirs, ours = both_with({variable: value}, "script.py")
        assert ours == theirs, variable


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(st.sampled_from(VARIABLES), st.sampled_from(("1", "0", "2", "3")), max_size=6),
    st.lists(GOOD, max_size=3),
)
def test_variables_and_flags_are_read_alike(environ: dict[str, str], flags: list[str]) -> None:
    theirs, ours = both_with(environ, *flags, "script.py")
    assert ours == theirs


# ---- the table -----------------------------------------------------------------------------------------------


def facts(action: argparse.Action) -> dict[str, Any]:
    return {
        "spellings": sorted(action.option_strings),
        "default": action.default,
        "nargs": action.nargs,
        "choices": None if action.choices is None else list(action.choices),
        "required": action.required,
        "kind": getattr(action.type, "__name__", None) or "str",
    }


def test_the_table_is_torchruns() -> None:
    theirs = {action.dest: facts(action) for action in THEIRS._actions}
    ours = {action.dest: facts(action) for action in OURS._actions if action.dest not in OWN}
    del ours[argparse.SUPPRESS]  # --version
    for each in (theirs, ours):
        for name in ("duplicate_stdout_filters", "duplicate_stderr_filters"):
            each[name]["kind"] = "list"  # a function of torchrun's parser; its results are compared above
        for name in ("training_script", "training_script_args"):
            each[name]["kind"] = "str"
        for fact in each.values():
            if fact["nargs"] == 0:
                fact["kind"] = "switch"
    assert ours == theirs


def test_help_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--help"], ["-h"], ["--hel"], ["--standalone", "-h", "--none-such"]):
        with pytest.raises(SystemExit) as end:
            OURS.parse_args(argv)
        assert end.value.code == 0
        assert "--nnodes" in capsys.readouterr().out


def test_each_flag_has_a_help_of_our_own() -> None:
    theirs = {action.dest: action.help for action in THEIRS._actions}
    for flag in FLAGS:
        assert flag.help and flag.help != theirs.get(flag.dest)
