"""Shared options and formats of the commands of `bootseer env`: bootrun's flags, times as text."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bootseer.counted import format_time

if TYPE_CHECKING:
    from bootseer.env.commands.spec import Flags
    from bootseer.env.key.keying import Keyed

Setup = Annotated[
    list[str] | None,
    typer.Option("--setup", metavar="CMD", help="Set-up command, one line for /bin/sh; repeatable, in order"),
]
SetupInput = Annotated[
    list[str] | None,
    typer.Option("--setup-input", metavar="PATH", help="File or directory that determines the result; repeatable"),
]
SetupTarget = Annotated[
    list[str] | None,
    typer.Option(
        "--setup-target",
        metavar="DIR",
        help="Directory that set-up changes (default: the interpreter's environment); repeatable",
    ),
]
SetupVariable = Annotated[
    list[str] | None,
    typer.Option(
        "--setup-variable", metavar="NAME", help="Further variable that determines the result; repeatable"
    ),
]
SetupTimeout = Annotated[
    float | None,
    typer.Option("--setup-timeout", metavar="S", help="Seconds for all commands together (default: 3600)"),
]
SetupWait = Annotated[
    float | None,
    typer.Option("--setup-wait", metavar="S", help="Seconds to wait for another builder (default: 600)"),
]
Store = Annotated[
    str, typer.Option("--env-store", metavar="URL", help="Environment store (default: BOOTSEER_ENV_STORE)")
]
EnvKey = Annotated[str, typer.Option("--env-key", metavar="TEXT", help="Text that is part of the key")]
MaxAge = Annotated[
    float | None,
    typer.Option(
        "--env-max-age",
        metavar="S",
        help=("Seconds until the environment expires (default: 7 days if a requirement is not pinned)"),
    ),
]
Python = Annotated[
    str,
    typer.Option(
        "--python",
        metavar="FILE",
        help="Interpreter of the ranks, or none (default: PYTHON_EXEC, or this one)",
    ),
]
Config = Annotated[
    str,
    typer.Option("--config", metavar="FILE", help="File with tables [setup] and [env] (default: ./bootseer.toml)"),
]
URL = "hdfs://namenode/environments"  # of examples
SETUP = '--setup "pip install -r requirements.txt" --setup-input requirements.txt'


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
    """Return the given options as Flags."""
    from bootseer.env.commands.spec import Flags

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
    """Return the URL of the flag, the variable or the file; "" if none is set."""
    from bootseer.env.commands.spec import Flags, find_store

    return find_store(Flags(store=store, config=config), os.environ, os.getcwd())


def format_expiry(expires_s: float | None, now_s: float) -> str:
    return "never expires" if expires_s is None else f"expires in {format_time(max(0.0, expires_s - now_s))}"


def facts_of(keyed: Keyed) -> dict[str, Any]:
    """Return facts for JSON that are not part of the key."""
    return {
        "targets": keyed.targets,
        "unpinned": keyed.unpinned,
        "notes": keyed.notes,
        "max_age_s": keyed.max_age_s,
        "editables": keyed.editables,
    }
