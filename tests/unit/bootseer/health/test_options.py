"""What users say of checks: read, passed to another process and read there again; mistakes."""

from __future__ import annotations

import argparse
import os
import sys

import pytest

from bootseer.errors import UsageError
from bootseer.health.at_start import make_request
from bootseer.health.checks import Path
from bootseer.health.limits import Limits
from bootseer.health.options import Options, add_arguments, from_arguments, read_options


def passed_on(options: Options) -> Options:
    parser = argparse.ArgumentParser()
    parser.add_argument("folders", nargs="*")
    add_arguments(parser)
    args = parser.parse_args([*options.to_argv(), "--", "-odd", "b"])
    assert args.folders == ["-odd", "b"]
    return from_arguments(args)


def test_what_was_said_arrives() -> None:
    said = read_options(
        "--check-", ["data:ro", "-x", "a=b"], ["ib0"], 8, [sys.executable], 2.5, limits=["clock_warn_s=0.25"]
    )
    assert said.paths == (f"{os.getcwd()}/data:ro", f"{os.getcwd()}/-x", f"{os.getcwd()}/a=b")
    assert passed_on(said) == said
    assert said.all_limits() == Limits(clock_warn_s=0.25)
    assert passed_on(Options()) == Options()


def test_an_executable_that_has_gone_since_is_no_mistake() -> None:
    assert passed_on(Options(own=("/no/such/check",))).own == ("/no/such/check",)


def test_directories_of_the_job_are_looked_at_and_named_paths_are_used() -> None:
    request = make_request(read_options("--", ["/data:ro", "/out"]), ["/tmp", "/tmp"], 2.0, 0.5, 7)
    assert request.paths == (Path("/tmp", True, False), Path("/data", False, True), Path("/out", True, True))
    assert (request.log_hours, request.interval_s, request.ancestor) == (2.0, 0.5, 7)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"paths": [":ro"]}, "--check-path ':ro': name a directory"),
        ({"own": ["/no/such/check"]}, "--check-own '/no/such/check': there is no such executable"),
        ({"expect_gpus": -1}, "--check-expect-gpus -1: give 0 or more"),
        ({"timeout_s": 0.0}, "--check-timeout 0: give a number above 0"),
        ({"timeout_s": float("nan")}, "--check-timeout nan"),
        ({"every_s": 0.5}, "--check-every 0.5: give 1 to 86400 seconds, or 0 for never"),
        ({"limits": ["speed=3"]}, "--check-limit 'speed=3': unknown limit; known are memory_warn_share"),
        ({"limits": ["clock_warn_s"]}, "give clock_warn_s=NUMBER"),
        ({"limits": ["clock_warn_s=-1"]}, "give clock_warn_s=NUMBER, 0 or more"),
        ({"limits": ["clock_warn_s=inf"]}, "give clock_warn_s=NUMBER"),
    ],
)
def test_mistakes(said: dict, words: str) -> None:
    with pytest.raises(UsageError) as raised:
        read_options("--check-", **said)
    assert words in str(raised.value) and "\n" not in str(raised.value)
