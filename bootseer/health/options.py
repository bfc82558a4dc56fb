"""User options of checks, from `bootseer check`, `bootrun --check` and [check] of bootseer.toml.

In: texts as given. Out: Options, which are also passed as arguments to the processes that run checks.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterable
from typing import NamedTuple

from bootseer.errors import UsageError
from bootseer.health.limits import Limits

EVERY_S = 30.0  # between two rounds of checks while ranks run
_ONLY_READ = ":ro"


class Options(NamedTuple):
    """The options. `paths`: absolute, with ":ro" if they are only read; None: not given."""

    paths: tuple[str, ...] = ()
    nics: tuple[str, ...] = ()
    expect_gpus: int | None = None
    own: tuple[str, ...] = ()  # executables
    timeout_s: float | None = None  # for each check
    every_s: float | None = None  # 0: not while ranks run
    limits: tuple[tuple[str, float], ...] = ()

    def all_limits(self) -> Limits:
        """Return all limits: the given ones, and defaults."""
        return Limits()._replace(**dict(self.limits))

    def to_argv(self) -> list[str]:
        """Return arguments for a process whose parser has `add_arguments`."""
        argv = []
        for flag, values in (("--path", self.paths), ("--nic", self.nics), ("--own", self.own)):
            argv += [f"{flag}={value}" for value in values]
        argv += [f"--set-limit={name}={value!r}" for name, value in self.limits]
        for flag, number in (("--expect-gpus", self.expect_gpus), ("--timeout", self.timeout_s)):
            argv += [f"{flag}={number!r}"] if number is not None else []
        return argv


def read_options(
    flag: str,
    paths: Iterable[str] = (),
    nics: Iterable[str] = (),
    expect_gpus: int | None = None,
    own: Iterable[str] = (),
    timeout_s: float | None = None,
    every_s: float | None = None,
    limits: Iterable[str] = (),
) -> Options:
    """Read options. Args: flag: prefix of flags: "--", "--check-"; limits: as NAME=NUMBER. Raises: UsageError."""
    if expect_gpus is not None and expect_gpus < 0:
        raise UsageError(f"{flag}expect-gpus {expect_gpus}: give 0 or more")
    if timeout_s is not None and not 0 < timeout_s < 1e6:
        raise UsageError(f"{flag}timeout {timeout_s:g}: give a number above 0")
    if every_s is not None and every_s != 0 and not 1 <= every_s <= 86400:
        raise UsageError(f"{flag}every {every_s:g}: give 1 to 86400 seconds, or 0 for never")
    return Options(
        tuple(_path(f"{flag}path", text) for text in paths),
        tuple(nics),
        expect_gpus,
        tuple(_executable(f"{flag}own", text) for text in own),
        timeout_s,
        every_s,
        tuple(_limit(f"{flag}limit", text) for text in limits),
    )


def split_path(text: str) -> tuple[str, bool]:
    """Return the path, and whether it is also written."""
    return (text.removesuffix(_ONLY_READ), not text.endswith(_ONLY_READ))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `to_argv` returns."""
    for flag in ("--path", "--nic", "--own", "--set-limit"):
        parser.add_argument(flag, action="append", default=[])
    parser.add_argument("--expect-gpus", type=int)
    parser.add_argument("--timeout", type=float)


def from_arguments(args: argparse.Namespace) -> Options:
    """Return the options. Raises: UsageError, but not for a missing executable: that is a finding."""
    found = read_options("--", args.path, args.nic, args.expect_gpus, (), args.timeout, limits=args.set_limit)
    return found._replace(own=tuple(args.own))


def _path(flag: str, text: str) -> str:
    path, is_written = split_path(text)
    if not path:
        raise UsageError(f"{flag} {text!r}: name a directory or a file")
    return os.path.abspath(path) + ("" if is_written else _ONLY_READ)


def _executable(flag: str, text: str) -> str:
    import shutil  # costs time, and most users name none

    found = shutil.which(text)
    if found is None:
        raise UsageError(f"{flag} {text!r}: there is no such executable; give its path and chmod +x it")
    return os.path.abspath(found)


def _limit(flag: str, text: str) -> tuple[str, float]:
    name, _, number = text.partition("=")
    if name not in Limits._fields:
        raise UsageError(f"{flag} {text[:80]!r}: unknown limit; known are {', '.join(Limits._fields)}")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise UsageError(f"{flag} {text[:80]!r}: give {name}=NUMBER, 0 or more")
    return name, value
