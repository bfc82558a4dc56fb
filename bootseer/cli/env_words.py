"""What the commands of `bootseer env` share on the command line: bootrun's flags, times for people."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from bootseer.env.commands_spec import Flags
    from bootseer.env.keying import Keyed

Setup = Annotated[
    list[str] | None,
    typer.Option(
        "--setup", metavar="CMD", help="a set-up command, one line for /bin/sh; can be repeated, in order"
    ),
]
SetupInput = Annotated[
    list[str] | None,
    typer.Option(
        "--setup-input", metavar="PATH", help="a file or folder that decides the result; can be repeated"
    ),
]
SetupTarget = Annotated[
    list[str] | None,
    typer.Option(
        "--setup-target",
        metavar="DIR",
        help="a folder that set-up changes (default: the interpreter's own environment); can be repeated",
    ),
]
SetupVariable = Annotated[
    list[str] | None,
    typer.Option(
        "--setup-variable", metavar="NAME", help="a further variable that decides the result; can be repeated"
    ),
]
SetupTimeout = Annotated[
    float | None, typer.Option("--setup-timeout", metavar="S", help="of all commands together (default 3600)")
]
SetupWait = Annotated[
    float | None, typer.Option("--setup-wait", metavar="S", help="for another builder (default 600)")
]
Store = Annotated[
    str, typer.Option("--env-store", metavar="URL", help="the environment store (default BOOTSEER_ENV_STORE)")
]
EnvKey = Annotated[str, typer.Option("--env-key", metavar="TEXT", help="goes into the key as it is")]
MaxAge = Annotated[
    float | None,
    typer.Option(
        "--env-max-age", metavar="S", help="seconds until it expires (default 7 days if something is not pinned)"
    ),
]
Python = Annotated[
    str,
    typer.Option(
        "--python",
        metavar="FILE",
        help="the ranks' interpreter; none: there is none (default PYTHON_EXEC, or this)",
    ),
]
Config = Annotated[
    str, typer.Option("--config", metavar="FILE", help="tables [setup] and [env] (default ./bootseer.toml)")
]
URL = "hdfs://namenode/environments"  # of examples
SETUP = '--setup "pip install -r requirements.txt" --setup-input requirements.txt'
_UNITS = (("days", 86_400.0), ("h", 3600.0), ("min", 60.0))


def to_flags(
    setup: list[str] | None,
    setup_input: list[str] | None,
    setup_target: list[str] | None,
    setup_variable: list[str] | None,
    store: str,
    env_key: str,
    max_age: float | None,
    python: str,
    config: str,
    *,
    timeout_s: float | None = None,
    wait_s: float | None = None,
) -> Flags:
    """What was given."""
    from bootseer.env.commands_spec import Flags

    return Flags(
        commands=setup or (),
        inputs=setup_input or (),
        targets=setup_target or (),
        variables=setup_variable or (),
        store=store,
        salt=env_key,
        max_age_s=max_age,
        timeout_s=timeout_s,
        wait_s=wait_s,
        python=python,
        config=config,
    )


def store_url(store: str, config: str = "") -> str:
    """Of the flag, the variable or the file; "" where nobody names one."""
    from bootseer.env.commands_spec import Flags, find_store

    return find_store(Flags(store=store, config=config), os.environ, os.getcwd())


def format_time(seconds: float) -> str:
    """12 s, 3.4 h, 7 days."""
    for name, unit_s in _UNITS:
        if abs(seconds) >= unit_s:
            return f"{seconds / unit_s:.3g} {name}"
    return f"{seconds:.3g} s"


def format_expiry(expires_s: float | None, now_s: float) -> str:
    """When a snapshot is of no use any more."""
    return "never expires" if expires_s is None else f"expires in {format_time(max(0.0, expires_s - now_s))}"


def facts_of(keyed: Keyed) -> dict[str, Any]:
    """For JSON: what a key cannot say."""
    return {
        "targets": keyed.targets,
        "unpinned": keyed.unpinned,
        "notes": keyed.notes,
        "max_age_s": keyed.max_age_s,
        "editables": keyed.editables,
    }
