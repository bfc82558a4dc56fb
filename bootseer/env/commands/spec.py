"""The set-up spec of `bootseer env`, from the flags that bootrun has too, its variables, and bootseer.toml.

The command line overrides BOOTSEER_ variables, and these override the file. So the key of a command is that of a
start of bootrun with the same flags in the same directory.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bootseer.env.spec import SetupSpec
from bootseer.errors import ConfigError, UsageError
from bootseer.job_file import read_job_file

NO_PYTHON = "none"


class Flags(NamedTuple):
    """The flags as given; None, "" or () where they are not."""

    commands: Sequence[str] = ()
    inputs: Sequence[str] = ()
    targets: Sequence[str] = ()
    variables: Sequence[str] = ()
    store: str = ""
    salt: str = ""
    max_age_s: float | None = None
    timeout_s: float | None = None
    wait_s: float | None = None
    python: str = ""
    config: str = ""  # path of a file like bootseer.toml


def make_spec(flags: Flags, environ: Mapping[str, str], cwd: str) -> SetupSpec:
    """Make the spec. Raises: UsageError; ConfigError for invalid values."""
    table = _read_config(flags, environ, cwd)

    def many(name: str, given: Sequence[str]) -> tuple[str, ...]:
        if given:
            return tuple(given)
        value = environ.get(_variable(name), "")
        if value:
            # A command may contain commas.
            return (value,) if name == "--setup" else tuple(_comma_list(value))
        return tuple(table.get(name, ()))

    def one(name: str, given: str) -> str:
        return given or environ.get(_variable(name), "") or str(table.get(name, ""))

    def seconds(name: str, given: float | None) -> float | None:
        if given is not None:
            return given
        value = environ.get(_variable(name), "")
        return _seconds(value, _variable(name)) if value else table.get(name)

    timeout_s, wait_s = seconds("--setup-timeout", flags.timeout_s), seconds("--setup-wait", flags.wait_s)
    return SetupSpec(
        commands=many("--setup", flags.commands),
        inputs=tuple(os.path.join(cwd, path) for path in many("--setup-input", flags.inputs)),
        targets=tuple(os.path.join(cwd, path) for path in many("--setup-target", flags.targets)),
        variables=many("--setup-variable", flags.variables),
        store=absolute_store(one("--env-store", flags.store), cwd),
        salt=one("--env-key", flags.salt),
        max_age_s=seconds("--env-max-age", flags.max_age_s),
        timeout_s=3600.0 if timeout_s is None else timeout_s,
        wait_s=600.0 if wait_s is None else wait_s,
        python=find_python(flags.python, environ, cwd),
        cwd=cwd,
    )


def find_store(flags: Flags, environ: Mapping[str, str], cwd: str) -> str:
    """Return the URL of the environment store, "" if none is named. Raises: ConfigError."""
    given = flags.store or environ.get(_variable("--env-store"), "")
    return absolute_store(given or str(_read_config(flags, environ, cwd).get("--env-store", "")), cwd)


def has_commands(flags: Flags, environ: Mapping[str, str], cwd: str) -> bool:
    """Return whether set-up commands are named anywhere."""
    given = flags.commands or environ.get(_variable("--setup"), "")
    return bool(given or _read_config(flags, environ, cwd).get("--setup"))


def absolute_store(url: str, cwd: str) -> str:
    """Make a path absolute, relative to the working directory; leave URLs unchanged."""
    if not url or "://" in url or "::" in url:
        return url
    return os.path.normpath(os.path.join(cwd, url))


def find_python(name: str, environ: Mapping[str, str], cwd: str) -> str:
    """Return the absolute path of the ranks' interpreter; ConfigError if there is none.

    Links are not resolved: they lead out of a virtual environment.
    """
    name = name or environ.get("PYTHON_EXEC") or sys.executable
    if name == NO_PYTHON:
        return ""
    if "/" in name:
        return os.path.normpath(os.path.join(cwd, name))
    found = shutil.which(name, path=environ.get("PATH"))
    if found is None:
        raise ConfigError(
            f"{name}: there is no such program on PATH; name the ranks' interpreter with --python PATH"
        )
    return os.path.join(cwd, found)


def _read_config(flags: Flags, environ: Mapping[str, str], cwd: str) -> dict[str, Any]:
    """Read values by flag; those of [setup] and [env] are used here. Raises: ConfigError."""
    return read_job_file(flags.config or environ.get(_variable("--config"), ""), cwd) or {}


def _variable(flag: str) -> str:
    return "BOOTSEER_" + flag[2:].replace("-", "_").upper()


def _seconds(text: str, name: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise UsageError(f"{name}={text[:80]!r}: must be a number of seconds")
    return found


def _comma_list(value: str) -> list[str]:
    """Parse a list as bootrun does: `a,b`; a doubled comma is a comma."""
    return [item.replace("\0", ",") for item in value.replace(",,", "\0").split(",")]
