"""bootseer.toml: settings that are flags as well. The command line wins, then BOOTSEER_* variables, then the file.

    [setup]     commands, inputs, targets, variables, timeout_s, wait_s, max_age_s, key, ways
    [env]       store
    [caches]    keep, dirs (a table: name = "folder")

Each key stands for one flag; TABLES is the whole mapping. A flag that can stand in a file has a default by which
it is seen that it was not given: None, an empty list, False. Paths are meant from the working directory, as in
flags.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

from bootseer.errors import ConfigError
from launcher.flags import FLAGS

NAME = "bootseer.toml"
MOST_BYTES = 1 << 20


class Kind(Enum):
    """What a key may hold."""

    TEXT = "a text"
    TEXTS = "a list of texts"
    SECONDS = "a number of seconds"
    SWITCH = "true or false"
    FOLDERS = 'a table of folders: name = "folder"'


class Setting(NamedTuple):
    """A key of a table."""

    flag: str
    kind: Kind
    off: str = ""  # of a switch: the flag that stands for false and wins over the file


TABLES: Mapping[str, Mapping[str, Setting]] = {
    "setup": {
        "commands": Setting("--setup", Kind.TEXTS),
        "inputs": Setting("--setup-input", Kind.TEXTS),
        "targets": Setting("--setup-target", Kind.TEXTS),
        "variables": Setting("--setup-variable", Kind.TEXTS),
        "timeout_s": Setting("--setup-timeout", Kind.SECONDS),
        "wait_s": Setting("--setup-wait", Kind.SECONDS),
        "max_age_s": Setting("--env-max-age", Kind.SECONDS),
        "key": Setting("--env-key", Kind.TEXT),
        "ways": Setting("--env-way", Kind.TEXTS),
    },
    "env": {"store": Setting("--env-store", Kind.TEXT)},
    "caches": {
        "keep": Setting("--keep-caches", Kind.SWITCH, off="--no-keep-caches"),
        "dirs": Setting("--cache-dir", Kind.FOLDERS),
    },
}


def apply_config(args: argparse.Namespace, environ: Mapping[str, str]) -> str:
    """Fills in what neither the command line nor a variable says.

    Returns: a line that says which file was read; "" if there is none. Raises: ConfigError.
    """
    path = args.config or NAME
    data = _read_named(path) if args.config else _read_unnamed()
    if data is None:
        return ""
    fill(args, read_settings(data, path), environ)
    return f"settings of {path}"


def _read_named(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"--config {path}: there is no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def _read_unnamed() -> bytes | None:
    """./bootseer.toml, unless somebody else could have written it; None if there is none."""
    from bootseer.trust.unnamed import read_unnamed

    return read_unnamed(os.path.join(os.getcwd(), NAME), NAME, most_bytes=MOST_BYTES)


def read_settings(data: bytes, path: str) -> dict[str, Any]:
    """PURE: values by flag. Raises: ConfigError for what is no TOML, an unknown name, a wrong kind of value."""
    import tomllib

    if len(data) > MOST_BYTES:
        raise ConfigError(f"{path}: larger than {MOST_BYTES} bytes: is it the right file?")
    try:
        tables = tomllib.loads(data.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: is no TOML: {error}") from None
    found: dict[str, Any] = {}
    for table, keys in tables.items():
        known = TABLES.get(table)
        if known is None:
            raise ConfigError(f"{path}: unknown table [{table}]; there are {_names(TABLES)}")
        if not isinstance(keys, dict):
            raise ConfigError(f"{path}: {table} is a table: write [{table}]")
        for key, value in keys.items():
            setting = known.get(key)
            if setting is None:
                raise ConfigError(f"{path}: unknown key {key!r} in [{table}]; there are {_names(known)}")
            found[setting.flag] = _check(setting.kind, value, f"{path}: [{table}] {key}")
    return found


def fill(args: argparse.Namespace, settings: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """PURE: puts the settings into a parsed command line where that says nothing."""
    flags = {flag.names[0]: flag for flag in FLAGS}
    switches = {setting.flag: setting.off for keys in TABLES.values() for setting in keys.values() if setting.off}
    for name, value in settings.items():
        flag = flags[name]
        is_given = getattr(args, flag.dest) not in (None, [], False) or flag.env in environ
        off = switches.get(name)
        if is_given or (off and getattr(args, flags[off].dest)):
            continue
        setattr(args, flag.dest, value)


def _check(kind: Kind, value: Any, where: str) -> Any:
    if kind is Kind.TEXT and isinstance(value, str):
        return value
    if kind is Kind.TEXTS and isinstance(value, list) and all(isinstance(each, str) for each in value):
        return value
    if kind is Kind.SECONDS and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind is Kind.SWITCH and isinstance(value, bool):
        return value
    if kind is Kind.FOLDERS and isinstance(value, dict) and all(isinstance(each, str) for each in value.values()):
        return [f"{name}={folder}" for name, folder in value.items()]
    raise ConfigError(f"{where}: has to be {kind.value}")


def _names(known: Mapping[str, object]) -> str:
    return ", ".join(known)
